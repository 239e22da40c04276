"""Runs a grid of fine-tuning cells: models x tasks x heads x sizes x learning rates x seeds, and goes on where it was.

python finetune/grid.py --recipe finetune/recipes/quick.yaml --model k5=RUN/hf --model bert=bert-base-uncased \
    --data_dir DIR --output_dir results --jobs 2
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/, whose names must not hide packages

from pydantic import Field, PositiveFloat, ValidationError, field_validator

from finetune.settings import POOLED, FinetuneSettings, check_names
from finetune.store.results import ERRORS, Busy, check_folder, read_results, run_id_of, write_error
from multicls.errors import UserError, did_you_mean, run_command
from multicls.files import append_jsonl, read_json, read_jsonl, write_json
from multicls.settings import Settings, load_settings

log = logging.getLogger("finetune")
WORKER = "MULTICLS_WORKER"  # number of a process among those of `--jobs`
PLANS = "grids"  # folder in the results folder: the cells of every grid, for reports
FINISHED = f"{PLANS}/finished.jsonl"  # cells and their runs
AXES = ("model", "model_name", "pretraining_seed", "task", "train_size", "data_seed",
        "selection", "head", "seed", "output_dir")  # fmt: skip
Names = Annotated[list[str], Field(min_length=1)]
Seeds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class GridRunSettings(FinetuneSettings):
    """The settings of `finetune/run.py` that are no axis of the grid."""

    model: str = "-"
    head: str = "-"
    task: str = "-"


class GridSettings(Settings):
    """A grid: the axes, and what all cells share."""

    models: dict[str, list[str]] = Field(
        default={}, description="name -> folder or hub id; or a list of them, one a pretraining seed"
    )
    tasks: Names = Field(description="names of tasks; some with commas between are one task for head cln")
    heads: Names = Field(description="head, or head/pooling such as isobn/multicls")
    train_sizes: Names = Field(description="100, 1k, full, ...")
    learning_rates: Annotated[list[PositiveFloat], Field(min_length=1)] = Field(description="peak learning rates")
    seeds: Seeds = Field(description="fine-tuning seeds")
    data_seeds: Seeds = Field(default=[1], description="draws of train rows")
    selections: list[Literal["dev", "holdout"]] = Field(default=["dev"], min_length=1, description="dev, holdout")
    settings: GridRunSettings = Field(default=GridRunSettings(), description="any setting of run.py, for all cells")
    overrides: dict[str, GridRunSettings] = Field(
        default={}, description="task, head or train size -> settings of its cells, later ones win"
    )

    @field_validator("models", mode="before")
    @classmethod
    def _one_path_is_a_list(cls, value: object) -> object:
        return {k: [v] if isinstance(v, str) else v for k, v in value.items()} if isinstance(value, dict) else value

    @field_validator("train_sizes", mode="before")
    @classmethod
    def _sizes_are_text(cls, value: object) -> object:
        return [str(size) for size in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class GridRun:
    """One run of a grid."""

    settings: FinetuneSettings

    @property
    def key(self) -> dict[str, Any]:
        """Its place on every axis; what `finetune.stats.systems` expects of a planned cell."""
        cell = self.settings
        pooling = f"/{cell.pooling}" if cell.head in POOLED and cell.pooling != "cls" else ""
        pooling += f" of {','.join(sorted(cell.task_names))}" if "," in cell.task else ""
        names = ("task", "train_size", "model", "model_name", "pretraining_seed", "selection", "data_seed", "seed")
        return {name: getattr(cell, name) for name in names} | {
            "head": cell.head + pooling, "learning_rate": cell.train.learning_rate
        }  # fmt: skip

    @property
    def id(self) -> str:
        """12 hex digits for all its settings but the results folder."""
        return run_id_of(self.settings.model_dump(mode="json", exclude={"output_dir"}))

    @property
    def title(self) -> str:
        """The key on one line."""
        key = self.key
        return (
            f"{key['task']}, {key['train_size']} rows, {key['head']}, {key['model']}, lr {key['learning_rate']:g}, "
            f"{key['selection']}, draw {key['data_seed']}, seed {key['seed']}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    args = _parser().parse_args(argv)
    flags: dict[str, Any] = {"settings.data_dir": args.data_dir}
    for name, path in (model.partition("=")[::2] for model in args.model):
        if not path:
            raise UserError(f"--model {name}: write it as NAME=FOLDER.")
        flags.setdefault(f"models.{name}", []).append(path)
    grid = load_settings(GridSettings, [args.recipe], args.set, flags)
    cells = expand(grid, args.output_dir)
    check_folder(args.output_dir)
    if args.list:
        print("\n".join(cell.title for cell in cells))
        return 0
    if args.status:
        state = look(cells, args.output_dir)
        print(", ".join(f"{name} {len(found)}" for name, found in state.items()) + f", of {len(cells)}")
        _print_problems(state)
        return 0
    plan = Path(args.output_dir) / PLANS / f"{Path(args.recipe).stem}.json"
    keys = [cell.key | {"task": task} for cell in cells for task in cell.settings.task_names]
    if not plan.exists() or read_json(plan) != keys:
        write_json(plan, keys)
    since = len(read_jsonl(Path(args.output_dir) / ERRORS)) if args.since is None else args.since
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if args.jobs > 1:
            return _start_workers(cells, args, list(sys.argv[1:] if argv is None else argv), since)
        return _work(cells, args.output_dir, since)
    except KeyboardInterrupt:
        print("stopped; what was finished is kept, and the same command goes on from there", file=sys.stderr)
        raise


def expand(grid: GridSettings, output_dir: str) -> list[GridRun]:
    """The cells, in the order of the axes: task, size, head, model, selection, draw, learning rate, seed.

    `probe` has no learning rate and takes part once; several tasks together are for `cln` only.

    Raises:
        UserError: an unknown task, head, or key of `overrides`, or settings that do not go together.
    """
    shared = {"settings": grid.settings, **{f"overrides.{key}": cell for key, cell in grid.overrides.items()}}
    problems = [f"{where}.{name}: this is an axis of the grid, or a flag." for where, cell in shared.items()
                for name in AXES if name in cell.model_fields_set]  # fmt: skip
    if not grid.models:
        problems.append("no models: give --model NAME=FOLDER, or models in the recipe.")
    known = {*grid.tasks, *grid.heads, *grid.train_sizes}
    problems += [f"overrides: {key}: no task, head or train size of this grid.{did_you_mean(key, known)}"
                 for key in grid.overrides if key not in known]  # fmt: skip
    models = [(name, seed, path) for name, paths in grid.models.items() for seed, path in enumerate(paths, start=1)]
    axes = (grid.tasks, grid.train_sizes, grid.heads, models, grid.selections, grid.data_seeds, grid.learning_rates,
            grid.seeds)  # fmt: skip
    cells = []
    for task, size, head, (name, number, path), selection, data_seed, rate, seed in itertools.product(*axes):
        head_name, _, pooling = head.partition("/")
        if (head_name == "probe" and rate != grid.learning_rates[0]) or ("," in task and head_name != "cln"):
            continue
        values: dict[str, Any] = grid.settings.model_dump(exclude_unset=True)
        for key in (task, head, size):
            if key in grid.overrides:
                values = _merge(values, grid.overrides[key].model_dump(exclude_unset=True))
        values = _merge(values, {
            "model": path, "model_name": name, "pretraining_seed": number if len(grid.models[name]) > 1 else None,
            "task": task, "train_size": size, "head": head_name, "selection": selection, "data_seed": data_seed,
            "seed": seed, "output_dir": output_dir, "train": {"learning_rate": rate},
        } | ({"pooling": pooling} if pooling else {}))  # fmt: skip
        try:
            settings = FinetuneSettings.model_validate(values)
            check_names(settings)
            cells.append(GridRun(settings))
        except ValidationError as error:
            problems += [f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}." for detail in error.errors()]
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return cells


def look(cells: Sequence[GridRun], output_dir: str, since: int = 0) -> dict[str, dict[str, str]]:
    """What has become of the cells, from the results folder alone.

    Args:
        since: errors before this line of errors.jsonl do not count.

    Returns:
        Titles with, where something is to be said, the reason: `finished`, `impossible` (model, data or settings do not
        fit), `failed` and `missing`.
    """
    done = {record["run_id"] for record in read_results(output_dir)}
    lines = read_jsonl(Path(output_dir) / FINISHED)
    finished = {line["cell"] for line in lines if done.issuperset(line["run_ids"])}
    errors = {line["identity"].get("cell"): line for line in read_jsonl(Path(output_dir) / ERRORS)[since:]}
    state: dict[str, dict[str, str]] = {"finished": {}, "impossible": {}, "failed": {}, "missing": {}}
    for cell in cells:
        line = errors.get(cell.id, {"error": "", "run_id": ""})
        refused = line["error"].startswith("UserError") and not line["run_id"]  # before it could be planned
        kind = "impossible" if refused else "failed" if line["error"] else "missing"
        state["finished" if cell.id in finished else kind][cell.title] = line["error"]
    return state


def _merge(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with those of `more`, groups of settings merged."""
    merged = dict(values)
    for name, value in more.items():
        inner = merged.get(name)
        merged[name] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _work(cells: Sequence[GridRun], output_dir: str, since: int) -> int:
    """Walks the cells in this process and runs those that are neither finished nor claimed by another process.

    Returns:
        1 if cells have crashed, or none could run; else 0.
    """
    import torch

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO)
    if torch.cuda.device_count() > 1:
        torch.cuda.set_device(int(os.environ.get(WORKER, 0)) % torch.cuda.device_count())
    progress, pending = _Progress(cells, output_dir, since), list(cells)
    while pending:
        busy = [cell for cell in pending if not _attempt(cell, progress)]
        if len(busy) == len(pending):
            break  # the rest is in the hands of others; whoever is killed there leaves a cell for the next start
        pending = busy
    return progress.close()


