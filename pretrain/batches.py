"""Loads the micro-batches of a rank, in order, from any step on.

Micro-batch number `step * per_step + slot` holds the same examples for any number of ranks: ranks and accumulation only
decide which rank computes it. Slot s belongs to rank s modulo the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset

from data_prep.examples import IGNORE_INDEX, ExampleStream
from pretrain.stopping import outlive_signals

EXAMPLES_TOGETHER = 320  # examples that a worker builds and sends in one call: most of the cost is per call


@dataclass(frozen=True)
class MicroBatch:
    """The examples of one forward pass.

    Attributes:
        number: Its number in the run.
        example_ids: (n, 2) int64, epoch and index of each example; on the CPU.
        inputs: Tensors that the model takes; integers as int64.
        counts: Numbers of terms of the losses "mlm", "tfidf" and "so"; "examples", "sequences", unpadded "tokens", and
            "squared_lengths", summed over sequences. Known without asking the device.
    """

    number: int
    example_ids: np.ndarray
    inputs: dict[str, Tensor]
    counts: dict[str, float]

    def to(self, device: torch.device) -> MicroBatch:
        """Returns the micro-batch with its inputs on `device`; the copy from pinned memory does not wait."""
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()}
        return MicroBatch(self.number, self.example_ids, inputs, self.counts)


@dataclass(frozen=True)
class RankSampler:
    """Numbers of the micro-batches that a rank computes."""

    per_step: int
    rank: int
    world_size: int

    def numbers(self, steps: Iterable[int]) -> Iterator[int]:
        """Yields the numbers of this rank's micro-batches over `steps`, in order."""
        for step in steps:
            for slot in range(self.rank, self.per_step, self.world_size):
                yield step * self.per_step + slot


def load_steps(
    stream: ExampleStream, sampler: RankSampler, steps: range, *, size: int, workers: int, unpad: bool = False
) -> Iterator[list[MicroBatch]]:
    """Yields the list of this rank's micro-batches of `size` examples for each step, prefetched by worker processes.

    `unpad` adds the positions of the real tokens (`token_positions`, `cu_seqlens`).
    """
    loader = DataLoader(
        _MicroBatches(stream, size, unpad),
        batch_size=None,
        sampler=BatchSampler(sampler.numbers(steps), max(1, EXAMPLES_TOGETHER // size), drop_last=False),
        collate_fn=lambda arrays: arrays,
        num_workers=workers,
        worker_init_fn=outlive_signals,
        multiprocessing_context="fork" if workers else None,
    )
    batches = (batch for arrays in loader for batch in _unstack(arrays))
    per_step = len(list(sampler.numbers([0])))
    for _ in steps:
        yield list(islice(batches, per_step))


@dataclass(frozen=True)
class _MicroBatches(Dataset[dict[str, Any]]):
    """Builds several micro-batches, given by their numbers, in one call.

    Arrays go through a pipe in one piece; each tensor would take a shared-memory file and a connection of its own.
    """

    stream: ExampleStream
    size: int
    unpad: bool

    def __getitem__(self, numbers: list[int]) -> dict[str, Any]:
        arrays = self.stream.micro_batches(numbers, self.size)
        example_ids = arrays.pop("example_ids")
        flat_labels, flat_mask = (arrays[name].reshape(len(numbers), -1) for name in ("labels", "attention_mask"))
        masked = [np.flatnonzero(labels != IGNORE_INDEX) for labels in flat_labels]
        lengths = arrays["attention_mask"].sum(axis=2, dtype=np.int64)  # (micro-batches, sequences)
        facets = arrays["input_ids"].shape[2] - arrays["tfidf_labels"].shape[2]
        sequences = lengths.shape[1]
        counts = {
            "mlm": np.array([len(positions) for positions in masked]),
            "tfidf": lengths.sum(axis=1) - facets * sequences,
            "so": (arrays["so_labels"] != IGNORE_INDEX).sum(axis=1),
            "examples": np.full(len(numbers), self.size),
            "sequences": np.full(len(numbers), sequences),
            "tokens": lengths.sum(axis=1),
            "squared_lengths": np.square(lengths).sum(axis=1),
        }
        ragged = {"masked_positions": masked}
        if self.unpad:
            ragged["token_positions"] = [np.flatnonzero(mask) for mask in flat_mask]
            arrays["cu_seqlens"] = np.cumsum(np.pad(lengths, ((0, 0), (1, 0))), axis=1)
        return {"numbers": numbers, "example_ids": example_ids, "arrays": arrays, "ragged": ragged, "counts": counts}


def _unstack(built: dict[str, Any]) -> Iterator[MicroBatch]:
    """Yields the micro-batches of one call, in pinned memory where there is a GPU."""
    ragged = built["ragged"]
    arrays = built["arrays"] | {name: np.concatenate(rows) for name, rows in ragged.items()}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    tensors = {name: t if t.is_floating_point() else t.long() for name, t in tensors.items()}
    if torch.cuda.is_available():
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    split = {name: tensors[name].split([len(row) for row in rows]) for name, rows in ragged.items()}
    for place, number in enumerate(built["numbers"]):
        inputs = {name: split.get(name, tensor)[place] for name, tensor in tensors.items()}
        counts = {name: float(values[place]) for name, values in built["counts"].items()}
        yield MicroBatch(number, built["example_ids"][place], inputs, counts)
