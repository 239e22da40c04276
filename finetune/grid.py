"""Runs a grid: systems x tasks x sizes x replicates x seeds, with the settings that each system chooses from.

python finetune/grid.py --recipe quick --model k5=RUN/hf --model bert=bert-base-uncased --data_dir glue

Several commands, such as one for each GPU or the elements of a job array, share a grid: none makes another's runs.
"""

import math
import os
import shlex
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Annotated, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

from pydantic import Field, PositiveInt, field_validator

from finetune.heads.build import Incompatible
from finetune.results import ERROR, RECORD, finished_record, run_state, write_error
from finetune.run import identify, load_tasks, run_finetune
from finetune.settings import (
    RunSettings,
    SystemSettings,
    TrainSettings,
    flatten,
    unread_settings,
)
from multicls.console import print_line, print_summary, progress_bar
from multicls.errors import UserError, did_you_mean, first_line, run_command
from multicls.files import FolderInUse, lock_holder
from multicls.settings import RecipeOptions, load_settings, parse

SHOWN = 20  # unfinished runs in a list
WAIT = 1.0  # seconds between looks at runs of other processes
Values = Annotated[list[Any], Field(min_length=1)]
NamedModel = Annotated[str, Field(pattern="^[^=]+=.")]


class GridSystem(SystemSettings):
    """A system of a grid."""

    models: list[str] = Field([], description="names of the models that it is for; default: all")


class GridSettings(RecipeOptions):
    """A grid: what is compared, on what, how often."""

    chosen_by_name = ("systems",)
    model: list[NamedModel] = Field([], description="NAME=FOLDER; one for each checkpoint of NAME")
    systems: dict[str, GridSystem] | list[str] = Field({}, description="names, or name: settings")
    tasks: list[str] = Field([], description="names; joined by commas they are one run of cln")
    train_sizes: list[int | str] = Field(["full"], min_length=1, description="100, 1k, 8-shot, ...")
    subsets: PositiveInt = Field(1, description="training subsets of each replicate")
    share_subsets: bool = Field(False, description="all replicates take the same subsets")
    seeds: list[int] = Field([1], min_length=1, description="fine-tuning seeds")
    search: dict[str, Values] = Field({}, description="dotted setting -> values to choose from")
    settings: SystemSettings = Field(SystemSettings(), description="settings of all runs")
    data_dir: str | None = Field(None, exclude=True, description="folder of tasks; null: the Hub")
    output_dir: str = Field("results", exclude=True, description="results folder")

    @field_validator("systems", mode="before")
    @classmethod
    def _heads_are_systems(cls, value: object) -> object:
        """A name without settings, which no recipe has, is a head."""
        if isinstance(value, str):
            value = value.replace(",", " ").split()
        systems = dict.fromkeys(map(str, value)) if isinstance(value, list) else value
        if isinstance(systems, dict):
            return {k: {"head": k} if v is None else v for k, v in systems.items()}
        return value


