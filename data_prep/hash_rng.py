"""Random numbers without a generator: each is a hash of the numbers that it depends on, and of nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np

GAMMA = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's increment


def hashed(key: Any, *numbers: Any) -> np.ndarray:
    """Returns uint64 hashes of integers, or of integer arrays that broadcast together; at least one axis.

    `key` is an earlier result, or 0 to begin with: hashed(hashed(0, 1), 2) equals hashed(0, 1, 2).
    """
    state = np.atleast_1d(key).astype(np.uint64)
    for number in numbers:
        state = state + (np.atleast_1d(number).astype(np.uint64) + GAMMA)
        # splitmix64's finaliser (Steele, Lea and Flood, 2014)
        state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return state


def uniform(hashes: np.ndarray) -> np.ndarray:
    """Maps hashes to numbers in [0, 1) by their upper bits."""
    numbers: np.ndarray = (hashes >> np.uint64(11)) * 2.0**-53
    return numbers


def randint(hashes: np.ndarray, size: Any) -> np.ndarray:
    """Maps hashes to int64 in range(size); `size` is a number or an array."""
    numbers: np.ndarray = (hashes % np.asarray(size).astype(np.uint64)).astype(np.int64)
    return numbers


def permuted(index: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Returns the positions of `index` in pseudo-random permutations of range(size), without memory.

    A Feistel network on a nearly square rectangle of at least `size` numbers, walked until it lands inside (Black and
    Rogaway, 2002). The arrays broadcast together.

    Args:
        index: numbers in range(size).
        size: lengths of the permutations.
        key: hashes that choose the permutations.
    """
    width = np.ceil(np.sqrt(size)).astype(np.int64)
    height = -(-size // width)
    walking = index < size  # all of them, at first
    while walking.any():
        left, right = np.divmod(index, width)
        for turn in range(2):
            left = (left + randint(hashed(key, 4 * right + turn), height)) % height
            right = (right + randint(hashed(key, 4 * left + turn + 2), width)) % width
        index = np.where(walking, left * width + right, index)
        walking = index >= size
    return index
