"""Reports on a results folder: a table on the console, as Markdown and as HTML, and the scores of all runs as CSV.

python finetune/report.py results
python finetune/report.py results --compare k5-mean k5-multicls --task rte cola
python finetune/report.py results --split dev --output report
"""

import html
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

import numpy as np
from pydantic import Field
from pydantic_settings import CliPositionalArg

from finetune.results import Record, load_predictions, load_results, scores_of, unfinished_runs
from finetune.tables import aligned, markdown, write_csv
from finetune.tasks import Array, task_of
from multicls.cards import cell
from multicls.console import count, print_summary
from multicls.errors import UserError, did_you_mean, run_command
from multicls.evaluation import Difference, Scores, compare
from multicls.files import atomic_write
from multicls.measures import larger_is_better
from multicls.settings import Settings, parse

AVERAGE = "average"  # of the tasks
VALUES = ("values", "guesses")  # of a run
UNITS = {"pretraining": "pretrained checkpoint", "subset": "training subset", "seed": "seed"}
NOTES = 20  # most notes on rows
PAGE = Path(__file__).with_name("report.html")
ABOUT = """
Scores are in percent, with 95 % intervals for new rows and for other replicates of the kind that the last column names;
those of one replicate are for new rows alone. Differences are in points; positive is better than the first system. The
first system is the best one, a choice by these very rows; --compare FIRST SECOND chooses before you look. Each interval
holds by itself. Without a test file dev gives the scores.
"""


class ReportOptions(Settings):
    """Options of the command."""

    results: CliPositionalArg[str] = Field(description="a results folder")
    output: str | None = Field(None, description="folder for the report; default: RESULTS")
    compare: list[str] = Field([], description="these systems only; differences are to the first")
    task: list[str] = Field([], description="report these tasks only")
    split: Literal["dev", "test"] | None = Field(None, description="default: test, where it exists")


@dataclass(frozen=True)
class Group:
    """The runs of a system on a task with a number of training rows.

    A replicate is a pretrained checkpoint with its training subsets and seeds. With one checkpoint it is a training
    subset, with one subset a seed. Runs inside a replicate are averaged: they are no independent evidence.

    Attributes:
        rows: Number and split of the scored rows, in words.
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
        return self.task, size, -larger_is_better(self.scores.metric, self.scores.mean)


@dataclass(frozen=True)
class Report:
    """The content of a report: lines in words, the groups, and a table of text with a header."""

    verdicts: list[str]
    warnings: list[str]
    notes: list[str]
    groups: list[Group]
    table: list[list[str]]
    runs: list[list[str]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    options = parse(ReportOptions, argv, prog="finetune/report.py", doc=__doc__)
    folder, output = Path(options.results), Path(options.output or options.results)
    report = build_report(folder, options.task, options.compare, options.split)
    print("\n".join([*report.verdicts, "", *aligned(report.table)]))
    print("".join(f"warning: {warning}\n" for warning in report.warnings))
    lines = [*report.verdicts, *(f"warning: {text}" for text in report.warnings)]
    lines += [f"note: {text}" for text in report.notes]
    with atomic_write(output / "report.md") as file:
        listed = "\n".join(f"- {cell(line)}" for line in lines)
        file.write(f"# Results\n\n{listed}\n\n{markdown(report.table)}\n{ABOUT}")
    with atomic_write(output / "report.html") as file:
        listed = "\n".join(f"<li>{html.escape(line)}</li>" for line in lines)
        page = PAGE.read_text(encoding="utf-8").replace("LINES", listed).replace("ABOUT", ABOUT)
        file.write(page.replace("TABLE", _html(report.table)))
    write_csv(output / "runs.csv", report.runs)
    made = [("report", output / "report.md"), ("page", output / "report.html")]
    print_summary([*made, ("scores of all runs", output / "runs.csv")])
    return 0


def _html(table: list[list[str]]) -> str:
    lines = []
    for number, row in enumerate(table):
        tag = "td" if number else "th"
        lines.append("<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in row))
    return "\n".join(lines)


def build_report(
    folder: Path,
    tasks: Sequence[str] = (),
    systems: Sequence[str] = (),
    split: str | None = None,
) -> Report:
    """Returns the report of a results folder, on these tasks and systems (default: all).

    Test rows give the scores where a task has them, unless the split is "dev".

    Raises:
        UserError: There is no finished run, a name is unknown, or runs of a task have different rows.
    """
    found = load_results(folder)
    _check_names("--task", tasks, [run["task"] for run in found])
    _check_names("--compare", systems, [run["system"] for run in found])
    found = [run for run in found if run["task"] in (tasks or [run["task"]])]
    found = [run for run in found if run["system"] in (systems or [run["system"]])]
    runs = [scored_run(run) for run in choose_candidates(with_split(found, split))]
    groups = make_groups([*runs, *averages(runs)])
    groups.sort(key=lambda group: group.order)
    if systems:
        groups.sort(key=lambda group: (group.order[:2], systems.index(group.system)))
    notes = dict.fromkeys(f"{run['task']}: {note}" for run in runs for note in run["notes"])
    return Report(
        verdicts(groups),
        find_warnings(runs) + unfinished_runs(folder),
        list(notes)[:NOTES],
        groups,
        score_table(groups),
        table_of_runs(runs),
    )


def _check_names(flag: str, names: Sequence[str], known: Iterable[str]) -> None:
    for name in set(names).difference(known):
        raise UserError(f"{flag} {name}: no run of it.{did_you_mean(name, set(known))}")


def with_split(runs: Sequence[Record], split: str | None) -> list[Record]:
    """Returns the runs with the `split` that scores them: test if all runs of the task have it; checks their rows."""
    chosen = list[Record]()
    for task in dict.fromkeys(run["task"] for run in runs):
        of_task = [run for run in runs if run["task"] == task]
        has_test = all("test" in run["splits"] for run in of_task)
        if split == "test" and not has_test:
            raise UserError(f"--split test: not all runs of {task} have test rows; leave it out.")
        other = next((r for r in of_task if r["data_sha256"] != of_task[0]["data_sha256"]), None)
        if other:
            paths = f"{of_task[0]['path']} and {other['path']}"
            raise UserError(f"task {task}: {paths} read different rows: scores do not compare.")
        name = split or ("test" if has_test else "dev")
        chosen += [run | {"split": name} for run in of_task]
    return chosen


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


def scored_run(run: Record) -> Record:
    """Returns the run with the `values` of its main metric on the scored rows, its `guesses`, and the rows' `units`."""
    from finetune.metrics import main_values

    task = task_of(run["description"])
    arrays = load_predictions(Path(run["path"]), run["task"])[run["split"]]
    values, units = main_values(task, arrays)
    output = np.array(run["splits"][run["split"]]["majority"])
    guesses, _ = main_values(
        replace(task, cuts=()), arrays | {"logits": np.tile(output, (len(values), 1))}
    )
    rows = count(len(values), f"{run['split']} row")
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
            yield (
                of_tasks[0]
                | joined
                | {
                    "task": AVERAGE,
                    "metric": f"mean of {len(tasks)} tasks",
                    "units": np.array(units),
                    "rows": count(len(units), "row"),
                }
            )


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


