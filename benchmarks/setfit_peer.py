"""SetFit (arXiv:2209.11055) beside our heads: on the same rows, by the setfit library in an environment of its own.

python benchmarks/setfit_peer.py --python SETFIT/bin/python --model sample --train_file TRAIN --test_file TEST \
    --train_size 8-shot --subsets 3 --output_dir RESULTS

Each subset becomes a run of the system `setfit` in RESULTS, so that finetune/report.py compares it with runs of
finetune/grid.py on the same files and sizes. benchmarks/setfit_worker.py says how to make the environment.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)

import numpy as np
from pydantic import Field, PositiveInt

from finetune.heads.build import find_checkpoint
from finetune.results import TrainedSystem, finished_record, write_run
from finetune.run import identify, load_tasks
from finetune.settings import OwnDataSettings, RunSettings, TrainSize
from finetune.subsets import select_rows
from finetune.tasks import Array, TaskData
from multicls.console import print_line, print_summary
from multicls.errors import UserError, run_command
from multicls.settings import Settings, load_settings, parse

LOWEST = 1e-6  # probability, so that its logarithm is a number


class Options(Settings):
    """Options of the benchmark."""

    python: str = Field(description="Python of the environment that has setfit")
    model: str = Field(description="a sentence encoder: a folder, or 'sample'")
    own: OwnDataSettings = OwnDataSettings()
    train_size: TrainSize = Field("full", description="as of finetune/grid.py")
    subsets: PositiveInt = Field(1, description="training subsets")
    max_length: PositiveInt = Field(128, description="most tokens")
    max_steps: int = Field(-1, description="steps on pairs; -1: as many as setfit takes")
    output_dir: str = Field("results", description="results folder")


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the runs that are not there; returns the exit code."""
    shortcuts = {f"own.{name}": name for name in OwnDataSettings.model_fields}
    options = parse(Options, argv, prog="setfit_peer.py", doc=__doc__, shortcuts=shortcuts)
    for subset in range(1, options.subsets + 1):
        make_run(options, subset)
    print_summary(
        [("results", options.output_dir)], f"python finetune/report.py {options.output_dir}"
    )
    return 0


def make_run(options: Options, subset: int) -> None:
    """Makes one run, unless it is finished.

    Raises:
        UserError: The rows are no single texts of one class, or setfit fails.
    """
    name = f"{Path(options.model).name}-setfit"
    values = options.model_dump(include={"model", "own", "train_size", "max_length", "output_dir"})
    values |= {"head": "probe", "pooling": "mean", "name": name, "subset": subset}
    settings = load_settings(RunSettings, values=values)
    (data,) = load_tasks(settings)
    identity = identify(settings, [data])
    identity["settings"] |= {"setfit.max_steps": options.max_steps}
    if finished_record(settings, identity):
        return
    task = data.task
    if task.is_regression or task.multi_label or len(task.fields) > 1:
        raise UserError(
            f"{options.own.train_file}: setfit takes one text and one class a row here."
        )
    rows, began = select_rows(data, options.train_size, subset, holdout=False), time.perf_counter()
    print_line(f"{settings.folder}: {rows.counts()}")
    outputs = _train(options, rows, subset)
    seconds = round(time.perf_counter() - began, 3)
    fields = {"head": "setfit", "device": "cpu", "precision": "fp32", "seconds": seconds}
    record = write_run(settings, [rows], TrainedSystem([outputs], fields), identity)
    for split, found in record["tasks"][0]["splits"].items():
        print_line(f"{name} on {split}: {found['scores']}")


def _train(options: Options, rows: TaskData, seed: int) -> dict[str, Array]:
    """Returns the log-probabilities (N, C) of dev and test by setfit's process."""
    splits = {name: part for name, part in rows.splits.items() if name != "train"}
    job: dict[str, Any] = {
        "model": str(find_checkpoint(options.model)),
        "train": [{"text": row.texts[0], "label": int(row.label)} for row in rows.train],
        "texts": [row.texts[0] for part in splits.values() for row in part],
        "classes": len(rows.task.labels),
        "seed": seed,
        "max_length": options.max_length,
        "max_steps": options.max_steps,
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.json")
        file.write_text(json.dumps(job), encoding="utf-8")
        worker = str(REPOSITORY / "benchmarks" / "setfit_worker.py")
        done = subprocess.run([options.python, worker, str(file)], check=False)
        if done.returncode:
            raise UserError(f"--python {options.python}: setfit ended with {done.returncode}.")
        probabilities = np.array(json.loads(Path(f"{file}.out").read_text(encoding="utf-8")))
    outputs = np.log(np.maximum(probabilities, LOWEST)).astype(np.float32)
    ends = np.cumsum([len(part) for part in splits.values()])[:-1]
    return dict(zip(splits, np.split(outputs, ends), strict=True))


if __name__ == "__main__":
    run_command(main)
