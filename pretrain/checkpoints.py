"""Checkpoints in the run folder: `checkpoints/step_00010000/{DeepSpeed's files, meta.json, COMPLETE}`.

The marker COMPLETE is written last, so a checkpoint is whole or is not there.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from multicls.errors import UserError
from multicls.files import atomic_write, read_json, write_json

MARKER = "COMPLETE"


class Checkpoints:
    """Saves, finds and loads the checkpoints of a run.

    Args:
        folder: `RUN/checkpoints`.
        keep: how many of the newest to keep.
        identity: what a checkpoint must agree on to be resumed (settings, corpus, tokenizer), flat.
        world_size: number of ranks.
    """

    def __init__(self, folder: Path, keep: int, identity: Mapping[str, Any], world_size: int) -> None:
        self.folder = folder
        self.keep = keep
        self.identity = dict(identity)
        self.world_size = world_size

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted(int(marker.parent.name.removeprefix("step_")) for marker in self.folder.glob(f"step_*/{MARKER}"))

    def check(self) -> int:
        """The step to go on from, 0 if there is no checkpoint.

        Raises:
            UserError: the newest checkpoint belongs to other settings, other data or another number of ranks.
        """
        steps = self.steps()
        if not steps:
            return 0
        path = self._path(steps[-1])
        meta = read_json(path / "meta.json")
        problems = [
            f"{path}: {key} was {meta['identity'].get(key)!r} and is now {self.identity.get(key)!r}; "
            "go on with the old value, or give another --output_dir for a new run."
            for key in sorted(meta["identity"].keys() | self.identity.keys())
            if meta["identity"].get(key) != self.identity.get(key)
        ]
        if meta["world_size"] != self.world_size:
            problems.append(
                f"{path}: was saved by {meta['world_size']} rank(s), this launch has {self.world_size}; "
                f"launch {meta['world_size']}, for instance with deepspeed --num_gpus {meta['world_size']}."
            )
        if problems:
            raise UserError(*problems)
        return int(meta["step"])

    def load(self, engine: Any, step: int) -> None:
        """Loads the complete checkpoint of `step` into the engine, on all ranks."""
        path, _ = engine.load_checkpoint(str(self.folder), tag=self._path(step).name)
        assert path is not None, f"DeepSpeed found no checkpoint at {self._path(step)}"

    def save(self, engine: Any, step: int) -> None:
        """Saves on all ranks together, marks the checkpoint complete, then drops the oldest ones."""
        path = self._path(step)
        if dist.get_rank() == 0 and path.exists():
            shutil.rmtree(path)  # what a killed process left behind
        dist.barrier()
        engine.save_checkpoint(str(self.folder), tag=path.name, save_latest=False)
        dist.barrier()
        if dist.get_rank() == 0:
            write_json(path / "meta.json", {"step": step, "world_size": self.world_size, "identity": self.identity})
            with atomic_write(path / MARKER) as file:
                file.write(f"{step}\n")
            for old in self.steps()[: -self.keep]:
                (self._path(old) / MARKER).unlink()  # first, so that a half-deleted one never looks whole
                shutil.rmtree(self._path(old))
        dist.barrier()

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"
