"""The layout of a run folder: its markers, its checkpoints and its progress. Imports no torch."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from multicls.errors import UserError
from multicls.files import lock_holder, read_json

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DONE = "DONE"  # the run has finished; written last
STOPPED = "STOPPED"  # the run has saved and left before its end; removed when it starts again
SETTINGS = "settings.yaml"  # written first
TOPICS = "topics.safetensors"  # the state of the exported model's `TopicTable`
BEFORE = "before"  # the model before training, without new facets
BEST = "best.json"  # step, value, embedding and change of the best checkpoint, with `run.keep_best`
COMPLETE = "COMPLETE"  # written last in a checkpoint
FORMAT = 7  # of a checkpoint
META = "meta.json"  # in a checkpoint: its step, ranks, identity, and the size of each file


def refuse_foreign(folder: Path) -> None:
    """Raises UserError if a new run would replace folders in `folder` that no run has written."""
    foreign = [name for name in ("model", "hf", BEFORE) if (folder / name).exists()]
    is_run = (folder / SETTINGS).exists() and not (folder / "record.json").exists()
    if foreign and not is_run:  # finetune/run.py writes the other file, too
        raise UserError(
            f"{folder / foreign[0]}: was written by no run, and this one would replace it: set another --output_dir."
        )


def checkpoint_path(folder: Path, step: int) -> Path:
    """Returns the path of the checkpoint of `step` in `RUN/checkpoints`."""
    return folder / f"step_{step:08d}"


def saved_steps(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints with a COMPLETE marker in `RUN/checkpoints`, ascending."""
    markers = folder.glob(f"step_*/{COMPLETE}")
    return sorted(int(marker.parent.name.removeprefix("step_")) for marker in markers)


def best_step(run_folder: Path) -> int:
    """Returns the step of the best checkpoint with `run.keep_best`; 0: no step was better than step 0."""
    path = run_folder / BEST
    return int(read_json(path)["step"]) if path.exists() else 0


def check_whole(path: Path) -> None:
    """Raises UserError if a file of a checkpoint is missing or has another size, or another version wrote it."""
    meta = read_json(path / META)
    if meta.get("format") != FORMAT:
        raise UserError(f"{path}: another version of the program wrote it; finish the run with it.")
    for name, size in meta["files"].items():
        actual = (path / name).stat().st_size if (path / name).exists() else 0
        if actual != size:
            raise UserError(
                f"{path}: damaged: {name} has {actual} bytes, not {size}. Put the file back, or remove the folder to "
                "use the checkpoint before it."
            )


@contextmanager
def disk_errors_reported(run_folder: Path) -> Iterator[None]:
    """Turns errors of a full disk into a `UserError`. Others may pass, as those of a shared disk do: no `UserError`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__  # torch wraps it
        if not isinstance(cause, OSError) or cause.errno not in DISK_FULL:
            raise
        raise UserError(
            f"{run_folder}: cannot be written: {cause.strerror}. Its complete checkpoints are whole: make room, then "
            "run the same command again."
        ) from None


def status(run_folder: Path) -> tuple[str, bool]:
    """Returns a sentence on the progress of a run, and whether it has finished."""
    if (run_folder / DONE).exists():
        return f"finished at step {read_json(run_folder / DONE)['step']}", True
    holder = lock_holder(run_folder)
    steps = saved_steps(run_folder / "checkpoints")
    if not (holder or steps or (run_folder / SETTINGS).exists()):
        problem = "holds no run" if run_folder.exists() else "does not exist"
        return f"not begun: {run_folder} {problem}", False
    saved = f"checkpoint at step {steps[-1]}" if steps else "no checkpoint yet"
    return f"{f'running ({holder})' if holder else 'unfinished'}, {saved}", False
