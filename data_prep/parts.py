"""The part of a corpus that is built from one work unit, and what the build and the merge both do with its rows.

A part is a folder, written whole or not at all:

    rows-0.arrow   the documents that the unit keeps, in the format of a shard; missing if there are none. Only a file
                   that cannot be cut into units, because it is compressed, may need rows-1.arrow and more
    frequency.npy  (V,) int32: number of its rows that contain each token; missing if there are no rows
    hashes.npy     (3, H) uint64, ascending: hash, kind (0: whole document, 1 to BANDS: MinHash band), document
    lines.npy      (5, M) uint64, ascending: hash of a line, hash of its document, document, first sentence, end
    part.json      by file of rows: number of rows of each document, entry of the shard; drops; hashes of the input
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from multicls.corpus import MAX_TOKENS, ShardRow, occurrences
from multicls.errors import UserError
from multicls.files import sha256_of

LINE_LENGTH = 40  # characters; a shorter line may well stand in many documents
# 9 bands of 13 MinHash values each: two documents share a band with probability 1 - (1 - J^13)^9, which is one half at
# a Jaccard similarity J of 0.82 between their sets of five-word sequences.
BANDS, BAND_WIDTH, SHINGLE = 9, 13, 5


def rows_of(source: str, name: str, title: str, key: int, tokens: np.ndarray, lengths: np.ndarray) -> list[ShardRow]:
    """Returns the rows of a document: one, or several of about equal length if it is longer than `MAX_TOKENS`.

    Args:
        source: Name of the source.
        name: Name of the document.
        title: Its title.
        key: Hash of its text.
        tokens: (N,) token ids.
        lengths: (S,) number of tokens of each sentence, none 0.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    count = -(-len(tokens) // (MAX_TOKENS - int(lengths.max()))) if len(tokens) > MAX_TOKENS else 1
    cuts = [0, *(np.searchsorted(ends, len(tokens) * np.arange(1, count) / count) + 1).tolist(), len(lengths)]
    offsets = np.concatenate([[0], ends])
    rows = []
    for first, end in zip(cuts, cuts[1:], strict=False):
        own = offsets[first : end + 1]
        part = tokens[own[0] : own[-1]]
        rows.append(ShardRow(source, name, title, key, part, (own - own[0]).astype(np.int32), occurrences(part)))
    return rows


def row_frequency(rows: Sequence[ShardRow], vocabulary_size: int) -> np.ndarray:
    """Returns the number of rows that contain each token, (V,) int32."""
    tokens = np.concatenate([row.tokens for row in rows])
    counts = np.concatenate([row.counts for row in rows])
    # c occurrences in a row weigh 1/c each, so one together
    return np.rint(np.bincount(tokens, weights=1.0 / counts, minlength=vocabulary_size)).astype(np.int32)


def shard_entry(path: Path, rows: Sequence[ShardRow], documents: Sequence[int]) -> dict[str, Any]:
    """Returns the manifest's entry of a shard, and its counts by source.

    Args:
        path: File of the shard.
        rows: Its rows.
        documents: Number of rows of each document.
    """
    sources: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTED, 0))
    firsts = set(np.cumsum([0, *documents[:-1]]).tolist())
    for number, row in enumerate(rows):
        added = number in firsts, 1, len(row.offsets) - 1, len(row.tokens)
        for name, value in zip(COUNTED, added, strict=True):
            sources[row.source][name] += int(value)
    totals = {name: sum(counts[name] for counts in sources.values()) for name in COUNTED}
    return totals | {"bytes": path.stat().st_size, "sha256": sha256_of(path), "sources": dict(sources)}


COUNTED = ("documents", "rows", "sentences", "tokens")


def minhash_bands(text: str) -> np.ndarray:
    """Returns the MinHash signature of the five-word sequences of a text, folded into bands: (BANDS,) uint64."""
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


def rensa_version() -> str:
    """Returns the version of rensa.

    Raises:
        UserError: It is not installed.
    """
    try:
        return metadata.version("rensa")
    except metadata.PackageNotFoundError:
        raise UserError("--near_duplicates: needs the package rensa: pip install rensa.") from None
