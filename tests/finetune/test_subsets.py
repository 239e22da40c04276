"""The rows drawn are the same for ever: these hashes may never change."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.benchmark_tasks import read_task
from finetune.settings import RunSettings
from finetune.subsets import draw_rows, hold_out, select_rows
from finetune.tasks import TASKS, Example, TaskData
from multicls.errors import UserError

# 450, 40 and 10 rows of three classes
SKEWED = [float(row % 10 == 0) + float(row % 50 == 0) for row in range(500)]


def sha256(values: Iterable[object]) -> str:
    return hashlib.sha256(",".join(map(str, values)).encode()).hexdigest()


@pytest.mark.parametrize(
    ("num_rows", "size", "seed", "expected"),
    [
        (2490, 100, 1, "723db71cec5ae7938beb2232c8ca72435ff6d803df932727ed6ebd7c05042827"),
        (67349, 1000, 1, "08f791814a893a756e799b20ab278f047b1b4ba0eb0908b2327fc77ec6120d3e"),
        (2490, 100, 2, "c20c9e27c713eca3d75dde797f6a12c27297971138fca94dab064e09ec43a374"),
    ],
)
def test_committed_hashes(num_rows: int, size: int, seed: int, expected: str) -> None:
    rows = draw_rows(num_rows, size, seed)
    assert len(set(rows)) == size and rows == sorted(rows) and rows[0] >= 0 and rows[-1] < num_rows
    assert sha256(rows) == expected


def test_smaller_samples_are_part_of_larger_ones_and_a_large_size_takes_all() -> None:
    assert set(draw_rows(2490, 100, 1)) < set(draw_rows(2490, 1000, 1))
    assert draw_rows(50, 100, 1) == list(range(50))


def test_committed_hash_of_the_holdout() -> None:
    rows = draw_rows(500, 100, 1)
    table = {row: (SKEWED[row], row) for row in rows}
    expected = "2a06517c57e3b243fb33012dc758f0d847d1d4aaf4991fc00b6f4b6a408a0ef1"
    assert sha256(sorted(hold_out(table, 1))) == expected


def test_holdout_keeps_classes_in_proportion_and_units_together() -> None:
    rows = set(range(500))
    held = hold_out({row: (SKEWED[row], row) for row in rows}, 1)
    assert Counter(SKEWED[row] for row in held) == {0.0: 90, 1.0: 8, 2.0: 2}
    grouped = hold_out({row: (0, row // 7) for row in rows}, 1)
    assert {row // 7 for row in grouped}.isdisjoint(row // 7 for row in rows - grouped)
    assert len({row // 7 for row in grouped}) == round(0.2 * 72)
    two: dict[int, tuple[int, int]] = {4: (0, 4), 9: (1, 9)}
    assert len(hold_out(two, 1)) == 1
    with pytest.raises(UserError, match="2 training rows of one text or passage cannot be divided"):
        hold_out({4: (0, "a"), 9: (1, "a")}, 1)


@pytest.mark.parametrize("size", [300, "full"])
@pytest.mark.parametrize("name", ["multirc", "wsc", "wnli", "wic", "record"])
def test_no_held_out_passage_is_in_train(name: str, size: int | str, multicls_data: Path) -> None:
    data = read_task(TASKS[name], str(multicls_data))
    rows = select_rows(data, size, 1, True)
    train, validation = rows.splits["train"], rows.splits["validation"]
    learnt = {row.texts[0] for row in train}
    assert not [row for row in validation if row.texts[0] in learnt]
    total, drawn = len(data.train), len(train) + len(validation)
    assert drawn == (total if size == "full" else min(300, total))
    assert size == "full" or 0.08 < len(validation) / drawn < 0.35


def test_classes_stay_in_proportion_where_rows_share_nothing(multicls_data: Path) -> None:
    rows = select_rows(read_task(TASKS["rte"], str(multicls_data)), 100, 1, True)
    validation = rows.splits["validation"]
    drawn = [*rows.splits["train"], *validation]
    share = sum(row.label for row in drawn) / len(drawn)
    assert len(validation) == 20 and abs(sum(row.label for row in validation) - 20 * share) <= 1


def test_the_hash_covers_all_but_names_of_files() -> None:
    def sha256(*rows: Example, labels: tuple[str, ...] = ("a",)) -> str:
        return TaskData(replace(TASKS["sst2"], labels=labels), list(rows), []).sha256

    row = Example("train:1", ("a", "b"), 1.0)
    other: dict[str, Any] = {"part": "m", "group": "g", "answer": "z", "passage": "p"}
    other |= {"texts": ("a", "c"), "label": 0.0, "labels": (1.0,)}
    other |= {"choices": ("x",), "spans": ((0, 0, 1),)}
    hashes = {sha256(row), sha256(row, labels=("neg", "pos")), sha256(row, row)}
    hashes |= {sha256(replace(row, **{name: value})) for name, value in other.items()}
    assert len(hashes) == 3 + len(other) and set(vars(row)) == {*other, "id"}
    assert sha256(replace(row, id="validation:1")) == sha256(row)


def test_several_labels_a_row_are_held_out_by_the_rarest() -> None:
    task = replace(TASKS["sst2"], labels=("a", "b"), multi_label=True)
    rows = [Example(f"{n}", (f"{n}",), 0.0, labels=(1.0, float(n < 2))) for n in range(40)]
    splits = select_rows(TaskData(task, rows, []), "full", 1, True).splits
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 32, "validation": 8}
    assert sum(row.labels[1] for row in splits["validation"]) == 1
    notes = select_rows(TaskData(task, rows, []), 41, 1, False).notes
    assert "there are 40 rows, and all are taken" in notes[-1]


def test_shots_are_rows_of_each_class() -> None:
    """A class with fewer rows than shots gives all; the rows of 8 shots are among those of 16; scores have none."""
    rows = [Example(f"{n}", (f"{n}",), float(SKEWED[n])) for n in range(500)]
    data = TaskData(replace(TASKS["sst2"], labels=("a", "b", "c")), rows, [])
    drawn = {k: select_rows(data, f"{k}-shot", 1, False) for k in (8, 16)}
    counts = {k: Counter(row.label for row in part.train) for k, part in drawn.items()}
    assert counts[8] == {0.0: 8, 1.0: 8, 2.0: 8} and counts[16][2.0] == min(16, SKEWED.count(2.0))
    assert {row.id for row in drawn[8].train} < {row.id for row in drawn[16].train}
    assert "--train_size 16-shot: 1 of 3 classes have fewer rows" in drawn[16].notes
    assert drawn[8].is_subset and select_rows(data, "8-shot", 2, False) != drawn[8]
    with pytest.raises(UserError, match="8-shot: stsb has no classes"):
        select_rows(replace(data, task=TASKS["stsb"]), "8-shot", 1, False)
    settings = RunSettings(model="m", head="cls", task="rte", train_size="8-shot")
    assert settings.folder.parent.name == "rte-8-shot"
    with pytest.raises(ValueError, match="train_size"):
        RunSettings(model="m", head="cls", task="rte", train_size="0-shot")


@given(st.lists(st.integers(0, 5), min_size=2, max_size=60), st.integers(0, 3))
def test_every_class_of_two_units_is_on_both_sides_where_that_is_possible(
    classes: list[int], seed: int
) -> None:
    held = hold_out(dict(enumerate(zip(classes, range(len(classes)), strict=True))), seed)
    sizes, taken = Counter(classes), Counter(classes[row] for row in held)
    assert 1 <= len(held) < len(classes)
    if max(sizes.values()) > 1:
        assert all(taken[name] < size for name, size in sizes.items()), "all stay in train"
    several = [name for name, size in sizes.items() if size > 1]
    assert sum(taken[name] > 0 for name in several) >= min(len(several), len(held))
