"""The rows drawn are the same for ever: these hashes may never change."""

from __future__ import annotations

import hashlib

import pytest

from finetune.splits import draw_rows


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
    assert hashlib.sha256(",".join(map(str, rows)).encode()).hexdigest() == expected


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
