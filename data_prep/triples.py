"""Shards in, three-part training examples out: built on the fly, every example a pure function of its number.

Shape legend: P parts of an example (3, or 2 without hard negatives), n examples in a micro-batch, L sequence length,
K facets, V vocabulary.

How an epoch covers the corpus: a document of D pieces gets `max(1, round(D / W))` windows, W being the pieces that an
example holds on average. The windows stand at equal distances, moved together by a random phase that is fresh
for every document and epoch; each is filled with whole consecutive sentences, so part boundaries differ from epoch to
epoch. The first and last sentences of a document have half the chance of those in the middle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from multicls.errors import UserError
from multicls.shards import Corpus, held_out_share

IGNORE = -100  # label of what does not count in a loss
EXPECTED_FILL = 0.875  # share of a part's budget that whole sentences fill
BLOCK = 1024  # documents whose windows are counted together; only one number a block is kept in memory
TFIDF_SCALE = 10.0
_MASK64 = (1 << 64) - 1


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


@dataclass(frozen=True)
class Part:
    """Which text a part holds: sentences [first, end) of the document, the second run beginning at `cut`.

    `cut == end` when the part is a single run; `swapped` when the later run is placed first.
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
        input_ids, attention_mask, token_type_ids, labels: (P, L) int64; labels are -100 where no piece is masked.
        tfidf_labels: (P, L - K) float32, facet positions removed, 0 on [CLS], [SEP] and padding.
        so_labels: (P,) int64; 1 swapped, 0 not, -100 for a single run.
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

    Attributes:
        examples_per_epoch: examples in one pass over the split.

    Raises:
        UserError: the split holds no document, or L leaves no room for text.
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
    ) -> None:
        self.corpus = corpus
        self.special = special
        self.seq_length = seq_length
        self.seed = seed
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
        self._ordinary_ids = np.setdiff1d(np.arange(corpus.vocabulary_size), special.all())
        frequency = np.maximum(corpus.document_frequency, 1)  # a piece never seen counts as seen once
        self._idf = np.log(corpus.num_documents / frequency)
        self._count_windows()
        if not self.examples_per_epoch:
            raise UserError(
                f"{corpus.path}: none of its {corpus.num_documents} documents falls into the {split} split "
                f"(validation_fraction = {validation_fraction}); change the fraction or prepare more documents."
            )

    def _count_windows(self) -> None:
        """Counts the windows of every block of documents: all the state there is."""
        blocks: list[tuple[int, int]] = []
        totals: list[int] = [0]
        for number in range(self.corpus.num_shards):
            for row in range(0, len(self.corpus.shard(number).num_pieces), BLOCK):
                blocks.append((number, row))
                totals.append(int(self._windows(number, row).sum()))
        self._blocks = blocks
        self._block_starts = np.cumsum(totals)
        self.examples_per_epoch = int(self._block_starts[-1])

    def _windows(self, shard: int, row: int) -> np.ndarray:
        """Windows of each document in the block that begins at `row` of `shard`; 0 outside the split."""
        arrays = self.corpus.shard(shard)
        pieces = arrays.num_pieces[row : row + BLOCK]
        windows = np.maximum(np.rint(pieces / self.window), 1).astype(np.int64)
        held_out = held_out_share(arrays.hashes[row : row + BLOCK]) < self.validation_fraction
        return np.where(held_out == (self.split == "validation"), windows, 0)

    def _find(self, index: int) -> tuple[int, int, int, int, int]:
        """Window `index` of the unshuffled epoch: (shard, row, document number, window in it, windows of it)."""
        block = int(np.searchsorted(self._block_starts, index, side="right")) - 1
        shard, row = self._blocks[block]
        windows = self._windows(shard, row)
        ends = np.cumsum(windows)
        rest = index - int(self._block_starts[block])
        inside = int(np.searchsorted(ends, rest, side="right"))
        window = rest - int(ends[inside] - windows[inside])
        row += inside
        return shard, row, int(self.corpus.starts[shard]) + row, window, int(windows[inside])

    def example(self, epoch: int, index: int) -> Example:
        """Example `index` (0 to `examples_per_epoch` - 1) of an epoch: a pure function of (seed, epoch, index)."""
        position = permuted(index, self.examples_per_epoch, (self.seed, epoch))
        shard, row, document, window, windows = self._find(position)
        rng = np.random.Generator(np.random.Philox(key=[self.seed, 0], counter=[0, 0, epoch, index]))
        return self._build(shard, row, document, window, windows, epoch, rng)

    def example_of(self, document: int, epoch: int, window: int = 0) -> Example:
        """An example of the given document, to look at: text and parts as in that epoch, swaps and masks its own."""
        number = int(np.searchsorted(self.corpus.starts, document, side="right")) - 1
        row = self.corpus.locate(document)[1]
        windows = max(1, round(int(self.corpus.shard(number).num_pieces[row]) / self.window))
        rng = np.random.Generator(np.random.Philox(key=[self.seed, 1], counter=[0, window, epoch, document]))
        return self._build(number, row, document, window, windows, epoch, rng)

    def _build(
        self, shard: int, row: int, document: int, window: int, windows: int, epoch: int, rng: np.random.Generator
    ) -> Example:
        document_row = self.corpus.shard(shard).document(row)
        pieces, offsets = document_row.pieces, document_row.offsets
        phase = _hash(self.seed, epoch, document) / 2.0**64  # one for all windows of a document
        bounds = self._place(offsets, (window + phase - 0.5) * len(pieces) / windows, rng)
        return self._assemble(document, pieces, offsets, bounds, rng)

    def _place(self, offsets: np.ndarray, start: float, rng: np.random.Generator) -> list[int]:
        """Sentence numbers [b_0, ..., b_P]: part p holds sentences b_p to b_{p+1}.

        Filled forwards from the sentence nearest to `start`; backwards from the end where the document ends too early;
        a document that fits as a whole is divided evenly.
        """
        last = len(offsets) - 1
        first = int(np.searchsorted(offsets, start)) if start > 0 else 0
        reach = self.num_parts * self.budget + 2  # sentences that may matter, as each has a piece
        low, high = max(0, min(first, last - reach)), min(last, first + reach)
        starts = np.concatenate([[0], np.cumsum(np.minimum(np.diff(offsets[low : high + 1]), self.budget))])
        last -= low
        # Of two neighbouring starts take the one whose parts are fuller: padding falls by a fifth.
        candidates = [
            _fill_forwards(starts, begin - low, self.num_parts, self.budget)
            for begin in ((first, first + 1) if start > 0 else (first,))
            if begin - low < last
        ]
        fitting = [bounds for bounds in candidates if bounds[-1] < last]
        if fitting:
            bounds = max(fitting, key=lambda bounds: int(starts[bounds[-1]] - starts[bounds[0]]))
        else:
            bounds = _fill_backwards(starts, last, self.num_parts, self.budget)
            if bounds[0] == 0:
                bounds = _divide(starts, self.num_parts, self.budget, rng)
        return [low + bound for bound in bounds]

    def _assemble(
        self, document: int, pieces: np.ndarray, offsets: np.ndarray, bounds: Sequence[int], rng: np.random.Generator
    ) -> Example:
        """Builds the arrays of an example from the sentences between `bounds`."""
        shape = (self.num_parts, self.seq_length)
        facets = len(self.special.facets)
        input_ids = np.full(shape, self.special.pad, np.int64)
        input_ids[:, : 1 + facets] = self.special.cls, *self.special.facets
        attention_mask = np.zeros(shape, np.int64)
        token_type_ids = np.zeros(shape, np.int64)
        labels = np.full(shape, IGNORE, np.int64)
        weights = np.zeros(shape, np.float32)
        so_labels = np.full(self.num_parts, IGNORE, np.int64)
        targets = _tfidf(pieces, offsets, bounds[0], bounds[-1], self._idf)
        origin = int(offsets[bounds[0]])
        parts, cut_pieces = [], 0
        for p, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            part = _choose_runs(first, end, rng)
            parts.append(part)
            low, high = int(offsets[first]), int(offsets[end])
            stop = min(high, low + self.budget)  # only a sentence longer than a whole part is cut
            cut_pieces += high - stop
            seam = min(int(offsets[part.cut]), stop) - low
            text, scores = pieces[low:stop], targets[low - origin : stop - origin]
            if part.swapped:
                text, scores = np.roll(text, -seam), np.roll(scores, -seam)
                seam = len(text) - seam
            fill = 1 + facets + np.arange(len(text))
            fill[seam:] += 1  # the [SEP] between the runs
            input_ids[p, fill] = text
            weights[p, fill] = scores
            length = int(fill[-1]) + 2
            input_ids[p, [1 + facets + seam, length - 1]] = self.special.sep
            attention_mask[p, :length] = 1
            token_type_ids[p, 2 + facets + seam : length] = 1
            if part.cut < end:
                so_labels[p] = part.swapped
            self._mask(input_ids[p], labels[p], fill, rng)
        return Example(
            document=document,
            parts=tuple(parts),
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            labels=labels,
            tfidf_labels=np.delete(weights, slice(1, 1 + facets), axis=1),
            so_labels=so_labels,
            cut_pieces=cut_pieces,
        )

    def _mask(self, input_ids: np.ndarray, labels: np.ndarray, text: np.ndarray, rng: np.random.Generator) -> None:
        """Hides pieces in place: a fixed share of the `text` positions, 80 % [MASK], 10 % random, 10 % kept."""
        count = max(1, round(self.mlm_probability * len(text)))
        chosen = rng.permutation(text)[:count]
        labels[chosen] = input_ids[chosen]
        fate = rng.random(count)
        replacements = self._ordinary_ids[rng.integers(len(self._ordinary_ids), size=count)]
        hidden = np.where(fate < 0.8, self.special.mask, replacements)
        input_ids[chosen] = np.where(fate < 0.9, hidden, input_ids[chosen])

    def micro_batch(self, number: int, size: int) -> dict[str, np.ndarray]:
        """Examples `number * size` to `number * size + size - 1` of the endless sequence of epochs.

        Returns:
            Part-major arrays (row p * n + i is part p of example i), n = size: `input_ids`, `attention_mask`,
            `token_type_ids`, `labels`, (P * n, L) int64; `tfidf_labels` (P * n, L - K) float32; `so_labels` (P * n,)
            int64; `example_ids` (n, 2) int64, (epoch, index).
        """
        ids = [divmod(i, self.examples_per_epoch) for i in range(number * size, (number + 1) * size)]
        examples = [self.example(epoch, index) for epoch, index in ids]
        names = ("input_ids", "attention_mask", "token_type_ids", "labels", "tfidf_labels", "so_labels")
        stacked = {name: np.stack([getattr(example, name) for example in examples], axis=1) for name in names}
        batch = {name: array.reshape(-1, *array.shape[2:]) for name, array in stacked.items()}
        return batch | {"example_ids": np.array(ids, np.int64)}


