"""Checkpoints of a run: `checkpoints/step_00010000/{DeepSpeed's files, meta.json, COMPLETE}`.

COMPLETE is written last, when all files are on the disk: a checkpoint is whole, or it does not count.
"""

import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from multicls.distributed import on_rank_0
from multicls.errors import UserError
from multicls.files import atomic_write, read_json, write_json
from pretrain.engine import convert_to_universal, load_engine, save_engine
from pretrain.run_folder import (
    BEST,
    COMPLETE,
    FORMAT,
    META,
    best_step,
    check_whole,
    checkpoint_path,
    saved_steps,
)
from pretrain.settings import RunSettings, TrainSettings, lr_at

LENGTH = ("train.steps", "train.warmup_ratio", "train.decay_ratio")
UNIVERSAL = "universal"  # a checkpoint converted for another number of ranks; removed when loaded


@dataclass(frozen=True)
class Checkpoints:
    """Saves, finds and loads the checkpoints of a run.

    Attributes:
        folder: `RUN/checkpoints`.
        identity: The values that decide the numbers of a run; a checkpoint must agree to be resumed. Flat.
        train: Settings with the length in steps.
        run: Says which checkpoints are kept.
    """

    folder: Path
    identity: Mapping[str, Any]
    train: TrainSettings
    run: RunSettings

    def resume_step(self) -> int:
        """Returns the step of the newest checkpoint that the run can continue from; 0: there is none. Rank 0 calls it.

        A checkpoint of a run of another length counts if both runs have the same learning rates up to it.

        Raises:
            UserError: A checkpoint is damaged, belongs to other settings or data, or all are from after the point where
                the learning rates part.
        """
        newest = ""  # what is wrong with the newest one
        for step in reversed(saved_steps(self.folder)):
            path, ours = checkpoint_path(self.folder, step), self.identity
            check_whole(path)
            saved = read_json(path / META)["identity"]
            changed = {key for key in saved.keys() | ours.keys() if saved.get(key) != ours.get(key)}
            if not changed:
                return step
            if self.train.schedule == "linear" or not changed.issubset(LENGTH):
                raise UserError(
                    *(
                        f"{path}: {key} was {saved.get(key)!r} and is now {ours.get(key)!r}; continue with the old "
                        "value, or set another --output_dir for a new run."
                        for key in sorted(changed)
                    )
                )
            values = {key.removeprefix("train."): saved[key] for key in LENGTH}
            before = self.train.model_copy(update=values)
            if all(lr_at(n, before) == lr_at(n, self.train) for n in reversed(range(step))):
                return step
            warmup = before.warmup_steps
            newest = newest or (
                f"{path}: its run of {before.steps} steps had {warmup} of warm-up and a decay from step "
                f"{before.decay_start}; this one of {self.train.steps} has {self.train.warmup_steps} and "
                f"{self.train.decay_start}, and no checkpoint is from where both have the same learning rates. Set "
                f"--train.warmup_ratio {warmup / self.train.steps:.6g} for the same warm-up, or another --output_dir."
            )
        if newest:
            raise UserError(newest)
        return 0

    def discard_after(self, step: int) -> str:
        """Deletes checkpoints after `step`, which are of a run of another length; returns a line for the log, or ""."""
        later = [number for number in saved_steps(self.folder) if number > step]
        if not later:
            return ""
        if best_step(self.folder.parent) > step:
            (self.folder.parent / BEST).unlink()
        _delete(checkpoint_path(self.folder, number) for number in later)
        numbers = ", ".join(map(str, later))
        return f"the checkpoints of another length, of steps {numbers}, are removed"

    def is_permanent(self, step: int) -> bool:
        """Returns True if the checkpoint of `step` is always saved and never deleted."""
        if self.train.schedule == "wsd" and step == self.train.decay_start:
            return True  # a longer run can continue from it
        return self.run.milestone_every is not None and step % self.run.milestone_every == 0

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
        steps = saved_steps(self.folder)
        best, permanent = best_step(self.folder.parent), filter(self.is_permanent, steps)
        kept = {best, *permanent, *steps[-self.run.keep_checkpoints :]}
        paths = {checkpoint_path(self.folder, step) for step in kept}
        _delete(set(self.folder.glob("step_*")) - paths)  # or left by killed processes
        return sum(files.values())


def _delete(checkpoints: Iterable[Path]) -> None:
    for path in checkpoints:
        (path / COMPLETE).unlink(missing_ok=True)  # first: half-deleted is never whole
        shutil.rmtree(path, ignore_errors=True)


def _make_empty(path: Path) -> None:
    if path.exists():  # left by a killed process
        shutil.rmtree(path)
    path.mkdir(parents=True)
