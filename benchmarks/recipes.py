"""Trains every recipe of the paper for some steps on the embedded sample, and prints what became of them.

    python benchmarks/recipes.py [--steps 300] [--recipes plain k1 ...] [--output_dir runs/recipes]

One seed, 106 articles, minutes instead of weeks: the table shows that every objective and ablation trains and what it
costs a step, not which is better. A step is 36 sequences everywhere: 6 x 2 examples of three parts or 9 x 2 of two.
Runs that are there already go on, or are left alone if they have finished. Time a step compares only where nothing else
runs on the machine. Writes report.md and report.png beside the runs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
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


def train(recipe: str, steps: int, folder: Path) -> None:
    """Trains the sample, changed by a recipe ("plain": unchanged), into a run folder of that name."""
    command = [sys.executable, str(REPOSITORY / "pretrain/run.py"), "--recipe", "pretrain/recipes/sample.yaml"]
    if recipe != "plain":
        command += ["--recipe", f"pretrain/recipes/{recipe}.yaml"]
    often = max(1, steps // 6)
    for key, value in {"log_every": max(1, steps // 30), "eval_every": often, "save_every": often}.items():
        command += ["--set", f"run.{key}={value}"]
    command += ["--set", "run.keep_checkpoints=1", "--steps", str(steps), "--output_dir", str(folder / recipe)]
    if recipe in OF_TWO_PARTS:
        command += ["--set", "train.triples=9"]
    print(f"\n=== {recipe}", flush=True)
    subprocess.run(command, check=True)


def main() -> None:
    """Trains one after the other, then reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES, metavar="NAME")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/recipes"))
    args = parser.parse_args()
    for recipe in args.recipes:
        train(recipe, args.steps, args.output_dir)
    report = [sys.executable, str(REPOSITORY / "pretrain/report.py")]
    report += [str(args.output_dir / recipe) for recipe in args.recipes]
    report += ["--output", str(args.output_dir / "report.png"), "--markdown", str(args.output_dir / "report.md")]
    print("", flush=True)
    subprocess.run(report, check=True)


if __name__ == "__main__":
    main()
