"""Writes what a run reports: console and log.txt, metrics.jsonl, TensorBoard, Weights & Biases. Rank 0 writes."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multicls.console import WIDTH, print_line
from multicls.errors import UserError
from multicls.files import atomic_write, read_jsonl
from multicls.words import duration

OBJECTIVES = ("mlm", "tfidf", "so", "mcqt")
CLOCK_WIDTH = len("12:34:56 ")
SHOWN = {
    "optim/lr": "lr {:.1e}",
    "optim/grad_norm": "gnorm {:.2f}",
    "speed/sequences_per_second": "{:.0f} seq/s",
    "speed/mfu": "mfu {:.0%}",
    "speed/data_wait": "data {:.0%}",
    "memory/peak_gb": "mem {:.1f}G",
}
DISPENSABLE = ("memory/peak_gb", "speed/mfu", "optim/grad_norm", "speed/data_wait", "optim/lr")


def console_line(step: int, steps: int, values: Mapping[str, float], eta: float) -> str:
    """Returns a line such as `step 1200/40000  loss 7.98 (mlm 0.87 ...)  lr 1.9e-05  812 seq/s  eta 3h12`.

    It fits the console with the clock before it: values of `DISPENSABLE` are left out, in that order, until it does.
    Waiting for data is shown where it takes more than a twentieth of the time.
    """
    head = [f"step {step}/{steps}", f"loss {_losses(values)}"]
    parts = {key: form.format(values[key]) for key, form in SHOWN.items() if key in values}
    if values.get("speed/data_wait", 0.0) < 0.05:
        parts.pop("speed/data_wait", None)
    tail = f"eta {duration(eta)}"
    for key in DISPENSABLE:
        if len("  ".join([*head, *parts.values(), tail])) > WIDTH - CLOCK_WIDTH:
            parts.pop(key, None)
    return "  ".join([*head, *parts.values(), tail])


def validation_line(step: int, values: Mapping[str, float]) -> str:
    """Returns a line such as `step 1200  validation 8.04 (mlm 0.91 ...)  acc mcqt 0.71 so 0.62  cos 0.12`."""
    parts = [f"step {step}  validation {_losses(values)}"]
    accuracies = [f"{name} {values[f'acc/{name}']:.2f}" for name in ("mcqt", "so") if f"acc/{name}" in values]
    parts += [f"acc {' '.join(accuracies)}"] * bool(accuracies)
    if "facets/mean_cosine" in values:
        parts.append(f"cos {values['facets/mean_cosine']:.2f}")
    return "  ".join(parts)


def _losses(values: Mapping[str, float]) -> str:
    """Returns the weighted sum of the losses, and each of them; small ones with three decimals."""
    losses = {name: values[f"loss/{name}"] for name in OBJECTIVES if f"loss/{name}" in values}
    each = " ".join(f"{name} {value:.{2 if value >= 1 else 3}f}" for name, value in losses.items())
    return f"{values['loss/total']:.2f} ({each})"


class Log:
    """The output of a run on rank 0; other ranks write nothing.

    TensorBoard gets two writers, `tb/train` and `tb/validation`, so that the curves of one tag lie over each other.

    Args:
        resumed_step: Records of later steps are dropped, since these steps are done again; 0: all.
        wandb_project: Project of Weights & Biases to report to (`WANDB_MODE=offline` keeps it on disk).
    """

    def __init__(
        self,
        folder: Path,
        writes: bool,
        resumed_step: int,
        wandb_project: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder, self._writes = folder, writes
        self._unwritten: dict[str, str] = {}
        if not writes:
            return
        from torch.utils.tensorboard import SummaryWriter

        metrics = folder / "metrics.jsonl"
        kept = [record for record in read_jsonl(metrics) if resumed_step and record["step"] <= resumed_step]
        with atomic_write(metrics) as file:
            file.writelines(json.dumps(record) + "\n" for record in kept)
        self._boards = {split: SummaryWriter(str(folder / "tb" / split), purge_step=resumed_step + 1)
                        for split in ("train", "validation")}  # fmt: skip
        self._wandb = _open_wandb(folder, wandb_project, dict(config or {}), resumed_step) if wandb_project else None

    def say(self, text: str) -> None:
        """Prints a line with the clock and appends it to log.txt with date and clock."""
        if self._writes:
            print_line(text)
            self._append("log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def record(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Writes values under the same keys to metrics.jsonl, TensorBoard and (as `split/key`) W&B."""
        if self._writes:
            self._append("metrics.jsonl", json.dumps({"step": step, "split": split, **values}) + "\n")
            with contextlib.suppress(OSError):
                for name, value in values.items():
                    self._boards[split].add_scalar(name, value, step)
            if self._wandb is not None:
                self._wandb.log({f"{split}/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        """Flushes TensorBoard and ends the W&B run."""
        if self._writes:
            with contextlib.suppress(OSError):
                for board in self._boards.values():
                    board.close()
            if self._wandb is not None:
                self._wandb.finish()

    def _append(self, name: str, line: str) -> None:
        """Appends to a file of the run folder; a line that finds the disk full is kept for the next call."""
        text = self._unwritten.pop(name, "") + line
        try:
            with open(self._folder / name, "ab", buffering=0) as file:
                size = file.tell()
                if file.write(text.encode("utf-8")) < len(text.encode("utf-8")):
                    file.truncate(size)
                    raise OSError
        except OSError:
            self._unwritten[name] = text


def _open_wandb(folder: Path, project: str, config: dict[str, Any], resumed_step: int) -> Any:
    """Opens the W&B run of a run folder. Its id is kept there, so that a resumed run goes on in the same curves."""
    import wandb

    kept = folder / "wandb_id.txt"
    if not (resumed_step and kept.exists()):
        with atomic_write(kept) as file:
            file.write(uuid.uuid4().hex[:12])
    names = {"project": project, "name": folder.name, "id": kept.read_text(), "dir": str(folder)}
    try:
        return wandb.init(**names, resume="allow", config=config)
    except Exception as error:  # of many kinds: no login, no network, no such project ...
        raise UserError(
            f"run.wandb_project = {project}: {error}. Log in (wandb login), set WANDB_MODE=offline, or leave it null."
        ) from error
