"""`isobn`: isotropic batch normalisation (Zhou et al., AAAI 2021), right before the classifier; and `batchnorm`."""

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
    spread and moves nothing. Evaluation only uses them. Before the first batch the output is the input.

    The arguments are D; alpha, the weight of the new batch; eps; and beta, the strength: 0.25, 0.5 or 1 in the paper.
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
                centred_BD, _, rows = centred_over_ranks(h_BD.float(), counted)
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


class BatchNorm(nn.BatchNorm1d):
    """`nn.BatchNorm1d` (Ioffe and Szegedy, 2015) over the counted rows of all ranks, in float32.

    A batch of one row is normalised as in evaluation.
    """

    def forward(self, input: Tensor, counted: bool = True) -> Tensor:
        """Returns the normalised rows, (B, D), in the input's type."""
        assert self.running_mean is not None and self.running_var is not None
        with torch.autocast(input.device.type, enabled=False):
            h_BD, mean_D, var_D = input.float(), self.running_mean, self.running_var
            if self.training:
                centred_BD, batch_mean_D, rows = centred_over_ranks(h_BD, counted)
                if rows > 1:
                    mean_D, total_D = batch_mean_D, sum_over_ranks(centred_BD.square().sum(dim=0))
                    var_D, unbiased_D = total_D / rows, total_D / (rows - 1)
                    moving = ((self.running_mean, mean_D), (self.running_var, unbiased_D))
                    for statistic, batch in moving:
                        statistic.lerp_(batch.detach().to(statistic.dtype), self.momentum or 0.0)
            normed_BD = (h_BD - mean_D) * torch.rsqrt(var_D + self.eps)
            return (normed_BD * self.weight + self.bias).to(input.dtype)


class NormHead(PooledHead):
    """Multiplies the embedding of its pooling by theta_bar, or for `batchnorm` normalises it."""

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel) -> None:
        super().__init__(config, encoder)
        kind = BatchNorm if config.head == "batchnorm" else IsotropicBatchNorm
        self.norm = kind(self.width, **config.head_options)

    def forward(self, hidden: Tensor, mask: Tensor, layers: Sequence[Tensor]) -> Tensor:
        """Returns the normalised embedding, (B, E)."""
        return self.norm(super().forward(hidden, mask, layers), self.counted)


def centred_over_ranks(h_BD: Tensor, counted: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the rows that count less their mean over all ranks, the mean (D,), and the number of rows."""
    h_BD = h_BD if counted else h_BD[:0]
    sums = sum_over_ranks(torch.cat([h_BD.sum(dim=0), h_BD.new_full((1,), len(h_BD))]))
    mean_D = sums[:-1] / sums[-1].clamp(min=1)
    return h_BD - mean_D, mean_D, sums[-1].detach()


def sum_over_ranks(values: Tensor) -> Tensor:
    """Returns the sum over all ranks; in backward, their gradients add up, too."""
    if not (dist.is_available() and dist.is_initialized()):
        return values
    from torch.distributed.nn.functional import all_reduce

    return all_reduce(values)


HEADS = {"isobn": NormHead, "batchnorm": NormHead}
