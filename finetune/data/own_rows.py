"""Reads a user's own labelled rows, from files or a Hub data set, and finds out what task they are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from finetune.data.examples import LabeledExample, TaskData, passage_id
from finetune.data.splits import hold_out
from finetune.data.tables import RawRows, Row, read_table
from finetune.data.tasks import SHOWN, Task, label_list
from multicls.errors import UserError, did_you_mean, first_line
from multicls.words import counted

if TYPE_CHECKING:
    from finetune.settings import OwnDataSettings

LabelType = Literal["class", "multi_label", "score"]
Splits = dict[str, RawRows]  # rows of train, dev and test; dev and test may be missing
TEXTS = (("text",), ("text1", "text2"), ("sentence1", "sentence2"))
JOINTS = ("|", ";", ",")  # what separates the labels of a cell
METRICS = {
    "class": ("acc", "macro_f1", "matthews", "f1"),
    "multi_label": ("micro_f1", "macro_f1", "exact_match"),
    "score": ("spearman", "pearson"),
}
DEFAULTS = {"class": ("acc", "macro_f1")}  # all of METRICS for the others
FEW = 10  # rows, each of which may have a label of its own
HUB_SPLITS = {"train": ("train",), "dev": ("validation", "valid", "val", "dev"), "test": ("test",)}


@dataclass(frozen=True)
class LabelFormat:
    """How a column of labels is to be read."""

    kind: LabelType
    column: str
    names: tuple[str, ...] = ()  # of the classes that the labels are indices of; empty: labels are names themselves
    joint: str = ""  # what separates several labels of a cell; "" if nothing does
    whole: bool = False  # labels are whole numbers: 1.0 is the class 1

    def read(self, row: Row, where: str) -> Any:
        """Returns the score, the name of the class, or the tuple of names.

        Raises:
            UserError: The cell is empty or no such label; only a row of several labels may have none.
        """
        value = row.get(self.column)
        if self.kind == "multi_label" and (isinstance(value, list) or value == ""):
            return tuple(self._name(one, where) for one in value)
        if value is None or value != value or isinstance(value, (dict, list)) or not str(value).strip():
            raise UserError(f"{where}: column {self.column!r} is {value!r}; it must be a label.")
        if self.kind == "multi_label":
            parts = str(value).split(self.joint) if self.joint else [value]
            return tuple(self._name(part, where) for part in parts if str(part).strip())
        if self.kind == "class":
            return self._name(value, where)
        if not _is_number(value) or not math.isfinite(float(value)):
            raise UserError(
                f"{where}: label {value!r} is not a finite number. Leave the row out, or give --label_type class if "
                "the labels are names."
            )
        return float(value)

    def _name(self, value: Any, where: str) -> str:
        if not self.names:
            text = str(value).strip()
            is_code = not self.whole or text.isdigit() or not _is_number(text)  # 01 and 1 are two classes
            return text if is_code else str(int(float(text)))
        if not isinstance(value, int) or not 0 <= value < len(self.names):
            raise UserError(f"{where}: label {value!r} is no index of the {len(self.names)} classes.")
        return self.names[value]


def read_own(own: OwnDataSettings) -> tuple[Task, TaskData]:
    """Reads the rows and finds out what task they are.

    Without dev rows, `dev_share` of the train rows become dev: by class, always the same ones, equal texts together.

    Raises:
        UserError: A file, column or value is missing, dev or test hold a label that train lacks, or the metric does
            not fit the labels.
    """
    splits, names = (_from_files(own), ()) if own.train_file else _from_hub(own)  # labels in files are names
    fields = text_columns(str(own.source), splits["train"][0][1], own.text_column)
    notes = _check_label_column(own, splits)
    cells = [row.get(own.label_column) for rows in splits.values() for _, row in rows]
    form = label_format(own.label_column, own.label_type, cells, names)
    labels = {split: [form.read(row, where) for where, row in rows] for split, rows in splits.items()}
    task = _task(own, fields, form, labels)
    notes += _notes_about(task, form, labels["train"])
    found = {split: [example_of(task, fields, row, where, f"{split}:{number}", labels[split][number])
                     for number, (where, row) in enumerate(rows)] for split, rows in splits.items()}  # fmt: skip
    train, dev = found["train"], found.get("dev", [])
    if not dev:
        train, dev = _split(task, train, own.dev_share)
        notes.append(f"dev is {len(dev)} of the {len(train) + len(dev)} train rows (dev_share {own.dev_share:g})")
    return task, TaskData(train, dev, notes, found.get("test", []))


def own_settings(about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of own rows that a saved model's entry on its task tells."""
    return {
        "task_name": about["name"].removeprefix("own_"),
        "text_column": ",".join(about.get("text_columns") or ()) or None,
        "label_column": about.get("label_column") or "label",
        "label_type": "multi_label" if about.get("multi_label") else "score" if about["is_regression"] else "class",
    }


