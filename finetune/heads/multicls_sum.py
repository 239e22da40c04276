"""`multicls_sum`: the ablation of `multicls`. Embedding = sum_k W_O,k h_k + b_k, without centring."""

from __future__ import annotations

from .multicls import Head as MultiClsHead


class Head(MultiClsHead):
    """The plain sum; nothing keeps the facets apart."""

    centred = False
