"""Reads a user's own labelled rows from files, finds out what the labels are, and which rows belong together."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.settings import RowSettings
from finetune.tasks import Array, first_of
from multicls.console import count
from multicls.errors import UserError
from multicls.evaluation import FOLDS, Rows, targets_of
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
from multicls.tables import RawRows, read_table

RARE = 0.8  # share of the most frequent class above which macro-F1 is the main metric
NEAR = 0.8  # share of equal pairs of words from which on texts are nearly equal
FEWEST_PAIRS = 6  # of words, in a text that may be nearly equal to another
MOST_COMPARED = 3000  # texts
LARGEST_UNIT = 0.5  # share of the rows that equal texts may join; above it, they are common phrases


@dataclass(frozen=True)
class OwnRows:
    """A user's labelled rows.

    Attributes:
        fields: Columns of the texts.
        train: Rows to learn from.
        test: Rows that are scored at the end, if there is a file of them.
        notes: What a reader of the results has to know.
    """

    fields: Names
    train: Rows
    test: Rows | None
    notes: list[str]


def read_own(own: RowSettings) -> OwnRows:
    """Reads the training file, and the test file if there is one; what does not fit is a `UserError`.

    Rows with an empty text are left out and counted. Rows that share a text or a group are a unit.
    """
    files = {"train": str(own.train_file)} | ({"test": own.test_file} if own.test_file else {})
    read = read_splits(files, own)
    train, test = read.labels["train"], read.labels.get("test", [])
    classes = class_names(str(own.train_file), read.kind, train, test)
    metric = _metric(own, read.kind, classes, train)
    places = [where for rows in read.rows.values() for where, _ in rows]
    texts = [texts_of(row, read.fields, at) for rows in read.rows.values() for at, row in rows]
    groups, ungrouped = _groups(own, read.rows)
    units, joined = units_of(read.fields, texts, groups)
    whole = Rows(
        read.kind,
        targets_of(read.kind, classes, [*train, *test], places),
        texts,
        units=units,
        classes=classes,
        metric=metric,
        places=places,
    )
    first = whole.take(np.arange(len(train)))
    second = whole.take(np.arange(len(train), len(places))) if test else None
    about = [_note(first), *_rare_classes(first), *joined, *leak_notes(first, second)]
    return OwnRows(read.fields, first, second, [*read.notes, *ungrouped, *about])


def _groups(own: RowSettings, splits: Mapping[str, RawRows]) -> tuple[list[str], list[str]]:
    """Returns the group of each row of all splits, "" if it has none, and notes on splits without the column."""
    column, groups, notes = own.group_column or "", list[str](), list[str]()
    if column:
        find_columns(*splits["train"][0], [[column]], "group")
    for split, rows in splits.items():
        cells = [row.get(column) for _, row in rows]
        groups += ["" if is_empty(cell) else str(cell) for cell in cells]
        if column and column not in rows[0][1]:
            notes.append(f"{split} rows have no column {column!r}: their groups are not known")
    return groups, notes


def unlabelled_rows(own: RowSettings, new_file: str | None, table: OwnRows) -> Rows | None:
    """Returns the rows of `new_file`, and those of the training file that were dropped since they have no label.

    Rows whose texts have a label in the training file are left out.
    """
    found: RawRows = read_table(Path(new_file)) if new_file else []
    if own.unlabelled == "drop":
        rows = read_table(Path(str(own.train_file)))
        found += [(at, row) for at, row in rows if is_empty(row.get(own.label_column))]
    if not found:
        return None
    found, _ = with_texts(found, find_columns(*found[0], [table.fields]), "row")
    like, texts, places = table.train, list[tuple[str, ...]](), list[str]()
    labelled = set(like.texts)
    for at, row in found:
        if (of_row := texts_of(row, table.fields, at)) not in labelled:
            texts.append(of_row)
            places.append(at)
    if not texts:
        raise UserError(
            f"--new_file {new_file}: each of its rows has a label in the training file."
        )
    return Rows(
        like.kind,
        np.zeros((len(texts), *like.targets.shape[1:])),
        texts,
        classes=like.classes,
        metric=like.metric,
        places=places,
    )


def predictions_of_file(
    path: Path, own: RowSettings, table: OwnRows, texts: Sequence[Names]
) -> Array:
    """Returns outputs (N, C) for texts that a file holds as labels of them, such as a large language model's.

    Texts of unlabelled rows may be missing.

    Raises:
        UserError: A labelled row's text is not in the file, or a label is not one of the training rows.
    """
    kind, classes = table.train.kind, table.train.classes
    changes = {"text_column": ",".join(table.fields), "label_type": kind}
    read = read_splits({"": path}, own.model_copy(update=changes))
    rows, labels = read.rows[""], read.labels[""]
    targets = targets_of(kind, classes, labels, [at for at, _ in rows])
    outputs = np.eye(len(classes))[targets] if kind == "class" else targets.reshape(len(rows), -1)
    if kind == "multi_label":
        outputs = 2 * outputs - 1
    row_of = {texts_of(row, table.fields, at): number for number, (at, row) in enumerate(rows)}
    for labelled in (table.train, table.test) if table.test else (table.train,):
        for of_row, place in zip(labelled.texts, labelled.places, strict=True):
            if of_row not in row_of:
                raise UserError(f"{path}: holds no prediction for the text of {place}.")
    none = np.zeros(outputs.shape[1])
    return np.array([outputs[row_of[of]] if of in row_of else none for of in texts])


def units_of(
    fields: Names, texts: Sequence[tuple[str, ...]], groups: Sequence[str]
) -> tuple[Array, list[str]]:
    """Returns the unit of each row, (N,), the index of its first row: rows that share a group or a text are one unit.

    A column whose texts join more than half of the rows (beside the largest group) is left out of this, with a note: it
    holds common phrases. Case and blanks of texts do not count.
    """
    columns = {repr(field): [plain(of[n]) for of in texts] for n, field in enumerate(fields)}
    columns["all columns, nearly equal,"] = near_duplicates([" ".join(of) for of in texts])
    notes, by_group = list[str](), _largest(_connected([groups]))
    while len(columns) + any(groups) > 1:
        largest = _largest(_connected([*columns.values(), groups]))
        if largest - by_group <= max(1, LARGEST_UNIT * (len(texts) - by_group)):
            break
        name = min(columns, key=lambda name: len(set(columns[name])))
        columns.pop(name)
        notes.append(
            f"equal texts in {name} join {largest} of {len(texts)} rows: they may stand on both sides of a split"
        )
    return np.array(_connected([*columns.values(), groups])), notes


def _largest(units: Sequence[int]) -> int:
    return max(Counter(units).values())


def _connected(columns: Sequence[Sequence[str]]) -> list[int]:
    """Returns the unit of each row, the index of its first row.

    Rows that share a cell of a column, empty ones apart, are connected, also by others.
    """
    from scipy.cluster.hierarchy import DisjointSet  # after --help

    units = DisjointSet(range(len(columns[0])))
    for column in columns:
        owner = dict[str, int]()
        for row, cell in enumerate(column):
            if cell:
                units.merge(row, owner.setdefault(cell, row))
    firsts = {row: min(unit) for unit in units.subsets() for row in unit}
    return [firsts[row] for row in range(len(columns[0]))]


def near_duplicates(texts: Sequence[str]) -> list[str]:
    """Returns a name for each text that it shares with nearly equal ones; "" if there are none.

    Texts are nearly equal if they share four in five of their pairs of neighbouring words. Short texts are not, and of
    many texts none are looked for.
    """
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components
    from sklearn.feature_extraction.text import HashingVectorizer

    if len(texts) > MOST_COMPARED:
        return [""] * len(texts)
    options: Any = {"binary": True, "norm": None, "alternate_sign": False}
    pairs = HashingVectorizer(ngram_range=(2, 2), token_pattern=r"(?u)\b\w+\b", **options)
    marks = pairs.transform(texts)
    sizes = np.asarray(marks.sum(axis=1)).ravel()
    common = (marks @ marks.T).tocoo()
    either = sizes[common.row] + sizes[common.col] - common.data
    is_near = common.data >= NEAR * either
    is_near &= np.minimum(sizes[common.row], sizes[common.col]) >= FEWEST_PAIRS
    edges = common.row[is_near], common.col[is_near]
    graph = coo_matrix((np.ones(is_near.sum()), edges), shape=common.shape)
    _, number = connected_components(graph, directed=False)
    members = np.bincount(number)
    return [f"near {n}" if members[n] > 1 else "" for n in number]


def leak_notes(train: Rows, test: Rows | None) -> list[str]:
    """Returns notes on test rows that stand in train or share a text or group, and on texts with two labels."""
    notes, labels_of = list[str](), defaultdict[Names, dict[Any, str]](dict)  # places by label
    for texts, target, place in zip(train.texts, train.targets.tolist(), train.places, strict=True):
        labels_of[tuple(map(plain, texts))].setdefault(repr(target), place)
    if test is not None:
        copies, related = list[str](), list[str]()
        for texts, unit, place in zip(test.texts, test.units, test.places, strict=True):
            if same := labels_of.get(tuple(map(plain, texts))):
                copies.append(f"{place}, also {next(iter(same.values()))}")
            elif unit in train.units:
                related.append(place)
        of = f"of the {count(len(test.texts), 'test row')}"
        if copies:
            notes.append(
                f"{len(copies)} {of} stand in train, too (the first: {copies[0]}): scores on them are too high"
            )
        if related:
            notes.append(
                f"{len(related)} {of} share a text, nearly, or a group with train (the first: {related[0]}): "
                "scores on them may be too high"
            )
    several = [list(places.values()) for places in labels_of.values() if len(places) > 1]
    if several:
        first, second, *_ = several[0]
        what = f"{count(len(several), 'text')} of train with two labels or more"
        notes.append(f"{what}, the first: {first} and {second}")
    return notes


def _metric(
    own: RowSettings, kind: LabelType, classes: Sequence[str], labels: Sequence[Any]
) -> str:
    """Returns the main metric: the one that is asked for, or macro-F1 where one class has most of the rows."""
    more = ["matthews", "f1"][: 2 if len(classes) == 2 else 1] if kind == "class" else []
    known = (*METRICS[kind], *more)
    if own.metric and own.metric not in known:
        what = f"labels of type {kind} have the metrics {', '.join(known)}"
        raise UserError(f"--metric {own.metric}: {what}.")
    if own.metric:
        return own.metric
    if kind == "class" and max(Counter(labels).values()) > RARE * len(labels):
        return "macro_f1"  # accuracy would not see the rare classes
    return METRICS[kind][0]


def _note(rows: Rows) -> str:
    """Returns what was found out about the labels, in words."""
    if rows.kind == "score":
        scale = Scale.of(rows.targets)
        outliers = f"; systems take labels outside {scale.low:g} to {scale.high:g} as its ends"
        return "labels are scores: a regression" + (outliers if scale.high < np.inf else "")
    what = "labels, any number a row" if rows.kind == "multi_label" else "classes"
    hint = hint_on_numbers(rows.classes) if rows.kind == "class" else ""
    note = f"{len(rows.classes):,} {what}: {first_of(rows.classes)}{hint}"
    return note + (f"; f1 is that of {rows.classes[1]!r}" if rows.metric == "f1" else "")


def _rare_classes(rows: Rows) -> list[str]:
    """Returns a note on classes with fewer rows than folds, which are missing in training sets or in scored rows."""
    if rows.kind == "score":
        return []
    marks = rows.targets if rows.kind == "multi_label" else np.eye(len(rows.classes))[rows.targets]
    rare = [rows.classes[n] for n in np.flatnonzero(marks.sum(axis=0) < FOLDS)]
    if not rare:
        return []
    what = f"{len(rare)} of {len(rows.classes)} classes have fewer than {FOLDS} training rows"
    return [f"{what}, too few for each fold: {first_of(rare)}"]
