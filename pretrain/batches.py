"""The micro-batches of a rank, in order, from any step on.

Micro-batch number `step * micro_batches + slot` holds the same examples whatever the number of ranks: ranks and
accumulation only decide who computes it. Slot s belongs to rank s modulo the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data_prep.triples import TripleStream

Batch = dict[str, Tensor]


class _MicroBatches(Dataset[Batch]):
    def __init__(self, stream: TripleStream, size: int) -> None:
        self.stream = stream
        self.size = size

    def __getitem__(self, number: int) -> Batch:
        arrays = self.stream.micro_batch(number, self.size)
        return {"number": torch.tensor(number)} | {name: torch.from_numpy(array) for name, array in arrays.items()}


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
    """Yields for every step the list of this rank's micro-batches, prefetched by `workers` processes."""
    per_step = len(list(share.numbers([0])))
    loader = DataLoader(
        _MicroBatches(stream, triples),
        batch_size=None,
        sampler=_Numbers(share, steps),
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    batches = iter(loader)
    for _ in steps:
        yield [next(batches) for _ in range(per_step)]


class _Numbers(torch.utils.data.Sampler[int]):
    """The numbers as a sampler, without a list of all steps in memory."""

    def __init__(self, share: Share, steps: range) -> None:
        self.share = share
        self.steps = steps

    def __iter__(self) -> Iterator[int]:
        return self.share.numbers(self.steps)