def _attempt(cell: GridRun, progress: _Progress) -> bool:
    """Runs a cell, unless it is finished or has failed; False if another process is at it."""
    import torch

    from finetune.run import plan_run, run

    output_dir, run_ids = cell.settings.output_dir, [""]
    if cell.title in progress.state["failed"].keys() | progress.state["impossible"].keys():
        return True
    try:
        planned = plan_run(cell.settings)
        run_ids = planned.run_ids
        if not planned.finished:
            run(cell.settings)
        if cell.title not in progress.state["finished"]:
            append_jsonl(Path(output_dir) / FINISHED, {"cell": cell.id, "run_ids": run_ids})
    except Busy:
        return False
    except Exception as error:  # whatever it is, the other cells go on
        log.error("%s: %s: %s", cell.title, type(error).__name__, error)
        write_error(output_dir, error, cell.title, run_ids[0], cell.key | {"cell": cell.id})
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # for the processes side by side
    progress.show()
    return True


class _Progress:
    """Tells how many cells are done, and how long the rest will take at the speed since the start."""

    def __init__(self, cells: Sequence[GridRun], output_dir: str, since: int) -> None:
        self.cells, self.output_dir, self.since = cells, output_dir, since
        self.started, self.shown = time.monotonic(), ""
        self.left = len(look(cells, output_dir, since)["missing"])
        self.show()

    def show(self) -> None:
        """Looks at the state of the cells, and prints a line if it has changed."""
        self.state = look(self.cells, self.output_dir, self.since)
        left = len(self.state["missing"])
        text = f"cells {len(self.cells) - left}/{len(self.cells)}"
        text += "".join(f"  {kind} {len(self.state[kind])}" for kind in ("impossible", "failed") if self.state[kind])
        if text != self.shown:
            self.shown = text
            seconds = (time.monotonic() - self.started) / max(1, self.left - left) * left
            eta = f"  eta {seconds // 3600:.0f}h{seconds % 3600 // 60:02.0f}" if 0 < left < self.left else ""
            print(text + eta, flush=True)

    def close(self) -> int:
        """Prints what is not finished; returns the exit code."""
        self.show()
        _print_problems(self.state)
        return int(bool(self.state["failed"]) or not self.state["finished"])


