"""Draws the rows of a run by SHA-256: the same training subset and validation split on every machine, for ever."""

import hashlib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

from finetune.tasks import TaskData
from multicls.console import count
from multicls.errors import UserError

HOLDOUT = 0.2  # share of the subset in the validation split


def select_rows(data: TaskData, size: int | str, subset: int, holdout: bool) -> TaskData:
    """Draws a training subset of `size` rows ("full": all), and a validation split of it if `holdout` is set.

    Rows of a passage (or question) stay on one side, classes in proportion.
    """
    total = len(data.train)
    rows = list(range(total)) if isinstance(size, str) else draw_rows(total, size, subset)
    held = set[int]()
    if holdout:
        drawn = {row: data.train[row] for row in rows}
        no_class = data.task.is_regression or any(example.group for example in drawn.values())
        table = {row: (0 if no_class else e.label, e.passage or e.id) for row, e in drawn.items()}
        held = hold_out(table, HOLDOUT, subset)
    train = [data.train[row] for row in rows if row not in held]
    validation = [data.train[row] for row in rows if row in held]
    notes = list(data.notes)
    if not isinstance(size, str) and size > total:
        notes.append(f"--train_size {size}: there are {count(total, 'row')}, and all are taken")
    is_subset = len(train) < total
    return replace(data, train=train, validation=validation, notes=notes, is_subset=is_subset)


def draw_rows(num_rows: int, size: int, seed: int) -> list[int]:
    """Draws `size` of `num_rows` rows without replacement; returns their indices, ascending.

    Rows are ranked by SHA-256 of "seed:index" and the first ones taken. No version of a random generator changes the
    subset, and a smaller subset is a part of every larger one of the same seed.
    """
    return sorted(_ranked(range(num_rows), f"{seed}")[:size])


def hold_out(
    rows: Mapping[int, tuple[Hashable, Hashable]], share: float, seed: int | str
) -> set[int]:
    """Returns the rows of about `share` of the units, at least one and not all, with classes in proportion.

    Args:
        rows: class and unit of each row. If all classes are equal, none is kept in proportion. Rows of one unit (a
            passage) stay together; the unit has the class of its first row.
        seed: seed of the ranking, or a name, which no seed equals.

    Raises:
        UserError: There is one unit only.
    """
    if len({unit for _, unit in rows.values()}) < 2:
        what = count(len(rows), "training row")
        raise UserError(f"{what} of one text or passage cannot be divided; add rows.")
    import pandas as pd  # here, because commands that only check their flags read this module

    table = pd.DataFrame(list(rows.values()), index=list(rows), columns=["class", "unit"])
    first = table.drop_duplicates("unit")
    first = first.loc[_ranked(first.index, f"holdout:{seed}")]
    of_class = first.groupby("class")["unit"]
    ranks = (of_class.cumcount() + 0.5) / of_class.transform("size")
    number = min(max(1, round(share * len(ranks))), len(ranks) - 1)
    chosen = first["unit"][ranks.sort_values(kind="stable").index[:number]]
    return set(table.index[table["unit"].isin(chosen)])


def _ranked(rows: Iterable[int], prefix: str) -> list[int]:
    return sorted(rows, key=lambda row: hashlib.sha256(f"{prefix}:{row}".encode()).digest())
