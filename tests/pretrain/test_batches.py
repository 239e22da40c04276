"""Micro-batches on their way to the training loop."""

from __future__ import annotations

from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch

from data_prep.examples import ExampleStream, SpecialIds
from multicls.corpus import Corpus
from pretrain import batches
from pretrain.batches import MicroBatch, RankSampler, load_steps
from tests.pretrain.tools import micro_batch_of


@pytest.fixture(scope="module")
def stream(tiny_corpus: Path) -> ExampleStream:
    special = SpecialIds(cls=12, sep=13, pad=0, mask=14, facets=(1, 2, 3))
    return ExampleStream(Corpus.open(tiny_corpus), special, seq_length=32, seed=1)


def load(stream: ExampleStream, sampler: RankSampler, workers: int = 0, size: int = 3) -> list[MicroBatch]:
    return list(chain.from_iterable(load_steps(stream, sampler, range(3, 8), size=size, workers=workers)))


def same(one: list[MicroBatch], other: list[MicroBatch]) -> bool:
    def equal(a: MicroBatch, b: MicroBatch) -> bool:
        inputs = a.inputs.keys() == b.inputs.keys() and all(torch.equal(t, b.inputs[n]) for n, t in a.inputs.items())
        ids = a.example_ids.tolist() == b.example_ids.tolist()
        return inputs and ids and (a.number, a.counts) == (b.number, b.counts)

    return all(equal(a, b) for a, b in zip(one, other, strict=True))


def test_workers_ranks_and_groups_change_no_number(stream: ExampleStream, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = load(stream, RankSampler(4, 0, 1))
    assert [batch.number for batch in wanted] == list(range(12, 32))
    assert same(load(stream, RankSampler(4, 0, 1), workers=2), wanted)
    ranks = [load(stream, RankSampler(4, rank, 2), workers=1) for rank in range(2)]
    assert same(sorted(chain(*ranks), key=lambda batch: batch.number), wanted)
    monkeypatch.setattr(batches, "EXAMPLES_TOGETHER", 7)
    assert same(load(stream, RankSampler(4, 0, 1)), wanted)


def test_a_larger_micro_batch_holds_the_same_groups(stream: ExampleStream) -> None:
    """Part-major, the examples of a group side by side."""
    small, large = load(stream, RankSampler(4, 0, 1)), load(stream, RankSampler(2, 0, 1), size=6)
    for number, batch in enumerate(large):
        pair = small[2 * number : 2 * number + 2]
        assert batch.example_ids.tolist() == [ids for one in pair for ids in one.example_ids.tolist()]
        for name in ("input_ids", "labels", "so_labels"):
            chunks = [one.inputs[name].chunk(3) for one in pair]
            assert torch.equal(batch.inputs[name], torch.cat([chunk[part] for part in range(3) for chunk in chunks]))


def test_tensors_are_what_the_model_takes(stream: ExampleStream) -> None:
    (batch, *_) = load(stream, RankSampler(2, 0, 1))
    inputs, masked = dict(batch.inputs), int(batch.counts["mlm"])
    shapes: dict[str, tuple[int, ...]] = {"so_labels": (9,), "tfidf_labels": (9, 29), "masked_positions": (masked,)}
    shapes |= {"input_ids": (9, 32), "attention_mask": (9, 32), "token_type_ids": (9, 32), "labels": (9, 32)}
    assert {name: tuple(tensor.shape) for name, tensor in inputs.items()} == shapes
    assert {name for name, tensor in inputs.items() if tensor.dtype != torch.int64} == {"tfidf_labels"}
    assert batch.example_ids.shape == (3, 2)
    expected = micro_batch_of(inputs, 3)
    assert batch.counts == expected.counts
    assert torch.equal(inputs["masked_positions"], expected.inputs["masked_positions"])


def test_positions_of_the_real_tokens(stream: ExampleStream) -> None:
    (batch, *_), *_ = load_steps(stream, RankSampler(2, 0, 1), range(1), size=3, workers=0, unpad=True)
    mask, bounds = batch.inputs["attention_mask"], batch.inputs["cu_seqlens"].tolist()
    assert torch.equal(batch.inputs["token_positions"], mask.flatten().nonzero().squeeze(1))
    assert [end - start for start, end in pairwise(bounds)] == mask.sum(dim=1).tolist() and bounds[0] == 0
    assert bounds[-1] < mask.numel()  # some of it is padding
