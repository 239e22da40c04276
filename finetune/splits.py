"""Which train rows a run sees: a fixed, seeded, uniform sample, the same on every machine for ever."""

from __future__ import annotations

import hashlib


def draw_rows(num_rows: int, size: int, seed: int) -> list[int]:
    """Draws `size` of `num_rows` rows without replacement.

    Rows are ranked by SHA-256 of "seed:index" and the first ones taken, so the sample needs no random generator whose
    stream a new version may change; a smaller sample is a part of every larger one of the same seed.

    Returns:
        Row indices, ascending; all of them when there are no more than `size`.
    """
    ranked = sorted(range(num_rows), key=lambda row: hashlib.sha256(f"{seed}:{row}".encode()).digest())
    return sorted(ranked[:size])
