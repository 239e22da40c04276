"""Fine-tunes a model on a task and keeps scores, predictions and curves in one folder.

python finetune/run.py --model runs/sample/hf --task rte --train_size 100 --head mean --seed 1 --data_dir glue
python finetune/run.py --model runs/sample/hf --train_file tickets.csv --head mean --save_model
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
from finetune.heads.build import build_model, checkpoint_sha256
from finetune.own_data import load_own
from finetune.predict import predict_command
from finetune.results import Record, TrainedSystem, finished_record, write_run
from finetune.settings import RECIPES, SHORTCUTS, OwnDataSettings, RunSettings
from finetune.subsets import select_rows
from finetune.tasks import TASKS, TaskData
from multicls.console import count, print_line, print_summary
from multicls.distributed import leave_deepspeed, on_rank_0, prepare_deepspeed, rank_and_world
from multicls.errors import UserError, run_command
from multicls.files import locked
from multicls.measures import factor_of
from multicls.settings import parse

HELP = {
    "data": "own.train_file own.test_file own.text_column own.label_column task data_dir train_size",
    "model": "model head",
    "training": "recipe train.learning_rate train.epochs train.batch_size",
    "output": "output_dir save_model print_config",
}
FEWEST = 8  # rows of one's own to train on
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
        model, command = Path(record["path"], "model"), ""
        if model.is_dir():
            command = predict_command(model, record, settings.own.test_file or "ROWS.csv")
        command = command or f"python finetune/report.py {shlex.quote(settings.output_dir)}"
        print_summary([("run", record["path"])], command)
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
    if settings.own.train_file and (few := len(rows[0].train)) < FEWEST:
        raise UserError(
            f"{settings.own.train_file}: {count(few, 'row')} to train on; set {FEWEST}."
        )
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


def _print_notes(notes: Sequence[str], what: str = "") -> None:
    """Prints notes that this process has not printed yet, or none on `what`: a grid has many runs on the same rows."""
    for note in notes:
        if (what or note) not in _printed and rank_and_world()[0] == 0:
            print_line(f"note: {note}")
        _printed.add(what or note)


def _print_scores(record: Record) -> None:
    """Prints the scores on dev and test, with the number of their rows, and those of the majority class."""
    picked = record["selection"] == "dev"
    for entry in record["tasks"]:
        for split, found in entry["splits"].items():
            if split == "validation":
                continue
            rows = f"{split}, {count(found['rows'], 'row')}"
            if split == "dev" and picked:
                rows += ", which also picked the checkpoint: optimistic"
            scored = {rows: found["scores"], f"majority class on {split}": found["baselines"]}
            for what, scores in scored.items():
                values = "  ".join(f"{n} {factor_of(n) * value:.2f}" for n, value in scores.items())
                print_line(f"{record['system']} on {entry['task']}, {what}: {values}")
            low, high = (factor_of(entry["metric"]) * end for end in found["interval"])
            print_line(f"95 % interval of {entry['metric']} for new rows: {low:.2f} to {high:.2f}")


def load_tasks(settings: RunSettings) -> list[TaskData]:
    """Returns all examples of the tasks of a run, or of the user's own rows; a process reads them once."""
    where = (settings.own, settings.data_dir, settings.max_length)
    return [_load_task(name, *where) for name in settings.task_names or [""]]


@lru_cache(maxsize=8)
def _load_task(name: str, own: OwnDataSettings, source: str | None, limit: int | None) -> TaskData:
    data = load_own(own) if own.train_file else read_task(TASKS[name], source)
    return replace(data, task=replace(data.task, max_length=limit or data.task.max_length))


def identify(settings: RunSettings, data: Sequence[TaskData]) -> Record:
    """Returns all that decides a run's numbers, for its record and its checkpoints."""
    return {
        "settings": settings.compared(),
        "weights_sha256": checkpoint_sha256(settings.model),
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

    The identity, all that decides the numbers, marks checkpoints in `folder`. Without dev rows the last weights count.
    """
    from finetune.encoding import Encoded, notes_on_cuts
    from finetune.training import TaskTrainer

    model, tokenizer = build_model(settings, [part.task for part in rows])
    encoded = [
        {name: Encoded(part.task, split, tokenizer) for name, split in part.splits.items()}
        for part in rows
    ]
    for part, splits in zip(rows, encoded, strict=True):
        cuts = notes_on_cuts(splits)
        part.notes.extend(cuts)
        _print_notes(cuts, what=f"rows of {part.task.name} that are cut")
    trained = TaskTrainer(model, encoded, settings, identity, folder).run()
    return TrainedSystem(*trained, model, tokenizer)


if __name__ == "__main__":
    run_command(main)
