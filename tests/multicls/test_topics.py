"""Topics of a corpus: the singular vectors that they are, near words, and what decides them."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from multicls.corpus import Corpus
from multicls.modeling_multicls import TopicTable
from multicls.topics import SEEN, fit_topics
from tests.encoders import WORDS


def table_of(corpus: Corpus, number: int, fraction: float = 0.0) -> TopicTable:
    vocabulary = corpus.vocabulary_size + 7  # an encoder may have more entries
    state = fit_topics(corpus, number, vocabulary=vocabulary, validation_fraction=fraction)
    table = TopicTable(*state["table"].shape)
    table.load_state_dict(state)
    return table


def test_the_table_holds_singular_vectors(tiny_corpus: Path) -> None:
    corpus = Corpus(tiny_corpus)
    documents = np.zeros((corpus.num_rows, corpus.vocabulary_size + 7))
    for number in range(corpus.num_rows):
        np.add.at(documents[number], corpus.row(number).tokens.astype(int), 1)
    frequency = (documents > 0).sum(axis=0)
    idf = np.log(len(documents) / np.maximum(frequency, 1)) * (frequency >= SEEN)
    weights = np.where(documents > 0, 1 + np.log(np.maximum(documents, 1)), 0) * idf
    weights /= np.linalg.norm(weights, axis=1, keepdims=True)
    directions = np.linalg.svd(weights, full_matrices=False)[2][:12]
    topics = table_of(corpus, 12)
    expected = directions.T @ directions  # singular vectors have no sign
    np.testing.assert_allclose(topics.table @ topics.table.T, expected, atol=1e-3)
    tokens = torch.tensor(corpus.row(3).tokens.astype(int))[None]
    other = torch.tensor(corpus.row(4).tokens.astype(int))[None]
    places = [directions @ weights[row] for row in (3, 4)]
    first, second = (place / np.linalg.norm(place) for place in places)
    cosine = float(topics(tokens)[0] @ topics(other)[0])
    np.testing.assert_allclose(cosine, first @ second, atol=1e-3)
    assert np.isclose(float(topics(tokens).norm()), 1)
    padded = torch.nn.functional.pad(tokens, (0, 5))
    mask = (torch.arange(padded.shape[1]) < tokens.shape[1])[None].long()
    assert torch.allclose(topics(padded, mask), topics(tokens)), "padding counts"


def test_any_number_of_texts_also_when_exported(tiny_corpus: Path) -> None:
    """An export does not fix the number of texts or tokens, as ONNX needs it."""
    topics, ids = table_of(Corpus(tiny_corpus), 8), torch.arange(20, 44).reshape(4, 6)
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(topics, (ids[:2],), dynamic_shapes=(sizes,)).module()
    assert torch.allclose(exported(ids[:3, :5]), topics(ids[:3, :5]))


def test_words_of_one_topic_are_near(tiny_corpus: Path, tiny_bert: Path) -> None:
    """Each topic of the corpus has ten words: texts without a common word are alike if theirs are of one topic."""
    topics, tokenizer = table_of(Corpus(tiny_corpus), 20), AutoTokenizer.from_pretrained(tiny_bert)
    words = WORDS[2:]

    def embedded(*numbers: int) -> torch.Tensor:
        text = " ".join(words[number] for number in numbers)
        return topics(tokenizer(text, return_tensors="pt")["input_ids"])

    one, same, other = embedded(20, 21, 22), embedded(25, 26, 27), embedded(40, 41, 42)
    assert float((one * same).sum()) > 0.8 > 0.3 > float((one * other).sum())


def test_held_out_documents_and_small_corpora(tiny_corpus: Path) -> None:
    corpus = Corpus(tiny_corpus)
    whole, again, part = (table_of(corpus, 8, fraction) for fraction in (0.0, 0.0, 0.5))
    assert torch.equal(whole.table, again.table)
    assert not torch.allclose(whole.table @ whole.table.T, part.table @ part.table.T, atol=1e-3)
    assert table_of(corpus, 100_000).table.shape[1] <= corpus.num_rows // 2
