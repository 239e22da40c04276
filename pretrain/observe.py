"""What follows a run: `Console` writes its output, `Profile` traces steps; `pretrain.selection` picks the best one."""

import json
import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch.profiler import profile, schedule, tensorboard_trace_handler
from tqdm import tqdm

from multicls.console import print_line, progress_bar
from multicls.embeddings import EMBEDDINGS
from multicls.errors import UserError
from multicls.evaluation import verdict
from multicls.files import append_jsonl, atomic_write, read_jsonl
from pretrain.folder import RunFolder
from pretrain.verdict import change_of

TABLE = "{:>8}  {:>8}  {:>36}  {:>14}  {:>10}"  # on a terminal
TITLES = ("step", "loss", "score", "speed", "time left")  # the rest is in metrics.jsonl


class Observer:
    """The events of a run. A subclass handles those that it needs; all ranks call all but where it says so."""

    def on_step(self, done: int) -> None:
        """Called after each step."""

    def on_line(self, text: str) -> None:
        """Called with each line of the log."""

    def on_record(self, done: int, split: str, values: Mapping[str, float]) -> None:
        """Called with the metrics of the steps since the last record, or of a validation."""

    def measure(self, engine: Any, done: int) -> dict[str, float]:
        """Returns metrics to add to those of a validation, the same on all ranks."""
        return {}

    def keeps(self, done: int) -> bool:
        """Returns True if the checkpoint of a validated step is to be kept. Rank 0 calls it, after `on_record`."""
        return False

    def on_kept(self, done: int) -> None:
        """Called on rank 0 when the checkpoint that `keeps` asked for is whole."""

    def exported(self, step: int) -> int:
        """Returns the step to export instead of `step`; 0: the model before training. Rank 0 calls it."""
        return step

    def on_end(self) -> None:
        """Called when all steps are made, before the export."""

    def close(self) -> None:
        """Releases what the observer holds."""


class Console(Observer):
    """The output of a run on rank 0: console, metrics.jsonl, TensorBoard; other ranks write nothing.

    TensorBoard gets two writers, `tb/train` and `tb/validation`, so that the curves of one tag lie over each other.

    Args:
        start: Step of the checkpoint to resume from, or 0. Later records, and the validation of this step, are dropped.
        steps: Length of the run.
    """

    def __init__(self, folder: RunFolder, start: int, steps: int) -> None:
        self._metrics, self._steps = folder.metrics, steps
        self._writes = dist.get_rank() == 0
        self._progress: Any = None
        if not self._writes:
            return
        from torch.utils.tensorboard import SummaryWriter

        last = {"train": start, "validation": start - 1} if start else {}
        records = read_jsonl(self._metrics)
        with atomic_write(self._metrics) as file:
            for record in records:
                if record["step"] <= last.get(record["split"], -1):
                    file.write(json.dumps(record) + "\n")
        self._boards = {
            split: SummaryWriter(
                str(folder.path / "tb" / split), purge_step=last.get(split, -1) + 1
            )
            for split in ("train", "validation")
        }
        self._start, self._on_terminal = start, sys.stderr.isatty()
        self._has_titles = False

    def on_line(self, text: str) -> None:
        """Prints a line with the clock."""
        if self._writes:
            print_line(text)

    def on_step(self, done: int) -> None:
        """Moves the progress bar; the estimate begins with the steps."""
        if self._writes and self._on_terminal and self._progress is None:
            self._progress = progress_bar(self._steps, "steps", "pretraining", initial=self._start)
        if self._progress is not None:
            self._progress.update(1)

    def on_record(self, done: int, split: str, values: Mapping[str, float]) -> None:
        """Writes the finite values under the same keys to metrics.jsonl and TensorBoard, and prints some of them."""
        if not self._writes:
            return
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        append_jsonl(self._metrics, {"step": done, "split": split, **finite})
        for name, value in finite.items():
            self._boards[split].add_scalar(name, value, done)
        cells = _cells(done, split, values, self._steps)
        if self._on_terminal:
            if not self._has_titles:
                print_line(TABLE.format(*TITLES))
            self._has_titles = True
            print_line(TABLE.format(*cells))
        else:
            named = zip(TITLES, cells, strict=True)
            shown = [f"{title} {cell}" for title, cell in named if cell]
            print_line("  ".join([shown[0], split, *shown[1:]]))

    def close(self) -> None:
        """Ends the progress bar and flushes TensorBoard."""
        if self._progress is not None:
            self._progress.close()
        for board in self._boards.values() if self._writes else ():
            board.close()


def _cells(done: int, split: str, values: Mapping[str, float], steps: int) -> tuple[str, ...]:
    """Returns the cells of a record in a table: the loss of a step, or the best score of a validation.

    A score has the verdict against the original model's own embedding.
    """
    loss, score, speed, left = "", "", "", ""
    if "loss/total" in values:  # not in a run without steps
        loss = f"{values['loss/total']:.3f}"
    scores = {name: v for name in EMBEDDINGS if (v := values.get(f"probe/{name}")) is not None}
    if split == "validation" and scores:
        best = max(scores, key=scores.__getitem__)
        score = f"{100 * scores[best]:.1f} {best}"
        if done:
            score += f": {verdict(change_of(values, best))}"
    if split == "train":
        speed = f"{values['speed/sequences_per_second']:.0f} texts/s"
        left = tqdm.format_interval(values["speed/seconds_per_step"] * (steps - done))
    return str(done), loss, score, speed, left


class Profile(Observer):
    """A trace of some steps on rank 0, from the second on, by torch.profiler in RUN/profile.

    A folder that cannot be made is a `UserError`.
    """

    def __init__(self, folder: RunFolder, steps: int) -> None:
        self._profile: AbstractContextManager[Any] | None = None
        if dist.get_rank() > 0:
            return
        path = folder.path / "profile"
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"run.profile: {path}: cannot be written: {error.strerror}.") from None
        once = schedule(wait=0, warmup=1, active=steps, repeat=1)
        self._profile = profile(schedule=once, on_trace_ready=tensorboard_trace_handler(str(path)))
        self._profile.__enter__()

    def on_step(self, done: int) -> None:
        """Ends the trace of a step."""
        if self._profile:
            self._profile.step()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Writes the trace."""
        if self._profile:
            self._profile.__exit__(None, None, None)
