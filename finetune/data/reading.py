"""RawRows of a task, from files in the official layout or from the hub."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.data.examples import LabeledExample, TaskData
from finetune.data.superglue import flat_rows
from finetune.data.tasks import Task
from multicls.errors import UserError, first_line

SUFFIXES = {"superglue": (".jsonl",), "cs224n": (".csv",), "glue": (".tsv", ".jsonl")}
RawRows = Iterable[tuple[str, Mapping[str, Any] | None]]  # file:line, and the row, or None for one that is torn


Reader = Callable[
    [str, str, bool], "list[LabeledExample] | None"
]  # file stem, part, hidden labels -> rows; None: no such file


def read_task(task: Task, data_dir: str | None, train_from_dev: bool = False, with_test: bool = False) -> TaskData:
    """Reads the train and dev rows.

    Args:
        data_dir: folder with one folder a task, or with such a folder for each benchmark (glue/, superglue/, cs224n/);
            None: the hub; for tasks made from a corpus, the corpus folder.
        train_from_dev: the train file is not needed, and of several dev files one suffices.
        with_test: the test rows, too. Tasks that have nothing else need it.

    Raises:
        UserError: a file is missing or a row of it does not parse.
    """
    if with_test and not task.test:
        raise UserError(f"--predict_test: task {task.name} has no test rows to submit.")
    if not task.dev and not with_test:
        raise UserError(
            f"--task {task.name} has no train and dev rows: a model fine-tuned on "
            f"{'mnli' if task.benchmark == 'glue' else 'rte_superglue'} predicts it with --predict_test."
        )
    if not task.folder:
        from finetune.data import sample_task

        return sample_task.read(task, data_dir)
    notes: list[str] = []
    place, read = _hub_reader(task) if data_dir is None else _folder_reader(task, Path(data_dir), notes)
    parts = {stem: read(stem, part, False) for stem, part in task.dev}
    missing = [_file_name(task, stem) for stem, rows in parts.items() if rows is None]
    if missing and (len(missing) == len(parts) or not train_from_dev):
        raise UserError(f"{place}: {', '.join(missing)} is missing; task {task.name} is evaluated on it.")
    if missing:
        notes.append(f"{', '.join(missing)} is missing: not evaluated on it")
    train = None if train_from_dev or not task.train else read(task.train, "", False)
    if train is None and task.train and not train_from_dev:
        raise UserError(
            f"{place}: {_file_name(task, task.train)} is missing. Get the whole data set, or add --train_from_dev: "
            "the train rows are then drawn from dev and the rest of it evaluates; not the protocol, and recorded so."
        )
    tests = {stem: read(stem, part, True) for stem, part in task.test if with_test}
    if missing := [_file_name(task, stem) for stem, rows in tests.items() if rows is None]:
        raise UserError(f"{place}: {', '.join(missing)} is missing; --predict_test predicts it.")
    dev, test = ([row for rows in found.values() for row in rows or []] for found in (parts, tests))
    return TaskData(train, dev, notes, test)


def read_file(task: Task, path: Path, part: str = "", hidden: bool = False) -> tuple[list[LabeledExample], int]:
    """Reads one official file: `.tsv` (tabs, no quoting), `.csv` (tabs, quoted) or `.jsonl`.

    Args:
        hidden: a test file, whose labels may be missing.

    Returns:
        The rows and the number of rows left out for missing columns (only where the task allows it).

    Raises:
        UserError: a row does not parse; file and line are named.
    """
    rows = json_rows(path) if path.suffix == ".jsonl" else _table_rows(task, path, hidden)
    examples, dropped = _examples(task, path.stem, rows, part, hidden, indices_allowed=path.suffix == ".jsonl")
    if not examples:
        raise UserError(f"{path}: no rows.")
    return examples, dropped


def _examples(
    task: Task, stem: str, rows: RawRows, part: str, hidden: bool, indices_allowed: bool
) -> tuple[list[LabeledExample], int]:
    examples: list[LabeledExample] = []
    dropped = 0
    for number, (where, row) in enumerate(rows):
        if row is None:
            dropped += 1
            continue
        for flat in flat_rows(task.name, row, where):
            key = str(flat.get("key", flat.get("idx", flat.get("index", number)) if hidden else len(examples)))
            examples.append(_example(task, f"{stem}:{key}", flat, where, part, hidden, indices_allowed))
    return examples, dropped


def _find(task: Task, folder: Path, stem: str) -> Path | None:
    return next((path for suffix in _suffixes(task) if (path := folder / f"{stem}{suffix}").exists()), None)


def _suffixes(task: Task) -> tuple[str, ...]:
    return SUFFIXES[task.benchmark]


def _file_name(task: Task, stem: str) -> str:
    first, *others = _suffixes(task)
    return f"{stem}{first}" + "".join(f" (or {suffix})" for suffix in others)


def _task_folder(task: Task, data_dir: Path) -> Path:
    """DATA_DIR/FOLDER or DATA_DIR/BENCHMARK/FOLDER, whichever holds a file of the task."""
    folders = [data_dir / task.folder, data_dir / task.benchmark / task.folder]
    stems = [stem for stem in (task.train, *dict(task.dev), *dict(task.test)) if stem]
    for folder in folders:
        if any(_find(task, folder, stem) for stem in stems):
            return folder
    if folders[0].is_dir() and task.folder != ".":
        return folders[0]
    hint = "no such folder"
    if data_dir.is_dir():
        hint = "it holds " + (", ".join(sorted(path.name for path in data_dir.iterdir())[:12]) or "nothing")
    raise UserError(
        f"--data_dir {data_dir}: task {task.name} is read from {folders[0]}/{_file_name(task, stems[0])}: {hint}."
    )


def _folder_reader(task: Task, data_dir: Path, notes: list[str]) -> tuple[str, Reader]:
    folder = _task_folder(task, data_dir)

    def read(stem: str, part: str, hidden: bool) -> list[LabeledExample] | None:
        path = _find(task, folder, stem)
        if path is None:
            return None
        examples, dropped = read_file(task, path, part, hidden)
        if dropped:
            notes.append(f"{path.name}: {dropped} rows with missing columns or no label left out")
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
        return _examples(task, split, rows, part, hidden, indices_allowed=True)[0]

    return name, read


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines; only a line feed ends one, for texts hold other separators of Unicode."""
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n")
    for number, raw in enumerate(content.split(b"\n") if content else (), start=1):
        try:
            yield number, raw.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}:{number}: not UTF-8 (byte {error.start} of the line).") from None


