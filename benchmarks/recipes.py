"""Trains every recipe of the paper for some steps on the embedded sample, and prints what became of them.

    python benchmarks/run.py recipes [--steps 300] [--recipes plain k1 ...] [--output_dir runs/recipes]
    python benchmarks/run.py recipes --time [--steps 20]

One seed, 106 articles, minutes instead of weeks: the table shows that every objective and ablation trains and what it
costs a step, not which is better. A step is 18 sequences everywhere: 6 examples of three parts or 9 of two.
Runs that are there already go on, or are left alone if they have finished, and then lose their checkpoints. Writes
report.md and report.png beside the runs. `--time` trains nothing to the end: one process holds all models and takes a
step of each in turn, so that whatever else the machine does slows down all alike.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare import Report, new_parser, take_turns
from multicls.files import REPOSITORY
from multicls.settings import load_settings
from pretrain.settings import PretrainSettings

RECIPES = (
    "plain",
    "mtl",
    "k1",
    "lambda0",
    "lambda05",
    "lambda1",
    "no_hard_negative",
    "no_facet_layers",
    "mlm_only",
)
OF_TWO_PARTS = ("mtl", "no_hard_negative")
SIZES = ("global_batch_size", "negatives_group")


def recipe_flags(recipe: str) -> tuple[list[str], list[str]]:
    """Files of a recipe ("plain": the sample's unchanged) and settings, for `--recipe` and `--set`."""
    files = ["pretrain/recipes/sample.yaml"] + ([f"pretrain/recipes/{recipe}.yaml"] if recipe != "plain" else [])
    return files, [f"train.{name}={9 if recipe in OF_TWO_PARTS else 6}" for name in SIZES]


def train(recipe: str, steps: int, folder: Path) -> None:
    """Trains into a run folder of the recipe's name."""
    files, changes = recipe_flags(recipe)
    run = {"log_every": max(1, steps // 30), "eval_every": max(1, steps // 3), "save_every": max(1, steps // 6)}
    changes += [f"run.{key}={value}" for key, value in (run | {"keep_checkpoints": 1}).items()]
    command = [sys.executable, str(REPOSITORY / "pretrain/run.py"), "--steps", str(steps)]
    command += ["--output_dir", str(folder / recipe)]
    for flag, values in (("--recipe", files), ("--set", changes)):
        command += [part for value in values for part in (flag, value)]
    print(f"\n=== {recipe}", flush=True)
    subprocess.run(command, check=True)
    shutil.rmtree(folder / recipe / "checkpoints", ignore_errors=True)  # half a GB


def compare_times(recipes: Sequence[str], rounds: int, argv: Sequence[str] | None) -> None:
    """Compares the step of each recipe with that of the first one."""
    from benchmarks.workload import Workload, trainer_step

    cases = {}
    for recipe in recipes:
        settings = load_settings(PretrainSettings, *recipe_flags(recipe)).model_dump(exclude={"run"})
        settings["train"] |= {"precision": "fp32"}
        work = Workload(None, **settings)
        cases[recipe] = trainer_step(work.trainer(), work.batches(4))
    report = Report("recipes", "A step of each recipe on the embedded sample", argv)
    report.compare("Step of 18 sequences", take_turns(cases, rounds=rounds), recipes[0])
    report.write()


def main(argv: Sequence[str] | None = None) -> None:
    """Trains one after the other, then reports; or takes the time."""
    parser = new_parser("recipes", __doc__)
    parser.add_argument("--steps", type=int, help="300; with --time 20")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES, metavar="NAME")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--time", action="store_true", help="only take the time of steps")
    args = parser.parse_args(argv)
    if args.time:
        return compare_times(args.recipes, args.steps or 20, argv)
    for recipe in args.recipes:
        if not (args.output_dir / recipe / "DONE").exists():
            train(recipe, args.steps or 300, args.output_dir)
    report = [sys.executable, str(REPOSITORY / "pretrain/report.py")]
    report += [str(args.output_dir / recipe) for recipe in args.recipes]
    report += ["--output", str(args.output_dir / "report.png"), "--markdown", str(args.output_dir / "report.md")]
    print("", flush=True)
    subprocess.run(report, check=True)
    return None
