from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multicls.distributed import prepare_deepspeed
from multicls.files import REPOSITORY
from tests.processes import free_ports

TRAIN = """
import sys
sys.path[0] = {repository!r}
import torch
from multicls.deepspeed_config import complete_deepspeed_config, load_deepspeed_config
from multicls.distributed import leave_deepspeed, prepare_deepspeed

deepspeed = prepare_deepspeed()
world_size = torch.distributed.get_world_size()
for stage in {stages}:
    config = complete_deepspeed_config(load_deepspeed_config(f"ds_configs/zero{{stage}}.json"), micro_batch_size=4,
                                       accumulation=2, world_size=world_size, max_grad_norm=1.0, precision="fp32")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    x = torch.randn(4, 8, generator=generator).to(engine.device)
    losses = []
    for _ in range(20):
        loss = (engine(x) - x.sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert engine.global_steps == 10
    assert "torch._inductor.lowering" not in sys.modules, "torch's compiler was imported"
    print(f"stage {{stage}} of {{world_size}}: {{losses[0]:.4f}} {{losses[-1]:.4f}}\\n", end="", flush=True)
leave_deepspeed()
"""


@pytest.mark.slow
def test_plain_python_trains_with_every_shipped_file_and_no_compiler(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(repository=str(REPOSITORY), stages=(1, 2, 3)), encoding="utf-8")
    (tmp_path / "bin").mkdir()
    without = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CC", "CXX"}
    environment = {name: value for name, value in os.environ.items() if name not in without}
    extensions = str(tmp_path / "extensions")
    environment |= {"PATH": str(tmp_path / "bin"), "TORCH_EXTENSIONS_DIR": extensions}
    options: Any = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, str(script)], check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is deprecated" not in done.stderr
    assert not (tmp_path / "extensions").exists(), "an op was compiled"
    lines = [line for line in done.stdout.splitlines() if line.startswith("stage ")]
    losses = [[float(number) for number in line.split(": ")[1].split()] for line in lines]
    assert len(losses) == 3
    for first, last in losses:  # the stages differ in what they keep where
        assert last < first and [first, last] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize(
    ("local_rank", "visible", "chosen"), [("3", 1, 0), ("3", 4, 3), ("0", 1, 0), ("5", 4, 1)]
)
def test_device_where_a_process_sees_its_own_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, local_rank: str, visible: int, chosen: int
) -> None:
    """Ranks see one GPU each under `srun --gpus-per-task=1`. DeepSpeed, too, takes its device from LOCAL_RANK."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    import deepspeed
    import deepspeed.ops
    import torch

    devices: list[int | str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", None, raising=False)
    monkeypatch.setattr(
        deepspeed, "init_distributed", lambda **settings: devices.append(settings["dist_backend"])
    )
    prepare_deepspeed()
    assert devices == [chosen, "nccl"] and os.environ["LOCAL_RANK"] == str(chosen)


PATIENT = """
import datetime, sys, time
sys.path[0] = {repository!r}
import deepspeed
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))
from multicls.distributed import leave_deepspeed, on_rank_0, prepare_deepspeed
prepare_deepspeed()
answer = on_rank_0(lambda: time.sleep(2.5) or "done")  # as when a checkpoint is converted
print(f"{{answer}} on {{dist.get_rank()}}\\n", end="", flush=True)
leave_deepspeed()
"""


@pytest.mark.slow
@pytest.mark.launcher
def test_ranks_wait_for_rank_0_beyond_the_limit_of_a_collective(tmp_path: Path) -> None:
    script = tmp_path / "patient.py"
    script.write_text(PATIENT.format(repository=str(REPOSITORY)), encoding="utf-8")
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--nproc_per_node=2", f"--master_port={free_ports(1)[0]}", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"done on 0", "done on 1"} <= set(done.stdout.splitlines())
