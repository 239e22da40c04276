"""`batchnorm`: batch normalisation (Ioffe and Szegedy, 2015) of a pooled embedding, the baseline of `isobn`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from .isobn import all_ranks
from .modeling_heads import PooledHead, TaskModelConfig


class _SumOverRanks(torch.autograd.Function):
    """An all-reduce with a gradient: each rank's loss reads the sum, so the gradients of all ranks are summed."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return all_ranks(values.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return all_ranks(gradients[0].clone())


class BatchNorm(nn.BatchNorm1d):
    """`nn.BatchNorm1d` over the rows of all ranks, in float32; a batch of one row is normalised as in evaluation."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns the normalised rows, (B, D), in the input's type."""
        with torch.autocast(input.device.type, enabled=False):
            return self._normalise(input.float()).to(input.dtype)

    def _normalise(self, h_BD: Tensor) -> Tensor:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        mean_D, var_D = self.running_mean, self.running_var
        rows = int(all_ranks(torch.tensor(len(h_BD), device=h_BD.device))) if self.training else 0
        if rows > 1:
            mean_D = _SumOverRanks.apply(h_BD.sum(dim=0)) / rows
            var_D = _SumOverRanks.apply((h_BD - mean_D).square().sum(dim=0)) / rows
            self.running_mean.lerp_(mean_D.detach().to(self.running_mean.dtype), self.momentum or 0.0)
            unbiased_D = var_D.detach() * rows / (rows - 1)
            self.running_var.lerp_(unbiased_D.to(self.running_var.dtype), self.momentum or 0.0)
            self.num_batches_tracked += 1
        return (h_BD - mean_D) * torch.rsqrt(var_D + self.eps) * self.weight + self.bias


class Head(PooledHead):
    """Normalises the embedding of its pooling."""

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel) -> None:
        super().__init__(config, encoder)
        self.norm = BatchNorm(self.width)

    def forward(self, states: BaseModelOutput, attention_mask: Tensor) -> Tensor:
        """Returns the embedding, (B, E), from hidden states (B, L, D)."""
        normalised: Tensor = self.norm(super().forward(states, attention_mask))
        self.facets = None  # the mean that is subtracted belongs to no facet
        return normalised
