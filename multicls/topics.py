"""Topics: the latent semantic analysis of a corpus, which puts beside an embedding what words a text has.

It is made from counts alone, in seconds; nothing is trained. Words that occur in the same texts of the corpus get near
places, so that a classifier with few labelled rows profits from all texts without labels (docs/results.md).
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from multicls.corpus import Corpus

PASSAGES = 20_000  # of the corpus that are read, at most about this many
TOKENS = 512  # of a passage, at most
SEEN = 2  # passages that a token must stand in

Bag = tuple[np.ndarray, np.ndarray]  # token ids, and how often each occurs


def fit_topics(
    corpus: Corpus, number: int, *, vocabulary: int, validation_fraction: float
) -> dict[str, Any]:
    """Returns the state of a `TopicTable` for the training documents of a corpus: `idf` (V,) and `table` (V, T).

    A passage is the first or a later stretch of 512 tokens of a document. Its vector of (1 + ln count) idf has length
    1; the table holds the T leading right singular vectors of all of them. Documents are chosen by their hash, so the
    result does not depend on their order.

    Args:
        number: T, at most; there are no more topics than half of the passages.
        vocabulary: V, the model's, which may have more entries than the tokenizer.
    """
    frequency = corpus.document_frequency
    idf = np.log(corpus.num_passages / np.maximum(frequency, 1)) * (frequency >= SEEN)
    limit = corpus.validation_limit(validation_fraction)
    share = -(-PASSAGES // corpus.num_shards)
    bags = list[Bag]()
    for index in range(corpus.num_shards):
        shard = corpus.shard(index)
        rows = np.flatnonzero(~corpus.held_out(index, limit))
        rows = np.sort(rows[np.argsort(shard.hashes[rows], kind="stable")[:share]])
        most = max(1, share // max(1, len(rows)))  # passages of a row
        for row in rows.tolist():
            tokens = shard.row(row).tokens
            for begin in range(0, len(tokens), TOKENS)[:most]:
                bags.append(np.unique(tokens[begin : begin + TOKENS], return_counts=True))
    return _decompose(bags, idf, number, vocabulary)


def fit_topics_of_texts(
    texts: Iterable[list[int]], number: int, *, vocabulary: int
) -> dict[str, Any]:
    """Returns the state of a `TopicTable` for texts without labels, each the token ids of a whole text."""
    bags = [np.unique(np.array(ids, dtype=np.int64), return_counts=True) for ids in texts]
    seen = np.concatenate([found for found, _ in bags] or [np.zeros(0, dtype=np.int64)])
    frequency = np.bincount(seen, minlength=vocabulary)
    idf = np.log(max(1, len(bags)) / np.maximum(frequency, 1)) * (frequency >= SEEN)
    return _decompose(bags, idf, number, vocabulary)


def _decompose(
    bags: Iterable[Bag], idf: np.ndarray, number: int, vocabulary: int
) -> dict[str, Any]:
    """Returns `idf` (V,) and the leading right singular vectors of the bags' vectors, `table` (V, T)."""
    import torch
    from scipy.sparse import csr_matrix
    from sklearn.decomposition import TruncatedSVD

    columns, values, lengths = list[np.ndarray](), list[np.ndarray](), list[int]()
    for found, counts in bags:
        weights = (1 + np.log(counts)) * idf[found]
        columns.append(found.astype(np.int64))
        values.append(weights / max(np.linalg.norm(weights), 1e-9))
        lengths.append(len(found))
    shape = (len(lengths), len(idf))
    places = np.concatenate([[0], np.cumsum(lengths)])
    matrix = csr_matrix((np.concatenate(values), np.concatenate(columns), places), shape)
    number = max(1, min(number, len(lengths) // 2, int((idf > 0).sum()) - 1))
    with np.errstate(invalid="ignore"):  # texts that are all alike have no variance
        directions = TruncatedSVD(number, random_state=0).fit(matrix).components_.T
    state = {"idf": torch.zeros(vocabulary), "table": torch.zeros(vocabulary, number)}
    state["idf"][: len(idf)] = torch.from_numpy(idf)
    state["table"][: len(idf)] = torch.from_numpy(directions)
    return state
