"""Reports on a results folder: tables on the console, as Markdown, and as one HTML page with a figure.

python finetune/report.py results
python finetune/report.py results --compare k5-multicls k5-mean --task rte cola
python finetune/report.py results --split dev --errors 50 --output report
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

from pydantic import Field
from pydantic_settings import CliPositionalArg

from multicls.cards import cell
from multicls.console import print_summary
from multicls.errors import run_command
from multicls.files import atomic_write
from multicls.settings import Settings, parse


class ReportOptions(Settings):
    """Options of the command."""

    results: CliPositionalArg[str] = Field(description="a results folder")
    output: str | None = Field(None, description="folder for the report; default: RESULTS")
    compare: list[str] = Field([], description="test these systems only, by name")
    task: list[str] = Field([], description="report these tasks only")
    split: Literal["dev", "test"] | None = Field(None, description="default: test, where it exists")
    errors: int = Field(20, ge=0, description="most confident errors to list, of the best system")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    options = parse(ReportOptions, argv, prog="finetune/report.py", doc=__doc__)
    import pandas as pd
    from jinja2 import Environment, FileSystemLoader  # after --help

    from finetune.report_tables import build_report

    folder, output = Path(options.results), Path(options.output or options.results)
    report = build_report(folder, options.task, options.compare, options.split, options.errors)
    print("\n".join(report.verdicts))
    for name in ("Scores", "Comparisons"):
        if name in report.tables:
            print(f"\n{name}\n{report.tables[name].to_string(index=False)}")
    print("".join(f"warning: {warning}\n" for warning in report.warnings))
    errors = [table.assign(of=name) for name, table in report.tables.items() if "Errors" in name]
    if errors:
        with atomic_write(output / "errors.csv") as file:
            pd.concat(errors).to_csv(file, index=False)
    for name in ("report.md", "report.html"):
        escape = name.endswith(".html")
        templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=escape)
        with atomic_write(output / name) as file:
            file.write(templates.get_template(f"{name}.jinja").render(report=report, cell=cell))
    made = [("tables", output / "report.md"), ("page", output / "report.html")]
    made += [("errors", output / "errors.csv")] if errors else []
    print_summary(made)
    return 0


if __name__ == "__main__":
    run_command(main)
