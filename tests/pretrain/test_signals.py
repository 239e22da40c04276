"""Signals ask a run to leave, once and twice; `--status` answers without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretrain.conftest import REPOSITORY, Launch

RANK = """
import math, os, sys, time
import torch, torch.distributed as dist
from pretrain import stopping
stopping.SAME_REQUEST = math.inf
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
stop = stopping.StopRequest(None)
print("ready", flush=True)
while not stop.agreed():
    stop.note(torch.tensor(stop.requests()))
    time.sleep(0.01)
print(stop.agreed(), flush=True)
for line in sys.stdin:  # from now on a signal is another request
    os.getpid()  # Python handles signals after a call
    stopping.SAME_REQUEST = -1.0
    print("later", flush=True)
"""


def rank() -> subprocess.Popen[str]:
    """Returns a process that says what asked it to leave, and leaves at the end of its stdin."""
    command, pipe = [sys.executable, "-c", RANK], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=REPOSITORY)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_second_signal_leaves_at_once(name: str) -> None:
    process, number = rank(), signal.Signals[name]
    assert process.stdin is not None and process.stdout is not None
    process.send_signal(number)
    assert process.stdout.readline() == f"{name}\n"
    process.send_signal(number)  # the same request, which a launcher has passed on
    print("later", file=process.stdin, flush=True)
    assert process.stdout.readline() == "later\n"
    process.send_signal(number)
    assert process.wait() == -number


def test_passed_on_signal_is_the_same_request() -> None:
    process = rank()
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "SIGINT\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate() == ("", None) and process.returncode == 0


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
        (3, f"not begun: {tmp_path / 'run'} does not exist\n"),
        (3, "unfinished, checkpoint at step 4\n"),
        (0, "finished at step 8\n"),
    ]
