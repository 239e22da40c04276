"""Checkpoints of a run: `checkpoints/step_00010000/{DeepSpeed's files, model.safetensors, meta.json, COMPLETE}`.

meta.json holds the SHA-256 of every file, COMPLETE that of meta.json. COMPLETE is written last: a checkpoint is whole,
or it does not count. Later damage is found by the checksums before the checkpoint is used.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from multicls.distributed import on_rank_0
from multicls.errors import UserError
from multicls.files import atomic_write, read_json, sha256_of, write_json
from pretrain.engine import convert_to_universal, full_weights, load_engine, save_engine
from pretrain.run_folder import COMPLETE, WEIGHTS, checkpoint_path, complete_steps, find_damage

BYTES_PER_PARAMETER = 20  # weights, their fp32 copy, two moments, and model.safetensors
UNIVERSAL = "universal"  # a checkpoint converted for another number of ranks; removed after it is loaded


@dataclass
class Checkpoints:
    """Saves, finds and loads the checkpoints of a run. All ranks call every method together.

    Attributes:
        folder: `RUN/checkpoints`.
        keep: number of newest checkpoints to keep.
        identity: what a checkpoint must agree on to be resumed (settings, corpus, tokenizer), flat.
        world_size: number of ranks.
        zero_stage: it decides how the optimizer's state is laid out in the files.
        milestone_every: checkpoints of these steps are never deleted; None: no milestones.
        warning: why the last save failed, until one succeeds.
    """

    folder: Path
    keep: int
    identity: dict[str, Any]
    world_size: int
    zero_stage: int = 0
    milestone_every: int | None = None
    warning: str = field(default="", init=False)
    _notes: list[str] = field(default_factory=list, init=False)  # of rank 0, for the log
    _damaged: set[int] = field(default_factory=set, init=False)

    def newest(self) -> int:
        """Returns the step of the newest whole checkpoint, 0 if there has been none.

        Raises:
            UserError: the checkpoint belongs to other settings or other data, or its layout cannot be converted to this
                launch's; or there are checkpoints but none is whole.
        """
        return on_rank_0(self._newest)

    def check_identity(self) -> None:
        """Refuses the newest checkpoint of another run by its meta.json; does not read its other files."""
        on_rank_0(lambda: self._check_identity(self.newest_step()))

    def _newest(self) -> int:
        problems: list[str] = []
        for step in reversed(complete_steps(self.folder)):
            path = checkpoint_path(self.folder, step)
            damage = find_damage(path)
            if not damage:
                self._check_identity(step)
                self._notes += [f"WARNING: {problem}" for problem in problems]
                return step
            self._damaged.add(step)
            problems.append(f"checkpoint {path} is damaged and will not be used: {damage}")
        if problems:
            end = "no whole checkpoint is left. Put one back, or give another --output_dir to start from the beginning."
            raise UserError(*problems, f"{self.folder}: {end}")
        return 0

    def _check_identity(self, step: int) -> None:
        if not step:
            return
        path = checkpoint_path(self.folder, step)
        meta = read_json(path / "meta.json")
        problems = [
            f"{path}: {key} was {meta['identity'].get(key)!r} and is now {self.identity.get(key)!r}; "
            "go on with the old value, or give another --output_dir for a new run."
            for key in sorted(meta["identity"].keys() | self.identity.keys())
            if meta["identity"].get(key) != self.identity.get(key)
        ]
        old, new = meta["zero_stage"], self.zero_stage
        if old != new and {old, new} != {1, 2}:
            problems.append(
                f"{path}: zero_optimization.stage was {old} and is now {new}; go on with stage {old} "
                "(only 1 and 2 read each other's checkpoints)."
            )
        if problems:
            raise UserError(*problems)

    def newest_step(self) -> int:
        """Returns the step of the newest complete checkpoint that is not known to be damaged, 0 if there is none."""
        return max((step for step in complete_steps(self.folder) if step not in self._damaged), default=0)

    def new_notes(self) -> list[str]:
        """Returns what has happened since the last call, for the log of rank 0."""
        notes, self._notes = self._notes, []
        return notes

    def check_space(self, parameters: int) -> None:
        """Refuses, with a `UserError`, a disk too small for the checkpoints to keep and the one being written."""
        on_rank_0(lambda: self._check_space(parameters))

    def _check_space(self, parameters: int) -> None:
        parent = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        milestones = {checkpoint_path(self.folder, step) for step in self._milestones()}
        files = [file for file in self.folder.rglob("*") if file.is_file() and file.parent not in milestones]
        reusable = sum(file.stat().st_size for file in files)  # counts towards those to keep, or is deleted
        one, free = parameters * BYTES_PER_PARAMETER, shutil.disk_usage(parent).free
        if free + reusable < (self.keep + 1) * one:
            raise UserError(
                f"{self.folder}: {free / 1e9:.2f} GB are free, but {self.keep + 1} checkpoints (run.keep_checkpoints = "
                f"{self.keep}, and the one being written) of about {one / 1e9:.2f} GB ({parameters / 1e6:.1f} M "
                f"parameters x {BYTES_PER_PARAMETER} bytes) do not fit; make room, or give another --output_dir."
            )

    def _milestones(self) -> set[int]:
        every = self.milestone_every
        return {step for step in complete_steps(self.folder) if every and step % every == 0}

    def prepare(self, step: int) -> bool:
        """Makes the checkpoint of `step` loadable by this number of ranks; returns True if it had to be converted.

        Stage 0 needs no conversion: every rank holds the whole state.
        """
        return on_rank_0(lambda: self._prepare(step))

    def _prepare(self, step: int) -> bool:
        shutil.rmtree(self.folder / UNIVERSAL, ignore_errors=True)  # a killed process may have left it
        meta = read_json(checkpoint_path(self.folder, step) / "meta.json")
        if not self.zero_stage or meta["world_size"] == self.world_size:
            return False
        start = time.monotonic()
        try:
            convert_to_universal(checkpoint_path(self.folder, step), self.folder / UNIVERSAL)
        except OSError as error:
            shutil.rmtree(self.folder / UNIVERSAL, ignore_errors=True)
            raise UserError(
                f"{self.folder}: converting the checkpoint of step {step} from {meta['world_size']} to "
                f"{self.world_size} ranks failed: {error}. Make room, or launch {meta['world_size']} ranks."
            ) from None
        self._notes.append(
            f"checkpoint of {meta['world_size']} rank(s) converted for {self.world_size} rank(s) in "
            f"{time.monotonic() - start:.1f} s"
        )
        return True

    def load(self, engine: Any, step: int) -> dict[str, Any]:
        """Loads the checkpoint of `step` into the engine, after `prepare`; returns the `state` given to `save`."""
        converted = engine.load_universal_checkpoint()
        load_engine(engine, self.folder, UNIVERSAL if converted else checkpoint_path(self.folder, step).name)
        dist.barrier()
        if converted and dist.get_rank() == 0:
            shutil.rmtree(self.folder / UNIVERSAL)
        state: dict[str, Any] = read_json(checkpoint_path(self.folder, step) / "meta.json")["state"]
        return state

    def save(self, engine: Any, step: int, state: Mapping[str, Any] | None = None) -> bool:
        """Saves, marks the checkpoint complete and deletes the oldest ones; returns True if that went well.

        If the disk is full, the half-written checkpoint is removed, the earlier ones stay, and `warning` says so.
        `state` is stored with it: values equal on all ranks, in JSON's types.
        """
        start = time.monotonic()
        path = checkpoint_path(self.folder, step)
        problem = on_rank_0(lambda: _attempt(lambda: _make_empty(path)))
        parts: list[Any] = [None] * self.world_size
        if not problem:
            written = _WrittenFiles()
            save_engine(engine, self.folder, path.name, written.add)
            weights = full_weights(engine)
            if dist.get_rank() == 0:
                written.add(path / WEIGHTS, lambda: save_file(weights, path / WEIGHTS))
            dist.all_gather_object(parts, written)
            meta: dict[str, Any] = {"step": step, "world_size": self.world_size, "zero_stage": self.zero_stage}
            meta |= {"identity": self.identity, "state": dict(state or {})}
            problem = on_rank_0(lambda: self._commit(path, meta, parts))
        if problem:
            newest = self.newest_step()
            self.warning = (
                f"WARNING: the checkpoint of step {step} could not be written: {problem}. "
                + (f"The newest one is of step {newest}" if newest else "There is none yet")
                + "; make room on the disk."
            )
            self._notes.append(self.warning)
            return False
        self.warning = ""
        size = sum(file["bytes"] for part in parts for file in part.files.values())
        self._notes.append(f"checkpoint of step {step}: {size / 1e6:.0f} MB in {time.monotonic() - start:.1f} s")
        return True

    def _commit(self, path: Path, meta: dict[str, Any], parts: list[_WrittenFiles]) -> str:
        def mark() -> None:
            files = {name: file for part in parts for name, file in part.files.items()}
            write_json(path / "meta.json", meta | {"files": dict(sorted(files.items()))})
            with atomic_write(path / COMPLETE) as marker:
                marker.write(sha256_of(path / "meta.json") + "\n")

        errors = [error for part in parts for error in part.errors]
        problem = errors[0] if errors else _attempt(mark)
        if problem:
            shutil.rmtree(path, ignore_errors=True)
        else:
            self._delete_old()
        return problem

    def _delete_old(self) -> None:
        """Deletes all but the milestones and the newest whole checkpoints; also deletes what killed processes left."""
        whole = [step for step in complete_steps(self.folder) if step not in self._damaged]
        kept = set(whole[-self.keep :]) | self._milestones() - self._damaged
        for path in self.folder.glob("step_*"):
            if path not in {checkpoint_path(self.folder, step) for step in kept}:
                (path / COMPLETE).unlink(missing_ok=True)  # first, so that a half-deleted one never looks whole
                shutil.rmtree(path, ignore_errors=True)


@dataclass
class _WrittenFiles:
    """The files of a checkpoint that one rank has written, and the errors it met."""

    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> size and SHA-256
    errors: list[str] = field(default_factory=list)

    def add(self, path: Path, write: Callable[[], None]) -> None:
        """Calls `write`, which writes `path`, and notes size and checksum.

        An error is noted too, not raised: the other ranks would wait for this one in DeepSpeed's barrier for ever.
        """

        def write_and_hash() -> None:
            write()
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            self.files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}

        if problem := _attempt(write_and_hash):
            self.errors.append(problem)


def _attempt(action: Callable[[], None]) -> str:
    """Returns why the action failed on a full or broken disk, or ""."""
    try:
        action()
    except (OSError, RuntimeError, SafetensorError) as error:
        cause = error.__context__ if isinstance(error.__context__, OSError) else error  # torch hides the disk's error
        if isinstance(error, RuntimeError) and cause is error and "file" not in str(error):
            raise  # of the device, and not of the disk
        return str(cause) or type(cause).__name__
    return ""


def _make_empty(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)  # a killed process has left it
    path.mkdir(parents=True)
