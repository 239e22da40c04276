"""Runs a grid: systems x tasks x sizes x replicates x seeds, with the settings that each system chooses from.

python finetune/grid.py --recipe quick --model k5=RUN/hf --model bert=bert-base-uncased --data_dir glue --jobs 2
python finetune/grid.py --recipe quick --model k5=RUN/hf --data_dir glue --status
python finetune/grid.py --recipe own --model k5=RUN/hf --train_file tickets.csv --test_file test.csv --save_best
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

from pydantic import Field, PositiveInt, field_validator

from finetune.heads import FITTED
from finetune.results import ERROR, RECORD, load_results, read_error, write_error
from finetune.run import finished_record, load_tasks, run_finetune
from finetune.settings import (
    OwnDataSettings,
    RunSettings,
    SystemSettings,
    TrainSettings,
    flatten,
    unread_settings,
)
from multicls.console import Progress, print_line, print_summary
from multicls.errors import UserError, did_you_mean, first_line, print_stderr, run_command
from multicls.files import FolderInUse, lock_holder
from multicls.settings import RecipeOptions, load_settings, parse

State = Literal["finished", "incompatible", "failed", "missing"]
WAIT = 1.0  # seconds between looks at runs of other processes


class GridSystem(SystemSettings):
    """A system of a grid."""

    models: list[str] = Field([], description="names of the models that it is for; default: all")


class GridSettings(RecipeOptions):
    """A grid: what is compared, on what, how often."""

    models: dict[str, str | list[str]] = Field({}, description="name -> folder of each replicate")
    systems: dict[str, GridSystem] = Field({}, description="name -> settings; or a list of heads")
    tasks: list[str] = Field([], description="several with commas are one run, for head cln")
    train_sizes: list[int | str] = Field(["full"], min_length=1, description="100, 1k, full, ...")
    subsets: PositiveInt = Field(1, description="training subsets of each replicate")
    share_subsets: bool = Field(False, description="all replicates take the same subsets")
    seeds: list[int] = Field([1], min_length=1, description="fine-tuning seeds")
    search: dict[str, Any] = Field({}, description="setting -> values to choose from")
    settings: SystemSettings = Field(SystemSettings(), description="settings of all runs")
    model: list[str] = Field([], exclude=True, description="NAME=FOLDER; again: a replicate")
    own: OwnDataSettings = Field(OwnDataSettings(), exclude=True, description="your own rows")
    data_dir: str | None = Field(None, exclude=True, description="official files; default: the Hub")
    output_dir: str = Field("results", exclude=True, description="results folder")
    jobs: PositiveInt = Field(1, exclude=True, description="processes side by side")
    status: bool = Field(False, exclude=True, description="count the runs by state and stop")
    save_best: bool = Field(False, exclude=True, description="save the best model, by holdout")

    @field_validator("systems", mode="before")
    @classmethod
    def _heads_are_systems(cls, value: object) -> object:
        return {str(n): {"head": n} for n in value} if isinstance(value, list) else value


@dataclass(frozen=True)
class GridRun:
    """One run of a grid."""

    settings: RunSettings
    repeats: bool  # only its training subset differs from that of an earlier run

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.settings.folder

    @property
    def state(self) -> State:
        """The state of the run, from its folder alone."""
        if (self.folder / RECORD).exists():
            return "finished"
        return read_error(self.folder).get("kind", "missing")  # type: ignore[return-value]


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
    )
    runs = expand(grid)
    if grid.save_best and any(run.settings.selection == "dev" for run in runs):
        raise UserError(
            "--save_best picks by the validation split, so that the score stays honest: give --selection holdout."
        )
    check_folders(runs)
    if grid.status:
        _print_states(runs)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # KeyboardInterrupt
    try:
        if grid.jobs == 1:
            work(runs, time.time())
        else:
            work_side_by_side(runs, grid.jobs, Path(grid.output_dir, "logs"))
        if grid.save_best:
            _save_best(runs, Path(grid.output_dir))
    except KeyboardInterrupt:
        print_stderr("stopped; the same command continues: what is finished is kept")
        raise
    states = _print_states(runs)
    if states["finished"]:
        next_command = f"python finetune/report.py {grid.output_dir}"
        print_summary([("results", grid.output_dir)], next_command)
    return int(bool(states["failed"] or states["missing"] or not states["finished"]))


def expand(grid: GridSettings) -> list[GridRun]:
    """Returns the runs, in the order: task, size, system, model, replicate, subset, candidate, seed.

    Replicate r takes the r-th folder of each model and the subsets (r-1) * D + 1 .. r * D. A model with one folder is
    the same in all replicates.

    Raises:
        UserError: Names are unknown, settings are wrong or do not go together.
    """
    models = {n: [f] if isinstance(f, str) else list(f) for n, f in grid.models.items()}
    for text in grid.model:
        name, equals, folder = text.partition("=")
        if not equals:
            raise UserError(f"--model {text}: write it as NAME=FOLDER.")
        models[name] = [*models.get(name, []), folder]
    tasks = [grid.own.name] if grid.own.source else grid.tasks
    _check_names(grid, models, tasks)
    runs, seen = [], set[str]()
    axes = itertools.product(tasks, grid.train_sizes, grid.systems.items())
    for task, size, (name, system) in axes:
        head = system.head or grid.settings.head
        if "," in task and head != "cln":
            continue
        own = grid.own.source
        values: dict[str, Any] = {"own": grid.own.model_dump()} if own else {"task": task}
        values |= {"train_size": size, "output_dir": grid.output_dir, "data_dir": grid.data_dir}
        values |= _read_by(head, grid.settings.model_dump(exclude_unset=True))
        values |= flatten(system.model_dump(exclude_unset=True, exclude={"models"}))
        search = _read_by(head, grid.search)
        candidates = [
            dict(zip(search, picked, strict=True)) for picked in itertools.product(*search.values())
        ]
        names = [""] if head == "tfidf" else system.models or list(models)
        replicates = _replicates(grid, models, names, values)
        for replicate, found, seed in itertools.product(replicates, candidates, grid.seeds):
            run = values | replicate | found | {"search": found, "seed": seed}
            run["name"] = f"{replicate['name']}-{name}".lstrip("-")
            settings = load_settings(RunSettings, values=run)
            twin = settings.model_copy(update={"pretraining": 1, "subset": 1}).model_dump_json()
            runs.append(GridRun(settings, repeats=twin in seen))
            seen.add(twin)
    return runs


def _read_by(head: str, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that a head reads, by dotted name."""
    unread = unread_settings(head)
    return {k: v for k, v in flatten(values).items() if k.partition(".")[0] not in unread}


