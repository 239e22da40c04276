"""One labelled example, and the examples of a task."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from finetune.tasks import Task

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Example:
    """One labelled example."""

    id: str  # unique in its split: "FILE:NUMBER"; for a test row NUMBER is the benchmark's own index
    texts: tuple[str, ...]  # in a choice task each sequence begins with them
    label: float  # class index or score; NaN if it is hidden; 0.0 if there may be several labels
    part: str = ""  # the part of dev or test
    choices: tuple[str, ...] = ()  # the last segment of each choice
    spans: tuple[tuple[int, int, int], ...] = ()  # (index of the text, first character, end)
    group: str = ""  # examples judged together: a MultiRC question, a ReCoRD query
    answer: str = ""  # what a submission names (ReCoRD's entity)
    labels: tuple[float, ...] = ()  # 1.0 or 0.0 for each class, if there may be several labels
    passage: str = ""  # identity of the text that examples share (`Task.passage`)

    @property
    def classes(self) -> list[int]:
        """Indices of the classes: one, or any number in a multi-label task; none if hidden."""
        if self.labels:
            return [index for index, value in enumerate(self.labels) if value]
        return [] if math.isnan(self.label) else [int(self.label)]


@dataclass(frozen=True)
class TaskData:
    """The examples of a task."""

    task: Task
    train: list[Example]
    dev: list[Example]  # to evaluate on
    test: list[Example] = field(default_factory=list)  # to score or predict at the end
    notes: list[str] = field(default_factory=list)  # what a reader of every result has to know

    @cached_property
    def sha256(self) -> str:
        """Hash (16 hex digits) of all that train and dev hold, except ids, which name files."""
        return _sha256(self.task, (*self.train, *self.dev))

    @cached_property
    def tests_sha256(self) -> str:
        """Hash (16 hex digits) of all that the test rows hold, except ids."""
        return _sha256(self.task, self.test)


def _sha256(task: Task, examples: Sequence[Example]) -> str:
    digest = hashlib.sha256(json.dumps([task.labels, task.label_scale]).encode())
    for example in examples:
        values = [value for name, value in vars(example).items() if name != "id"]
        digest.update(json.dumps(values).encode())
    return digest.hexdigest()[:16]


def example_arrays(examples: Sequence[Example], outputs: Array) -> dict[str, Array]:
    """Returns what scores need, by name.

    `logits` (N, C); `labels` (N,), NaN if hidden, or (N, C); `ids`, `parts`, `groups`, `answers`, `passages` (N,).
    """
    labels = np.array([example.labels or example.label for example in examples], dtype=float)
    arrays = {"logits": outputs, "labels": labels}
    for name in ("id", "part", "group", "answer", "passage"):
        arrays[f"{name}s"] = np.array([getattr(example, name) for example in examples], dtype=str)
    return arrays


def passage_id(text: str) -> str:
    """Returns a short hash that identifies a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
