"""Runs of finetune/run.py in this process, and invented results folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from finetune.results import FORMAT, PREDICTIONS, RECORD, load_predictions
from finetune.run import run_finetune
from finetune.settings import RunSettings
from finetune.tasks import TASKS, Example, example_arrays
from multicls.files import write_json
from multicls.settings import load_settings

Array = np.ndarray[Any, np.dtype[Any]]


def settings_of(model: Path | str, data: Path, output: Path, **values: Any) -> RunSettings:
    """Returns quick settings; dots in names are written as __."""
    quick = {
        "model": str(model),
        "task": "sst2",
        "head": "cls",
        "data_dir": str(data),
        "output_dir": str(output),
        "max_length": 24,
        "train.learning_rate": 3e-3,
    }
    changes = {name.replace("__", "."): value for name, value in values.items()}
    return load_settings(
        RunSettings, values={k: v for k, v in (quick | changes).items() if v != ""}
    )


def finetune(model: Path | str, data: Path, output: Path, **values: Any) -> dict[str, Any]:
    """Does a run and returns its record."""
    return run_finetune(settings_of(model, data, output, **values))


def logits_of(record: dict[str, Any], split: str = "dev", task: int = 0) -> Array:
    """Returns the saved outputs of a run."""
    name = record["tasks"][task]["task"]
    return load_predictions(Path(record["path"]), name)[split]["logits"]


def fake_run(
    folder: Path, system: str, task: str = "rte", skill: float = 1.0, rows: int = 60, **values: Any
) -> None:
    """Writes a run whose logits are `skill` times the truth plus noise of its seeds; `values` are of its record."""
    known = TASKS[task]
    run: dict[str, Any] = {"pretraining": 1, "subset": 1, "seed": 1, "train_size": "100"} | values
    numbers = [run["seed"], run["subset"], run["pretraining"], len(system), abs(int(99 * skill))]
    noise = np.random.default_rng(numbers).normal(size=(rows, 2))
    labels = np.arange(rows) % 2
    outputs = 2 * skill * np.eye(2)[labels] + noise
    score = float((outputs.argmax(axis=1) == labels).mean())
    entry: dict[str, Any] = {
        "task": task,
        "metric": known.metrics[0],
        "score": score,
        "scores": {known.metrics[0]: score},
        "baseline": 0.5,
        "selection_score": score,
        "tests": {},
        "description": known.describe(),
        "train_rows": 100,
        "validation_rows": 0,
        "dev_rows": rows,
        "warnings": [],
        "notes": [],
    }
    shared = {
        "format": FORMAT,
        "system": system,
        "head": "mean",
        "selection": "dev",
        "search": {},
        "weights_sha256": "w",
        "data_sha256": "d",
        "seconds": 1.0,
        "device": "cpu",
        "precision": "fp32",
        "settings": {"train.epochs": 2},
    }
    entry |= {name: value for name, value in values.items() if name in entry}
    record = shared | run | {"tasks": [entry]}
    name = f"p{run['pretraining']}-d{run['subset']}-s{run['seed']}"
    examples = [Example(f"dev:{n}", ("a",), float(label)) for n, label in enumerate(labels)]
    arrays = example_arrays(examples, outputs)
    splits = ("dev", *entry["tests"])
    named = {f"{task}.{split}.{n}": array for split in splits for n, array in arrays.items()}
    folder = folder / system / f"{task}-{run['train_size']}" / name
    write_json(folder / RECORD, record)
    np.savez(folder / PREDICTIONS, allow_pickle=False, **named)
