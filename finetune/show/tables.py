"""Tables of a results folder: pandas frames of text, with notes, and their Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from finetune.stats.averages import BENCHMARKS, benchmark_average
from finetune.stats.calibration import NUM_BINS, calibration, pooled_temperature
from finetune.stats.estimates import estimate
from finetune.stats.pairs import PairTest, leaders
from finetune.stats.systems import Candidate, SystemResult

CONSTANT = "constant answer"
NUMBER = re.compile(r"-$|< |[+-]?\d+(\.\d+)?($| ±| to | of | \(| \*)")  # how a cell begins that is aligned to the right
SIDE_BY_SIDE = "Systems side by side"
COMPARISONS = "Comparisons: which differences can be told from chance?"
COLUMNS_BESIDE = 5  # that the console shows beside the first one
SELECTION = (
    "Scores are percentages at the best evaluation. Selection dev: dev chose it and reports it (the papers' protocol, "
    "optimistic). Selection holdout: rows held out of train chose it, and dev only reports."
)


@dataclass(frozen=True)
class Table:
    """A table with its notes."""

    title: str
    frame: pd.DataFrame  # cells as text; "-" where there is nothing to say
    notes: Sequence[str] = ()  # sentences below it
    bold: frozenset[tuple[int, str]] = frozenset()  # row numbers and column names of the cells in bold type

    @property
    def rows(self) -> list[list[tuple[str, bool]]]:
        """Cells of each row: text, bold or not."""
        return [[(text, (index, name) in self.bold) for name, text in row.items()]
                for index, row in enumerate(self.frame.to_dict("records"))]  # fmt: skip

    @property
    def numeric(self) -> list[bool]:
        """For each column True if it holds numbers, which are aligned to the right."""
        return [all(map(NUMBER.match, column)) for _, column in self.frame.items()]


def markdown(table: Table) -> str:
    """Returns the table as Markdown, with its title and notes."""
    lines = [list(map(str, table.frame.columns)), ["---"] * len(table.frame.columns)]
    lines += [[f"**{text}**" if bold else text for text, bold in row] for row in table.rows]
    text = "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)
    return "\n".join([f"## {table.title}\n", text, *(f"{note}\n" for note in table.notes)])


def print_table(console: Console, table: Table) -> None:
    """Prints the table with its title; of a wide one some columns at a time, each time with the first one."""
    names = list(table.frame.columns)
    for start in range(1, len(names), COLUMNS_BESIDE):
        shown = [0, *range(start, min(start + COLUMNS_BESIDE, len(names)))]
        grid = RichTable(title=table.title if start == 1 else None, title_justify="left", box=SIMPLE)
        for column in shown:
            grid.add_column(names[column], justify="right" if column else "left", no_wrap=column > 0)
        for row in table.rows:
            grid.add_row(*(Text(row[column][0], style="bold" if row[column][1] else "") for column in shown))
        console.print(grid)


def number(value: float, digits: int = 2) -> str:
    """Returns the number with so many digits after the point, "-" for nan."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def interval(low: float, high: float, sign: str = "") -> str:
    """Returns "low to high", "-" for nan; `sign` "+" shows both signs."""
    return "-" if math.isnan(low) else f"{low:{sign}.2f} to {high:{sign}.2f}"


def p_text(value: float) -> str:
    """Returns a p-value with three digits, never as 0."""
    return "< 0.001" if value < 0.001 else number(value, 3)


def error_of(row: SystemResult) -> float:
    """Returns the standard error of a row's mean; of a single run the one over dev examples; nan if there is none."""
    if len(row.records) == 1 and row.records[0]["score_error"] is not None:
        return 100 * float(row.records[0]["score_error"])
    return row.estimate.error


def score_text(row: SystemResult) -> str:
    """Returns "mean ± standard error", with the number of runs if some are missing."""
    text = with_error(row.estimate.mean, error_of(row))
    return text + (f" ({len(row.records)} of {row.planned})" if len(row.records) < row.planned else "")


def with_error(mean: float, error: float) -> str:
    """Returns "mean ± error", without the error if it is nan."""
    return number(mean) + ("" if math.isnan(error) else f" ± {number(error)}")


def units_text(row: SystemResult) -> str:
    """Returns what the standard error covers, in words."""
    if len(row.records) > 1:
        return row.estimate.units
    return "one run; its error is over dev examples" if row.records[0]["score_error"] is not None else "one run"


def place_of(row: SystemResult) -> dict[str, str]:
    """Returns the cells that say which row of results this is."""
    return {"task": row.task, "train rows": row.train_size, "system": row.system.title}


