"""Checkpoints of a run: `checkpoints/step_00010000/{DeepSpeed's files, meta.json, COMPLETE}`.

COMPLETE is written last, when all files are on the disk: a checkpoint is whole, or it does not count.
"""

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from multicls.distributed import on_rank_0
from multicls.errors import UserError
from multicls.files import atomic_write, read_json, write_json
from pretrain.engine import convert_to_universal, load_engine, save_engine
from pretrain.run_folder import BEST, COMPLETE, FORMAT, META, checkpoint_path, saved_steps

UNIVERSAL = "universal"  # a checkpoint converted for another number of ranks; removed when loaded


@dataclass(frozen=True)
class Checkpoints:
    """Saves, finds and loads the checkpoints of a run.

    Attributes:
        folder: `RUN/checkpoints`.
        identity: The values that decide the numbers of a run; a checkpoint must agree to be resumed. Flat.
        keep: Number of newest checkpoints to keep.
        milestone_every: Checkpoints of these steps are never deleted; None: no milestones.
    """

    folder: Path
    identity: Mapping[str, Any]
    keep: int
    milestone_every: int | None = None

    def check_identity(self, step: int) -> None:
        """Raises UserError if the checkpoint of `step` belongs to other settings or data. Rank 0 calls it."""
        path = checkpoint_path(self.folder, step)
        saved, ours = read_json(path / META)["identity"], self.identity
        problems = [
            f"{path}: {key} was {saved.get(key)!r} and is now {ours.get(key)!r}; continue with the old value, or "
            "set another --output_dir for a new run."
            for key in sorted(saved.keys() | ours.keys())
            if saved.get(key) != ours.get(key)
        ]
        if problems:
            raise UserError(*problems)

    def convert_if_needed(self, step: int) -> str:
        """Makes the checkpoint of `step` loadable by this number of ranks. Rank 0 calls it.

        Returns:
            A line for the log; "" if the number of ranks is that of the checkpoint.
        """
        shutil.rmtree(self.folder / UNIVERSAL, ignore_errors=True)  # a killed process may leave it
        start, ranks = time.monotonic(), dist.get_world_size()
        path = checkpoint_path(self.folder, step)
        saved = read_json(path / META)["ranks"]
        if saved == ranks:
            return ""
        convert_to_universal(path, self.folder / UNIVERSAL)
        seconds = time.monotonic() - start
        return f"checkpoint of {saved} rank(s) converted for {ranks} in {seconds:.1f} s"

    def load(self, engine: Any, step: int) -> None:
        """Loads the checkpoint of `step` into the engine, after `convert_if_needed`. All ranks call it."""
        converted = engine.load_universal_checkpoint()
        name = UNIVERSAL if converted else checkpoint_path(self.folder, step).name
        load_engine(engine, self.folder, name)
        dist.barrier()
        if converted and dist.get_rank() == 0:
            shutil.rmtree(self.folder / UNIVERSAL)

    def save(self, engine: Any, step: int) -> str:
        """Saves a checkpoint, marks it complete, deletes old ones; returns a line for the log. All ranks call it."""
        start, path = time.monotonic(), checkpoint_path(self.folder, step)
        on_rank_0(lambda: _make_empty(path))
        save_engine(engine, self.folder, path.name)
        dist.barrier()  # all files of all ranks are on the disk
        size = on_rank_0(lambda: self._commit(path, step))
        return f"checkpoint of step {step}: {size / 1e6:.0f} MB in {time.monotonic() - start:.1f} s"

    def _commit(self, path: Path, step: int) -> int:
        """Writes meta.json and the marker, deletes old checkpoints; returns the size of the new one in bytes."""
        files = {file.name: file.stat().st_size for file in sorted(path.iterdir())}
        meta = {"format": FORMAT, "step": step, "ranks": dist.get_world_size(), "files": files}
        write_json(path / META, meta | {"identity": dict(self.identity)})
        with atomic_write(path / COMPLETE):
            pass
        steps, every = saved_steps(self.folder), self.milestone_every
        best = self.folder.parent / BEST
        kept = {read_json(best)["step"]} if best.exists() else set()
        kept |= {*steps[-self.keep :], *(step for step in steps if every and step % every == 0)}
        paths = {checkpoint_path(self.folder, step) for step in kept}
        for old in set(self.folder.glob("step_*")) - paths:  # or left by killed processes
            (old / COMPLETE).unlink(missing_ok=True)  # first: half-deleted is never whole
            shutil.rmtree(old, ignore_errors=True)
        return sum(files.values())


def _make_empty(path: Path) -> None:
    if path.exists():  # left by a killed process
        shutil.rmtree(path)
    path.mkdir(parents=True)
