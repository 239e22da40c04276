"""The layout of a run folder: its markers, its checkpoints and how far the run has come. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from multicls.files import LOCK_PATIENCE, lock_holder, read_json, sha256_of

DONE = "DONE"  # the run has finished; written last
STOPPED = "STOPPED"  # the run has saved and left before its end; removed when it starts again
REQUEUED_PATIENCE = 300.0  # seconds; a file server keeps the locks of a lost node for a while (NFS 4: 90)
COMPLETE = "COMPLETE"  # written last in a checkpoint: the SHA-256 of its meta.json
WEIGHTS = "model.safetensors"  # in a checkpoint and in an export: the model's fp32 weights


def checkpoint_path(folder: Path, step: int) -> Path:
    """Returns the path of the checkpoint of `step` in `RUN/checkpoints`."""
    return folder / f"step_{step:08d}"


def complete_steps(folder: Path) -> list[int]:
    """Returns the steps of the complete checkpoints in `RUN/checkpoints`, ascending."""
    return sorted(int(marker.parent.name.removeprefix("step_")) for marker in folder.glob(f"step_*/{COMPLETE}"))


def find_damage(path: Path, names: Collection[str] | None = None) -> str:
    """Returns what the checksums say is wrong with a checkpoint's meta.json and files `names` (None: all), or ""."""
    try:
        if sha256_of(path / "meta.json") != (path / COMPLETE).read_text(encoding="ascii").strip():
            return "meta.json has changed since it was written"
        meta = read_json(path / "meta.json")
    except (OSError, UnicodeDecodeError) as error:
        return str(error)
    for name in meta["files"] if names is None else names:
        if name not in meta["files"]:
            return f"it has no {name} (an earlier version of this program wrote it)"
        expected = meta["files"][name]
        try:
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes instead of {expected['bytes']}"
            if sha256_of(path / name) != expected["sha256"]:
                return f"{name} has changed since it was written (its SHA-256 differs)"
        except OSError as error:
            return str(error)
    return ""


def lock_patience() -> float:
    """Returns the seconds to wait for the run folder's lock: longer where SLURM has started the job again."""
    return REQUEUED_PATIENCE if int(os.environ.get("SLURM_RESTART_COUNT") or 0) else LOCK_PATIENCE


def status(run_folder: Path) -> tuple[str, bool]:
    """Returns how far the run has come, in words, and whether it has finished."""
    if (run_folder / DONE).exists():
        return f"finished at step {read_json(run_folder / DONE)['step']}", True
    holder = lock_holder(run_folder)
    steps = complete_steps(run_folder / "checkpoints")
    if not (holder or steps or (run_folder / "settings.yaml").exists()):
        return f"not begun: {run_folder} {'holds no run' if run_folder.exists() else 'does not exist'}", False
    saved = f"checkpoint at step {steps[-1]}" if steps else "no checkpoint yet"
    return f"{f'running ({holder})' if holder else 'unfinished'}, {saved}", False