def text_columns(source: str, row: Row, asked: str | None) -> tuple[str, ...]:
    """Returns the columns of the texts: those asked for ("A", or "A,B" for pairs), or the first usual ones that exist.

    Raises:
        UserError: They are not there.
    """
    if asked:
        names = (asked,) if asked in row else tuple(name.strip() for name in asked.split(","))
        if len(names) > 2:
            raise UserError(f"--text_column {asked}: give one column, or two for pairs of texts.")
        if missing := [name for name in names if name not in row]:
            hint = "Name the column by --text_column."
            raise UserError(*(f"{source}: no column {name!r}; {_columns(name, row)} {hint}" for name in missing))
        return names
    for names in TEXTS:
        if set(names) <= set(row):
            return names
    wanted = " or ".join(" and ".join(map(repr, names)) for names in TEXTS)
    raise UserError(
        f"{source}: no column {wanted} for the text; {_columns('text', row)} Name the column by --text_column, or two "
        "by --text_column text1,text2."
    )


def nearest_column(name: str, row: Row) -> str:
    """Returns `" Did you mean 'x'?"` with the column nearest to `name`, or what else helps to find it."""
    plain = {column.strip().lower(): column for column in row}
    if same := plain.get(name.strip().lower()):
        return f" Did you mean {same!r}? Case and blanks count."
    looks_like_a_row = any(len(column.split()) > 3 for column in row)
    hint = " These look like a row: put a line with the names of the columns above it." * looks_like_a_row
    return did_you_mean(name, row, listed=False) or hint


def example_of(
    task: Task, fields: Sequence[str], row: Row, where: str, name: str, label: Any = math.nan
) -> LabeledExample:
    """Returns the row that stands at `where` as the example `name` of the task, with the texts of the columns `fields`.

    Args:
        label: name of the class, names of the classes, or score; NaN: hidden.

    Raises:
        UserError: A text is missing, or the task has no such label.
    """
    texts = tuple(_text(row, column, where) for column in fields)
    passage = passage_id(texts[0]) if task.passage == 0 else ""
    if task.is_regression or label is math.nan:
        return LabeledExample(name, texts, label, passage=passage)
    given = label if task.multi_label else (label,)
    if unknown := [one for one in given if one not in task.labels]:
        hint = did_you_mean(unknown[0], task.labels) if len(task.labels) > SHOWN else ""
        raise UserError(f"{where}: label {unknown[0]!r} is none of train's: {label_list(task.labels)}.{hint}")
    if not task.multi_label:
        return LabeledExample(name, texts, task.labels.index(label), passage=passage)
    marks = tuple(float(one in given) for one in task.labels)
    return LabeledExample(name, texts, 0.0, labels=marks, passage=passage)


