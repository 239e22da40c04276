"""Rows of a task, from files in the official layout or from the hub."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.tasks import Task
from multicls.errors import UserError


@dataclass(frozen=True)
class Example:
    """One row: an id that is unique in its split, its one or two texts, its class index or score, its part of dev."""

    id: str
    texts: tuple[str, ...]
    label: float
    part: str = ""


@dataclass(frozen=True)
class TaskData:
    """The rows of a task; `train` is None where there is no train file. `notes` belong in every result."""

    train: list[Example] | None
    dev: list[Example]
    notes: list[str] = field(default_factory=list)


def read_task(task: Task, data_dir: str | None, train_from_dev: bool = False) -> TaskData:
    """Reads the train and dev rows.

    Args:
        data_dir: folder with one folder a task; None: the hub; for tasks made from a corpus, the corpus folder.
        train_from_dev: the train file is not needed, and of several dev files one suffices.

    Raises:
        UserError: a file is missing or a row of it does not parse.
    """
    if not task.folder:
        from finetune.sample_task import read  # which needs `Example` of this module

        return read(task, data_dir)
    if data_dir is None:
        return _read_hub(task, train_from_dev)
    return _read_folder(task, Path(data_dir), train_from_dev)


def fingerprint(examples: Iterable[Example]) -> str:
    """SHA-256 (16 hex digits) over ids, texts and labels."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps([example.id, example.texts, example.label]).encode())
    return digest.hexdigest()[:16]


def read_file(task: Task, path: Path, part: str = "") -> tuple[list[Example], int]:
    """Reads one official file: `.tsv` (tabs, no quoting) or `.jsonl`.

    Returns:
        The rows and the number of rows left out for missing columns (only where the task allows it).

    Raises:
        UserError: a row does not parse; file and line are named.
    """
    rows = _jsonl_rows(path) if path.suffix == ".jsonl" else _tsv_rows(task, path)
    examples: list[Example] = []
    dropped = 0
    for line, row in rows:
        if row is None:
            dropped += 1
            continue
        name = f"{path.stem}:{len(examples)}"
        examples.append(_example(task, name, row, f"{path}:{line}", part, indices_allowed=path.suffix == ".jsonl"))
    if not examples:
        raise UserError(f"{path}: no rows.")
    return examples, dropped


def _read_folder(task: Task, data_dir: Path, train_from_dev: bool) -> TaskData:
    folder = data_dir / task.folder
    if not folder.is_dir():
        hint = "no such folder"
        if data_dir.is_dir():
            hint = "it holds " + (", ".join(sorted(path.name for path in data_dir.iterdir())[:12]) or "nothing")
        raise UserError(f"--data_dir {data_dir}: task {task.name} is read from {folder}/: {hint}.")
    notes: list[str] = []

    def read(stem: str, part: str = "") -> list[Example] | None:
        path = next((p for suffix in (".tsv", ".jsonl") if (p := folder / f"{stem}{suffix}").exists()), None)
        if path is None:
            return None
        examples, dropped = read_file(task, path, part)
        if dropped:
            notes.append(f"{path.name}: {dropped} rows with missing columns left out")
        return examples

    parts = {stem: read(stem, part) for stem, part in task.dev}
    missing = [f"{stem}.tsv (or .jsonl)" for stem, rows in parts.items() if rows is None]
    if len(missing) == len(parts) or (missing and not train_from_dev):
        raise UserError(f"{folder}: {', '.join(missing)} is missing; task {task.name} is evaluated on it.")
    if missing:
        notes.append(f"{', '.join(missing)} is missing: not evaluated on it")
    train = None if train_from_dev else read("train")
    if train is None and not train_from_dev:
        raise UserError(
            f"{folder}: train.tsv (or .jsonl) is missing. Get the whole data set, or add --train_from_dev: the train "
            "rows are then drawn from dev and the rest of it evaluates; not the protocol, and recorded as such."
        )
    return TaskData(train, [example for rows in parts.values() for example in rows or []], notes)


def _read_hub(task: Task, train_from_dev: bool) -> TaskData:
    assert task.hub is not None
    splits = {stem.replace("dev", "validation", 1): part for stem, part in task.dev}
    try:
        import datasets

        tables = {split: datasets.load_dataset(*task.hub, split=split) for split in ("train", *splits)}
    except Exception as error:  # datasets, the hub client and the sockets below raise kinds of their own when offline
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"task {task.name}: {task.hub[0]} cannot be had from the hub: {reason} "
            f"Without network, give --data_dir, a folder that holds {task.folder}/train.tsv and dev.tsv."
        ) from None

    def rows(split: str, part: str = "") -> list[Example]:
        return [
            _example(task, f"{split}:{i}", row, f"{task.hub} {split} row {i}", part, indices_allowed=True)
            for i, row in enumerate(tables[split])
        ]

    dev = [example for split, part in splits.items() for example in rows(split, part)]
    return TaskData(None if train_from_dev else rows("train"), dev)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines; only a line feed ends one, for texts hold other separators of Unicode."""
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, raw in enumerate(content, start=1):
        if number == len(content) and not raw:
            return
        try:
            yield number, raw.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}:{number}: not UTF-8 (byte {error.start} of the line).") from None


def _tsv_rows(task: Task, path: Path) -> Iterator[tuple[int, dict[str, str] | None]]:
    lines = _lines(path)
    columns = list(task.columns or ())
    if not columns:
        columns = next(lines, (1, ""))[1].split("\t")
        lacking = [names for names in (*task.fields, task.label) if not set(names) & set(columns)]
        if lacking:
            raise UserError(
                f"{path}:1: no column {' and no column '.join(' or '.join(map(repr, names)) for names in lacking)}; "
                f"the columns are {', '.join(map(repr, columns))}."
            )
    for number, line in lines:
        values = line.split("\t")
        if task.drops_short_rows and len(values) < len(columns):
            yield number, None
            continue
        if len(values) != len(columns):
            raise UserError(f"{path}:{number}: {len(values)} columns instead of {len(columns)} ({', '.join(columns)}).")
        yield number, dict(zip(columns, values, strict=True))


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in _lines(path):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not JSON: {error}.") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: not a JSON object.")
        yield number, row


def _example(task: Task, name: str, row: Mapping[str, Any], where: str, part: str, indices_allowed: bool) -> Example:
    texts = tuple(_value(row, names, where) for names in task.fields)
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: {' and '.join(names[-1] for names in task.fields)} must be text.")
    return Example(name, texts, _label(task, _value(row, task.label, where), where, indices_allowed), part)


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
    if isinstance(value, str) and value in task.labels:
        return task.labels.index(value)
    if indices_allowed and type(value) is int and 0 <= value < len(task.labels):
        return value
    raise UserError(f"{where}: label {value!r} is none of {', '.join(task.labels)}.")
