"""A results folder: one folder for each run, whose record.json is written last.

RESULTS/SYSTEM/TASK-SIZE/p1-d1-s1/ holds record.json, settings.yaml (the recipe of the run), predictions.parquet,
runs/ (TensorBoard) and, with --save_model, model/; until a run is finished also checkpoint-N/, and error.json if it
failed.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.special import logit

from finetune.heads.build import save_fine_tuned
from finetune.settings import RunSettings
from finetune.tasks import (
    TASKS,
    TEXT_FIELDS,
    Array,
    Example,
    Task,
    TaskData,
    example_arrays,
    task_of,
)
from multicls.cards import METHOD, PAPERS, TRANSFORMERS, cell, inherited_metadata, model_link
from multicls.environment import environment_record
from multicls.errors import UserError
from multicls.evaluation import Scores, compare
from multicls.files import atomic_write, lock_holder, read_json, write_json
from multicls.measures import LOWER_IS_BETTER, factor_of, larger_is_better
from multicls.settings import to_yaml

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.heads.modeling_task import TaskModel

Record = dict[str, Any]
Predictions = Mapping[str, Mapping[str, Array]]  # of a task by split; see `example_arrays`
Scored = Sequence[tuple[Task, Predictions]]  # of each task, with the thresholds that are fitted
FORMAT = 8
RECORD, SETTINGS, ERROR = "record.json", "settings.yaml", "error.json"
PREDICTIONS = "predictions.parquet"
HASHES = {  # in words
    "data_sha256": "other rows: the tables or the way they are read have changed; name other tables by --task_name",
    "weights_sha256": "other weights, configuration or tokenizer in the model's folder",
}


class TrainedSystem(NamedTuple):
    """A trained or fitted system."""

    outputs: list[dict[str, Array]]  # of each task (N, C) by split, without "train"
    fields: dict[str, Any]  # of the record, on training
    model: "TaskModel | None" = None  # invented runs have none
    tokenizer: "PreTrainedTokenizerBase | None" = None


def write_run(
    settings: RunSettings, rows: Sequence[TaskData], system: TrainedSystem, identity: Record
) -> Record:
    """Scores a run and writes its folder: its model, if it is to be saved, predictions and recipe, its record last."""
    folder = settings.folder
    entries, tasks = list[Record](), list[tuple[Task, Predictions]]()
    for part, of in zip(rows, system.outputs, strict=True):
        arrays = {split: example_arrays(part.splits[split], logits) for split, logits in of.items()}
        entries.append(_task_entry(part, arrays))
        tasks.append((task_of(entries[-1]["description"]), arrays))
    names = {"head", "model", "selection", "pretraining", "seed", "search"}
    record = {
        **settings.model_dump(mode="json", include=names),
        "format": FORMAT,
        "path": str(folder),
        "system": settings.system,
        "train_size": str(settings.train_size),
        # All subsets of all rows are the same.
        "subset": settings.subset if any(part.is_subset for part in rows) else 1,
        "tasks": entries,
        **environment_record(),
        **system.fields,
        **identity,
    }
    if settings.save_model:
        save_calibrated(system, folder / "model", record, tasks)
    write_predictions(folder / PREDICTIONS, tasks)
    with atomic_write(folder / SETTINGS) as file:
        file.write(to_yaml(settings))
    write_json(folder / RECORD, record)
    (folder / ERROR).unlink(missing_ok=True)
    remove_checkpoints(folder)
    return record


def remove_checkpoints(folder: Path) -> None:
    """Removes the checkpoints of a run that has finished."""
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path, ignore_errors=True)


def save_calibrated(system: TrainedSystem, folder: Path, record: Record, tasks: Scored) -> None:
    """Saves the model with the temperature and thresholds of a run, and its card; see `model_card`."""
    model = system.model
    assert model and system.tokenizer
    for number, entry in enumerate(record["tasks"]):
        for parameter in model.classifiers[number].parameters():
            parameter.data /= entry["temperature"] or 1.0
    model.config.thresholds = [entry["thresholds"] for entry in record["tasks"]]
    save_fine_tuned(model, system.tokenizer, folder, model_card(record, tasks))


def _task_entry(rows: TaskData, predictions: Predictions) -> dict[str, Any]:
    """Returns what one task was, its scores on each split (fractions of 1), and its calibration by validation."""
    from finetune.calibration import fit_temperature, fit_thresholds

    task, train = rows.task, [*rows.train, *rows.validation]
    temperature, thresholds, cut = None, list[float](), task
    if held := predictions.get("validation"):
        temperature = fit_temperature(task, held["logits"], held["labels"])
        if task.multi_label:
            thresholds = fit_thresholds(held["logits"] / temperature, held["labels"])
            cuts = (temperature * logit(np.array(thresholds))).tolist()
            cut = replace(task, cuts=tuple(cuts))
    return {
        "task": task.name,
        "metric": task.metrics[0],
        "train_rows": len(rows.train),
        "splits": {
            # The rows that fitted the thresholds cannot judge them.
            split: _split_entry(task if split == "validation" else cut, arrays, train, rows, split)
            for split, arrays in predictions.items()
        },
        "description": cut.describe(),
        "notes": rows.notes,
        "temperature": temperature,
        "thresholds": thresholds,
    }


def _split_entry(
    task: Task, arrays: Mapping[str, Array], train: list[Example], rows: TaskData, split: str
) -> dict[str, Any]:
    """Returns the scores of a run on a split, and those of the majority class with its output."""
    from finetune.metrics import main_values, majority_output, score_predictions

    values, units = main_values(task, arrays)
    main = task.metrics[0]
    change = compare(scores_of([values], units, main))
    output = majority_output(rows.task, train, rows.splits[split])
    guesses = {**arrays, "logits": np.tile(output, (len(values), 1))}
    return {
        "rows": len(values),
        "interval": [change.low, change.high if main in LOWER_IS_BETTER else min(1.0, change.high)],
        "scores": score_predictions(task, arrays),
        "majority": output.tolist(),
        "baselines": score_predictions(rows.task, guesses),
    }


def scores_of(values: Sequence[Array], units: Array, metric: str) -> Scores:
    """Returns the scores of training sets that are scored on the same rows, one value per row of each."""
    draws = np.array(values)
    _, numbers = np.unique(units, return_inverse=True)
    return Scores(np.zeros((0, draws.shape[1])), draws, numbers, metric=metric)


def model_card(record: Record, tasks: Scored) -> str:
    """Returns the card of a saved model as Markdown with the Hub's metadata."""
    from huggingface_hub import ModelCard, ModelCardData

    inherited, task, head = inherited_metadata(record["model"]), tasks[0][0], record["head"]
    hubs = [TASKS[part.name].hub for part, _ in tasks if part.name in TASKS]
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=None if task.num_choices or task.num_spans else "text-classification",
        tags=["text-classification"],
        datasets=sorted({hub[0] for hub in hubs if hub}) or None,
        **inherited,
    )
    papers = [METHOD] * (METHOD in head + record["settings"]["pooling"]) + [head]
    card = ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("card.md.jinja")),
        cell=cell,
        factor_of=factor_of,
        larger_is_better=larger_is_better,
        start=model_link(inherited),
        record=record,
        task=task,
        license=inherited.get("license_name") or inherited.get("license"),
        transformers=TRANSFORMERS,
        citations=[PAPERS[name] for name in dict.fromkeys(papers) if name in PAPERS],
    )
    return str(card)


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
    write_json(run.folder / ERROR, {"kind": kind, "error": reason, "settings": run.compared()})


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


