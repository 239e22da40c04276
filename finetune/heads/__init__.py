"""The heads: ways to read a label off an encoder. A new head is one file here and one line in this table."""

from __future__ import annotations

HEADS = {
    "cls": "linear layer on BERT's tanh-pooled [CLS], on any BERT-family checkpoint",
    "mean": "linear layer on the mean of the last hidden states",
    "multicls": "linear layer on the re-parameterised sum of the facets, on Multi-CLS checkpoints",
    "multicls_sum": "the same without re-parameterisation: the plain sum (ablation)",
    "isobn": "isotropic batch normalisation of the pooled embedding",
    "batchnorm": "batch normalisation of the pooled embedding (baseline of isobn)",
    "hire": "HIRE: all layers read by GRUs, and fused",
    "cln": "conditional layer normalisation: one encoder for several tasks",
    "probe": "logistic or ridge regression on the frozen embedding, by scikit-learn",
    "setfit": "SetFit: contrastive pairs, then logistic regression; needs the package setfit",
}
FITTED_HEADS = ("probe", "setfit")  # fitted by a library: they read no `train` settings and leave no model to save
