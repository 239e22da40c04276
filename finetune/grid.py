"""Runs a grid: systems x tasks x sizes x draws x seeds, with the settings that each system chooses from.

python finetune/grid.py --recipe quick --model k5=RUN/hf --model bert=bert-base-uncased --data_dir glue --jobs 2
python finetune/grid.py --recipe quick --model k5=RUN/hf --data_dir glue --status
python finetune/grid.py --recipe quick --model k5=RUN/hf --train_file tickets.csv --set "seeds=[1, 2, 3]"
"""

from __future__ import annotations

import itertools
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/, whose names must not hide packages

from pydantic import BeforeValidator, Field, PositiveInt, ValidationError, field_validator

from finetune.data.tables import check_table
from finetune.heads import FITTED_HEADS
from finetune.run import OWN, request_ids_of
from finetune.settings import HEAD_OPTIONS, POOLED, FinetuneSettings, OwnDataSettings, check_names, flatten
from finetune.store.results import Busy, Store
from multicls.command_line import CommandLine, RecipeOptions, print_summary
from multicls.console import print_line, show_log
from multicls.errors import UserError, did_you_mean, run_command
from multicls.settings import Settings, load_settings, to_yaml
from multicls.words import duration

log = logging.getLogger("finetune")
WORKER = "MULTICLS_WORKER"  # number of a process among those of `--jobs`
AXES = ("model", "model_name", "pretraining_seed", "task", "own", "train_size", "data_seed", "selection", "seed",
        "output_dir")  # fmt: skip
Sizes = Annotated[list[Annotated[str, BeforeValidator(str)]], Field(min_length=1)]  # numbers, too
Folders = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
Seeds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Search = dict[str, Any]  # nested as settings are; lists at its leaves


class GridRunSettings(FinetuneSettings):
    """The settings of `finetune/run.py` that are no axis of the grid."""

    model: str = "-"
    head: str = "-"
    task: str = "-"


class SystemSettings(GridRunSettings):
    """A system: the settings of its runs, and what it chooses from."""

    models: list[str] = Field([], description="names of the models that it is for; default: all")
    search: Search = Field({}, description="setting -> values to choose from, beside the grid's")


class GridSettings(Settings):
    """A grid: what is compared, on what, how often."""

    models: dict[str, Folders] = Field(
        {}, description="name -> folder or hub id; or a list of them, one for each pretraining seed"
    )
    systems: dict[str, SystemSettings] = Field(
        min_length=1, description="name -> settings of its runs; or a list of heads such as [cls, isobn/multicls]"
    )
    tasks: list[str] = Field(min_length=1, description="names of tasks; several with commas are one for head cln")
    own: dict[str, OwnDataSettings] = Field({}, description="your own tasks: name -> train_file and the like")
    train_sizes: Sizes = Field(description="100, 1k, full, ...")
    seeds: Seeds = Field(description="fine-tuning seeds")
    data_seeds: Seeds = Field([1], description="draws of train rows")
    selections: list[Literal["dev", "holdout"]] = Field(["dev"], min_length=1, description="dev, holdout")
    search: Search = Field({}, description="setting -> values that each system chooses from")
    choose: Literal["mean", "median"] = Field("mean", description="of the runs, to choose by")
    settings: GridRunSettings = Field(GridRunSettings(), description="settings of all runs")
    overrides: dict[str, GridRunSettings] = Field(
        {}, description="task, system or train size -> settings of its runs, later ones win"
    )

    @field_validator("systems", mode="before")
    @classmethod
    def _heads_are_systems(cls, value: object) -> object:
        if not isinstance(value, list):
            return value
        return {str(name): dict(zip(("head", "pooling"), str(name).split("/", 1), strict=False)) for name in value}


class GridOptions(RecipeOptions):
    """Options of the command."""

    recipe: list[str] = Field(min_length=1, description="the YAML file of a grid, or the name of a shipped one")
    model: list[str] = Field(
        [], title="NAME=FOLDER", description="a model to add; the same name again is another pretraining seed"
    )
    data_dir: str | None = Field(None, description="folder of the tasks; default: the hub")
    output_dir: str = Field("results", description="results folder")
    jobs: PositiveInt = Field(1, description="processes side by side")
    list_runs: bool = Field(False, description="print the runs and stop")
    status: bool = Field(False, description="count finished, failed and missing runs and stop")
    since: int | None = None
    own: OwnDataSettings = OwnDataSettings()


