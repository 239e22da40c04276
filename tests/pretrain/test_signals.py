"""What asks a run to leave: signals, once and twice, and how far it has come, without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pretrain.conftest import REPOSITORY, Launch

RANK = """
import os, sys, time
import torch, torch.distributed as dist
from pretrain import stopping
stopping.SAME_REQUEST = 0.5
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
stop = stopping.StopRequest(None)
print("ready", flush=True)
while not stop.agreed():
    stop.note(torch.tensor(stop.requests()))
    time.sleep(0.01)
reason = stop.agreed()
print(reason, flush=True)
time.sleep(float(sys.argv[1]))
"""


def rank(seconds: float) -> subprocess.Popen[str]:
    """A process that says what asked it to leave, and leaves after `seconds`."""
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(seconds)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_second_signal_leaves_at_once(name: str) -> None:
    process = rank(30)
    for pause in (0.0, 0.0, 1.0):  # the first two are one request, which a launcher has passed on
        time.sleep(pause)
        assert process.poll() is None
        process.send_signal(signal.Signals[name])
    assert process.wait(5) == -signal.Signals[name]
    assert process.stdout is not None and process.stdout.read() == f"{name}\n"


def test_passed_on_signal_is_the_same_request() -> None:
    process = rank(1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert process.stdout is not None and process.stdout.read() == "SIGINT\n"


def test_status_answers_without_torch(launch: Launch, tmp_path: Path) -> None:
    no_torch = tmp_path / "path"
    no_torch.mkdir()
    for name in ("torch", "deepspeed", "transformers"):
        (no_torch / f"{name}.py").write_text("raise RuntimeError('imported')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(no_torch), *sys.path[1:]]))
        answers = [launch(tmp_path / "run", "--status")]
        (tmp_path / "run" / "checkpoints" / "step_00000004").mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / "step_00000004" / "COMPLETE").touch()
        answers.append(launch(tmp_path / "run", "--status"))
        (tmp_path / "run" / "DONE").write_text('{"step": 8}')
        answers.append(launch(tmp_path / "run", "--status"))
    assert [(answer.returncode, answer.stdout) for answer in answers] == [
        (3, "not begun\n"),
        (3, "unfinished, checkpoint at step 4\n"),
        (0, "finished at step 8\n"),
    ]
