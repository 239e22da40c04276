"""Prints a results folder as Markdown tables, and writes them with figures as one HTML page.

python finetune/report.py results --html report.html --compare multicls cls
"""

from __future__ import annotations

import argparse
import html
import io
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/, whose names must not hide packages

from finetune.stats.systems import (
    BENCHMARKS,
    PairedTest,
    SelectedSystem,
    benchmark_average,
    bootstrap_test,
    choose_learning_rates,
    differing,
    group_runs,
    learning_rate,
    never_run,
    pair_up,
    sign_flip_test,
    summary,
)
from finetune.store.results import RESULTS, read_predictions, read_results
from multicls.errors import UserError, did_you_mean, run_command
from multicls.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SELECTION = (
    "Scores are percentages of the best evaluation. Selection dev: dev chose it and reports it (the papers' protocol, "
    "optimistic); holdout: rows held out of train chose it, and dev only reports."
)
STYLE = """
body { font: 15px/1.5 Georgia, serif; color: #000; background: #fff; max-width: 75em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0; border-top: 2px solid; border-bottom: 2px solid; font-size: 90% }
th { border-bottom: 1px solid; text-align: left } th, td { padding: .15em .7em } td.n { text-align: right }
figure { margin: 1em 0 } svg { max-width: 100%; height: auto } caption, figcaption { font-style: italic }
"""
MARKERS, COLUMNS = "osD^vP*X<>", 4  # of figures


