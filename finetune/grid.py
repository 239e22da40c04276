"""Runs a grid: systems x tasks x sizes x replicates x seeds, with the settings that each system chooses from.

python finetune/grid.py --recipe quick --model k5=RUN/hf --model bert=bert-base-uncased --data_dir glue --jobs 2
python finetune/grid.py --recipe own --model k5=RUN/hf --train_file tickets.csv --test_file test.csv
"""

import math
import multiprocessing
import os
import shlex
import socket
import sys
import threading
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
    OwnDataSettings,
    RunSettings,
    SystemSettings,
    TrainSettings,
    flatten,
    unread_settings,
)
from multicls.console import count, print_line, print_summary, progress_bar
from multicls.errors import UserError, did_you_mean, first_line, run_command
from multicls.files import FolderInUse, lock_holder, read_json
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
    own: OwnDataSettings = Field(OwnDataSettings(), exclude=True, description="your own rows")
    data_dir: str | None = Field(None, exclude=True, description="folder of tasks; null: the Hub")
    output_dir: str = Field("results", exclude=True, description="results folder")
    jobs: PositiveInt = Field(1, exclude=True, description="processes side by side")

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
    "data": "tasks data_dir train_sizes own.train_file own.test_file",
    "model": "model systems",
    "training": "recipe search seeds subsets jobs",
    "output": "output_dir print_config",
}
SHORTCUTS = (
    {f"own.{name}": name for name in OwnDataSettings.model_fields}
    | {f"settings.train.{name}": name for name in TrainSettings.model_fields}
    | {f"settings.{n}": n for n in SystemSettings.model_fields if n not in ("head", "train")}
)


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
    if grid.jobs > 1:  # before torch is imported
        threads = max(1, len(os.sched_getaffinity(0)) // grid.jobs)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    runs = expand(grid)
    began = time.time()
    runs = without_repeats(runs)
    for run in runs:
        _refuse_another_run(run)
    spawn, logs = multiprocessing.get_context("spawn"), Path(grid.output_dir, "logs")
    for index in range(1, grid.jobs):
        spawn.Process(target=_help, args=(index, runs, logs, began), daemon=True).start()
    try:
        work(runs, began, waits="SLURM_ARRAY_TASK_ID" not in os.environ)
        states = _print_states(runs)
        complete = not states["at work"]
    except KeyboardInterrupt:
        print_line("stopped by SIGINT; the same command resumes: finished runs stay finished")
        raise
    if states["finished"]:
        next_command = f"python finetune/report.py {shlex.quote(grid.output_dir)}"
        print_summary([("results", grid.output_dir)], next_command)
    nothing = complete and not states["finished"]
    return int(bool(states["failed"] or states["missing"] or nothing))


def _refuse_another_run(run: RunSettings) -> None:
    """Refuses a folder with a finished run of other settings, weights or rows, and own rows that cannot be read."""
    if run.own.train_file:
        load_tasks(run)
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
    source, runs = grid.own.train_file, []
    for task, size in product([grid.own.name] if source else grid.tasks, grid.train_sizes):
        shared: dict[str, Any] = {"own": grid.own.model_dump(), "task": "" if source else task}
        shared |= {"train_size": size, "output_dir": grid.output_dir, "data_dir": grid.data_dir}
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
        raise UserError("no tasks: set --tasks, or --train_file for own rows, or name a --recipe.")
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
    selection = values.get("selection", "holdout" if grid.own.train_file else "dev")
    all_rows = size == "full" and selection == "dev"
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


def without_repeats(runs: Sequence[RunSettings]) -> list[RunSettings]:
    """Returns the runs without those that differ from another one only in the number of a subset of all rows."""
    kept = dict[str, RunSettings]()
    for run in runs:
        size = run.train_size if isinstance(run.train_size, int) else 0
        all_rows = run.selection == "dev" and size >= max(_rows_of(run))
        same = {"subset", "pretraining"} if all_rows else set[str]()
        kept.setdefault(run.model_dump_json(exclude=same), run)
    if left_out := len(runs) - len(kept):
        print_line(f"note: {count(left_out, 'run')} left out: subsets of all rows are equal")
    return list(kept.values())


def _rows_of(run: RunSettings) -> list[float]:
    """Returns the number of training rows of each of a run's tasks; infinity where data are missing."""
    try:
        return [len(part.train) for part in load_tasks(run)]
    except UserError:  # the run will say so
        return [math.inf]


def _help(index: int, runs: Sequence[RunSettings], logs: Path, began: float) -> None:
    """Works on the grid as a helper process, with its own GPU and log; ends with its parent, also a killed one."""
    logs.mkdir(parents=True, exist_ok=True)
    log = open(logs / f"{socket.gethostname()}-{os.getpid()}.log", "a", buffering=1)  # noqa: SIM115
    sys.stdout = sys.stderr = log
    import torch

    if (gpus := torch.cuda.device_count()) > 1:
        names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = names[index % gpus]

    def follow() -> None:
        multiprocessing.parent_process().join()  # type: ignore[union-attr]
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    work(runs, began, waits=False)


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
    """Returns about how much work a run is: its training rows times its epochs."""
    rows = sum(_rows_of(run))
    if isinstance(run.train_size, int):
        rows = min(rows, run.train_size)
    return rows * run.train.epochs


def attempt(run: RunSettings, began: float) -> bool:
    """Makes a run that is not settled, or records its failure; returns False if another process makes it."""
    if finished_record(run) or is_settled(run, began):
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


def is_settled(run: RunSettings, began: float) -> bool:
    """Returns True if a run has failed since the command `began`, or is incompatible with the same settings."""
    path = run.folder / ERROR
    with suppress(OSError, UserError):  # another process has made the run by now
        if path.stat().st_mtime >= began:
            return True
        error = read_json(path)
        return error["kind"] == "incompatible" and error.get("settings") == run.compared()
    return False


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
