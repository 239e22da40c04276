"""Reads a user's own labelled rows from files, and finds out what task they are."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from finetune.settings import OwnDataSettings, RowSettings
from finetune.subsets import hold_out, missing_classes, strata
from finetune.tasks import Array, Example, Task, TaskData, first_of, passage_id
from multicls.console import count
from multicls.errors import UserError, did_you_mean
from multicls.evaluation import Rows
from multicls.labels import (
    LabelType,
    Names,
    class_names,
    find_columns,
    hint_on_numbers,
    is_empty,
    plain,
    read_splits,
    texts_of,
    with_texts,
)
from multicls.measures import METRICS
from multicls.systems import Scale
from multicls.tables import RawRows, Row, read_table

RARE = 0.8  # share of the most frequent class above which macro-F1 is the main metric
NEAR = 0.8  # share of equal pairs of words from which on texts are nearly equal
FEWEST_PAIRS = 6  # of words, in a text that may be nearly equal to another
MOST_COMPARED = 3000  # texts
LARGEST_UNIT = 0.5  # share of the rows that equal texts may join; above it, they are common phrases

Examples = dict[str, list[Example]]


def load_own(own: OwnDataSettings) -> TaskData:
    """Reads the rows, finds out what task they are, and divides them; what does not fit is a `UserError`.

    Rows with an empty text are left out and counted. Without dev rows, `dev_share` of the training rows become dev:
    by class, always the same ones. Rows that share a text or a group stay on one side.
    """
    files = {"train": own.train_file, "dev": own.dev_file, "test": own.test_file}
    task, examples, notes = read_own(own, files)
    train, test = examples["train"], examples.get("test", [])
    if (dev := examples.get("dev")) is None:
        units = zip(strata(task, train), (row.unit for row in train), strict=True)
        held = hold_out(dict(enumerate(units)), own.dev_share, "dev")
        what = f"{len(held)} of the {count(len(train), 'training row')}"
        notes.append(f"dev is {what} (dev_share {own.dev_share:g})")
        dev = [train[row] for row in sorted(held)]
        train = [row for number, row in enumerate(train) if number not in held]
    notes += missing_classes(task, train, dev, "dev")
    return TaskData(task, train, dev, test, notes=notes)


def read_own(own: RowSettings, files: Mapping[str, str | None]) -> tuple[Task, Examples, list[str]]:
    """Returns the task that own rows are, the examples of each split that has a file, and notes on the rows."""
    read = read_splits({split: name for split, name in files.items() if name}, own)
    notes = read.notes + _notes_on_groups(own, read.rows)
    task = _task(own, read.fields, read.kind, read.labels)
    examples: Examples = defaultdict(list)
    for split, rows in read.rows.items():
        for number, ((where, row), label) in enumerate(zip(rows, read.labels[split], strict=True)):
            example = example_of(task, read.fields, row, where, f"{split}:{number}", label)
            group = row.get(own.group_column or "")
            passage = "" if is_empty(group) else str(group)
            examples[split].append(replace(example, passage=passage))
    examples, more = _with_units(task, examples)
    return task, examples, [*notes, _note(task), *more, *leak_notes(examples)]


def _notes_on_groups(own: RowSettings, splits: Mapping[str, RawRows]) -> list[str]:
    """Returns notes on the splits without the column of groups, which the training rows must have."""
    if not own.group_column:
        return []
    find_columns(*splits["train"][0], [[own.group_column]], "group")
    return [
        f"{split} rows have no column {own.group_column!r}: their groups are not known"
        for split, rows in splits.items()
        if own.group_column not in rows[0][1]
    ]


def labelled_rows(
    task: Task, examples: Sequence[Example], features: Mapping[str, Array] | None = None
) -> Rows:
    """Returns examples as the rows that systems read."""
    kind: LabelType = "multi_label" if task.multi_label else "class"
    targets = np.array([row.labels or row.label for row in examples], dtype=float)
    if task.is_regression:
        kind = "score"
    elif not task.multi_label:
        targets = targets.astype(int)
    _, units = np.unique([row.unit for row in examples], return_inverse=True)
    return Rows(
        kind,
        targets,
        [row.texts for row in examples],
        features or {},
        units,
        task.labels,
        task.metrics[0],
        [row.place for row in examples],
    )


def unlabelled_examples(own: RowSettings, task: Task, new_file: str | None) -> list[Example]:
    """Returns the rows of `new_file`, and those of the training file that were dropped since they have no label."""
    found = list[Example]()
    for path in (new_file, own.train_file if own.unlabelled == "drop" else None):
        rows = read_table(Path(path)) if path else []
        if path == own.train_file:
            rows = [(at, row) for at, row in rows if is_empty(row.get(own.label_column))]
        if rows:
            rows, _ = with_texts(rows, find_columns(*rows[0], [task.fields]), "row")
        marks = (0.0,) * len(task.labels) if task.multi_label else ()
        found += [
            Example(f"new:{at}", texts_of(row, task.fields, at), 0.0, labels=marks, place=at)
            for at, row in rows
        ]
    return found


def predictions_of_file(
    path: Path, own: RowSettings, task: Task, examples: Sequence[Example], labelled: int
) -> Array:
    """Returns outputs (N, C) that a file holds as labels of the same texts, such as a large language model's.

    Raises:
        UserError: One of the first `labelled` examples is not in the file, or its label is not one of the task.
    """
    kind: LabelType = "multi_label" if task.multi_label else "class"
    kind = "score" if task.is_regression else kind
    changes = {"text_column": ",".join(task.fields), "label_type": kind}
    read = read_splits({"": path}, own.model_copy(update=changes))
    labels = dict[Names, Example]()
    for (where, row), label in zip(read.rows[""], read.labels[""], strict=True):
        example = example_of(task, read.fields, row, where, where, label)
        labels[example.texts] = example
    outputs = np.zeros((len(examples), task.num_labels))
    for number, example in enumerate(examples):
        predicted = labels.get(example.texts)
        if predicted is None:
            if number < labelled:
                raise UserError(f"{path}: holds no prediction for the text of {example.place}.")
            continue
        if task.is_regression:
            outputs[number] = predicted.label
        elif task.multi_label:
            outputs[number] = 2 * np.array(predicted.labels) - 1
        else:
            outputs[number, int(predicted.label)] = 1.0
    return outputs


def example_of(
    task: Task, fields: Sequence[str], row: Row, where: str, key: str, label: Any = 0.0
) -> Example:
    """Returns the row at `where` as the example `key`; the label, by `read_label`, must be one of the task's."""
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
    return Example(key, texts, label, labels=marks, place=where)


