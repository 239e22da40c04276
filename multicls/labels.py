"""Labelled rows of a user: their columns of texts, their labels, and what the labels are."""

import ast
import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from multicls.console import count
from multicls.errors import UserError, did_you_mean
from multicls.settings import Settings
from multicls.tables import RawRows, Row, read_table

Names = Sequence[str]
LabelType = Literal["class", "multi_label", "score"]
TEXTS = (("text",), ("text1", "text2"), ("sentence1", "sentence2"))
FEW = 10  # rows, each of which may have a label of its own
MARKS = dict.fromkeys(("0", "0.0", "false", "no", "", "none", "nan"), False)
MARKS |= dict.fromkeys(("1", "1.0", "true", "yes", "x"), True)


@dataclass(frozen=True)
class LabelledRows:
    """The rows of a file with their labels.

    Attributes:
        texts: (N,) tuples of a text for each column.
        kind: What a label is.
        labels: (N,) tuples of names of classes, or scores.
        classes: Names of the classes, sorted; () for scores.
        notes: Lines on rows that were left out or look wrong.
    """

    texts: list[tuple[str, ...]]
    kind: LabelType
    labels: list[Any]
    classes: tuple[str, ...]
    notes: list[str]


class LabelledSettings(Settings):
    """The columns of labelled rows, for the probe of pretraining and for fine-tuning."""

    text_column: Annotated[str, Field(pattern="^[^,]+(,[^,]+)?$")] | None = Field(
        None, description="column, or COLUMN1,COLUMN2 for pairs"
    )
    label_column: str = Field(
        "label", description="column of the label; A,B,C: columns of 0 and 1, one for each label"
    )
    join_labels: bool = Field(
        False, description="labels that differ by case, blanks or Unicode form are one"
    )
    label_separator: str | None = Field(None, description="divides several labels in a cell: ';'")
    unlabelled: Literal["refuse", "drop"] = Field("refuse", description="rows without a label")
    label_type: Literal["auto", "class", "multi_label", "score"] = Field(
        "auto", description="auto: lists: multi_label; numbers not all whole: score; else class"
    )


def read_labelled(path: str | Path, columns: LabelledSettings) -> LabelledRows:
    """Reads labelled rows with the columns and checks of fine-tuning's own rows, each text once, for a probe.

    Raises:
        UserError: The file, a column or a label is missing or cannot be read, or all labels are alike.
    """
    read = read_splits({"": path}, columns)
    fields, kind, rows, labels, more = read.fields, read.kind, read.rows[""], read.labels[""], []
    texts = [texts_of(row, fields, where) for where, row in rows]
    classes = class_names(str(path), kind, labels)
    pairs = [pair for pair in zip(texts, labels, strict=True) if kind == "score" or pair[1]]
    if none := len(labels) - len(pairs):
        more.append(f"{count(none, 'row')} without any of the labels left out")
    first: dict[tuple[str, ...], Any] = {}
    for text, label in pairs:
        first.setdefault(text, label)
    if copies := len(pairs) - len(first):
        more.append(f"{count(copies, 'row')} left out whose text another row has")
    hint = hint_on_numbers(classes) if kind == "class" else ""
    what = f"{len(classes):,} classes{hint}"
    more.append(what if classes else "labels are scores")
    return LabelledRows(list(first), kind, list(first.values()), classes, [*read.notes, *more])


@dataclass(frozen=True)
class LabelledSplits:
    """The rows of files that have texts and a label.

    Attributes:
        fields: Columns of the texts.
        kind: What a label is.
        rows: Of each split.
        labels: Of each row, by `read_label`; spellings are joined if that is asked for.
        notes: Lines on rows that were left out or look wrong.
    """

    fields: Names
    kind: LabelType
    rows: dict[str, RawRows]
    labels: dict[str, list[Any]]
    notes: list[str]


