"""What the engine does instead of DeepSpeed's work for each weight changes no bit, and is little work."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from pretrain.engine import NAMES, why_not_flat
from tests.pretrain.flat_gradients import CASES
from tests.processes import completed, program

SCRIPT = Path(__file__).with_name("flat_gradients.py")
# On two ranks DeepSpeed's ZeRO 1 has no sums in fp32 to compare with.
TWO = [name for name in CASES if not (name.startswith("zero1") and "16_sums" in name)]


def compared(names: list[str], ranks: int, folder: Path) -> dict[str, Any]:
    launcher = [program("torchrun"), "--standalone", f"--nproc_per_node={ranks}", str(SCRIPT)]
    ran = completed(
        [*launcher, str(folder / "results.json"), *names], env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "names"), [(1, list(CASES)), (2, TWO)])
def test_steps_equal_deepspeeds_own_to_the_bit(
    ranks: int, names: list[str], tmp_path: Path
) -> None:
    """Weights, master weights, moments, norms and losses of six steps with clipping and one NaN on the last rank.

    In bf16, fp32 and fp16; ZeRO 1 and 2; one micro-batch, and several that are summed in fp32.
    """
    found = compared(names, ranks, tmp_path)
    operators = found.pop("operators", {})
    assert found.keys() == set(names)
    assert {name: one["differs"] for name, one in found.items()} == {name: [] for name in names}
    assert all(one["skipped"][0] == 1 for one in found.values()), "the broken step was not skipped"
    for weights, number in operators.values():  # DeepSpeed's own: 3,581 and 4,012 for 217 weights
        assert weights > 200 and number < 100


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