def label_format(column: str, asked: str, cells: Sequence[Any], names: tuple[str, ...] = ()) -> LabelFormat:
    """Returns how to read the labels `cells` of a column.

    Args:
        asked: "class", "multi_label", "score" or "auto": lists are several labels, numbers that are not all whole are
            scores, all else are classes.
        names: names of the classes, if the labels are their indices.

    Raises:
        UserError: The labels are lists, but not read as several labels.
    """
    lists = any(isinstance(cell, list) for cell in cells)
    numbers = all(map(_is_number, cells))
    whole = numbers and all(float(cell).is_integer() for cell in cells)
    kind: Any = asked
    if asked == "auto":
        kind = "multi_label" if lists else "score" if numbers and not whole else "class"
    elif lists and asked != "multi_label":
        raise UserError(f"column {column!r} holds lists of labels: give --label_type multi_label, not {asked}.")
    joint = next((mark for mark in JOINTS if any(mark in str(cell) for cell in cells)), "")
    return LabelFormat(kind, column, names, joint if kind == "multi_label" and not lists else "", whole)


def _from_files(own: OwnDataSettings) -> Splits:
    files = {"train": own.train_file, "dev": own.dev_file, "test": own.test_file}
    texts = [own.text_column.split(",")] if own.text_column else TEXTS
    wanted = [[*(name.strip() for name in names), own.label_column] for names in texts]
    return {split: read_table(Path(name), wanted) for split, name in files.items() if name}


def _from_hub(own: OwnDataSettings) -> tuple[Splits, tuple[str, ...]]:
    """Returns the rows of a data set of the Hub or a local folder of one, and names if its labels are their indices."""
    name, _, configuration = str(own.dataset).partition(":")
    try:
        import datasets

        loaded = datasets.load_dataset(name, configuration or None)
    except Exception as error:  # datasets, the hub client and the sockets below raise kinds of their own
        raise UserError(f"--dataset {own.dataset}: cannot be loaded: {first_line(error)}") from None
    known = {ours: next((name for name in names if name in loaded), None) for ours, names in HUB_SPLITS.items()}
    if known["train"] is None:
        raise UserError(f"--dataset {own.dataset}: no split 'train'; there is {', '.join(map(repr, loaded))}.")
    splits = {ours: [(f"{own.dataset}, {split} row {number}", row) for number, row in enumerate(loaded[split], start=1)]
              for ours, split in known.items() if split}  # fmt: skip
    feature: Any = loaded[known["train"]].features.get(own.label_column)
    feature = getattr(feature, "feature", feature)  # of a list
    if not splits["train"]:
        raise UserError(f"--dataset {own.dataset}: the split 'train' has no rows.")
    return splits, tuple(getattr(feature, "names", None) or ())


def _check_label_column(own: OwnDataSettings, splits: Splits) -> list[str]:
    """Checks that all splits have labels; leaves out a Hub data set's test split that has none, and returns a note."""
    column, notes = own.label_column, []
    if own.dataset and "test" in splits and all(row.get(column) in (None, -1) for _, row in splits["test"]):
        del splits["test"]
        notes.append("the test split has no labels: left out")
    for rows in splits.values():
        where, row = rows[0]
        if column not in row:
            text = f"{where}: no column {column!r} for the label; {_columns(column, row)}"
            raise UserError(f"{text} Name it by --label_column.")
    return notes


def _task(own: OwnDataSettings, fields: tuple[str, ...], form: LabelFormat, labels: Mapping[str, list[Any]]) -> Task:
    """Returns the task that rows with these labels of each split are."""
    classes: Sequence[str] = ()
    scale = 1.0
    if form.kind == "score":
        scale = max(map(abs, labels["train"])) or 1.0
    else:
        many = form.kind == "multi_label"
        given, dev = (Counter(one for label in labels.get(split, ()) for one in (label if many else (label,)))
                      for split in ("train", "dev"))  # fmt: skip
        classes = [name for name in form.names if name in given] or sorted(
            given, key=lambda name: (int(name), name) if form.whole else (0, name)
        )
        if len(classes) < 2:
            what = f"every label is {classes[0]!r}" if classes else "no row has a label"
            raise UserError(f"{own.source}: {what}; a task needs two classes or scores.")
        one_shot = dev.keys() <= given.keys() and dev.total() > len(dev)  # ids do not repeat in dev
        if len(classes) == given.total() > FEW and not one_shot:
            hint = ", or give --label_type score if its numbers are scores" if form.whole else ""
            raise UserError(
                f"{own.source}: column {own.label_column!r} has another label in each of the {len(labels['train'])} "
                f"train rows ({label_list(classes[:3])}, ...), so nothing can be learned from it. Is it an id or a "
                f"text? Name the column of the label by --label_column{hint}."
            )
    return Task(
        own.name, tuple((name,) for name in fields), tuple(classes), _metrics(own, form.kind, len(classes)),
        "single" if len(fields) == 1 else "pair", "own", label=(own.label_column,), label_scale=scale,
        multi_label=form.kind == "multi_label", passage=0 if len(fields) == 1 else None,
        about=f"own rows of {own.source}",
    )  # fmt: skip


