"""Candidates of MCQT from the groups of all ranks (`train.gather_negatives`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _GatherRows(torch.autograd.Function):
    """Concatenates the rows of all ranks along the second axis, beginning with this rank's."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        rank = dist.get_rank()
        return torch.cat(parts[rank:] + parts[:rank], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        parts = gradients[0].chunk(dist.get_world_size(), dim=1)
        rank = dist.get_rank()
        start = len(parts) - rank  # position of rank 0's rows
        by_rank = torch.stack(parts[start:] + parts[:start])
        dist.all_reduce(by_rank)
        return by_rank[rank]


def gather_rows(rows: Tensor) -> Tensor:
    """Maps (G, n, ...) on each rank to (G, ranks * n, ...), its own rows first. All ranks call it with one shape.

    The gradient of a row is the sum over the losses of all ranks. DeepSpeed averages over ranks, so the update is that
    of the mean loss of all queries, each compared with the candidates of all ranks.
    """
    gathered: Tensor = _GatherRows.apply(rows)
    return gathered
