"""Reads the rows of a benchmark's task, from files in the official layout or from the hub."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from finetune.data.examples import LabeledExample, TaskData, passage_id
from finetune.data.superglue import flat_rows
from finetune.data.tables import json_rows, read_text
from finetune.data.tasks import Task
from multicls.errors import UserError, first_line
from multicls.words import counted

SUFFIXES = {"superglue": (".jsonl",), "cs224n": (".csv",), "glue": (".tsv", ".jsonl")}
OTHER_STEMS = {"AX": ("diagnostic-full", "AX", "diagnostic")}  # usual names of a file; the first has labels
OTHER_FOLDERS = {"ax": ("diagnostic", "diagnostics", "MNLI", ".")}  # usual places of a task's files
RawRows = Iterable[tuple[str, Mapping[str, Any] | None]]  # FILE:LINE, and the row, or None for one that is torn
Reader = Callable[[str, str, bool], "list[LabeledExample] | None"]  # file stem, part, hidden -> rows; None: no file


def read_task(task: Task, data_dir: str | None, train_from_dev: bool = False) -> TaskData:
    """Reads the train and dev rows of a task.

    Args:
        data_dir: folder with one folder a task, or with such a folder for each benchmark (glue/, superglue/, cs224n/);
            None: the hub; for tasks made from a corpus, the corpus folder.
        train_from_dev: the train file is not needed, and of several dev files one suffices.

    Raises:
        UserError: A file is missing, a row does not parse, or the task has test rows only.
    """
    if not task.dev:
        trained = "mnli" if task.benchmark == "glue" else "rte_superglue"
        raise UserError(
            f"--task {task.name} has test rows only, which a model fine-tuned on {trained} predicts. Run `python "
            f"finetune/run.py --task {trained} --predict_test ...`: it predicts {task.name}, too, and scores it if its "
            "labels are there."
        )
    if not task.folder:
        from finetune.data import sample_task

        return sample_task.read(task, data_dir)
    notes: list[str] = []
    place, read = _reader(task, data_dir, notes)
    parts = {stem: read(stem, part, False) for stem, part in task.dev}
    missing = [_file_name(task, stem) for stem, rows in parts.items() if rows is None]
    if missing and (len(missing) == len(parts) or not train_from_dev):
        raise UserError(f"{place}: {', '.join(missing)} is missing; task {task.name} is evaluated on it.")
    if missing:
        notes.append(f"{', '.join(missing)} is missing: not evaluated on it")
    train = None if train_from_dev else read(task.train, "", False)
    if train is None and not train_from_dev:
        raise UserError(
            f"{place}: {_file_name(task, task.train)} is missing. Get the whole data set, or add --train_from_dev: "
            "the train rows are then drawn from dev and the rest of it evaluates; not the protocol, and recorded so."
        )
    return TaskData(train, [row for rows in parts.values() for row in rows or []], notes)


def read_test(task: Task, data_dir: str | None) -> list[LabeledExample]:
    """Reads the test rows of a task, with their labels if the files hold them.

    Raises:
        UserError: The task has no test rows, a file is missing or a row does not parse.
    """
    if not task.test:
        raise UserError(f"--predict_test: task {task.name} has no test rows to submit.")
    place, read = _reader(task, data_dir, [])
    tests = {stem: read(stem, part, True) for stem, part in task.test}
    if missing := [_file_name(task, stem) for stem, rows in tests.items() if rows is None]:
        raise UserError(f"{place}: {', '.join(missing)} is missing; --predict_test predicts it.")
    return [row for rows in tests.values() for row in rows or []]


def has_test_files(task: Task, data_dir: str | None) -> bool:
    """Returns True if the folder holds a test file of the task; the hub holds each."""
    return data_dir is None or _task_folder(task, Path(data_dir), dict(task.test)) is not None


def read_file(task: Task, path: Path, part: str = "", hidden: bool = False) -> tuple[list[LabeledExample], int]:
    """Returns the rows of one official file, and the number of rows left out for missing columns.

    Args:
        path: `.tsv` (tabs, no quoting), `.csv` (tabs, quoted) or `.jsonl`.
        part: the part of dev or test that the rows belong to.
        hidden: True for a test file, whose labels may be missing.

    Raises:
        UserError: A row does not parse; file and line are named.
    """
    rows = json_rows(path) if path.suffix == ".jsonl" else _table_rows(task, path, hidden)
    examples, dropped = _examples(task, path.stem, rows, part, hidden)
    if not examples:
        raise UserError(f"{path}: no rows.")
    return examples, dropped


def _examples(task: Task, stem: str, rows: RawRows, part: str, hidden: bool) -> tuple[list[LabeledExample], int]:
    examples: list[LabeledExample] = []
    dropped = 0
    for number, (where, row) in enumerate(rows):
        if row is None:
            dropped += 1
            continue
        for flat in flat_rows(task.name, row, where):
            key = flat.get("key", flat.get("idx", flat.get("index", number)) if hidden else len(examples))
            examples.append(_example(task, f"{stem}:{key}", flat, where, part, hidden))
    return examples, dropped


def _find(task: Task, folder: Path, stem: str) -> Path | None:
    stems = OTHER_STEMS.get(stem, (stem,))
    paths = [folder / f"{name}{suffix}" for name in stems for suffix in SUFFIXES[task.benchmark]]
    return next((path for path in paths if path.exists()), None)


def _file_name(task: Task, stem: str) -> str:
    first, *others = SUFFIXES[task.benchmark]
    return f"{stem}{first}" + "".join(f" (or {suffix})" for suffix in others)


def _task_folder(task: Task, data_dir: Path, stems: Iterable[str]) -> Path | None:
    """Returns the folder that holds a file of the task: below `data_dir` or the benchmark's folder in it.

    Case, "-" and "_" do not count in the names of folders: sst2 is as good as SST-2.
    """
    names = [task.folder, *OTHER_FOLDERS.get(task.name, ())]
    parents = [data_dir, *_folders(data_dir, task.benchmark)]
    found = [folder for parent in parents for name in names for folder in _folders(parent, name)]
    return next((folder for folder in found if any(_find(task, folder, stem) for stem in stems)), None)


def _folders(parent: Path, name: str) -> list[Path]:
    if name == "." or not parent.is_dir():
        return [parent]
    without = str.maketrans("", "", "-_ ")
    wanted = name.lower().translate(without)
    return sorted(path for path in parent.iterdir() if path.is_dir() and path.name.lower().translate(without) == wanted)


def _reader(task: Task, data_dir: str | None, notes: list[str]) -> tuple[str, Reader]:
    """Returns the name of the place that the rows come from, and the function that reads a file of it."""
    if data_dir is None:
        return _hub_reader(task)
    stems = [stem for stem in (task.train, *dict(task.dev), *dict(task.test)) if stem]
    folder = _task_folder(task, Path(data_dir), stems)
    if folder is None:
        hint = "no such folder"
        if Path(data_dir).is_dir():
            hint = "it holds " + (", ".join(sorted(path.name for path in Path(data_dir).iterdir())[:12]) or "nothing")
        raise UserError(
            f"--data_dir {data_dir}: task {task.name} is read from {Path(data_dir) / task.folder}/"
            f"{_file_name(task, stems[0])}: {hint}."
        )

    def read(stem: str, part: str, hidden: bool) -> list[LabeledExample] | None:
        path = _find(task, folder, stem)
        if path is None:
            return None
        examples, dropped = read_file(task, path, part, hidden)
        if dropped:
            notes.append(f"{path.name}: {counted(dropped, 'row')} with missing columns or no label left out")
        return examples

    return str(folder), read


def _hub_reader(task: Task) -> tuple[str, Reader]:
    if task.hub is None:
        raise UserError(f"task {task.name} is not on the hub: give --data_dir, a folder with its files.")
    name, configuration = task.hub
    # SuperGLUE's data set is a script, which `datasets` no longer runs; the hub's own conversion has a folder each.
    options: dict[str, Any] = {"name": configuration}
    if task.benchmark == "superglue":
        options = {"data_dir": configuration, "revision": "refs/convert/parquet"}

    def read(stem: str, part: str, hidden: bool) -> list[LabeledExample]:
        split = "test" if stem.startswith("AX") else stem.replace("dev", "val", 1).replace("val", "validation", 1)
        try:
            import datasets

            table = datasets.load_dataset(name, split=split, **options)
        except Exception as error:  # datasets, the hub client and the sockets below raise kinds of their own
            raise UserError(
                f"task {task.name}: {name} cannot be had from the hub: {first_line(error)} Without network, give "
                f"--data_dir, a folder that holds {task.folder}/{_file_name(task, task.train or stem)} and the others."
            ) from None
        rows = ((f"{name} {configuration} {split}:{i}", row) for i, row in enumerate(table))
        return _examples(task, split, rows, part, hidden)[0]

    return name, read


def _table_rows(task: Task, path: Path, hidden: bool) -> RawRows:
    text = read_text(path).rstrip("\r\n").split("\n")  # only a line feed ends a line: texts hold Unicode's separators
    lines = enumerate((line.removesuffix("\r") for line in text if text != [""]), start=1)
    columns = [] if hidden else list(task.columns)
    needed = task.fields if hidden else (*task.fields, task.label)
    if not columns:
        columns = _cells(path, next(lines, (1, ""))[1])
        lacking = [names for names in needed if not set(names) & set(columns)]
        if lacking:
            raise UserError(
                f"{path}:1: no column {' and no column '.join(' or '.join(map(repr, names)) for names in lacking)}; "
                f"the columns are {', '.join(map(repr, columns))}."
            )
    torn_allowed = task.drops_short_rows and not hidden
    label = next((columns.index(name) for name in task.label if name in columns), -1)
    for number, line in lines:
        where, values = f"{path}:{number}", _cells(path, line)
        if torn_allowed and (len(values) < len(columns) or not values[label]):
            yield where, None
            continue
        if len(values) != len(columns):
            raise UserError(f"{where}: {len(values)} columns instead of {len(columns)} ({', '.join(columns)}).")
        yield where, dict(zip(columns, values, strict=True))


def _cells(path: Path, line: str) -> list[str]:
    if path.suffix == ".csv":
        return [cell.strip() for cell in next(csv.reader([line], delimiter="\t"), [])]
    return line.split("\t")


def _example(task: Task, name: str, row: Mapping[str, Any], where: str, part: str, hidden: bool) -> LabeledExample:
    texts, choices = tuple(_value(row, names, where) for names in task.fields), tuple(row.get("choices", ()))
    if not all(isinstance(text, str) for text in (*texts, *choices)):
        raise UserError(f"{where}: {' and '.join(names[-1] for names in task.fields)} must be text.")
    label = math.nan
    if not hidden or any(row.get(column) not in (None, "", -1) for column in task.label):
        label = _label(task, _value(row, task.label, where), where)
    passage = "" if task.passage is None else passage_id(texts[task.passage])
    return LabeledExample(name, texts, label, part, choices, row.get("spans", ()), row.get("group", ""),
                          row.get("answer", ""), passage=passage)  # fmt: skip


def _value(row: Mapping[str, Any], names: tuple[str, ...], where: str) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise UserError(f"{where}: no {' or '.join(map(repr, names))}; there is {', '.join(map(repr, row))}.")


def _label(task: Task, value: Any, where: str) -> float:
    """Returns the class index or score. JSON and hub rows may hold the index itself; -1 means hidden there."""
    if task.is_regression:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not 0.0 <= number <= task.label_scale:
            raise UserError(f"{where}: score {value!r} is not a number in 0..{task.label_scale:g}.")
        return number
    if isinstance(value, bool):  # SuperGLUE's JSON; its submissions spell it "true" here and "True" there
        value = next((label for label in task.labels if label.lower() == str(value).lower()), value)
    if isinstance(value, str) and value in task.labels:
        return task.labels.index(value)
    if type(value) is int and 0 <= value < len(task.labels):
        return value
    raise UserError(f"{where}: label {value!r} is none of {', '.join(task.labels)}.")
