"""Which train rows a run sees, and with which labels: drawn by SHA-256, the same on every machine for ever."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path

from multicls.errors import UserError
from multicls.files import read_json, write_json


def draw_rows(num_rows: int, size: int, seed: int) -> list[int]:
    """Draws `size` of `num_rows` rows without replacement, uniformly.

    Rows are ranked by SHA-256 of "seed:index" and the first ones taken, so the sample needs no random generator whose
    stream a new version may change; a smaller sample is a part of every larger one of the same seed.

    Returns:
        Row indices, ascending; all of them when there are no more than `size`.
    """
    return sorted(_ranked(range(num_rows), f"{seed}")[:size])


def draw_balanced(labels: Sequence[float], size: int, seed: int) -> list[int]:
    """Draws `size` rows, as many of each class as there are, in the ranking of `draw_rows`.

    The classes take turns, each giving its next row: counts differ by one at most unless a class runs out. A smaller
    sample is a part of every larger one here, too.

    Returns:
        Row indices, ascending.
    """
    turns = _turns(_ranked(range(len(labels)), f"{seed}"), dict(enumerate(labels)))
    return sorted(row for _, _, row in sorted(turns)[:size])


def noisy_labels(
    rows: Sequence[int], labels: Sequence[float], num_classes: int, share: float, seed: int
) -> list[float]:
    """The labels with `share` of them, rounded to whole rows, replaced by another one, each other one as likely.

    Args:
        rows: what the labels are of; which rows are hit and by what depends on these numbers, not on their places.
        labels: class indices.
    """
    hit = set(_ranked(rows, f"noise:{seed}")[: round(share * len(rows))])
    return [
        (label + 1 + int.from_bytes(_digest(f"label:{seed}", row), "big") % (num_classes - 1)) % num_classes
        if row in hit
        else label
        for row, label in zip(rows, labels, strict=True)
    ]


def hold_out(
    rows: Sequence[int], classes: Sequence[Hashable], units: Sequence[Hashable], share: float, seed: int
) -> set[int]:
    """Chooses about `share` of the rows, at least one unit and not all, with classes in proportion.

    Args:
        rows: to choose from.
        classes: the class of each row; all equal: none is kept in proportion.
        units: rows of one unit (the answers to one question) stay together; they count by the class of the first.

    Returns:
        The rows held out.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for row, unit in zip(rows, units, strict=True):
        members[unit].append(row)
    leaders, class_of = {unit[0]: unit for unit in members.values()}, dict(zip(rows, classes, strict=True))
    sizes = Counter(class_of[row] for row in leaders)
    turns = _turns(_ranked(leaders, f"holdout:{seed}"), class_of)
    places = sorted(((before + 0.5) / sizes[class_of[row]], rank, row) for before, rank, row in turns)
    count = min(max(1, round(share * len(places))), len(places) - 1)
    return {row for _, _, leader in places[:count] for row in leaders[leader]}


def publish(path: Path, rows: Sequence[int], num_rows: int, source: str) -> None:
    """Writes the index file of a sample, or compares with the one that is there.

    Args:
        rows: indices into the rows of `source`, from 0, in the file's order.
        num_rows: rows that `source` has.
        source: split they were drawn from.

    Raises:
        UserError: another sample stands in the file.
    """
    content = {"split": source, "split_rows": num_rows, "rows": list(rows)}
    if not path.exists():
        write_json(path, content)
    elif read_json(path) != content:
        raise UserError(
            f"{path}: holds other rows than are drawn now ({len(rows)} of {num_rows} of {source}): the data are not "
            "those of the earlier runs. Give another --output_dir, or the data of those runs."
        )


def _digest(prefix: str, row: int) -> bytes:
    return hashlib.sha256(f"{prefix}:{row}".encode()).digest()


def _turns(ranked: Sequence[int], class_of: Mapping[int, Hashable]) -> list[tuple[int, int, int]]:
    """(rows of its class before it, place among all, row) for each row."""
    before: Counter[Hashable] = Counter()
    turns = []
    for place, row in enumerate(ranked):
        turns.append((before[class_of[row]], place, row))
        before[class_of[row]] += 1
    return turns


def _ranked(rows: Iterable[int], prefix: str) -> list[int]:
    return sorted(rows, key=lambda row: _digest(prefix, row))
