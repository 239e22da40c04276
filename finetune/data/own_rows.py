"""A user's own rows, from two files of CSV, TSV or JSON lines."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from finetune.data.examples import LabeledExample, TaskData
from finetune.data.reading import json_rows
from finetune.data.tasks import Task
from multicls.errors import UserError, did_you_mean

TEXTS = (("text",), ("text1", "text2"), ("sentence1", "sentence2"))
LABEL = "label"
MAX_NUMBERS = 20  # integer labels with more values than that are scores, not classes
RawRows = list[tuple[str, Mapping[str, Any]]]  # FILE:LINE and the row


def read_own(train_file: str, dev_file: str) -> tuple[Task, TaskData]:
    """Reads the two files and finds out what task they are.

    Texts are in the columns `text`, or `text1` and `text2`, or `sentence1` and `sentence2`; the label is in `label`.
    Numbers that are not all whole, or whole with over 20 values, are scores (a regression, trained on label over the
    largest absolute label of train); all other labels are classes, the distinct ones of train in sorted order.

    Args:
        train_file: `.csv` (commas, quoted), `.tsv` (tabs, not quoted) or `.jsonl` (an object a line), with a header.
        dev_file: the same columns; it may be another format.

    Raises:
        UserError: a file, a column or a value is missing, or dev has a class that train has not.
    """
    train, dev = _rows(Path(train_file)), _rows(Path(dev_file))
    fields = _fields(train_file, train[0][1])
    labels = [_text(row, LABEL, where) for where, row in (*train, *dev)]
    if _are_scores(labels, train_file):
        scale = max(abs(float(label)) for label in labels[: len(train)]) or 1.0
        task = _task(train_file, fields, (), ("pearson", "spearman"), scale)
        note = f"labels are numbers: a regression, trained on label/{scale:g}"
    else:
        classes = tuple(sorted(set(labels[: len(train)])))
        if len(classes) < 2:
            raise UserError(f"{train_file}: every label is {classes[0]!r}; a task needs two classes or numbers.")
        task = _task(train_file, fields, classes, ("acc", "macro_f1"), 1.0)
        note = f"{len(classes)} classes: {', '.join(classes[:MAX_NUMBERS])}" + (", ..." * (len(classes) > MAX_NUMBERS))
    examples = [[_example(task, fields, row, where, number) for number, (where, row) in enumerate(rows)]
                for rows in (train, dev)]  # fmt: skip
    return task, TaskData(examples[0], examples[1], [note])


def _task(file: str, fields: tuple[str, ...], labels: tuple[str, ...], metrics: tuple[str, ...], scale: float) -> Task:
    return Task(
        f"own_{Path(file).stem}", tuple((name,) for name in fields), labels, metrics,
        "single" if len(fields) == 1 else "pair", "own", label_scale=scale, about=f"own rows of {file}",
    )  # fmt: skip


def _rows(path: Path) -> RawRows:
    readers = {".csv": _csv_rows, ".tsv": _csv_rows, ".jsonl": json_rows, ".json": json_rows}
    if path.suffix not in readers:
        raise UserError(f"{path}: must be one of {', '.join(readers)}.")
    try:
        rows: RawRows = list(readers[path.suffix](path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.") from None
    if not rows:
        raise UserError(f"{path}: no rows.")
    return rows


def _csv_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    quoted = path.suffix == ".csv"
    with open(path, encoding="utf-8-sig", newline="" if quoted else "\n") as file:
        options: dict[str, Any] = {"strict": True} if quoted else {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
        csv.field_size_limit(1 << 30)  # characters of a cell; 131,072 are few for a document
        reader = csv.reader(file, **options)
        try:
            columns = next(reader, [])
            if doubled := [name for name in {LABEL, *chain(*TEXTS)} if columns.count(name) > 1]:
                raise UserError(f"{path}: column {doubled[0]!r} is there more than once.")
            for values in filter(None, reader):  # not blank lines
                where = f"{path}:{reader.line_num}"
                if len(values) != len(columns):
                    raise UserError(f"{where}: {len(values)} columns instead of {len(columns)} ({', '.join(columns)}).")
                yield where, dict(zip(columns, values, strict=True))
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8: {error.reason}. Save it as UTF-8.") from None
        except csv.Error as error:
            raise UserError(f"{path}:{reader.line_num}: cannot be read: {error}.") from None


def _fields(file: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    found = next((names for names in TEXTS if set(names) <= set(row)), None)
    problems = []
    if found is None:
        wanted = " or ".join(" and ".join(map(repr, names)) for names in TEXTS)
        problems.append(f"{file}: no column {wanted} for the text; the columns are {', '.join(map(repr, row))}.")
    if LABEL not in row:
        problems.append(f"{file}: no column {LABEL!r}; " + _columns(LABEL, row))
    if problems:
        raise UserError(*problems)
    assert found is not None
    return found


def _columns(name: str, row: Mapping[str, Any]) -> str:
    return f"the columns are {', '.join(map(repr, row))}.{did_you_mean(name, row)}"


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    if column not in row:
        raise UserError(f"{where}: no {column!r}; " + _columns(column, row))
    value = row[column]
    if value is None or isinstance(value, (dict, list)) or not str(value).strip():
        raise UserError(f"{where}: {column} is {value!r}; it must be a text or a number.")
    return str(value).strip() if column == LABEL else str(value)


def _are_scores(labels: list[str], file: str) -> bool:
    try:
        numbers = {float(label) for label in labels}
    except ValueError:
        return False
    if odd := [label for label in labels if not math.isfinite(float(label))]:
        raise UserError(f"{file}: all labels are numbers, but one is {odd[0]!r}: leave its row out.")
    return len(numbers) > MAX_NUMBERS or any(number != int(number) for number in numbers)


def _example(task: Task, fields: tuple[str, ...], row: Mapping[str, Any], where: str, number: int) -> LabeledExample:
    texts, label = tuple(_text(row, name, where) for name in fields), _text(row, LABEL, where)
    if not task.is_regression and label not in task.labels:
        raise UserError(f"{where}: label {label!r} is none of train's: {', '.join(task.labels)}.")
    value = float(label) if task.is_regression else task.labels.index(label)
    return LabeledExample(f"{Path(where.rsplit(':', 1)[0]).stem}:{number}", texts, value)
