import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from multicls import distributed
from multicls.distributed import prepare_deepspeed
from multicls.errors import UserError
from multicls.files import REPOSITORY
from tests.processes import completed, free_ports, program


@pytest.mark.parametrize(
    ("local_rank", "visible", "expected"),
    [
        ("3", 1, [0, "nccl"]),
        ("3", 4, [3, "nccl"]),
        ("0", 1, [0, "nccl"]),
        ("5", 4, [1, "nccl"]),
        ("5", 0, ["gloo"]),  # DS_ACCELERATOR=cpu, whatever there is
    ],
)
def test_device_where_a_process_sees_its_own_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, local_rank: str, visible: int, expected: list[int | str]
) -> None:
    """Ranks see one GPU each under `srun --gpus-per-task=1`. DeepSpeed, too, takes its device from LOCAL_RANK.

    The ranks of a node share its threads.
    """
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    import deepspeed
    import deepspeed.ops
    import torch

    devices, threads = list[int | str](), list[int]()
    if visible:
        monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", None, raising=False)
    monkeypatch.setattr(
        deepspeed, "init_distributed", lambda **settings: devices.append(settings["dist_backend"])
    )
    prepare_deepspeed()
    assert devices == expected and threads == [3]
    assert os.environ["LOCAL_RANK"] == str(expected[0] if visible else local_rank)


def test_all_ranks_learn_why_rank_0_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise those of other nodes would wait for it."""
    sent: list[Any] = []

    def broadcast(values: list[Any], group: Any) -> None:
        if sent:
            values[:] = sent.pop()
        else:
            sent.append(list(values))

    monkeypatch.setattr("torch.distributed.broadcast_object_list", broadcast)
    for error, other in ((KeyError("x"), RuntimeError), (UserError("no"), UserError)):
        for rank, raised in ((0, type(error)), (1, other)):
            monkeypatch.setattr(distributed, "rank_and_world", lambda rank=rank: (rank, 2))
            with pytest.raises(raised):
                distributed.on_rank_0(mock.Mock(side_effect=error))


PATIENT = """
import datetime, sys, time
sys.path[0] = {repository!r}
import deepspeed
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))  # the ranks meet in it, too
from multicls.distributed import leave_deepspeed, on_rank_0, prepare_deepspeed
prepare_deepspeed()
answer = on_rank_0(lambda: time.sleep(7.5) or "done")  # as when a checkpoint is converted
print(f"{{answer}} on {{dist.get_rank()}}\\n", end="", flush=True)
leave_deepspeed()
"""


@pytest.mark.slow
@pytest.mark.launcher
def test_ranks_wait_for_rank_0_beyond_the_limit_of_a_collective(tmp_path: Path) -> None:
    script = tmp_path / "patient.py"
    script.write_text(PATIENT.format(repository=str(REPOSITORY)), encoding="utf-8")
    torchrun = [program("torchrun"), "--nproc_per_node=2", f"--master_port={free_ports(1)[0]}"]
    done = completed([*torchrun, script], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"done on 0", "done on 1"} <= set(done.stdout.splitlines())