COMMAND = CommandLine(
    "finetune/grid.py", __doc__, GridOptions, settings=GridSettings, recipes="finetune/recipes",
    sibling="finetune/run.py", groups={
        "runs": {"jobs": "jobs", "list": "list_runs", "status": "status"},
        "your own rows, instead of the recipe's tasks": OWN,
    },
)  # fmt: skip


@dataclass(frozen=True)
class GridRun:
    """One run of a grid."""

    system: str  # name of the system, with its model's
    candidate: dict[str, Any]  # its values of the settings that the system searches, by dotted name
    settings: FinetuneSettings

    @property
    def title(self) -> str:
        """The run on one line."""
        run = self.settings
        parts = [run.task or run.own.name, f"{run.train_size} rows", self.system]
        parts += [f"{name.rpartition('.')[2]} {value}" for name, value in self.candidate.items()]
        parts += [run.selection, *([f"pretraining {run.pretraining_seed}"] if run.pretraining_seed else [])]
        return ", ".join([*parts, f"draw {run.data_seed}", f"seed {run.seed}"])

    @property
    def request_ids(self) -> list[str]:
        """The run's identity for each of its tasks, whichever command makes it."""
        return request_ids_of(self.settings, _fingerprint(self.settings.model, self.settings.trust_remote_code))

    def planned(self) -> list[dict[str, Any]]:
        """Returns the entries of the plan, one for each task."""
        run, tasks = self.settings, self.settings.task_names or [self.settings.own.name]
        names = ("model_name", "label", "selection", "pretraining_seed", "data_seed", "seed")
        about = {name: getattr(run, name) for name in names} | {
            "system": self.system, "train_size": str(run.train_size), "candidate": self.candidate,
            "joint": tasks if len(tasks) > 1 else [],
            "changed": {name: value for name, value in run.changed().items() if name not in self.candidate},
        }  # fmt: skip
        return [about | {"task": task, "request_id": one} for task, one in zip(tasks, self.request_ids, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    args, grid = COMMAND.parse_with(argv, lambda options, _: _read_grid(options))
    if args.print_config:
        print(to_yaml(grid), end="")
        return 0
    runs, store = expand(grid, args.output_dir), Store(args.output_dir)
    store.check(write=True)
    if args.list_runs:
        print("\n".join(run.title for run in runs))
        return 0
    if args.status:
        state = look(runs, store)
        print(", ".join(f"{name} {len(found)}" for name, found in state.items()) + f", of {len(runs)}")
        _print_problems(state)
        return 0
    for own in (grid.own[task] for task in grid.tasks if task in grid.own):
        for file in filter(None, (own.train_file, own.dev_file, own.test_file)):
            check_table(Path(file))  # or each run would tell it
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # KeyboardInterrupt
    try:
        store.add_plan({"choose": grid.choose, "runs": [entry for run in runs for entry in run.planned()]})
        since = len(store.errors()) if args.since is None else args.since
        if args.jobs > 1:
            return _start_workers(runs, args, list(sys.argv[1:] if argv is None else argv), since)
        return _work(runs, store, since)
    except KeyboardInterrupt:
        print("stopped; what was finished is kept, and the same command goes on from there", file=sys.stderr)
        raise


def expand(grid: GridSettings, output_dir: str) -> list[GridRun]:
    """Returns the runs, in the order: task, size, system, model, selection, draw, candidate, seed.

    Several tasks together are for `cln` only; a system chooses only from settings that its head reads.

    Raises:
        UserError: An unknown task, head, or key of `overrides`, or settings that do not go together.
    """
    shared = {"settings": grid.settings, **{f"systems.{name}": one for name, one in grid.systems.items()},
              **{f"overrides.{key}": one for key, one in grid.overrides.items()}}  # fmt: skip
    problems = [f"{where}.{name}: this is an axis of the grid, or a flag." for where, one in shared.items()
                for name in AXES if name in one.model_fields_set]  # fmt: skip
    if not grid.models:
        problems.append("no models: give --model NAME=FOLDER, or models in the recipe.")
    known = {*grid.tasks, *grid.systems, *grid.train_sizes}
    problems += [f"overrides: {key}: no task, system or train size of this grid.{did_you_mean(key, known)}"
                 for key in grid.overrides if key not in known]  # fmt: skip
    problems += [f"systems.{name}.models: {model}: no model of this grid.{did_you_mean(model, grid.models)}"
                 for name, one in grid.systems.items() for model in one.models if model not in grid.models]  # fmt: skip
    if problems:
        raise UserError(*problems)
    runs: list[GridRun] = []
    for task, size, system in itertools.product(grid.tasks, grid.train_sizes, grid.systems):
        if "," in task and "cln" not in (grid.systems[system].head, grid.settings.head):
            continue
        try:
            runs += _expand_system(grid, task, size, system, output_dir)
        except ValidationError as error:
            problems += [f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}." for detail in error.errors()]
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return runs


def _expand_system(grid: GridSettings, task: str, size: str, name: str, output_dir: str) -> Iterator[GridRun]:
    """Yields the runs of one system on one task at one size."""
    system = grid.systems[name]
    values: dict[str, Any] = {}
    for part in (grid.settings, system, *(grid.overrides[key] for key in (task, name, size) if key in grid.overrides)):
        values |= flatten(part.model_dump(exclude_unset=True, exclude={"models", "search"}))
    head = values.get("head")
    unread = {group for group in HEAD_OPTIONS if group != head}
    unread |= {"train"} if head in FITTED_HEADS else set()
    unread |= {"pooling"} if head not in POOLED else set()
    search = flatten(grid.search) | flatten(system.search)
    for key, options in search.items():
        if not isinstance(options, list) or not options:
            raise UserError(f"search.{key} = {options!r}: give a list of values to choose from.")
        GridRunSettings.model_validate(_nested({key: options[0]}))  # a misspelt key is told, whichever head it is for
    search = {key: options for key, options in search.items() if key.partition(".")[0] not in unread}
    rows = {"own": grid.own[task].model_copy(update={"task_name": task})} if task in grid.own else {"task": task}
    models = [(model, number, path) for model in system.models or grid.models
              for number, path in enumerate(grid.models[model], start=1)]  # fmt: skip
    axes = (models, grid.selections, grid.data_seeds, itertools.product(*search.values()), grid.seeds)
    for (model, number, path), selection, data_seed, picked, seed in itertools.product(*axes):
        candidate = dict(zip(search, picked, strict=True))
        run = values | rows | {
            "model": path, "model_name": model, "pretraining_seed": number if len(grid.models[model]) > 1 else None,
            "train_size": size, "selection": selection, "data_seed": data_seed, "seed": seed, "output_dir": output_dir,
        } | candidate  # fmt: skip
        settings = FinetuneSettings.model_validate(_nested(run))
        check_names(settings)
        yield GridRun(f"{model} {name}", candidate, settings)


def look(runs: Sequence[GridRun], store: Store, since: int = 0) -> dict[str, dict[str, str]]:
    """Returns the titles of the runs by their state, with the error if there is one, from the results folder alone.

    States are `finished`, `impossible` (model, data or settings do not fit), `failed` and `missing`. Errors before line
    `since` of errors.jsonl do not count.
    """
    done = {record["request_id"] for record in store.records()}
    errors = {request_id: line for line in store.errors()[since:] for request_id in line["request_ids"]}
    state: dict[str, dict[str, str]] = {"finished": {}, "impossible": {}, "failed": {}, "missing": {}}
    for run in runs:
        ids = run.request_ids
        line = errors.get(ids[0], {"error": "", "run_id": ""})
        refused = line["error"].startswith("UserError") and not line["run_id"]  # before it could be planned
        kind = "impossible" if refused else "failed" if line["error"] else "missing"
        state["finished" if done.issuperset(ids) else kind][run.title] = line["error"]
    return state


@lru_cache
def _fingerprint(model: str, trust_remote_code: bool) -> str:
    from finetune.heads.checkpoint import find_folder, fingerprint_of

    return fingerprint_of(find_folder(model), trust_remote_code)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by dotted name in their groups."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        group, _, leaf = name.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[leaf] = value
    return nested


def _work(runs: Sequence[GridRun], store: Store, since: int) -> int:
    """Walks the runs in this process and does those that are neither finished nor claimed by another process.

    Returns:
        1 if runs have crashed, or none could run; else 0.
    """
    import torch

    show_log(log.name, logging.INFO)
    if torch.cuda.device_count() > 1:
        torch.cuda.set_device(int(os.environ.get(WORKER, 0)) % torch.cuda.device_count())
    progress, pending, busy = _Progress(runs, store, since), 0, list(runs)
    while len(busy) != pending:  # else others hold the rest; whoever is killed there leaves a run for the next start
        pending, busy = len(busy), [run for run in busy if not _attempt(run, store, progress)]
    return progress.close()


def _attempt(run: GridRun, store: Store, progress: _Progress) -> bool:
    """Does a run, unless it is finished or has failed; returns False if another process is at it."""
    import torch

    from finetune.run import plan_run
    from finetune.run import run as fine_tune

    if run.title in {**progress.state["failed"], **progress.state["impossible"]}:
        return True
    run_id = ""
    try:
        planned = plan_run(run.settings)
        run_id = planned.run_ids[0]
        if planned.records() is None:
            fine_tune(run.settings)
    except Busy:
        return False
    except Exception as error:  # whatever it is, the other runs go on
        log.error("%s: %s: %s", run.title, type(error).__name__, error)
        store.write_error(error, run.title, run_id, run.request_ids)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # for the processes side by side
    progress.show()
    return True


class _Progress:
    """Tells how many runs are done, and how long the rest will take at the speed since the start."""

    def __init__(self, runs: Sequence[GridRun], store: Store, since: int) -> None:
        self.runs, self.store, self.since = runs, store, since
        self.started, self.shown = time.monotonic(), list[str]()
        self.left = len(look(runs, store, since)["missing"])
        self.show()

    def show(self) -> None:
        """Looks at the state of the runs, and prints a line if it has changed."""
        self.state = look(self.runs, self.store, self.since)
        left = len(self.state["missing"])
        parts = [f"runs {len(self.runs) - left}/{len(self.runs)}"]
        parts += [f"{kind} {len(self.state[kind])}" for kind in ("impossible", "failed") if self.state[kind]]
        if parts != self.shown:
            self.shown = parts
            seconds = (time.monotonic() - self.started) / max(1, self.left - left) * left
            print_line("  ".join([*parts, *([f"eta {duration(seconds)}"] if 0 < left < self.left else [])]))

    def close(self) -> int:
        """Prints what is not finished and what to do next; returns the exit code."""
        self.show()
        _print_problems(self.state)
        if self.state["finished"]:
            count = f"{len(self.state['finished'])} of {len(self.runs)} runs finished"
            report = shlex.join(["python", "finetune/report.py", str(self.store.folder)])
            print_summary([("results", f"{self.store.folder} ({count})")], report)
        return int(bool(self.state["failed"]) or not self.state["finished"])


def _start_workers(runs: Sequence[GridRun], args: GridOptions, argv: Sequence[str], since: int) -> int:
    """Starts `args.jobs` processes over the same runs and follows them; each has a log of its own."""
    store = Store(args.output_dir)
    logs = store.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // args.jobs))
    workers = []
    try:
        for number in range(args.jobs):
            with open(logs / f"{socket.gethostname()}-{os.getpid()}-{number}.log", "ab") as file:
                command = [sys.executable, "-u", __file__, *argv, "--jobs", "1", "--since", str(since)]
                environment = os.environ | {"OMP_NUM_THREADS": threads, WORKER: str(number)}
                workers.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
        progress = _Progress(runs, store, since)
        while any(worker.poll() is None for worker in workers):
            time.sleep(1)
            progress.show()
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
    killed = [worker.returncode for worker in workers if worker.returncode not in (0, 1)]
    for code in killed:
        print(f"a worker ended with {code} (see {logs}); the same command goes on", file=sys.stderr)
    return max(progress.close(), int(bool(killed)))


def _print_problems(state: Mapping[str, Mapping[str, str]]) -> None:
    for kind in ("impossible", "failed"):
        for title, problem in state[kind].items():
            print(f"{kind}: {title}: {problem}")


def _read_grid(options: GridOptions) -> GridSettings:
    """Returns the grid of the recipes with what flags give: the data folder, models, own rows as the only task."""
    flags: dict[str, Any] = {"settings.data_dir": options.data_dir}
    models: dict[str, list[str]] = {}
    for name, path in (model.partition("=")[::2] for model in options.model):
        if not path:
            raise UserError(f"--model {name}: write it as NAME=FOLDER.")
        models.setdefault(name, []).append(path)
    if own := options.own.model_dump(exclude_unset=True):
        task = options.own.name.removeprefix("own_")
        flags |= {f"own.{task}.{name}": value for name, value in own.items()} | {"tasks": [task]}
    grid = load_settings(GridSettings, options.recipe, options.set, flags)
    return grid.model_copy(update={"models": grid.models | models})


if __name__ == "__main__":
    run_command(main)
