"""Finds text that stands twice: near copies of documents, and rows of evaluation sets inside documents."""

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.lib.stride_tricks import sliding_window_view

from data_prep.sentences import NO_SPACES
from multicls.tables import read_table

# Near copies have one of 14 bands of 8 minima in common, as in FineWeb (Penedo et al., 2024, arXiv:2406.17557): 77 % of
# the documents that share three of four shingles (by Jaccard's measure), 92 % at 0.8, 5 % at 0.5.
BANDS, BAND = 14, 8
SHINGLE = 5  # tokens
AT_A_TIME = 1 << 16  # shingles, of which each takes half a KB
# Lengths, in words, of what is sought of an evaluation row (Brown et al., 2020, arXiv:2005.14165, appendix C).
LONGEST_GRAM, SHORTEST_GRAM = 13, 8
_WORD = re.compile(f"(?=\\w)[{NO_SPACES}]|[^\\W_{NO_SPACES}]+")
_FACTORS = np.random.default_rng(0).integers(1 << 63, size=LONGEST_GRAM, dtype=np.uint64)
_FACTORS = 2 * _FACTORS + np.uint64(1)


def _grams(values: np.ndarray, length: int) -> np.ndarray:
    """Returns a hash of each `length` consecutive values of (N,) uint64: (N - length + 1,) uint64, or none."""
    if len(values) < length:
        return np.zeros(0, np.uint64)
    return sliding_window_view(values, length) @ _FACTORS[:length]


@cache
def _empty_sketch() -> Any:
    from datasketch import MinHash

    return MinHash(BANDS * BAND, seed=1, hashfunc=int, scheme="affine32")


def band_keys(tokens: np.ndarray) -> list[int]:
    """Returns the `BANDS` keys of a document's tokens, (N,); near copies have at least one in common.

    MinHash (Broder, 1997) over the set of its shingles, which are five consecutive tokens.
    """
    shingles = _grams(tokens.astype(np.uint64), min(SHINGLE, len(tokens))) >> np.uint64(32)
    sketch = _empty_sketch().copy()
    for start in range(0, len(shingles), AT_A_TIME):
        sketch.update_batch(shingles[start : start + AT_A_TIME].tolist())
    bands = sketch.hashvalues.astype("<u4").reshape(BANDS, BAND)
    return [xxhash.xxh3_64_intdigest(band.tobytes()) for band in bands]


def _words(text: str) -> list[str]:
    """Returns the words of a text in small letters, without punctuation; a Chinese character is a word."""
    return _WORD.findall(text.casefold())


def _hashes(words: Sequence[str]) -> np.ndarray:
    return np.array([xxhash.xxh3_64_intdigest(word.encode()) for word in words], np.uint64)


class EvaluationRows(NamedTuple):
    """Runs of words of evaluation rows, as hashes: `grams[n]`, (G,) uint64 ascending, has those of n words.

    Of a cell of 13 words and more they are all runs of 13 words; a cell of 8 to 12 words is one. Shorter ones are not
    sought, as such phrases recur by chance.
    """

    grams: dict[int, np.ndarray]

    def marks(self, sentences: Sequence[str]) -> np.ndarray:
        """Returns which sentences of a document hold a part of a run, (S,) bool."""
        words = list(map(_words, sentences))
        hashes = _hashes(list(chain.from_iterable(words)))
        changes = np.zeros(len(hashes) + 1, np.int64)  # of the number of runs that cover a word
        for length, known in self.grams.items():
            found = _grams(hashes, length)
            nearest = known[np.minimum(known.searchsorted(found), len(known) - 1)]
            starts = np.flatnonzero(nearest == found)
            np.add.at(changes, starts, 1)
            np.add.at(changes, starts + length, -1)
        sentence_of_word = np.repeat(np.arange(len(words)), list(map(len, words)))
        marks = np.zeros(len(words), bool)
        marks[sentence_of_word[np.cumsum(changes)[:-1] > 0]] = True
        return marks


def read_evaluation_rows(paths: Sequence[str]) -> tuple[np.ndarray, int, int]:
    """Returns the runs of words of all cells, (2, G) uint64: length and hash; and the number of rows and of short ones.

    A row is short if no cell of it has `SHORTEST_GRAM` words. Raises a UserError if a file is no table of rows.
    """
    found, number, short = set[tuple[int, int]](), 0, 0
    for path in paths:
        for _, row in read_table(Path(path)):
            cells = [_hashes(_words(cell)) for cell in row.values() if isinstance(cell, str)]
            long = [cell for cell in cells if len(cell) >= SHORTEST_GRAM]
            for cell in long:
                length = min(len(cell), LONGEST_GRAM)
                found.update((length, gram) for gram in _grams(cell, length).tolist())
            number, short = number + 1, short + (not long)
    return np.array(sorted(found), np.uint64).reshape(-1, 2).T, number, short


@lru_cache(1)
def load_evaluation_rows(path: Path) -> EvaluationRows:
    """Returns the rows that `read_evaluation_rows` has read, from the file of its array."""
    lengths, hashes = np.load(path)
    return EvaluationRows({int(n): hashes[lengths == n] for n in np.unique(lengths)})