def _with_units(task: Task, examples: Examples) -> tuple[Examples, list[str]]:
    """Returns the examples with the unit of each as its passage: rows that share a group or a text are one unit.

    A column whose texts join more than half of the rows (beside the largest group) is left out of this, with a note: it
    holds common phrases.
    """
    rows, notes = [row for split in examples.values() for row in split], list[str]()
    texts = [_texts(row) for row in rows]
    near = near_duplicates([" ".join(of) for of in texts])
    cells = [(*of, name, row.passage) for of, name, row in zip(texts, near, rows, strict=True)]
    names = [*map(repr, task.fields), "all columns, nearly equal,"]
    columns, of_group = list(range(len(names))), [len(names)]
    by_group = max(Counter(_units(cells, of_group)).values())
    while len(columns) + any(row.passage for row in rows) > 1:
        largest = max(Counter(_units(cells, columns + of_group)).values())
        if largest - by_group <= max(1, LARGEST_UNIT * (len(rows) - by_group)):
            break
        column = min(columns, key=lambda c: len({row[c] for row in cells}))
        columns.remove(column)
        notes.append(
            f"equal texts in {names[column]} join {largest} of {len(rows)} rows: they may stand on both sides "
            "of a split"
        )
    sizes = Counter(units := _units(cells, columns + of_group))
    passages = (passage_id(rows[unit].id) if sizes[unit] > 1 else "" for unit in units)
    divided = {
        split: [replace(row, passage=next(passages)) for row in of_split]
        for split, of_split in examples.items()
    }
    return divided, notes


def near_duplicates(texts: Sequence[str]) -> list[str]:
    """Returns a name for each text that it shares with nearly equal ones; "" if there are none.

    Texts are nearly equal if they share four in five of their pairs of neighbouring words. Short texts are not, and of
    many texts none are looked for.
    """
    from scipy.cluster.hierarchy import DisjointSet
    from sklearn.feature_extraction.text import HashingVectorizer

    names = [""] * len(texts)
    if len(texts) > MOST_COMPARED:
        return names
    options: Any = {"binary": True, "norm": None, "alternate_sign": False}
    pairs = HashingVectorizer(ngram_range=(2, 2), token_pattern=r"(?u)\b\w+\b", **options)
    marks = pairs.transform(texts)
    sizes = np.asarray(marks.sum(axis=1)).ravel()
    common = (marks @ marks.T).tocoo()
    either = sizes[common.row] + sizes[common.col] - common.data
    is_near = (common.data >= NEAR * either) & (common.row < common.col)
    is_near &= np.minimum(sizes[common.row], sizes[common.col]) >= FEWEST_PAIRS
    sets = DisjointSet(range(len(texts)))
    for first, second in zip(common.row[is_near], common.col[is_near], strict=True):
        sets.merge(int(first), int(second))
    for members in sets.subsets():
        if len(members) > 1:
            for row in members:
                names[row] = f"near {min(members)}"
    return names


