"""Prints a results folder as a Markdown table: task x head x train size, mean and standard error over seeds.

python finetune/report.py results/
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/, whose names must not hide packages

from finetune.results import RESULTS, read_results
from finetune.tasks import TASKS
from multicls.errors import UserError, run_command

COLUMNS = ("task", "train rows", "head", "model", "metric", "mean", "standard error", "seeds")
SHOWN = {"task", "train_size", "head", "model", "seed"}  # parts of the identity that have a column of their own


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("results", help="folder with results.jsonl")
    folder = Path(parser.parse_args(argv).results)
    records = read_results(folder)
    if not records:
        raise UserError(f"{folder / RESULTS}: no finished runs there.")
    print(markdown(records), end="")
    return 0


def markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """The table. Runs that differ in anything but the seed are never averaged; what they differ in gets a column.

    Every mean stands beside the number of seeds behind it; runs that are not of the protocol carry a footnote.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        identity = {key: value for key, value in _flat(record["identity"]).items() if key != "seed"}
        groups.setdefault(json.dumps(identity, sort_keys=True), []).append(record)
    differing = _differing([_flat(runs[0]["identity"]) for runs in groups.values()])
    notes: list[str] = []
    rows = [_row(runs, differing, notes) for runs in sorted(groups.values(), key=_order)]
    table = [[*COLUMNS, *differing], ["---"] * (len(COLUMNS) + len(differing)), *rows]
    text = "".join(f"| {' | '.join(row)} |\n" for row in table)
    text += "\nScores are percentages of the best evaluation on dev, which also chose it.\n"
    if len({len(runs) for runs in groups.values()}) > 1:
        text += "\nThe rows have different numbers of seeds.\n"
    return text + "".join(f"\n[{number}] {note}\n" for number, note in enumerate(notes, start=1))


def _row(runs: Sequence[Mapping[str, Any]], differing: Sequence[str], notes: list[str]) -> list[str]:
    identity, scores = _flat(runs[0]["identity"]), [100 * float(run["score"]) for run in runs]
    marks = ""
    for note in sorted({note for run in runs for note in run["notes"]}):
        if note not in notes:
            notes.append(note)
        marks += f" [{notes.index(note) + 1}]"
    error = f"{statistics.stdev(scores) / math.sqrt(len(scores)):.2f}" if len(scores) > 1 else "-"
    return [
        identity["task"] + marks,
        str(identity["train_size"]),
        identity["head"],
        f"{runs[0]['model']} ({identity['model'][:6]})",
        runs[0]["metric"],
        f"{statistics.mean(scores):.2f}",
        error,
        str(len(scores)),
        *(str(identity.get(key, "-")) for key in differing),
    ]


def _order(runs: Sequence[Mapping[str, Any]]) -> tuple[int, float, str, str]:
    """Tasks in the order of their table, then sizes ascending, then heads."""
    identity = runs[0]["identity"]
    task = list(TASKS).index(identity["task"]) if identity["task"] in TASKS else len(TASKS)
    size = math.inf if identity["train_size"] == "full" else float(identity["train_size"])
    return task, size, identity["head"], json.dumps(identity, sort_keys=True)


def _differing(identities: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings in which runs of the same task and train size differ."""
    keys: set[str] = set()
    first: dict[tuple[str, str], Mapping[str, Any]] = {}
    for identity in identities:
        other = first.setdefault((identity["task"], str(identity["train_size"])), identity)
        keys |= {key for key in identity.keys() | other.keys() if identity.get(key) != other.get(key)}
    return sorted(keys - SHOWN)


def _flat(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in identity.items() if key != "train"} | dict(identity["train"])


if __name__ == "__main__":
    run_command(main)
