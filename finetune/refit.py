"""Trains the system of a finished run once more, on all labels, for a model to use; the run stays as it was.

python finetune/refit.py results/k5-mean/tickets-150/p1-d1-s1

A run that is scored leaves labels out: to pick a checkpoint, for dev, and beyond its subset. The model goes to
RESULTS/best/TASK/model, and refit.json beside it says what it has seen. No row picks its weights: it trains for the
run's best step, times the ratio of the numbers of rows.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

from pydantic import Field
from pydantic_settings import CliPositionalArg

from finetune import results
from finetune.heads import FITTED, WITHOUT_MODEL
from finetune.predict import predict_command
from finetune.results import Record
from finetune.run import identify, load_tasks, train_system
from finetune.settings import RunSettings
from finetune.subsets import select_rows
from finetune.tasks import TaskData, example_arrays, task_of
from multicls.console import count, print_line, print_summary
from multicls.errors import UserError, run_command
from multicls.files import locked, read_json, write_json
from multicls.settings import Settings, load_settings, parse

REFIT = "refit.json"


class RefitOptions(Settings):
    """Options of the command."""

    run: CliPositionalArg[str] = Field(description="folder of a finished run")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    options = parse(RefitOptions, argv, prog="finetune/refit.py", doc=__doc__)
    model = refit(Path(options.run).absolute())
    record = results.read_record(Path(options.run)) or {}
    print_summary([("model", model)], predict_command(model, record))
    return 0


def refit(run: Path) -> Path:
    """Returns the folder of the model of a run's system, trained on all labels; makes it if it is not there.

    Processes that make the same model wait for each other. A run that is not finished, leaves no model, or whose rows
    or model have changed since, is a `UserError`.
    """
    record = results.read_record(run)
    if record is None:
        raise UserError(f"{run}: not a finished run; pass RESULTS/SYSTEM/TASK-SIZE/p1-d1-s1.")
    if record["head"] in WITHOUT_MODEL:
        raise UserError(f"{run}: the head {record['head']} leaves no model.")
    settings = load_settings(RunSettings, [run / results.SETTINGS])
    data = load_tasks(settings)
    if changes := ", ".join(results.differences(record, identify(settings, data)).values()):
        raise UserError(f"{run}: cannot be refitted ({changes}).")
    rows = [all_labels(part, settings) for part in data]
    folder = run.parents[2] / "best" / "+".join(entry["task"] for entry in record["tasks"])
    source = {"system": record["system"], "run": run.name, "size": record["train_size"]}
    source |= {"format": results.FORMAT, "settings": record["settings"], "search": record["search"]}
    with locked(folder, patience=-1):  # for as long as it takes
        done = read_json(folder / REFIT) if (folder / REFIT).exists() else {}
        if any(done.get(name) != value for name, value in source.items()):
            if done:
                what = f"{done['system']}, {done['size']} rows, {done['run']}"
                print_line(f"{folder}: replaces the model of {what}")
            made = _train(settings, record, rows, folder)
            write_json(folder / REFIT, source | made)
            results.remove_checkpoints(folder)
        return folder / "model"


def all_labels(data: TaskData, settings: RunSettings) -> TaskData:
    """Returns all labels as training rows: also dev of own rows with a test file; the subset of a benchmark."""
    if not settings.own.train_file:
        drawn = select_rows(data, settings.train_size, settings.subset, holdout=False)
        return replace(drawn, dev=[], test=[])
    train = [*data.train, *(data.dev if data.test else [])]
    return replace(data, train=train, dev=[], notes=list(data.notes))


def _train(settings: RunSettings, record: Record, rows: Sequence[TaskData], folder: Path) -> Record:
    """Trains and saves the model; returns what it has seen and its scores on test rows."""
    from finetune.metrics import score_predictions

    seen = {part.task.name: len(part.train) for part in rows}
    for name, number in seen.items():
        print_line(f"{record['system']} once more on all labels of {name}: {count(number, 'row')}")
    made: Record = {"training_rows": seen}
    if settings.head not in FITTED:
        before = sum(entry["train_rows"] for entry in record["tasks"])
        made["steps"] = max(1, round(record["best_step"] * sum(seen.values()) / before))
        values = {"max_steps": made["steps"], "epochs": made["steps"]}
        train = settings.train.model_copy(update=values | {"batch_size": record["batch_size"]})
        settings = settings.model_copy(update={"train": train})
    identity = {"settings": settings.compared(), "training_rows": seen}
    system = train_system(settings, rows, identity, folder)
    tasks = [task_of(entry["description"]) for entry in record["tasks"]]
    made["tests"] = {
        task.name: score_predictions(task, example_arrays(part.test, outputs["test"]))
        for task, part, outputs in zip(tasks, rows, system.outputs, strict=True)
        if part.test
    }
    for name, scores in made["tests"].items():
        text = "  ".join(f"{metric} {100 * value:.2f}" for metric, value in scores.items())
        print_line(f"{record['system']}, from all labels, on {name}, test: {text}")
    parts = [(task, results.load_predictions(Path(record["path"]), task.name)) for task in tasks]
    results.save_calibrated(system, folder / "model", record, parts, made)
    return made


if __name__ == "__main__":
    run_command(main)
