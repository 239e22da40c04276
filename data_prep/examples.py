"""Makes three-part training examples on the fly: each is a pure function of seed, epoch and index.

`windows.py` chooses the text; this module gathers its tokens, scores them by TF-IDF, lays them out
as sequences and masks some of them. Shapes: P parts of an example (3; 2 without hard negatives; 1
for masked-LM alone), L sequence length, K facets, N tokens of an example's text, S its sentences.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from data_prep.windows import Part, Window, WindowIndex, choose_parts
from multicls.corpus import Corpus
from multicls.errors import UserError

IGNORE_INDEX = -100  # label of a position that does not count in a loss
EXPECTED_FILL = 0.875  # share of a part's budget that whole sentences fill
MIN_BUDGET = 8  # tokens of text in a part
TFIDF_SCALE = 10.0


class SpecialIds(NamedTuple):
    """Ids of the tokens around the text; `facets` are [C1]..[CK] in order, none for K = 0."""

    cls: int
    sep: int
    pad: int
    mask: int
    facets: tuple[int, ...]


class TrainingExample(NamedTuple):
    """P consecutive parts of one row."""

    row: int  # index in the corpus
    parts: tuple[Part, ...]  # sentences of each part
    cut_tokens: int  # tokens left out, because their sentence alone is longer than a part
    input_ids: np.ndarray  # (P, L) int32
    attention_mask: np.ndarray  # (P, L) int8
    token_type_ids: np.ndarray  # (P, L) int8
    labels: np.ndarray  # (P, L) int32; -100 where no token is masked
    tfidf_labels: np.ndarray  # (P, L - K) float32 without facets; 0 on [CLS], [SEP], padding
    so_labels: np.ndarray  # (P,) int8; 1 swapped, 0 in order, -100 for a part of one segment


ARRAYS = TrainingExample._fields[3:]


class ExampleStream:
    """The endless sequence of training examples of a corpus, epoch after epoch.

    Args:
        seed: Decides, together with epoch and index, everything about an example.
        validation_fraction: Share of the documents in the validation split; above 0, at least one.
        mlm_probability: Share of text tokens that are masked-LM targets.
        source_weights: How often an epoch shows each window of a source, on average; 1 for others.

    Attributes:
        num_documents: Number of documents in the split; one that takes several rows counts once.
        num_tokens: Number of tokens of the split's text, weighted by `source_weights`.
        budget: Number of text tokens that fit into a part.

    Raises a UserError if the split is empty, L leaves no room for text, or a weight is invalid.
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
        self.corpus, self.special = corpus, special
        self.seq_length, self.seed, self.num_parts = seq_length, seed, num_parts
        self.mlm_probability = mlm_probability
        self.budget = seq_length - 3 - len(special.facets)  # [CLS] facets ... [SEP] ... [SEP]
        if self.budget < MIN_BUDGET:
            least = seq_length + MIN_BUDGET - self.budget
            raise UserError(
                f"seq_length = {seq_length}: too short for {len(special.facets)} facets and text; "
                f"set at least {least}."
            )
        # None of the special tokens is ever masked or a random replacement.
        never = [*special.facets, special.cls, special.sep, special.pad, special.mask]
        self._ordinary_ids = np.setdiff1d(np.arange(corpus.vocabulary_size), never)
        frequency = np.maximum(corpus.document_frequency, 1)  # never seen counts as seen once
        self._idf = np.log(corpus.num_passages / frequency)
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
        if not self.examples_per_epoch:
            raise UserError(
                f"{corpus.path}: the {self.num_documents} of its {corpus.num_documents} documents in the {split} split "
                f"(validation_fraction = {validation_fraction}) give no example of {num_parts} parts; change the "
                "fraction or source_weights, or prepare more or longer documents (--documents blank_line divides a "
                "text file, --short_documents join joins short ones)."
            )

    def micro_batches(self, numbers: Sequence[int], size: int) -> dict[str, np.ndarray]:
        """Returns micro-batches of the endless sequence; number b holds examples b * size and on.

        The arrays of `TrainingExample` have the micro-batches on the first axis and, part-major,
        n = size examples on the second: sequence p * n + i is part p of example i. Besides them
        there is `windows` (-, n, 3) int64: the fields of each example's `Window`.
        """
        flat = [number * size + i for number in numbers for i in range(size)]
        numbered = [divmod(number, self.examples_per_epoch) for number in flat]
        windows = [self._index.find(self.seed, epoch, index) for epoch, index in numbered]
        examples = list(map(self._example, windows))
        batches = dict[str, np.ndarray]()
        for name in ARRAYS:
            stacked = np.stack([getattr(example, name) for example in examples])
            by_batch = stacked.reshape(len(numbers), size, *stacked.shape[1:]).swapaxes(1, 2)
            batches[name] = by_batch.reshape(len(numbers), -1, *stacked.shape[2:])
        return batches | {"windows": np.array(windows, np.int64).reshape(len(numbers), size, 3)}

    def examples(self, epoch: int, indices: Sequence[int]) -> list[TrainingExample]:
        """Returns examples of an epoch; an index is 0 to `examples_per_epoch` - 1."""
        return [self._example(self._index.find(self.seed, epoch, i)) for i in indices]

    def examples_of_row(self, row: int, epoch: int) -> list[TrainingExample]:
        """Returns the examples of a row in pass `epoch`: none if it has fewer than P sentences. Raises UserError."""
        number, index = self.corpus.locate(row)
        windows = range(self._index.count(self.corpus.shard(number), index))
        return [self._example(Window(row, number, epoch)) for number in windows]

    def _example(self, window: Window) -> TrainingExample:
        number, row = self.corpus.locate(window.row)
        shard = self.corpus.shard(number)
        first, end = shard.row_starts[row : row + 2].tolist()
        offsets = shard.sentence_starts[first : end + 1]
        count = self._index.count(shard, row)
        parts, rng = choose_parts(offsets, window, count, self.seed, self.num_parts, self.budget)
        bounds = offsets[parts[0].first : parts[-1].end + 1]
        tokens = shard.tokens[bounds[0] : bounds[-1]]
        scores = self._tfidf(tokens, shard.counts[bounds[0] : bounds[-1]], bounds - bounds[0])
        # For each part: offsets in `tokens` of its begin, of its second segment and of its end.
        spans = offsets[np.array([part[:3] for part in parts])].astype(np.int64) - int(bounds[0])
        length = np.minimum(spans[:, 2] - spans[:, 0], self.budget)
        cut_tokens = int((spans[:, 2] - spans[:, 0] - length).sum())
        spans[:, 1:] = np.minimum(spans[:, 1:], (spans[:, 0] + length)[:, None])
        inputs, labels = self._mask(tokens, spans[:, [0, 2]].tolist(), rng)
        facets, shape = len(self.special.facets), (self.num_parts, self.seq_length)
        example = TrainingExample(
            row=window.row,
            parts=tuple(parts),
            cut_tokens=cut_tokens,
            input_ids=np.full(shape, self.special.pad, np.int32),
            attention_mask=np.zeros(shape, np.int8),
            token_type_ids=np.zeros(shape, np.int8),
            labels=np.full(shape, IGNORE_INDEX, np.int32),
            tfidf_labels=np.zeros((shape[0], shape[1] - facets), np.float32),
            so_labels=np.full(shape[:1], IGNORE_INDEX, np.int8),
        )
        example.input_ids[:, : 1 + facets] = self.special.cls, *self.special.facets
        for p, (part, (begin, cut, end)) in enumerate(zip(parts, spans.tolist(), strict=True)):
            segments = [(begin, cut), (cut, end)]
            if part.cut == part.end:
                segments = [(begin, end)]
            else:
                example.so_labels[p] = part.swapped
            at = 1 + facets
            for number, (begin, end) in enumerate(segments[:: -1 if part.swapped else 1]):
                stop = at + end - begin
                example.input_ids[p, at:stop] = inputs[begin:end]
                example.input_ids[p, stop] = self.special.sep
                example.labels[p, at:stop] = labels[begin:end]
                example.tfidf_labels[p, at - facets : stop - facets] = scores[begin:end]
                example.token_type_ids[p, at : stop + 1] = number
                at = stop + 1
            example.attention_mask[p, :at] = 1
        return example

    def _tfidf(self, tokens: np.ndarray, counts: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """Returns TF-IDF targets, (N,): min-max scaled in each sentence to 0..10; 0 if all are equal.

        `counts`, (N,): occurrences of each token in its row. `bounds`, (S + 1,): where sentences begin and end.
        """
        values = counts * self._idf[tokens]
        lowest = np.minimum.reduceat(values, bounds[:-1])
        spread = np.maximum.reduceat(values, bounds[:-1]) - lowest
        scale = np.divide(TFIDF_SCALE, spread, out=np.zeros_like(spread), where=spread > 0)
        lengths = bounds[1:] - bounds[:-1]
        return (values - lowest.repeat(lengths)) * scale.repeat(lengths)

    def _mask(
        self, tokens: np.ndarray, spans: list[tuple[int, int]], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Masks a fixed share of each span of tokens: 80 % [MASK], 10 % random tokens, 10 % kept.

        Returns the input ids and the labels, (N,) int32 each.
        """
        inputs, labels = tokens.astype(np.int32), np.full(len(tokens), IGNORE_INDEX, np.int32)
        order = rng.random(len(tokens))
        chosen = []
        for begin, end in spans:
            count = max(round(self.mlm_probability * (end - begin)), 1)
            chosen.append(begin + order[begin:end].argpartition(count - 1)[:count])
        positions = np.concatenate(chosen)
        kind, draw = rng.random((2, len(positions)))
        originals = inputs[positions]
        labels[positions] = originals
        replacement = self._ordinary_ids[(draw * len(self._ordinary_ids)).astype(np.int64)]
        hidden = np.where(kind < 0.8, self.special.mask, replacement)
        inputs[positions] = np.where(kind < 0.9, hidden, originals)
        return inputs, labels
