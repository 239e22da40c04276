"""The study: do facets help, and by how much? Arms of equal tokens, fine-tuned on many tasks, within a budget of time.

    python benchmarks/study.py pack --text wiki=DIR books=DIR --data_dir DIR --output inputs.tar.xz
    python benchmarks/study.py --inputs inputs.tar.xz --budget 25m [--device cuda] [--piece 8m] [--output_dir DIR]
    python benchmarks/study.py page [--study runs/study] [--output docs/study.md]

The second command plans the study in its first call, works for at most `--piece` in each, and goes on where it was.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

sys.path[0] = str(Path(__file__).resolve().parents[1])

import yaml

from benchmarks import study_plan
from benchmarks.compare import machine
from benchmarks.study_plan import ARMS, BASE, ENSEMBLE, MEASURED_ARMS, SPECIAL, Measured, Plan, Pretraining
from finetune.store.results import Record, Store
from multicls.corpus import Corpus
from multicls.errors import CommandParser, UserError, run_command
from multicls.files import REPOSITORY, append_jsonl, atomic_write, locked, read_json, read_jsonl, write_json
from multicls.words import duration
from pretrain.run_folder import DONE

HELD_OUT = 0.02  # share of the documents that pretraining validates on
MOST_JOBS = 6  # processes side by side: one for each arm
PROBE_STEPS = {"cpu": 5, "cuda": 60}  # of a pretraining that is only timed
PROBE_FINETUNING = 40  # likewise, of fine-tuning
SAVING = 20.0  # seconds at the end of a piece, for what is running to save and leave
WEIGHTS = ("checkpoints", "hf", "model", "tb")  # folders of a pretraining that do not stay
LEFTOVERS = ("models", "snapshots", "tb", "claims", "logs")  # of a results folder
Commands = Mapping[str, Sequence[str]]  # a command line by the name of its log


class Call:
    """One call of the command on one study folder.

    Attributes:
        folder: The study.
        deadline: When to leave, on the monotonic clock.
        environment: Of the commands.
    """

    def __init__(self, folder: Path, piece: float, device: str, jobs: int) -> None:
        self.folder = folder
        self.deadline = time.monotonic() + piece - min(SAVING, piece / 10)
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, _cores() // jobs))
        self.environment = os.environ | {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        if device == "cpu":
            self.environment["CUDA_VISIBLE_DEVICES"] = ""

    def run_all(self, commands: Commands, jobs: int = 1) -> bool:
        """Runs commands, `jobs` at a time; at the deadline asks those that run to save and leave.

        Returns:
            True if all have ended by themselves.

        Raises:
            UserError: A command failed.
        """
        waiting, running = dict(commands), dict[str, subprocess.Popen[bytes]]()
        try:
            while (waiting or running) and time.monotonic() < self.deadline:
                for name in list(waiting)[: jobs - len(running)]:
                    running[name] = self._start(name, waiting.pop(name))
                time.sleep(0.05)
                for name in [name for name, process in running.items() if process.poll() is not None]:
                    if code := running.pop(name).returncode:
                        last = self._log(name).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
                        raise UserError(f"{name} ended with code {code}: {' '.join(last)} ({self._log(name)}). Put it "
                                        "right, and the same command goes on.")  # fmt: skip
        finally:
            for process in running.values():
                process.terminate()
            for process in running.values():
                process.wait()
        return not waiting and not running

    def _start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        self._log(name).parent.mkdir(parents=True, exist_ok=True)
        with open(self._log(name), "ab") as log:
            words = [sys.executable, str(REPOSITORY / command[0]), *command[1:]]
            return subprocess.Popen(
                words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.environment, preexec_fn=_end_with_us
            )

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"


def _end_with_us() -> None:
    """Asks Linux to send SIGTERM to this new process when the study's process ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["pack"]:
        from benchmarks.study_inputs import main as pack

        return pack(argv[1:])
    if argv[:1] == ["page"]:
        from benchmarks.study_page import main as page

        return page(argv[1:])
    args = _parser().parse_args(argv)
    folder, piece = Path(args.output_dir), seconds_of("--piece", args.piece)
    signal.signal(signal.SIGTERM, _interrupt)
    with locked(folder):
        plan = load_plan(folder, args)
        if plan is None:
            print("measuring times, to plan the study", flush=True)
            plan = make_plan(folder, args, piece)
        print("\n".join(plan.words()), flush=True)
        work(folder, plan, piece, args.keep_weights)
        print(left_in_words(folder, plan, piece), flush=True)
    return 0


