"""Chooses the text of training examples: from the index of an example to a window, its parts and their segments.

Shapes: B examples built together, P parts of an example (3, or 2 without hard negatives). A row of a shard holds a
document; a very long document takes several rows.

docs/data.md ("Examples") says how windows cover the corpus, and why half of the rows are mirrored. A row of D tokens
gets `max(1, round(D / W))` windows at equal distances, where W is the number of tokens that an example holds on
average. A random phase, new in every pass, moves them all together. The windows of a mirrored row are placed and filled
in the row read backwards, and the boundaries are mapped back.

All random numbers are hashes of (seed, pass, row, window, purpose, part, position). An example is therefore the same
whatever it is built together with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data_prep.hash_rng import hashed, permuted, randint, uniform
from multicls.corpus import Corpus, Shard, held_out_share
from multicls.errors import UserError, did_you_mean

BLOCK = 256  # rows whose windows are counted together; 20 bytes of memory a block
STRIDE = np.int64(1) << 32  # more than any token offset in a shard
# Purposes of random numbers.
ORDER, PASS, PHASE, ANCHOR, DIVIDE, CUT, SWAP, CHOICE, FATE, REPLACEMENT, MIRROR = range(11)


class Windows(NamedTuple):
    """B windows, by integers of shape (B,)."""

    pass_number: np.ndarray  # pass over the source of the window
    shard: np.ndarray
    row: np.ndarray  # in the shard
    position: np.ndarray  # index of the window in its row
    in_row: np.ndarray  # number of windows in that row
    num_tokens: np.ndarray  # number of tokens in that row, D


class Text(NamedTuple):
    """The text of B examples. "All tokens" are the tokens of these examples, concatenated."""

    shard: np.ndarray  # (B,) example i holds the tokens `begin` to `end - 1` of the shard
    begin: np.ndarray
    end: np.ndarray
    sentence_lengths: np.ndarray  # (S,) number of tokens in each sentence of all tokens
    first: np.ndarray  # (B, P) sentences of each part, see `examples.Part`
    cut: np.ndarray
    end_sentence: np.ndarray
    swapped: np.ndarray
    part_begin: np.ndarray  # (B, P) index of each part's first token in all tokens
    length: np.ndarray  # (B, P) number of tokens of each part
    first_segment: np.ndarray  # (B, P) number of these before `cut`
    left_out: np.ndarray  # (B, P) number of tokens left out, because their sentence alone is longer than a part
    key: np.ndarray  # (B,) hash that decides about the example


class WindowIndex:
    """Finds the window of each example of an epoch. It counts windows per `BLOCK` rows, so it is small.

    Args:
        num_parts: P; a row with fewer sentences has no window.
        tokens_per_window: W.
        validation: True for the validation split, False for the training split.
        validation_fraction: see `Corpus.validation_limit`.
        source_weights: see `examples.ExampleStream`.

    Attributes:
        per_epoch: number of examples in an epoch of the split.
        num_documents: number of documents in the split; a document that takes several rows counts once.
        num_tokens: number of tokens in the rows of the split that have windows, weighted as an epoch shows them.

    Raises:
        UserError: a weight is not finite and >= 0, or its source does not exist.
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
        self.corpus = corpus
        self.num_parts = num_parts
        self.tokens_per_window = tokens_per_window
        self.validation = validation
        self.limit = corpus.validation_limit(validation_fraction)
        self.num_documents = 0
        names: dict[str, int] = {}
        columns: list[list[np.ndarray]] = []
        last_hash = None
        for number in range(corpus.num_shards):
            shard = corpus.shard(number)
            codes = np.array([names.setdefault(name, len(names)) for name in shard.source_names])[shard.source_codes]
            firsts = np.union1d(np.arange(0, len(codes), BLOCK), np.flatnonzero(np.diff(codes)) + 1)
            ends = np.append(firsts[1:], len(codes))
            windows = self._windows_of_split([(shard, 0, len(codes))])
            shown = np.where(windows > 0, shard.num_tokens, 0).astype(np.int64)
            counts, tokens = (np.add.reduceat(values, firsts) for values in (windows, shown))
            columns.append([codes[firsts], np.full(len(firsts), number), firsts, ends, counts, tokens])
            begins_document = np.append(shard.hashes[0] != last_hash, shard.hashes[1:] != shard.hashes[:-1])
            self.num_documents += int((begins_document & self._in_split(shard.hashes)).sum())
            last_hash = shard.hashes[-1]
        source, *block, counts, tokens = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.argsort(source, kind="stable")  # the windows of a source stand together
        self._blocks = np.stack(block, axis=1).astype(np.int32)[order]  # shard, first row, end
        self._block_starts = np.cumsum(np.append(0, counts[order]))
        self._sizes = np.bincount(source, counts, minlength=len(names)).astype(np.int64)  # windows of each source
        self._source_starts = np.cumsum(self._sizes) - self._sizes
        weights = _checked_weights(source_weights, list(names))
        self._shown = np.rint(weights * self._sizes).astype(np.int64)  # an epoch
        self._shown_ends = np.cumsum(self._shown)
        self.per_epoch = int(self._shown_ends[-1])
        self.num_tokens = round(float((weights[source] * tokens).sum()))

    def find(self, key: np.ndarray, epochs: np.ndarray, indices: np.ndarray) -> Windows:
        """Returns the windows of (B,) examples; `key` is the hash of the seed.

        Examples are shuffled over the epoch, then the windows of each source over the current pass through it.
        """
        index = permuted(indices, np.array(self.per_epoch), hashed(key, ORDER, epochs))
        source = np.searchsorted(self._shown_ends, index, side="right")
        shown, size = self._shown[source], self._sizes[source]
        pass_number, index = np.divmod(epochs * shown + index - (self._shown_ends[source] - shown), size)
        index = self._source_starts[source] + permuted(index, size, hashed(key, PASS, source, pass_number))
        return self._window_at(index, pass_number)

    def _window_at(self, index: np.ndarray, pass_number: np.ndarray) -> Windows:
        """Returns the windows number `index` in the order of sources and rows."""
        block = np.searchsorted(self._block_starts, index, side="right") - 1
        shard, first, end = self._blocks[block].T
        blocks = [(self.corpus.shard(n), *rows) for n, *rows in self._blocks[block].tolist()]
        in_row = self._windows_of_split(blocks)
        starts = np.cumsum(in_row) - in_row
        origin = np.cumsum(end - first) - (end - first)  # where the rows of each block begin in `in_row`
        index = index + starts[origin] - self._block_starts[block]
        found = np.searchsorted(starts, index, side="right") - 1  # rows without windows share a start: the last has it
        row = first + found - origin
        tokens = np.array([block[0].num_tokens[n] for block, n in zip(blocks, row.tolist(), strict=True)], np.int64)
        return Windows(pass_number, shard, row, index - starts[found], in_row[found], tokens)

    def count(self, row: int) -> int:
        """Returns the number of windows of row `row` of the corpus, whatever its split.

        Raises:
            UserError: there is no such row.
        """
        shard, number = self.corpus.locate(row)
        return int(self._windows_of(shard.num_tokens[number], shard.row_starts[number + 1] - shard.row_starts[number]))

    def of_row(self, row: int, pass_number: int, positions: np.ndarray) -> Windows:
        """Returns the windows at `positions` of row `row` of the corpus."""
        shard, number = self.corpus.locate(row)
        shard_number = int(np.searchsorted(self.corpus.starts, row, side="right")) - 1
        same = (pass_number, shard_number, number, self.count(row), int(shard.num_tokens[number]))
        pass_numbers, shards, rows, in_row, tokens = (np.full_like(positions, value) for value in same)
        return Windows(pass_numbers, shards, rows, positions, in_row, tokens)

    def _windows_of(self, tokens: np.ndarray, sentences: np.ndarray) -> np.ndarray:
        """Returns the number of windows of rows; 0 for rows with fewer sentences than parts."""
        number = np.maximum(np.rint(tokens / self.tokens_per_window), 1)
        return np.where(sentences < self.num_parts, 0, number).astype(np.int64)

    def _windows_of_split(self, blocks: Sequence[tuple[Shard, int, int]]) -> np.ndarray:
        """Returns the number of windows of each of the rows [first, end) of shards; 0 for rows outside the split."""
        tokens = np.concatenate([shard.num_tokens[first:end] for shard, first, end in blocks])
        begin = np.concatenate([shard.row_starts[first:end] for shard, first, end in blocks])
        stop = np.concatenate([shard.row_starts[first + 1 : end + 1] for shard, first, end in blocks])
        hashes = np.concatenate([shard.hashes[first:end] for shard, first, end in blocks])
        return self._windows_of(tokens, stop - begin) * self._in_split(hashes)

    def _in_split(self, hashes: np.ndarray) -> np.ndarray:
        return (held_out_share(hashes) < self.limit) == self.validation


