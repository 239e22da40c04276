"""Draws the rows of a run by SHA-256: the same training subset and validation split on every machine, for ever."""

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from finetune.tasks import Example, Task, TaskData
from multicls.console import count
from multicls.errors import UserError

HOLDOUT = 0.2  # share of the subset in the validation split


def select_rows(data: TaskData, size: int | str, subset: int, holdout: bool) -> TaskData:
    """Draws a training subset of `size` rows ("full": all), and a validation split of it if `holdout` is set.

    "8-shot" is 8 rows of each class, or fewer of a class that has no more. Rows of a passage (or question) stay on one
    side, classes in proportion.
    """
    total, notes = len(data.train), list(data.notes)
    if isinstance(size, str) and size != "full":
        rows, few = draw_shots(data, int(size.removesuffix("-shot")), subset)
        notes += few
    else:
        rows = draw_rows(total, size if isinstance(size, int) else total, subset)
    held = set[int]()
    if holdout:
        drawn = [data.train[row] for row in rows]
        units = zip(strata(data.task, drawn), (row.unit for row in drawn), strict=True)
        held = hold_out(dict(zip(rows, units, strict=True)), subset)
    train = [data.train[row] for row in rows if row not in held]
    validation = [data.train[row] for row in rows if row in held]
    if not isinstance(size, str) and size > total:
        notes.append(f"--train_size {size}: there are {count(total, 'row')}, and all are taken")
    is_subset = len(train) < total
    return replace(data, train=train, validation=validation, notes=notes, is_subset=is_subset)


def draw_shots(data: TaskData, shots: int, seed: int) -> tuple[list[int], list[str]]:
    """Draws that many rows of each class (of several labels: by the rarest); returns indices, ascending, and notes."""
    task = data.task
    if task.is_regression or task.num_choices or any(row.group for row in data.train):
        raise UserError(f"--train_size {shots}-shot: {task.name} has no classes; set a number.")
    taken, drawn = Counter[Hashable](), list[int]()
    classes = strata(task, data.train)
    for row in _ranked(range(len(classes)), f"{seed}"):
        if taken[classes[row]] < shots:
            taken[classes[row]] += 1
            drawn.append(row)
    few = sum(number < shots for number in taken.values())
    note = f"--train_size {shots}-shot: {few} of {len(taken)} classes have fewer rows"
    return sorted(drawn), [note] if few else []


def strata(task: Task, rows: Sequence[Example]) -> list[Hashable]:
    """Returns what is kept in proportion for each row: its class, or of several the rarest; nothing of scores."""
    if task.is_regression or any(row.group for row in rows):
        return [0] * len(rows)
    if not task.multi_label:
        return [row.label for row in rows]
    totals = Counter(index for row in rows for index in row.classes)
    return [min(row.classes, key=totals.__getitem__, default=-1) for row in rows]


def draw_rows(num_rows: int, size: int, seed: int) -> list[int]:
    """Draws `size` of `num_rows` rows without replacement; returns their indices, ascending.

    Rows are ranked by SHA-256 of "seed:index", so a smaller subset is a part of every larger one of the same seed.
    """
    return sorted(_ranked(range(num_rows), f"{seed}")[:size])


def hold_out(rows: Mapping[int, tuple[Hashable, Hashable]], seed: int) -> set[int]:
    """Returns the rows of about a fifth of the units, at least one and not all, with classes in proportion.

    Each class of two units or more is on both sides, as far as the number of units allows: the largest classes first.
    The last unit of a class is held only if all classes have one unit. A single unit is a `UserError`.

    Args:
        rows: class and unit of each row. If all classes are equal, none is kept in proportion. Rows of one unit (a
            passage) stay together; the unit has the class of its first row.
        seed: seed of the ranking.
    """
    if len({unit for _, unit in rows.values()}) < 2:
        what = count(len(rows), "training row")
        raise UserError(f"{what} of one text or passage cannot be divided; add rows.")
    import pandas as pd  # here, because commands that only check their flags read this module

    table = pd.DataFrame(list(rows.values()), index=list(rows), columns=["class", "unit"])
    first = table.drop_duplicates("unit")
    first = first.loc[_ranked(first.index, f"holdout:{seed}")]
    of_class = first.groupby("class")["unit"]
    position, size = of_class.cumcount(), of_class.transform("size")
    number = min(max(1, round(HOLDOUT * len(first))), len(first) - 1)
    # The first units of the largest classes come first, then others by their rank in their class.
    order = ((position + 0.5) / size).where(position > 0, -size)
    can_go = position < size - 1
    first = first.assign(order=order)[can_go if can_go.any() else ~can_go]
    chosen = first.sort_values("order", kind="stable")["unit"][:number]
    return set(table.index[table["unit"].isin(chosen)])


def _ranked(rows: Iterable[int], prefix: str) -> list[int]:
    return sorted(rows, key=lambda row: hashlib.sha256(f"{prefix}:{row}".encode()).digest())
