"""Reports on a results folder: tables on the console, as Markdown, and as one HTML page with two figures.

python finetune/report.py results
python finetune/report.py results --compare k5-multicls k5-mean --task rte cola
python finetune/report.py results --ensembles 5 --output report
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

from pydantic import Field
from pydantic_settings import CliPositionalArg

from multicls.cards import cell
from multicls.console import print_summary
from multicls.errors import run_command
from multicls.files import atomic_write
from multicls.settings import Settings, parse

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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    options = parse(ReportOptions, argv, prog="finetune/report.py", doc=__doc__)
    from jinja2 import Environment, FileSystemLoader  # after --help

    from finetune.report_tables import build_report

    folder, output = Path(options.results), Path(options.output or options.results)
    report = build_report(folder, options.task, options.compare, options.ensembles)
    for name, table in report.tables.items():
        if name != "All results":
            print(f"\n{name}\n{table.to_string(index=False)}")
    print("".join(f"warning: {warning}\n" for warning in report.warnings))
    for name in ("report.md", "report.html"):
        escape = name.endswith(".html")
        templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=escape)
        with atomic_write(output / name) as file:
            template = templates.get_template(f"{name}.jinja")
            file.write(template.render(report=report, notes=NOTES, cell=cell))
    made = [("tables", output / "report.md"), ("page", output / "report.html")]
    print_summary(made, next(iter(report.commands.values()), ""))
    return 0


if __name__ == "__main__":
    run_command(main)
