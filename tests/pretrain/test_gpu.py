"""Tests that need a GPU: precisions and ZeRO stages, export, and no waits of the host."""

import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from multicls.distributed import leave_deepspeed, prepare_deepspeed
from pretrain.engine import keep_mask_on_device
from pretrain.metrics import MetricSums, means
from pretrain.trainer import NonFiniteGuard, add_terms, train_step
from tests.pretrain.test_ds_configs import assert_losses, assert_skipped, plain_pytorch
from tests.pretrain.two_ranks import GROUP, Case, make_engine, micro_batch, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# without dropout CPU and GPU compute the same
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
STAGES = (1, 2, 3)


@pytest.fixture(scope="module")
def deepspeed() -> Iterator[Any]:
    """One rank in this process; afterwards the process is as before."""
    with patch.dict(os.environ):
        yield prepare_deepspeed()
        leave_deepspeed()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_steps_are_those_of_pytorch_on_cpu(deepspeed: Any, stage: int, precision: str) -> None:
    case = Case(f"zero{stage}", {"precision": precision}, STILL)
    found = run(deepspeed, case)
    assert_skipped(found)
    assert_losses(found, case)


@pytest.mark.parametrize("stage", STAGES)
def test_fp16_updates_once_the_loss_scale_fits(deepspeed: Any, stage: int) -> None:
    engine, chosen = make_engine(deepspeed, Case(f"zero{stage}", {"precision": "fp16"}, STILL))
    guard, batches = NonFiniteGuard(engine, 1), [micro_batch(number) for number in range(4)]
    losses, updates = [], []
    for _ in range(40):  # the same step again and again: the loss scale falls, then the losses do
        terms, sums = train_step(engine, chosen, batches, 0), MetricSums()
        add_terms(sums, batches, terms, guard.check_step(0, batches, terms))
        losses.append(means(sums.totals(engine.device)))
        updates.append(engine.was_updated)
    assert sum(updates) >= 10 and updates[-1] and guard.skipped == 0
    expected = plain_pytorch(GROUP, **STILL)[0]
    first = losses[updates.index(True)]  # before it no step had losses, nor changed the weights
    assert {name: first[name] for name in expected} == pytest.approx(expected, rel=0.01)
    assert losses[-1]["loss/mlm"] < first["loss/mlm"] - 0.05


def our_waits(action: Callable[[], object]) -> list[str]:
    """Returns the frames from which `action`, outside DeepSpeed's own functions, makes the host wait for the device."""
    deepspeeds = str(Path(str(find_spec("deepspeed").origin)).parent)  # type: ignore[union-attr]
    stacks: list[str] = []

    def note(message: object, *_: object) -> None:
        stack = traceback.extract_stack()[:-1]
        frames = [f for f in stack if not re.search(r"/torch/|/warnings\.py$", f.filename)]
        is_deepspeeds = frames[-1].filename.startswith(deepspeeds)
        if "synchronizing CUDA operation" in str(message) and not is_deepspeeds:
            stacks.append("".join(traceback.format_list(frames[-3:])))

    with warnings.catch_warnings(), patch.object(warnings, "showwarning", note):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            action()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return stacks


def test_no_wait_of_ours_in_a_step_that_does_not_log(deepspeed: Any) -> None:
    keep_mask_on_device()
    engine, chosen = make_engine(deepspeed, Case("zero2", {"precision": "bf16"}))
    for step in range(2):
        train_step(engine, chosen, [micro_batch(4 * step + slot) for slot in range(4)], step)
    batches = [micro_batch(number) for number in range(8, 12)]
    sums = MetricSums()

    def last() -> None:
        add_terms(sums, batches, train_step(engine, chosen, batches, 2), updated=True)

    assert not our_waits(last)
    assert our_waits(lambda: sums.totals(engine.device)), "control: reading the sums waits"


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_twenty_recorded_steps_equal_those_without(
    deepspeed: Any, precision: str, kind: str
) -> None:
    """Losses are equal to a tolerance, weights to a twentieth of what 20 steps with dropout move them."""
    changes = {"precision": precision, "learning_rate": 1e-3}
    model = {} if kind == "bert" else {"encoder": kind}
    (plain, start), (recorded, _) = (
        curve(deepspeed, Case("zero2", changes | {"graph": graph}, model))
        for graph in (False, True)
    )
    tolerance = 1e-3 if precision == "fp32" else 3e-2
    torch.testing.assert_close(recorded[0], plain[0], rtol=tolerance, atol=tolerance)
    moved = (plain[1] - start).norm()
    assert (recorded[1] - plain[1]).norm() < 0.05 * moved


def curve(deepspeed: Any, case: Case) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Returns losses of 20 steps and the weights after them, and the weights before."""
    engine, chosen = make_engine(deepspeed, case)

    def weights() -> Tensor:
        found = [parameter.detach().float().flatten() for parameter in engine.module.parameters()]
        return torch.cat(found).cpu()

    start, losses = weights(), list[float]()
    for step in range(20):
        batches = [micro_batch(4 * step + slot) for slot in range(4)]
        for terms in train_step(engine, chosen, batches, step):
            losses += [float(value) for name, (value, _) in terms.items() if "loss/" in name]
    assert (engine._graphs is not None) == bool(chosen.train.graph)
    assert engine._graphs is None or (not engine._graphs.problem and engine._graphs._recorded)
    return (torch.tensor(losses), weights()), start