def _checked_weights(weights: Mapping[str, float], sources: Sequence[str]) -> np.ndarray:
    """Returns the weight of each source, 1 if none is given; raises a `UserError` that names every bad weight."""
    problems = [
        f"source_weights: the corpus has no source {name!r}.{did_you_mean(name, sources)}"
        for name in weights
        if name not in sources
    ]
    problems += [
        f"source_weights: {name} = {weight}: give a finite number, 0 or more."
        for name, weight in weights.items()
        if not (math.isfinite(weight) and weight >= 0)
    ]
    if problems:
        raise UserError(*problems)
    return np.array([weights.get(name, 1.0) for name in sources])


def choose_text(corpus: Corpus, windows: Windows, key: np.ndarray, num_parts: int, budget: int) -> Text:
    """Returns the parts of each window, of at most `budget` tokens each; `key` is the hash of the seed."""
    row_key = hashed(key, windows.pass_number, corpus.starts[windows.shard] + windows.row)
    mirrored = draw_mirrored(row_key)
    starts = _start_offsets(windows, mirrored, row_key)
    boundaries = _boundaries_near(corpus, windows, starts, mirrored, reach=num_parts * budget + 2)
    window_key = hashed(row_key, windows.position)
    bounds = PartFiller(num_parts, budget).fill(boundaries.mirrored(mirrored), starts, window_key)
    bounds = boundaries.mirrored_back(bounds, mirrored)
    return _cut_into_segments(windows.shard, boundaries, bounds, budget, window_key)