def read_splits(files: Mapping[str, str | Path], columns: LabelledSettings) -> LabelledSplits:
    """Reads the file of each split, all with the same columns and the same type of labels.

    Raises:
        UserError: A file, a column or a label is missing or cannot be read.
    """
    groups: Sequence[Names] = TEXTS
    if columns.text_column:
        groups = [columns.text_column.split(",")]
    kept, notes = dict[str, RawRows](), list[str]()
    for split, name in files.items():
        rows, what = with_one_hot(read_table(Path(name)), columns), f"{split} row".strip()
        groups = [find_columns(*rows[0], groups)]
        find_columns(*rows[0], [[columns.label_column]], "label")
        rows, without_text = with_texts(rows, groups[0], what)
        kept[split], unlabelled = with_labels(rows, columns, what)
        notes += without_text + unlabelled
    column = columns.label_column
    cells = [row[column] for rows in kept.values() for _, row in rows]
    kind = label_type(cells) if columns.label_type == "auto" else columns.label_type
    labels = {
        split: [read_label(kind, row[column], where) for where, row in rows]
        for split, rows in kept.items()
    }
    if kind != "score":
        spellings, joined = spellings_of(list(chain(*labels.values())), columns.join_labels)
        notes += joined
        labels = {
            split: [tuple(dict.fromkeys(spellings[name] for name in names)) for names in of_split]
            for split, of_split in labels.items()
        }
    return LabelledSplits(groups[0], kind, kept, labels, notes)


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
    predict = " finetune/predict.py labels rows without labels." if what == "label" else ""
    raise UserError(
        f"{where}: no column {columns} for the {what}; the columns (the first line of a table) are "
        f"{', '.join(map(repr, row))}.{did_you_mean(missing, row, listed=False)} Name it by --{what}_column.{predict}"
    )


def with_texts(rows: RawRows, fields: Sequence[str], what: str) -> tuple[RawRows, list[str]]:
    """Returns the rows that have a text in each of the columns, and notes on the others and on suspicious rows.

    Notes call a row `what`.

    Raises:
        UserError: None has.
    """
    full = [
        (where, row) for where, row in rows if not any(is_empty(row.get(name)) for name in fields)
    ]
    if not full:
        raise UserError(f"{rows[0][0]}: no row has a text.")
    notes = list[str]()
    if empty := len(rows) - len(full):
        notes.append(f"{count(empty, what)} without a text left out")
    numbers = sum(all(_number(row[name]) is not None for name in fields) for _, row in full)
    if 2 * numbers > len(full):
        column = " and ".join(map(repr, fields))
        notes.append(f"most texts in {column} are numbers: is it the right --text_column?")
    broken = [
        at for at, row in rows if ".csv" in at.lower() and "\n" in "".join(map(str, row.values()))
    ]
    if broken:
        breaks = f"{count(len(broken), what)} with line breaks, the first up to {broken[0]}"
        notes.append(f"{breaks}: texts, or torn quotes?")
    return full, notes


def with_one_hot(rows: RawRows, columns: LabelledSettings) -> RawRows:
    """Returns the rows with their labels in one cell if the label column names several, `A,B,C`, of 0 and 1.

    A cell is a list of names, or a name if each row has exactly one.

    Raises:
        UserError: A column is missing, or holds something else.
    """
    names = columns.label_column.split(",")
    if len(names) == 1 or columns.label_column in rows[0][1]:
        return rows
    find_columns(*rows[0], [names], "label")
    marked = list[list[str]]()
    for where, row in rows:
        marks = {name: str(row.get(name)).strip().casefold() for name in names}
        if wrong := [name for name, mark in marks.items() if mark not in MARKS]:
            what = f"column {wrong[0]!r} is {row.get(wrong[0])!r}; it must be 0 or 1"
            raise UserError(f"{where}: {what} (--label_column {columns.label_column}).")
        marked.append([name for name, mark in marks.items() if MARKS[mark]])
    single = all(len(of) == 1 for of in marked)
    return [
        (where, {**row, columns.label_column: of[0] if single else of})
        for (where, row), of in zip(rows, marked, strict=True)
    ]


def spellings_of(labels: Sequence[Names], join: bool) -> tuple[dict[str, str], list[str]]:
    """Returns the name that stands for each label, and a note on labels that differ by their spelling only.

    Spellings differ by case, blanks or Unicode form. If they are to be joined, the most frequent one stands for them.
    """
    counts = Counter(chain.from_iterable(labels))
    groups = defaultdict[str, list[str]](list)
    for name, _ in counts.most_common():
        groups[plain(name)].append(name)
    several = [names for names in groups.values() if len(names) > 1]
    if not several:
        return {name: name for name in counts}, []
    shown = ", ".join(" and ".join(map(repr, names)) for names in several[:3])
    what = f"labels that differ by case, blanks or Unicode form alone: {shown}"
    if not join:
        return {name: name for name in counts}, [f"{what}; --join_labels makes them one"]
    joined = {name: names[0] for names in groups.values() for name in names}
    return joined, [f"{what}; joined"]


