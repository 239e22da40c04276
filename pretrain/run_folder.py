"""What a run folder tells without torch: its markers, its checkpoints, how far the run has come."""

from __future__ import annotations

from pathlib import Path

from multicls.files import read_json

DONE = "DONE"  # the run has finished; written last
STOPPED = "STOPPED"  # the run has saved and left before its end; gone when it starts again
COMPLETE = "COMPLETE"  # in a checkpoint, written last: the SHA-256 of its meta.json


def checkpoint_path(folder: Path, step: int) -> Path:
    """The checkpoint of `step` in `RUN/checkpoints`."""
    return folder / f"step_{step:08d}"


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in `RUN/checkpoints`, ascending."""
    return sorted(int(marker.parent.name.removeprefix("step_")) for marker in folder.glob(f"step_*/{COMPLETE}"))


def status(run_folder: Path) -> tuple[str, bool]:
    """How far the run has come, in words, and whether it has finished."""
    if (run_folder / DONE).exists():
        return f"finished at step {read_json(run_folder / DONE)['step']}", True
    steps = complete_steps(run_folder / "checkpoints")
    return (f"unfinished, checkpoint at step {steps[-1]}" if steps else "not begun"), False
