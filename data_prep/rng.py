"""Random numbers as pure functions of integers: generators, and permutations that need no memory."""

from __future__ import annotations

import math

import numpy as np

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15  # splitmix64's increment


def generator(seed: int, *numbers: int) -> np.random.Generator:
    """Returns the generator of a seed and up to three integers: equal numbers give equal draws.

    Philox counts (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"). The seed is
    its key, and the numbers choose the stretch of 2^64 counts, so no two generators overlap.
    """
    counter = np.array([0, *numbers, 0, 0, 0][:4], np.uint64)
    return np.random.Generator(np.random.Philox(key=seed & MASK, counter=counter))


def hashed(*numbers: int) -> int:
    """Returns a 64-bit hash of integers, by splitmix64's finaliser (Steele, Lea and Flood, 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + GAMMA) & MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return state


def permuted(index: int, size: int, key: int) -> int:
    """Returns the element `index` of the pseudo-random permutation of range(size) that `key` chooses.

    A Feistel network on a nearly square rectangle of at least `size` numbers, applied until the
    result lies inside the range (Black and Rogaway, 2002).
    """
    width = math.isqrt(max(size - 1, 0)) + 1
    height = -(-size // width)
    while True:
        left, right = divmod(index, width)
        for turn in range(2):
            left = (left + hashed(key, 4 * right + turn)) % height
            right = (right + hashed(key, 4 * left + turn + 2)) % width
        index = left * width + right
        if index < size:
            return index
