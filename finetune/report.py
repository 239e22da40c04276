"""Reports on a results folder: tables on the console, as Markdown, and as one HTML page with two figures.

python finetune/report.py results
python finetune/report.py results --compare k5-multicls k5-mean --task rte cola
python finetune/report.py results --ensembles 5 --output report
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

from pydantic import Field
from pydantic_settings import CliPositionalArg

from multicls.cards import cell
from multicls.console import print_summary
from multicls.errors import UserError, did_you_mean, run_command
from multicls.files import atomic_write
from multicls.settings import Settings, parse

if TYPE_CHECKING:
    import pandas as pd

    from finetune.report_tables import Group

NOTES = {
    "Scores": "Mean ± standard error over replicates, in percent.",
    "Comparisons": "Difference in points. p: t-test over replicates, paired where both systems have the same training "
    "subsets, corrected by Holm's method over all tests shown. Needed: about how many replicates of each system would "
    "show this difference (5 %, 80 % power). Choose tasks and systems (--task, --compare) before you look.",
    "All results": "A replicate is averaged over its seeds first. The interval is Student's t over the replicates; of "
    "a single run it is over the dev rows (Wilson for accuracy, else bootstrap). Baseline: the majority class, "
    "or its mean score. Test rows are scored once, at the end of a run. ECE: calibration error of classes, 15 bins.",
}


class ReportOptions(Settings):
    """Options of the command."""

    results: CliPositionalArg[str] = Field(description="a results folder")
    output: str | None = Field(None, description="folder for the report; default: RESULTS")
    compare: list[str] = Field([], description="test these systems only, by name")
    task: list[str] = Field([], description="report these tasks only")
    ensembles: int | None = Field(None, ge=2, description="add ensembles of this number of seeds")


@dataclass(frozen=True)
class Report:
    """The content of a report."""

    groups: list[Group]
    tables: dict[str, pd.DataFrame]
    warnings: list[str]
    commands: dict[str, str]  # by what each is for


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    options = parse(ReportOptions, argv, prog="finetune/report.py", doc=__doc__)
    report = build_report(options)
    for name, table in report.tables.items():
        if name != "All results":
            print(f"\n{name}\n{table.to_string(index=False)}")
    print("".join(f"warning: {warning}\n" for warning in report.warnings))
    output = Path(options.output or options.results)
    for name in ("report.md", "report.html"):
        with atomic_write(output / name) as file:
            file.write(render(report, name))
    made = [("tables", output / "report.md"), ("page", output / "report.html")]
    print_summary(made, next(iter(report.commands.values()), ""))
    return 0


def build_report(options: ReportOptions) -> Report:
    """Reads a results folder and makes the tables.

    Raises:
        UserError: There is nothing to report, no run of a task or system that is named, or a run without predictions.
    """
    from finetune import report_tables
    from finetune.results import PREDICTIONS, load_results, unfinished_runs

    folder = Path(options.results)
    unfinished = report_tables.unfinished_text(unfinished_runs(folder))
    try:
        runs = load_results(folder)
    except UserError as error:
        raise UserError(*error.problems, *unfinished) from None
    for path in runs["path"]:
        if not Path(path, PREDICTIONS).exists():
            raise UserError(
                f"{path}: {PREDICTIONS} is missing; delete this folder and run it again."
            )
    _check_names("--task", options.task, set(runs["task"]))
    runs = runs[runs["task"].isin(options.task)] if options.task else runs
    groups = report_tables.make_groups(runs, options.ensembles)
    _check_names("--compare", options.compare, {group["system"] for group in groups})
    tables = {
        "Scores": report_tables.scores_table(groups),
        "Comparisons": report_tables.comparisons_table(groups, options.compare),
        "All results": report_tables.results_table(groups),
    }
    warnings = report_tables.find_warnings(groups, options.ensembles) + unfinished
    tables = {name: table for name, table in tables.items() if len(table)}
    return Report(groups, tables, warnings, report_tables.best_commands(groups))


def _check_names(flag: str, names: Sequence[str], known: set[str]) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"{flag} {name}: no run of it.{did_you_mean(name, known)}")


def render(report: Report, name: str) -> str:
    """Returns the report as `report.md`, or as `report.html`: one page with its figures inside."""
    from jinja2 import Environment, FileSystemLoader

    from finetune.report_tables import draw_calibration, draw_runs

    images = {
        "All runs (o), mean and 95 % interval (|), baseline (x)": draw_runs,
        "Accuracy by confidence; grey: share of the examples": draw_calibration,
    }
    loader, is_page = FileSystemLoader(Path(__file__).parent), name.endswith(".html")
    template = Environment(loader=loader, autoescape=is_page).get_template(f"{name}.jinja")
    return template.render(report=report, notes=NOTES, images=images, cell=cell)


if __name__ == "__main__":
    run_command(main)
