"""`isobn`: isotropic batch normalisation (Zhou et al., AAAI 2021), right before the classifier."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from .modeling_task import PooledHead, TaskModelConfig


class IsotropicBatchNorm(nn.Module):
    """Scales each dimension down by its spread and by its correlation with the others (Eq. 5 to 7).

    rho = Sigma / (sigma sigma^T), clamped to [-1, 1]; gamma_i = sum_j rho_ij^2;
    theta_i = (sigma_i gamma_i + eps)^-beta; output_i = theta_i h_i sqrt(sum_j v_j / sum_j v_j theta_j^2), v the
    diagonal of Sigma. The root keeps the sum of the variances, which Eq. 7 as printed does not. The mean is not
    removed, and nothing is learned.

    sigma and Sigma are moving statistics in float32, whatever the autocast or the type the model is cast to; they start
    at 0 and take no gradient. In training the batch moves them first, stat += momentum * (batch - stat), and then they
    are used; all ranks of `torch.distributed` count as one batch, of their counted rows. A batch of one row has no
    spread and moves nothing. Evaluation only uses them. Before the first batch the output is the input. `momentum` is
    the paper's alpha, the weight of the new batch.
    """

    sigma: Tensor
    Sigma: Tensor

    def __init__(
        self, dim: int, momentum: float = 0.95, epsilon: float = 0.1, beta: float = 0.5
    ) -> None:
        super().__init__()
        self.momentum, self.epsilon, self.beta = momentum, epsilon, beta
        self.register_buffer("sigma", torch.zeros(dim))
        self.register_buffer("Sigma", torch.zeros(dim, dim))

    def forward(self, h_BD: Tensor, counted: bool = True) -> Tensor:
        """Returns the scaled rows, (B, D), in the input's type; rows that do not count move no statistics."""
        with torch.no_grad(), torch.autocast(h_BD.device.type, enabled=False):
            if self.training:
                # Mean first, then products of centred rows: the one-pass formula loses small variances to rounding.
                counted_BD = h_BD.float() if counted else h_BD[:0].float()
                rows = sum_over_ranks(counted_BD.new_full((), len(counted_BD)))
                centred_BD = counted_BD - sum_over_ranks(counted_BD.sum(dim=0)) / rows.clamp(min=1)
                momentum = self.momentum * (rows > 1)
                Sigma_DD = sum_over_ranks(centred_BD.T @ centred_BD) / rows.clamp(min=1)
                self.Sigma += momentum * (Sigma_DD - self.Sigma)
                self.sigma += momentum * (Sigma_DD.diagonal().clamp(min=0).sqrt() - self.sigma)
            scale_D = self.scale()
        return h_BD * scale_D.to(h_BD.dtype)

    def scale(self) -> Tensor:
        """Returns theta_bar, (D,), from the moving statistics."""
        tiny = torch.finfo(self.sigma.dtype).tiny  # a dimension that never varied: rho 0, not 0 / 0
        rho_DD = (self.Sigma / torch.outer(self.sigma, self.sigma).clamp(min=tiny)).clamp(-1.0, 1.0)
        theta_D = (self.sigma * rho_DD.square().sum(dim=1) + self.epsilon) ** -self.beta
        variances_D = self.Sigma.diagonal()
        total, scaled = variances_D.sum(), (variances_D * theta_D.square()).sum()
        return torch.where(total > 0, theta_D * (total / scaled.clamp(min=tiny)).sqrt(), 1.0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "IsotropicBatchNorm":
        """Converts the module as `nn.Module` does, but leaves the statistics in float32."""
        return super()._apply(lambda statistic: fn(statistic).float(), recurse)


class IsoBnHead(PooledHead):
    """Multiplies the embedding of its pooling by theta_bar."""

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel) -> None:
        super().__init__(config, encoder)
        self.norm = IsotropicBatchNorm(self.width, **config.head_options)

    def forward(self, hidden: Tensor, mask: Tensor, layers: Sequence[Tensor]) -> Tensor:
        """Returns the normalised embedding, (B, E)."""
        return self.norm(super().forward(hidden, mask, layers), self.counted)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Returns the sum over all ranks."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(values)
    return values


HEADS = {"isobn": IsoBnHead}