@dataclass(frozen=True)
class Table:
    """A table with what has to be said about it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("results", help="folder with results.jsonl")
    parser.add_argument("--html", metavar="FILE", help="also write a self-contained page with figures")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="test two systems; each named by a head, a "
                        "model, or several such words with commas: multicls,k5,dev")  # fmt: skip
    args = parser.parse_args(argv)
    folder = Path(args.results)
    records = read_results(folder)
    if not records:
        raise UserError(f"{folder / RESULTS}: no finished runs there.")
    planned = planned_cells(folder)
    choices = choose_learning_rates(group_runs(records), planned)
    tables = [
        results_table(choices, never_run(choices, planned)),
        systems_table(choices),
        learning_rate_table(choices),
        averages_table(choices),
    ]
    tables.append(calibration_table(folder, choices))
    systems = list(dict.fromkeys(choice.system for choice in choices))
    if args.compare or len(systems) == 2:
        names = args.compare or [",".join(system) for system in systems]
        tables.append(comparison_table(folder, choices, *(_find_system(name, systems) for name in names)))
    tables = [table for table in tables if table.rows]
    print("\n".join(markdown(table, title=number > 0) for number, table in enumerate(tables)), end="")
    if args.html:
        with atomic_write(args.html) as file:
            file.write(page(tables, figures(folder, choices), str(folder)))
    return 0


def planned_cells(folder: Path) -> list[dict[str, Any]]:
    """The cells of all grids that were started in a results folder."""
    return [cell for path in sorted(folder.glob("grids/*.json")) for cell in json.loads(path.read_text("utf-8"))]


def results_table(choices: Sequence[SelectedSystem], missing: Sequence[str] = ()) -> Table:
    """Mean, standard error and median over seeds of every system at its chosen learning rate; then what is missing."""
    extra = differing([choice.chosen for choice in choices])
    if any(len(choice.candidates) > 1 for choice in choices):
        extra = ["learning_rate", *extra]
    notes: list[str] = []
    rows = []
    for choice in choices:
        key, runs = choice.chosen.key, choice.chosen.runs
        for note in sorted({note for run in runs for note in run["notes"]} - set(notes)):
            notes.append(note)
        marks = "".join(f" [{n}]" for n, note in enumerate(notes, 1) if any(note in run["notes"] for run in runs))
        mean, error, median = (_number(value) for value in summary(choice.chosen.scores))
        seeds = str(len(runs)) if len(runs) >= choice.expected else f"{len(runs)} of {choice.expected}: incomplete"
        row = [key["task"] + marks, str(key["train_size"]), key["head"], key["model_label"], runs[0]["metric"]]
        rows.append([*row, mean, error, seeds, median, key["selection"], *(str(key.get(name, "-")) for name in extra)])
    said = [SELECTION, *(f"[{number}] {note}" for number, note in enumerate(notes, 1))]
    if len({len(choice.chosen.runs) for choice in choices}) > 1:
        said.insert(1, "The rows have different numbers of seeds.")
    if missing:
        said.insert(1, f"Planned, but without a finished run: {'; '.join(missing)}.")
    columns = ("task", "train rows", "head", "model", "metric", "mean", "standard error", "seeds", "median",
               "selection", *extra)  # fmt: skip
    return Table("Results", columns, rows, said)


def systems_table(choices: Sequence[SelectedSystem]) -> Table:
    """The same means, a row for each system and train size, a column for each task; empty with a single task."""
    tasks = list(dict.fromkeys(choice.place[0] for choice in choices))
    cells: dict[tuple[str, tuple[str, ...]], dict[str, str]] = {}
    for choice in choices:
        mean, error, _ = summary(choice.chosen.scores)
        runs = len(choice.chosen.runs)
        text = _number(mean) + ("" if math.isnan(error) else f" ± {_number(error)}")
        text += f" ({runs} of {choice.expected})" if runs < choice.expected else ""
        cells.setdefault((choice.place[1], choice.system), {})[choice.place[0]] = text
    rows = [[size, ", ".join(system), *(found.get(task, "-") for task in tasks)]
            for (size, system), found in cells.items() if len(tasks) > 1]  # fmt: skip
    note = "Mean ± standard error of the metric named above; a number of runs stands where some are missing."
    return Table("Systems side by side", ("train rows", "system", *tasks), rows, (note,))


def learning_rate_table(choices: Sequence[SelectedSystem]) -> Table:
    """Mean score at every learning rate on the rows that choose; empty where there was nothing to choose."""
    rates = sorted({rate for choice in choices for rate in choice.candidates})
    rows = []
    for choice in choices if len(rates) > 1 else ():
        cells = []
        for rate in rates:
            count, mean = choice.candidates.get(rate, (0, math.nan))
            text = _number(mean) + ("" if count in (0, choice.expected) else f" ({count} of {choice.expected})")
            cells.append(f"{text} *" if rate == learning_rate(choice.chosen) else text)
        rows.append([*choice.place, ", ".join(choice.system), *cells])
    notes = ["Mean over seeds on the rows that choose: dev (as in the paper), or with selection holdout those held out "
             "of train; * is the best one, and chosen."]  # fmt: skip
    notes += [f"{choice.place[0]}, {choice.place[1]}, {', '.join(choice.system)}: {problem}" for choice in choices
              for problem in choice.problems]  # fmt: skip
    return Table("Learning rates", ("task", "train rows", "system", *(f"{rate:g}" for rate in rates)), rows, notes)


def averages_table(choices: Sequence[SelectedSystem]) -> Table:
    """Benchmark averages of every system and size, for the benchmarks of which there are two tasks or more."""
    tasks = {choice.place[0] for choice in choices}
    names = [name for name, members in BENCHMARKS.items() if len(tasks & set(members)) > 1]
    rows = []
    for size, system in dict.fromkeys((choice.place[1], choice.system) for choice in choices) if names else ():
        here = [choice for choice in choices if (choice.place[1], choice.system) == (size, system)]
        rows.append([size, ", ".join(system), *(str(benchmark_average(here, name)) for name in names)])
    return Table("Benchmark averages", ("train rows", "system", *names), rows, (
        "Mean over tasks of the mean over seeds; ± is the standard error over seeds of each seed's average.",
    ))  # fmt: skip


def calibration_table(folder: Path, choices: Sequence[SelectedSystem]) -> Table:
    """Calibration of classifications, averaged over runs, before and after temperature scaling."""
    from finetune.stats.calibration import NUM_BINS, calibration, fit_temperature

    rows, columns = [], ("ece", "ece_mass", "brier", "nll")
    for choice in choices:
        plain, scaled, temperatures = [], [], []
        for predictions in _logits(folder, choice):
            plain.append(calibration(predictions["logits"], predictions["labels"]))
            if "holdout_logits" in predictions:
                temperatures.append(fit_temperature(predictions["holdout_logits"], predictions["holdout_labels"]))
                scaled.append(calibration(predictions["logits"], predictions["labels"], temperatures[-1]))
        if plain:
            row = [*choice.place, ", ".join(choice.system), f"{len(plain)} of {len(choice.chosen.runs)}"]
            for values in (plain, scaled):
                row += [_number(summary([value[name] for value in values])[0] * (100 if "ece" in name else 1), 3)
                        if values else "-" for name in columns]  # fmt: skip
            rows.append([*row, _number(summary(temperatures)[2]) if temperatures else "-"])
    titles = ("ECE", "ECE, equal mass", "Brier", "NLL")
    note = (
        f"Means over runs. ECE in percent, {NUM_BINS} bins of equal width or of equal mass; Brier score from 0 to 2; "
        "NLL in nats. T: after division of the logits by a temperature fitted on the run's held-out rows (selection "
        "holdout); T itself is the median."
    )
    scaled_titles = [f"{title}, T" for title in titles]
    return Table("Calibration", ("task", "train rows", "system", "runs", *titles, *scaled_titles, "T"), rows, (note,))


def comparison_table(folder: Path, choices: Sequence[SelectedSystem], a: tuple[str, ...], b: tuple[str, ...]) -> Table:
    """Paired tests of two systems: over examples and over seeds for each task, over tasks for each size."""
    sides = [{choice.place: choice.chosen for choice in choices if choice.system == system} for system in (a, b)]
    shared = [place for place in sides[0] if place in sides[1]]
    rows, means, problems = [], {}, []
    for place in shared:
        try:
            pairs = pair_up(sides[0][place], sides[1][place])
            examples = bootstrap_test(folder, pairs)
        except UserError as error:
            problems.append(f"Not compared: {error}")
            continue
        scores = [[summary([100 * run["score"] for run in pair[side]])[0] for pair in pairs] for side in (0, 1)]
        means[place] = [summary(values)[0] for values in scores]
        seeds = sign_flip_test(*scores)
        interval = f"{examples.low:.2f} to {examples.high:.2f}"
        rows.append([*place, f"{seeds.difference:+.2f}", interval, _p(examples), str(examples.pairs), _p(seeds),
                     str(seeds.pairs)])  # fmt: skip
    for size in dict.fromkeys(place[1] for place in shared):
        tests = [means[place] for place in means if place[1] == size]
        if len(tests) > 1:
            test = sign_flip_test(*zip(*tests, strict=True))
            rows.append(
                [f"{len(tests)} tasks", size, f"{test.difference:+.2f}", "-", "-", "-", _p(test), str(test.pairs)]
            )
    columns = ("task", "train rows", "difference", "95 % interval", "p, examples", "examples", "p, seeds or tasks",
               "pairs")  # fmt: skip
    notes = (
        "Difference of means in points over runs of the same seeds. Examples: paired bootstrap over dev examples, 1000 "
        "resamples, percentile interval. Seeds, tasks: two-sided sign-flip permutation test; with n pairs p is at "
        "least 2 / 2^n. Not corrected for the number of tests."
    )
    return Table(f"{', '.join(a)} against {', '.join(b)}", columns, rows, (notes, *problems))


def _find_system(name: str, systems: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The one system that `name` is, or is a part of.

    Raises:
        UserError: there is none, or more than one.
    """
    wanted = {part.strip() for part in name.split(",")}
    found = [system for system in systems if wanted <= {part.strip() for text in system for part in text.split(",")}]
    if len(found) != 1:
        known = "; ".join(",".join(system) for system in found)
        hint = f" Say which: {known}." if found else did_you_mean(name, {part for system in systems for part in system})
        raise UserError(f"--compare {name}: {len(found)} systems of that name.{hint}")
    return found[0]


