"""What has been seen before: documents, nearly the same documents, and lines that stand in too many of them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

import numpy as np

from multicls.errors import UserError

REPEATS = 10  # a line that has stood in as many documents is boilerplate from then on
LINE_LENGTH = 40  # characters; what is shorter may well be said in many documents
LINES_WATCHED = 1 << 18
# 9 bands of 13 MinHash values each: two documents share a band with probability 1 - (1 - J^13)^9, which is one half at
# a Jaccard similarity J of 0.82 between their sets of five-word sequences.
BANDS, BAND_WIDTH, SHINGLE = 9, 13, 5


class SeenHashes:
    """A set of 64-bit hashes that takes 8 bytes each, more while it merges: 1.1 GB at the peak for 100 million.

    Sorted runs whose sizes at least double from the newest to the oldest, searched by bisection.
    """

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def holds(self, hashes: np.ndarray) -> np.ndarray:
        """(n,) bool for (n,) uint64 hashes: which of them are in the set."""
        found = np.zeros(len(hashes), bool)
        for run in self._runs:
            place = np.minimum(np.searchsorted(run, hashes), len(run) - 1)
            found |= run[place] == hashes
        return found

    def add(self, hashes: np.ndarray) -> None:
        """Adds (n,) uint64 hashes that are not in the set."""
        if len(hashes):
            self._runs.append(np.unique(hashes))
        while len(self._runs) > 1 and 2 * len(self._runs[-1]) > len(self._runs[-2]):
            newest = self._runs.pop()
            self._runs[-1] = np.concatenate([self._runs[-1], newest])
            self._runs[-1].sort(kind="stable")


class Duplicates:
    """Tells which documents are, exactly or nearly, copies of one that was kept before.

    Nearly: one band of MinHash values agrees (locality-sensitive hashing). Memory: 8 bytes a document for exact copies,
    72 more for near ones.
    """

    def __init__(self, near: bool) -> None:
        self._sets = [SeenHashes() for _ in range(1 + BANDS * near)]

    def check(self, keys: Sequence[np.ndarray]) -> list[str]:
        """Why each of n documents is to be dropped: it is a copy of one remembered, or of one before it here; or "".

        Args:
            keys: n times (1,) uint64, the hash of a document, or (1 + BANDS,) with its MinHash bands.
        """
        if not keys:
            return []
        table = np.stack(keys)
        seen = np.stack([known.holds(column) for known, column in zip(self._sets, table.T, strict=True)], axis=1)
        reasons: list[str] = []
        inside: set[tuple[int, int]] = set()
        for found, row in zip(seen.tolist(), table.tolist(), strict=True):
            entries = list(enumerate(row))
            hits = [hit or entry in inside for hit, entry in zip(found, entries, strict=True)]
            reasons.append("documents_duplicate" if hits[0] else "documents_near_duplicate" if any(hits) else "")
            if not any(hits):
                inside.update(entries)
        return reasons

    def remember(self, keys: np.ndarray) -> None:
        """Takes the (n, 1) or (n, 1 + BANDS) keys of documents that are kept."""
        for known, column in zip(self._sets, keys.T, strict=True):
            known.add(column[~known.holds(column)])


class RepeatedLines:
    """Finds lines that stand in more than `REPEATS` documents, in memory that does not grow with the corpus.

    Keeps a count for at most `LINES_WATCHED` lines; when there are more, all counts are lowered until half of them are
    gone (lossy counting: Manku and Motwani, 2002). So a count is never too high, and nothing is taken for boilerplate
    that was not seen often enough; only rare repetitions far apart may be missed.
    """

    def __init__(self, hashes: np.ndarray | None = None, counts: np.ndarray | None = None) -> None:
        self._counts: dict[int, int] = {}
        if hashes is not None and counts is not None:
            self._counts = dict(zip(hashes.tolist(), counts.tolist(), strict=True))

    def add(self, hashes: list[int]) -> list[bool]:
        """Takes the hashes of the different lines of a document; says for each whether it is boilerplate."""
        counts = self._counts
        repeated = []
        for line in hashes:
            count = counts.get(line, 0)
            repeated.append(count >= REPEATS)
            counts[line] = min(count + 1, REPEATS)
        if len(counts) > LINES_WATCHED:
            cut = int(np.median(np.fromiter(counts.values(), np.int64, count=len(counts))))
            self._counts = {line: count - cut for line, count in counts.items() if count > cut}
        return repeated

    def state(self) -> tuple[np.ndarray, np.ndarray]:
        """(hashes, counts) from which the object can be made again."""
        count = len(self._counts)
        return np.fromiter(self._counts, np.uint64, count), np.fromiter(self._counts.values(), np.int8, count)


def minhash_bands(text: str) -> np.ndarray:
    """(BANDS,) uint64: the MinHash signature of the five-word sequences of a text, folded into bands."""
    from rensa import RMinHash

    words = text.lower().split()
    minhash = RMinHash(num_perm=BANDS * BAND_WIDTH, seed=0)
    minhash.update([" ".join(words[i : i + SHINGLE]) for i in range(max(1, len(words) - SHINGLE + 1))])
    signature = np.array(minhash.digest(), np.uint64).reshape(BANDS, BAND_WIDTH)
    folded = np.zeros(BANDS, np.uint64)
    for column in signature.T:
        folded = (folded ^ column) * np.uint64(0x9E3779B97F4A7C15)
        folded ^= folded >> np.uint64(29)
    return folded


def check_near_duplicates() -> str:
    """The version of rensa.

    Raises:
        UserError: it is not installed.
    """
    try:
        return metadata.version("rensa")
    except metadata.PackageNotFoundError:
        raise UserError("--near_duplicates: needs the package rensa: pip install rensa.") from None
