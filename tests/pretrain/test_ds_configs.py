"""Every DeepSpeed file on two ranks: the losses of plain PyTorch, and no update from what is not finite.

What the engine does instead of DeepSpeed's work for each weight changes no bit, and is little work.
"""

import functools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from safetensors.torch import load_file, save_file

from multicls.files import REPOSITORY, read_json
from multicls.modeling_multicls import mcqt_loss, part_scores
from multicls.optim import dropout_seed
from pretrain.engine import NAMES, mask_nonfinite, why_not_flat
from pretrain.settings import lr_at
from pretrain.trainer import NonFiniteGuard
from tests.pretrain.conftest import Fork, logs
from tests.pretrain.tools import tiny_model
from tests.pretrain.two_ranks import (
    BATCH,
    CASES,
    FILES,
    FLAT,
    GROUP,
    STEPS,
    Case,
    micro_batch,
    settings,
)
from tests.processes import completed, program

SLOW = [name for name in CASES if name not in FILES]
LAUNCHES: list[Any] = [(name, 2) for name in FILES]
LAUNCHES += [pytest.param(name, 2, marks=pytest.mark.slow) for name in SLOW]
ALONE = [*FILES, "zero1_recorded"]
LAUNCHES += [pytest.param(name, 1, marks=pytest.mark.slow) for name in ALONE]
# On two ranks DeepSpeed's ZeRO 1 has no sums in fp32 to compare with.
FLAT_RUNS = [(name, 1) for name in FLAT]
FLAT_RUNS += [(name, 2) for name in FLAT if not re.match("flat_zero1_.*16_sums", name)]
Launched = Callable[[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Returns the results of a case on some ranks. All cases of the session run in one launch."""
    tests: list[Any] = [item for item in request.session.items if item.path == Path(__file__)]
    cases = [item.callspec.params for item in tests if "launched" in item.fixturenames]

    @functools.cache
    def launch(ranks: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("ranks")
        command = [program("torchrun"), "--standalone", f"--nproc_per_node={ranks}"]
        command += [str(Path(__file__).with_name("two_ranks.py")), str(folder / "results.json")]
        no_compiler = {"PATH": "", "CC": "none", "CXX": "none", "CUDA_VISIBLE_DEVICES": ""}
        no_compiler |= {"TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
        names = dict.fromkeys(case["name"] for case in cases if case["ranks"] == ranks)
        ran = completed([*command, *names], env=os.environ | no_compiler | {"OMP_NUM_THREADS": "1"})
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert not re.search(r"torch\.distributed\.\w+` is deprecated", ran.stderr)
        assert not (folder / "extensions").exists(), "an op was compiled"
        results: dict[str, Any] = read_json(folder / "results.json")
        return {name: one | {"stderr": ran.stderr} for name, one in results.items()}

    return lambda name, ranks: launch(ranks)[name]


@functools.cache
def plain_pytorch(size: int, **shape: Any) -> list[dict[str, float]]:
    """Returns the losses of the first steps, by a loop over the definitions in one process.

    Groups are compared one by one, whatever the micro-batches of `size` examples.
    """
    network, train, weights = tiny_model(**shape), settings().train, settings().objective.in_use
    network.freeze_unused(weights)
    named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    plain = {name for name, _ in named if "LayerNorm" in name or name.endswith("bias")}
    decays = {0.0: plain, 0.02: {name for name, _ in named} - plain}
    groups = [
        {"params": [p for name, p in named if name in names], "weight_decay": decay}
        for decay, names in decays.items()
    ]
    optimizer = torch.optim.AdamW(groups)
    steps = []
    for step in range(STEPS):
        batches = [micro_batch(step * BATCH // size + slot, size) for slot in range(BATCH // size)]
        sums, embedded = dict.fromkeys(("mlm", "tfidf", "so"), torch.zeros(())), []
        for batch in batches:
            torch.manual_seed(dropout_seed(train.seed, batch.number))
            outputs = network(**batch.inputs, normalizers=dict.fromkeys(sums, 1.0))
            sums = {name: total + outputs.losses[name] for name, total in sums.items()}
            parts = [part.split(GROUP) for part in outputs.facet_embeddings.chunk(3)]
            embedded += list(zip(*parts, strict=True))
        losses = {
            **{name: sums[name] / sum(batch.counts[name] for batch in batches) for name in sums},
            "mcqt": torch.stack(
                [mcqt_loss(part_scores(torch.cat(parts), 3, 0.1)) for parts in embedded]
            ).mean(),
        }
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, train)
        torch.stack([weights[name] * loss for name, loss in losses.items()]).sum().backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append({f"loss/{name}": loss.item() for name, loss in losses.items()})
    return steps


def test_every_file_is_launched() -> None:
    files = {path.stem for path in (REPOSITORY / "ds_configs").glob("*.json")}
    assert {case.file for case in CASES.values()} == files


def assert_losses(found: dict[str, Any], case: Case) -> None:
    is_bf16 = "precision" in case.changes
    tolerance = 0.03 if is_bf16 else 1e-4 if "encoder" in case.model else 1e-5
    expected = plain_pytorch(case.changes.get("micro_batch_size", GROUP), **case.model)
    for ours, theirs in zip(found["losses"], expected, strict=True):
        assert {key: ours[key] for key in theirs} == pytest.approx(theirs, rel=tolerance)


def assert_skipped(found: dict[str, Any]) -> None:
    """Two steps whose loss is not finite have changed no weight, the second has ended the run."""
    before, broken, good, broken_again = found["levels"]
    assert before == broken != good == broken_again
    assert "step 5: a loss is not finite on 1 rank(s)" in found["stopped"]
    assert "train.skip_nonfinite = 1 step(s)" in found["stopped"]
    assert not [key for key in found["skipped"] if key.startswith(("loss/", "acc/"))]
    assert "data/tokens_per_sequence" in found["skipped"]


@pytest.mark.launcher
@pytest.mark.parametrize(("name", "ranks"), LAUNCHES)
def test_steps_are_those_of_plain_pytorch(launched: Launched, name: str, ranks: int) -> None:
    """And a step that is not finite updates nothing, in each precision and ZeRO stage that runs on CPU."""
    found = launched(name, ranks)
    assert_losses(found, CASES[name])
    assert_skipped(found)
    if name in ("zero2_bf16", "zero3_bf16"):
        assert found["accumulated"] == "torch.float32"


@pytest.mark.launcher
@pytest.mark.parametrize(("name", "ranks"), [("zero2", 2)])
def test_what_is_not_finite_is_named(launched: Launched, name: str, ranks: int) -> None:
    """Slot 1 of step 3 is the first of rank 1; micro-batch 13 has the examples 39 to 41."""
    stderr = launched(name, ranks)["stderr"]
    pattern = r"step 3, rank 1: loss/tfidf = inf; examples \(row:window:epoch\) (.*)"
    printed = stderr.partition(f"case {name}\n")[2].partition("case ")[0]
    assert re.findall(pattern, printed) == ["39:0:0 40:0:0 41:0:0"]
    assert "step 3, rank 0" not in stderr


@pytest.mark.launcher
def test_nonfinite_runs_end_with_code_1(fork: Fork, tiny_bert: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_bert, tmp_path / "broken")
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    weights["cls.predictions.bias"][3] = 3e38  # finite, but the losses of two tokens are not
    save_file(weights, tmp_path / "broken" / "model.safetensors", {"format": "pt"})
    run, flags = tmp_path / "run", ["--model", str(tmp_path / "broken")]
    flags += ["--model.random_weights=false", "--train.skip_nonfinite", "1"]
    assert fork(run, flags=tuple(flags)) == [[1]]
    assert "step 0: a loss is not finite on 1 rank(s); no update, 0 more may follow" in logs(run)
    assert "error: step 1: a loss is not finite" in logs(run) and "Traceback" not in logs(run)
    assert not (run / "DONE").exists()
    assert "NaN" not in (run / "metrics.jsonl").read_text()  # it is no JSON


def test_an_overflow_of_fp16_is_not_counted_but_a_broken_loss_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose gradients overflow in each step; DeepSpeed then halves the loss scale."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    engine: Any = SimpleNamespace(device="cpu", was_updated=False, is_fp16=True)
    guard, batches = NonFiniteGuard(engine, allowed=1), [micro_batch(2)]
    good, bad = (torch.tensor(2.0), "so"), (torch.tensor(float("nan")), "mlm")
    assert not guard.check_step(0, batches, [{"loss/mlm": good}]) and guard.skipped == 0
    assert not guard.check_step(1, batches, [{"loss/mlm": bad, "loss/so": good}])
    assert guard.skipped == 1
    assert "mlm = nan; examples (row:window:epoch) 6:0:0 7:0:0 8:0:0" in capsys.readouterr().err
    engine.is_fp16 = False
    with pytest.raises(FloatingPointError, match="step 2: gradients are not finite"):
        guard.check_step(2, batches, [{"loss/mlm": good}])
    assert "the losses are finite; examples (row:window:epoch) 6:0:0" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_a_loss_that_is_not_finite_has_no_finite_gradient(value: str) -> None:
    weight = torch.ones(3, requires_grad=True)
    mask_nonfinite(weight.sum() + float(value)).backward()
    assert weight.grad is not None and not weight.grad.isfinite().any()


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), FLAT_RUNS)
def test_steps_equal_deepspeeds_own_to_the_bit(launched: Launched, name: str, ranks: int) -> None:
    """Weights, master weights, moments, norms and losses of six steps with clipping and one NaN on the last rank.

    In bf16, fp32 and fp16; ZeRO 1 and 2; one micro-batch, and several that are summed in fp32.
    """
    found = launched(name, ranks)
    assert found["differs"] == []
    assert found["skipped"][0] == 1, "the broken step was not skipped"


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("operators", 1)])
def test_an_update_is_little_work(launched: Launched, name: str, ranks: int) -> None:
    found = launched(name, ranks)
    for file in ("zero1", "zero2"):
        weights, number = found[file]
        assert weights > 200 and number < 100  # DeepSpeed's own: 3,581 and 4,012 for 217 weights


def test_what_takes_deepspeeds_own_path() -> None:
    optimizer: Any = DeepSpeedZeroOptimizer.__new__(DeepSpeedZeroOptimizer)
    for name in NAMES:
        if not hasattr(DeepSpeedZeroOptimizer, name):
            optimizer.__dict__[name] = None
    optimizer.cpu_offload = False
    optimizer.custom_loss_scaler, optimizer.external_loss_scale = True, 1.0
    engine: Any = SimpleNamespace(optimizer=optimizer, zero_optimization_stage=lambda: 3)
    assert why_not_flat(engine) == ""
    del optimizer.__dict__["_grad_acc_hooks"]
    assert why_not_flat(engine) == "this DeepSpeed has no _grad_acc_hooks"
    optimizer.cpu_offload = True
    assert why_not_flat(engine) == "the optimizer is offloaded"
    engine.optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    assert why_not_flat(engine) == "ZeRO stage 3"
