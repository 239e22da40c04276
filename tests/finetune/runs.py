"""Runs of finetune/run.py in this process, invented runs, and files of rows."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from finetune.results import TrainedSystem, read_predictions, write_error, write_run
from finetune.run import run_finetune
from finetune.settings import RunSettings
from finetune.subsets import select_rows
from finetune.tasks import TASKS, Example, TaskData
from multicls.settings import load_settings

Array = np.ndarray[Any, np.dtype[Any]]


def settings_of(model: Path | str, data: Path, output: Path, **values: Any) -> RunSettings:
    """Returns quick settings; dots in names are written as __, and "" leaves one at its default."""
    quick: dict[str, Any] = {"model": str(model), "task": "sst2", "head": "cls", "max_length": 24}
    quick |= {"data_dir": str(data), "output_dir": str(output), "train.learning_rate": 3e-3}
    quick |= {name.replace("__", "."): value for name, value in values.items()}
    return load_settings(RunSettings, values={k: v for k, v in quick.items() if v != ""})


def finetune(model: Path | str, data: Path, output: Path, **values: Any) -> dict[str, Any]:
    """Does a run and returns its record."""
    return run_finetune(settings_of(model, data, output, **values))


def logits_of(record: dict[str, Any], split: str = "dev", task: int = 0) -> Array:
    """Returns the saved outputs of a run."""
    name = record["tasks"][task]["task"]
    return np.stack(read_predictions(Path(record["path"]), name, split)["outputs"])


def score_of(record: dict[str, Any], split: str = "dev") -> float:
    """Returns the main score of a run's first task."""
    entry = record["tasks"][0]
    return float(entry["splits"][split]["scores"][entry["metric"]])


def fake_run(folder: Path, system: str, skill: float = 1.0, rows: int = 60, **values: Any) -> None:
    """Writes a run on invented rows whose outputs are `skill` times the truth plus noise of its seeds."""
    values = {"task": "rte", "train_size": 100, "name": system} | values
    settings = settings_of("m", folder, folder, **values)
    examples = [Example(f"train:{n}", ("a",), float(n % 2)) for n in range(200)]
    data = TaskData(TASKS[settings.task], examples, examples[:rows])
    part = select_rows(data, settings.train_size, settings.subset, settings.selection == "holdout")
    seeds = [settings.seed, settings.subset, settings.pretraining, len(system), int(99 * skill)]
    noise, outputs = np.random.default_rng(seeds), {}
    for split in part.splits.keys() - {"train"}:
        truth = np.eye(2)[[int(example.label) for example in part.splits[split]]]
        outputs[split] = 2 * skill * truth + noise.normal(size=truth.shape)
    hashes = {"weights_sha256": f"{settings.pretraining}", "data_sha256": data.sha256}
    trained = TrainedSystem([outputs], {"seconds": 1.0})
    write_run(settings, [part], trained, {"settings": settings.compared(), **hashes})


def fake_error(folder: Path, system: str, kind: str) -> None:
    """Leaves a run on RTE that has failed or is incompatible."""
    values: dict[str, Any] = {"task": "rte", "train_size": 100, "subset": 8, "name": system}
    write_error(settings_of("m", folder, folder, **values), kind, ValueError("broken"))


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    """Writes rows as a table (.csv) or as lines of JSON, and returns the name of the file."""
    rows = list(rows)
    if path.suffix == ".csv":
        pd.DataFrame(rows, dtype=object).to_csv(path, index=False)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
