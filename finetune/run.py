"""Fine-tunes a model on a task and keeps scores, predictions and curves in one folder.

python finetune/run.py --model runs/sample/hf --task rte --train_size 100 --head mean --seed 1 --data_dir glue
deepspeed --num_gpus 2 finetune/run.py --config ds_configs/zero2.json --model sample --task rte --head cls
"""

import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

from finetune.benchmark_tasks import read_task
from finetune.heads.build import build_model, find_checkpoint
from finetune.results import Record, TrainedSystem, finished_record, write_run
from finetune.settings import RECIPES, SHORTCUTS, RunSettings
from finetune.subsets import select_rows
from finetune.tasks import TASKS, TaskData
from multicls.console import count, print_line, print_summary
from multicls.distributed import leave_deepspeed, on_rank_0, prepare_deepspeed, rank_and_world
from multicls.embeddings import model_sha256
from multicls.errors import UserError, run_command
from multicls.files import locked
from multicls.settings import parse

HELP = {
    "data": "task data_dir train_size",
    "model": "model head",
    "training": "recipe train.learning_rate train.epochs train.batch_size",
    "output": "output_dir save_model print_config",
}
_printed = set[str]()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    settings = parse(
        RunSettings,
        argv,
        prog="finetune/run.py",
        doc=__doc__,
        shortcuts=SHORTCUTS,
        recipes=RECIPES,
        common=HELP,
    )
    record = run_finetune(settings)
    if rank_and_world()[0] == 0:
        command = f"python finetune/report.py {shlex.quote(settings.output_dir)}"
        model = Path(record["path"], "model")
        made = [("run", record["path"]), *([("model", model)] if model.is_dir() else [])]
        print_summary(made, command)
    if rank_and_world()[1] > 1 or settings.config:
        leave_deepspeed()
    return 0


def run_finetune(settings: RunSettings) -> Record:
    """Makes one run, from the rows to its record, which rank 0 returns; a finished run is not repeated.

    Raises:
        FolderInUse: Another process makes this run.
        UserError: Model, data or settings do not fit, or the head (`Incompatible`); no record is written then.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products
    if settings.config or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        prepare_deepspeed()
    is_first, holdout = rank_and_world()[0] == 0, settings.selection == "holdout"
    data = load_tasks(settings)
    rows = [select_rows(part, settings.train_size, settings.subset, holdout) for part in data]
    identity = identify(settings, data)
    with locked(settings.folder) if is_first else nullcontext():
        record = on_rank_0(lambda: finished_record(settings, identity))
        if is_first:
            print_line(f"{'already finished: ' if record else ''}{settings.folder}")
            for part in rows:
                print_line(part.counts())
                _print_notes(part.notes)
        record = record or _train(settings, rows, identity)
    if is_first:
        _print_scores(record)
    return record


def _print_notes(notes: Sequence[str]) -> None:
    """Prints notes that this process has not printed yet: a grid has many runs on the same rows."""
    for note in notes:
        if note not in _printed and rank_and_world()[0] == 0:
            print_line(f"note: {note}")
        _printed.add(note)


def _print_scores(record: Record) -> None:
    """Prints the scores on dev with their intervals for new rows, and those of the majority class."""
    picked = (
        ", which also picked the checkpoint: optimistic" if record["selection"] == "dev" else ""
    )
    for entry in record["tasks"]:
        dev, metric = entry["splits"]["dev"], entry["metric"]
        low, high = (100 * end for end in dev["interval"])
        scores = "  ".join(f"{name} {100 * value:.2f}" for name, value in dev["scores"].items())
        print_line(
            f"{record['system']} on {entry['task']}, dev, {count(dev['rows'], 'row')}{picked}: {scores}; "
            f"{metric} {low:.2f} to {high:.2f} for new rows, majority class {100 * dev['baselines'][metric]:.2f}"
        )


def load_tasks(settings: RunSettings) -> list[TaskData]:
    """Returns all examples of the tasks of a run; a process reads them once."""
    if not settings.task_names:
        raise UserError("--task: required; finetune/compare.py is for your own rows.")
    where = (settings.data_dir, settings.max_length)
    return [_load_task(name, *where) for name in settings.task_names]


@lru_cache(maxsize=8)
def _load_task(name: str, source: str | None, limit: int | None) -> TaskData:
    data = read_task(TASKS[name], source)
    return replace(data, task=replace(data.task, max_length=limit or data.task.max_length))


@lru_cache(maxsize=16)
def _weights_sha256(model: str) -> str:
    return model_sha256(find_checkpoint(model))


def identify(settings: RunSettings, data: Sequence[TaskData]) -> Record:
    """Returns all that decides a run's numbers, for its record and its checkpoints."""
    return {
        "settings": settings.compared(),
        "weights_sha256": _weights_sha256(settings.model),
        "data_sha256": "+".join(part.sha256 for part in data),
    }


def _train(settings: RunSettings, rows: Sequence[TaskData], identity: Record) -> Record:
    from finetune.training import find_device
    from multicls.optim import choose_precision

    began, device = time.perf_counter(), find_device()
    system = train_system(settings, rows, identity, settings.folder)
    if rank_and_world()[0]:
        return {}
    fields = {"seconds": round(time.perf_counter() - began, 3), "device": device.type}
    fields["precision"] = choose_precision(settings.train.precision, device)
    return write_run(settings, rows, system._replace(fields=fields | system.fields), identity)


def train_system(
    settings: RunSettings, rows: Sequence[TaskData], identity: Record, folder: Path
) -> TrainedSystem:
    """Trains the system of the settings on the training rows of its tasks.

    The identity, all that decides the numbers, marks checkpoints in `folder`.
    """
    from finetune.encoding import Encoded
    from finetune.training import TaskTrainer

    model, tokenizer = build_model(settings, [part.task for part in rows])
    encoded = [
        {name: Encoded(part.task, split, tokenizer) for name, split in part.splits.items()}
        for part in rows
    ]
    trained = TaskTrainer(model, encoded, settings, identity, folder).run()
    return TrainedSystem(*trained, model, tokenizer)


if __name__ == "__main__":
    run_command(main)
