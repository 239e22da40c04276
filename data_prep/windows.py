"""Chooses the text of a training example: a window of a row, its parts, and the segments of each part.

A row of D tokens has `max(1, round(D / W))` windows at equal distances, where W is the number of
tokens that an example holds on average. A random phase, new in every pass over the text, moves the
windows of a row together. The windows of a mirrored row (every second one, drawn anew in each pass)
are placed and filled in the row read backwards. Without mirroring, the parts would all be filled
from the front, and the lengths of two segments would tell their order.

Every draw is a function of (seed, pass, row, window), so no example depends on another.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from multicls.corpus import Corpus, Shard
from multicls.errors import UserError, did_you_mean

SHUFFLE_EPOCH, SHUFFLE_SOURCE = 0, 1  # what a permutation is drawn for
MIRRORED = 0.5  # share of the rows that are mirrored in a pass
BLOCK = 256  # rows whose windows are counted again to find one of them
ANCHORED = 0.75  # share of the rows whose first and last windows touch the row's ends

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15  # splitmix64's increment


class Window(NamedTuple):
    """A window of a row; it gives one example in every pass over its source."""

    row: int  # index in the corpus
    number: int  # from 0, in the row
    pass_number: int  # pass over the source of the row, from 0


class Part(NamedTuple):
    """Sentences [first, end) of a row, in one or two segments; the second begins at sentence `cut`.

    A part of a single sentence is one segment: `cut == end`. `swapped` means that the second segment is placed first.
    """

    first: int
    cut: int
    end: int
    swapped: bool


class WindowIndex:
    """Finds the window of each example of an epoch. It holds 16 bytes for each block of `BLOCK` rows and source.

    A row of fewer than `num_parts` sentences has no window. `examples.ExampleStream` explains the arguments;
    `tokens_per_window` is W. Raises a UserError if a weight is of a source that does not exist.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        num_parts: int,
        tokens_per_window: float,
        validation: bool,
        validation_fraction: float,
        source_weights: Mapping[str, float],
    ) -> None:
        self.num_parts, self.tokens_per_window = num_parts, tokens_per_window
        self._corpus, self._validation = corpus, validation
        self._limit = corpus.validation_limit(validation_fraction)
        # First rows and numbers of windows of the blocks that have windows of a source.
        blocks = defaultdict[str, list[np.ndarray]](list)
        sizes = defaultdict[str, list[np.ndarray]](list)
        tokens = Counter[str]()
        self.num_documents = 0
        for number in range(corpus.num_shards):
            shard, first_row = corpus.shard(number), corpus.first_rows[number]
            in_split = corpus.held_out(number, self._limit) == validation
            self.num_documents += int((shard.begins & in_split).sum())
            begins = np.arange(0, len(in_split), BLOCK)
            for name in shard.source_names:
                counts = self._windows(number, slice(None), name)
                size = np.add.reduceat(counts, begins)
                blocks[name].append(begins[size > 0].astype(np.uint64) + np.uint64(first_row))
                sizes[name].append(size[size > 0])
                tokens[name] += int(shard.num_tokens[counts > 0].sum(dtype=np.int64))
        if unknown := sorted(set(source_weights) - set(blocks)):
            start = "source_weights: the corpus has no source"
            raise UserError(*(f"{start} {name!r}.{did_you_mean(name, blocks)}" for name in unknown))
        self._names = list(blocks)
        weights = np.array([source_weights.get(name, 1.0) for name in blocks])
        self._blocks = [np.concatenate(arrays) for arrays in blocks.values()]
        self._ends = [np.cumsum(np.concatenate(arrays)) for arrays in sizes.values()]
        self._sizes = [int(ends[-1]) if len(ends) else 0 for ends in self._ends]
        shown = np.rint(weights * self._sizes).astype(np.int64)  # in an epoch
        self._shown: list[int] = shown.tolist()
        self._shown_ends: list[int] = np.cumsum(shown).tolist()
        self.per_epoch = self._shown_ends[-1]
        self.num_tokens = round(float((weights * [tokens[name] for name in blocks]).sum()))

    def find(self, seed: int, epoch: int, index: int) -> Window:
        """Returns the window of example `index` of an epoch.

        Examples are shuffled over the epoch, then the windows of each source over the pass.
        """
        index = permuted(index, self.per_epoch, hashed(seed, SHUFFLE_EPOCH, epoch))
        source = bisect_right(self._shown_ends, index)
        shown, size = self._shown[source], self._sizes[source]
        shown_before = epoch * shown + index - (self._shown_ends[source] - shown)
        pass_number, index = divmod(shown_before, size)
        key = hashed(seed, SHUFFLE_SOURCE, source, pass_number)
        index, ends = permuted(index, size, key), self._ends[source]
        block = int(ends.searchsorted(index, side="right"))
        index -= int(ends[block - 1]) if block else 0
        first_row = int(self._blocks[source][block])
        number, begin = self._corpus.locate(first_row)
        ends = np.cumsum(self._windows(number, slice(begin, begin + BLOCK), self._names[source]))
        row = int(ends.searchsorted(index, side="right"))
        return Window(first_row + row, index - int(ends[row - 1]) if row else index, pass_number)

    def _windows(self, number: int, rows: slice, source: str) -> np.ndarray:
        """Returns the number of windows of some rows of shard `number`, (R,): 0 for rows of another source or split."""
        shard = self._corpus.shard(number)
        starts = shard.row_starts[rows.start : rows.stop and rows.stop + 1]
        counts = self._count(shard.num_tokens[rows], starts[1:] - starts[:-1])
        counts *= self._corpus.held_out(number, self._limit, rows) == self._validation
        if len(shard.source_names) > 1:
            counts *= shard.source_codes[rows] == shard.source_names.index(source)
        return counts

    def count(self, shard: Shard, row: int) -> int:
        """Returns the number of windows of row `row` of a shard, whatever its split."""
        sentences = shard.row_starts[row + 1] - shard.row_starts[row]
        return int(self._count(shard.num_tokens[row], sentences))

    def _count(self, tokens: np.ndarray, sentences: np.ndarray) -> np.ndarray:
        number = np.maximum(np.rint(tokens / self.tokens_per_window), 1)
        return np.where(sentences < self.num_parts, 0, number).astype(np.int64)


