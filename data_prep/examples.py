"""Makes three-part training examples on the fly: each is a pure function of seed, epoch and index.

`windows.py` chooses the text; this module gathers its tokens, scores them by TF-IDF, lays them out as sequences and
masks some of them. Shapes: B examples built together, P parts of an example (3, or 2 without hard negatives),
R = B * P sequences, L sequence length, K facets, T = L - 1 - K columns after [CLS] and the facets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from data_prep.hash_rng import hashed, randint, uniform
from data_prep.windows import CHOICE, FATE, REPLACEMENT, Text, WindowIndex, Windows, choose_text
from multicls.corpus import Corpus
from multicls.errors import UserError

IGNORE_INDEX = -100  # label of a position that does not count in a loss
EXPECTED_FILL = 0.875  # share of a part's budget that whole sentences fill
MIN_BUDGET = 8  # tokens of text in a part
TFIDF_SCALE = 10.0


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the tokens around the text; `facets` are [C1]..[CK] in order, none for K = 0."""

    cls: int
    sep: int
    pad: int
    mask: int
    facets: tuple[int, ...]

    def all(self) -> list[int]:
        """Returns every special id: none of them is ever masked or a random replacement."""
        return sorted({self.cls, self.sep, self.pad, self.mask, *self.facets})


class Part(NamedTuple):
    """Sentences [first, end) of a row, in one or two segments; the second segment begins at sentence `cut`.

    A part of a single sentence is one segment: `cut == end`. `swapped` means that the second segment is placed first.
    """

    first: int
    cut: int
    end: int
    swapped: bool


@dataclass(frozen=True)
class TrainingExample:
    """P consecutive parts of one row."""

    row: int  # index in the corpus
    parts: tuple[Part, ...]  # sentences of each part
    input_ids: np.ndarray  # (P, L) int32
    attention_mask: np.ndarray  # (P, L) int8
    token_type_ids: np.ndarray  # (P, L) int8
    labels: np.ndarray  # (P, L) int32; -100 where no token is masked
    tfidf_labels: np.ndarray  # (P, L - K) float32, facet positions removed, 0 on [CLS], [SEP] and padding
    so_labels: np.ndarray  # (P,) int8; 1 swapped, 0 in order, -100 for a part of one segment
    cut_tokens: int  # number of tokens left out, because their sentence alone is longer than a part


