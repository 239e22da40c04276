"""Writes submission files for the sites of GLUE and SuperGLUE, and checks them by the sites' rules."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.tasks import TASKS, Task
from multicls.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from finetune.data.examples import LabeledExample
    from finetune.data.metrics import Array

SUFFIXES = {"glue": ".tsv", "superglue": ".jsonl"}


def write_submission(task: Task, examples: Sequence[LabeledExample], outputs: Array, folder: Path | str) -> list[Path]:
    """Writes the predictions of all test rows in the benchmark's format.

    Args:
        task: one with `submissions`.
        examples: its test rows.
        outputs: (N, C) outputs of the model for them.
        folder: the folder for the files; it is created.

    Returns:
        The files, one for each part of the test set.
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
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = []
    for (_, part), (stem, _) in zip(task.test, task.submissions, strict=True):
        paths.append(Path(folder) / f"{stem}{SUFFIXES[task.benchmark]}")
        paths[-1].write_text("".join(f"{line}\n" for line in _lines(task, predictions[part])), encoding="utf-8")
    return paths


def check_submission(files: Iterable[Path | str] | Path | str) -> list[str]:
    """Returns the problems that make the site refuse the files: missing or unknown files, wrong predictions.

    Args:
        files: the files, or a folder with them.

    Returns:
        A line for each problem; an empty list means that the files can be sent.
    """
    paths = submission_files(Path(files)) if isinstance(files, (Path, str)) else [Path(path) for path in files]
    benchmark = "glue" if any(path.suffix == ".tsv" for path in paths) else "superglue"
    wanted = {f"{stem}{SUFFIXES[benchmark]}": (task, rows) for task in TASKS.values() if task.benchmark == benchmark
              for stem, rows in task.submissions}  # fmt: skip
    names = Counter(path.name for path in paths)
    problems = [f"missing: {name}" for name in wanted if name not in names]
    problems += [f"{name}: given {count} times." for name, count in names.items() if count > 1]
    for path in paths:
        if path.name not in wanted:
            problems.append(f"{path}: no file of {benchmark}.{did_you_mean(path.name, wanted)}")
        else:
            problems += _problems(path, *wanted[path.name])
    return problems


def submission_files(folder: Path) -> list[Path]:
    """Returns the submission files of a folder, by name.

    Raises:
        UserError: There is no such folder.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder.")
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES.values())


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


def _problems(path: Path, task: Task, rows: int) -> Iterator[str]:
    """Yields the problems of one file."""
    indices: list[Any] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if task.benchmark == "glue" and number == 1:
            if line != "index\tprediction":
                yield f"{path}:1: the header must be index<tab>prediction."
            continue
        try:
            found = list(_parsed(task, line))
        except (ValueError, KeyError, TypeError, AttributeError):
            yield f"{path}:{number}: not a line of a {task.name} submission."
            return
        indices += [index for index, _ in found]
        wrong = next((value for _, value in found if not _allowed(task, value)), None)
        if wrong is not None:
            allowed = ", ".join(task.labels) or f"numbers in 0..{task.label_scale:g}"
            yield f"{path}:{number}: {wrong!r} is none of {allowed}."
            return
    if len(indices) != rows:
        yield f"{path}: {len(indices)} predictions instead of {rows}."
    doubled = [index for index, count in Counter(indices).items() if count > 1]
    if doubled:
        yield f"{path}: index {doubled[0]} is there more than once."
    elif task.name not in ("multirc", "record") and len(indices) == rows and set(indices) != set(range(rows)):
        yield f"{path}: the indices must be 0..{rows - 1}."


def _parsed(task: Task, line: str) -> Iterator[tuple[Any, Any]]:
    """Yields index and prediction of each row that a line predicts."""
    if task.benchmark == "glue":
        index, value = line.split("\t")
        yield int(index), value
        return
    entry: Mapping[str, Any] = json.loads(line)
    if task.name != "multirc":
        yield entry["idx"], entry["label"]
        return
    for question in entry["passage"]["questions"]:
        for answer in question["answers"]:
            yield (entry["idx"], question["idx"], answer["idx"]), answer["label"]


def _allowed(task: Task, value: Any) -> bool:
    if task.name == "record":
        return isinstance(value, str)
    if task.is_regression:
        return math.isfinite(float(value)) and 0 <= float(value) <= task.label_scale
    number = task.benchmark == "superglue" and task.labels[0].isdigit()  # JSON numbers there, not texts
    return (not number or type(value) is int) and str(value) in task.labels
