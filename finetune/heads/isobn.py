"""`isobn`: isotropic batch normalisation (Zhou et al., AAAI 2021) of an embedding, right before the classifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from .modeling_heads import PooledHead, TaskModelConfig


class IsotropicBatchNorm(nn.Module):
    """Scales each dimension down by its spread and by its correlation with the others (Eq. 5 to 7).

    rho = Sigma / (sigma sigma^T), clamped to [-1, 1]; gamma_i = sum_j rho_ij^2;
    theta_i = (sigma_i gamma_i + eps)^-beta; output_i = theta_i h_i sqrt(sum_j v_j / sum_j v_j theta_j^2), v the
    diagonal of Sigma. The root keeps the sum of the variances, which Eq. 7 as printed does not. The mean is not
    removed, and nothing is learned.

    sigma and Sigma are moving statistics in float32, whatever the autocast or the type the model is cast to; they start
    at 0 and take no gradient. In training the batch moves them first, stat += momentum * (batch - stat), and then they
    are used; all ranks of `torch.distributed` count as one batch. A batch of one row has no spread and
    moves nothing. Evaluation only uses them. Before the first batch the output is the input.

    Args:
        dim: D, size of the embedding.
        momentum: alpha, the weight of the new batch; 0.95 in the paper.
        epsilon: eps; 0.1 in the paper.
        beta: strength; 0.25, 0.5 or 1 in the paper.
    """

    sigma: Tensor
    Sigma: Tensor

    def __init__(self, dim: int, momentum: float = 0.95, epsilon: float = 0.1, beta: float = 0.5) -> None:
        super().__init__()
        self.momentum, self.epsilon, self.beta = momentum, epsilon, beta
        self.register_buffer("sigma", torch.zeros(dim))
        self.register_buffer("Sigma", torch.zeros(dim, dim))

    def forward(self, h_BD: Tensor) -> Tensor:
        """Returns the scaled rows, (B, D), in the input's type."""
        with torch.no_grad(), torch.autocast(h_BD.device.type, enabled=False):
            if self.training:
                self._update(h_BD.detach().float())
            scale_D = self.scale()
        return h_BD * scale_D.to(h_BD.dtype)

    def scale(self) -> Tensor:
        """Returns theta_bar, (D,), from the moving statistics."""
        tiny = torch.finfo(self.sigma.dtype).tiny  # a dimension that never varied: rho 0, not 0 / 0
        rho_DD = (self.Sigma / torch.outer(self.sigma, self.sigma).clamp(min=tiny)).clamp(-1.0, 1.0)
        theta_D = (self.sigma * rho_DD.square().sum(dim=1) + self.epsilon) ** -self.beta
        variances_D = self.Sigma.diagonal()
        total = variances_D.sum()
        scaled = (variances_D * theta_D.square()).sum()
        return torch.where(total > 0, theta_D * (total / scaled.clamp(min=tiny)).sqrt(), torch.ones_like(theta_D))

    def _update(self, h_BD: Tensor) -> None:
        sums = all_ranks(torch.cat([h_BD.sum(dim=0), h_BD.new_full((1,), len(h_BD))]))  # ranks may differ in rows
        rows = sums[-1]
        centred_BD, momentum = h_BD - sums[:-1] / rows, self.momentum * (rows > 1)
        # Mean first, then products of centred rows: the one-pass formula loses the small variances to rounding.
        Sigma_DD = all_ranks(centred_BD.T @ centred_BD) / rows
        self.Sigma += momentum * (Sigma_DD - self.Sigma)
        self.sigma += momentum * (Sigma_DD.diagonal().clamp(min=0).sqrt() - self.sigma)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> IsotropicBatchNorm:
        """Converts the module as `nn.Module` does, but leaves the statistics in float32."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.dtype != torch.float32:
                setattr(self, name, before[name].to(buffer.device))
        return self


class Head(PooledHead):
    """Multiplies the embedding of its pooling by theta_bar."""

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel) -> None:
        super().__init__(config, encoder)
        options: dict[str, Any] = config.head_options or {}
        self.norm = IsotropicBatchNorm(self.width, **options)

    def forward(self, states: BaseModelOutput, attention_mask: Tensor) -> Tensor:
        """Returns the embedding, (B, E), from hidden states (B, L, D)."""
        normalised: Tensor = self.norm(super().forward(states, attention_mask))
        if self.facets is not None:
            self.facets = self.facets * self.norm.scale()
        return normalised


def all_ranks(values: Tensor) -> Tensor:
    """Returns the sum over all ranks, without a gradient."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values
