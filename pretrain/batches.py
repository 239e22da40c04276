"""The micro-batches of a rank, in order, from any step on.

Micro-batch number `step * micro_batches + slot` holds the same examples whatever the number of ranks: ranks and
accumulation only decide who computes it. Slot s belongs to rank s modulo the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data_prep.triples import TripleStream
from pretrain.stopping import outlive_signals

Batch = dict[str, Tensor]
Arrays = dict[str, np.ndarray]
EXAMPLES_TOGETHER = 320  # built and sent together: most of the cost of either is by call


@dataclass(frozen=True)
class Share:
    """Which micro-batches of a step a rank computes."""

    micro_batches: int
    rank: int
    world_size: int

    def numbers(self, steps: Iterable[int]) -> Iterator[int]:
        """Numbers of this rank's micro-batches over `steps`, in order."""
        for step in steps:
            for slot in range(self.rank, self.micro_batches, self.world_size):
                yield step * self.micro_batches + slot


def load_steps(
    stream: TripleStream, share: Share, steps: range, *, triples: int, workers: int
) -> Iterator[list[Batch]]:
    """Yields for every step the list of this rank's micro-batches (integers as int64), prefetched by `workers`."""
    loader = DataLoader(
        _MicroBatches(stream, triples),
        batch_size=None,
        sampler=_Groups(share, steps, max(1, EXAMPLES_TOGETHER // triples)),
        collate_fn=_unchanged,
        num_workers=workers,
        worker_init_fn=outlive_signals,
        multiprocessing_context="fork" if workers else None,
    )
    batches = (batch for arrays in loader for batch in _unstack(arrays))
    per_step = len(list(share.numbers([0])))
    for _ in steps:
        yield list(islice(batches, per_step))


class _MicroBatches(Dataset[Arrays]):
    """An item is a list of numbers; what it gives has the micro-batches of these on the first axis.

    Arrays go through a pipe in one piece; every tensor would take a shared-memory file and a connection of its own.
    """

    def __init__(self, stream: TripleStream, size: int) -> None:
        self.stream = stream
        self.size = size

    def __getitem__(self, numbers: list[int]) -> Arrays:
        return {"number": np.array(numbers)} | self.stream.micro_batches(numbers, self.size)


class _Groups(torch.utils.data.Sampler[list[int]]):
    """The numbers in lists of `size`, without a list of all steps in memory."""

    def __init__(self, share: Share, steps: range, size: int) -> None:
        self.share = share
        self.steps = steps
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        numbers = self.share.numbers(self.steps)
        while group := list(islice(numbers, self.size)):
            yield group


def _unchanged(arrays: Any) -> Any:
    return arrays


def _unstack(arrays: Arrays) -> Iterator[Batch]:
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    tensors = {name: t if t.is_floating_point() else t.long() for name, t in tensors.items()}
    for values in zip(*tensors.values(), strict=True):
        yield dict(zip(tensors, values, strict=True))
