"""Writes the zip file for the site of GLUE or SuperGLUE from runs made with --predict_test.

python finetune/submit.py results --benchmark glue --system "k5 multicls" --output glue.zip
python finetune/submit.py results --benchmark glue --system "k5 multicls x5" --for rte="k5 isobn" --output glue.zip

For each task it takes the system's run with the best score on the choosing rows, or with "x5" the ensemble of five.
"""

from __future__ import annotations

import math
import re
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/, whose names must not hide packages

from pydantic import Field

from finetune.data.examples import LabeledExample
from finetune.data.submissions import check_rows, submission_files
from finetune.data.tasks import TASKS, Task
from finetune.stats.systems import SystemResult, choosing_score, load_results
from finetune.store.results import Store
from multicls.command_line import CommandLine, print_summary
from multicls.errors import UserError, did_you_mean, run_command
from multicls.settings import Settings


class SubmitOptions(Settings):
    """Options of the command."""

    results: str = Field(description="a folder with results.jsonl")
    benchmark: Literal["glue", "superglue"] = Field(description="the benchmark whose site it is for: glue or superglue")
    system: str = Field(description="the system's name as the report says it; NAME x5: an ensemble")
    others: list[str] = Field(default=[], title="TASK=NAME", description="another system for one task")
    train_size: str = Field(default="full", description="train rows of the runs")
    output: str = Field(description="the zip file to upload")


COMMAND = CommandLine(
    "finetune/submit.py", __doc__, SubmitOptions, positional=("results",),
    groups={"runs": {"system": "system", "for": "others", "train_size": "train_size"}},
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    args = COMMAND.parse(argv)
    if wrong := [f"--for {text}: write it as TASK=NAME." for text in args.others if "=" not in text]:
        raise UserError(*wrong)
    others = dict(text.split("=", 1) for text in args.others)
    wanted = [task for task in TASKS.values() if task.benchmark == args.benchmark and task.submissions]
    if unknown := sorted(others.keys() - {task.name for task in wanted}):
        raise UserError(f"--for {unknown[0]}: no task of {args.benchmark}.{did_you_mean(unknown[0], TASKS)}")
    sizes = {int(found[1]) for name in (args.system, *others.values()) if (found := re.search(r" x(\d+)$", name))}
    store = Store(args.results)
    rows = [row for size in sizes or {0} for row in load_results(store, size).rows]
    if not rows:
        raise UserError(f"{args.results}: no finished runs there. finetune/run.py and finetune/grid.py write them.")
    files, problems = dict[str, str](), list[str]()
    for task in wanted:
        try:
            files |= _files_of(task, rows, others.get(task.name, args.system), args.train_size)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    with zipfile.ZipFile(args.output, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    print_summary([("written", f"{args.output} ({len(files)} files, as the site wants them)")])
    return 0


def _files_of(task: Task, rows: Sequence[SystemResult], system: str, size: str) -> dict[str, str]:
    """Returns name and content of one task's files, from the best run of a system.

    Raises:
        UserError: There is no such run, it did not predict the test set, or the site would refuse the rows.
    """
    source = next((name for name, other in TASKS.items() if task.name in other.diagnostics), task.name)
    found = [row for row in rows if row.task == source and row.train_size == size and row.system.title == system]
    if not found:
        names = {row.system.title for row in rows if row.task == source and row.train_size == size}
        raise UserError(f"{task.name}: no finished run of {system!r} on {source}.{did_you_mean(system, names)}")
    scores = [choosing_score([record], "mean") for record in found[0].records]
    best = found[0].predictions()[max(range(len(scores)), key=scores.__getitem__)]
    if f"test_{task.name}_ids" not in best:
        raise UserError(f"{task.name}: the run of {system!r} on {source} did not predict it; add --predict_test.")
    names = ("ids", "parts", "groups", "answers")
    columns = zip(*(best[f"test_{task.name}_{name}"].tolist() for name in names), strict=True)
    examples = [LabeledExample(one, (), math.nan, part, group=group, answer=answer)
                for one, part, group, answer in columns]  # fmt: skip
    if problems := check_rows(task, examples):
        raise UserError(*problems)
    if task.is_regression:
        outputs = best[f"test_{task.name}_scores"][:, None] / task.label_scale
    else:
        outputs = best[f"test_{task.name}_logits"]
    return submission_files(task, examples, outputs)


if __name__ == "__main__":
    run_command(main)
