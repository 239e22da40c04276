"""Shards in, three-part training examples out: built on the fly, every example a pure function of its number.

Shape legend: B examples built together, P parts of an example (3, or 2 without hard negatives), R = B * P rows,
L sequence length, K facets, T = L - 1 - K columns behind [CLS] and the facets. A document here is a row of a shard;
very long ones are several.

How an epoch covers the corpus: a document of D pieces gets `max(1, round(D / W))` windows, W being the pieces that an
example holds on average. They stand at equal distances, moved together by a random phase that is fresh in every
epoch, and are filled with whole consecutive sentences, so that parts begin elsewhere each time. In three of four
epochs the outermost windows are set to the document's very ends, which a phase alone would leave out half the time.

Segment lengths must not reveal the order of the two segments of a part. Filling a part stops at a sentence that does
not fit, usually a long one, so the side where filling begins gets the longer sentences. Therefore half of the documents
in an epoch, drawn afresh each time, are mirrored: windows are placed and filled in the document read backwards, and the
boundaries are mapped to the original. So each part is filled from either end with the same probability.

Random numbers are hashes of (seed, pass, document, window, purpose, part, position): there is no generator with a
state, so an example is the same whatever it is built together with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from data_prep.chance import below, hashed, permuted, uniform
from multicls.corpus import Corpus, Shard, held_out_share
from multicls.errors import UserError, did_you_mean

IGNORE = -100  # label of what does not count in a loss
EXPECTED_FILL = 0.875  # share of a part's budget that whole sentences fill
BLOCK = 256  # documents whose windows are counted together; 20 bytes of memory a block
TFIDF_SCALE = 10.0
STRIDE = np.int64(1) << 32  # more than any position in a shard
# Purposes of random numbers.
ORDER, PASS, PHASE, ANCHOR, DIVIDE, CUT, SWAP, CHOICE, FATE, REPLACEMENT, MIRROR = range(11)


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the tokens around the text; `facets` are [C1]..[CK] in order, none for K = 0."""

    cls: int
    sep: int
    pad: int
    mask: int
    facets: tuple[int, ...]

    def all(self) -> list[int]:
        """Every special id: never masked, never a random replacement."""
        return sorted({self.cls, self.sep, self.pad, self.mask, *self.facets})


class Part(NamedTuple):
    """Sentences [first, end) of a document, in one or two segments; the second segment begins at sentence `cut`.

    A part of a single sentence is one segment: `cut == end`. `swapped` means that the second segment is placed first.
    """

    first: int
    cut: int
    end: int
    swapped: bool


@dataclass(frozen=True)
class Example:
    """One example: P consecutive parts of one document.

    Attributes:
        document: its number in the corpus.
        parts: what each part holds.
        input_ids, labels: (P, L) int32; labels are -100 where no piece is masked.
        attention_mask, token_type_ids: (P, L) int8.
        tfidf_labels: (P, L - K) float32, facet positions removed, 0 on [CLS], [SEP] and padding.
        so_labels: (P,) int8; 1 swapped, 0 not, -100 for a part of one segment.
        cut_pieces: pieces left out because their sentence alone is longer than a part.
    """

    document: int
    parts: tuple[Part, ...]
    input_ids: np.ndarray
    attention_mask: np.ndarray
    token_type_ids: np.ndarray
    labels: np.ndarray
    tfidf_labels: np.ndarray
    so_labels: np.ndarray
    cut_pieces: int


class _Windows(NamedTuple):
    """The windows to build, (B,) integers each: pass over their source, shard, row, window of the row's `windows`."""

    turn: np.ndarray
    shard: np.ndarray
    row: np.ndarray
    window: np.ndarray
    windows: np.ndarray
    pieces: np.ndarray  # D


