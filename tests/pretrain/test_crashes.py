"""A crash, a lost rank or loader process, or a closed stdout ends every process of a run within 15 seconds.

What still lives after 15 seconds of an idle machine shows as None; see accidents.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretrain.accidents import GONE
from tests.pretrain.conftest import Fork, said
from tests.processes import IdleClock, free_ports, sessions, until

pytestmark = pytest.mark.launcher
STEPS = ("--steps", "2", "--run.eval_every", "2", "--run.save_every", "2")
LOADER = ("--data.num_workers", "1")
MANY_STEPS = ("--steps", "500")  # the loader processes have more ready than a pipe takes, and wait


@pytest.mark.parametrize(
    ("crash", "ranks", "reason"),
    [
        ("RuntimeError in a step", 2, "RuntimeError: injected"),
        ("stdout closed in a step", 1, "BrokenPipeError"),
        *(
            pytest.param(f"{what} in {place}", ranks, f"{what}: injected", marks=pytest.mark.slow)
            for what, place, ranks in (
                ("RuntimeError", "a step", 1),
                ("MemoryError", "a step", 1),
                ("OutOfMemoryError", "a step", 1),
                ("RuntimeError", "an evaluation", 2),
                ("RuntimeError", "a save", 2),
                ("RuntimeError", "an export", 1),
            )
        ),
    ],
)
def test_a_crash_ends_every_process(
    fork: Fork, tmp_path: Path, crash: str, ranks: int, reason: str
) -> None:
    launch = {"accident": crash, "step": 1, "ranks": ranks, "on": ranks - 1}
    assert fork(tmp_path / "run", launch, flags=STEPS) == [[1] * ranks], said(tmp_path / "run")
    assert reason in said(tmp_path / "run")


@pytest.mark.parametrize(
    ("crash", "reason"),
    [
        ("loader killed", "DataLoader worker"),
        pytest.param("RuntimeError in a step", "RuntimeError: injected", marks=pytest.mark.slow),
    ],
)
def test_no_loader_process_stays(fork: Fork, tmp_path: Path, crash: str, reason: str) -> None:
    launch = {"accident": crash, "step": 3}
    codes = fork(tmp_path / "run", launch, flags=(*MANY_STEPS, *LOADER))
    assert codes == [[1]] and reason in said(tmp_path / "run"), said(tmp_path / "run")


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_others(fork: Fork, tmp_path: Path, victim: int) -> None:
    launch = {"accident": "killed in a step", "step": 1, "ranks": 3, "on": victim}
    codes = fork(tmp_path / "run", launch, flags=(*MANY_STEPS, "--global_batch_size", "9"))
    assert codes == [[-9 if rank == victim else 1 for rank in range(3)]], said(tmp_path / "run")


def test_signals_end_a_process_that_cannot_save(fork: Fork, tmp_path: Path) -> None:
    """Before the loop nothing is to save; a swallowed SIGTERM would let the set-up continue for minutes."""
    launch = {"accident": "SIGTERM in the set-up", "step": 0}
    assert fork(tmp_path / "run", launch) == [[-15]], said(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("crash", "code"), [("killed in the meeting", -9), ("MemoryError in the set-up", 1)]
)
def test_a_rank_lost_before_the_loop(fork: Fork, tmp_path: Path, crash: str, code: int) -> None:
    """Only a launcher can know, and its SIGTERM ends the ranks that wait."""
    launch = {"accident": crash, "ranks": 3, "on": 1, "launcher": True}
    codes = fork(tmp_path / "run", launch, flags=("--global_batch_size", "9"))
    assert codes == [[-15, code, -15]], said(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("crash", ["RuntimeError in a step", "killed in a step"])
@pytest.mark.parametrize("launcher", ["deepspeed --num_gpus=2", "torchrun --nproc_per_node=2"])
def test_launchers_end_with_the_reason(
    tiny_run: list[str], tmp_path: Path, launcher: str, crash: str
) -> None:
    """A command with two ranks, of which one crashes, ends within 15 seconds and prints why."""
    arguments = [*tiny_run, "--output_dir", str(tmp_path / "run"), *MANY_STEPS, *LOADER]
    launch = {"accident": crash, "step": 1, "on": 1, "arguments": arguments}
    program, ranks = launcher.split()
    command = [str(Path(sys.executable).with_name(program)), ranks]
    command += [f"--master_port={free_ports(1)[0]}", str(Path(__file__).with_name("accidents.py"))]
    command += [str(tmp_path / "launch_0.txt"), json.dumps(launch)]
    output, environment = tmp_path / "output.txt", os.environ | {"OMP_NUM_THREADS": "1"}
    with output.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        until((tmp_path / "launch_0.crashed").exists, output.read_text)
        since_crash = IdleClock()
        while process.pid in sessions().values() and since_crash.seconds < GONE:
            process.poll()
            since_crash.tick()
        text = output.read_text()
        assert process.poll() and process.pid not in sessions().values(), text
        killed = ("return code = -9", "SIGKILL", "Connection reset", "Connection closed")
        reasons = ("injected",) if "RuntimeError" in crash else killed
        assert any(reason in text for reason in reasons), text
    finally:
        for number in [number for number, session in sessions().items() if session == process.pid]:
            os.kill(number, signal.SIGKILL)