def load_plan(folder: Path, args: Any) -> Plan | None:
    """Returns the plan of the folder, None if it has none yet.

    Raises:
        UserError: The command asks for another study than that of the plan.
    """
    path = folder / "plan.json"
    if not path.exists():
        if not args.inputs:
            raise UserError("--inputs: give what `python benchmarks/study.py pack` has written, to begin a study.")
        if args.size == "budget" and not args.budget:
            raise UserError("--budget: give a time such as 25m, or --size smoke.")
        return None
    plan = Plan.model_validate(read_json(path))
    asked = {"budget": args.budget and seconds_of("--budget", args.budget), "device": args.device}
    asked["size"] = None if args.size == "budget" and not args.budget else args.size
    for name, value in asked.items():
        if value is not None and value != getattr(plan, name):
            raise UserError(
                f"--{name}: {path} was made for {name} {getattr(plan, name)}, not {value}. A plan is kept to its end: "
                "leave the flag out to go on, or give another --output_dir for another study."
            )
    return plan


def make_plan(folder: Path, args: Any, piece: float) -> Plan:
    """Measures, decides and writes STUDY/plan.json."""
    from benchmarks.study_inputs import unpack

    began = time.monotonic()
    inputs = unpack(Path(args.inputs), folder / "inputs")
    device, hardware = find_device(args.device)
    jobs = max(1, min(MOST_JOBS, _cores() // (2 if device == "cuda" else 1)))
    base = args.base or str(inputs / "model")
    name = args.base or read_json(inputs / "inputs.json")["base"]
    one_pass = Corpus.open(inputs / "corpus").manifest["tokens"] * (1 - HELD_OUT)
    pretraining, evaluation = study_plan.SMOKE
    budget = seconds_of("--budget", args.budget) if args.budget else None
    plan = Plan(size=args.size, budget=budget, device=device, hardware=hardware, jobs=jobs, base=base, base_name=name,
                corpus=str(inputs / "corpus"), data=str(inputs / "data"), one_pass=one_pass, measured=None,
                pretraining=pretraining, evaluation=evaluation, made=time.strftime("%Y-%m-%d"))  # fmt: skip
    if budget:
        measured = measure(Call(folder, piece, device, jobs), plan)
        left = budget - (time.monotonic() - began)
        pieces = math.ceil(budget / piece)
        pretraining, evaluation = study_plan.decide(measured, left, one_pass, jobs, pieces)
        changes = {"measured": measured, "pretraining": pretraining, "evaluation": evaluation}
        plan = plan.model_copy(update=changes)
    write_json(folder / "plan.json", plan.model_dump(mode="json"))
    append_jsonl(folder / "calls.jsonl", {"stage": "measurement", "seconds": time.monotonic() - began, "runs": 0})
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
    train = Pretraining(tokens=0, seeds=[], eval_every=steps // study_plan.EVALUATIONS)
    runs = [(MEASURED_ARMS[n % len(MEASURED_ARMS)], probe / f"pretraining-{n}") for n in range(max(2, plan.jobs))]
    commands = {run.name: [*pretrain_command(probe, plan, train, arm, 1), "--steps", str(steps), "--output_dir", str(run)]
                for arm, run in runs}  # fmt: skip
    recipe = {
        "models": {BASE: [plan.base]}, "systems": ["cls"], "tasks": full.tasks, "train_sizes": full.train_sizes,
        "seeds": [1], "selections": ["holdout"],
        "settings": {"max_length": full.max_length, "train": {"max_steps": PROBE_FINETUNING}},
    }  # fmt: skip
    _write_yaml(probe / "grid.yaml", recipe)
    grid = ["finetune/grid.py", "--recipe", str(probe / "grid.yaml"), "--data_dir", plan.data, "--output_dir"]
    grids = {f"grid-{n}": [*grid, str(probe / f"grid-{n}")] for n in range(plan.jobs)}
    began, walls = time.monotonic(), list[float]()
    for batch in (commands, grids, {"grid-0": grids["grid-0"]}):  # the last one finds its runs finished
        if not call.run_all(batch, plan.jobs):
            raise UserError(
                f"--piece: measuring takes longer than {time.monotonic() - began:.0f} s; give a longer one."
            )
        walls.append(time.monotonic() - began - sum(walls))
    seconds, lengths = dict[str, list[float]](), list[float]()
    for arm, run in runs:
        records = [one for one in read_jsonl(run / "metrics.jsonl") if one["split"] == "train"]
        seconds.setdefault(arm, []).append(statistics.median(one["speed/seconds_per_step"] for one in records[1:]))
        lengths += [records[-1]["data/tokens_per_sequence"] - ARMS[arm].facets - SPECIAL]
    step, waves = max(map(statistics.mean, seconds.values())), math.ceil(len(runs) / plan.jobs)
    whole = _whole_runs(Store(probe / "grid-0").records(), walls[1] - walls[2])
    shutil.rmtree(probe)
    return Measured(pretrain_start=max(0.0, walls[0] / waves - step * steps), step=step, grid_start=walls[2],
                    step_tokens=statistics.mean(lengths) * train.sequences, runs=whole)  # fmt: skip


def _whole_runs(records: Sequence[Record], wall: float) -> dict[int, dict[str, float]]:
    """Returns the seconds of whole runs by train size and task, from short ones that took `wall` seconds together."""
    runs: dict[int, dict[str, float]] = {}
    overhead = max(0.0, wall - sum(record["seconds"] for record in records)) / len(records)
    for record in records:
        steps = (
            math.ceil(record["train_rows"] / record["resolved"]["train"]["batch_size"]) * study_plan.LADDER[0].epochs
        )
        seconds = record["seconds"] / record["steps"] * steps + overhead
        runs.setdefault(int(record["train_size"]), {})[record["task"]] = seconds
    return runs


def pretrain_command(folder: Path, plan: Plan, train: Pretraining, arm: str, seed: int) -> list[str]:
    """Returns the command line of a pretraining without its length and run folder; writes the recipe of all arms."""
    recipe = {
        "model": {"checkpoint": plan.base, "facet_layers": None},  # None: after one and two thirds of the layers
        "data": {"corpus": plan.corpus, "seq_length": train.seq_length, "validation_fraction": HELD_OUT},
        "train": {"tokens": train.tokens, "learning_rate": train.learning_rate, "warmup_ratio": train.warmup_ratio},
        "run": {"log_every": max(1, train.eval_every // 4), "eval_every": train.eval_every,
                "eval_examples": train.eval_examples, "save_every": train.eval_every},
    }  # fmt: skip
    _write_yaml(folder / "pretraining.yaml", recipe)
    words = ["pretrain/run.py", "--config", "ds_configs/zero0.json", "--recipe", "pretrain/recipes/base.yaml"]
    words += ["--recipe", str(folder / "pretraining.yaml")]
    if ARMS[arm].recipe:
        words += ["--recipe", f"pretrain/recipes/{ARMS[arm].recipe}.yaml"]
    examples = str(train.sequences // ARMS[arm].parts)
    return [*words, "--global_batch_size", examples, "--set", f"train.negatives_group={examples}", "--seed", str(seed)]


def work(folder: Path, plan: Plan, piece: float, keep_weights: bool = False) -> None:
    """Does what is left of the study, until the piece is over."""
    call = Call(folder, piece, plan.device, plan.jobs)
    for stage, do in (("pretraining", pretrain), ("evaluation", evaluate)):
        if _is_done(folder, stage):
            continue
        began, before = time.monotonic(), progress(folder, plan)[stage][0]
        try:
            finished = do(call, plan)
        finally:
            runs = progress(folder, plan)[stage][0] - before
            append_jsonl(folder / "calls.jsonl", {"stage": stage, "seconds": time.monotonic() - began, "runs": runs})
        if not finished:
            return
        _mark_done(folder, stage)
    if not keep_weights:
        tidy(folder)


def run_folders(folder: Path, plan: Plan) -> dict[tuple[str, int], Path]:
    """Returns the run folder of each pretraining by arm and seed; the arms take turns."""
    return {(arm, seed): folder / "pretraining" / f"{arm}-{seed}" for seed in plan.pretraining.seeds for arm in ARMS}


def pretrain(call: Call, plan: Plan) -> bool:
    """Trains the arms; returns True if all are finished. The checkpoints of finished ones go."""
    commands = {}
    for (arm, seed), run in run_folders(call.folder, plan).items():
        if not (run / DONE).exists():
            words = pretrain_command(call.folder, plan, plan.pretraining, arm, seed)
            commands[run.name] = [*words, "--output_dir", str(run)]
    finished = call.run_all(commands, plan.jobs)
    for run in run_folders(call.folder, plan).values():
        if (run / DONE).exists():
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
    return finished


def evaluate(call: Call, plan: Plan) -> bool:
    """Fine-tunes, and compares the facets' disagreement with the ensembles'; returns True if all is finished."""
    models = {BASE: [plan.base]}
    for (arm, _), run in run_folders(call.folder, plan).items():
        models.setdefault(arm, []).append(str(run / "hf"))
    for name, (results, recipe) in study_plan.grids(plan, models).items():
        path = call.folder / "grids" / f"{name}.yaml"
        _write_yaml(path, recipe)
        command = ["finetune/grid.py", "--recipe", str(path), "--data_dir", plan.data]
        command += ["--output_dir", str(call.folder / results), "--jobs", str(plan.jobs)]
        if not _is_done(call.folder, name):
            if not call.run_all({name: command}):
                return False
            _mark_done(call.folder, name)
    store, analysis = Store(call.folder / "ensembles"), call.folder / "analysis"
    saved = [store.model_path(record["run_id"]) for record in store.records()]
    command = ["finetune/analyze.py", "--model", *(str(path) for path in saved if path.is_dir()), "--ensemble", "cls",
               "--data_dir", plan.data, "--output_dir", str(analysis)]  # fmt: skip
    if not (analysis / "analysis.json").exists():
        return call.run_all({"analysis": command})
    return True


def tidy(folder: Path) -> None:
    """Removes weights and all else that the page does not need."""
    for run in (folder / "pretraining").iterdir():
        for name in WEIGHTS:
            shutil.rmtree(run / name, ignore_errors=True)
    for results in ("results", "ensembles"):
        for name in LEFTOVERS:
            shutil.rmtree(folder / results / name, ignore_errors=True)
    for path in (folder / "analysis").iterdir():  # figures and matrices
        if path.name != "analysis.json":
            path.unlink()
    for name in ("inputs", "grids", "logs"):
        shutil.rmtree(folder / name, ignore_errors=True)


def progress(folder: Path, plan: Plan) -> dict[str, tuple[int, int]]:
    """Returns the finished and the planned runs of each stage."""
    runs, about = run_folders(folder, plan), plan.evaluation
    done = sum((run / DONE).exists() for run in runs.values())
    finished = sum(len(Store(folder / name).records()) for name in ("results", "ensembles"))
    planned = about.num_runs(len(plan.pretraining.seeds)) * len(about.tasks) * len(about.train_sizes)
    planned += ENSEMBLE * sum(map(len, study_plan.ENSEMBLE_SYSTEMS.values())) * len(about.ensemble_tasks)
    return {"pretraining": (done, len(runs)), "evaluation": (finished, planned)}


def left_in_words(folder: Path, plan: Plan, piece: float) -> str:
    """Returns how far the study is and about how many more calls it takes, at the speed so far."""
    state = progress(folder, plan)
    if _is_done(folder, "evaluation"):
        return f"finished: {folder}; the page: python benchmarks/study.py page --study {folder}"
    text = "; ".join(f"{done} of {planned} {stage} runs done" for stage, (done, planned) in state.items())
    seconds = 0.0
    for stage, (done, planned) in state.items():
        calls = [call for call in read_jsonl(folder / "calls.jsonl") if call["stage"] == stage]
        runs = sum(call["runs"] for call in calls)
        each = sum(call["seconds"] for call in calls) / runs if runs else _planned_seconds(plan, stage) / planned
        seconds += each * (planned - done)
    calls_left = "the number of further calls is not known yet" if math.isnan(seconds) else (
        f"about {math.ceil(seconds / piece) or 1} more calls of {duration(piece)}")  # fmt: skip
    return f"{text}; {calls_left}: give the same command again"


def _planned_seconds(plan: Plan, stage: str) -> float:
    if plan.measured is None:
        return math.nan
    seeds = len(plan.pretraining.seeds)
    if stage == "pretraining":
        return study_plan.pretraining_seconds(plan.measured, plan.pretraining.tokens, seeds, plan.jobs)
    return study_plan.evaluation_seconds(plan.measured, plan.evaluation, seeds, plan.jobs)


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
    with atomic_write(folder / "done" / stage):
        pass


def _write_yaml(path: Path, content: Mapping[str, Any]) -> None:
    with atomic_write(path) as file:
        yaml.safe_dump(content, file, sort_keys=False)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _parser() -> CommandParser:
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add(
        "--inputs",
        metavar="FILE_OR_DIR",
        help="what `pack` has written, packed or unpacked; only a first call needs it",
    )
    add("--budget", metavar="TIME", help="time for the whole study, such as 25m; a first call measures and plans")
    add("--size", choices=("budget", "smoke"), default="budget", help="smoke: a fixed small study instead of a budget")
    add("--device", choices=("cpu", "cuda"), help="default: the GPU, if there is one")
    add("--piece", default="8m", metavar="TIME", help="longest time of one call (default: 8m)")
    add("--base", metavar="MODEL", help="any BERT: folder or Hub id (default: the packed one)")
    add("--output_dir", default="runs/study", metavar="DIR", help="the study (default: runs/study)")
    add("--keep_weights", action="store_true", help="keep models and inputs at the end")
    return parser


if __name__ == "__main__":
    run_command(main)
