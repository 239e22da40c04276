"""Reports on a results folder: a table on the console and as Markdown, and the scores of all runs as CSV.

python finetune/report.py results
python finetune/report.py results --compare k5-mean k5-multicls --task rte cola
"""

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

import numpy as np
from pydantic import Field
from pydantic_settings import CliPositionalArg

from finetune.results import (
    Record,
    differences,
    load_results,
    read_predictions,
    scores_of,
    unfinished_runs,
)
from finetune.tables import aligned, markdown, write_csv
from finetune.tasks import Array
from multicls.cards import cell
from multicls.console import count, print_summary
from multicls.errors import UserError, did_you_mean, run_command
from multicls.evaluation import Difference, Scores, compare
from multicls.files import atomic_write
from multicls.settings import Settings, parse

AVERAGE = "average"  # of the tasks
VALUES = ("values", "guesses")  # of a run
UNITS = {"pretraining": "pretrained checkpoint", "subset": "training subset", "seed": "seed"}
NOTES = 20  # most notes on rows
HEADER = ["task", "train rows", "system", "score (95 % interval)", "against first", "replicates"]
ABOUT = """
Scores are in percent, with 95 % intervals for new rows and for other replicates of the kind that the last column names;
those of one replicate are for new rows alone. Differences are in points; positive is better than the first system. The
first system is the best one, a choice by these very rows; --compare FIRST SECOND chooses before you look. Each interval
holds by itself.
"""


class ReportOptions(Settings):
    """Options of the command."""

    results: CliPositionalArg[str] = Field(description="a results folder")
    compare: list[str] = Field([], description="these systems only; differences are to the first")
    task: list[str] = Field([], description="report these tasks only")


@dataclass(frozen=True)
class Group:
    """The runs of a system on a task with a number of training rows.

    A replicate is a pretrained checkpoint with its training subsets and seeds. With one checkpoint it is a training
    subset, with one subset a seed. Runs inside a replicate are averaged: they are no independent evidence.

    Attributes:
        rows: Number of the scored rows, in words.
        replicates: Their number and kind, in words.
        scores: One value per replicate and scored row.
        guesses: Those of the majority class of each replicate.
        keys: Weights and training subsets of each replicate.
    """

    task: str
    size: str
    system: str
    rows: str
    replicates: str
    scores: Scores
    guesses: Scores
    keys: list[tuple[str, tuple[int, ...]]]

    @property
    def order(self) -> tuple[str, float, float]:
        """The key that sorts groups: by task and training rows, the best system first."""
        size = math.inf if self.size == "full" else int(self.size.partition("-")[0])
        return self.task, size, -self.scores.mean


