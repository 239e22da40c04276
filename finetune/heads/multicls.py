"""`multicls`: Multi-CLS BERT, section 2.6. Embedding = sum_k (W_O,k - mean_k' W_O,k') h_k + b_k."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from .modeling_heads import Head as BaseHead
from .modeling_heads import TaskModelConfig


class Head(BaseHead):
    """The re-parameterised sum of the facets: W_O,k from pretraining and trained on, b_k from 0; no GELU, no LayerNorm.

    Centring keeps the facets from learning one and the same weight matrix. A single facet has nothing to be centred
    on: W_O,1 h_1 + b_1.
    """

    centred = True
    dense: nn.Module

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel) -> None:
        super().__init__(config, encoder)
        self.facet_slice: slice = encoder.config.facet_slice
        self.dense = encoder.get_submodule("facet_head.dense")
        self.bias = nn.Parameter(torch.zeros(encoder.config.num_facets, self.width))

    def forward(self, states: BaseModelOutput, attention_mask: Tensor) -> Tensor:
        """Returns the embedding, (B, D); leaves its parts in `facets`."""
        assert states.last_hidden_state is not None
        facets_BKD = states.last_hidden_state[:, self.facet_slice]
        projected_BKD: Tensor = self.dense(facets_BKD, centred=self.centred and facets_BKD.shape[1] > 1)
        parts_BKD = projected_BKD + self.bias
        self.facets = parts_BKD.detach()
        return parts_BKD.sum(dim=1)

    @classmethod
    def why_not(cls, encoder: dict[str, Any]) -> str:
        """Refuses a checkpoint without facets."""
        if encoder.get("model_type") != "multicls-bert":
            return (
                f"it is a plain {encoder.get('model_type')} checkpoint, it has no facets to pool. Use cls, or pretrain "
                "it with pretrain/run.py first."
            )
        if not encoder.get("num_facets", 5):
            return "it was pretrained with num_facets = 0 (single [CLS]): use cls."
        return ""
