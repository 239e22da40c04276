"""`mean`: the mean of the last hidden states over all unpadded positions, as in most sentence encoders."""

from __future__ import annotations

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from .modeling_heads import Head as BaseHead
from .modeling_heads import span_means


class Head(BaseHead):
    """Embedding = sum_t mask_t h_t / sum_t mask_t; [CLS], facets and [SEP] count like any token."""

    def forward(self, states: BaseModelOutput, attention_mask: Tensor) -> Tensor:
        """Returns the embedding, (B, D), from hidden states (B, L, D)."""
        assert states.last_hidden_state is not None
        return span_means(states.last_hidden_state, attention_mask[:, None]).squeeze(1)