def choose_parts(
    offsets: np.ndarray, window: Window, count: int, seed: int, num_parts: int, budget: int
) -> tuple[list[Part], np.random.Generator]:
    """Returns the parts of a window, and the generator for all later draws of its example.

    `offsets`, (S + 1,), are the token offsets of the row's sentence boundaries; the row has `count`
    windows; a part holds `budget` tokens.
    """
    boundaries = offsets - offsets[0]
    draws = generator(seed, 0, window.row, window.pass_number).random(3)  # equal in all windows
    mirrored = draws[0] < MIRRORED
    read = boundaries[-1] - boundaries[::-1] if mirrored else boundaries
    number = count - 1 - window.number if mirrored else window.number
    start = _start_offset(number, count, int(boundaries[-1]), draws[1], draws[2])
    rng = generator(seed, 1 + window.number, window.row, window.pass_number)
    uniform = rng.random(3 * num_parts).tolist()
    bounds = fill_parts(read, start, num_parts, budget, uniform)
    if mirrored:
        bounds = [len(boundaries) - 1 - bound for bound in reversed(bounds)]
    parts = []
    for p, (first, end) in enumerate(pairwise(bounds)):
        cut = _draw_cut(boundaries, first, end, uniform[num_parts + p])
        parts.append(Part(first, cut, end, cut < end and uniform[2 * num_parts + p] < 0.5))
    return parts, rng


