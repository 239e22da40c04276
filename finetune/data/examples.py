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
        id: unique in its split: "FILE:NUMBER", of a test row with the benchmark's own index.
        texts: its texts; a choice is made between sequences that begin with them.
        label: class index or score; NaN where the benchmark hides it.
        part: the part of dev or test that it belongs to.
        choices: the last segment of each choice.
        spans: (index of the text, first character, character after the last) of each.
        group: rows of one group are judged together (a MultiRC question, a ReCoRD query, a Winogender pair).
        answer: what a submission names (ReCoRD's entity).
    """

    id: str
    texts: tuple[str, ...]
    label: float
    part: str = ""
    choices: tuple[str, ...] = ()
    spans: tuple[tuple[int, int, int], ...] = ()
    group: str = ""
    answer: str = ""


@dataclass(frozen=True)
class TaskData:
    """The rows of a task.

    Attributes:
        train: None where there is no train file.
        dev: empty for a task that only has test rows.
        notes: belong in every result.
        test: where they were asked for.
    """

    train: list[LabeledExample] | None
    dev: list[LabeledExample]
    notes: list[str] = field(default_factory=list)
    test: list[LabeledExample] = field(default_factory=list)


def fingerprint(examples: Iterable[LabeledExample]) -> str:
    """SHA-256 (16 hex digits) over all that is read of the rows but the part."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps([example.id, example.texts, example.label, example.choices, example.spans]).encode())
    return digest.hexdigest()[:16]