def draw_mirrored(row_key: np.ndarray) -> np.ndarray:
    """Draws which windows are filled backwards, (B,) bool: all windows of a row alike, so distances stay equal."""
    return randint(hashed(row_key, MIRROR), 2) == 1


def _start_offsets(windows: Windows, mirrored: np.ndarray, row_key: np.ndarray) -> np.ndarray:
    """Returns the approximate start of each window as a token offset in its row, counted from the end if mirrored.

    An offset of D means: fill from the other end of the row.
    """
    position = np.where(mirrored, windows.in_row - 1 - windows.position, windows.position)
    phase = uniform(hashed(row_key, PHASE)) - 0.5  # one for all windows of a row
    moved = np.ceil((position + phase) * windows.num_tokens / windows.in_row).astype(np.int64)
    anchor = randint(hashed(row_key, ANCHOR), 8)
    last = np.where(windows.in_row > 1, position == windows.in_row - 1, anchor % 2 == 1)  # a single window is either
    anchored = (anchor < 6) & (last | (position == 0))
    return np.where(anchored, np.where(last, windows.num_tokens, 0), moved)


class Boundaries(NamedTuple):
    """The sentence boundaries near B windows in one ascending array, so that one search serves all windows."""

    offsets: np.ndarray  # token offset of each boundary in its shard, plus i * STRIDE for window i
    start: np.ndarray  # (B,) index in `offsets` of the boundary where filling might start
    low: np.ndarray  # (B,) index in `offsets` of the first boundary of each window
    high: np.ndarray  # (B,) index of the last one
    sentence: np.ndarray  # (B,) number in the row of the sentence that begins at `low`

    def mirrored(self, chosen: np.ndarray) -> Boundaries:
        """Returns the same boundaries with the rows of the chosen windows, (B,) bool, in reverse order.

        `offsets` doubles: its first half is the mirror image of all windows, its second half a copy. `mirrored_back`
        maps indices of the result to indices of the original. `sentence` is that of the original.
        """
        size = len(self.offsets)
        offsets = np.concatenate([-1 - self.offsets[::-1], self.offsets])
        low, high = (
            np.where(chosen, size - 1 - i, size + j) for i, j in ((self.high, self.low), (self.low, self.high))
        )
        start = np.where(chosen, size - 1 - self.start, size + self.start)
        return Boundaries(offsets, start, low, high, self.sentence)

    def mirrored_back(self, bounds: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Maps ascending indices in `mirrored(chosen).offsets`, (B, n), to ascending indices in `offsets`."""
        size = len(self.offsets)
        return np.where(chosen[:, None], size - 1 - bounds[:, ::-1], bounds - size)


def _boundaries_near(
    corpus: Corpus, windows: Windows, starts: np.ndarray, mirrored: np.ndarray, reach: int
) -> Boundaries:
    """Gathers the sentence boundaries up to `reach` sentences from each start; a sentence has at least one token."""
    slices, numbers = [], []
    places = zip(windows.shard.tolist(), windows.row.tolist(), starts.tolist(), mirrored.tolist(), strict=True)
    for number, row, start, reverse in places:
        shard = corpus.shard(number)
        begin, end = int(shard.row_starts[row]), int(shard.row_starts[row + 1])
        boundaries = shard.sentence_starts[begin : end + 1]
        sentences = end - begin
        if start <= 0:
            first = 0
        elif reverse:
            first = sentences + 1 - int(boundaries.searchsorted(boundaries[-1] - start, side="right"))
        else:
            first = int(boundaries.searchsorted(boundaries[0] + start))
        low, high = max(0, min(first, sentences - reach)), min(sentences, first + reach)
        if reverse:
            first, low, high = sentences - first, sentences - high, sentences - low
        slices.append(boundaries[low : high + 1])
        numbers.append((first - low, low, high - low))
    first, sentence, last = np.array(numbers).T
    low = np.cumsum(last + 1) - last - 1
    offsets = np.concatenate(slices) + np.repeat(np.arange(len(slices)) * STRIDE, last + 1)
    return Boundaries(offsets, low + first, low, low + last, sentence)


@dataclass(frozen=True)
class PartFiller:
    """Fills parts with whole sentences: P parts of at most `budget` tokens; only a longer sentence exceeds it."""

    num_parts: int
    budget: int

    def fill(self, b: Boundaries, starts: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Returns indices in `b.offsets`, (B, P + 1): part p holds the sentences between bounds p and p + 1.

        Parts are filled forwards from the sentence nearest to the start. Where the row ends too early, they are filled
        backwards from its end. A row that fits as a whole is divided evenly.
        """
        # Of two neighbouring starts take the one whose parts are fuller: padding falls by a fifth.
        candidates = np.stack([b.start, np.minimum(b.start + (starts > 0), b.high)])
        bounds = self._forwards(b.offsets, candidates, b.high)  # (2, B, P + 1)
        filled = np.minimum(np.diff(b.offsets[bounds]), self.budget).sum(axis=-1)
        filled[bounds[..., -1] >= b.high] = -1  # the row ends too early
        chosen = bounds[filled.argmax(axis=0), np.arange(len(b.start))]
        ended = np.flatnonzero(filled.max(axis=0) < 0)
        chosen[ended] = self._backwards(b.offsets, b.low[ended], b.high[ended])
        whole = ended[chosen[ended, 0] == b.low[ended]]
        chosen[whole] = self._evenly(b.offsets, b.low[whole], b.high[whole], key[whole])
        return chosen

    def _forwards(self, offsets: np.ndarray, first: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Returns bounds from `first` on, each part as full as whole sentences make it."""
        bounds = [first]
        for _ in range(self.num_parts):
            bounds.append(self._end_of_part(offsets, bounds[-1], high))
        return np.stack(bounds, axis=-1)

    def _end_of_part(self, offsets: np.ndarray, begin: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Returns the end of a part that begins at `begin`; it takes at least one sentence, even a longer one."""
        fitting = np.searchsorted(offsets, offsets[begin] + self.budget, side="right") - 1
        return np.minimum(np.maximum(fitting, begin + 1), high)

    def _backwards(self, offsets: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Returns bounds that end at `high`, each part as full as whole sentences make it."""
        bounds = [high]
        for _ in range(self.num_parts):
            fitting = np.searchsorted(offsets, offsets[bounds[0]] - self.budget, side="left")
            bounds.insert(0, np.maximum(np.minimum(fitting, bounds[0] - 1), low))
        return np.stack(bounds, axis=-1)

    def _evenly(self, offsets: np.ndarray, low: np.ndarray, high: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Returns bounds that divide whole short rows about evenly, a little differently each time."""
        earliest = self._backwards(offsets, low, high)
        bounds = [low]
        for p in range(1, self.num_parts):
            begin, remaining = bounds[-1], self.num_parts - p
            latest = self._end_of_part(offsets, begin, high)
            # Two sentences a part where possible, so that each has an order; one is possible always.
            least, most = np.maximum(earliest[:, p], begin + 2), np.minimum(latest, high - 2 * remaining)
            tight = least > most
            least = np.where(tight, np.maximum(earliest[:, p], begin + 1), least)
            most = np.where(tight, np.minimum(latest, high - remaining), most)
            share = (offsets[high] - offsets[begin]) / (remaining + 1)
            target = offsets[begin] + (share * (0.75 + 0.5 * uniform(hashed(key, DIVIDE, p)))).astype(np.int64)
            bounds.append(np.clip(np.searchsorted(offsets, target), least, most))
        return np.stack([*bounds, high], axis=-1)


def _cut_into_segments(shard: np.ndarray, b: Boundaries, bounds: np.ndarray, budget: int, key: np.ndarray) -> Text:
    """Cuts each part of several sentences into two segments, and swaps these with probability one half."""
    first, end = bounds[:, :-1], bounds[:, 1:]
    cutting, swapping = (hashed(key[:, None], purpose, np.arange(first.shape[1])) for purpose in (CUT, SWAP))
    cut = _draw_cut(b.offsets, first, end, cutting)
    swapped = (cut < end) & (randint(swapping, 2) == 1)
    tokens = b.offsets[end] - b.offsets[first]
    length = np.minimum(tokens, budget)  # only a sentence longer than a part is cut
    begin, stop = b.offsets[bounds[:, 0]], b.offsets[bounds[:, -1]]
    stride = np.arange(len(bounds)) * STRIDE
    sentences = bounds[:, -1] - bounds[:, 0]
    boundary = np.arange(sentences.sum()) + np.repeat(bounds[:, -1] - np.cumsum(sentences), sentences)
    number = (b.sentence - b.low)[:, None]  # from an index in `offsets` to the number of a sentence in its row
    return Text(
        shard=shard,
        begin=begin - stride,
        end=stop - stride,
        sentence_lengths=b.offsets[boundary + 1] - b.offsets[boundary],
        first=first + number,
        cut=cut + number,
        end_sentence=end + number,
        swapped=swapped,
        part_begin=b.offsets[first] + (np.cumsum(stop - begin) - stop)[:, None],
        length=length,
        first_segment=np.minimum(b.offsets[cut] - b.offsets[first], length),
        left_out=tokens - length,
        key=key,
    )


def _draw_cut(offsets: np.ndarray, first: np.ndarray, end: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Draws the boundary between the two segments of each part, (B, P); `end` for a part of one sentence.

    The probability of a boundary is proportional to the square of the number of tokens in the shorter segment.
    Segments of about equal length are the usual case, as in the authors' code; with the first power, twice as many
    segments at L = 128 would have fewer than ten tokens, which tell little about the order.
    """
    sentences = (end - first).ravel()
    part = np.repeat(np.arange(len(sentences)), sentences)
    ends = np.cumsum(sentences)  # of parts, in the arrays of all their sentences
    boundary = np.arange(len(part)) + (end.ravel() - ends)[part]  # where each sentence begins
    shorter = np.minimum(
        offsets[boundary] - offsets[first].ravel()[part], offsets[end].ravel()[part] - offsets[boundary]
    )
    weights = np.cumsum(shorter * shorter)  # 0 where a part begins
    before = np.append(0, weights)[ends - sentences]
    total = weights[ends - 1] - before
    drawn = np.searchsorted(weights, before + randint(hashes.ravel(), np.maximum(total, 1)), side="right")
    cut = np.where(total > 0, drawn + end.ravel() - ends, end.ravel())
    return cut.reshape(end.shape)