def _start_offset(number: int, count: int, tokens: int, phase: float, anchor: float) -> int:
    """Returns a window's approximate start as a token offset in reading order. `tokens` means: fill backwards."""
    is_last = number == count - 1
    if count == 1:  # it is both the first and the last one; take either
        is_last = anchor < ANCHORED / 2
    if anchor < ANCHORED and (is_last or number == 0):
        return tokens if is_last else 0
    return math.ceil((number + phase - 0.5) * tokens / count)


def fill_parts(
    boundaries: np.ndarray, start: int, num_parts: int, budget: int, draws: Sequence[float]
) -> list[int]:
    """Returns P + 1 sentence indices: part p holds the sentences from index p to index p + 1.

    Parts hold whole sentences, at most `budget` tokens; only a single longer sentence exceeds it.
    They are filled forwards from the sentence nearest to the start. Where the row ends too early,
    they are filled backwards from its end. A row that fits as a whole is divided evenly.

    `boundaries`, (S + 1,), are token offsets from 0, as is `start`; `draws`, at least P - 1 numbers
    in [0, 1), are for the even division.
    """
    last, first = len(boundaries) - 1, int(boundaries.searchsorted(start))
    best, most = list[int](), -1
    # Of two neighbouring starts take the one whose parts are fuller: padding falls by a fifth.
    for candidate in range(first, min(first + 1 + (start > 0), last + 1)):
        bounds = [candidate]
        for _ in range(num_parts):
            bounds.append(_end_of_part(boundaries, bounds[-1], budget))
        filled = sum(min(int(boundaries[b] - boundaries[a]), budget) for a, b in pairwise(bounds))
        if bounds[-1] < last and filled > most:
            best, most = bounds, filled
    if best:
        return best
    backwards = [last]
    for _ in range(num_parts):
        fitting = int(boundaries.searchsorted(boundaries[backwards[0]] - budget))
        backwards.insert(0, max(min(fitting, backwards[0] - 1), 0))
    return backwards if backwards[0] else _evenly(boundaries, backwards, budget, draws)


def _end_of_part(boundaries: np.ndarray, begin: int, budget: int) -> int:
    """Returns the end of a part that begins at `begin`; it takes at least one sentence."""
    fitting = int(boundaries.searchsorted(boundaries[begin] + budget, side="right")) - 1
    return min(max(fitting, begin + 1), len(boundaries) - 1)


def _evenly(
    boundaries: np.ndarray, earliest: list[int], budget: int, draws: Sequence[float]
) -> list[int]:
    """Returns bounds that divide a short row about evenly, a little differently each time."""
    num_parts, last = len(earliest) - 1, len(boundaries) - 1
    bounds = [0]
    for p in range(1, num_parts):
        begin, remaining = bounds[-1], num_parts - p
        latest = _end_of_part(boundaries, begin, budget)
        # Two sentences a part where possible, so that each has an order; one is possible always.
        least, most = max(earliest[p], begin + 2), min(latest, last - 2 * remaining)
        if least > most:
            least, most = max(earliest[p], begin + 1), min(latest, last - remaining)
        share = int(boundaries[last] - boundaries[begin]) / (remaining + 1)
        target = int(boundaries[begin]) + int(share * (0.75 + 0.5 * draws[p - 1]))
        bounds.append(min(max(int(boundaries.searchsorted(target)), least), most))
    return [*bounds, last]


def _draw_cut(boundaries: np.ndarray, first: int, end: int, draw: float) -> int:
    """Returns the sentence at which the second segment of a part begins; `end` for one sentence.

    The probability of a boundary is proportional to the square of the number of tokens in the
    shorter segment, so segments are about equal, as in the authors' code. With the first power,
    twice as many segments at L = 128 would have fewer than ten tokens.
    """
    if end - first < 2:
        return end
    inner = boundaries[first + 1 : end]
    weights = np.minimum(inner - boundaries[first], boundaries[end] - inner)
    sums = np.cumsum(weights * weights)
    return first + 1 + int(sums.searchsorted(draw * sums[-1], side="right"))


# Random numbers as pure functions of integers: generators, and permutations that need no memory.


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
