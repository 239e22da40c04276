"""Micro-batches on their way to the training loop."""

import multiprocessing
import os
from contextlib import closing
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.examples import ExampleStream
from pretrain.batches import MicroBatch, load_steps, pack
from pretrain.engine import Engine
from pretrain.trainer import evaluate
from tests.pretrain.tools import PlainEngine, micro_batch_of, tiny_model
from tests.pretrain.two_ranks import settings
from tests.processes import children


def load(stream: ExampleStream, size: int = 3, **options: Any) -> list[MicroBatch]:
    """Returns micro-batches of 30 steps of 12 examples, more than a loader builds in one call."""
    options = {"per_step": 12 // size, "workers": 0} | options
    return list(chain.from_iterable(load_steps(stream, range(3, 33), size=size, **options)))


def assert_same(batches: list[MicroBatch], expected: list[MicroBatch]) -> None:
    for a, b in zip(batches, expected, strict=True):
        assert a.windows.tolist() == b.windows.tolist()
        assert (a.number, a.counts, a.inputs.keys()) == (b.number, b.counts, b.inputs.keys())
        assert all(torch.equal(tensor, b.inputs[name]) for name, tensor in a.inputs.items())


def test_workers_and_ranks_agree(stream: ExampleStream) -> None:
    wanted = load(stream)
    assert [batch.number for batch in wanted] == list(range(12, 132))
    for batch in wanted[::17]:
        arrays = stream.micro_batches([batch.number], 3)
        assert batch.windows.tolist() == arrays["windows"][0].tolist()
        assert batch.inputs["labels"].tolist() == arrays["labels"][0].tolist()
    assert_same(load(stream, workers=2), wanted)
    ranks = [load(stream, rank=rank, ranks=2) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1])
    assert_same(sorted(chain(*ranks), key=lambda batch: batch.number), wanted)


def test_a_larger_micro_batch_holds_the_same_groups(stream: ExampleStream) -> None:
    """Part-major, the examples of a group side by side."""
    small, large = load(stream), load(stream, size=6)
    for number, batch in enumerate(large):
        pair = small[2 * number : 2 * number + 2]
        assert batch.windows.tolist() == [*chain(*(b.windows.tolist() for b in pair))]
        for name in ("input_ids", "labels", "so_labels"):
            parts = zip(*(b.inputs[name].chunk(3) for b in pair), strict=True)
            assert torch.equal(batch.inputs[name], torch.cat([*chain(*parts)]))


def test_tensors_and_counts_are_what_the_model_and_the_losses_take(stream: ExampleStream) -> None:
    batch = load(stream)[1]
    shapes = {name: tuple(tensor.shape) for name, tensor in batch.inputs.items()}
    names = ("input_ids", "attention_mask", "token_type_ids", "labels")
    expected_shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, (9, 32))
    expected_shapes |= {"so_labels": (9,), "tfidf_labels": (9, 29)}
    assert shapes == expected_shapes | {"masked_positions": (batch.counts["mlm"],)}
    floats = {name for name, tensor in batch.inputs.items() if tensor.dtype != torch.int64}
    assert floats == {"tfidf_labels"}
    expected = micro_batch_of(batch.inputs, 3)
    assert batch.counts == expected.counts
    assert torch.equal(batch.inputs["masked_positions"], expected.inputs["masked_positions"])


def test_loaders_are_no_forks_of_the_rank(stream: ExampleStream) -> None:
    """Locks that threads of the rank hold would stay locked in a fork."""
    with closing(load_steps(stream, range(5), size=3, per_step=4, workers=1)) as steps:
        next(steps)
        loaders = {process.pid for process in multiprocessing.active_children()}
        assert loaders and not loaders & set(children(os.getpid()))


def test_the_loader_knows_where_real_tokens_are(stream: ExampleStream) -> None:
    """The loader gives the positions, so that unpadding need not ask the device, and rounds their number."""
    for batch in load(stream, unpad=True)[:3]:
        mask, starts = batch.inputs["attention_mask"], batch.inputs["sequence_starts"]
        real = mask.flatten().nonzero()[:, 0]
        positions = batch.inputs["real_positions"]
        assert torch.equal(positions[: len(real)], real) and len(positions) == mask.numel() < 1024
        assert sorted(positions.tolist()) == list(range(mask.numel()))
        assert torch.equal(starts[: len(mask) + 1].diff(), mask.sum(dim=1)) and starts[0] == 0
        assert starts[-1] == mask.numel() and starts.diff().max() <= mask.shape[1]


def test_few_numbers_of_packed_tokens_and_sequences_occur() -> None:
    """Whatever the lengths, so that few shapes are recorded."""
    generator, shapes = np.random.default_rng(0), set[tuple[int, int]]()
    for _ in range(50):
        mask = np.arange(32) < generator.integers(8, 33, size=(12, 1))
        positions, starts = pack(mask.astype(int), multiple=128)
        assert len(positions) % 128 == 0 and mask.flatten()[positions].sum() == mask.sum()
        shapes.add((len(positions), len(starts)))
    assert shapes <= {(256, 17), (384, 17)}


def test_a_small_validation_split_repeats_no_example(
    stream: ExampleStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of an example would be its own negative."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda table: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    seen, size = list[MicroBatch](), stream.examples_per_epoch

    def note(_engine: Engine, batch: MicroBatch, *_: Any) -> dict[str, Any]:
        seen.append(batch)
        return {"loss/mlm": (torch.tensor(1.0), 1.0)}

    monkeypatch.setattr(Engine, "evaluate", note)
    chosen = settings(negatives_group=2 * size, global_batch_size=2 * size, micro_batch_size="auto")
    evaluate(PlainEngine(tiny_model(3, vocab_size=400)), chosen, stream)
    (batch,) = seen
    assert len({tuple(window) for window in batch.windows.tolist()}) == len(batch.windows) == size


def test_a_validation_counts_each_group_once_and_leaves_the_dropout_on(
    stream: ExampleStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three groups on one rank, and on two: the second one makes a pass too many."""
    model, sums = tiny_model(3, vocab_size=400), list[torch.Tensor]()
    monkeypatch.setattr(torch.distributed, "all_reduce", sums.append)
    chosen = settings().with_values(run={"eval_examples": 9})
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda ranks=ranks: ranks)
        evaluate(PlainEngine(model), chosen, stream)
        assert model.training
    torch.testing.assert_close(sums[1] + sums[2], sums[0])
