"""Draws, holds out and mislabels train rows by SHA-256: the same rows on every machine, for ever."""

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
    stream a new version may change; a smaller sample is a part of every larger one of the same seed. The indices
    ascend; all are returned if there are no more than `size`.
    """
    return sorted(_ranked(range(num_rows), f"{seed}")[:size])


def draw_balanced(labels: Sequence[float], size: int, seed: int) -> list[int]:
    """Draws `size` rows, equally many of each class, in the ranking of `draw_rows`.

    The classes take turns, each giving its next row: counts differ by one at most unless a class runs out. A smaller
    sample is a part of each larger one here, too. The indices ascend.
    """
    turns = _turns(_ranked(range(len(labels)), f"{seed}"), dict(enumerate(labels)))
    return sorted(row for _, _, row in sorted(turns)[:size])


def noisy_labels(
    rows: Sequence[int], labels: Sequence[float], num_classes: int, share: float, seed: int
) -> list[float]:
    """Returns the class indices `labels` after replacing `share` of them, each other label being as likely.

    The share is rounded to whole rows. The noise depends on the row indices `rows`, not on the order of the list.
    """
    hit = set(_ranked(rows, f"noise:{seed}")[: round(share * len(rows))])
    return [
        (label + 1 + int.from_bytes(_digest(f"label:{seed}", row), "big") % (num_classes - 1)) % num_classes
        if row in hit
        else label
        for row, label in zip(rows, labels, strict=True)
    ]


def hold_out(
    rows: Sequence[int], classes: Sequence[Hashable], units: Sequence[Hashable], share: float, seed: int | str
) -> set[int]:
    """Returns the rows of about `share` of the units, at least one and not all, with classes in proportion.

    Args:
        rows: the rows to choose from.
        classes: class of each row; if all are equal, no class is kept in proportion.
        units: unit of each row. Rows of one unit (a passage) stay together; the unit has the class of its first row.
        share: share of the units to hold out.
        seed: seed of the ranking, or a name for one that no seed gives.
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


def publish(path: Path, rows: Sequence[int], num_rows: int, source: str, content: str, write: bool = True) -> None:
    """Writes the index file of a sample, or compares with the one that is there; without `write` only compares.

    Args:
        rows: indices into the rows of `source`, from 0, in the file's order.
        num_rows: number of rows of `source`, the split they were drawn from.
        content: fingerprint of the data, `TaskRows.content`.

    Raises:
        UserError: The file is about other data or another sample.
    """
    drawn = "all" if len(rows) == num_rows else list(rows)
    sample = {"split": source, "split_rows": num_rows, "data": content, "rows": drawn}
    if not path.exists():
        if write:
            write_json(path, sample)
        return
    before = read_json(path)
    if before != sample:
        same = all(before.get(key) == sample[key] for key in ("split", "split_rows", "data"))
        what = "other rows were drawn" if same else "the earlier runs of this task read other data"
        raise UserError(
            f"{path}: {what}, so their results do not belong together. Give another --output_dir, for your own rows "
            "another --task_name, or the data of the earlier runs."
        )


def _digest(prefix: str, row: int) -> bytes:
    return hashlib.sha256(f"{prefix}:{row}".encode()).digest()


def _turns(ranked: Sequence[int], class_of: Mapping[int, Hashable]) -> list[tuple[int, int, int]]:
    """Returns (number of rows of its class before it, place among all, row) for each row."""
    before: Counter[Hashable] = Counter()
    turns = []
    for place, row in enumerate(ranked):
        turns.append((before[class_of[row]], place, row))
        before[class_of[row]] += 1
    return turns


def _ranked(rows: Iterable[int], prefix: str) -> list[int]:
    return sorted(rows, key=lambda row: _digest(prefix, row))
