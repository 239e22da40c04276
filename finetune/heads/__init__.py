"""The heads: ways to read a label off an encoder. A new head is one file here and one line in this table."""

HEADS = {
    "cls": "linear layer on the pooled [CLS], as the encoder's published classifier",
    "mean": "linear layer on the mean of the last hidden states",
    "multicls": "linear layer on the re-parameterised sum of the facets, on Multi-CLS checkpoints",
    "multicls_sum": "linear layer on the plain sum of the facets (ablation of multicls)",
    "facets": "linear layer on the facet embeddings side by side, on Multi-CLS checkpoints",
    "isobn": "isotropic batch normalisation of the pooled embedding",
    "hire": "HIRE: all layers read by GRUs, and fused",
    "cln": "conditional layer normalisation: one encoder for several tasks",
}
OF_FACETS = ("multicls", "multicls_sum", "facets")  # on models with facets alone