def _replicates(
    grid: GridSettings, models: dict[str, list[str]], names: list[str], values: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yields the settings of each replicate of some models."""
    replicates = max(map(len, models.values()), default=1)
    all_rows = values["train_size"] == "full" and values.get("selection", "dev") == "dev"
    fresh_subsets = not (all_rows or grid.share_subsets)
    for name in names:
        folders = models.get(name, [""])
        number = replicates if len(folders) > 1 or fresh_subsets else 1
        for r, d in itertools.product(range(number), range(1 if all_rows else grid.subsets)):
            subset = fresh_subsets * r * grid.subsets + d + 1
            model = folders[r % len(folders)]
            yield {"name": name, "model": model, "pretraining": r + 1, "subset": subset}


def _check_names(grid: GridSettings, models: dict[str, list[str]], tasks: list[str]) -> None:
    heads = {system.head or grid.settings.head for system in grid.systems.values()}
    problems = []
    if not models and heads != {"tfidf"}:
        problems.append("no models: give --model NAME=FOLDER, or models in the recipe.")
    if not grid.systems or not tasks:
        problems.append("no systems or no tasks: give them in a recipe (--recipe).")
    problems += [
        f"systems.{name}.models: {model}: no model of this grid.{did_you_mean(model, models)}"
        for name, system in grid.systems.items()
        for model in system.models
        if model not in models
    ]
    if len({len(folders) for folders in models.values()} - {1}) > 1:
        problems.append(
            "models: give each model as many pretrained checkpoints as the others, or one."
        )
    joint = [task for task in tasks if "," in task]
    if joint and "cln" not in heads:
        problems.append(f"tasks: {joint[0]}: several tasks in one run need a system with head cln.")
    problems += [
        f"search.{key} = {values!r}: give a list of values to choose from."
        for key, values in flatten(grid.search).items()
        if not isinstance(values, list) or not values
    ]
    if problems:
        raise UserError(*problems)


def check_folders(runs: Sequence[GridRun]) -> None:
    """Checks that no folder holds a run with other settings, weights or own rows.

    Raises:
        UserError: Some do, or two runs of the grid have one folder.
    """
    folder, number = Counter(run.folder for run in runs).most_common(1)[0]
    problems = []
    if number > 1:
        problems.append(f"{folder}: {number} runs have this folder; name models and systems apart.")
    for run in runs:
        try:
            finished_record(run.settings)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*list(dict.fromkeys(problems))[:5])


def work(runs: Sequence[GridRun], started: float) -> None:
    """Does all runs that nobody else does; waits for those of other processes, which may be killed."""
    pending = [run for run in runs if run.state != "finished"]
    with Progress(len(runs), "run", "grid", done=len(runs) - len(pending)) as progress:
        while pending:
            busy = []
            for run in pending:
                if attempt(run, started):
                    progress.update()
                else:
                    busy.append(run)
            if len(busy) == len(pending):
                time.sleep(WAIT)
            pending = busy


def attempt(run: GridRun, started: float) -> bool:
    """Does a run and notes why if it cannot be done; returns False if another process is at it."""
    from finetune.heads.build import Incompatible

    error_file = run.folder / ERROR
    if run.state == "finished":
        return True
    if lock_holder(run.folder):
        return False
    if error_file.exists() and error_file.stat().st_mtime > started:  # by another process
        return True
    try:
        if run.repeats and _takes_all_rows(run.settings):
            raise Incompatible("all training rows are taken, so the run would repeat another one.")
        run_finetune(run.settings)
    except FolderInUse:
        return False
    except Incompatible as error:
        write_error(run.folder, "incompatible", error)
    except Exception as error:  # whatever it is, the other runs go on
        print_line(f"{run.folder}: {type(error).__name__}: {first_line(error)}")
        write_error(run.folder, "failed", error)
    return True


def _takes_all_rows(settings: RunSettings) -> bool:
    size, data = settings.train_size, load_tasks(settings)
    takes_all = size == "full" or all(len(task.train) <= int(size) for task in data)
    return takes_all and settings.selection == "dev"


def work_side_by_side(runs: Sequence[GridRun], jobs: int, logs: Path) -> None:
    """Does all runs in `jobs` processes, each of which works like a command of its own."""
    context, started = multiprocessing.get_context("spawn"), time.time()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // jobs)))
    processes = [
        context.Process(target=_worker, args=(n, runs, started, logs)) for n in range(jobs)
    ]
    for process in processes:
        process.start()
    pending = [run for run in runs if run.state != "finished"]
    try:
        with Progress(len(runs), "run", "grid", done=len(runs) - len(pending)) as progress:
            while any(process.is_alive() for process in processes):
                time.sleep(WAIT)
                for run in [run for run in pending if run.state == "finished"]:
                    pending.remove(run)
                    progress.update()
    finally:
        for process in processes:
            process.terminate()


def _worker(index: int, runs: Sequence[GridRun], started: float, logs: Path) -> None:
    """Works with a GPU and a log of its own; ends with the process that started it."""
    logs.mkdir(parents=True, exist_ok=True)
    name = f"{socket.gethostname()}-{os.getpid()}.log"
    file = os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    import torch

    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    if count > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = names[index % count]
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it ends it
    work(runs, started)


def _print_states(runs: Sequence[GridRun]) -> Counter[str]:
    """Prints the number of runs by state, and those that are not finished with the reason; returns the counts."""
    states = {run.folder: run.state for run in runs}
    counts = Counter({"finished": 0} | Counter(states.values()))
    print(", ".join(f"{n} {state}" for state, n in counts.items()) + f", of {len(runs)} runs")
    for folder, state in states.items():
        if state in ("failed", "incompatible"):
            print(f"{state}: {folder}: {read_error(folder).get('error', '')}")
    for folder in [folder for folder, state in states.items() if state == "missing"][:5]:
        print(f"missing: {folder}")
    return counts


def _save_best(runs: Sequence[GridRun], results: Path) -> None:
    """Saves the model of the best run of the best system, by the validation split, for each task and size."""
    from finetune.estimates import choose_candidates

    by_folder = {str(run.folder): run for run in runs}
    records = load_results(results)
    records = records[records["path"].isin(by_folder) & ~records["head"].isin(FITTED)]
    chosen = choose_candidates(records) if len(records) else records
    for (task, size), group in chosen.groupby(["task", "train_size"], sort=False):
        system = group.groupby("system")["selection_score"].mean().idxmax()
        best = group[group["system"] == system].sort_values("selection_score").iloc[-1]
        run = by_folder[best["path"]]
        print_line(f"{task}, {size} rows: the best system is {system}; saving its model")
        run_finetune(run.settings.model_copy(update={"save_model": True}))
        print_summary([("model", run.folder / "model")])


if __name__ == "__main__":
    run_command(main)
