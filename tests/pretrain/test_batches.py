"""Micro-batches on their way to the training loop."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch

from data_prep.triples import SpecialIds, TripleStream
from multicls.shards import Corpus
from pretrain import batches
from pretrain.batches import Batch, Share, load_steps


@pytest.fixture(scope="module")
def stream(tiny_corpus: Path) -> TripleStream:
    special = SpecialIds(cls=12, sep=13, pad=0, mask=14, facets=(1, 2, 3))
    return TripleStream(Corpus.open(tiny_corpus), special, seq_length=32, seed=1)


def load(stream: TripleStream, share: Share, workers: int = 0) -> list[Batch]:
    return list(chain.from_iterable(load_steps(stream, share, range(3, 8), triples=3, workers=workers)))


def same(one: list[Batch], other: list[Batch]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)


def test_workers_ranks_and_groups_change_no_number(stream: TripleStream, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = load(stream, Share(4, 0, 1))
    assert [int(batch["number"]) for batch in wanted] == list(range(12, 32))
    assert same(load(stream, Share(4, 0, 1), workers=2), wanted)
    ranks = [load(stream, Share(4, rank, 2), workers=1) for rank in range(2)]
    assert same(sorted(chain(*ranks), key=lambda batch: int(batch["number"])), wanted)
    monkeypatch.setattr(batches, "EXAMPLES_TOGETHER", 7)
    assert same(load(stream, Share(4, 0, 1)), wanted)


def test_tensors_are_what_the_model_takes(stream: TripleStream) -> None:
    (batch, *_) = load(stream, Share(2, 0, 1))
    shapes: dict[str, tuple[int, ...]] = {"number": (), "so_labels": (9,), "example_ids": (3, 2)}
    shapes |= {"input_ids": (9, 32), "attention_mask": (9, 32), "token_type_ids": (9, 32), "labels": (9, 32)}
    shapes |= {"tfidf_labels": (9, 29)}
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == shapes
    assert {name for name, tensor in batch.items() if tensor.dtype != torch.int64} == {"tfidf_labels"}