def _table_rows(task: Task, path: Path, hidden: bool) -> RawRows:
    lines = _lines(path)
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


def json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """FILE:LINE and object of each line of a file of JSON lines.

    Raises:
        UserError: a line is not a JSON object.
    """
    for number, line in _lines(path):
        try:
            row = json.loads(line)
            if "\\u" in line:  # half a pair, such as "\\ud83d", is JSON, but no text
                json.dumps(row, ensure_ascii=False).encode("utf-8")
        except ValueError as error:
            raise UserError(f"{path}:{number}: not a line of JSON: {error}.") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: not a JSON object.")
        yield f"{path}:{number}", row


def _example(
    task: Task,
    name: str,
    row: Mapping[str, Any],
    where: str,
    part: str,
    hidden: bool,
    indices_allowed: bool,
) -> LabeledExample:
    texts, choices = tuple(_value(row, names, where) for names in task.fields), tuple(row.get("choices", ()))
    if not all(isinstance(text, str) for text in (*texts, *choices)):
        raise UserError(f"{where}: {' and '.join(names[-1] for names in task.fields)} must be text.")
    label = math.nan
    if not hidden or any(row.get(column) not in (None, "", -1) for column in task.label):
        label = _label(task, _value(row, task.label, where), where, indices_allowed)
    return LabeledExample(name, texts, label, part, choices, row.get("spans", ()), row.get("group", ""),
                   row.get("answer", ""))  # fmt: skip


def _value(row: Mapping[str, Any], names: tuple[str, ...], where: str) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise UserError(f"{where}: no {' or '.join(map(repr, names))}; there is {', '.join(map(repr, row))}.")


def _label(task: Task, value: Any, where: str, indices_allowed: bool) -> float:
    """Class index or score. JSON and hub rows may give the index itself; -1 there means hidden."""
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
    if indices_allowed and type(value) is int and 0 <= value < len(task.labels):
        return value
    raise UserError(f"{where}: label {value!r} is none of {', '.join(task.labels)}.")
