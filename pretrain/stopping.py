"""Stops a run before its end: after a signal or the time limit, all ranks finish the step, save and exit."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, parent_process
from types import FrameType

import torch
from torch import Tensor

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
TIME_LIMIT = 1  # a code beside the numbers of the signals
REASONS = {TIME_LIMIT: "run.time_limit"} | {int(number): number.name for number in SIGNALS}


class StopRequest:
    """A request to leave before the end, by a signal while `listening`, or `time_limit` minutes from now."""

    def __init__(self, time_limit: float | None = None) -> None:
        self._deadline = None if time_limit is None else time.monotonic() + 60 * time_limit
        self._code = 0
        self._counts: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Turns signals into requests inside the block. Outside it they end the process: nothing can be saved."""
        before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def votes(self) -> list[float]:
        """Returns this rank's votes to leave, one number for each of `REASONS`; the ranks sum them in each step."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._code = self._code or TIME_LIMIT
        return [float(code == self._code) for code in REASONS]

    def take_result(self, counts: Tensor) -> None:
        """Takes the sums of all ranks' `votes`, without waiting for the device."""
        self._counts = counts
        if counts.is_cuda:
            self._counts = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._counts.copy_(counts, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def reason(self) -> str:
        """Returns the reason to leave now, or ""; all ranks get the same answer, that of the last `take_result`."""
        if self._copied is not None:
            self._copied.synchronize()  # the step after it has ended, so this does not wait
        if self._counts is None:
            return ""
        counts = self._counts.numpy()
        reasons = zip(REASONS.values(), counts, strict=True)
        return next((reason for reason, count in reasons if count), "")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._code:  # a launcher passes on signals that its ranks may have received already
            self._code = number
            text = f"{signal.Signals(number).name}: saving after this step; kill -9 ends at once\n"
            with suppress(OSError):  # a closed stderr must not prevent the save
                os.write(2, text.encode())  # print is not safe here


def outlive_signals(_worker: int) -> None:
    """Prepares a loader process: it ignores the signals of a process group, and ends when its rank is gone.

    The last step needs its data. torch itself looks for the rank only every five seconds, and then waits until
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