def to_frame(rows: Iterable[Mapping[str, str]]) -> pd.DataFrame:
    """Returns the rows without columns that hold nothing."""
    frame = pd.DataFrame(list(rows)).fillna("-")
    return frame.loc[:, (frame != "-").any()]


def results_table(rows: Sequence[SystemResult]) -> Table:
    """Returns one row for each system, task and train size."""
    lines = []
    for row in rows:
        found, runs = row.estimate, len(row.records)
        chosen = next((candidate.text for candidate in row.candidates if candidate.chosen), "-")
        lines.append(place_of(row) | {
            "metric": row.metric, "mean ± standard error": with_error(found.mean, error_of(row)),
            "95 % interval": interval(found.low, found.high), "median": number(found.median),
            CONSTANT: number(row.constant),
            "runs": str(runs) if runs >= row.planned else f"{runs} of {row.planned}: incomplete",
            "error over": units_text(row), "selection": row.system.selection,
            "chosen": chosen if len(row.candidates) > 1 else "-",
        })  # fmt: skip
    notes = [SELECTION, "The interval is Student's t over the units that the error covers; fine-tuning seeds are "
             "averaged first. A constant answer is train's most frequent class, or its mean score."]  # fmt: skip
    return Table("All results", to_frame(lines), notes)


def side_by_side(rows: Sequence[SystemResult], size: str) -> Table:
    """Returns a row for each system at one train size, a column for each task and for each complete average."""
    here = [row for row in rows if row.train_size == size]
    systems = list(dict.fromkeys(row.system.title for row in here))
    tasks = {row.task: f"{row.task}, {row.metric}" for row in here}
    lines = {name: {"system": name} for name in systems}
    constants: dict[str, str] = {"system": CONSTANT}
    for row in here:
        lines[row.system.title][tasks[row.task]] = score_text(row)
        constants[tasks[row.task]] = number(row.constant)
    best = [row for row in leaders(here).values() if sum(row.task == other.task for other in here) > 1]
    bold = {(systems.index(row.system.title), tasks[row.task]) for row in best}
    notes = ["Mean ± standard error; the best mean of each task and selection is bold."]
    for benchmark, members in BENCHMARKS.items():
        found = {name: benchmark_average([row for row in here if row.system.title == name], benchmark)
                 for name in systems}  # fmt: skip
        lacking = min((average.missing for average in found.values()), key=len)
        if not lacking:
            for name, average in found.items():
                lines[name][benchmark] = str(average)
        elif len(lacking) <= len(members) / 2:
            notes.append(f"No average of {benchmark}: no system has all tasks; missing: {', '.join(lacking)}.")
    complete = [name for name in BENCHMARKS if any(name in line for line in lines.values())]
    columns = ["system", *tasks.values(), *complete]
    frame = pd.DataFrame([*lines.values(), constants], columns=columns).fillna("-")
    return Table(f"{SIDE_BY_SIDE}, {size} train rows", frame, notes, frozenset(bold))


def comparison_table(tests: Sequence[PairTest], corrected: int) -> Table:
    """Returns one row for each pair of systems that can be compared; the correction is for `corrected` tests."""
    lines = []
    for test, found, examples in ((test, test.comparison, test.examples) for test in tests if test.comparison):
        flip = "-" if math.isnan(found.flip_p) else f"{p_text(found.flip_p)} ({p_text(found.flip_least)})"
        lines.append({
            "task": test.a.task, "train rows": test.a.train_size,
            "A": test.a.system.title, "B": test.b.system.title,
            "A - B": f"{found.difference:+.2f}", "95 % interval": interval(found.low, found.high, "+"),
            "p, corrected": p_text(test.corrected) + (" *" if test.significant else ""),
            "p: other models or draws? t-test": p_text(found.p),
            "same, sign-flip (its least)": flip,
            "p: other examples? bootstrap": p_text(examples.p) if examples else "-",
            "its 95 % interval": interval(examples.low, examples.high, "+") if examples else "-",
            "units": found.units,
        })  # fmt: skip
    notes = [
        "Difference in points. The t-test and the sign-flip test ask: would other pretrainings or draws of train rows "
        "(or whatever the units are) show the difference? The bootstrap asks: would other dev examples, with these "
        "very runs?",
        f"Corrected: the t-test's p by Holm's method over {corrected} {'test' if corrected == 1 else 'tests'}; * is "
        "below 0.05. Choose tasks (--task) and systems (--compare) before you look at the results: fewer tests need "
        "less correction. The sign-flip test with few units cannot fall below the p in brackets. --compare A B adds a "
        "bootstrap that is missing.",
    ]
    return Table(COMPARISONS, to_frame(lines), notes)


