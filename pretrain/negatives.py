"""MCQT's candidates from the micro-batches of all ranks (`train.gather_negatives`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _GatherRows(torch.autograd.Function):
    """Rows of all ranks, one's own first, then those of the next rank and so on around."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        rank = dist.get_rank()
        return torch.cat(parts[rank:] + parts[:rank])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        parts = gradients[0].chunk(dist.get_world_size())
        rank = dist.get_rank()
        start = len(parts) - rank  # rank 0's rows are that far behind our own
        by_rank = torch.stack(parts[start:] + parts[:start])
        dist.all_reduce(by_rank)
        return by_rank[rank]


def gather_rows(rows: Tensor) -> Tensor:
    """(n, ...) on every rank -> (ranks * n, ...), one's own rows first; all ranks call it together, with one shape.

    The gradient of a row is the sum over all ranks' losses. As DeepSpeed takes the mean over ranks, the update is that
    of the mean of all queries' losses, each against the candidates of all ranks.
    """
    gathered: Tensor = _GatherRows.apply(rows)
    return gathered