def _families(groups: Sequence[Group]) -> list[list[Group]]:
    """Returns the groups of each task and size, in their order."""
    found = defaultdict[tuple[str, str], list[Group]](list)
    for group in groups:
        found[group.task, group.size].append(group)
    return list(found.values())


def score_table(groups: Sequence[Group]) -> list[list[str]]:
    """Returns a header, and a row for each task, size and system and for the majority class."""
    rows = [
        ["task", "train rows", "system", "score (95 % interval)", "against first", "replicates"]
    ]
    for first, *others in _families(groups):
        name = f"{first.task} ({first.scores.metric}, {first.rows})"
        for group in (first, *others):
            change = "" if group is first else str(difference(group, first))
            score = compare(group.scores).score()
            rows.append([name, group.size, group.system, score, change, group.replicates])
        guess = compare(first.guesses).score()
        change = str(compare(first.guesses, first.scores))
        rows.append([name, first.size, "majority class", guess, change, ""])
    return rows


def verdicts(groups: Sequence[Group]) -> list[str]:
    """Returns a line for each task and size: how good the first system is, whether better than the second, and which
    systems are not distinguishable from guessing."""
    lines = list[str]()
    for family in _families(groups):
        first = family[0]
        what = f"{first.task}, {first.size} rows: {first.system}"
        line = f"{what} {compare(first.scores).score()} ({first.scores.metric}, {first.rows})."
        if family[1:]:
            second = family[1]
            line += f" {difference(first, second).verdict(first.system, second.system)}."
        guessing = [g.system for g in family if not compare(g.scores, g.guesses).low > 0]
        if guessing:
            line += f" Not distinguishable from guessing the majority class: {', '.join(guessing)}."
        lines.append(line)
    return lines


def find_warnings(runs: Sequence[Record]) -> list[str]:
    """Returns warnings that change how the table is to be read."""
    warnings = dict[str, None]()
    groups = defaultdict[Any, list[dict[str, str]]](list)
    for run in runs:
        if run["split"] == "dev" and run["selection"] == "dev":
            what = "dev picked the checkpoint and gave the score: optimistic."
            warnings[f"{run['task']}: {what}"] = None
        settings = {name: str(value) for name, value in run["settings"].items()}
        groups[run["system"], run["task"], run["train_size"]].append(settings)
    for (system, task, size), settings_of_runs in groups.items():
        names = sorted({name for settings in settings_of_runs for name in settings})
        mixed = [n for n in names if len({settings.get(n) for settings in settings_of_runs}) > 1]
        if mixed:
            what = f"its runs differ in {', '.join(mixed)}."
            warnings[f"{system} on {task}, {size} rows: {what}"] = None
    return list(warnings)


def table_of_runs(runs: Sequence[Record]) -> list[list[str]]:
    """Returns a header, and a row for each run and metric, as fractions of 1."""
    keys = ("task", "train_size", "system", "pretraining", "subset", "seed", "candidate", "split")
    rows = [[*keys, "train_rows", "seconds", "metric", "score", "majority class"]]
    for run in runs:
        found = run["splits"][run["split"]]
        cells = [run[key] for key in (*keys, "train_rows", "seconds")]
        for metric, score in found["scores"].items():
            rows.append([*map(str, cells), metric, f"{score}", f"{found['baselines'][metric]}"])
    return rows


if __name__ == "__main__":
    run_command(main)
