"""Prints a results folder as Markdown tables, and writes them with figures as one HTML page.

python finetune/report.py results --compare "k5 multicls" "k5 cls"
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/, whose names must not hide packages

from finetune.store.results import Store
from multicls.errors import CommandParser, UserError, did_you_mean, run_command

if TYPE_CHECKING:
    from finetune.stats.systems import Results


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    args = _parser().parse_args(argv)
    if args.ensembles and args.ensembles < 2:
        raise UserError(f"--ensembles {args.ensembles}: must be 2 or more.")

    from finetune.show.page import build_report
    from finetune.stats.systems import load_results

    folder = Path(args.results)
    results = load_results(Store(folder), ensembles=args.ensembles)
    if not results.rows:
        raise UserError(f"{folder}: no finished runs there. finetune/run.py and finetune/grid.py write them.")
    known = {row.task for row in results.rows}
    if unknown := [task for task in args.task or () if task not in known]:
        raise UserError(*(f"--task {task}: no finished run of it in {folder}.{did_you_mean(task, known)}"
                          for task in unknown))  # fmt: skip
    if args.task:
        results = replace(results, rows=[row for row in results.rows if row.task in args.task])
    report = build_report(results, folder.resolve(), args.compare and tuple(args.compare), pictures=not args.no_html)
    print(report.markdown())
    if not args.no_html:
        page = Path(args.html or folder / "report.html")
        report.write(page)
        print(f"page with figures: {page}")
    print("\n".join(next_steps(Store(folder), results)))
    return 0


def next_steps(store: Store, results: Results) -> list[str]:
    """Returns lines that name the best saved model, the curves, and a command to go on with."""
    saved = [(record["score"], store.model_path(record["run_id"])) for row in results.rows for record in row.records
             if record["run_id"] and store.model_path(record["run_id"]).is_dir()]  # fmt: skip
    lines = [f"curves: tensorboard --logdir {store.folder / 'tb'}"]
    if not saved:
        return [*lines, "next: --save_model keeps the model of a run, and finetune/predict.py labels new rows with it"]
    model = max(saved)[1]
    return [f"best saved model: {model}", *lines, f"next: python finetune/predict.py {model} ROWS.csv"]


def _parser() -> CommandParser:
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add("results", help="folder with results.jsonl")
    add("--html", metavar="FILE", help="where the page goes (default: RESULTS/report.html)")
    add("--no_html", action="store_true", help="print the tables only")
    add("--compare", nargs=2, metavar=("A", "B"),
        help="test these two systems only; each named as in the tables, or by some of those words")  # fmt: skip
    add("--task", nargs="+", metavar="TASK", help="report these tasks only")
    add("--ensembles", type=int, default=0, metavar="N", help="add rows for ensembles of N runs")
    return parser


if __name__ == "__main__":
    run_command(main)
