"""Every DeepSpeed file on two ranks: the losses of plain PyTorch, and no update from what is not finite."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from multicls.files import REPOSITORY
from multicls.modeling_multicls import mcqt_loss, part_scores
from multicls.optim import dropout_seed
from pretrain.nonfinite import NonFiniteGuard
from pretrain.training import lr_at
from tests.pretrain.conftest import Fork, said
from tests.pretrain.two_ranks import BATCH, CASES, FACETS, GROUP, STEPS, facets, micro_batch, model, settings
from tests.processes import free_ports

OBJECTIVES = ("mlm", "tfidf", "so", "mcqt")


class Launched(dict[str, Any]):
    """Results by case, and what was printed."""

    stderr: str


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return launch(2, tmp_path_factory.mktemp("two_ranks"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return launch(1, tmp_path_factory.mktemp("one_rank"))


def launch(ranks: int, folder: Path) -> Launched:
    """Runs all cases on some ranks."""
    results = folder / "results.json"
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node", str(ranks)]
    torchrun += [f"--master_port={free_ports(1)[0]}"]
    command = [*torchrun, str(Path(__file__).with_name("two_ranks.py")), str(results)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = Launched(json.loads(results.read_text()))
    found.stderr = ran.stderr
    return found


@functools.cache
def plain_pytorch(ranks: int, gather: bool, size: int) -> list[dict[str, float]]:
    """Returns the losses of the first steps, by a loop over the definitions in one process.

    Groups are compared one by one, whatever the micro-batches of `size` examples.
    """
    network, train = model(), settings().train
    network.bert.pooler.requires_grad_(False)  # type: ignore[union-attr]
    named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    plain = {name for name, _ in named if "LayerNorm" in name or name.endswith("bias")}
    groups = [
        {"params": [p for name, p in named if (name in plain) == flag], "weight_decay": 0.0 if flag else 0.02}
        for flag in (False, True)
    ]
    optimizer = torch.optim.AdamW(groups)
    steps = []
    for step in range(STEPS):
        batches = [micro_batch(step * BATCH // size + slot, size) for slot in range(BATCH // size)]
        sums, embedded = dict.fromkeys(OBJECTIVES[:3], torch.zeros(())), []
        for batch in batches:
            torch.manual_seed(dropout_seed(train.seed, batch.number))
            outputs = network(**batch.inputs, normalizers=dict.fromkeys(sums, 1.0))
            sums = {name: total + outputs.losses[name] for name, total in sums.items()}
            parts = [part.split(GROUP) for part in outputs.facet_embeddings.chunk(3)]
            embedded += [torch.cat(found) for found in zip(*parts, strict=True)]
        if gather:  # the groups that the ranks compute at the same time, as one
            embedded = [joined(embedded[start : start + ranks]) for start in range(0, len(embedded), ranks)]
        lengths = torch.cat([batch.inputs["attention_mask"].sum(dim=1) - FACETS for batch in batches])
        losses = {
            "mlm": sums["mlm"] / sum(int((batch.inputs["labels"] != -100).sum()) for batch in batches),
            "tfidf": sums["tfidf"] / lengths.sum(),
            "so": sums["so"] / len(lengths),
            "mcqt": torch.stack([mcqt_loss(part_scores(rows, 3, 0.1)) for rows in embedded]).mean(),
        }
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, train)
        torch.stack(list(losses.values())).sum().backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append({f"loss/{name}": loss.item() for name, loss in losses.items()})
    return steps


def joined(embedded: list[Tensor]) -> Tensor:
    parts = [batch.chunk(3) for batch in embedded]
    return torch.cat([batch[part] for part in range(3) for batch in parts])


def test_every_file_is_launched() -> None:
    assert {case.file for case in CASES.values()} == {path.stem for path in (REPOSITORY / "ds_configs").glob("*.json")}


@pytest.mark.launcher
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_plain_pytorch(launched: Launched, name: str) -> None:
    changes = CASES[name].changes
    expected = plain_pytorch(2, "gather_negatives" in changes, changes.get("micro_batch_size", GROUP))
    tolerance = 0.03 if "precision" in changes else 1e-5
    for ours, theirs in zip(launched[name]["losses"], expected, strict=True):
        assert {key: ours[key] for key in theirs} == pytest.approx(theirs, rel=tolerance)


@pytest.mark.launcher
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", CASES)
def test_a_step_that_is_not_finite_updates_nothing(request: pytest.FixtureRequest, ranks: int, name: str) -> None:
    """Without DeepSpeed's scan for overflow, in each precision and ZeRO stage that runs on CPU."""
    if ranks == 1 and "gather_negatives" in CASES[name].changes:
        pytest.skip("one rank has nothing to gather")
    found = request.getfixturevalue("alone" if ranks == 1 else "launched")[name]
    before, broken, good, broken_again = found["levels"]
    assert before == broken != good == broken_again
    assert "step 5: a loss is not finite on 1 rank(s)" in found["stopped"]
    assert "train.skip_nonfinite = 1 step(s)" in found["stopped"]


