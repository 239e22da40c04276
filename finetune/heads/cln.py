"""`cln`: conditional layer normalisation, one encoder for several tasks.

y = (x - mu) / sqrt(var + eps) * (gamma + gamma_t) + (beta + beta_t), gamma_t and beta_t one row a task (Eq. 4).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from .modeling_heads import PooledHead, TaskModelConfig


class ConditionalLayerNorm(nn.LayerNorm):
    """A layer normalisation whose weight and bias each task changes by vectors of its own, which start at 0."""

    task: int = 0  # of the batch

    def __init__(self, norm: nn.LayerNorm, num_tasks: int) -> None:
        super().__init__(norm.normalized_shape, eps=norm.eps)
        self.weight, self.bias = norm.weight, norm.bias  # ModernBERT's norms have no bias: then beta is 0
        self.task_weight = nn.Parameter(torch.zeros(num_tasks, *norm.normalized_shape))
        self.task_bias = nn.Parameter(torch.zeros(num_tasks, *norm.normalized_shape))

    def forward(self, input: Tensor) -> Tensor:
        """Returns the normalised input, (..., D)."""
        bias_D = self.task_bias[self.task] if self.bias is None else self.bias + self.task_bias[self.task]
        weight_D = self.weight + self.task_weight[self.task]
        return F.layer_norm(input, self.normalized_shape, weight_D, bias_D, self.eps)


class Head(PooledHead):
    """Its pooling, on an encoder whose LayerNorms (the embeddings' too) are conditional.

    With `train` "last_linear" the checkpoint's weights are frozen; gamma_t, beta_t, the classifiers and the new weights
    of the pooling learn.
    """

    norms: tuple[ConditionalLayerNorm, ...]

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel) -> None:
        if (config.head_options or {}).get("train", "full") == "last_linear":
            encoder.requires_grad_(False)
        super().__init__(config, encoder)
        # A tuple, so that they are not registered a second time.
        self.norms = tuple(_replace_norms(encoder, len(config.tasks or [])))

    def select_task(self, task: int) -> None:
        """Makes the encoder use gamma_t and beta_t of that task."""
        for norm in self.norms:
            norm.task = task


def _replace_norms(encoder: nn.Module, num_tasks: int) -> list[ConditionalLayerNorm]:
    places = [
        (parent, name, child)
        for parent in encoder.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.LayerNorm)
    ]
    replaced = [ConditionalLayerNorm(child, num_tasks) for _, _, child in places]
    for (parent, name, _), norm in zip(places, replaced, strict=True):
        setattr(parent, name, norm)
    return replaced