HELP = {
    "data": "tasks data_dir train_sizes",
    "model": "model systems",
    "training": "recipe search seeds subsets",
    "output": "output_dir print_config",
}
SHORTCUTS = {f"settings.train.{name}": name for name in TrainSettings.model_fields} | {
    f"settings.{n}": n for n in SystemSettings.model_fields if n not in ("head", "train")
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    grid = parse(
        GridSettings,
        argv,
        prog="finetune/grid.py",
        doc=__doc__,
        shortcuts=SHORTCUTS,
        recipes="finetune/recipes",
        common=HELP,
    )
    runs = expand(grid)
    began = time.time()
    for run in runs:
        _refuse_another_run(run)
    try:
        work(runs, began, waits="SLURM_ARRAY_TASK_ID" not in os.environ)
        states = _print_states(runs)
    except KeyboardInterrupt:
        print_line("stopped by SIGINT; the same command resumes: finished runs stay finished")
        raise
    if states["finished"]:
        next_command = f"python finetune/report.py {shlex.quote(grid.output_dir)}"
        print_summary([("results", grid.output_dir)], next_command)
    is_useful = states["finished"] or states["at work"]
    return int(bool(states["failed"] or states["missing"] or not is_useful))


def _refuse_another_run(run: RunSettings) -> None:
    """Refuses a folder with a finished run of other settings, weights or rows."""
    if (run.folder / RECORD).exists():
        identity = {"settings": run.compared()}
        with suppress(UserError):  # the model or a benchmark's files are gone: it stays finished
            identity = identify(run, load_tasks(run))
        finished_record(run, identity)


def expand(grid: GridSettings) -> list[RunSettings]:
    """Returns the runs, in the order: task, size, system, model, replicate, subset, candidate, seed."""
    models = defaultdict[str, list[str]](list)
    for name, folder in (text.split("=", 1) for text in grid.model):
        models[name].append(folder)
    if len({len(folders) for folders in models.values()} - {1}) > 1:
        raise UserError("--model: each name needs as many checkpoints as the others, or one.")
    assert isinstance(grid.systems, dict), "the validator has made it one"
    runs = list[RunSettings]()
    for task, size in product(grid.tasks, grid.train_sizes):
        shared: dict[str, Any] = {"task": task, "train_size": size}
        shared |= {"output_dir": grid.output_dir, "data_dir": grid.data_dir}
        of_task = [
            load_settings(RunSettings, values=shared | values)
            for name, system in grid.systems.items()
            if "," not in task or (system.head or grid.settings.head) == "cln"
            for values in _runs_of_system(grid, models, name, system, size)
        ]
        if not of_task:
            hint = "set --model NAME=FOLDER and systems, for several tasks with head cln."
            raise UserError(f"task {task}: no runs; {hint}")
        runs += of_task
    if not runs:
        raise UserError("no tasks: set --tasks, or name a --recipe.")
    path, number = Counter(run.folder for run in runs).most_common(1)[0]
    if number > 1:
        raise UserError(f"{path}: {number} runs have this folder; no value or name comes twice.")
    return runs


def _runs_of_system(
    grid: GridSettings, models: dict[str, list[str]], name: str, system: GridSystem, size: int | str
) -> Iterator[dict[str, Any]]:
    """Yields a system's runs. Replicate r has a model's r-th (or only) folder and subsets (r-1) * D + 1 .. r * D."""
    unread = unread_settings(system.head or grid.settings.head)
    values, search = (
        {key: v for key, v in flatten(group).items() if key.partition(".")[0] not in unread}
        for group in (grid.settings.model_dump(exclude_unset=True), grid.search)
    )
    values |= flatten(system.model_dump(exclude_unset=True, exclude={"models"}))
    all_rows = size == "full" and values.get("selection", "dev") == "dev"
    own_subsets = not (all_rows or grid.share_subsets)
    replicates = max(map(len, models.values()), default=1)
    subsets = 1 if all_rows else grid.subsets
    if not models:
        raise UserError(f"systems.{name}: it needs a model: set --model NAME=FOLDER.")
    for model in system.models or models:
        if model not in models:
            raise UserError(f"systems.{name}: no model {model}.{did_you_mean(model, models)}")
        folders = models[model]
        number = replicates if len(folders) > 1 or own_subsets else 1
        for r, d, *picked, seed in product(
            range(number), range(subsets), *search.values(), grid.seeds
        ):
            first = r * subsets if own_subsets else 0  # subsets of the replicates before
            candidate = dict(zip(search, picked, strict=True))
            run = {
                "name": f"{model}-{name}",
                "model": folders[r % len(folders)],
                "pretraining": r + 1,
                "subset": first + d + 1,
                "seed": seed,
                "search": candidate,
            }
            yield values | candidate | run


def work(runs: Sequence[RunSettings], began: float, waits: bool) -> None:
    """Makes all runs that no other process makes, the longest first.

    If it `waits`, it stays until the others have made theirs, and takes over those that are killed. An element of a job
    array leaves instead, since it keeps a GPU.
    """
    pending = sorted(runs, key=_work_of, reverse=True)
    with progress_bar(len(runs), "run", "grid") as progress:
        while pending:
            for run in list(pending):
                if attempt(run, began):
                    pending.remove(run)
                    progress.update()
            if not waits:
                break
            if pending:
                time.sleep(WAIT)


def _work_of(run: RunSettings) -> float:
    """Returns about how much work a run is: its training rows times its epochs; all rows are the most."""
    rows = run.train_size if isinstance(run.train_size, int) else math.inf
    return rows * run.train.epochs


def attempt(run: RunSettings, began: float) -> bool:
    """Makes a run, or records its failure; returns False if another process makes it.

    A run that has failed since the command `began` is not tried again.
    """
    error_file = run.folder / ERROR
    has_failed = error_file.exists() and error_file.stat().st_mtime >= began
    if finished_record(run) or has_failed:
        return True
    if lock_holder(run.folder):
        return False
    try:
        run_finetune(run)
    except FolderInUse:
        return False
    except Exception as error:  # whatever it is, the other runs continue
        kind = "incompatible" if isinstance(error, Incompatible) else "failed"
        if kind == "failed":  # the others are listed at the end
            print_line(f"{kind}: {run.folder}: {type(error).__name__}: {first_line(error)}")
        write_error(run, kind, error)
    return True


def _print_states(runs: Sequence[RunSettings]) -> Counter[str]:
    """Prints the number of runs by state, and unfinished runs with the reason; returns the numbers."""
    states = [(*run_state(run.folder), run.folder) for run in runs]
    counts = Counter({"finished": 0})
    counts.update(state for state, *_ in states)
    print(", ".join(f"{n} {state}" for state, n in counts.items()) + f", of {len(runs)} runs")
    lines = [f"{state}: {path}: {why}\n" for state, why, path in states if state != "finished"]
    print("".join(sorted(lines)[:SHOWN]), end="")
    return counts


if __name__ == "__main__":
    run_command(main)