def _choose_runs(first: int, end: int, rng: np.random.Generator) -> Part:
    """Cuts sentences [first, end) into two runs at a random boundary and swaps them with probability one half."""
    if end - first < 2:
        return Part(first, end, end, swapped=False)
    return Part(first, int(rng.integers(first + 1, end)), end, swapped=bool(rng.integers(2)))


def _tfidf(pieces: np.ndarray, offsets: np.ndarray, first: int, end: int, idf: np.ndarray) -> np.ndarray:
    """TF-IDF targets of sentences [first, end): min-max inside each sentence to 0..10, 0 where all are equal."""
    starts = offsets[first : end + 1]
    window = pieces[starts[0] : starts[-1]]
    values = np.bincount(pieces, minlength=len(idf))[window] * idf[window]
    inside, lengths = starts[:-1] - starts[0], np.diff(starts)
    lowest = np.minimum.reduceat(values, inside)
    spread = np.maximum.reduceat(values, inside) - lowest
    scale = np.divide(TFIDF_SCALE, spread, out=np.zeros_like(spread), where=spread > 0)
    scaled: np.ndarray = (values - np.repeat(lowest, lengths)) * np.repeat(scale, lengths)
    return scaled


def _fill_forwards(starts: np.ndarray, first: int, parts: int, budget: int) -> list[int]:
    """Boundaries of `parts` parts from sentence `first` on, each as full as whole sentences make it."""
    bounds = [first]
    for _ in range(parts):
        bounds.append(int(np.searchsorted(starts, starts[bounds[-1]] + budget, side="right")) - 1)
    return bounds


