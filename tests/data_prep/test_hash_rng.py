"""Random numbers without a generator."""

from __future__ import annotations

import numpy as np
import pytest

from data_prep.hash_rng import hashed, permuted, randint, uniform


def test_hashes_depend_on_every_number_and_on_nothing_else() -> None:
    together = hashed(0, 7, np.arange(5)[:, None], np.arange(3))
    assert together.shape == (5, 3) and len(np.unique(together)) == 15
    assert together[4, 2] == hashed(0, 7, 4, 2)[0] == hashed(hashed(0, 7), 4, 2)[0]
    assert hashed(0, 1, 2) != hashed(0, 2, 1)


def test_hashes_of_neighbours_are_uniform_and_independent() -> None:
    numbers = uniform(hashed(0, 3, np.arange(100_000)))
    assert numbers.min() >= 0 and numbers.max() < 1
    share = np.histogram(numbers, bins=50, range=(0, 1))[0] / len(numbers)
    assert share == pytest.approx(0.02, abs=0.002)
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.01
    sixths = np.bincount(randint(hashed(0, 4, np.arange(60_000)), 6), minlength=6)
    assert sixths == pytest.approx(10_000, rel=0.05)


@pytest.mark.parametrize("size", [1, 2, 3, 97, 1024, 1803])
def test_permutation(size: int) -> None:
    first, second = (permuted(np.arange(size), np.array(size), hashed(0, 5, turn)).tolist() for turn in (1, 2))
    assert sorted(first) == sorted(second) == list(range(size))
    if size > 90:
        assert first != sorted(first) and first != second
        assert abs(np.corrcoef(first, range(size))[0, 1]) < 0.2


def test_permutations_of_several_sizes_at_once() -> None:
    sizes, keys = np.array([5, 400, 77]), hashed(0, np.arange(3))
    for index in range(5):
        together = permuted(np.full(3, index), sizes, keys)
        assert together.tolist() == [
            int(permuted(np.array([index]), s, k)[0]) for s, k in zip(sizes, keys, strict=True)
        ]
