"""Reads a user's own labelled rows, from files or a Hub data set, and finds out what task they are."""

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from finetune.settings import OwnDataSettings
from finetune.subsets import hold_out
from finetune.tables import RawRows, Row, load_hub, read_table
from finetune.tasks import OWN_METRICS, Example, LabelType, Task, TaskData, passage_id
from multicls.console import count
from multicls.errors import UserError, did_you_mean

Names = Sequence[str]
TEXTS = (("text",), ("text1", "text2"), ("sentence1", "sentence2"))
FEW = 10  # rows, each of which may have a label of its own
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
    kind = _label_type(own, [row.get(column) for rows in splits.values() for _, row in rows])
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


def find_columns(where: str, row: Row, groups: Sequence[Names], what: str = "text") -> Names:
    """Returns the first of the groups of columns that the row at `where` has.

    Raises:
        UserError: It has none of them.
    """
    for names in groups:
        if set(names) <= set(row):
            return names
    columns = " or ".join(" and ".join(map(repr, names)) for names in groups)
    missing = next(name for name in groups[0] if name not in row)
    raise UserError(
        f"{where}: no column {columns} for the {what}; the columns (the first line of a table) are "
        f"{', '.join(map(repr, row))}.{did_you_mean(missing, row, listed=False)} Name it by --{what}_column."
    )


def with_texts(rows: RawRows, fields: Sequence[str], what: str) -> tuple[RawRows, list[str]]:
    """Returns the rows that have a text in each of the columns, and notes on the others and on suspicious rows.

    Args:
        what: the noun for a row in notes.

    Raises:
        UserError: None has.
    """
    full = [
        (where, row)
        for where, row in rows
        if all(row.get(name) is not None and str(row[name]).strip() for name in fields)
    ]
    if not full:
        raise UserError(f"{rows[0][0]}: no row has a text.")
    notes = list[str]()
    if empty := len(rows) - len(full):
        notes.append(f"{count(empty, what)} without a text left out")
    broken = [at for at, row in rows if ".csv:" in at and "\n" in "".join(map(str, row.values()))]
    if broken:
        breaks = f"{count(len(broken), what)} with line breaks, the first up to {broken[0]}"
        notes.append(f"{breaks}: texts, or torn quotes?")
    return full, notes


def example_of(
    task: Task, fields: Sequence[str], row: Row, where: str, key: str, label: Any = math.nan
) -> Example:
    """Returns the row at `where` as the example `key`, with the texts of the columns `fields`.

    Args:
        label: made by `read_label`; NaN: hidden.

    Raises:
        UserError: A cell is no text, or the task has no such label.
    """
    for column in fields:
        if isinstance(row[column], (dict, list, bytes)):
            raise UserError(f"{where}: column {column!r} is {row[column]!r}; it must be a text.")
    names, marks = label if isinstance(label, tuple) else (), tuple[float, ...]()
    for name in names:
        if name not in task.labels:
            hint = did_you_mean(name, task.labels)
            raise UserError(f"{where}: label {name!r} is not in the training rows.{hint}")
    if task.multi_label:
        label, marks = 0.0, tuple(float(name in names) for name in task.labels)
    elif names:
        label = task.labels.index(names[0])
    texts = tuple(str(row[column]) for column in fields)
    passage = passage_id(texts[0]) if task.passage == 0 else ""
    return Example(key, texts, label, labels=marks, passage=passage)


def read_label(kind: LabelType, cell: Any, where: str) -> Any:
    """Returns the score, or the tuple of names of classes, that a cell holds; a list may be empty.

    Raises:
        UserError: It holds none.
    """
    cells = cell if kind == "multi_label" and isinstance(cell, list) else [cell]
    names = tuple(map(_name, cells))
    if "" in names or (kind == "multi_label" and cells is not cell):
        what = "a list of labels" if kind == "multi_label" else "a label"
        raise UserError(f"{where}: the label is {cell!r}; it must be {what} (label_type {kind}).")
    if kind != "score":
        return names
    score = _number(cell)
    if score is None or not math.isfinite(score):
        hint = "Leave the row out, or set --label_type class if the labels are names."
        raise UserError(f"{where}: label {cell!r} is not a finite number. {hint}")
    return score


def _name(cell: Any) -> str:
    """Returns the name of a class, "" if the cell holds none; 1.0 in a column of numbers is 1."""
    if isinstance(cell, float):
        return str(int(cell)) if cell.is_integer() else str(cell) * (cell == cell)
    return "" if cell is None or isinstance(cell, (dict, list, bytes)) else str(cell).strip()


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


def _label_type(own: OwnDataSettings, cells: Sequence[Any]) -> LabelType:
    """Returns how to read the labels: "auto" takes lists as several labels, and fractions as scores."""
    if own.label_type != "auto":
        return own.label_type
    if any(isinstance(cell, list) for cell in cells):
        return "multi_label"
    numbers = [number for cell in cells if (number := _number(cell)) is not None]
    all_whole = all(number.is_integer() for number in numbers)
    return "class" if all_whole or len(numbers) < len(cells) else "score"


def _task(own: OwnDataSettings, fields: Names, kind: LabelType, labels: dict[str, Any]) -> Task:
    """Returns the task that rows with these labels of each split are."""
    train, everything = labels["train"], [label for split in labels.values() for label in split]
    names = set(train) if kind == "score" else set(chain.from_iterable(train))
    if len(names) < 2:
        raise UserError(f"{own.source}: all labels are alike; a task needs two classes or scores.")
    if kind == "class" and len(set(everything)) == len(everything) > FEW:
        raise UserError(
            f"{own.source}: each row has another label ({', '.join(sorted(names)[:3])}, ...). Name the column of "
            "classes by --label_column, or set --label_type score if these are scores."
        )
    classes = () if kind == "score" else tuple(sorted(names, key=_by_value))
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


def _by_value(name: str) -> tuple[float, str]:
    """Returns the key that sorts classes: numbers by their value, then names."""
    number = _number(name)
    return number if number is not None and math.isfinite(number) else math.inf, name


def _number(value: Any) -> float | None:
    """Returns what `float` reads, also infinity and NaN."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
