"""Runs a grid: systems x tasks x sizes x replicates x seeds, with the settings that each system chooses from.

python finetune/grid.py --recipe quick --model k5=RUN/hf --model bert=bert-base-uncased --data_dir glue --jobs 2
python finetune/grid.py --recipe own --model k5=RUN/hf --train_file tickets.csv --test_file test.csv --save_best
"""

import multiprocessing
import os
import shlex
import socket
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

from pydantic import Field, PositiveInt, field_validator

from finetune.heads import FITTED, unread_settings
from finetune.heads.build import Incompatible
from finetune.results import ERROR, RECORD, finished_record, load_results, run_state, write_error
from finetune.run import identify, load_tasks, run_finetune
from finetune.settings import OwnDataSettings, RunSettings, SystemSettings, TrainSettings, flatten
from multicls.console import Progress, print_line, print_summary
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

    model: list[NamedModel] = Field([], description="NAME=FOLDER; one for each checkpoint of NAME")
    systems: dict[str, GridSystem] = Field({}, description="name -> settings; or a list of heads")
    tasks: list[str] = Field([], description="names; joined by commas they are one run of cln")
    train_sizes: list[int | str] = Field(["full"], min_length=1, description="100, 1k, full, ...")
    subsets: PositiveInt = Field(1, description="training subsets of each replicate")
    share_subsets: bool = Field(False, description="all replicates take the same subsets")
    seeds: list[int] = Field([1], min_length=1, description="fine-tuning seeds")
    search: dict[str, Values] = Field({}, description="dotted setting -> values to choose from")
    settings: SystemSettings = Field(SystemSettings(), description="settings of all runs")
    own: OwnDataSettings = Field(OwnDataSettings(), exclude=True, description="your own rows")
    data_dir: str | None = Field(None, exclude=True, description="folder of tasks; null: the Hub")
    output_dir: str = Field("results", exclude=True, description="results folder")
    jobs: PositiveInt = Field(1, exclude=True, description="processes side by side")
    save_best: bool = Field(False, exclude=True, description="save the best model, by validation")

    @field_validator("systems", mode="before")
    @classmethod
    def _heads_are_systems(cls, value: object) -> object:
        return {str(n): {"head": n} for n in value} if isinstance(value, list) else value


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
    if grid.jobs > 1:  # before torch is imported
        threads = max(1, len(os.sched_getaffinity(0)) // grid.jobs)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    runs = expand(grid)
    if grid.save_best and any(run.selection == "dev" for run in runs):
        raise UserError("--save_best picks by the validation split: set --selection holdout.")
    for run in runs:
        if (run.folder / RECORD).exists():  # of another run: refused before anything is trained
            try:
                identity = identify(run, load_tasks(run))
            except UserError:  # its inputs are gone: it stays finished
                identity = {"settings": run.compared()}
            finished_record(run, identity)
        (run.folder / ERROR).unlink(missing_ok=True)  # it is tried again
    spawn, logs = multiprocessing.get_context("spawn"), Path(grid.output_dir, "logs")
    for index in range(1, grid.jobs):
        spawn.Process(target=_help, args=(index, runs, logs), daemon=True).start()
    work(runs)
    states = _print_states(runs)
    if states["finished"]:
        models = _save_best(runs) if grid.save_best else []
        next_command = f"python finetune/report.py {shlex.quote(grid.output_dir)}"
        print_summary([("results", grid.output_dir), *models], next_command)
    return int(bool(states["failed"] or states["missing"] or not states["finished"]))


def expand(grid: GridSettings) -> list[RunSettings]:
    """Returns the runs, in the order: task, size, system, model, replicate, subset, candidate, seed.

    Raises:
        UserError: Names are unknown or not unique, settings are wrong or do not go together.
    """
    models = defaultdict[str, list[str]](list)
    for name, folder in (text.split("=", 1) for text in grid.model):
        models[name].append(folder)
    if len({len(folders) for folders in models.values()} - {1}) > 1:
        raise UserError("--model: each name needs as many checkpoints as the others, or one.")
    source, runs = grid.own.source, []
    for task, size in product([grid.own.name] if source else grid.tasks, grid.train_sizes):
        shared: dict[str, Any] = {"own": grid.own.model_dump(), "task": "" if source else task}
        shared |= {"train_size": size, "output_dir": grid.output_dir, "data_dir": grid.data_dir}
        of_task = [
            load_settings(RunSettings, values=shared | values)
            for name, system in grid.systems.items()
            if "," not in task or (system.head or grid.settings.head) == "cln"
            for values in _runs_of_system(grid, models, name, size)
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
    grid: GridSettings, models: dict[str, list[str]], name: str, size: int | str
) -> Iterator[dict[str, Any]]:
    """Yields a system's runs. Replicate r has a model's r-th (or only) folder and subsets (r-1) * D + 1 .. r * D."""
    system = grid.systems[name]
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
    for model in [""] if "model" in unread else system.models or models:
        if model and model not in models:
            hint = did_you_mean(model, models)
            raise UserError(f"systems.{name}.models: {model}: no model of this grid.{hint}")
        folders = models.get(model, [""])
        number = replicates if len(folders) > 1 or own_subsets else 1
        for r, d, *picked, seed in product(
            range(number), range(subsets), *search.values(), grid.seeds
        ):
            candidate = dict(zip(search, picked, strict=True))
            run = {
                "name": f"{model}-{name}".lstrip("-"),
                "model": folders[r % len(folders)],
                "pretraining": r + 1,
                "subset": own_subsets * r * subsets + d + 1,
                "seed": seed,
                "search": candidate,
            }
            yield values | candidate | run


def _help(index: int, runs: Sequence[RunSettings], logs: Path) -> None:
    """Works on the grid as a helper process, with its own GPU and log; ends with its parent, also a killed one."""
    logs.mkdir(parents=True, exist_ok=True)
    log = open(logs / f"{socket.gethostname()}-{os.getpid()}.log", "a", buffering=1)  # noqa: SIM115
    sys.stdout = sys.stderr = log
    import torch

    if (count := torch.cuda.device_count()) > 1:
        names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = names[index % count]

    def follow() -> None:
        multiprocessing.parent_process().join()  # type: ignore[union-attr]
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    work(runs)


def work(runs: Sequence[RunSettings]) -> None:
    """Makes all runs that no other process makes; waits for the others, and takes over those that are killed."""
    pending = list(runs)
    with Progress(len(runs), "run", "grid") as progress:
        while pending:
            for run in list(pending):
                if attempt(run):
                    pending.remove(run)
                    progress.update()
            if pending:
                time.sleep(WAIT)


def attempt(run: RunSettings) -> bool:
    """Makes a run, or writes the reason of its failure; returns False if another process makes it."""
    if finished_record(run) or (run.folder / ERROR).exists():
        return True
    if lock_holder(run.folder):
        return False
    try:
        run_finetune(run)
    except FolderInUse:
        return False
    except Exception as error:  # whatever it is, the other runs continue
        kind = "incompatible" if isinstance(error, Incompatible) else "failed"
        print_line(f"{kind}: {run.folder}: {type(error).__name__}: {first_line(error)}")
        write_error(run.folder, kind, error)
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


def _save_best(runs: Sequence[RunSettings]) -> list[tuple[str, Path]]:
    """Saves the model of the best run of the best system on each task, by the validation split; returns where."""
    from finetune.estimates import best_runs

    by_folder, models = {str(run.folder): run for run in runs}, []
    if any(run.head in FITTED for run in runs):
        print_line(f"--save_best: heads {', '.join(FITTED)} leave no model, so they take no part")
    records = load_results(Path(runs[0].output_dir))
    for best in best_runs(records[records["path"].isin(by_folder)]):
        run_finetune(by_folder[best["path"]].model_copy(update={"save_model": True}))
        models.append((f"best model of {best['task']}", Path(best["path"], "model")))
    return models


if __name__ == "__main__":
    run_command(main)
