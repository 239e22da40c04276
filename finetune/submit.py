"""Writes the zip file for the site of GLUE or SuperGLUE from runs made with --predict_test.

python finetune/submit.py results --benchmark glue --system "k5 multicls" --output glue.zip
python finetune/submit.py results --benchmark glue --system "k5 multicls x5" --for rte="k5 isobn" --output glue.zip

For each task it takes the system's run with the best score on the choosing rows, or with "x5" the ensemble of five.
"""

from __future__ import annotations

import json
import math
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/, whose names must not hide packages

import numpy as np
from pydantic import Field

from finetune.data.examples import LabeledExample
from finetune.data.tasks import TASKS, Task
from finetune.stats.systems import SystemResult, choosing_score, load_results
from finetune.store.results import Array, Store
from multicls.command_line import CommandLine, print_summary
from multicls.errors import UserError, did_you_mean, run_command
from multicls.settings import Settings


class SubmitOptions(Settings):
    """Options of the command."""

    results: str = Field(description="a folder with results.jsonl")
    benchmark: Literal["glue", "superglue"] = Field(description="the benchmark whose site it is for: glue or superglue")
    system: str = Field(description="the system's name as the report says it; NAME x5: an ensemble")
    others: list[str] = Field([], title="TASK=NAME", description="another system for one task")
    train_size: str = Field("full", description="train rows of the runs")
    output: str = Field(description="the zip file to upload")


SUFFIXES = {"glue": ".tsv", "superglue": ".jsonl"}
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
    saved = (best[f"test_{task.name}_{name}"].tolist() for name in ("ids", "parts", "groups", "answers"))
    examples = [LabeledExample(one, (), math.nan, part, group=group, answer=answer)
                for one, part, group, answer in zip(*saved, strict=True)]  # fmt: skip
    if problems := check_rows(task, examples):
        raise UserError(*problems)
    if task.is_regression:
        outputs = best[f"test_{task.name}_scores"][:, None] / task.label_scale
    else:
        outputs = best[f"test_{task.name}_logits"]
    if not np.isfinite(outputs).all():
        raise UserError(f"{task.name}: the run of {system!r} on {source} predicted values that are not finite.")
    return submission_files(task, examples, outputs)


def submission_files(task: Task, examples: Sequence[LabeledExample], outputs: Array) -> dict[str, str]:
    """Returns name and content of the benchmark's files, one for each part of the test set `examples`.

    `outputs` (N, C) are those of the model for the examples.
    """
    from finetune.data.metrics import choose_answers, predictions_of

    rows: Iterable[int] = range(len(examples))
    if task.name == "record":
        rows = choose_answers(outputs, [example.group for example in examples]).values()
    values = predictions_of(task, outputs).tolist()
    predictions: dict[str, list[tuple[str, Any]]] = {part: [] for _, part in task.test}
    for row in rows:
        index = examples[row].id.split(":", 1)[1]
        value = examples[row].answer if task.name == "record" else _spelled(task, values[row])
        predictions[examples[row].part].append((index, value))
    parts = zip(task.test, task.submissions, strict=True)
    return {f"{stem}{SUFFIXES[task.benchmark]}": "".join(f"{line}\n" for line in _lines(task, predictions[part]))
            for (_, part), (stem, _) in parts}  # fmt: skip


def check_rows(task: Task, examples: Sequence[LabeledExample]) -> list[str]:
    """Returns why the site would refuse predictions for these test rows: each index of a file has to be there once."""
    problems = []
    for (_, part), (stem, count) in zip(task.test, task.submissions, strict=True):
        indices = [row.id.split(":", 1)[1] for row in examples if row.part == part]
        if task.name == "record":  # of an entity; a query is predicted once
            indices = [index.split(":")[1] for index in dict.fromkeys(row.group for row in examples)]
        if len(indices) != count:
            problems.append(f"{stem}: {len(indices)} predictions instead of {count}.")
        elif doubled := [index for index, times in Counter(indices).items() if times > 1]:
            problems.append(f"{stem}: index {doubled[0]} is there more than once.")
        elif task.name not in ("multirc", "record") and set(indices) != set(map(str, range(count))):
            problems.append(f"{stem}: the indices must be 0..{count - 1}.")
    return problems


def _spelled(task: Task, value: float) -> str | int | float:
    """Returns a prediction as the site wants it: a number for 0 and 1, a score in the task's range, else the label."""
    if task.is_regression:
        return round(min(max(value * task.label_scale, 0.0), task.label_scale), 4)
    label = task.labels[int(value)]
    return int(label) if label.isdigit() else label


def _lines(task: Task, predictions: list[tuple[str, Any]]) -> Iterator[str]:
    if task.benchmark == "glue":
        yield "index\tprediction"
        yield from (f"{index}\t{value}" for index, value in predictions)
    elif task.name == "multirc":
        passages: dict[int, dict[int, list[dict[str, int]]]] = {}
        for key, value in predictions:
            passage, question, answer = map(int, key.split(":"))
            passages.setdefault(passage, {}).setdefault(question, []).append({"idx": answer, "label": value})
        for passage, questions in passages.items():
            nested = [{"idx": question, "answers": answers} for question, answers in questions.items()]
            yield json.dumps({"idx": passage, "passage": {"questions": nested}})
    else:
        for key, value in predictions:
            index = int(key.split(":")[1] if task.name == "record" else key)
            yield json.dumps({"idx": index, "label": value})


if __name__ == "__main__":
    run_command(main)