class _Sentences(NamedTuple):
    """The sentence boundaries around B windows, all in one ascending array, so that one search serves all of them.

    Attributes:
        places: number of tokens before each boundary in its shard, + i * STRIDE for window i.
        first: (B,) index in `places` of the boundary where filling might begin.
        low, high: (B,) indices in `places` of the first and the last boundary of each window.
        number: (B,) number in the document of the sentence that begins at `low`.
    """

    places: np.ndarray
    first: np.ndarray
    low: np.ndarray
    high: np.ndarray
    number: np.ndarray

    def mirrored(self, chosen: np.ndarray) -> _Sentences:
        """Returns the same boundaries with the documents of the chosen windows, (B,) bool, in reverse order.

        `places` grows to twice its size: its first half is the mirror image of all windows, its second half a copy.
        `mirrored_back` maps indices of the result to indices of the original. `number` is that of the original.
        """
        size = len(self.places)
        places = np.concatenate([-1 - self.places[::-1], self.places])
        low, high = (
            np.where(chosen, size - 1 - i, size + j) for i, j in ((self.high, self.low), (self.low, self.high))
        )
        return _Sentences(places, np.where(chosen, size - 1 - self.first, size + self.first), low, high, self.number)

    def mirrored_back(self, bounds: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Maps ascending indices in `mirrored(chosen).places`, (B, n), to ascending indices in `places`."""
        size = len(self.places)
        return np.where(chosen[:, None], size - 1 - bounds[:, ::-1], bounds - size)


class _Parts(NamedTuple):
    """Contents of the parts, (B, P) each: sentences as in `Part`, and tokens."""

    first: np.ndarray
    cut: np.ndarray
    end: np.ndarray
    swapped: np.ndarray
    length: np.ndarray  # pieces
    seam: np.ndarray  # pieces before `cut`
    left_out: np.ndarray  # pieces of a sentence longer than a part


class TripleStream:
    """The endless sequence of training examples of a corpus.

    Args:
        corpus: an open corpus.
        special: ids of [CLS], [SEP], [PAD], [MASK] and the facets.
        seq_length: L.
        seed: together with epoch and index it decides everything about an example.
        split: documents are dealt to the splits by their content hash.
        validation_fraction: share of the documents in the validation split.
        num_parts: P; 2 leaves out the hard negatives.
        mlm_probability: share of text pieces that are masked-LM targets.
        source_weights: how often an epoch shows each window of a source, on average; 1 for those not named.

    Attributes:
        examples_per_epoch: examples in an epoch of the split.

    Raises:
        UserError: nothing to show in the split, no room for text in L, or a weight that is of no source or no weight.
    """

    def __init__(
        self,
        corpus: Corpus,
        special: SpecialIds,
        *,
        seq_length: int,
        seed: int,
        split: Literal["train", "validation"] = "train",
        validation_fraction: float = 0.01,
        num_parts: int = 3,
        mlm_probability: float = 0.15,
        source_weights: Mapping[str, float] | None = None,
    ) -> None:
        self.corpus = corpus
        self.special = special
        self.seq_length = seq_length
        self.split = split
        self.validation_fraction = validation_fraction
        self.num_parts = num_parts
        self.mlm_probability = mlm_probability
        self.budget = seq_length - 3 - len(special.facets)  # [CLS] facets ... [SEP] ... [SEP]
        if self.budget < 8:
            short = 8 - self.budget
            raise UserError(
                f"seq_length = {seq_length}: too short for {len(special.facets)} facets and text; {short} more."
            )
        self.window = num_parts * self.budget * EXPECTED_FILL
        self._key = hashed(0, seed)
        self._ordinary_ids = np.setdiff1d(np.arange(corpus.vocabulary_size), special.all())
        frequency = np.maximum(corpus.document_frequency, 1)  # a piece never seen counts as seen once
        self._idf = np.log(corpus.num_documents / frequency)
        self._count_windows(source_weights or {})
        # glibc hands freed memory back to the system, and to fault it in again for every batch costs as much as all
        # the rest. Once a block of this size has been freed, it keeps as much.
        np.empty(16 << 20, np.uint8)
        if not self.examples_per_epoch:
            raise UserError(
                f"{corpus.path}: none of its {corpus.num_documents} documents falls into the {split} split "
                f"(validation_fraction = {validation_fraction}, source_weights = {dict(source_weights or {})}); "
                "change these or prepare more documents."
            )

    def micro_batches(self, numbers: Sequence[int], size: int) -> dict[str, np.ndarray]:
        """Micro-batches of the endless sequence of epochs; number b holds its examples b * size to b * size + size - 1.

        Returns:
            The arrays of `Example` with the micro-batches on the first axis and, part-major, n = size examples on the
            second: row p * n + i is part p of example i. Also `example_ids` (-, n, 2) int64, (epoch, index).
        """
        serial = (np.array(numbers)[:, None] * size + np.arange(size)).ravel()
        epochs, indices = np.divmod(serial, self.examples_per_epoch)
        arrays, _ = self._build(self._find(epochs, indices), size)
        return arrays | {"example_ids": np.stack([epochs, indices], axis=1).reshape(len(numbers), size, 2)}

    def example(self, epoch: int, index: int) -> Example:
        """Example `index` (0 to `examples_per_epoch` - 1) of an epoch: a pure function of (seed, epoch, index)."""
        return self.examples(epoch, [index])[0]

    def examples(self, epoch: int, indices: Sequence[int]) -> list[Example]:
        """Returns many examples of an epoch; building them together is much faster than one by one."""
        numbers = np.array(indices)
        return self._examples(self._find(np.full_like(numbers, epoch), numbers))

    def example_of(self, document: int, epoch: int, window: int = 0) -> Example:
        """What training sees of a window of a document in pass `epoch` over its source (at weight 1: in that epoch).

        Raises:
            UserError: there is no such document or window.
        """
        windows = self.windows_of(document)
        if not 0 <= window < windows:
            known = f"0 to {windows - 1}" if windows else f"none, having fewer than {self.num_parts} sentences"
            raise UserError(f"{self.corpus.path}: document {document} has no window {window}; it has {known}.")
        return self.examples_of(document, epoch, [window])[0]

    def examples_of(self, document: int, epoch: int, windows: Sequence[int] | None = None) -> list[Example]:
        """The same for several windows of a document, or all, built together; none if it has too few sentences.

        Raises:
            UserError: there is no such document.
        """
        count = self.windows_of(document)
        numbers = np.arange(count) if windows is None else np.array(windows)
        if not len(numbers):
            return []
        shard, row = self.corpus.locate(document)
        number = int(np.searchsorted(self.corpus.starts, document, side="right")) - 1
        turn, shards, rows, counts, pieces = (
            np.full_like(numbers, n) for n in (epoch, number, row, count, int(shard.num_tokens[row]))
        )
        return self._examples(_Windows(turn, shards, rows, numbers, counts, pieces))

    def windows_of(self, document: int) -> int:
        """How many windows, each an example in every pass, a document has.

        Raises:
            UserError: there is no such document.
        """
        shard, row = self.corpus.locate(document)
        return int(self._windows(shard.num_tokens[row], shard.documents[row + 1] - shard.documents[row]))

    # Which text: from the number of an example to a window of a document

    def _windows(self, pieces: np.ndarray, sentences: np.ndarray) -> np.ndarray:
        """Windows of documents; none where there are fewer sentences than parts."""
        return np.where(sentences < self.num_parts, 0, np.maximum(np.rint(pieces / self.window), 1)).astype(np.int64)

    def _windows_in_split(self, blocks: Sequence[tuple[Shard, int, int]]) -> np.ndarray:
        """Windows of the documents in rows [first, end) of shards, 0 outside the split."""
        pieces = np.concatenate([shard.num_tokens[first:end] for shard, first, end in blocks])
        begin = np.concatenate([shard.documents[first:end] for shard, first, end in blocks])
        stop = np.concatenate([shard.documents[first + 1 : end + 1] for shard, first, end in blocks])
        hashes = np.concatenate([shard.hashes[first:end] for shard, first, end in blocks])
        held_out = held_out_share(hashes) < self.validation_fraction
        return self._windows(pieces, stop - begin) * (held_out == (self.split == "validation"))

    def _count_windows(self, weights: Mapping[str, float]) -> None:
        """Counts the windows of every block of documents of one source, and those of every source."""
        names: dict[str, int] = {}
        columns: list[list[np.ndarray]] = []
        for number in range(self.corpus.num_shards):
            shard = self.corpus.shard(number)
            codes = np.array([names.setdefault(name, len(names)) for name in shard.source_names])[shard.source_codes]
            firsts = np.union1d(np.arange(0, len(codes), BLOCK), np.flatnonzero(np.diff(codes)) + 1)
            ends = np.append(firsts[1:], len(codes))
            totals = np.add.reduceat(self._windows_in_split([(shard, 0, len(codes))]), firsts)
            columns.append([codes[firsts], np.full(len(firsts), number), firsts, ends, totals])
        source, *block, totals = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.argsort(source, kind="stable")  # the windows of a source stand together
        self._blocks = np.stack(block, axis=1).astype(np.int32)[order]  # shard, first row, end
        self._block_starts = np.cumsum(np.append(0, totals[order]))
        self._sizes = np.bincount(source, totals, minlength=len(names)).astype(np.int64)
        self._source_starts = np.cumsum(self._sizes) - self._sizes
        self._shown = np.rint(_checked_weights(weights, list(names)) * self._sizes).astype(np.int64)  # in an epoch
        self._shown_ends = np.cumsum(self._shown)
        self.examples_per_epoch = int(self._shown_ends[-1])

    def _find(self, epochs: np.ndarray, indices: np.ndarray) -> _Windows:
        """The windows of (B,) examples: shuffled over the epoch, then over the present pass through their source."""
        index = permuted(indices, np.array(self.examples_per_epoch), hashed(self._key, ORDER, epochs))
        source = np.searchsorted(self._shown_ends, index, side="right")
        shown, size = self._shown[source], self._sizes[source]
        turn, index = np.divmod(epochs * shown + index - (self._shown_ends[source] - shown), size)
        index = self._source_starts[source] + permuted(index, size, hashed(self._key, PASS, source, turn))
        block = np.searchsorted(self._block_starts, index, side="right") - 1
        shard, first, end = self._blocks[block].T
        held = [(self.corpus.shard(n), *rows) for n, *rows in self._blocks[block].tolist()]
        windows = self._windows_in_split(held)
        starts = np.cumsum(windows) - windows
        origin = np.cumsum(end - first) - (end - first)  # where the rows of each block begin among those gathered
        index += starts[origin] - self._block_starts[block]
        found = np.searchsorted(starts, index, side="right") - 1  # rows without windows share a start: the last has it
        row = first + found - origin
        pieces = np.array([block[0].num_tokens[n] for block, n in zip(held, row.tolist(), strict=True)], np.int64)
        return _Windows(turn, shard, row, index - starts[found], windows[found], pieces)

    # Which sentences: the boundaries of the parts

    def _mirrored(self, key: np.ndarray) -> np.ndarray:
        """Draws which windows are filled backwards, (B,) bool: all windows of a document, so distances stay equal."""
        return below(hashed(key, MIRROR), 2) == 1

    def _starts(self, w: _Windows, mirrored: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Returns the approximate start of each window as a token offset, (B,), counted from the end if mirrored.

        An offset of D means: fill from the other end of the document.
        """
        window = np.where(mirrored, w.windows - 1 - w.window, w.window)
        phase = uniform(hashed(key, PHASE)) - 0.5  # one for all windows of a document
        moved = np.ceil((window + phase) * w.pieces / w.windows).astype(np.int64)
        anchor = below(hashed(key, ANCHOR), 8)
        last = np.where(w.windows > 1, window == w.windows - 1, anchor % 2 == 1)  # a single window is either
        anchored = (anchor < 6) & (last | (window == 0))
        return np.where(anchored, np.where(last, w.pieces, 0), moved)

    def _sentences(self, w: _Windows, starts: np.ndarray, mirrored: np.ndarray) -> _Sentences:
        """Gathers the sentence boundaries that may matter: a sentence has at least one token."""
        reach = self.num_parts * self.budget + 2
        slices, numbers = [], []
        places = zip(w.shard.tolist(), w.row.tolist(), starts.tolist(), mirrored.tolist(), strict=True)
        for number, row, start, reverse in places:
            shard = self.corpus.shard(number)
            begin, end = int(shard.documents[row]), int(shard.documents[row + 1])
            boundaries = shard.sentences[begin : end + 1]
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
        first, number, last = np.array(numbers).T
        low = np.cumsum(last + 1) - last - 1
        places = np.concatenate(slices) + np.repeat(np.arange(len(slices)) * STRIDE, last + 1)
        return _Sentences(places, low + first, low, low + last, number)

    def _bounds(self, s: _Sentences, starts: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Returns indices in `s.places`, (B, P + 1): part p holds the sentences between bounds p and p + 1.

        Parts are filled forwards from the sentence nearest to the start. Where the document ends too early, they are
        filled backwards from its end. A document that fits as a whole is divided evenly.
        """
        # Of two neighbouring starts take the one whose parts are fuller: padding falls by a fifth.
        first = np.stack([s.first, np.minimum(s.first + (starts > 0), s.high)])
        bounds = self._fill_forwards(s.places, first, s.high)  # (2, B, P + 1)
        fill = np.minimum(np.diff(s.places[bounds]), self.budget).sum(axis=-1)
        fill[bounds[..., -1] >= s.high] = -1  # does not fit
        better = fill.argmax(axis=0)
        chosen = bounds[better, np.arange(len(better))]
        ended = np.flatnonzero(fill.max(axis=0) < 0)
        chosen[ended] = self._fill_backwards(s.places, s.low[ended], s.high[ended])
        whole = ended[chosen[ended, 0] == s.low[ended]]
        chosen[whole] = self._divide(s.places, s.low[whole], s.high[whole], key[whole])
        return chosen

    def _fill_forwards(self, places: np.ndarray, first: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Boundaries from `first` on, each part as full as whole sentences make it."""
        bounds = [first]
        for _ in range(self.num_parts):
            bounds.append(self._next(places, bounds[-1], high))
        return np.stack(bounds, axis=-1)

    def _next(self, places: np.ndarray, begin: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Where a part that begins at `begin` ends: it takes one sentence at least, though that be too long."""
        fitting = np.searchsorted(places, places[begin] + self.budget, side="right") - 1
        return np.minimum(np.maximum(fitting, begin + 1), high)

    def _fill_backwards(self, places: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Boundaries from `high` back."""
        bounds = [high]
        for _ in range(self.num_parts):
            fitting = np.searchsorted(places, places[bounds[0]] - self.budget, side="left")
            bounds.insert(0, np.maximum(np.minimum(fitting, bounds[0] - 1), low))
        return np.stack(bounds, axis=-1)

    def _divide(self, places: np.ndarray, low: np.ndarray, high: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Boundaries that divide whole short documents about evenly, a little differently each time."""
        earliest = self._fill_backwards(places, low, high)
        bounds = [low]
        for p in range(1, self.num_parts):
            begin, remaining = bounds[-1], self.num_parts - p
            latest = self._next(places, begin, high)
            # Two sentences a part where possible, so that each has an order; one is possible always.
            least, most = np.maximum(earliest[:, p], begin + 2), np.minimum(latest, high - 2 * remaining)
            tight = least > most
            least = np.where(tight, np.maximum(earliest[:, p], begin + 1), least)
            most = np.where(tight, np.minimum(latest, high - remaining), most)
            share = (places[high] - places[begin]) / (remaining + 1)
            target = places[begin] + (share * (0.75 + 0.5 * uniform(hashed(key, DIVIDE, p)))).astype(np.int64)
            bounds.append(np.clip(np.searchsorted(places, target), least, most))
        return np.stack([*bounds, high], axis=-1)

    # The arrays

    def _build(self, w: _Windows, size: int) -> tuple[dict[str, np.ndarray], _Parts]:
        """The windows' arrays in micro-batches of `size` (as `micro_batches`), and what their parts hold."""
        key = hashed(self._key, w.turn, self.corpus.starts[w.shard] + w.row)
        mirrored = self._mirrored(key)
        starts = self._starts(w, mirrored, key)
        sentences = self._sentences(w, starts, mirrored)
        key = hashed(key, w.window)
        bounds = self._bounds(sentences.mirrored(mirrored), starts, key)
        bounds = sentences.mirrored_back(bounds, mirrored)
        parts = self._parts(sentences, bounds, key)
        pieces, scores, begin = self._gather(w, sentences.places, bounds)

        def in_rows(array: np.ndarray) -> np.ndarray:
            if array.dtype == np.int64:
                array = array.astype(np.int32)  # half the work for what is as large as the batch
            return array.reshape(-1, size, self.num_parts).swapaxes(1, 2).reshape(-1, 1)  # (R, 1), part-major

        rows = map(in_rows, (begin, parts.length, parts.seam, parts.cut < parts.end, parts.swapped))
        arrays, text = self._assemble(pieces, scores, *rows)
        self._mask(arrays, text, in_rows(hashed(key[:, None], CHOICE, np.arange(self.num_parts))))
        return {name: a.reshape(-1, size * self.num_parts, *a.shape[1:]) for name, a in arrays.items()}, parts

    def _parts(self, s: _Sentences, bounds: np.ndarray, key: np.ndarray) -> _Parts:
        """Cuts each part of several sentences into two segments, and swaps these with probability one half."""
        first, end = bounds[:, :-1], bounds[:, 1:]
        cutting, swapping = (hashed(key[:, None], purpose, np.arange(self.num_parts)) for purpose in (CUT, SWAP))
        cut = self._cut(s.places, first, end, cutting)
        swapped = (cut < end) & (below(swapping, 2) == 1)
        whole = s.places[end] - s.places[first]
        length = np.minimum(whole, self.budget)  # only a sentence longer than a part is cut
        seam = np.minimum(s.places[cut] - s.places[first], length)
        origin = (s.number - s.low)[:, None]
        return _Parts(first + origin, cut + origin, end + origin, swapped, length, seam, whole - length)

    def _cut(self, places: np.ndarray, first: np.ndarray, end: np.ndarray, random: np.ndarray) -> np.ndarray:
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
            places[boundary] - places[first].ravel()[part], places[end].ravel()[part] - places[boundary]
        )
        weights = np.cumsum(shorter * shorter)  # 0 where a part begins
        before = np.append(0, weights)[ends - sentences]
        total = weights[ends - 1] - before
        drawn = np.searchsorted(weights, before + below(random.ravel(), np.maximum(total, 1)), side="right")
        cut = np.where(total > 0, drawn + end.ravel() - ends, end.ravel())
        return cut.reshape(end.shape)

    def _gather(self, w: _Windows, places: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The pieces of all windows, one after the other, their TF-IDF targets, and where parts begin there (B, P).

        TF-IDF is min-max scaled inside each sentence to 0..10, 0 where all are equal.
        """
        windows = np.arange(len(bounds))
        low, high = places[bounds[:, 0]], places[bounds[:, -1]]
        ranges = np.stack([w.shard, low - windows * STRIDE, high - windows * STRIDE], axis=1).tolist()
        held = [(self.corpus.shard(number), begin, end) for number, begin, end in ranges]
        pieces = np.concatenate([shard.tokens[begin:end] for shard, begin, end in held])
        counts = np.concatenate([shard.counts[begin:end] for shard, begin, end in held])
        shift = np.cumsum(high - low) - high  # from a place to an index of `pieces`

        sentences = bounds[:, -1] - bounds[:, 0]
        window = np.repeat(windows, sentences)
        boundary = np.arange(len(window)) + (bounds[:, -1] - np.cumsum(sentences))[window]
        begin = places[boundary] + shift[window]
        length = places[boundary + 1] - places[boundary]
        values = counts * self._idf[pieces]
        lowest = np.minimum.reduceat(values, begin)
        spread = np.maximum.reduceat(values, begin) - lowest
        scale = np.divide(TFIDF_SCALE, spread, out=np.zeros_like(spread), where=spread > 0)
        scores = (values - np.repeat(lowest, length)) * np.repeat(scale, length)
        return pieces, scores.astype(np.float32), places[bounds[:, :-1]] + shift[:, None]

    def _assemble(
        self,
        pieces: np.ndarray,
        scores: np.ndarray,
        begin: np.ndarray,
        length: np.ndarray,
        seam: np.ndarray,
        several: np.ndarray,
        swapped: np.ndarray,
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The arrays of R rows before masking, and where their text stands, (R, T) bool.

        Row r holds pieces[begin[r] : begin[r] + length[r]], in two runs where `several`; all these are (R, 1).
        """
        special, head = self.special, 1 + len(self.special.facets)
        column = np.arange(self.seq_length - head, dtype=np.int32)
        first = np.where(swapped, length - seam, seam)  # pieces placed first; a [SEP] follows them
        second = column > first
        inside = column <= length + several  # up to the last [SEP]
        text = (column != first) & (column < length + several)
        # From a column to its piece: the two runs are shifted against each other where they are swapped.
        shift = begin + np.where(swapped, seam, 0), begin - 1 - np.where(swapped, first, 0)
        index = (column + np.where(second, shift[1], shift[0])) * text

        shape = (len(index), self.seq_length)
        arrays: dict[str, np.ndarray] = {
            "input_ids": np.empty(shape, np.int32),
            "attention_mask": np.ones(shape, np.int8),
            "token_type_ids": np.zeros(shape, np.int8),
            "labels": np.full(shape, IGNORE, np.int32),
            "tfidf_labels": np.zeros((len(index), 1 + len(column)), np.float32),
            "so_labels": np.where(several, swapped, IGNORE)[:, 0].astype(np.int8),
        }
        arrays["input_ids"][:, :head] = special.cls, *special.facets
        arrays["input_ids"][:, head:] = np.where(text, pieces[index], np.where(inside, special.sep, special.pad))
        arrays["attention_mask"][:, head:] = inside
        arrays["token_type_ids"][:, head:] = second & inside
        arrays["tfidf_labels"][:, 1:] = scores[index] * text
        return arrays, text

    def _mask(self, arrays: dict[str, np.ndarray], text: np.ndarray, key: np.ndarray) -> None:
        """Hides pieces in place: a fixed share of every row's text, 80 % [MASK], 10 % random, 10 % kept.

        Chosen are the positions of the smallest hashes; their last bits are the position itself, so that none tie.
        """
        column = np.arange(text.shape[1], dtype=np.uint32)
        bits = len(column).bit_length()
        rank = (hashed(key, column) >> np.uint64(32)).astype(np.uint32) >> bits << bits | column
        rank[~text] = np.iinfo(np.uint32).max
        count = np.maximum(np.rint(self.mlm_probability * text.sum(axis=1, keepdims=True)), 1).astype(np.int64)
        row, place = np.nonzero(rank <= np.take_along_axis(np.sort(rank, axis=1), count - 1, axis=1))
        fate, other = (hashed(key[row, 0], purpose, place) for purpose in (FATE, REPLACEMENT))
        place += self.seq_length - len(column)
        ids = arrays["input_ids"][row, place]
        arrays["labels"][row, place] = ids
        replacement = self._ordinary_ids[below(other, len(self._ordinary_ids))]
        hidden = np.where(uniform(fate) < 0.8, self.special.mask, replacement)
        arrays["input_ids"][row, place] = np.where(uniform(fate) < 0.9, hidden, ids)

    def _examples(self, w: _Windows) -> list[Example]:
        arrays, parts = self._build(w, 1)
        documents = (self.corpus.starts[w.shard] + w.row).tolist()
        texts = np.stack(parts[:4], axis=-1).tolist()  # (B, P, 4)
        return [
            Example(
                document=document,
                parts=tuple(Part(first, cut, end, bool(swapped)) for first, cut, end, swapped in texts[i]),
                cut_pieces=int(parts.left_out[i].sum()),
                **{name: array[i] for name, array in arrays.items()},
            )
            for i, document in enumerate(documents)
        ]


def _checked_weights(weights: Mapping[str, float], sources: Sequence[str]) -> np.ndarray:
    """(S,) weights of the sources, 1 where none is given.

    Raises:
        UserError: all names that are no source, and all weights that are no finite number from 0 on.
    """
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
