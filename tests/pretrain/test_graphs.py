"""Steps by recorded passes are the same as without. Only the capture needs a GPU (test_gpu.py)."""

import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from multicls.distributed import leave_deepspeed, prepare_deepspeed
from pretrain import graphs
from pretrain.engine import prepare_layers
from pretrain.graphs import Graphs
from pretrain.settings import TrainSettings
from pretrain.trainer import train_step
from tests.pretrain.tools import tiny_model
from tests.pretrain.two_ranks import BATCH, GROUP, Case, make_engine, micro_batch

STEPS = 20


@pytest.fixture(scope="module")
def deepspeed() -> Iterator[Any]:
    with patch.dict(os.environ):
        yield prepare_deepspeed()
        leave_deepspeed()


def curve(deepspeed: Any, case: Case) -> tuple[Tensor, Tensor, Any]:
    """Returns the losses of 20 steps of two micro-batches, the weights after them, and the engine."""
    engine, chosen = make_engine(deepspeed, case)
    losses = []
    for step in range(STEPS):
        batches = [micro_batch(2 * step + slot, BATCH // 2) for slot in range(2)]
        for terms in train_step(engine, chosen, batches, step):
            losses += [float(terms[f"loss/{name}"][0]) for name in ("mlm", "tfidf", "so", "mcqt")]
    weights = [parameter.detach().float().flatten() for parameter in engine.module.parameters()]
    return torch.tensor(losses), torch.cat(weights), engine


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recorded_steps_equal_those_without(deepspeed: Any, precision: str) -> None:
    """The steps have dropout, masking, two micro-batches and differing numbers of masked tokens.

    Padded masked positions change the order of some sums, which is all that differs.
    """
    changes = {"precision": precision, "micro_batch_size": BATCH // 2, "learning_rate": 1e-3}
    plain = curve(deepspeed, Case("zero2", changes))
    recorded = curve(deepspeed, Case("zero2", changes | {"graph": True}))
    recordings = recorded[2]._graphs
    assert recordings.problem == "" and len(recordings._recorded) == 1
    assert not recorded[2].new_notes()
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    torch.testing.assert_close(recorded[0], plain[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(recorded[1], plain[1], rtol=0, atol=tolerance / 10)
    other_dropout = curve(deepspeed, Case("zero2", changes | {"seed": 2}))  # control
    assert (other_dropout[0] - plain[0]).abs().max() > 10 * tolerance


def test_each_shape_has_its_recording_and_too_many_run_without() -> None:

    def double(inputs: dict[str, Tensor]) -> Tensor:
        return 2 * inputs["x"].sum() + torch.rand(())

    recordings = Graphs(double, [])
    with patch.object(graphs, "MOST", 2):
        for size in (1, 2, 1, 3, 2):
            found = recordings({"x": torch.full((size,), 1.0)}, seed=size)
            torch.manual_seed(size)
            assert float(found) == pytest.approx(2 * size + float(torch.rand(())))
    assert len(recordings._recorded) == 2 and recordings.problem == ""


def test_a_replay_that_differs_is_not_used() -> None:
    """A recording whose dropout ignores the seed is dropped. The pass is then made again without a recording."""
    filled, calls, resets = torch.zeros(1000), list[int](), list[int]()

    def forgetful(inputs: dict[str, Tensor]) -> Tensor:
        calls.append(1)
        is_replay = len(calls) == graphs.WARM_UPS + 1  # the stand-in calls the function
        other = torch.Generator().manual_seed(5)
        filled.copy_(torch.rand(1000, generator=other if is_replay else None))
        return inputs["x"].sum()

    recordings = Graphs(forgetful, [filled], reset=lambda: resets.append(1))
    assert float(recordings({"x": torch.ones(3)}, seed=1)) == 3.0
    assert "differs" in recordings.problem and resets == [1] and not recordings._recorded
    torch.manual_seed(1)
    assert torch.equal(filled, torch.rand(1000)), "the gradients are those of the replay"


def test_a_capture_that_fails_is_named_and_nothing_is_lost(deepspeed: Any) -> None:
    changes = {"micro_batch_size": BATCH // 2, "graph": True}
    with patch.object(Graphs, "_capture", side_effect=RuntimeError("operation not permitted")):
        losses, weights, engine = curve(deepspeed, Case("zero2", changes))
    (note,) = engine.new_notes()
    assert note == "warning: passes run without a CUDA graph: operation not permitted"
    plain = curve(deepspeed, Case("zero2", changes | {"graph": False}))
    torch.testing.assert_close(losses, plain[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights, plain[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "cuda", "expected", "line"),
    [
        ({}, False, False, ""),
        ({}, True, True, ""),
        ({"graph": False}, True, False, ""),
        ({"graph": True}, False, True, "there is no GPU"),
        ({"activation_checkpointing": True}, True, False, "layers are recomputed"),
    ],
)
def test_auto_records_where_it_can(
    changes: Any, cuda: bool, expected: bool, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pretrain.engine.uses_cuda", lambda: cuda)
    monkeypatch.setattr("pretrain.engine.keep_mask_on_device", lambda: None)
    train, notes = prepare_layers(tiny_model(), TrainSettings(steps=1, **changes), "fp32")
    assert train.graph is expected and line in " ".join(notes) and bool(notes) == bool(line)


def test_zero_3_runs_without(deepspeed: Any) -> None:
    changes = {"graph": True, "micro_batch_size": GROUP}
    engine, _ = make_engine(deepspeed, Case("zero3", changes))
    assert engine.new_notes() == [
        "gradients take DeepSpeed's own path: ZeRO stage 3",
        "passes run without a CUDA graph: ZeRO stage 3",
    ]