def _metrics(own: OwnDataSettings, kind: LabelType, classes: int) -> tuple[str, ...]:
    """Returns the metrics of the task, the one asked for first."""
    possible = [name for name in METRICS[kind] if name != "f1" or classes == 2]
    if own.metric and own.metric not in possible:
        raise UserError(
            f"--metric {own.metric}: not a metric of labels of type {kind}"
            f"{f' with {classes} classes' * (kind == 'class')}; possible: {', '.join(possible)}."
        )
    return tuple(dict.fromkeys(filter(None, (own.metric, *DEFAULTS.get(kind, METRICS[kind])))))


def _notes_about(task: Task, form: LabelFormat, labels: Sequence[Any]) -> list[str]:
    """Returns what was found out about the labels, in words."""
    if task.is_regression:
        return [f"labels are scores: a regression, trained on label/{task.label_scale:g}"]
    notes = [f"{len(task.labels)} classes: {label_list(task.labels)}"]
    if form.kind == "multi_label":
        between = f"separated by {form.joint!r} in their cell" if form.joint else "as lists or one in a cell"
        notes = [f"{len(task.labels)} labels, any number a row, {between}: {label_list(task.labels)}"]
        if empty := sum(not label for label in labels):
            notes.append(f"{counted(empty, 'train row')} without a label")
    elif form.whole and not form.names:
        notes[0] += " (whole numbers are classes; --label_type score makes them scores)"
    if "f1" in task.metrics:
        notes.append(f"f1 is that of the class {task.labels[1]!r}")
    return notes


def _split(
    task: Task, examples: list[LabeledExample], share: float
) -> tuple[list[LabeledExample], list[LabeledExample]]:
    """Returns the train rows and `share` of all rows for dev: the same ones whatever is drawn for train later."""
    rows, units = range(len(examples)), [example.texts for example in examples]
    if len(set(units)) < 2:
        raise UserError("the train file holds one text only: give a --dev_file.")
    classes = [0.0 if task.is_regression else example.label for example in examples]
    dev = hold_out(rows, classes, units, share, "dev")
    train = [examples[row] for row in rows if row not in dev]
    if not (task.is_regression or task.multi_label) and len({example.label for example in train}) < 2:
        raise UserError(
            f"--dev_share {share:g}: it leaves {counted(len(train), 'train row')} of one class, of {len(rows)} rows: "
            "add rows, or give a --dev_file."
        )
    return train, [examples[row] for row in rows if row in dev]


def _text(row: Row, column: str, where: str) -> str:
    if column not in row:
        raise UserError(f"{where}: no {column!r}; {_columns(column, row)}")
    value = row[column]
    if value is None or isinstance(value, (dict, list)) or not str(value).strip():
        raise UserError(f"{where}: column {column!r} is {value!r}; it must be a text.")
    return str(value)


def _columns(name: str, row: Row) -> str:
    return f"the columns are {', '.join(map(repr, row))}.{nearest_column(name, row)}"


def _is_number(value: Any) -> bool:
    """Returns True for what `float` reads, also infinity and NaN."""
    try:
        return not isinstance(value, bool) and float(value) is not None
    except (TypeError, ValueError):
        return False