def plain(text: str) -> str:
    """Returns what texts share that differ by case, blanks or Unicode form alone."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def with_labels(rows: RawRows, columns: LabelledSettings, what: str) -> tuple[RawRows, list[str]]:
    """Returns the rows that have a label, several in a cell divided, and a note on the others.

    Raises:
        UserError: None has, some have none and are not to be dropped, or a label is a list as text.
    """
    empty = dict.fromkeys(at for at, row in rows if is_empty(row.get(columns.label_column)))
    notes = list[str]()
    if empty:
        first, without = next(iter(empty)), count(len(empty), what)
        if columns.unlabelled == "refuse":
            hint = "Label them, or set --unlabelled drop; finetune/predict.py labels rows."
            raise UserError(f"{first}: {without} without a label. {hint}")
        notes.append(f"{without} without a label left out, the first: {first}")
    kept = [(where, _divided(columns, row, where)) for where, row in rows if where not in empty]
    if not kept:
        raise UserError(f"{what}s: none has a label.")
    return kept, notes


def is_empty(cell: Any) -> bool:
    """Returns True if a cell holds nothing; an empty list is a row without any of the labels."""
    if isinstance(cell, str):
        return not cell.strip()
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def _divided(columns: LabelledSettings, row: Row, where: str) -> Row:
    """Returns the row with its label cell divided at the separator; without one, a list as text is a `UserError`."""
    cell = row.get(columns.label_column)
    if not isinstance(cell, str):
        return row
    bare = cell.strip()
    listed = _as_list(bare)
    if columns.label_separator:
        if bare.startswith("[") and bare.endswith("]"):
            bare = bare[1:-1]
        divided = [name.strip().strip("'\"") for name in bare.split(columns.label_separator)]
        names = divided if listed is None else listed
        return {**row, columns.label_column: [name for name in names if name]}
    if listed is not None:
        raise UserError(
            f"{where}: the label is {cell!r}, a list as text. Set --label_separator ',' to divide it, or save lists in "
            "JSON lines or Parquet."
        )
    return row


def _as_list(text: str) -> list[str] | None:
    """Returns the names in a list, tuple or set as Python prints it; None of any other text."""
    try:
        value = ast.literal_eval(text) if text[:1] in ("[", "(", "{") else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return [str(name) for name in value] if isinstance(value, list | tuple | set) else None


def texts_of(row: Row, fields: Sequence[str], where: str) -> tuple[str, ...]:
    """Returns the texts in the columns `fields` of the row at `where`; a UserError if a cell is no text."""
    for column in fields:
        if isinstance(row[column], (dict, list, bytes)):
            raise UserError(f"{where}: column {column!r} is {row[column]!r}; it must be a text.")
    return tuple(str(row[column]) for column in fields)


def label_type(cells: Sequence[Any]) -> LabelType:
    """Returns the type of labels in cells: lists are several labels, numbers not all whole are scores."""
    if any(isinstance(cell, list) for cell in cells):
        return "multi_label"
    numbers = [number for cell in cells if (number := _number(cell)) is not None]
    all_whole = all(number.is_integer() for number in numbers)
    return "class" if all_whole or len(numbers) < len(cells) else "score"


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


def class_names(
    source: str, kind: LabelType, labels: Sequence[Any], others: Sequence[Any] = ()
) -> tuple[str, ...]:
    """Returns the names of the classes in the labels of `read_label`, sorted; () for scores.

    `others` are the labels of the other splits.

    Raises:
        UserError: All labels are alike, or each row has a class of its own.
    """
    names = set(labels) if kind == "score" else set(chain.from_iterable(labels))
    if len(names) < 2:
        raise UserError(f"{source}: all labels are alike; a task needs two classes or scores.")
    if kind == "score":
        return ()
    everything = [*labels, *others]
    if kind == "class" and len(set(everything)) == len(everything) > FEW:
        first = ", ".join(f"{name[:27]}..." if name[30:] else name for name in sorted(names)[:3])
        raise UserError(
            f"{source}: each row has another label ({first}, ...). Name the column of classes by --label_column, or "
            "set --label_type score if these are scores."
        )
    return tuple(sorted(names, key=_by_value))


def hint_on_numbers(classes: Sequence[str]) -> str:
    """Returns how classes that look like numbers are read as scores instead; "" if few do."""
    values = [_number(name) for name in classes]
    if all(value is not None and value.is_integer() for value in values):
        return " (whole numbers are classes; --label_type score makes them scores)"
    numbers = sum(_number(name.replace(",", ".")) is not None for name in classes)
    if None in values and 2 * numbers > len(classes):
        return " (most are numbers: scores need one in each row, with a decimal point)"
    return ""


def _name(cell: Any) -> str:
    """Returns the name of a class, "" if the cell holds none; 1.0 in a column of numbers is 1."""
    if isinstance(cell, float):
        if math.isnan(cell):
            return ""
        return str(int(cell)) if cell.is_integer() else str(cell)
    return "" if cell is None or isinstance(cell, (dict, list, bytes)) else str(cell).strip()


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