def figures(folder: Path, choices: Sequence[SelectedSystem]) -> list[tuple[str, str]]:
    """Captions and SVG of a strip plot of the seeds and of the reliability diagrams, for each train size."""
    from matplotlib import rc_context

    drawn = []
    for size in dict.fromkeys(choice.place[1] for choice in choices):
        here = [choice for choice in choices if choice.place[1] == size]
        for text, draw in FIGURES:
            caption = f"{size} train rows. {text}"
            with rc_context(
                {"svg.hashsalt": caption, "svg.fonttype": "none", "text.parse_math": False, "font.size": 9}
            ):
                figure = draw(folder, here)
                if figure is not None:
                    file = io.StringIO()
                    figure.savefig(file, format="svg", metadata={"Date": None})
                    drawn.append((caption, file.getvalue()[file.getvalue().index("<svg") :]))
    return drawn


def _panels(count: int, height: float) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    columns = min(COLUMNS, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(3 * columns, height * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, number + 1) for number in range(count)]
    return figure, axes


def _strip_plot(folder: Path, choices: Sequence[SelectedSystem]) -> Figure:
    systems = sorted({choice.system for choice in choices})
    tasks = list(dict.fromkeys(choice.place[0] for choice in choices))
    figure, axes = _panels(len(tasks), 1.2 + 0.3 * len(systems))
    for task, axis in zip(tasks, axes, strict=True):
        for choice in choices:
            if choice.place[0] == task:
                row, scores = systems.index(choice.system), choice.chosen.scores
                axis.plot(
                    scores, [row] * len(scores), MARKERS[row % len(MARKERS)], color="black", fillstyle="none", ms=5
                )
                axis.plot([scores.mean()] * 2, [row - 0.3, row + 0.3], color="black", lw=2)
                axis.set_title(f"{task} ({choice.chosen.runs[0]['metric']})", fontsize=9)
        first = tasks.index(task) % COLUMNS == 0
        axis.set_yticks(range(len(systems)), [", ".join(system) for system in systems] if first else [])
        axis.set_ylim(len(systems) - 0.5, -0.5)
        axis.grid(axis="x", lw=0.3, color="0.7")
    return figure


