"""Next-passage recall: for a passage of a held-out document, is the passage that follows it the nearest of fifty?

It needs no labels. A document counts as one unit in intervals, since its passages are alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from multicls.corpus import Corpus
from multicls.embeddings import available
from multicls.evaluation import Difference, Scores, compare
from multicls.measures import Array

TOKENS = 40  # of a passage, at least; LENGTH are read
LENGTH = 64
PER_DOCUMENT = 20  # most passages, so that no long document makes up the result
CANDIDATES = 50
FEWEST = 20  # passages that say something
FEWEST_DOCUMENTS = 10  # for an interval


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

    def scores(self, features: Mapping[str, Array]) -> dict[str, Scores]:
        """Returns the recall of each embedding that the parts make: one value per query, with documents as units.

        A part is divided by its mean length, so that parts weigh the same.
        """
        units = self.documents[self.queries]
        found = dict[str, Scores]()
        for name in available(features):
            parts = [features[part] for part in name.split("+")]
            sizes = [max(float(np.linalg.norm(part, axis=1).mean()), 1e-9) for part in parts]
            hits = self.hits(np.hstack([p / size for p, size in zip(parts, sizes, strict=True)]))
            found[name] = Scores(hits[None], np.zeros((0, len(hits))), units)
        return found

    def hits(self, embeddings: Array) -> Array:
        """Returns for each query if the next passage is nearer by cosine than all others drawn, (Q,) of 0 and 1."""
        unit = embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-9)
        generator, hits = np.random.default_rng(0), []
        for query in self.queries:
            others = generator.choice(len(unit) - 2, self.candidates - 1, replace=False)
            others[others >= query] += 2  # neither the query nor the answer
            hits.append(unit[query] @ unit[query + 1] > (unit[others] @ unit[query]).max())
        return np.array(hits, dtype=float)

    def difference(self, scores: Scores, reference: Scores) -> Difference:
        """Returns the difference of two recalls; fewer than ten documents say nothing about others."""
        change = compare(scores, reference)
        if len(np.unique(scores.units)) < FEWEST_DOCUMENTS:
            return Difference(change.mean, -np.inf, np.inf, change.covers)
        return change


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
    held_out = (
        corpus.first_rows[shard] + row
        for shard in range(corpus.num_shards)
        for row in np.flatnonzero(corpus.held_out(shard, limit)).tolist()
    )
    for number in held_out:
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