def short_comparisons(table: Table) -> Table:
    """Returns the columns of a comparison table that a console has room for."""
    frame = table.frame.assign(pair=table.frame["A"] + " - " + table.frame["B"])
    wanted = ("pair", "task", "train rows", "A - B", "95 % interval", "p, corrected")
    return Table(table.title, frame[[name for name in wanted if name in frame]])


def candidates_table(rows: Sequence[SystemResult]) -> Table:
    """Returns what was chosen from what; empty if nothing was chosen."""

    def text(candidate: Candidate) -> str:
        few = f" ({candidate.finished} of {candidate.planned})" if candidate.finished < candidate.planned else ""
        return f"{candidate.text}: {number(candidate.score)}{few}"

    lines = [
        place_of(row) | {
            "chosen on": "dev" if row.system.selection == "dev" else "held-out rows",
            "chosen": "; ".join(text(candidate) for candidate in row.candidates if candidate.chosen) or "-",
            "not chosen": "; ".join(text(candidate) for candidate in row.candidates if not candidate.chosen),
        }
        for row in rows if len(row.candidates) > 1
    ]  # fmt: skip
    note = "Scores are those on the rows that choose, over all runs; with missing runs their number stands in brackets."
    return Table("Candidates", to_frame(lines), (note,))


def macro_table(rows: Sequence[SystemResult]) -> Table:
    """Returns accuracy beside macro-F1, where runs have both."""
    lines = []
    for row in (row for row in rows if {"acc", "macro_f1"} <= row.records[0]["scores"].keys()):
        line = place_of(row)
        for name, title in (("acc", "accuracy"), ("macro_f1", "macro-F1")):
            for part, label in (("scores", title), ("constant", f"{title}, {CONSTANT}")):
                values = [record[part].get(name, math.nan) for record in row.records]
                line[label] = number(100 * float(np.mean(values)))
        lines.append(line)
    note = "Means over runs. Macro-F1 counts each class alike: it falls where a system neglects the rare ones."
    return Table("Accuracy and macro-F1", to_frame(lines), (note,))


def scored_test_sets(rows: Sequence[SystemResult]) -> Table:
    """Returns the scores on test sets and diagnostics with labels."""
    lines = []
    for row in rows:
        found = row.records[0]["test_scores"]
        for name, metric in ((test, metric) for test in found for metric in found[test]):
            values = [record["test_scores"].get(name, {}).get(metric, math.nan) for record in row.records]
            if not any(map(math.isnan, values)):
                result = estimate(row.frame.assign(score=100 * np.array(values, dtype=float)))
                lines.append(place_of(row) | {"test set": name, "metric": metric, "runs": str(len(values)),
                             "mean ± standard error": with_error(result.mean, result.error)})  # fmt: skip
    return Table("Test sets", to_frame(lines), ("Scored at the end of each run; they chose nothing.",))


def calibration_table(rows: Sequence[SystemResult]) -> Table:
    """Returns the calibration of classifiers before and after one temperature for all runs of a row."""
    titles = {"ece": "ECE", "ece_mass": "ECE, equal mass", "brier": "Brier", "nll": "NLL"}
    lines = []
    for row, runs in ((row, row.classified) for row in rows if row.classified):
        held_out = [(run["holdout_logits"], run["holdout_labels"]) for run in runs if "holdout_logits" in run]
        fitted = pooled_temperature(held_out) if held_out else None
        line = place_of(row)
        for suffix, temperature in (("", 1.0), (", T", fitted.value if fitted else None)):
            found = [calibration(run["logits"], run["labels"], temperature) for run in runs] if temperature else []
            for name, title in titles.items():
                mean = float(np.mean([one[name] for one in found])) if found else math.nan
                line[title + suffix] = number(mean * (100 if title.startswith("ECE") else 1), 3)
        line["T"] = number(fitted.value) + " (at its bound)" * fitted.at_bound if fitted else "-"
        lines.append(line)
    note = (
        f"Means over runs. ECE in percent, {NUM_BINS} bins of equal width or of equal mass; Brier score "
        "from 0 to 2; NLL in nats. T: logits divided by one temperature, fitted on the held-out rows of all runs of "
        "the row together (selection holdout). A temperature at its bound is no fit: too few held-out rows were wrong."
    )
    return Table("Calibration", to_frame(lines), (note,))
