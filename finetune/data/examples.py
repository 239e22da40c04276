"""One labelled row, and the rows of a task."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LabeledExample:
    """One row.

    Attributes:
        id: unique in its split: "FILE:NUMBER"; for a test row NUMBER is the benchmark's own index.
        texts: the texts of the row; in a choice task each sequence begins with them.
        label: class index or score; NaN if it is hidden; 0.0 if the task has several labels a row.
        part: the part of dev or test that the row belongs to.
        choices: the last segment of each choice.
        spans: (index of the text, first character, character after the last) of each marked span.
        group: rows of one group are judged together (a MultiRC question, a ReCoRD query, a Winogender pair).
        answer: what a submission names (ReCoRD's entity).
        labels: 1.0 or 0.0 for each class, if the task has several labels a row.
        passage: identity of the text that rows share (`Task.passage`); "" if they share none.
    """

    id: str
    texts: tuple[str, ...]
    label: float
    part: str = ""
    choices: tuple[str, ...] = ()
    spans: tuple[tuple[int, int, int], ...] = ()
    group: str = ""
    answer: str = ""
    labels: tuple[float, ...] = ()
    passage: str = ""


@dataclass(frozen=True)
class TaskData:
    """The rows of a task.

    Attributes:
        train: None if there is no train file.
        dev: the rows to evaluate on.
        notes: what a reader of every result has to know.
        test: labelled test rows of a user's own data.
    """

    train: list[LabeledExample] | None
    dev: list[LabeledExample]
    notes: list[str] = field(default_factory=list)
    test: list[LabeledExample] = field(default_factory=list)


def fingerprint(examples: Iterable[LabeledExample], *about: object) -> str:
    """Returns a SHA-256 (16 hex digits) of all that the rows hold, except their ids, which name files.

    Args:
        examples: the rows, whose order counts.
        *about: what else decides the numbers, such as the names of the classes.
    """
    digest = hashlib.sha256(json.dumps(about).encode())
    for example in examples:
        digest.update(json.dumps([value for name, value in vars(example).items() if name != "id"]).encode())
    return digest.hexdigest()[:16]


def passage_id(text: str) -> str:
    """Returns a short hash that identifies a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
