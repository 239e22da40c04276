"""Next-passage recall: for a passage of a held-out document, is the passage that follows it the nearest of fifty?

It needs no labels. A document counts as one unit in intervals, since its passages are alike.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from multicls.corpus import Corpus
from multicls.probe import NO_TOPICS, Array, Difference

TOKENS = 40  # of a passage, at least; LENGTH are read
LENGTH = 64
PER_DOCUMENT = 20  # most passages, so that no long document makes up the result
CANDIDATES = 50
FEWEST = 20  # passages that say something


@dataclass(frozen=True)
class Passages:
    """Passages of held-out documents in order, and the number of each one's document, (N,)."""

    texts: list[str]
    documents: Array
    name = "next-passage recall"

    @property
    def candidates(self) -> int:
        """Passages among which a query looks for the next one."""
        return min(CANDIDATES, len(self.documents) - 1)

    @property
    def are_enough(self) -> bool:
        """False if recall on so few passages says nothing."""
        return len(self.documents) >= FEWEST and len(self.queries) > 0

    @property
    def queries(self) -> Array:
        """Indices of the passages whose next one is of the same document, (Q,)."""
        return np.flatnonzero(self.documents[:-1] == self.documents[1:])

    def values(self, embeddings: Array, topics: slice = NO_TOPICS) -> Array:
        """Returns for each query if the next passage is nearer by cosine than all others drawn, (Q,) of 0 and 1.

        Topics count like all columns.
        """
        unit = embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-9)
        generator, hits = np.random.default_rng(0), []
        for query in self.queries:
            others = generator.choice(len(unit) - 2, self.candidates - 1, replace=False)
            others[others >= query] += 2  # neither the query nor the answer
            hits.append(unit[query] @ unit[query + 1] > (unit[others] @ unit[query]).max())
        return np.array(hits, dtype=float)

    def difference(self, hits: Array, reference: Array) -> Difference:
        """Returns the difference of two recalls with its 95 % interval, by a bootstrap over documents.

        With fewer than ten documents the interval is infinite: they say nothing about others.
        """
        owners = self.documents[self.queries]
        groups = [np.flatnonzero(owners == number) for number in np.unique(owners)]
        change, generator = hits - reference, np.random.default_rng(0)
        if len(groups) < 10:
            return Difference(float(change.mean()), -np.inf, np.inf)
        draws = generator.integers(len(groups), size=(1000, len(groups)))
        means = [change[np.concatenate([groups[i] for i in draw])].mean() for draw in draws]
        low, high = np.quantile(means, (0.025, 0.975))
        return Difference(float(change.mean()), float(low), float(high))


def read_passages(
    corpus: Corpus,
    fraction: float,
    tokenizer: Any,
    most: int | None = None,
    per_document: int = PER_DOCUMENT,
) -> Passages:
    """Returns at most `most` passages of the held-out `fraction` of the documents, at most `per_document` of each."""
    texts: list[str] = []
    documents: list[int] = []
    limit = corpus.validation_limit(fraction)
    held_out = np.concatenate([corpus.held_out(i, limit) for i in range(corpus.num_shards)])
    for number in np.flatnonzero(held_out).tolist():
        row = corpus.row(number)
        passages, begin = [], 0
        for end in row.offsets[1:].tolist():
            if end - begin >= TOKENS:
                # Byte-level BPE decodes the space before a sentence, which a text of its own has not.
                passages.append(tokenizer.decode(row.tokens[begin:end].tolist()).strip())
                begin = end
        texts += passages[:per_document]
        documents += [number] * len(passages[:per_document])
        if most and len(texts) >= most:
            break
    return Passages(texts[:most], np.array(documents[:most], dtype=int))