def _reliability_plot(folder: Path, choices: Sequence[SelectedSystem]) -> Figure | None:
    import numpy as np

    from finetune.stats.calibration import NUM_BINS, Bins, reliability

    found: dict[tuple[str, ...], list[Bins]] = {}
    for choice in choices:
        for predictions in _logits(folder, choice):
            found.setdefault(choice.system, []).append(reliability(predictions["logits"], predictions["labels"]))
    if not found:
        return None
    figure, axes = _panels(len(found), 3.0)
    middle = (np.arange(NUM_BINS) + 0.5) / NUM_BINS
    for (system, bins), axis in zip(sorted(found.items()), axes, strict=True):
        weights = np.array([one.count for one in bins])
        count = weights.sum(axis=0)
        with np.errstate(invalid="ignore"):
            confidence, accuracy = (
                (np.nan_to_num([getattr(one, name) for one in bins]) * weights).sum(axis=0) / count
                for name in ("confidence", "accuracy")
            )
        pooled = Bins(count, confidence, accuracy)
        axis.bar(middle, count / count.sum(), 1 / NUM_BINS, color="0.85", edgecolor="0.6", hatch="//", lw=0.5)
        axis.plot([0, 1], [0, 1], "--", color="0.4", lw=0.8)
        axis.plot(confidence, accuracy, "o-", color="black", ms=4, lw=1)
        axis.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy", aspect="equal")
        axis.set_title(f"{', '.join(system)}\npooled ECE {100 * pooled.error:.1f} %", fontsize=8)
    return figure


FIGURES = (
    ("Scores of every seed; the bar is their mean.", _strip_plot),
    ("Reliability: all tasks and runs of a system in 15 bins of equal width. On the dashed line confidence is "
     "accuracy; hatched bars show the share of examples.", _reliability_plot),
)  # fmt: skip


def _logits(folder: Path, choice: SelectedSystem) -> Iterable[Mapping[str, Any]]:
    """The predictions of the choice's runs that have logits on disk."""
    for run in choice.chosen.runs:
        try:
            predictions = read_predictions(folder, run["run_id"])
        except UserError:  # a folder without predictions still has its scores
            continue
        if "logits" in predictions:
            yield predictions


def markdown(table: Table, title: bool = True) -> str:
    """The table as Markdown."""
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    text = f"## {table.title}\n\n" if title else ""
    text += "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)
    return text + "".join(f"\n{note}\n" for note in table.notes)


def page(tables: Sequence[Table], pictures: Sequence[tuple[str, str]], title: str) -> str:
    """One HTML page that needs no other file."""
    parts = [f"<h1>Fine-tuning results: {html.escape(title)}</h1>"]
    for table in tables:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in table.columns)
        rows = "".join("<tr>" + "".join(_html_cell(cell) for cell in row) + "</tr>\n" for row in table.rows)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in table.notes)
        parts.append(f"<h2>{html.escape(table.title)}</h2>\n<table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody>"
                     f"</table>\n{notes}")  # fmt: skip
    parts += [f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>" for caption, svg in pictures]
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
            f"<style>{STYLE}</style></head>\n<body>{''.join(parts)}</body></html>\n")  # fmt: skip


def _html_cell(text: str) -> str:
    number = text[:1].isdigit() or text[:1] in "+-"
    return f"<td{' class=n' if number else ''}>{html.escape(text)}</td>"


def _number(value: float, digits: int = 2) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _p(test: PairedTest) -> str:
    return f"{test.p:.3f}"


if __name__ == "__main__":
    run_command(main)
