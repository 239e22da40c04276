"""One labelled row, and the rows of a task."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LabeledExample:
    """One row."""

    id: str  # unique in its split: "FILE:NUMBER"; for a test row NUMBER is the benchmark's own index
    texts: tuple[str, ...]  # in a choice task each sequence begins with them
    label: float  # class index or score; NaN if it is hidden; 0.0 if the task has several labels a row
    part: str = ""  # the part of dev or test that the row belongs to
    choices: tuple[str, ...] = ()  # the last segment of each choice
    spans: tuple[tuple[int, int, int], ...] = ()  # (index of the text, first character, character after the last)
    group: str = ""  # rows of one group are judged together (a MultiRC question, a ReCoRD query, a Winogender pair)
    answer: str = ""  # what a submission names (ReCoRD's entity)
    labels: tuple[float, ...] = ()  # 1.0 or 0.0 for each class, if the task has several labels a row
    passage: str = ""  # identity of the text that rows share (`Task.passage`); "" if they share none

    @property
    def classes(self) -> list[int]:
        """Indices of the row's classes: one, or any number if the task has several a row; none if they are hidden."""
        if self.labels:
            return [index for index, value in enumerate(self.labels) if value]
        return [] if math.isnan(self.label) else [int(self.label)]


@dataclass(frozen=True)
class TaskData:
    """The rows of a task."""

    train: list[LabeledExample] | None  # None if there is no train file
    dev: list[LabeledExample]  # to evaluate on
    notes: list[str] = field(default_factory=list)  # what a reader of every result has to know
    test: list[LabeledExample] = field(default_factory=list)  # labelled test rows of a user's own data


def fingerprint(examples: Iterable[LabeledExample], *about: object) -> str:
    """Returns a SHA-256 (16 hex digits) of all that the rows hold, except their ids, which name files.

    The order of the rows counts. `about` is what else decides the numbers, such as the names of the classes.
    """
    digest = hashlib.sha256(json.dumps(about).encode())
    for example in examples:
        digest.update(json.dumps([value for name, value in vars(example).items() if name != "id"]).encode())
    return digest.hexdigest()[:16]


def passage_id(text: str) -> str:
    """Returns a short hash that identifies a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
