"""Leaving before the end: a signal or the time limit asks, all ranks agree, finish their step, save and leave."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, parent_process
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_REQUEST = 5.0  # seconds; a launcher passes on what its ranks have already got from the terminal or from SLURM
TIME_LIMIT, DRY_RUN = 1, 3  # as codes beside the numbers of the signals
REASONS = {TIME_LIMIT: "run.time_limit", DRY_RUN: "the dry run"} | {int(number): number.name for number in SIGNALS}


class Stopped(Exception):
    """The run has left before its end, asked by `reason`; `step` is that of the newest checkpoint."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"{reason} at step {step}")
        self.step, self.reason = step, reason


class StopRequest:
    """A request to leave before the end. From its creation on, signals ask instead of ending the process.

    A second signal, more than five seconds after the first, ends the process at once. After `time_limit` minutes from
    now the run leaves by itself.
    """

    def __init__(self, time_limit: float | None = None) -> None:
        self._deadline = None if time_limit is None else time.monotonic() + 60 * time_limit
        self._code = 0
        self._asked_at = 0.0
        self._requests: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        for number in SIGNALS:
            signal.signal(number, self._ask)

    def requests(self) -> list[float]:
        """Returns what this rank is asked, a number for each of `REASONS`; the ranks add theirs up in each step."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._code = self._code or TIME_LIMIT
        return [float(code == self._code) for code in REASONS]

    def note(self, requests: Tensor) -> None:
        """Takes the sums of all ranks' `requests`, without waiting for the device."""
        self._requests = requests
        if requests.is_cuda:
            self._requests = torch.empty(requests.shape, dtype=requests.dtype, pin_memory=True)
            self._requests.copy_(requests, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def agreed(self) -> str:
        """Returns why to leave now, or ""; all ranks get the same answer, that of the last `note`."""
        if self._copied is not None:
            self._copied.synchronize()  # the step after it has ended, so this does not wait
        if self._requests is None:
            return ""
        counts = self._requests.numpy()
        return next((reason for reason, count in zip(REASONS.values(), counts, strict=True) if count), "")

    def ask(self, code: int) -> None:
        """Asks for one of `REASONS`, as a signal would."""
        self._code, self._asked_at = code, time.monotonic()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not self._code:
            self._code, self._asked_at = number, time.monotonic()
            text = f"{signal.Signals(number).name}: saving after this step; once more to leave at once\n"
            with suppress(OSError):  # a closed stderr is no reason not to save
                os.write(2, text.encode())  # print is not safe here
        elif time.monotonic() - self._asked_at > SAME_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@contextmanager
def naming_a_lost_rank(step: int) -> Iterator[None]:
    """Raises a `ConnectionAbortedError` of one line instead of the error of a collective that lost another rank."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise ConnectionAbortedError(
            f"rank {dist.get_rank()} lost contact with another rank in step {step}, whose own output says why it "
            f"ended first; the same command goes on from the newest checkpoint ({str(error).split('. ')[0]})"
        ) from error


def outlive_signals(worker: int) -> None:
    """Prepares a loader process: it ignores the signals of a process group, and ends when its rank is gone.

    The last step needs its data. torch itself looks for the rank only every five seconds, and then still waits until
    somebody takes the batches that are ready, which nobody does.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
