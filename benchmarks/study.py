"""The study: do facets help, and by how much? Arms of equal tokens, fine-tuned on many tasks, within a budget of time.

The first call plans the study. Each call works for at most --piece, and the same command goes on where it was.

python benchmarks/study.py pack --text wiki=DIR books=DIR --data_dir DIR --output inputs.tar.xz
python benchmarks/study.py --inputs inputs.tar.xz --budget 25m --device cuda
python benchmarks/study.py --inputs inputs.tar.xz --size smoke --piece 2h
python benchmarks/study.py page
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from importlib import import_module
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

sys.path[0] = str(Path(__file__).resolve().parents[1])

import yaml
from pydantic import Field

from benchmarks import study_plan
from benchmarks.compare import machine
from benchmarks.study_plan import ARMS, BASE, MEASURED_ARMS, SPECIAL, Measured, Plan, Pretraining
from finetune.store.results import Store
from multicls.command_line import CommandLine
from multicls.console import Progress, Pulse, print_line
from multicls.corpus import Corpus
from multicls.errors import UserError, run_command
from multicls.files import REPOSITORY, append_jsonl, atomic_write, locked, read_json, read_jsonl, write_json
from multicls.settings import Settings
from multicls.words import duration
from pretrain.run_folder import DONE

HELD_OUT = 0.02  # share of the documents that pretraining validates on
CORES = len(os.sched_getaffinity(0))
MOST_JOBS = 6  # processes side by side: one for each arm
PROBE_STEPS = {"cpu": 5, "cuda": 60}  # of a pretraining that is only timed
PROBE_FINETUNING = 40  # steps likewise
SAVING = 20.0  # seconds at the end of a piece, for what is running to save and leave
WEIGHTS = ("checkpoints", "hf", "model", "tb")  # folders of a pretraining that do not stay
LEFTOVERS = ("models", "snapshots", "tb", "claims", "logs")  # of a results folder
Commands = Mapping[str, Sequence[str]]  # a command line by the name of its log


class StudyOptions(Settings):
    """Options of the command."""

    inputs: Path | None = Field(None, description="what `pack` has written; only a study's first call needs it")
    budget: str | None = Field(None, title="TIME", description="time of the whole study, such as 25m")
    size: Literal["smoke"] | None = Field(None, description="a fixed small study instead of a --budget")
    device: Literal["cpu", "cuda"] | None = Field(None, description="default: the GPU, if there is one")
    piece: str = Field("8m", title="TIME", description="longest time of one call")
    base: str | None = Field(None, title="MODEL", description="any BERT instead of the packed one")
    output_dir: Path = Field(Path("runs/study"), description="folder of the study")
    keep_weights: bool = Field(False, description="keep inputs and models at the end")


class Call:
    """One call of the command on the study in `folder`; leaves when the monotonic clock is at `deadline`."""

    def __init__(self, folder: Path, piece: float, device: str, jobs: int) -> None:
        self.folder = folder
        self.deadline = time.monotonic() + piece - min(SAVING, piece / 10)
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, CORES // jobs))
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        self.watch: Callable[[], object] = lambda: None  # called every 10 seconds while commands run
        self.environment = os.environ | {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"} | hidden

    def run_all(self, commands: Commands, jobs: int = 1) -> bool:
        """Runs commands, `jobs` at a time; at the deadline asks those that run to save and leave.

        Returns:
            True if all have ended by themselves.

        Raises:
            UserError: A command failed.
        """
        waiting, running, pulse = dict(commands), dict[str, subprocess.Popen[bytes]](), Pulse()
        try:
            while (waiting or running) and time.monotonic() < self.deadline:
                for name in list(waiting)[: jobs - len(running)]:
                    running[name] = self._start(name, waiting.pop(name))
                time.sleep(0.2)
                if pulse.due():  # it reads all results
                    self.watch()
                for name in [name for name, process in running.items() if process.poll() is not None]:
                    if code := running.pop(name).returncode:
                        lines = self._log(name).read_text(encoding="utf-8", errors="replace").splitlines()
                        raise UserError(f"{name} ended with code {code}: {' '.join(lines[-1:])} (log: "
                                        f"{self._log(name)}). Put it right; the same command goes on.")  # fmt: skip
        finally:
            for process in running.values():
                process.terminate()
            for process in running.values():
                process.wait()
        return not waiting and not running

    def _start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        self._log(name).parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, str(REPOSITORY / command[0]), *command[1:]]
        with open(self._log(name), "ab") as log:
            return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment,
                                    preexec_fn=_end_with_parent)  # fmt: skip

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"


def _end_with_parent() -> None:
    """Asks Linux to send this new process SIGTERM when the study's process ends, even if that was killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] in (["pack"], ["page"]):
        module = import_module("benchmarks.study_inputs" if argv[0] == "pack" else "benchmarks.study_page")
        module.main(argv[1:])
        return 0
    options = CommandLine("benchmarks/study.py", __doc__, StudyOptions).parse(argv)
    folder, piece = options.output_dir, seconds_of("--piece", options.piece)
    budget = seconds_of("--budget", options.budget) if options.budget else None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with locked(folder):
        began = time.monotonic()
        plan = find_plan(options, budget) or make_plan(options, budget, piece)
        print("\n".join(plan.words()), flush=True)
        work(Call(folder, piece - (time.monotonic() - began), plan.device, plan.jobs), plan, options.keep_weights)
        print(left_in_words(folder, plan, piece), flush=True)
    return 0