def _start_workers(cells: Sequence[GridRun], args: argparse.Namespace, argv: Sequence[str], since: int) -> int:
    """Runs `args.jobs` processes over the same cells and follows them; each has a log of its own."""
    logs = Path(args.output_dir) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // args.jobs))
    workers = []
    try:
        for number in range(args.jobs):
            with open(logs / f"{socket.gethostname()}-{os.getpid()}-{number}.log", "ab") as file:
                command = [sys.executable, "-u", __file__, *argv, "--jobs", "1", "--since", str(since)]
                environment = os.environ | {"OMP_NUM_THREADS": threads, WORKER: str(number)}
                workers.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
        progress = _Progress(cells, args.output_dir, since)
        while any(worker.poll() is None for worker in workers):
            time.sleep(1)
            progress.show()
    except BaseException:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
        raise
    killed = [worker for worker in workers if worker.returncode not in (0, 1)]
    for worker in killed:
        print(f"a worker ended with {worker.returncode} (see {logs}); the same command goes on", file=sys.stderr)
    return max(progress.close(), int(bool(killed)))


def _print_problems(state: Mapping[str, Mapping[str, str]]) -> None:
    for kind in ("impossible", "failed"):
        for title, problem in state[kind].items():
            print(f"{kind}: {title}: {problem}")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--recipe", required=True, metavar="FILE", help="YAML file of the grid")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=FOLDER",
                        help="a model to add; the same name again is another pretraining seed")  # fmt: skip
    parser.add_argument("--data_dir", metavar="DIR", help="folder of the tasks; default: the hub")
    parser.add_argument("--output_dir", default="results", metavar="DIR", help="results folder (results)")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="such as seeds=[1,2]")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes side by side (1)")
    parser.add_argument("--list", action="store_true", help="print the cells and stop")
    parser.add_argument("--status", action="store_true", help="count finished, failed and missing cells and stop")
    parser.add_argument("--since", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    run_command(main)
