"""Reads a user's own labelled rows, from files or a Hub data set, and finds out what task they are."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.settings import OwnDataSettings
from finetune.subsets import hold_out
from finetune.tasks import OWN_METRICS, Example, Task, TaskData, passage_id
from multicls.console import count
from multicls.errors import UserError, did_you_mean
from multicls.labels import (
    TEXTS,
    LabelType,
    Names,
    class_names,
    find_columns,
    label_type,
    read_label,
    texts_of,
    with_texts,
)
from multicls.tables import RawRows, Row, load_hub, read_table

HUB_SPLITS = {"train": ("train",), "dev": ("validation", "dev", "valid"), "test": ("test",)}


def load_own(own: OwnDataSettings) -> TaskData:
    """Reads the rows and finds out what task they are.

    Rows with an empty text are left out and counted. Without dev rows, `dev_share` of the training rows become dev:
    by class, always the same ones, equal texts together.

    Raises:
        UserError: A file, column or value is missing, dev or test hold a label that train lacks, or the metric does
            not fit the labels.
    """
    files = {"train": own.train_file, "dev": own.dev_file, "test": own.test_file}
    splits = {split: read_table(Path(name)) for split, name in files.items() if name}
    splits, column, notes = splits or _hub_splits(own), own.label_column, list[str]()
    groups: Sequence[Names] = [own.text_column.split(",")] if own.text_column else TEXTS
    for split, rows in splits.items():
        groups = [find_columns(*rows[0], groups)]
        find_columns(*rows[0], [[column]], "label")
        splits[split], more = with_texts(rows, groups[0], f"{split} row")
        notes += more
    fields = groups[0]
    cells = [row.get(column) for rows in splits.values() for _, row in rows]
    kind = label_type(cells) if own.label_type == "auto" else own.label_type
    labels = {
        split: [read_label(kind, row.get(column), where) for where, row in rows]
        for split, rows in splits.items()
    }
    task = _task(own, fields, kind, labels)
    notes.append(_note(task))
    examples: dict[str, Any] = {
        split: [
            example_of(task, fields, row, where, f"{split}:{number}", label)
            for number, ((where, row), label) in enumerate(zip(rows, labels[split], strict=True))
        ]
        for split, rows in splits.items()
    }
    if "dev" not in examples:
        train = examples["train"]
        classes = [0.0 if task.is_regression else example.label for example in train]
        units = ((label, example.texts) for label, example in zip(classes, train, strict=True))
        dev = hold_out(dict(enumerate(units)), own.dev_share, "dev")
        examples["train"] = [example for row, example in enumerate(train) if row not in dev]
        examples["dev"] = [train[row] for row in sorted(dev)]
        total = count(len(train), "training row")
        notes.append(f"dev is {len(dev)} of the {total} (dev_share {own.dev_share:g})")
    return TaskData(task, **examples, notes=notes)


def example_of(
    task: Task, fields: Sequence[str], row: Row, where: str, key: str, label: Any = math.nan
) -> Example:
    """Returns the row at `where` as the example `key`, with the texts of the columns `fields`.

    Args:
        label: made by `read_label`; NaN: hidden.

    Raises:
        UserError: A cell is no text, or the task has no such label.
    """
    texts = texts_of(row, fields, where)
    names, marks = label if isinstance(label, tuple) else (), tuple[float, ...]()
    for name in names:
        if name not in task.labels:
            hint = did_you_mean(name, task.labels)
            raise UserError(f"{where}: label {name!r} is not in the training rows.{hint}")
    if task.multi_label:
        label, marks = 0.0, tuple(float(name in names) for name in task.labels)
    elif names:
        label = task.labels.index(names[0])
    passage = passage_id(texts[0]) if task.passage == 0 else ""
    return Example(key, texts, label, labels=marks, passage=passage)


def _hub_splits(own: OwnDataSettings) -> dict[str, RawRows]:
    """Returns the rows of a data set of the Hub by split, with the names of labels that it holds as indices."""
    name, _, configuration = str(own.dataset).partition(":")
    loaded = load_hub(name, name=configuration or None)
    column, splits = own.label_column, dict[str, RawRows]()
    for split, names in HUB_SPLITS.items():
        for hub_split in [name for name in names if len(loaded.get(name, []))][:1]:
            rows, feature = list(loaded[hub_split]), loaded[hub_split].features.get(column)
            if classes := getattr(getattr(feature, "feature", feature), "names", None):
                rows = [row | {column: _named(row[column], classes)} for row in rows]
            if split != "test" or any(row.get(column) not in (None, -1) for row in rows):
                where = f"{own.dataset}, {hub_split} row"
                splits[split] = [(f"{where} {n}", row) for n, row in enumerate(rows, 1)]
    if "train" not in splits:
        known = ", ".join(map(repr, loaded))
        raise UserError(f"dataset {own.dataset}: no rows in a split 'train'; there is {known}.")
    return splits


def _named(label: Any, names: Sequence[str]) -> Any:
    """Returns the name of the class with an index, or those of a list; None if it is hidden."""
    if isinstance(label, list):
        return [_named(item, names) for item in label]
    return None if label is None or label < 0 else names[label]


def _task(own: OwnDataSettings, fields: Names, kind: LabelType, labels: dict[str, Any]) -> Task:
    """Returns the task that rows with these labels of each split are."""
    train = labels["train"]
    others = [label for split, column in labels.items() if split != "train" for label in column]
    classes = class_names(str(own.source), kind, train, others)
    more = ["matthews", "f1"][: 2 if len(classes) == 2 else 1] if kind == "class" else []
    possible = (*OWN_METRICS[kind], *more)
    if own.metric and own.metric not in possible:
        known = ", ".join(possible)
        raise UserError(f"--metric {own.metric}: labels of type {kind} have the metrics {known}.")
    return Task(
        own.name,
        tuple(fields),
        classes,
        tuple(dict.fromkeys((own.metric or OWN_METRICS[kind][0], *OWN_METRICS[kind]))),
        label_scale=1.0 if classes else max(map(abs, train)),
        multi_label=kind == "multi_label",
        passage=0 if len(fields) == 1 else None,
    )


def _note(task: Task) -> str:
    """Returns what was found out about the labels, in words."""
    if task.is_regression:
        return f"labels are scores: a regression, trained on label/{task.label_scale:g}"
    what = "labels, any number a row" if task.multi_label else "classes"
    note = f"{len(task.labels)} {what}: {', '.join(task.labels)}"
    if all(label.isdecimal() for label in task.labels):
        note += " (whole numbers are classes; --label_type score makes them scores)"
    return note + (f"; f1 is that of {task.labels[1]!r}" if "f1" in task.metrics else "")
