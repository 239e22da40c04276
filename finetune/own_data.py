"""Reads a user's own labelled rows, from files or a Hub data set, and finds out what task they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.subsets import hold_out
from finetune.tables import RawRows, Row, load_hub, read_table
from finetune.tasks import OWN_METRICS, Example, LabelType, Task, TaskData, passage_id
from multicls.console import count
from multicls.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from finetune.settings import OwnDataSettings

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
    groups = requested_columns(own.text_column) if own.text_column else TEXTS
    for split, rows in splits.items():
        groups = [find_columns(*rows[0], groups)]
        find_columns(*rows[0], [[column]], "label")
        splits[split] = with_texts(rows, groups[0])
        if empty := len(rows) - len(splits[split]):
            notes.append(f"{count(empty, f'{split} row')} without a text left out")
        broken = [where for where, row in rows if "\n" in "".join(map(str, row.values()))]
        if broken and str(files[split]).endswith(".csv"):
            what = f"{count(len(broken), f'{split} row')} with line breaks"
            notes.append(f"{what}, the first up to {broken[0]}: texts, or torn quotes?")
    fields = groups[0]
    kind = _label_type(own, [row.get(column) for rows in splits.values() for _, row in rows])
    labels = {
        split: [read_label(kind, row.get(column), where) for where, row in rows]
        for split, rows in splits.items()
    }
    task = _task(own, fields, kind, labels)
    notes.append(_note(task))
    examples = {split: list[Example]() for split in splits}
    for split, rows in splits.items():
        for number, ((where, row), label) in enumerate(zip(rows, labels[split], strict=True)):
            key = f"{split}:{number}"
            examples[split].append(example_of(task, fields, row, where, key, label))
    if "dev" not in examples:
        train = examples["train"]
        classes = [0.0 if task.is_regression else example.label for example in train]
        texts = [example.texts for example in train]
        dev = hold_out(range(len(train)), classes, texts, own.dev_share, "dev")
        examples["train"] = [example for row, example in enumerate(train) if row not in dev]
        examples["dev"] = [train[row] for row in sorted(dev)]
        total = count(len(train), "training row")
        notes.append(f"dev is {len(dev)} of the {total} (dev_share {own.dev_share:g})")
    return TaskData(task, **examples, notes=notes)


def requested_columns(text_column: str) -> Sequence[Sequence[str]]:
    """Returns the columns that `--text_column` may mean: A,B for a pair, or A."""
    names = [name.strip() for name in text_column.split(",")]
    return [names, [text_column]] if len(names) == 2 else [[text_column]]


def find_columns(
    where: str, row: Row, groups: Sequence[Sequence[str]], what: str = "text"
) -> Sequence[str]:
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


def with_texts(rows: RawRows, fields: Sequence[str]) -> RawRows:
    """Returns the rows that have a text in each of the columns.

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
    return full


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
    names = (label,) if isinstance(label, str) else label if isinstance(label, tuple) else ()
    for name in names:
        if name not in task.labels:
            hint = did_you_mean(name, task.labels)
            raise UserError(f"{where}: label {name!r} is not in the training rows.{hint}")
    marks: tuple[float, ...] = ()
    if isinstance(label, tuple):
        label, marks = 0.0, tuple(float(name in names) for name in task.labels)
    elif names:
        label = task.labels.index(label)
    texts = tuple(str(row[column]) for column in fields)
    passage = passage_id(texts[0]) if task.passage == 0 else ""
    return Example(key, texts, label, labels=marks, passage=passage)


def read_label(kind: LabelType, value: Any, where: str) -> Any:
    """Returns the score, the name of the class, or the tuple of names that a cell holds; a list may be empty.

    Raises:
        UserError: It holds none.
    """
    if kind == "multi_label" and isinstance(value, list):
        return tuple(read_label("class", name, where) for name in value)
    is_text = value is not None and value == value and not isinstance(value, (dict, list, bytes))
    text = str(value).strip() if is_text else ""
    if not text or kind == "multi_label":
        what = "a list of labels" if kind == "multi_label" else "a label"
        raise UserError(f"{where}: the label is {value!r}; it must be {what} (label_type {kind}).")
    if kind == "class":  # 1.0 in a column of numbers is 1
        return str(int(value)) if isinstance(value, float) and value.is_integer() else text
    score = _number(value)
    if score is None or not math.isfinite(score):
        hint = "Leave the row out, or set --label_type class if the labels are names."
        raise UserError(f"{where}: label {value!r} is not a finite number. {hint}")
    return score


def _hub_splits(own: OwnDataSettings) -> dict[str, RawRows]:
    """Returns the rows of a data set of the Hub by split, with the names of labels that it holds as indices."""
    name, _, configuration = str(own.dataset).partition(":")
    loaded = load_hub(name, name=configuration or None)
    column, splits = own.label_column, dict[str, RawRows]()
    for split, names in HUB_SPLITS.items():
        hub_split = next((name for name in names if len(loaded.get(name, []))), None)
        if hub_split is None:
            continue
        rows, feature = list(loaded[hub_split]), loaded[hub_split].features.get(column)
        if classes := getattr(getattr(feature, "feature", feature), "names", None):
            rows = [row | {column: _named(row[column], classes)} for row in rows]
        if split != "test" or any(row.get(column) not in (None, -1) for row in rows):
            splits[split] = [
                (f"{own.dataset}, {hub_split} row {n}", row) for n, row in enumerate(rows, 1)
            ]
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


def _task(
    own: OwnDataSettings, fields: Sequence[str], kind: LabelType, labels: Mapping[str, list[Any]]
) -> Task:
    """Returns the task that rows with these labels of each split are."""
    train, everything = labels["train"], [label for split in labels.values() for label in split]
    names = {name for label in train for name in (label if kind == "multi_label" else (label,))}
    if len(names) < 2:
        raise UserError(f"{own.source}: all labels are alike; a task needs two classes or scores.")
    if kind == "class" and len(set(everything)) == len(everything) > FEW:
        raise UserError(
            f"{own.source}: each row has another label ({', '.join(sorted(names)[:3])}, ...), so nothing can be "
            "learned. Is it an id or a text? Name the column of the label by --label_column, or set --label_type "
            "score if its numbers are scores."
        )
    classes = () if kind == "score" else tuple(sorted(names, key=_by_value))
    extra = {"class": ("matthews", "f1") if len(classes) == 2 else ("matthews",)}
    possible = (*OWN_METRICS[kind], *extra.get(kind, ()))
    if own.metric and own.metric not in possible:
        known = ", ".join(possible)
        raise UserError(f"--metric {own.metric}: labels of type {kind} have the metrics {known}.")
    return Task(
        own.name,
        tuple(fields),
        classes,
        tuple(dict.fromkeys(filter(None, (own.metric, *OWN_METRICS[kind])))),
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
