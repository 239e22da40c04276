"""`cls`, `mean`, `multicls` and `multicls_sum`: the plain ways to pool an encoder's hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from .modeling_task import (
    Head,
    IncompatibleHead,
    TaskModelConfig,
    base_encoder,
    dropout_of,
    span_means,
)

ACTIVATIONS = {"electra": nn.GELU, "distilbert": nn.ReLU}  # as published; others have tanh


class ClsHead(Head):
    """The published classifier of the encoder's type without its last layer: act(W_p h_[CLS] + b_p).

    BERT takes W_p from pretraining. RoBERTa and ELECTRA were pretrained without a pooler: as in their own fine-tuning,
    W_p is new and dropout stands before it, too. Other encoders do as RoBERTa; DistilBERT has ReLU and no such dropout.
    On a Multi-CLS checkpoint the facets are not read.
    """

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel) -> None:
        super().__init__(config, encoder)
        base = base_encoder(encoder)
        kind = base.config.model_type
        pooler = getattr(base, "pooler", None) if kind == "bert" else None
        self.dense = pooler.dense if pooler is not None else nn.Linear(self.width, self.width)
        drops = pooler is None and kind != "distilbert"
        self.dropout = nn.Dropout(dropout_of(config)) if drops else nn.Identity()
        self.activation: nn.Module = ACTIVATIONS.get(kind, nn.Tanh)()

    def forward(self, states: BaseModelOutput, attention_mask: Tensor) -> Tensor:
        """Returns the embedding, (B, D), from hidden states (B, L, D)."""
        assert states.last_hidden_state is not None
        pooled: Tensor = self.activation(self.dense(self.dropout(states.last_hidden_state[:, 0])))
        return pooled


class MeanHead(Head):
    """The mean over all unpadded positions: sum_t mask_t h_t / sum_t mask_t; special tokens count."""

    def forward(self, states: BaseModelOutput, attention_mask: Tensor) -> Tensor:
        """Returns the embedding, (B, D), from hidden states (B, L, D)."""
        assert states.last_hidden_state is not None
        return span_means(states.last_hidden_state, attention_mask[:, None]).squeeze(1)


class MulticlsHead(Head):
    """The re-parameterised sum of the facets (Multi-CLS BERT, section 2.6).

    Embedding = sum_k (W_O,k - mean_k' W_O,k') h_k + b_k: W_O,k from pretraining and trained on, b_k from 0; no GELU, no
    LayerNorm. Centring keeps the facets from learning one and the same weight matrix. A single facet has nothing to be
    centred on: W_O,1 h_1 + b_1.
    """

    centred = True
    dense: nn.Module

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel) -> None:
        super().__init__(config, encoder)
        if not getattr(encoder.config, "num_facets", 0):
            raise IncompatibleHead(
                "it is a checkpoint without facets to pool. Use mean or cls, or pretrain it with pretrain/run.py first."
            )
        self.facet_slice: slice = encoder.config.facet_slice
        self.dense = encoder.get_submodule("facet_head.dense")
        self.bias = nn.Parameter(torch.zeros(encoder.config.num_facets, self.width))

    def forward(self, states: BaseModelOutput, attention_mask: Tensor) -> Tensor:
        """Returns the embedding, (B, D)."""
        assert states.last_hidden_state is not None
        facets_BKD = states.last_hidden_state[:, self.facet_slice]
        centred = self.centred and facets_BKD.shape[1] > 1
        parts_BKD: Tensor = self.dense(facets_BKD, centred=centred) + self.bias
        return parts_BKD.sum(dim=1)


class MulticlsSumHead(MulticlsHead):
    """The ablation of `multicls`: the plain sum, without centring; nothing keeps the facets apart."""

    centred = False


HEADS = {
    "cls": ClsHead,
    "mean": MeanHead,
    "multicls": MulticlsHead,
    "multicls_sum": MulticlsSumHead,
}
