"""Submission files for the sites of GLUE and SuperGLUE."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from finetune.data.tasks import Task

if TYPE_CHECKING:
    from finetune.data.examples import LabeledExample
    from finetune.data.metrics import Array

SUFFIXES = {"glue": ".tsv", "superglue": ".jsonl"}


def submission_files(task: Task, examples: Sequence[LabeledExample], outputs: Array) -> dict[str, str]:
    """Returns name and content of the benchmark's files, one for each part of the test set.

    Args:
        task: one with `submissions`.
        examples: its test rows.
        outputs: (N, C) outputs of the model for them.
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
