"""Loads the micro-batches of a rank, in order, from any step on.

Micro-batch number `step * per_step + slot` holds the same examples for any number of ranks: ranks and accumulation only
decide which rank computes it. Slot s belongs to rank s modulo the number of ranks.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing import connection, forkserver
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from data_prep.examples import IGNORE_INDEX, ExampleStream
from multicls.distributed import uses_cuda
from multicls.errors import print_stderr
from pretrain.stopping import SIGNALS, outlive_signals

PACKED_MULTIPLE = (
    1024  # of tokens that the encoder computes without padding, so that few shapes occur
)
EXAMPLES_TOGETHER = 320  # examples that a worker builds in one call: most of the cost is per call


@dataclass(frozen=True)
class MicroBatch:
    """The examples of one forward pass.

    Attributes:
        number: Its number in the run.
        windows: (n, 3) int64, the fields of each example's `data_prep.windows.Window`.
        inputs: Tensors that the model takes; integers as int64.
        counts: Numbers of terms of the losses "mlm", "tfidf" and "so", and of "examples", "sequences" and unpadded
            "tokens". Known without reading the device.
    """

    number: int
    windows: np.ndarray
    inputs: dict[str, Tensor]
    counts: dict[str, int]

    def to(self, device: torch.device) -> Self:
        """Returns the micro-batch with its inputs on `device`; the copy from pinned memory does not wait."""
        inputs = {name: t.to(device, non_blocking=True) for name, t in self.inputs.items()}
        return replace(self, inputs=inputs)


def start_loader_server() -> None:
    """Starts the process that the loader processes are forked from, so that it imports torch meanwhile.

    The loader processes are no forks of the rank: locks that its threads (CUDA, NCCL, gloo) hold would stay locked.
    Like them, the server ignores the signals that SLURM sends to all processes: the rank saves first.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    forkserver.set_forkserver_preload(["pretrain.batches"])
    forkserver.ensure_running()
    for number, handler in before.items():
        signal.signal(number, handler)


def load_steps(
    stream: ExampleStream,
    steps: range,
    *,
    size: int,
    per_step: int,
    workers: int,
    rank: int = 0,
    ranks: int = 1,
    unpad: bool = False,
) -> Generator[list[MicroBatch], None, None]:
    """Yields this rank's micro-batches of each step, prefetched by worker processes.

    Args:
        size: Examples of a micro-batch.
        per_step: Micro-batches of a step, over all ranks: a multiple of their number.
        unpad: True adds `real_positions` and `sequence_starts` of `MultiClsModel` to the inputs.
    """
    numbers = range(steps.start * per_step + rank, steps.stop * per_step, ranks)
    calls = BatchSampler(numbers, max(1, EXAMPLES_TOGETHER // size), drop_last=False)
    # A call's arrays go through a pipe in one piece; tensors would take a shared-memory file and a connection each.
    loader: DataLoader[Any] = DataLoader(
        range(numbers.stop),  # type: ignore[arg-type] # its item b is b: `collate_fn` gets the numbers
        batch_sampler=calls,
        collate_fn=partial(stream.micro_batches, size=size),
        num_workers=workers,
        worker_init_fn=outlive_signals,
        multiprocessing_context="forkserver" if workers else None,
    )
    loaded, finished = iter(loader), threading.Event()
    if workers:
        threading.Thread(target=_end_with_loaders, args=(finished,), daemon=True).start()
    batches = (
        batch for call in zip(calls, loaded, strict=True) for batch in _unstack(*call, unpad)
    )
    try:
        for _ in steps:
            yield list(islice(batches, per_step // ranks))
    finally:
        finished.set()


def _end_with_loaders(finished: threading.Event) -> None:
    """Ends this rank when a loader process ends early: it may have sent half a batch, and nothing else notices."""
    connection.wait([process.sentinel for process in multiprocessing.active_children()])
    if not finished.is_set():
        print_stderr("error: a DataLoader worker was killed; a frequent cause is too little memory")
        os._exit(1)


def _unstack(
    numbers: list[int], arrays: dict[str, np.ndarray], unpad: bool
) -> Iterator[MicroBatch]:
    """Yields the micro-batches of one call, in pinned memory where there is a GPU."""
    windows, on_gpu = arrays.pop("windows"), uses_cuda()
    for i, number in enumerate(numbers):
        found = {name: array[i] for name, array in arrays.items()}
        mask = found["attention_mask"]
        lengths = mask.sum(axis=1, dtype=np.int64)
        found["masked_positions"] = np.flatnonzero(found["labels"] != IGNORE_INDEX)
        if unpad:
            found["real_positions"], found["sequence_starts"] = pack(mask)
        facets = mask.shape[1] - found["tfidf_labels"].shape[1]
        sequences, tokens = len(mask), int(lengths.sum())
        counts = {
            "mlm": len(found["masked_positions"]),
            "tfidf": tokens - facets * sequences,
            "so": int(np.count_nonzero(found["so_labels"] != IGNORE_INDEX)),
            "examples": len(windows[i]),
            "sequences": sequences,
            "tokens": tokens,
        }
        inputs = {name: _tensor(array, on_gpu) for name, array in found.items()}
        yield MicroBatch(number, windows[i], inputs, counts)


def pack(mask: np.ndarray, multiple: int = PACKED_MULTIPLE) -> tuple[np.ndarray, np.ndarray]:
    """Returns the positions of the tokens that the encoder computes, and where sequences of them begin.

    These are the tokens of the (B, L) mask, then so much padding that their number T is a multiple, or B * L. The
    padding makes sequences of its own: a fixed number E, each of at most L tokens, some of them empty.

    Returns:
        (T,) ascending positions in the flattened batch, the padding's after the others; (B + E + 1,) starts.
    """
    length = mask.shape[1]
    real, padding = np.flatnonzero(mask), np.flatnonzero(mask == 0)
    total = min(-(-len(real) // multiple) * multiple, mask.size)
    positions = np.concatenate([real, padding[: total - len(real)]])
    ends = np.pad(mask.sum(axis=1, dtype=np.int64).cumsum(), (1, 0))
    more = len(real) + length * np.arange(1, 1 - (-multiple // length))
    return positions, np.concatenate([ends, np.minimum(more, total)])


def _tensor(array: np.ndarray, pinned: bool) -> Tensor:
    tensor = torch.from_numpy(array)
    if not tensor.is_floating_point():
        tensor = tensor.long()
    return tensor.pin_memory() if pinned else tensor