@pytest.mark.launcher
def test_what_is_not_finite_is_named(launched: Launched) -> None:
    """Slot 1 of step 3 is the first of rank 1; micro-batch 13 has the examples 39 to 41."""
    lines = re.findall(r"step 3, rank 1: loss/tfidf = inf; examples \(epoch:index\) (.*)", launched.stderr)
    one, two = (" ".join(f"0:{number}" for number in numbers) for numbers in (range(39, 42), range(42, 48)))
    assert sorted(lines) == [one] * (len(CASES) - 1) + [two]
    assert "step 3, rank 0" not in launched.stderr


@pytest.mark.launcher
@pytest.mark.parametrize("parts", [2, 3])
def test_gathered_negatives_are_those_of_the_joined_batch(launched: Launched, parts: int) -> None:
    found = launched["gathered"][str(parts)]
    rows = facets(parts, 2).requires_grad_()
    losses = [mcqt_loss(part_scores(rows[:, group].flatten(0, 2), parts, 0.1)) for group in range(2)]
    loss = torch.stack(losses).mean()
    loss.backward()
    assert rows.grad is not None
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-12)
    gradient = torch.tensor(found["gradient"], dtype=torch.float64) / 2  # DeepSpeed takes the mean over ranks
    torch.testing.assert_close(gradient, rows.grad.flatten(), rtol=1e-9, atol=1e-12)


@pytest.mark.launcher
def test_a_run_that_is_not_finite_ends_with_code_1(fork: Fork, tiny_bert: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_bert, tmp_path / "broken")
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    weights["cls.predictions.bias"][3] = float("nan")
    save_file(weights, tmp_path / "broken" / "model.safetensors", {"format": "pt"})
    # an earlier process has used up what may be skipped
    flags = [
        "--model",
        str(tmp_path / "broken"),
        "--set",
        "model.random_weights=false",
        "--set",
        "train.skip_nonfinite=2",
    ]
    launches = [{"accident": "SIGTERM", "step": 1}, {}]
    assert fork(tmp_path / "run", *launches, flags=tuple(flags)) == [[0], [1]]
    first, second = said(tmp_path / "run"), said(tmp_path / "run", 1)
    assert "step 0: a loss is not finite on 1 rank(s)" in first and "1 more step(s) may go without" in first
    assert "error: step 2: a loss is not finite" in second and "Traceback" not in second
    assert not (tmp_path / "run" / "DONE").exists()


class Fp16Engine:
    """An engine whose gradients overflow in each step, as DeepSpeed's ZeRO optimizers tell it."""

    device = "cpu"

    def __init__(self, dynamic: bool = True) -> None:
        self.dynamic = dynamic
        self.scaler = SimpleNamespace(cur_scale=4.0, raise_error_at_min_scale=True)
        self.optimizer = SimpleNamespace(overflow=False, loss_scaler=self.scaler)

    def step(self) -> None:
        self.optimizer.overflow = True
        if self.dynamic:
            self.scaler.cur_scale = max(self.scaler.cur_scale / 2, 1.0)

    def fp16_enabled(self) -> bool:
        return True

    def dynamic_loss_scale(self) -> bool:
        return self.dynamic

    def dynamic_loss_scale_args(self) -> dict[str, float]:
        return {"min_scale": 1.0}


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)


@pytest.mark.usefixtures("one_rank")
def test_loss_scale_that_cannot_fall_any_more(capsys: pytest.CaptureFixture[str]) -> None:
    """fp16 does not run on CPU: what the guard makes of it does."""
    engine = Fp16Engine()
    guard = NonFiniteGuard(engine, skips=1)
    loss = torch.tensor(2.0, requires_grad=True)
    for step in range(2):  # 4 to 2 to 1: DeepSpeed's business
        assert guard.watch(micro_batch(step), {"mlm": loss}, loss) == loss
        engine.step()
        guard.judge(step)
    assert not capsys.readouterr().err
    guard.watch(micro_batch(2), {"mlm": loss}, loss)
    engine.step()
    guard.judge(2)
    told = capsys.readouterr().err
    assert "step 2, rank 0: losses are finite; examples (epoch:index) 0:6 0:7 0:8" in told
    assert "the gradients are not finite, and the loss scale is at its smallest (1)" in told
    with pytest.raises(FloatingPointError, match="step 3: the gradients are not finite, and the loss scale"):
        guard.watch(micro_batch(3), {"mlm": loss}, loss)
        engine.step()
        guard.judge(3)


@pytest.mark.usefixtures("one_rank")
def test_overflow_at_a_fixed_loss_scale() -> None:
    with pytest.raises(FloatingPointError, match=r"smallest \(4\)"):
        engine = Fp16Engine(dynamic=False)
        guard = NonFiniteGuard(engine, skips=0)
        guard.watch(micro_batch(0), {}, torch.tensor(1.0))
        engine.step()
        guard.judge(0)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_loss_that_is_not_finite_has_no_finite_gradient(value: str) -> None:
    weight = torch.ones(3, requires_grad=True)
    total = weight.sum() + float(value)
    NonFiniteGuard(Fp16Engine(), skips=0).watch(micro_batch(0), {"mlm": total}, total).backward()
    assert weight.grad is not None and not weight.grad.isfinite().any()