def _units(cells: Sequence[Names], columns: Sequence[int]) -> list[int]:
    """Returns the unit of each row, the index of its first row.

    Rows that share a cell of one of these columns, empty ones apart, are connected, also by others.
    """
    from scipy.cluster.hierarchy import DisjointSet  # after --help

    units, owner = DisjointSet(range(len(cells))), dict[tuple[int, str], int]()
    for row, of_row in enumerate(cells):
        for column in columns:
            if of_row[column]:
                units.merge(row, owner.setdefault((column, of_row[column]), row))
    firsts = {row: min(unit) for unit in units.subsets() for row in unit}
    return [firsts[row] for row in range(len(cells))]


def _texts(row: Example) -> tuple[str, ...]:
    """Returns what rows of equal texts share, whatever the case and blanks of these."""
    return tuple(map(plain, row.texts))


def leak_notes(examples: Mapping[str, Sequence[Example]]) -> list[str]:
    """Returns notes on rows that stand in two splits or share a text or group, and on texts with two labels."""
    notes, train = list[str](), defaultdict[Names, dict[Any, str]](dict)  # places by label
    for row in examples["train"]:
        train[_texts(row)][row.label, row.labels] = row.place
    for other, split in (("train", "dev"), ("train", "test"), ("dev", "test")):
        here, there = examples.get(split, []), examples.get(other, [])
        places = {_texts(row): row.place for row in there}
        copies = [row for row in here if _texts(row) in places]
        units = {row.passage for row in there} - {""}
        related = [row for row in here if row.passage in units and _texts(row) not in places]
        of = f"of the {count(len(here), f'{split} row')}"
        if copies:
            first = f"{copies[0].place}, also {places[_texts(copies[0])]}"
            notes.append(
                f"{len(copies)} {of} stand in {other}, too (the first: {first}): scores on them are too high"
            )
        if related:
            notes.append(
                f"{len(related)} {of} share a text, nearly, or a group with {other} (the first: {related[0].place}): "
                "scores on them may be too high"
            )
    several = [list(places.values()) for places in train.values() if len(places) > 1]
    if several:
        first, second, *_ = several[0]
        what = f"{count(len(several), 'text')} of train with two labels or more"
        notes.append(f"{what}, the first: {first} and {second}")
    return notes


def _task(own: RowSettings, fields: Names, kind: LabelType, labels: dict[str, Any]) -> Task:
    """Returns the task that rows with these labels of each split are."""
    train = labels["train"]
    others = [label for split, column in labels.items() if split != "train" for label in column]
    classes = class_names(str(own.train_file), kind, train, others)
    more = ["matthews", "f1"][: 2 if len(classes) == 2 else 1] if kind == "class" else []
    possible = (*METRICS[kind], *more)
    main = METRICS[kind][0]
    if kind == "class" and max(Counter(train).values()) > RARE * len(train):
        main = "macro_f1"  # accuracy would not see the rare classes
    if own.metric and own.metric not in possible:
        known = ", ".join(possible)
        raise UserError(f"--metric {own.metric}: labels of type {kind} have the metrics {known}.")
    return Task(
        own.name,
        tuple(fields),
        classes,
        tuple(dict.fromkeys((own.metric or main, *METRICS[kind]))),
        **(_standardised(train) if kind == "score" else {}),
        multi_label=kind == "multi_label",
    )


def _standardised(scores: Sequence[float]) -> dict[str, Any]:
    """Returns the fields of a task that standardise its scores by the training rows."""
    scale = Scale.of(np.array(scores))
    fields = {"label_shift": scale.mean, "label_scale": scale.spread}
    return fields | ({"label_range": (scale.low, scale.high)} if scale.high < np.inf else {})


def _note(task: Task) -> str:
    """Returns what was found out about the labels, in words."""
    if task.is_regression:
        ends = " to ".join(f"{end:g}" for end in task.label_range)
        outliers = f"; systems take labels outside {ends} as its ends" if ends else ""
        return f"labels are scores: a regression{outliers}"
    what = "labels, any number a row" if task.multi_label else "classes"
    hint = "" if task.multi_label else hint_on_numbers(task.labels)
    note = f"{len(task.labels):,} {what}: {first_of(task.labels)}{hint}"
    return note + (f"; f1 is that of {task.labels[1]!r}" if "f1" in task.metrics else "")
