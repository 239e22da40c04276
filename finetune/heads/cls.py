"""`cls`: BERT as published. Embedding = tanh(W_p h_[CLS] + b_p), W_p from pretraining where there is one."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from .modeling_heads import Head as BaseHead
from .modeling_heads import TaskModelConfig, dropout_of

PRETRAINED_POOLER = ("bert", "multicls-bert")  # elsewhere it is new, whatever the checkpoint says


class Head(BaseHead):
    """The published classifier of the encoder's type without its last layer.

    RoBERTa and ELECTRA were pretrained without a pooler: as in their own fine-tuning, W_p is new and dropout stands
    before it, too (ELECTRA has GELU instead of tanh). The pooler that their Hugging Face classes draw is not read. On
    a Multi-CLS checkpoint the facets are not read.
    """

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel) -> None:
        super().__init__(config, encoder)
        model_type = encoder.config.model_type
        pooler = getattr(encoder, "pooler", None) if model_type in PRETRAINED_POOLER else None
        self.dense = pooler.dense if pooler is not None else nn.Linear(self.width, self.width)
        self.dropout = nn.Dropout(dropout_of(config)) if pooler is None else nn.Identity()
        self.activation: nn.Module = nn.GELU() if model_type == "electra" else nn.Tanh()

    def forward(self, states: BaseModelOutput, attention_mask: Tensor) -> Tensor:
        """Returns the embedding, (B, D), from hidden states (B, L, D)."""
        assert states.last_hidden_state is not None
        pooled: Tensor = self.activation(self.dense(self.dropout(states.last_hidden_state[:, 0])))
        return pooled