def find_plan(options: StudyOptions, budget: float | None) -> Plan | None:
    """Returns the plan of the study, None if it has none yet.

    Raises:
        UserError: The options ask for another study than the plan's, or lack what a new one needs.
    """
    path = options.output_dir / "plan.json"
    if not path.exists():
        if not options.inputs:
            raise UserError("--inputs: a new study needs the file that `python benchmarks/study.py pack` writes.")
        if (budget is None) == (options.size is None):
            raise UserError("give a new study either a --budget, such as 25m, or --size smoke.")
        return None
    plan = Plan.model_validate(read_json(path))
    for name, value in {"budget": budget, "size": options.size, "device": options.device}.items():
        if value is not None and value != (was := getattr(plan, name)):
            raise UserError(f"--{name} {getattr(options, name)}: {path} was made for {name} {was}, and a plan is kept "
                            "to its end. Leave the flag out to go on, or give another --output_dir.")  # fmt: skip
    return plan


def make_plan(options: StudyOptions, budget: float | None, piece: float) -> Plan:
    """Unpacks, measures if there is a budget, decides, and writes STUDY/plan.json."""
    from benchmarks.study_inputs import unpack

    assert options.inputs
    began, folder = time.monotonic(), options.output_dir
    inputs = unpack(options.inputs, folder / "inputs")
    device, hardware = find_device(options.device)
    jobs = max(1, min(MOST_JOBS, CORES // (2 if device == "cuda" else 1)))
    plan = Plan(
        size=options.size, budget=budget, device=device, hardware=hardware, jobs=jobs,
        base=options.base or str(inputs / "model"), base_name=options.base or read_json(inputs / "inputs.json")["base"],
        corpus=str(inputs / "corpus"), data=str(inputs / "data"), made=time.strftime("%Y-%m-%d"), expected={},
        one_pass=Corpus.open(inputs / "corpus").manifest["tokens"] * (1 - HELD_OUT),
        pretraining=study_plan.SMOKE[0], evaluation=study_plan.SMOKE[1],
    )  # fmt: skip
    if budget:
        print("measuring times, to plan the study", flush=True)
        measured = measure(Call(folder, piece, device, jobs), plan)
        left, pieces = budget - (time.monotonic() - began), math.ceil(budget / piece)
        decided = study_plan.decide(measured, left, plan.one_pass, jobs, pieces)
        plan = plan.model_copy(update=dict(zip(("pretraining", "evaluation", "expected"), decided, strict=True)))
    write_json(folder / "plan.json", plan.model_dump(mode="json"))
    append_jsonl(folder / "calls.jsonl", {"stage": "planning", "seconds": time.monotonic() - began, "runs": 0})
    return plan


def find_device(asked: str | None) -> tuple[Literal["cpu", "cuda"], str]:
    """Returns the device and the name of the hardware.

    Raises:
        UserError: A GPU is asked for, and there is none.
    """
    import torch

    if asked == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU here; leave the flag out, or give --device cpu.")
    if asked != "cpu" and torch.cuda.is_available():
        return "cuda", f"{torch.cuda.get_device_name()}; {machine()}"
    return "cpu", machine()


def measure(call: Call, plan: Plan) -> Measured:
    """Returns times with all processes side by side, as in the study.

    Raises:
        UserError: The measurement takes longer than a piece.
    """
    probe, steps, full = call.folder / "probe", PROBE_STEPS[plan.device], study_plan.LADDER[0]
    shutil.rmtree(probe, ignore_errors=True)
    train = Pretraining(tokens=0, seeds=(), eval_every=steps // study_plan.EVALUATIONS)
    arms = islice(cycle(MEASURED_ARMS), max(2, plan.jobs))
    runs = [(arm, probe / f"run-{number}") for number, arm in enumerate(arms)]
    commands = {run.name: [*pretrain_command(probe, plan, train, arm, run), "--steps", str(steps)] for arm, run in runs}
    recipe = {
        "models": {BASE: [plan.base]}, "systems": ["cls"], "tasks": full.tasks, "train_sizes": full.train_sizes,
        "seeds": [1], "selections": ["holdout"],
        "settings": {"max_length": full.max_length, "train": {"max_steps": PROBE_FINETUNING}},
    }  # fmt: skip
    names = [f"grid-{number}" for number in range(plan.jobs)]
    grids = {name: grid_command(plan, probe / "grid.yaml", recipe, probe / name) for name in names}
    began, walls = time.monotonic(), list[float]()
    for batch in (commands, grids, {"grid-0": grids["grid-0"]}):  # the last one finds its runs finished
        if not call.run_all(batch, plan.jobs):
            raise UserError("--piece: the measurement takes longer than that; give a longer one.")
        walls.append(time.monotonic() - began - sum(walls))
    seconds, texts = dict[str, list[float]](), list[float]()
    for arm, run in runs:
        records = [one for one in read_jsonl(run / "metrics.jsonl") if one["split"] == "train"]
        seconds.setdefault(arm, []).append(statistics.median(one["speed/seconds_per_step"] for one in records[1:]))
        texts.append(train.sequences * (records[-1]["data/tokens_per_sequence"] - ARMS[arm].facets - SPECIAL))
    step, rounds = max(map(statistics.mean, seconds.values())), math.ceil(len(runs) / plan.jobs)
    short, whole = Store(probe / "grid-0").records(), {}
    overhead = max(0.0, walls[1] - walls[2] - sum(record["seconds"] for record in short)) / len(short)
    for record in short:
        an_epoch = math.ceil(record["train_rows"] / record["resolved"]["train"]["batch_size"])
        training = record["seconds"] / record["steps"] * an_epoch * full.epochs
        whole[int(record["train_size"]), record["task"]] = training + overhead
    shutil.rmtree(probe)
    return Measured(max(0.0, walls[0] / rounds - step * steps), step, statistics.mean(texts), walls[2], whole)


def pretrain_command(folder: Path, plan: Plan, train: Pretraining, arm: str, run: Path, seed: int = 1) -> list[str]:
    """Returns the command line of a pretraining; writes the recipe of all arms to `folder`."""
    recipe = {
        "model": {"checkpoint": plan.base, "facet_layers": None},  # None: after one and two thirds of the layers
        "data": {"corpus": plan.corpus, "seq_length": train.seq_length, "validation_fraction": HELD_OUT},
        "train": {"tokens": train.tokens, "learning_rate": train.learning_rate, "warmup_ratio": train.warmup_ratio},
        "run": {"log_every": max(1, train.eval_every // 4), "eval_every": train.eval_every,
                "eval_examples": train.eval_examples, "save_every": train.eval_every},
    }  # fmt: skip
    _write_yaml(folder / "pretraining.yaml", recipe)
    recipes = ["base", str(folder / "pretraining.yaml"), *filter(None, [ARMS[arm].recipe])]
    flags = [word for name in recipes for word in ("--recipe", name)]
    examples = str(train.sequences // ARMS[arm].parts)
    flags += ["--global_batch_size", examples, "--set", f"train.negatives_group={examples}"]
    return ["pretrain/run.py", "--config", "ds_configs/zero0.json", *flags, "--seed", str(seed),
            "--output_dir", str(run)]  # fmt: skip


def grid_command(plan: Plan, path: Path, recipe: Mapping[str, Any], results: Path) -> list[str]:
    """Returns the command line of a grid without `--jobs`; writes its recipe to `path`."""
    _write_yaml(path, recipe)
    return ["finetune/grid.py", "--recipe", str(path), "--data_dir", plan.data, "--output_dir", str(results)]


def work(call: Call, plan: Plan, keep_weights: bool = False) -> None:
    """Does what is left of the study, until the piece is over."""
    for stage, do in (("pretraining", pretrain), ("evaluation", evaluate)):
        if _is_done(call.folder, stage):
            continue
        began, (before, planned) = time.monotonic(), progress(call.folder, plan)[stage]
        try:
            with closing(Progress(stage, planned, done=before, unit="runs", say=print_line)) as shown:
                call.watch = partial(_show, shown, call.folder, plan)
                finished = do(call, plan)
        finally:
            about = {"seconds": time.monotonic() - began, "runs": progress(call.folder, plan)[stage][0] - before}
            append_jsonl(call.folder / "calls.jsonl", {"stage": stage} | about)
        if not finished:
            return
        _mark_done(call.folder, stage)
    if not keep_weights:
        tidy(call.folder)


def _show(shown: Progress, folder: Path, plan: Plan) -> None:
    shown.update(progress(folder, plan)[shown.what][0])


def run_folders(folder: Path, plan: Plan) -> dict[tuple[str, int], Path]:
    """Returns the run folder of each pretraining by arm and seed; the arms take turns."""
    return {(arm, seed): folder / "pretraining" / f"{arm}-{seed}" for seed in plan.pretraining.seeds for arm in ARMS}


def pretrain(call: Call, plan: Plan) -> bool:
    """Trains the arms, and removes the checkpoints of finished ones; returns True if all are finished."""
    runs = run_folders(call.folder, plan)
    commands = {run.name: pretrain_command(call.folder, plan, plan.pretraining, arm, run, seed)
                for (arm, seed), run in runs.items() if not (run / DONE).exists()}  # fmt: skip
    finished = call.run_all(commands, plan.jobs)
    for run in runs.values():
        if (run / DONE).exists():
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
    return finished


def evaluate(call: Call, plan: Plan) -> bool:
    """Fine-tunes, and compares the facets' disagreement with the ensembles'; returns True if all is finished."""
    models = {BASE: [plan.base]}
    for (arm, _), run in run_folders(call.folder, plan).items():
        models.setdefault(arm, []).append(str(run / "hf"))
    for name, (results, recipe) in study_plan.grids(plan, models).items():
        command = grid_command(plan, call.folder / "grids" / f"{name}.yaml", recipe, call.folder / results)
        if not _is_done(call.folder, name) and not call.run_all({name: [*command, "--jobs", str(plan.jobs)]}):
            return False
        _mark_done(call.folder, name)
    ensembles = Store(call.folder / "ensembles")
    saved = [str(path) for record in ensembles.records() if (path := ensembles.model_path(record["run_id"])).is_dir()]
    return call.run_all({"analysis": ["finetune/analyze.py", "--model", *saved, "--ensemble", "cls", "--data_dir",
                                      plan.data, "--output_dir", str(call.folder / "analysis")]})  # fmt: skip


def tidy(folder: Path) -> None:
    """Removes weights and all else that the page does not need."""
    doomed = [folder / name for name in ("inputs", "grids", "logs")]
    doomed += [run / name for run in (folder / "pretraining").iterdir() for name in WEIGHTS]
    doomed += [folder / results / name for results in ("results", "ensembles") for name in LEFTOVERS]
    for path in doomed:
        shutil.rmtree(path, ignore_errors=True)
    for path in (folder / "analysis").iterdir():  # figures and matrices
        if path.suffix not in (".json", ".md"):
            path.unlink()


def progress(folder: Path, plan: Plan) -> dict[str, tuple[int, int]]:
    """Returns the finished and the planned runs of each stage."""
    runs, about = run_folders(folder, plan), plan.evaluation
    done = sum((run / DONE).exists() for run in runs.values())
    finished = sum(len(Store(folder / name).records()) for name in ("results", "ensembles"))
    planned = about.num_runs(len(plan.pretraining.seeds)) * len(about.tasks) * len(about.train_sizes)
    planned += study_plan.num_members() * len(about.ensemble_tasks)
    return {"pretraining": (done, len(runs)), "evaluation": (finished, planned)}


def left_in_words(folder: Path, plan: Plan, piece: float) -> str:
    """Returns how far the study is, and about how many more calls it takes at the speed so far."""
    if _is_done(folder, "evaluation"):
        return f"finished: {folder}; the page: python benchmarks/study.py page --study {folder}"
    state, seconds = progress(folder, plan), 0.0
    for stage, (done, planned) in state.items():
        calls = [call for call in read_jsonl(folder / "calls.jsonl") if call["stage"] == stage]
        runs, spent = (sum(call[name] for call in calls) for name in ("runs", "seconds"))
        seconds += (planned - done) * (spent / runs if runs else plan.expected.get(stage, math.nan) / planned)
    more = f"about {math.ceil(seconds / piece)} more calls of {duration(piece)}" if math.isfinite(seconds) else ""
    text = ", ".join(f"{done} of {planned} {stage} runs done" for stage, (done, planned) in state.items())
    return f"{text}; {more or 'time not known yet'}: give the same command again"


def seconds_of(flag: str, text: str) -> float:
    """Returns the seconds of a time such as 90s, 25m or 2h.

    Raises:
        UserError: It is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if not found or not float(found[1]):
        raise UserError(f"{flag} {text}: write a time as 90s, 25m or 2h.")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def _is_done(folder: Path, stage: str) -> bool:
    return (folder / "done" / stage).exists()


def _mark_done(folder: Path, stage: str) -> None:
    (folder / "done").mkdir(exist_ok=True)
    (folder / "done" / stage).touch()


def _write_yaml(path: Path, content: Mapping[str, Any]) -> None:
    with atomic_write(path) as file:
        yaml.safe_dump(content, file, sort_keys=False)


if __name__ == "__main__":
    run_command(main)
