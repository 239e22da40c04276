"""Tests that need a GPU: precisions and ZeRO stages, export, and no waits of the host."""

from __future__ import annotations

import os
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from multicls import MultiClsForPreTraining
from pretrain.metrics import MetricSums, means
from pretrain.training import Trainer
from tests.pretrain import test_ds_configs, two_ranks
from tests.pretrain.conftest import Launch
from tests.pretrain.tools import tiny_model
from tests.pretrain.two_ranks import BATCH, FACETS, GROUP, Case, micro_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")
STAGES = (1, 2, 3)


@pytest.fixture(scope="module")
def deepspeed() -> Iterator[Any]:
    """One rank in this process; afterwards the process is as before."""
    from multicls.distributed import leave_deepspeed, prepare_deepspeed

    before = dict(os.environ)
    yield prepare_deepspeed()
    leave_deepspeed()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


def still_model(facets: int = FACETS, encoder: str = "") -> MultiClsForPreTraining:
    """Returns the model of two_ranks without dropout, so that CPU and GPU compute the same."""
    network = tiny_model(facets, encoder=encoder)
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return network


def make_trainer(deepspeed: Any, stage: int, precision: str) -> Trainer:
    case = Case(f"zero{stage}", {"precision": precision})
    return two_ranks.make_trainer(deepspeed, still_model(), case)


def step(trainer: Trainer, number: int) -> dict[str, float]:
    """Makes a step; returns its losses."""
    first = number * BATCH // GROUP
    batches = [micro_batch(n) for n in range(first, first + BATCH // GROUP)]
    found = means(trainer.train_step(batches, number).totals(trainer.device))
    return {name: value for name, value in found.items() if name.startswith("loss/")}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_steps_are_those_of_plain_pytorch_on_cpu(
    deepspeed: Any, monkeypatch: pytest.MonkeyPatch, stage: int, precision: str
) -> None:
    for module in (test_ds_configs, two_ranks):
        monkeypatch.setattr(module, "tiny_model", still_model)
    found = two_ranks.run(deepspeed, Case(f"zero{stage}", {"precision": precision}))
    test_ds_configs.assert_skipped(found)
    tolerance = 1e-4 if precision == "fp32" else 0.03
    for ours, theirs in zip(found["losses"], test_ds_configs.plain_pytorch(GROUP), strict=True):
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=tolerance)


@pytest.mark.parametrize("stage", STAGES)
def test_fp16_updates_once_the_loss_scale_fits(
    deepspeed: Any, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    monkeypatch.setattr(test_ds_configs, "tiny_model", still_model)
    trainer = make_trainer(deepspeed, stage, "fp16")
    expected = test_ds_configs.plain_pytorch(GROUP)[0]
    losses, updates = [], []
    for _ in range(40):  # the same step again and again: the loss scale falls, then the losses do
        losses.append(step(trainer, 0))
        updates.append(trainer.engine.was_step_applied())
    assert losses[0] == pytest.approx(expected, rel=0.01)
    assert sum(updates) >= 10 and updates[-1] and trainer.guard.skipped == 0
    assert losses[-1]["loss/mlm"] < losses[0]["loss/mlm"] - 0.05


def test_a_run_exports_a_model_that_loads(launch: Launch, tmp_path: Path) -> None:
    ran = launch(tmp_path / "run")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "bf16" in ran.stdout or "fp16" in ran.stdout
    loaded = MultiClsForPreTraining.from_pretrained(tmp_path / "run" / "hf")
    assert all(parameter.isfinite().all() for parameter in loaded.parameters())


def waits(monkeypatch: pytest.MonkeyPatch, action: Any) -> Counter[str]:
    """Returns the number of times that `action` makes the host wait for the device, by whose code waits."""
    found: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(
            warnings, "showwarning", lambda message, *_: found.update(wait_of(message))
        )
        torch.cuda.set_sync_debug_mode("warn")
        try:
            action()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            monkeypatch.undo()
    return found


def wait_of(message: Any) -> list[str]:
    if "synchronizing CUDA operation" not in str(message):
        return []
    files = [Path(frame.filename).parts for frame in traceback.extract_stack()]
    deepspeed_s = any("deepspeed" in parts and "site-packages" in parts for parts in files)
    return ["DeepSpeed's" if deepspeed_s else "ours"]


def test_no_wait_of_ours_in_a_step_that_does_not_log(
    deepspeed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's own reads are counted apart."""
    trainer = make_trainer(deepspeed, 2, "bf16")
    for number in range(2):
        step(trainer, number)
    batches, window = [micro_batch(n) for n in range(8, 12)], MetricSums()
    found = waits(monkeypatch, lambda: trainer.train_step(batches, 2, window))
    assert found["ours"] == 0, found
    read = waits(monkeypatch, lambda: window.totals(trainer.device))
    assert read["ours"] >= 1, "control: reading the sums waits, and is ours"