class ExampleStream:
    """The endless sequence of training examples of a corpus, epoch after epoch.

    Args:
        seq_length: L.
        seed: decides, together with epoch and index, everything about an example.
        split: documents are assigned to the splits by their content hash.
        validation_fraction: share of the documents in the validation split; at least one document if it is above 0.
        num_parts: P; 2 leaves out the hard negatives.
        mlm_probability: share of text tokens that are masked-LM targets.
        source_weights: how often an epoch shows each window of a source, on average; 1 for sources not named.

    Attributes:
        examples_per_epoch: number of examples in an epoch of the split.
        num_documents: number of documents in the split; a document that takes several rows counts once.
        num_tokens: number of tokens of the split's text, weighted by `source_weights`.
        budget: number of text tokens that fit into a part.

    Raises:
        UserError: the split is empty, L leaves no room for text, or a weight is invalid.
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
        self.num_parts = num_parts
        self.mlm_probability = mlm_probability
        self.budget = seq_length - 3 - len(special.facets)  # [CLS] facets ... [SEP] ... [SEP]
        if self.budget < MIN_BUDGET:
            raise UserError(
                f"seq_length = {seq_length}: too short for {len(special.facets)} facets and text; give at least "
                f"{seq_length + MIN_BUDGET - self.budget}."
            )
        self._key = hashed(0, seed)
        self._ordinary_ids = np.setdiff1d(np.arange(corpus.vocabulary_size), special.all())
        frequency = np.maximum(corpus.document_frequency, 1)  # a token never seen counts as seen once
        self._idf = np.log(corpus.num_rows / frequency)
        self._index = WindowIndex(
            corpus,
            num_parts=num_parts,
            tokens_per_window=num_parts * self.budget * EXPECTED_FILL,
            validation=split == "validation",
            validation_fraction=validation_fraction,
            source_weights=source_weights or {},
        )
        self.examples_per_epoch = self._index.per_epoch
        self.num_documents = self._index.num_documents
        self.num_tokens = self._index.num_tokens
        # glibc returns freed memory to the system, and faulting it in again for every batch costs as much as all the
        # rest. Once a block of this size has been freed, glibc keeps as much.
        np.empty(16 << 20, np.uint8)
        if not self.examples_per_epoch:
            raise UserError(_empty_split(corpus, self.num_documents, split, validation_fraction, source_weights or {}))

    def micro_batches(self, numbers: Sequence[int], size: int) -> dict[str, np.ndarray]:
        """Returns micro-batches of the endless sequence; number b holds its examples b * size to b * size + size - 1.

        Returns:
            The arrays of `TrainingExample` with the micro-batches on the first axis and, part-major, n = size examples
            on the second: sequence p * n + i is part p of example i. Also `example_ids` (-, n, 2) int64, epoch and
            index.
        """
        serial = (np.array(numbers)[:, None] * size + np.arange(size)).ravel()
        epochs, indices = np.divmod(serial, self.examples_per_epoch)
        arrays, _ = self._build(self._index.find(self._key, epochs, indices), size)
        return arrays | {"example_ids": np.stack([epochs, indices], axis=1).reshape(len(numbers), size, 2)}

    def examples(self, epoch: int, indices: Sequence[int]) -> list[TrainingExample]:
        """Returns examples of an epoch; an index is 0 to `examples_per_epoch` - 1."""
        numbers = np.array(indices)
        return self._examples(self._index.find(self._key, np.full_like(numbers, epoch), numbers))

    def num_windows(self, row: int) -> int:
        """Returns the number of windows of a row; each gives one example in every pass.

        Raises:
            UserError: there is no such row.
        """
        return self._index.count(row)

    def examples_of_row(self, row: int, epoch: int, windows: Sequence[int] | None = None) -> list[TrainingExample]:
        """Returns the examples of a row, or of some of its windows, in pass `epoch` over its source.

        A source of weight 1 is passed once an epoch. A row with fewer than P sentences has no examples.

        Raises:
            UserError: there is no such row or window.
        """
        count = self.num_windows(row)
        for window in windows or ():
            if not 0 <= window < count:
                known = f"0 to {count - 1}" if count else f"none, because it has fewer than {self.num_parts} sentences"
                raise UserError(f"{self.corpus.path}: row {row} has no window {window}; it has {known}.")
        indices = np.arange(count) if windows is None else np.array(windows)
        return self._examples(self._index.of_row(row, epoch, indices)) if len(indices) else []

    def _examples(self, windows: Windows) -> list[TrainingExample]:
        arrays, text = self._build(windows, 1)
        rows = (self.corpus.starts[windows.shard] + windows.row).tolist()
        parts = np.stack([text.first, text.cut, text.end_sentence, text.swapped], axis=-1).tolist()  # (B, P, 4)
        return [
            TrainingExample(
                row=row,
                parts=tuple(Part(first, cut, end, bool(swapped)) for first, cut, end, swapped in parts[i]),
                cut_tokens=int(text.left_out[i].sum()),
                **{name: array[i] for name, array in arrays.items()},
            )
            for i, row in enumerate(rows)
        ]

    def _build(self, windows: Windows, size: int) -> tuple[dict[str, np.ndarray], Text]:
        """Returns the arrays of the windows in micro-batches of `size` (see `micro_batches`), and their text."""
        text = choose_text(self.corpus, windows, self._key, self.num_parts, self.budget)
        tokens, scores = self._gather(text)
        layout = _layout(text, size)
        arrays, is_text = self._assemble(tokens, scores, layout)
        self._mask(arrays, is_text, layout.key)
        return {name: a.reshape(-1, size * self.num_parts, *a.shape[1:]) for name, a in arrays.items()}, text

    def _gather(self, text: Text) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of all examples, concatenated, and their TF-IDF targets.

        TF-IDF is min-max scaled in each sentence to 0..10; it is 0 where all values of a sentence are equal.
        """
        ranges = zip(text.shard.tolist(), text.begin.tolist(), text.end.tolist(), strict=True)
        slices = [(self.corpus.shard(number), begin, end) for number, begin, end in ranges]
        tokens = np.concatenate([shard.tokens[begin:end] for shard, begin, end in slices])
        counts = np.concatenate([shard.counts[begin:end] for shard, begin, end in slices])
        length = text.sentence_lengths
        begin = np.cumsum(length) - length
        values = counts * self._idf[tokens]
        lowest = np.minimum.reduceat(values, begin)
        spread = np.maximum.reduceat(values, begin) - lowest
        scale = np.divide(TFIDF_SCALE, spread, out=np.zeros_like(spread), where=spread > 0)
        scores = (values - np.repeat(lowest, length)) * np.repeat(scale, length)
        return tokens, scores.astype(np.float32)

    def _assemble(
        self, tokens: np.ndarray, scores: np.ndarray, layout: _Layout
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns the arrays of R sequences before masking, and which of their columns are text, (R, T) bool."""
        begin, length, first_segment, has_two_segments, swapped, _ = layout
        special, head = self.special, 1 + len(self.special.facets)
        column = np.arange(self.seq_length - head, dtype=np.int32)
        placed_first = np.where(swapped, length - first_segment, first_segment)  # tokens before the first [SEP]
        in_second = column > placed_first
        inside = column <= length + has_two_segments  # up to the last [SEP]
        is_text = (column != placed_first) & (column < length + has_two_segments)
        # From a column to its token: if swapped, the two segments are moved in opposite directions.
        shift = begin + np.where(swapped, first_segment, 0), begin - 1 - np.where(swapped, placed_first, 0)
        index = (column + np.where(in_second, shift[1], shift[0])) * is_text

        shape = (len(index), self.seq_length)
        arrays: dict[str, np.ndarray] = {
            "input_ids": np.empty(shape, np.int32),
            "attention_mask": np.ones(shape, np.int8),
            "token_type_ids": np.zeros(shape, np.int8),
            "labels": np.full(shape, IGNORE_INDEX, np.int32),
            "tfidf_labels": np.zeros((len(index), 1 + len(column)), np.float32),
            "so_labels": np.where(has_two_segments, swapped, IGNORE_INDEX)[:, 0].astype(np.int8),
        }
        arrays["input_ids"][:, :head] = special.cls, *special.facets
        arrays["input_ids"][:, head:] = np.where(is_text, tokens[index], np.where(inside, special.sep, special.pad))
        arrays["attention_mask"][:, head:] = inside
        arrays["token_type_ids"][:, head:] = in_second & inside
        arrays["tfidf_labels"][:, 1:] = scores[index] * is_text
        return arrays, is_text

    def _mask(self, arrays: dict[str, np.ndarray], is_text: np.ndarray, key: np.ndarray) -> None:
        """Masks tokens in place: a fixed share of the text of each sequence, 80 % [MASK], 10 % random, 10 % kept.

        The positions with the smallest hashes are masked. The last bits of a hash are the position, so none are equal.
        """
        column = np.arange(is_text.shape[1], dtype=np.uint32)
        bits = len(column).bit_length()
        rank = (hashed(key, column) >> np.uint64(32)).astype(np.uint32) >> bits << bits | column
        rank[~is_text] = np.iinfo(np.uint32).max
        count = np.maximum(np.rint(self.mlm_probability * is_text.sum(axis=1, keepdims=True)), 1).astype(np.int64)
        sequence, position = np.nonzero(rank <= np.take_along_axis(np.sort(rank, axis=1), count - 1, axis=1))
        fate, other = (hashed(key[sequence, 0], purpose, position) for purpose in (FATE, REPLACEMENT))
        position += self.seq_length - len(column)
        ids = arrays["input_ids"][sequence, position]
        arrays["labels"][sequence, position] = ids
        replacement = self._ordinary_ids[randint(other, len(self._ordinary_ids))]
        hidden = np.where(uniform(fate) < 0.8, self.special.mask, replacement)
        arrays["input_ids"][sequence, position] = np.where(uniform(fate) < 0.9, hidden, ids)


class _Layout(NamedTuple):
    """R sequences, part-major in each micro-batch; each array has shape (R, 1)."""

    begin: np.ndarray  # the sequence holds `length` of all tokens, from `begin` on
    length: np.ndarray
    first_segment: np.ndarray  # number of tokens in the first segment
    has_two_segments: np.ndarray  # False for a part of one sentence
    swapped: np.ndarray  # True if the second segment is placed first
    key: np.ndarray  # hash that decides what is masked


def _layout(text: Text, size: int) -> _Layout:
    """Returns the parts of the text as sequences in micro-batches of `size` examples."""
    num_parts = text.first.shape[1]

    def by_sequence(array: np.ndarray) -> np.ndarray:
        if array.dtype == np.int64:
            array = array.astype(np.int32)  # half the work in arrays that are as large as the batch
        return array.reshape(-1, size, num_parts).swapaxes(1, 2).reshape(-1, 1)

    key = hashed(text.key[:, None], CHOICE, np.arange(num_parts))
    has_two_segments = text.cut < text.end_sentence
    columns = (text.part_begin, text.length, text.first_segment, has_two_segments, text.swapped, key)
    return _Layout(*map(by_sequence, columns))


def _empty_split(
    corpus: Corpus, num_documents: int, split: str, validation_fraction: float, weights: Mapping[str, float]
) -> str:
    """Returns what to tell the user about a split without examples."""
    if corpus.num_documents == 1 and validation_fraction > 0:
        return (
            f"{corpus.path}: holds a single document, and a document is either for training or for validation; prepare "
            "more files, or divide a text file into documents with `data_prep/run.py --documents blank_line`."
        )
    if num_documents:
        return (
            f"{corpus.path}: the documents of the {split} split ({num_documents}) give no example "
            f"(source_weights = {dict(weights)}); change the weights or prepare more documents."
        )
    return (
        f"{corpus.path}: none of its documents ({corpus.num_documents}) falls into the {split} split "
        f"(validation_fraction = {validation_fraction}); change the fraction or prepare more documents."
    )
