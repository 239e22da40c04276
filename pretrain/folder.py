"""The folder of a run: its files, markers, lock and checkpoints. Imports no torch.

    RUN/settings.yaml, ds_config.json, env.json    what runs; settings.yaml is written first
    RUN/model/                                     configuration and tokenizer
    RUN/checkpoints/step_00010000/{DeepSpeed's files, meta.json, COMPLETE}
    RUN/anchor/, topics.safetensors                computed before the first step, if the run has them
    RUN/metrics.jsonl, tb/                         records
    RUN/probe.npz, probe.json, best.json, before/  what the probe compares with, and the best step
    RUN/hf/, DONE or STOPPED                       the exported model, and how the run ended

COMPLETE is written last, when all files are on the disk: a checkpoint is whole, or it does not count.
"""

import errno
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multicls.errors import UserError
from multicls.files import atomic_write, lock_holder, read_json, write_json

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
COMPLETE = "COMPLETE"  # in a checkpoint; written last
META = "meta.json"  # in a checkpoint: its step, ranks, identity, and the size of each file
FORMAT = 10  # of a checkpoint


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run folder, and what its files say."""

    path: Path

    settings = property(lambda self: self.path / "settings.yaml")
    model = property(lambda self: self.path / "model")
    checkpoints = property(lambda self: self.path / "checkpoints")
    topics = property(lambda self: self.path / "topics.safetensors")  # state of a `TopicTable`
    anchor = property(lambda self: self.path / "anchor")  # embeddings of the passages of the run
    metrics = property(lambda self: self.path / "metrics.jsonl")
    baseline = property(lambda self: self.path / "probe.npz")  # embeddings of its rows at step 0
    plan = property(lambda self: self.path / "probe.json")  # which rows the probe reads
    before = property(lambda self: self.path / "before")  # the model before training, no facets
    best = property(lambda self: self.path / "best.json")  # step, value
    export = property(lambda self: self.path / "hf")
    done = property(lambda self: self.path / "DONE")  # written last
    stopped = property(lambda self: self.path / "STOPPED")  # removed at the next start
    universal = property(lambda self: self.checkpoints / "universal")  # for other ranks; removed

    @property
    def end(self) -> int:
        """The step at which the run has finished; 0: it has not."""
        return int(read_json(self.done)["step"]) if self.done.exists() else 0

    @property
    def best_step(self) -> int:
        """The step of the best checkpoint with `run.keep_best`; 0: no step was better than step 0."""
        return int(read_json(self.best)["step"]) if self.best.exists() else 0

    @property
    def saved_steps(self) -> list[int]:
        """The steps of the whole checkpoints, ascending."""
        markers = self.checkpoints.glob(f"step_*/{COMPLETE}")
        return sorted(int(marker.parent.name.removeprefix("step_")) for marker in markers)

    def checkpoint(self, step: int) -> Path:
        """Returns the folder of the checkpoint of `step`."""
        return Path(self.checkpoints / f"step_{step:08d}")

    def status(self) -> str:
        """Returns a sentence on the progress of the run."""
        if self.done.exists():
            return f"finished at step {self.end}"
        holder, steps = lock_holder(self.path), self.saved_steps
        if not (holder or steps or self.settings.exists()):
            problem = "holds no run" if self.path.exists() else "does not exist"
            return f"not begun: {self.path} {problem}"
        saved = f"checkpoint at step {steps[-1]}" if steps else "no checkpoint yet"
        return f"{f'running ({holder})' if holder else 'unfinished'}, {saved}"

    def refuse_foreign(self) -> None:
        """Raises UserError if a new run would replace folders that no run has written."""
        foreign = [path for path in (self.model, self.export, self.before) if path.exists()]
        is_run = self.settings.exists() and not (self.path / "record.json").exists()
        if foreign and not is_run:  # finetune/run.py writes the other file, too
            raise UserError(
                f"{foreign[0]}: was written by no run, and this one would replace it: set another --output_dir."
            )

    @contextmanager
    def disk_errors_reported(self) -> Iterator[None]:
        """Turns errors of a full disk into a `UserError`. Others may pass, as those of a shared disk do."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else error.__context__  # torch wraps it
            if not isinstance(cause, OSError) or cause.errno not in DISK_FULL:
                raise
            raise UserError(
                f"{self.path}: cannot be written: {cause.strerror}. Its complete checkpoints are whole: make room, "
                "then run the same command again."
            ) from None

    def meta(self, step: int) -> dict[str, Any]:
        """Returns what a whole checkpoint says of itself.

        Raises:
            UserError: A file is missing or has another size, or another version of the program wrote it.
        """
        path = self.checkpoint(step)
        meta: dict[str, Any] = read_json(path / META)
        if meta.get("format") != FORMAT:
            raise UserError(
                f"{path}: another version of the program wrote it; finish the run with it."
            )
        for name, size in meta["files"].items():
            actual = (path / name).stat().st_size if (path / name).exists() else 0
            if actual != size:
                raise UserError(
                    f"{path}: damaged: {name} has {actual} bytes, not {size}. Put the file back, or remove the folder "
                    "to use the checkpoint before it."
                )
        return meta

    def resume_step(self, identity: Mapping[str, Any]) -> int:
        """Returns the step of the newest checkpoint, from which a run continues; 0: there is none.

        Args:
            identity: The values that decide the numbers of the run. The checkpoint must agree.

        Raises:
            UserError: The checkpoint is damaged, or belongs to other settings or data.
        """
        step = max(self.saved_steps, default=0)
        saved = self.meta(step)["identity"] if step else identity
        changed = [n for n in saved.keys() | identity.keys() if saved.get(n) != identity.get(n)]
        if changed:
            raise UserError(
                *(
                    f"{self.checkpoint(step)}: {name} was {saved.get(name)!r} and is now {identity.get(name)!r}; "
                    "continue with the old value, or set another --output_dir for a new run."
                    for name in sorted(changed)
                )
            )
        return step

    def begin_checkpoint(self, step: int) -> None:
        """Makes an empty folder for the checkpoint of `step`; a killed process may have left one."""
        path = self.checkpoint(step)
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)

    def commit(
        self, step: int, facts: Mapping[str, Any], newest: int, milestone_every: int | None
    ) -> int:
        """Writes meta.json and the marker of a checkpoint, and deletes old ones; returns its size in bytes.

        Args:
            facts: What meta.json says: `ranks`, `identity` and others.
            newest: Number of newest checkpoints to keep, beside the best one and the milestones.
            milestone_every: Interval of the milestones; None: there are none.
        """
        path = self.checkpoint(step)
        files = {file.name: file.stat().st_size for file in sorted(path.iterdir())}
        write_json(path / META, {"format": FORMAT, "step": step, "files": files, **facts})
        with atomic_write(path / COMPLETE):
            pass
        steps = self.saved_steps
        milestones = [n for n in steps if milestone_every and n % milestone_every == 0]
        kept = {self.best_step, *milestones, *steps[-newest:]}
        keep = {self.checkpoint(number) for number in kept}
        for old in set(self.checkpoints.glob("step_*")) - keep:  # or left by killed processes
            (old / COMPLETE).unlink(missing_ok=True)  # first: half-deleted is never whole
            shutil.rmtree(old, ignore_errors=True)
        return sum(files.values())
