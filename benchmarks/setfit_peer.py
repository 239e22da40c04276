"""SetFit (arXiv:2209.11055) beside the probe: on the same rows, by the setfit library in an environment of its own.

python benchmarks/setfit_peer.py RESULTS --python SETFIT/bin/python

Each model and its rows of a run of the head `probe` in RESULTS, made by finetune/grid.py on own rows, get a run of
SetFit; finetune/report.py compares them. benchmarks/setfit_worker.py says how to make the environment.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from pydantic import Field
from pydantic_settings import CliPositionalArg

from finetune.heads.build import find_checkpoint
from finetune.results import SETTINGS, TrainedSystem, finished_record, load_results, write_run
from finetune.run import identify, load_tasks
from finetune.settings import RunSettings
from finetune.subsets import select_rows
from finetune.tasks import Array, TaskData
from multicls.console import print_line, print_summary
from multicls.errors import UserError, run_command
from multicls.files import REPOSITORY
from multicls.settings import Settings, load_settings, parse

LOWEST = 1e-6  # probability, so that its logarithm is a number


class Options(Settings):
    """Options of the benchmark."""

    results: CliPositionalArg[Path] = Field(description="results folder with runs of the probe")
    python: str = Field(description="Python of the environment that has setfit")
    max_steps: int = Field(-1, description="steps on pairs; -1: as many as setfit takes")


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the runs that are not there; returns the exit code."""
    options = parse(Options, argv, prog="benchmarks/setfit_peer.py", doc=__doc__)
    runs = load_results(options.results)
    alike = ["model", "task", "train_size", "subset"]  # but for the embedding
    for folder in runs[runs["head"] == "probe"].drop_duplicates(alike)["path"]:
        make_run(options, load_settings(RunSettings, [Path(folder) / SETTINGS]))
    print_summary([("results", options.results)], f"python finetune/report.py {options.results}")
    return 0


def make_run(options: Options, probe: RunSettings) -> None:
    """Makes the run beside one of the probe, unless it is finished.

    Raises:
        UserError: The rows are no single texts of one class, or setfit fails.
    """
    changes = {"name": f"{probe.system}-setfit", "output_dir": str(options.results)}
    settings = probe.model_copy(update=changes | {"save_model": False})
    (data,) = load_tasks(settings)
    identity = identify(settings, [data])
    identity["settings"] |= {"setfit.max_steps": options.max_steps}
    if finished_record(settings, identity):
        return
    task = data.task
    if task.is_regression or task.multi_label or len(task.fields) > 1:
        raise UserError(f"{task.name}: setfit takes one text and one class a row here.")
    rows, began = select_rows(data, probe.train_size, probe.subset, False), time.perf_counter()
    print_line(f"{settings.folder}: {rows.counts()}")
    outputs = _train(options, settings, rows)
    seconds = round(time.perf_counter() - began, 3)
    fields = {"head": "setfit", "device": "cpu", "precision": "fp32", "seconds": seconds}
    record = write_run(settings, [rows], TrainedSystem([outputs], fields), identity)
    for split, found in record["tasks"][0]["splits"].items():
        print_line(f"{settings.system} on {split}: {found['scores']}")


def _train(options: Options, settings: RunSettings, rows: TaskData) -> dict[str, Array]:
    """Returns the log-probabilities (N, C) of dev and test by setfit's process."""
    splits = {name: part for name, part in rows.splits.items() if name != "train"}
    job = {
        "model": str(find_checkpoint(settings.model)),
        "train": [{"text": row.texts[0], "label": int(row.label)} for row in rows.train],
        "texts": [row.texts[0] for part in splits.values() for row in part],
        "classes": len(rows.task.labels),
        "seed": settings.subset,
        "max_length": rows.task.max_length,
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
