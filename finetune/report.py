"""Reports on a results folder: scores on the console, all tables as Markdown, and one HTML page with figures.

python finetune/report.py results
python finetune/report.py results --compare "k5 multicls" "k5 cls" --task rte cola
python finetune/report.py results --ensembles 5 --html report/ensembles.html
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/, whose names must not hide packages

from pydantic import Field

from finetune.store.results import Store
from multicls.command_line import CommandLine, curves_line, print_summary
from multicls.errors import UserError, did_you_mean, run_command
from multicls.files import atomic_write
from multicls.settings import Settings

if TYPE_CHECKING:
    from finetune.stats.systems import Results


class ReportOptions(Settings):
    """Options of the command."""

    results: str = Field(description="a folder with results.jsonl")
    html: str | None = Field(None, description="where the page goes, and the Markdown beside it; default: "
                             "RESULTS/report.html")  # fmt: skip
    no_html: bool = Field(False, description="write the tables without the page, which takes longer")
    compare: tuple[str, str] | None = Field(
        None, title="SYSTEM", description="test these two systems only, named as in the tables or by some words"
    )
    task: list[str] = Field([], description="report these tasks only")
    ensembles: Annotated[int, Field(ge=2)] | None = Field(None, description="add rows for ensembles of so many runs")


COMMAND = CommandLine("finetune/report.py", __doc__, ReportOptions, positional=("results",))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    args = COMMAND.parse(argv)

    from finetune.show.page import build_report
    from finetune.stats.systems import load_results

    folder = Path(args.results)
    if not folder.is_dir():
        what = "is a file; give the folder that it is in" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {what}. finetune/run.py and finetune/grid.py write results folders.")
    results = load_results(Store(folder), ensembles=args.ensembles or 0)
    if not results.rows:
        raise UserError(f"{folder}: no finished runs there. finetune/run.py and finetune/grid.py write them.")
    known = {row.task for row in results.rows}
    if unknown := [task for task in args.task if task not in known]:
        raise UserError(*(f"--task {task}: no finished run of it in {folder}.{did_you_mean(task, known)}"
                          for task in unknown))  # fmt: skip
    if args.task:
        results = replace(results, rows=[row for row in results.rows if row.task in args.task])
    report = build_report(results, folder.resolve(), args.compare, pictures=not args.no_html)
    report.print(comparisons=args.compare is not None)
    page = Path(args.html or folder / "report.html")
    texts = {"tables": (page.with_suffix(".md"), report.markdown())}
    if not args.no_html:
        texts["page"] = (page, report.html())
    for path, text in texts.values():
        with atomic_write(path) as file:
            file.write(text)
    made = [*((name, path) for name, (path, _) in texts.items()), *curves_line(folder)]
    next_command = "python finetune/run.py ... --save_model   # a model with which finetune/predict.py labels rows"
    if best := best_saved_model(Store(folder), results):
        made.append(("saved model", best))
        next_command = shlex.join(["python", "finetune/predict.py", str(best), "ROWS.csv"])
    print_summary(made, next_command)
    return 0


def best_saved_model(store: Store, results: Results) -> Path | None:
    """Returns the folder of the saved model with the best score, None if no run has saved one."""
    saved = [(record["score"], store.model_path(record["run_id"])) for row in results.rows for record in row.records
             if record["run_id"] and store.model_path(record["run_id"]).is_dir()]  # fmt: skip
    return max(saved)[1] if saved else None


if __name__ == "__main__":
    run_command(main)
