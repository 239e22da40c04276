"""Tests that need a GPU: precisions and ZeRO stages, resume, export, packed tokens, and no waits of the host."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.step import caller
from multicls import MultiClsBertForPreTraining
from multicls.ds_config import load_ds_config, resolve_ds_config
from multicls.modeling_multicls import VARLEN
from pretrain.checkpoints import Checkpoints
from pretrain.engine import build_engine, full_weights, updated
from pretrain.metrics import MetricSums, means
from pretrain.settings import batch_arithmetic
from pretrain.stopping import StopRequest
from pretrain.training import Trainer
from tests.pretrain import test_ds_configs
from tests.pretrain.conftest import Launch
from tests.pretrain.two_ranks import BATCH, GROUP, Case, micro_batch, model, run, settings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda")
STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def deepspeed() -> Iterator[Any]:
    """One rank in this process; afterwards the process is as before."""
    from multicls.distributed import leave_deepspeed, prepare_deepspeed

    before = dict(os.environ)
    yield prepare_deepspeed()
    leave_deepspeed()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


def still_model() -> MultiClsBertForPreTraining:
    """Returns the model of two_ranks without dropout, so that CPU and GPU compute the same."""
    network = model()
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return network


def make_trainer(deepspeed: Any, stage: int, **train: Any) -> Trainer:
    chosen = settings(**train)
    arithmetic = batch_arithmetic(chosen, 1)
    precision: Any = chosen.train.precision
    file = load_ds_config(f"ds_configs/zero{stage}.json")
    resolved = resolve_ds_config(file, where="", precision=precision, **arithmetic)
    if stage == 3:
        resolved["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    engine = build_engine(deepspeed, still_model(), chosen, resolved)
    nothing: Any = None
    return Trainer(engine, chosen, nothing, nothing, nothing, nothing, StopRequest())


def step(trainer: Trainer, number: int) -> dict[str, float]:
    """Makes a step; returns its losses."""
    first = number * BATCH // GROUP
    batches = [micro_batch(n) for n in range(first, first + BATCH // GROUP)]
    sums = trainer.train_step(batches, number)
    return {name: value for name, value in means(sums.totals(trainer.device)).items() if name.startswith("loss/")}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_steps_are_those_of_plain_pytorch_on_cpu(
    deepspeed: Any, monkeypatch: pytest.MonkeyPatch, stage: int, precision: str
) -> None:
    monkeypatch.setattr(test_ds_configs, "model", still_model)
    trainer = make_trainer(deepspeed, stage, precision=precision)
    tolerance = 1e-4 if precision == "fp32" else 0.03
    for number, expected in enumerate(test_ds_configs.plain_pytorch(1, gather=False, size=GROUP)):
        found = step(trainer, number)
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("stage", STAGES)
def test_fp16_updates_once_the_loss_scale_fits(deepspeed: Any, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    monkeypatch.setattr(test_ds_configs, "model", still_model)
    trainer = make_trainer(deepspeed, stage, precision="fp16")
    expected = test_ds_configs.plain_pytorch(1, gather=False, size=GROUP)[0]
    losses, updates = [], []
    for _ in range(40):  # the same step again and again: the loss scale falls, then the losses do
        losses.append(step(trainer, 0))
        updates.append(updated(trainer.engine))
    assert losses[0] == pytest.approx(expected, rel=0.01)
    assert sum(updates) >= 10 and updates[-1] and trainer.guard.skipped == 0
    assert losses[-1]["loss/mlm"] < losses[0]["loss/mlm"] - 0.05


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_that_is_not_finite_skips_the_update(deepspeed: Any, stage: int, precision: str) -> None:
    found = run(deepspeed, Case(f"zero{stage}", {"precision": precision}))
    before, broken, good, broken_again = found["levels"]
    assert before == broken != good == broken_again
    assert "step 5: a loss is not finite on 1 rank(s)" in found["stopped"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_goes_on_as_the_undisturbed_one(deepspeed: Any, tmp_path: Path, stage: int) -> None:
    checkpoints = Checkpoints(tmp_path, 2, {}, 1, zero_stage=stage)
    first = make_trainer(deepspeed, stage, precision="bf16")
    for number in range(2):
        step(first, number)
    assert checkpoints.save(first.engine, 2, {}), checkpoints.warning
    expected = [step(first, number) for number in (2, 3)]
    second = make_trainer(deepspeed, stage, precision="bf16")
    fresh = step(second, 2)  # control: without the checkpoint, another loss
    assert abs(fresh["loss/mlm"] / expected[0]["loss/mlm"] - 1) > 1e-3
    assert checkpoints.newest() == 2
    checkpoints.prepare(2)
    checkpoints.load(second.engine, 2)
    found = [step(second, number) for number in (2, 3)]
    assert found[0] == pytest.approx(expected[0], rel=1e-4)
    assert found[1] == pytest.approx(expected[1], rel=0.01)  # the sums of a GPU's gradients have no fixed order


@pytest.mark.parametrize("stage", STAGES)
def test_exported_weights_are_those_that_were_trained(deepspeed: Any, stage: int) -> None:
    trainer = make_trainer(deepspeed, stage, precision="bf16")
    step(trainer, 0)
    fresh, state = still_model(), full_weights(trainer.engine)
    trainer.engine.eval()
    with torch.no_grad():
        batch = micro_batch(7)
        untrained = fresh.eval()(**batch.inputs).losses["mlm"].item()
        missing = fresh.load_state_dict(state, strict=False)
        found = fresh(**batch.inputs).losses["mlm"].item()
        expected = trainer.engine(**batch.to(DEVICE).inputs).losses["mlm"].item()
    assert not missing.unexpected_keys
    assert found == pytest.approx(expected, rel=0.02)
    assert abs(untrained - found) > 1e-3


def test_a_run_exports_a_model_that_loads(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # of this process's own group
        monkeypatch.delenv(name, raising=False)
    ran = launch(tmp_path / "run")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "bf16" in ran.stdout or "fp16" in ran.stdout
    loaded = MultiClsBertForPreTraining.from_pretrained(tmp_path / "run" / "hf")
    assert all(parameter.isfinite().all() for parameter in loaded.parameters())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_packed_tokens_equal_padded_ones(dtype: torch.dtype, tolerance: float) -> None:
    """Hidden states and gradients; bf16 has 8 bits, so that each of its sums is off by up to 0.4 %."""
    networks: list[Any] = [still_model(), still_model()]
    padded, packed = (network.to(DEVICE, dtype) for network in networks)
    packed.set_attn_implementation(VARLEN)
    inputs = micro_batch(0).to(DEVICE).inputs
    mask = inputs["attention_mask"]
    bounds = torch.nn.functional.pad(mask.sum(dim=1).cumsum(0), (1, 0))
    positions = mask.flatten().nonzero().squeeze(1)
    unpadded = inputs | {"token_positions": positions, "cu_seqlens": bounds}
    expected, found = hidden_and_gradients(padded, inputs), hidden_and_gradients(packed, unpadded)
    assert distance(found[0], expected[0]) <= tolerance
    assert distance(found[1], expected[1]) <= tolerance
    wrong = bounds.clone()
    wrong[1] -= 2  # control: the last two tokens of the first sequence are attended by the second one
    broken = hidden_and_gradients(packed, unpadded | {"cu_seqlens": wrong})
    assert distance(broken[0], expected[0]) > 2 * tolerance


def hidden_and_gradients(network: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the last hidden states of the real tokens, and all gradients (but of key biases) in a row."""
    network.zero_grad()
    outputs = network(**inputs)
    outputs.loss.backward()
    named = [(name, p.grad) for name, p in network.named_parameters() if "key.bias" not in name]
    gradients = torch.cat([grad.float().flatten() for _, grad in named if grad is not None])
    return outputs.last_hidden_state[inputs["attention_mask"].bool()].float().detach(), gradients


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def waits(monkeypatch: pytest.MonkeyPatch, action: Any) -> Counter[str]:
    """Returns the number of times that `action` makes the host wait for the device, by whose code waits."""
    found: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_: found.update(wait_of(message)))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            action()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            monkeypatch.undo()
    return found


def wait_of(message: Any) -> list[str]:
    return [caller()] if "synchronizing CUDA operation" in str(message) else []


@pytest.mark.parametrize("stage", [0, 2])
def test_no_wait_of_ours_in_a_step_that_does_not_log(
    deepspeed: Any, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """ZeRO 0 in bf16, and 2; DeepSpeed's own reads are counted apart."""
    trainer = make_trainer(deepspeed, stage, precision="bf16")
    for number in range(2):
        step(trainer, number)
    batches, window = [micro_batch(n) for n in range(8, 12)], MetricSums()
    found = waits(monkeypatch, lambda: trainer.train_step(batches, 2, window))
    assert found["ours"] == 0, found
    read = waits(monkeypatch, lambda: window.totals(trainer.device))
    assert read["ours"] >= 1, "control: reading the sums waits, and is ours"
