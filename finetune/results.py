"""A results folder: one folder for each run, whose record.json is written last.

RESULTS/SYSTEM/TASK-SIZE/p1-d1-s1/ holds record.json, settings.yaml (the recipe of the run), predictions.parquet,
runs/ (TensorBoard) and, with --save_model, model/; until a run is finished also checkpoint-N/, and error.json if it
failed.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from finetune.heads.build import model_card, save_fine_tuned
from finetune.settings import READ_BY, RunSettings
from finetune.tasks import Array, TaskData
from multicls.cards import cell
from multicls.environment import environment_record
from multicls.errors import UserError
from multicls.evaluation import Scores, compare
from multicls.files import atomic_folder, atomic_write, lock_holder, read_json, write_json
from multicls.settings import to_yaml

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedTokenizerBase

    from finetune.heads.modeling_task import TaskModel

Record = dict[str, Any]
FORMAT = 8
RECORD, SETTINGS, ERROR = "record.json", "settings.yaml", "error.json"
PREDICTIONS = "predictions.parquet"
HASHES = {  # in words
    "data_sha256": "other rows: the files of --data_dir or the way they are read have changed",
    "weights_sha256": "other weights, configuration or tokenizer in the model's folder",
}


class TrainedSystem(NamedTuple):
    """A trained system."""

    outputs: list[dict[str, Array]]  # of each task (N, C) by split, without "train"
    fields: dict[str, Any]  # of the record, on training
    model: "TaskModel | None" = None  # invented runs have none
    tokenizer: "PreTrainedTokenizerBase | None" = None


def write_run(
    settings: RunSettings, rows: Sequence[TaskData], system: TrainedSystem, identity: Record
) -> Record:
    """Scores a run and writes its folder: its model, if it is to be saved, predictions and recipe, its record last."""
    import pandas as pd

    folder, tables = settings.folder, list[pd.DataFrame]()
    names = {"head", "model", "selection", "pretraining", "seed", "search"}
    record = {
        **settings.model_dump(mode="json", include=names),
        "format": FORMAT,
        "path": str(folder),
        "system": settings.system,
        "train_size": str(settings.train_size),
        # All subsets of all rows are the same.
        "subset": settings.subset if any(part.is_subset for part in rows) else 1,
        "tasks": [],
        **environment_record(),
        **system.fields,
        **identity,
    }
    for part, outputs in zip(rows, system.outputs, strict=True):
        splits = {split: score_split(part, split, values) for split, values in outputs.items()}
        tables += [table for _, table in splits.values()]
        record["tasks"].append(
            {
                "task": part.task.name,
                "metric": part.task.metrics[0],
                "train_rows": len(part.train),
                "splits": {split: entry for split, (entry, _) in splits.items()},
                "notes": part.notes,
            }
        )
    if settings.save_model:
        save_model(system, rows, settings, record)
    with atomic_write(folder / PREDICTIONS, "wb") as file:
        pd.concat(tables).to_parquet(file, index=False, compression="zstd")
    with atomic_write(folder / SETTINGS) as file:
        file.write(to_yaml(settings))
    write_json(folder / RECORD, record)
    (folder / ERROR).unlink(missing_ok=True)
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path, ignore_errors=True)
    return record


def score_split(rows: TaskData, split: str, outputs: Array) -> tuple[Record, "DataFrame"]:
    """Returns the scores of a split (fractions of 1) beside those of the majority class, and a table of its rows.

    The columns are task, split, id, text, label and predicted (names, or scores), outputs (a list), unit, and for the
    report the values of the main metric, whose mean is the score: `value`, and `guess` of the majority class.
    """
    import pandas as pd

    from finetune.metrics import (
        labels_of,
        majority_output,
        metric_values,
        names_of,
        predictions_of,
        score_predictions,
    )

    task, examples = rows.task, rows.splits[split]
    values = metric_values(task, task.metrics[0], examples, outputs)
    majority = majority_output(task, [*rows.train, *rows.validation], examples)
    guesses = np.tile(majority, (len(examples), 1))
    table = pd.DataFrame(
        {
            "task": task.name,
            "split": split,
            "id": [example.id for example in examples],
            "text": ["\n".join(example.texts) for example in examples],
            "label": names_of(task, labels_of(examples)),
            "predicted": names_of(task, predictions_of(task, outputs)),
            "outputs": list(outputs),
            "unit": [example.unit for example in examples],
            "value": values,
            "guess": metric_values(task, task.metrics[0], examples, guesses),
        }
    )
    change = compare(scores_of([values], table["unit"].to_numpy(str), task.metrics[0]))
    entry = {
        "rows": len(values),
        "interval": list(change.interval),
        "scores": score_predictions(task, examples, outputs),
        "baselines": score_predictions(task, examples, guesses),
    }
    return entry, table


def scores_of(values: Sequence[Array], units: Array, metric: str) -> Scores:
    """Returns the scores of training sets that are scored on the same rows, one value per row of each."""
    draws = np.array(values)
    _, numbers = np.unique(units, return_inverse=True)
    return Scores(np.zeros((0, draws.shape[1])), draws, numbers, metric=metric)


def save_model(
    system: TrainedSystem, rows: Sequence[TaskData], settings: RunSettings, record: Record
) -> None:
    """Saves the model of a run with its card, and for predict.py what its task is, if it is one of plain texts."""
    from finetune.saved import write_record

    assert system.model and system.tokenizer
    tasks = [part.task for part in rows]
    lines = ["| task | metric | dev rows | this model | majority class |", "|---|---|---|---|---|"]
    for entry in record["tasks"]:
        dev = entry["splits"]["dev"]
        for metric, score in dev["scores"].items():
            guess = dev["baselines"][metric]
            cells = f"{cell(entry['task'])} | {metric} | {dev['rows']}"
            lines.append(f"| {cells} | {100 * score:.1f} | {100 * guess:.1f} |")
    if settings.selection == "dev":
        lines += ["", "The dev rows also picked the checkpoint, which is optimistic."]
    hubs = sorted(task.hub[0] for task in tasks if task.hub)
    recipe = to_yaml(settings.model_copy(update={"model": "", "data_dir": None, "output_dir": ""}))
    card = model_card(
        settings.model,
        settings.head,
        tasks,
        pooling=settings.pooling if settings.head in READ_BY["pooling"] else "",
        scores="\n".join(lines),
        training=recipe,
        datasets=hubs or None,
    )
    with atomic_folder(settings.folder / "model") as fresh:
        save_fine_tuned(system.model, system.tokenizer, fresh, card)
        task = tasks[0]
        if len(tasks) == 1 and not (task.num_choices or task.num_spans):
            write_record(fresh, "tuned", task.kind, task.labels, task.fields)


def read_record(folder: Path) -> Record | None:
    """Returns the record of a finished run, else None; one of another version is a `UserError`."""
    if not (folder / RECORD).exists():
        return None
    record: Record = read_json(folder / RECORD)
    if record.get("format") != FORMAT:
        raise UserError(f"{folder}: written by another version; set another folder for results.")
    return record | {"path": str(folder)}  # results may have been moved


def finished_record(settings: RunSettings, identity: Record | None = None) -> Record | None:
    """Returns the record of a run if all is there that it is to save, else None; that of another is a `UserError`."""
    if (record := read_record(settings.folder)) is None:
        return None
    if identity and (what := ", ".join(differences(record, identity).values())):
        raise UserError(f"{record['path']}: holds another run ({what}); set another --output_dir.")
    lacks_model = settings.save_model and not (settings.folder / "model").is_dir()
    return None if lacks_model else record


def differences(before: Record, now: Record) -> dict[str, str]:
    """Returns what differs between two identities of runs, in words, by name; `before` may have more fields."""
    old, new = ({k: v for k, v in run["settings"].items() if v != {}} for run in (before, now))
    pairs = {name: (before.get(name), now[name]) for name in now if name != "settings"}
    pairs |= {name: (old.get(name), new.get(name)) for name in sorted({*old, *new})}
    return {
        name: HASHES.get(name, f"{name} {was}, not {value}")
        for name, (was, value) in pairs.items()
        if was != value
    }


def write_error(run: RunSettings, kind: str, error: BaseException) -> None:
    """Writes why a run is not finished; its `kind` is "incompatible" (by design) or "failed"."""
    reason = str(error) if kind == "incompatible" else f"{type(error).__name__}: {error}"
    write_json(run.folder / ERROR, {"kind": kind, "error": reason})


def run_state(folder: Path) -> tuple[str, str]:
    """Returns the state of a run, "finished", "at work", "incompatible", "failed" or "missing", and the reason."""
    record, error = folder / RECORD, folder / ERROR
    has_error = error.exists()
    if record.exists() and not (has_error and error.stat().st_mtime > record.stat().st_mtime):
        return "finished", ""
    if holder := lock_holder(folder):  # it may have another error, of an earlier start
        return "at work", f"by {holder}"
    if not has_error:
        return "missing", ""
    found = read_json(error)
    return found["kind"], found["error"]


def read_predictions(folder: Path, task: str, split: str = "dev") -> "DataFrame":
    """Returns the rows of a task's split with a run's predictions (`score_split`); a missing file is a `UserError`."""
    import pandas as pd

    path = folder / PREDICTIONS
    if not path.exists():
        raise UserError(f"{path} is missing; delete this folder and run it again.")
    return pd.read_parquet(path, filters=[("task", "==", task), ("split", "==", split)])


def load_results(folder: Path) -> list[Record]:
    """Returns all finished runs, one for each run and task, with the fields of the record and `selection_score`.

    `selection_score` is the main score on the rows that picked the checkpoint. Of runs that differ in the number of a
    subset of all rows only the first counts.

    Raises:
        UserError: The folder has no finished run.
    """
    keys = ("system", "task", "train_size", "weights_sha256", "subset", "seed", "search")
    runs = dict[str, Record]()
    for path in sorted(folder.glob(f"*/*/*/{RECORD}")):
        record = read_record(path.parent) or {}
        hashes = record["data_sha256"].split("+")
        for entry, data_sha256 in zip(record["tasks"], hashes, strict=True):
            picking = entry["splits"].get("validation", entry["splits"]["dev"])
            own = {
                "selection_score": picking["scores"][entry["metric"]],
                "data_sha256": data_sha256,
            }
            run = record | entry | own
            runs.setdefault(repr([run[key] for key in keys]), run)
    if not runs:
        what = "no finished run" if folder.is_dir() else "no such folder"
        hint = "finetune/run.py and finetune/grid.py write results."
        raise UserError(f"{folder}: {what}; {hint}", *unfinished_runs(folder))
    return list(runs.values())


def unfinished_runs(folder: Path) -> list[str]:
    """Returns a line on the runs that are missing or failed; none if there are none."""
    states = [(path, *run_state(path)) for path in sorted(folder.glob("*/*/p*-d*-s*"))]
    done = ("finished", "incompatible")
    lines = [f"{path}: {why or state}" for path, state, why in states if state not in done]
    return [f"runs not finished: {len(lines)}, for instance {line}" for line in lines[:1]]