@dataclass(frozen=True)
class Report:
    """The content of a report: lines in words, the groups, and tables of text with a header."""

    lines: list[str]
    groups: list[Group]
    table: list[list[str]]
    runs: list[list[str]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    options = parse(ReportOptions, argv, prog="finetune/report.py", doc=__doc__)
    folder = Path(options.results)
    report = build_report(folder, options.task, options.compare)
    print("\n".join([*report.lines, "", *aligned(report.table)]))
    with atomic_write(folder / "report.md") as file:
        listed = "\n".join(f"- {cell(line)}" for line in report.lines)
        file.write(f"# Results\n\n{listed}\n\n{markdown(report.table)}\n{ABOUT}")
    write_csv(folder / "runs.csv", report.runs)
    print_summary([("report", folder / "report.md"), ("scores of all runs", folder / "runs.csv")])
    return 0


def build_report(folder: Path, tasks: Sequence[str] = (), systems: Sequence[str] = ()) -> Report:
    """Returns the report of a results folder, on these tasks and systems (default: all).

    Raises:
        UserError: There is no finished run, a name is unknown, or runs of a task have different rows.
    """
    found = load_results(folder)
    _check_names("--task", tasks, [run["task"] for run in found])
    _check_names("--compare", systems, [run["system"] for run in found])
    found = [run for run in found if run["task"] in (tasks or [run["task"]])]
    found = [run for run in found if run["system"] in (systems or [run["system"]])]
    check_rows(found)
    runs = [with_values(run) for run in choose_candidates(found)]
    groups = make_groups([*runs, *averages(runs)])
    groups.sort(key=lambda group: group.order)
    if systems:
        groups.sort(key=lambda group: (group.order[:2], systems.index(group.system)))
    notes = dict.fromkeys(f"note: {run['task']}: {note}" for run in runs for note in run["notes"])
    warnings = [f"warning: {line}" for line in find_warnings(runs) + unfinished_runs(folder)]
    verdicts, table = compare_groups(groups)
    lines = [*verdicts, *warnings, *list(notes)[:NOTES]]
    return Report(lines, groups, table, table_of_runs(runs))


def _check_names(flag: str, names: Sequence[str], known: Iterable[str]) -> None:
    for name in set(names).difference(known):
        raise UserError(f"{flag} {name}: no run of it.{did_you_mean(name, set(known))}")


def check_rows(runs: Sequence[Record]) -> None:
    """Refuses runs of a task that read different rows."""
    first = dict[str, Record]()
    for run in runs:
        other = first.setdefault(run["task"], run)
        if run["data_sha256"] != other["data_sha256"]:
            paths = f"{other['path']} and {run['path']}"
            raise UserError(
                f"task {run['task']}: {paths} read different rows: scores do not compare."
            )


def choose_candidates(runs: Sequence[Record]) -> list[Record]:
    """Returns the runs of the candidate that each system, task and size chooses from a search, with its `candidate`.

    It has the best mean score on the rows that pick the checkpoint, among those with the most runs.
    """
    found = defaultdict[Any, dict[str, list[Record]]](lambda: defaultdict(list))
    for run in runs:
        candidate = ", ".join(f"{name} {value}" for name, value in run["search"].items())
        group = found[run["task"], run["train_size"], run["system"]]
        group[candidate].append(run | {"candidate": candidate})

    def merit(of_candidate: list[Record]) -> tuple[int, float]:
        return len(of_candidate), float(np.mean([run["selection_score"] for run in of_candidate]))

    return [run for group in found.values() for run in max(group.values(), key=merit)]


def with_values(run: Record) -> Record:
    """Returns the run with the `values` of its main metric on the dev rows, its `guesses`, and the rows' `units`."""
    table = read_predictions(Path(run["path"]), run["task"])
    values, guesses = (table[name].to_numpy(float) for name in ("value", "guess"))
    rows, units = count(len(table), "dev row"), table["unit"].to_numpy(str)
    return run | {"values": values, "guesses": guesses, "units": units, "rows": rows}


def averages(runs: Sequence[Record]) -> Iterator[Record]:
    """Yields a run for the average over the tasks of each checkpoint, subset and seed that all tasks have."""
    tasks = {run["task"] for run in runs}
    keys = ("train_size", "system", "pretraining", "subset", "seed", "weights_sha256")
    same = defaultdict[Any, list[Record]](list)
    for run in sorted(runs, key=lambda run: str(run["task"])):
        same[tuple(run[key] for key in keys)].append(run)
    for of_tasks in same.values():
        if len(of_tasks) == len(tasks) > 1:
            joined = {name: _averaged([run[name] for run in of_tasks]) for name in VALUES}
            units = [f"{run['task']} {unit}" for run in of_tasks for unit in run["units"]]
            name, rows = f"mean of {len(tasks)} tasks", count(len(units), "row")
            about = {"task": AVERAGE, "metric": name, "units": np.array(units), "rows": rows}
            yield of_tasks[0] | joined | about


def _averaged(values: Sequence[Array]) -> Array:
    """Returns values whose mean is the mean of the tasks' scores, and whose variance that of independent tasks."""
    total, mean = sum(map(len, values)), np.mean([of_task.mean() for of_task in values])
    parts = [total / len(of) * (of - of.mean()) / len(values) for of in values]
    return np.asarray(mean + np.concatenate(parts))


def make_groups(runs: Iterable[Record]) -> list[Group]:
    """Returns the runs by task, size and system."""
    found = defaultdict[Any, list[Record]](list)
    for run in runs:
        found[run["task"], run["train_size"], run["system"]].append(run)
    return [_group_of(of_group) for of_group in found.values()]


def _group_of(runs: Sequence[Record]) -> Group:
    first, replicates = runs[0], defaultdict[int, list[Record]](list)
    level = next((name for name in UNITS if len({run[name] for run in runs}) > 1), "seed")
    for run in sorted(runs, key=lambda run: int(run[level])):
        replicates[run[level]].append(run)
    of_replicates = list(replicates.values())
    if level == "pretraining" and len({run["weights_sha256"] for run in runs}) == 1:
        level = "subset"  # one checkpoint may be numbered so that it pairs with several

    def scores(name: str) -> Scores:
        values = [np.mean([run[name] for run in same], axis=0) for same in of_replicates]
        return scores_of(values, first["units"], first["metric"])

    return Group(
        first["task"],
        first["train_size"],
        first["system"],
        first["rows"],
        count(len(of_replicates), UNITS[level]),
        scores("values"),
        scores("guesses"),
        [
            (same[0]["weights_sha256"], tuple(sorted({run["subset"] for run in same})))
            for same in of_replicates
        ],
    )


def difference(first: Group, second: Group) -> Difference:
    """Returns the difference of two systems, paired by replicates with the same weights and subsets, or subsets."""
    for start in (0, 1):
        here, there = ([key[start:] for key in group.keys] for group in (first, second))
        shared = [key for key in here if key in there]
        if len(set(here)) == len(here) and len(set(there)) == len(there) and len(shared) > 1:
            sides = zip((first, second), (here, there), strict=True)
            return compare(*(_taken(of, [keys.index(key) for key in shared]) for of, keys in sides))
    alone = [[_taken(group, [row]) for row in range(len(group.keys))] for group in (first, second)]
    return compare(*alone)


def _taken(group: Group, rows: list[int]) -> Scores:
    return replace(group.scores, draws=group.scores.draws[rows])


def compare_groups(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    """Returns a verdict for each task and size, and a table: a row for each system and for the majority class.

    A verdict is how good the first system is, whether it is better than the second, and which systems are not
    distinguishable from guessing.
    """
    families = defaultdict[tuple[str, str], list[Group]](list)
    for group in groups:
        families[group.task, group.size].append(group)
    lines, table = list[str](), [HEADER]
    for (task, size), family in families.items():
        first, rows = family[0], f"{family[0].scores.metric}, {family[0].rows}"
        line = f"{task}, {size} rows: {first.system} {compare(first.scores).score()} ({rows})."
        changes = {group.system: difference(group, first) for group in family[1:]}
        for second in family[1:2]:
            change = difference(first, second).verdict(first.system, second.system)
            line += f" {change}."
        guessing = [g.system for g in family if not compare(g.scores, g.guesses).low > 0]
        if guessing:
            line += f" Not distinguishable from guessing the majority class: {', '.join(guessing)}."
        lines.append(line)
        name = f"{task} ({rows})"
        for group in family:
            score, change = compare(group.scores).score(), str(changes.get(group.system, ""))
            table.append([name, size, group.system, score, change, group.replicates])
        guess, change = compare(first.guesses).score(), str(compare(first.guesses, first.scores))
        table.append([name, size, "majority class", guess, change, ""])
    return lines, table


def find_warnings(runs: Sequence[Record]) -> list[str]:
    """Returns warnings that change how the table is to be read."""
    warnings, settings_of = dict[str, None](), defaultdict[str, list[Record]](list)
    for run in runs:
        if run["selection"] == "dev":
            what = "dev picked the checkpoint and gave the score: optimistic."
            warnings[f"{run['task']}: {what}"] = None
        settings_of[f"{run['system']} on {run['task']}, {run['train_size']} rows"].append(run)
    for what, of_system in settings_of.items():
        first = of_system[0]
        mixed = {
            name for run in of_system for name in differences(first, {"settings": run["settings"]})
        }
        if mixed:
            warnings[f"{what}: its runs differ in {', '.join(sorted(mixed))}."] = None
    return list(warnings)


def table_of_runs(runs: Sequence[Record]) -> list[list[str]]:
    """Returns a header, and a row for each run and metric, as fractions of 1."""
    keys = ("task", "train_size", "system", "pretraining", "subset", "seed", "candidate")
    rows = [[*keys, "train_rows", "seconds", "metric", "score", "majority class"]]
    for run in runs:
        found = run["splits"]["dev"]
        cells = [run[key] for key in (*keys, "train_rows", "seconds")]
        for metric, score in found["scores"].items():
            rows.append([*map(str, cells), metric, f"{score}", f"{found['baselines'][metric]}"])
    return rows


if __name__ == "__main__":
    run_command(main)
