"""Tasks: what each is, where its rows are, its scores; and their examples. tasks.yaml has those of the benchmarks."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from multicls.console import count
from multicls.labels import LabelType

Array = np.ndarray[Any, np.dtype[Any]]
# The fields of a task on where its rows are; records and saved models do not keep them.
SOURCE = ("benchmark", "folder", "hub", "file_columns", "header", "train", "dev", "passage")
DERIVED = ("num_labels", "is_regression")  # which they keep as well
Parts = tuple[tuple[str, str], ...]  # of a split: file stem and short name


@dataclass(frozen=True)
class Task:
    """One labelled task on a text or a pair, maybe with marked spans; or on choices, each of which is a sequence."""

    name: str
    fields: tuple[str, ...]  # the column of each text, as the Hub names it
    labels: tuple[str, ...]  # as the files spell them, in the Hub's order; empty for regression
    metrics: tuple[str, ...]  # the first picks the checkpoint; "mean(..)" is the mean of the others
    benchmark: Literal["glue", "superglue", "cs224n", "own"] = "own"
    folder: str = ""  # folder under `--data_dir`
    hub: tuple[str, str] | None = None  # id and configuration on the Hugging Face Hub
    file_columns: tuple[str, ...] = ()  # in files the names of `fields` and of the label
    header: tuple[str, ...] = ()  # columns of train and dev files without a header
    train: Parts = (("train", ""),)
    dev: Parts = (("dev", ""),)  # parts are pooled for the score and scored apart, too
    label_scale: float = 1.0  # a regression's training target is its label divided by this
    num_choices: int = 0
    num_spans: int = 0
    multi_label: bool = False  # a row has any number of the labels: one sigmoid for each
    passage: int | None = None  # the text that many rows share; they stay together in hold-outs
    max_length: int = 128  # in tokens, facets included

    @property
    def is_regression(self) -> bool:
        """True if the label is a number instead of a class."""
        return not self.labels

    @property
    def kind(self) -> LabelType:
        """Returns what a label is."""
        several: LabelType = "multi_label" if self.multi_label else "class"
        return "score" if self.is_regression else several

    @property
    def num_labels(self) -> int:
        """Outputs of the classifier for a sequence: 1 for regression and for choices."""
        return 1 if self.num_choices else max(1, len(self.labels))

    def describe(self) -> dict[str, Any]:
        """Returns what records and saved models have to know of the task."""
        known = {name: value for name, value in vars(self).items() if name not in SOURCE}
        return known | {name: getattr(self, name) for name in DERIVED}


@dataclass(frozen=True)
class Example:
    """One labelled example."""

    id: str  # unique in its split: "FILE:NUMBER", NUMBER being the benchmark's own index if it has one
    texts: tuple[str, ...]  # in a choice task each sequence begins with them
    label: float  # class index or score; 0.0 if there may be several labels, or none is known
    part: str = ""  # the part of dev
    choices: tuple[str, ...] = ()  # the last segment of each choice
    spans: tuple[tuple[int, int, int], ...] = ()  # (index of the text, first character, end)
    group: str = ""  # examples judged together: a MultiRC question, a ReCoRD query
    answer: str = ""  # ReCoRD's entity
    labels: tuple[float, ...] = ()  # 1.0 or 0.0 for each class, if there may be several labels
    passage: str = ""  # identity of the text (`Task.passage`) or group that examples share

    @property
    def unit(self) -> str:
        """Name of what stays together where rows are divided: the passage, or the row itself."""
        return self.passage or self.id

    @property
    def classes(self) -> list[int]:
        """Indices of its classes, of tasks of classes."""
        several = [index for index, mark in enumerate(self.labels) if mark]
        return several if self.labels else [int(self.label)]


@dataclass(frozen=True)
class TaskData:
    """The examples of a task, or those that a run takes."""

    task: Task
    train: list[Example]
    dev: list[Example]  # to evaluate on
    validation: list[Example] = field(default_factory=list)  # held out of train
    is_subset: bool = False  # train lacks rows of the task
    notes: list[str] = field(default_factory=list)  # what a reader of every result has to know

    @property
    def splits(self) -> dict[str, list[Example]]:
        """The splits that have rows: "train", then the one that picks the checkpoint, then others."""
        names = ("train", "validation", "dev")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    def counts(self) -> str:
        """Returns a line for the log: the numbers of rows."""
        counts = ", ".join(count(len(rows), f"{name} row") for name, rows in self.splits.items())
        return f"{self.task.name}: {counts}"

    @cached_property
    def sha256(self) -> str:
        """Hash (16 hex digits) of all examples, except their ids, which name files."""
        digest = hashlib.sha256(json.dumps(self.task.labels).encode())
        for example in (*self.train, *self.dev):
            values = [value for name, value in vars(example).items() if name != "id"]
            digest.update(json.dumps(values).encode())
        return digest.hexdigest()[:16]


def first_of(names: Sequence[str], shown: int = 10) -> str:
    """Returns the first names of a list, and how many more there are."""
    more = f", ... ({len(names) - shown} more)" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def passage_id(text: str) -> str:
    """Returns a short hash that identifies a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def task_of(description: Mapping[str, Any]) -> Task:
    """Returns the task of an entry of tasks.yaml, or of `Task.describe`; an unknown or missing field is a TypeError."""
    fields = {name: _as_tuple(v) for name, v in description.items() if name not in DERIVED}
    return Task(**fields)


def _as_tuple(value: Any) -> Any:
    """Returns a list, with the lists in it, as tuples, and other values as they are."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _read_tasks() -> Iterator[Task]:
    """Yields the tasks of tasks.yaml."""
    benchmarks = yaml.safe_load(Path(__file__).with_name("tasks.yaml").read_text(encoding="utf-8"))
    for benchmark, tasks in benchmarks.items():
        common = tasks.pop("common", {}) | {"benchmark": benchmark}
        for name, fields in tasks.items():
            yield task_of(common | fields | {"name": name})


TASKS: dict[str, Task] = {task.name: task for task in _read_tasks()}