def _fill_backwards(starts: np.ndarray, end: int, parts: int, budget: int) -> list[int]:
    """The same, from sentence `end` (exclusive) back."""
    bounds = [end]
    for _ in range(parts):
        bounds.insert(0, int(np.searchsorted(starts, starts[bounds[0]] - budget, side="left")))
    return bounds


def _divide(starts: np.ndarray, parts: int, budget: int, rng: np.random.Generator) -> list[int]:
    """Boundaries that divide a whole short document about evenly, a little differently each time."""
    last = len(starts) - 1
    earliest = _fill_backwards(starts, last, parts, budget)
    bounds = [0]
    for p in range(1, parts):
        begin = bounds[-1]
        latest = _fill_forwards(starts, begin, 1, budget)[-1]
        remaining = parts - p
        for fewest in (2, 1):  # two sentences a part where possible, so that each has an order
            low, high = max(earliest[p], begin + fewest), min(latest, last - fewest * remaining)
            if low <= high:
                break
        share = (starts[last] - starts[begin]) / (remaining + 1)
        target = starts[begin] + share * rng.uniform(0.75, 1.25)
        nearest = int(np.searchsorted(starts, target))
        bounds.append(min(max(nearest, low), high))
    return [*bounds, last]


def permuted(index: int, size: int, key: tuple[int, int]) -> int:
    """Position of `index` in a pseudo-random permutation of range(size) that `key` chooses; needs no memory.

    A Feistel network on the next even number of bits, walked until it lands inside (Black and Rogaway, 2002).
    """
    half = max(1, math.ceil((size - 1).bit_length() / 2))
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            left, right = right, left ^ (_hash(*key, turn, right) & mask)
        index = left << half | right
        if index < size:
            return index


def _hash(*numbers: int) -> int:
    """Mixes integers into 64 bits (splitmix64's finaliser)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state
