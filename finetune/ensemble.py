"""Ensembles of finished runs, from their saved predictions, as rows like any other.

python finetune/ensemble.py results --task rte --head cls --size 5
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/, whose names must not hide packages

from finetune.stats.ensembles import ensemble, member_sets
from finetune.stats.systems import choose_learning_rates, group_runs
from finetune.store.results import read_results
from multicls.errors import UserError, did_you_mean, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("results", help="folder with results.jsonl")
    parser.add_argument("--size", type=int, default=5, help="members of an ensemble (5)")
    for name in ("task", "head", "train_size", "selection"):
        parser.add_argument(f"--{name}", help="only runs of it; default: all")
    parser.add_argument("--model", help="only models of this name; default: all")
    args = parser.parse_args(argv)
    if args.size < 2:
        raise UserError(f"--size {args.size}: an ensemble has at least 2 members.")
    wanted = {"task": args.task, "head": args.head, "train_size": args.train_size, "selection": args.selection}
    records = [record for record in read_results(args.results) if not record["identity"].get("ensemble")]
    choices = choose_learning_rates(group_runs(records))
    for name, value in (wanted | {"model_label": args.model}).items():
        known = {str(choice.chosen.key[name]) for choice in choices}
        if value is not None and str(value) not in known:
            flag = name.removesuffix("_label")
            raise UserError(f"--{flag} {value}: no finished runs of it in {args.results}.{did_you_mean(value, known)}")
        choices = [choice for choice in choices if value is None or str(choice.chosen.key[name]) == value]
    made = 0
    for choice in choices:
        for number, members in enumerate(member_sets(choice.chosen.runs, args.size), start=1):
            record = ensemble(args.results, members, number)
            made += 1
            print(f"{choice.chosen.key['task']}, {' '.join(choice.system)}: {args.size} runs, {record['metric']} "
                  f"{100 * record['score']:.2f} (run {record['run_id']})")  # fmt: skip
    if not made:
        raise UserError(f"{args.results}: no group of runs there has {args.size} seeds of the same train rows.")
    return 0


if __name__ == "__main__":
    run_command(main)