def write_predictions(path: Path, tasks: Scored) -> None:
    """Writes a row for each evaluated example, for people and `load_predictions`.

    Columns: task, split, label and predicted (names, or scores), target and outputs (lists of numbers), and the fields
    of `example_arrays`.
    """
    import pandas as pd

    from finetune.metrics import names_of, predictions_of

    tables = list[pd.DataFrame]()
    for task, splits in tasks:
        for split, arrays in splits.items():
            columns: dict[str, Any] = {name: arrays[f"{name}s"] for name in ("text", *TEXT_FIELDS)}
            predicted = predictions_of(task, arrays["logits"])
            columns |= {
                "label": names_of(task, arrays["labels"]),
                "predicted": names_of(task, predicted),
                "target": list(arrays["labels"].reshape(len(predicted), -1)),
                "outputs": list(arrays["logits"]),
            }
            tables.append(pd.DataFrame({"task": task.name, "split": split} | columns))
    with atomic_write(path, "wb") as file:
        pd.concat(tables).to_parquet(file, index=False, compression="zstd")


def load_predictions(folder: Path, task: str) -> dict[str, dict[str, Array]]:
    """Returns the predictions of a run for a task, by split and name; a missing file is a `UserError`."""
    import pandas as pd

    path, splits = folder / PREDICTIONS, dict[str, dict[str, Array]]()
    if not path.exists():
        raise UserError(f"{path} is missing; delete this folder and run it again.")
    table = pd.read_parquet(path, filters=[("task", "==", task)])
    for split, rows in table.groupby("split", sort=False):
        arrays = {f"{name}s": rows[name].to_numpy(dtype=object) for name in (*TEXT_FIELDS, "text")}
        arrays["logits"] = np.stack(list(rows["outputs"])).astype(np.float32)
        targets = np.stack(list(rows["target"])).astype(float)
        arrays["labels"] = targets if targets.shape[1] > 1 else targets[:, 0]  # several labels
        splits[str(split)] = arrays
    return splits


def load_results(folder: Path) -> list[Record]:
    """Returns all finished runs, one for each run and task, with the fields of the record and `selection_score`.

    `selection_score` is the main score on the rows that picked the checkpoint, the larger the better. Of runs that
    differ in the number of a subset of all rows only the first counts.

    Raises:
        UserError: The folder has no finished run.
    """
    keys = ("system", "task", "train_size", "weights_sha256", "subset", "seed", "search")
    runs = dict[str, Record]()
    for path in sorted(folder.glob(f"*/*/*/{RECORD}")):
        record = read_record(path.parent) or {}
        for entry in record["tasks"]:
            picking = entry["splits"].get("validation", entry["splits"]["dev"])
            score = picking["scores"][entry["metric"]]
            run = record | entry | {"selection_score": larger_is_better(entry["metric"], score)}
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
