"""The rows drawn are the same for ever: these hashes may never change."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from finetune.data.splits import draw_balanced, draw_rows, hold_out, noisy_labels, publish
from multicls.errors import UserError
from multicls.files import read_json

SKEWED = [float(row % 10 == 0) + float(row % 50 == 0) for row in range(500)]  # 450, 40 and 10 rows of three classes


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


def test_uniform() -> None:
    """Over many seeds every row is drawn about equally often: 400 draws of 10 of 40 are 100 +- 5 sd (8.7) a row."""
    counts = [0] * 40
    for seed in range(400):
        for row in draw_rows(40, 10, seed):
            counts[row] += 1
    assert min(counts) > 56 and max(counts) < 144


def test_committed_hashes_of_the_options() -> None:
    rows = draw_rows(500, 100, 1)
    labels = [SKEWED[row] for row in rows]
    assert sha256(draw_balanced(SKEWED, 100, 1)) == "1420297008205fd411de8ef5ce81e58beb00053f7080f9e2eac011884452c6e0"
    assert (
        sha256(sorted(hold_out(rows, labels, rows, 0.2, 1)))
        == "2a06517c57e3b243fb33012dc758f0d847d1d4aaf4991fc00b6f4b6a408a0ef1"
    )
    assert (
        sha256(map(int, noisy_labels(rows, labels, 3, 0.3, 1)))
        == "9485faafdb75258a65ca3f85bf34aaca3ea69c138f663c3eb8b857e5f7bc2298"
    )


def test_balanced_takes_as_many_of_each_class_as_there_are() -> None:
    for size, counts in ((9, [3, 3, 3]), (31, [11, 10, 10]), (100, [50, 40, 10]), (1000, [450, 40, 10])):
        rows = draw_balanced(SKEWED, size, 1)
        assert rows == sorted(set(rows))
        assert sorted(Counter(SKEWED[row] for row in rows).values(), reverse=True) == counts
    assert set(draw_balanced(SKEWED, 31, 1)) < set(draw_balanced(SKEWED, 100, 1)) != set(draw_balanced(SKEWED, 100, 2))


def test_label_noise_hits_the_share_asked_for_and_every_other_label_alike() -> None:
    rows, labels = list(range(3000)), [0.0] * 3000
    noisy = noisy_labels(rows, labels, 4, 0.2, 1)
    hit = [label for label in noisy if label != 0.0]
    assert len(hit) == 600 and set(hit) == {1.0, 2.0, 3.0}
    assert all(abs(count - 200) < 5 * 11.5 for count in Counter(hit).values())  # sd of a count: 11.5
    assert noisy_labels(rows, labels, 4, 0.0, 1) == labels != noisy_labels(rows, labels, 4, 0.2, 2) != noisy
    few = [7, 5, 2999]  # the same row gets the same label in whatever sample it is
    assert noisy_labels(few, [0.0] * 3, 4, 1.0, 1) == [noisy_labels(rows, labels, 4, 1.0, 1)[row] for row in few]
    assert noisy_labels([3, 8], [0.0, 1.0], 2, 1.0, 1) == [1.0, 0.0]


def test_holdout_keeps_classes_in_proportion_and_units_together() -> None:
    rows = list(range(500))
    held = hold_out(rows, SKEWED, rows, 0.2, 1)
    assert Counter(SKEWED[row] for row in held) == {0.0: 90, 1.0: 8, 2.0: 2}
    questions = [row // 7 for row in rows]
    grouped = hold_out(rows, [0] * 500, questions, 0.2, 1)
    assert {row // 7 for row in grouped}.isdisjoint(row // 7 for row in set(rows) - grouped)
    assert len({row // 7 for row in grouped}) == round(0.2 * 72)
    assert len(hold_out([4, 9], [0, 1], [4, 9], 0.01, 1)) == len(hold_out([4, 9], [0, 1], [4, 9], 0.99, 1)) == 1


def test_an_index_file_is_written_once_and_compared_ever_after(tmp_path: Path) -> None:
    path = tmp_path / "splits" / "rte-100-uniform-seed1.json"
    publish(path, [1, 5], 9, "train", "aa")
    before = path.read_bytes()
    publish(path, [1, 5], 9, "train", "aa")
    with pytest.raises(UserError, match="seed1.json: other rows were drawn.*--output_dir.*--task_name"):
        publish(path, [1, 6], 9, "train", "aa")
    for rows, num_rows, content in (([1, 5], 10, "aa"), ([1, 5], 9, "bb")):
        with pytest.raises(UserError, match="seed1.json: the earlier runs of this task read other data"):
            publish(path, rows, num_rows, "train", content)
    assert path.read_bytes() == before
    publish(tmp_path / "full.json", range(9), 9, "train", "aa")
    assert read_json(tmp_path / "full.json")["rows"] == "all"
    with pytest.raises(UserError, match="read other data"):
        publish(tmp_path / "full.json", range(9), 9, "train", "bb")
