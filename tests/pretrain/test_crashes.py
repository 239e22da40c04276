"""A crash, a lost rank or a closed stdout ends every process of a run within 15 seconds, with an exit code for it.

Loader processes run, as by default. What still lives after 15 seconds shows as None; see accidents.py.
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
STEPS = ("--steps", "2", "--set", "run.eval_every=2", "--set", "run.save_every=2")
MANY_STEPS = ("--steps", "500")  # the loader processes have more ready than a pipe takes, and wait
CLOSED = "error: nothing reads the output any more"


@pytest.mark.parametrize(
    ("crash", "ranks", "told"),
    [
        ("RuntimeError in set-up", 2, "RuntimeError: injected"),
        ("RuntimeError in train_step", 1, "RuntimeError: injected"),
        ("RuntimeError in train_step", 2, "RuntimeError: injected"),
        ("MemoryError in train_step", 1, "MemoryError: injected"),
        ("OutOfMemoryError in train_step", 1, "OutOfMemoryError: injected"),
        ("RuntimeError in evaluate", 1, "RuntimeError: injected"),
        ("RuntimeError in evaluate", 2, "RuntimeError: injected"),
        ("RuntimeError in save", 1, "RuntimeError: injected"),
        ("RuntimeError in save", 2, "RuntimeError: injected"),
        ("RuntimeError in export", 1, "RuntimeError: injected"),
        ("RuntimeError in export", 2, "RuntimeError: injected"),
        ("stdout closed in train_step", 1, CLOSED),
        ("stdout closed in train_step", 2, CLOSED),
    ],
)
def test_a_crash_ends_every_process(fork: Fork, tmp_path: Path, crash: str, ranks: int, told: str) -> None:
    on = 0 if told is CLOSED else ranks - 1  # only rank 0 prints
    launch = {"crash": crash, "step": 1, "ranks": ranks, "on": on}
    assert fork(tmp_path / "run", launch, flags=STEPS) == [[1] * ranks], said(tmp_path / "run")
    assert told in said(tmp_path / "run")


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_ends_those_that_are_stuck(fork: Fork, tmp_path: Path, victim: int) -> None:
    launch = {"crash": "killed in train_step", "step": 1, "ranks": 3, "on": victim, "others_stuck": True}
    codes = fork(tmp_path / "run", launch, flags=(*MANY_STEPS, "--global_batch_size", "9"))
    assert codes == [[-9 if rank == victim else 1 for rank in range(3)]], said(tmp_path / "run")
    for rank in {0, 1, 2} - {victim}:
        assert f"error: rank {rank} lost contact with rank {victim}" in said(tmp_path / "run")


def test_a_rank_killed_before_all_have_met(fork: Fork, tmp_path: Path) -> None:
    """Only a launcher can know, and its SIGTERM ends the ranks that wait: there is nothing to save."""
    launch = {"crash": "killed in meeting", "ranks": 3, "on": 1, "launcher": True}
    assert fork(tmp_path / "run", launch, flags=("--global_batch_size", "9")) == [[-15, -9, -15]], said(
        tmp_path / "run"
    )


@pytest.mark.slow
def test_a_launcher_s_signals_keep_no_stuck_rank(tiny_bert: Path, tiny_corpus: Path, tmp_path: Path) -> None:
    """The launcher sends SIGTERM to the ranks that are left; one that is stuck cannot save and leave."""
    arguments = ["--recipe", "pretrain/recipes/tiny.yaml", "--model", str(tiny_bert), "--corpus", str(tiny_corpus)]
    arguments += ["--output_dir", str(tmp_path / "run"), *MANY_STEPS]
    launch = {"crash": "killed in train_step", "step": 1, "on": 1, "others_stuck": True, "arguments": arguments}
    command = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2", f"--master_port={free_ports(1)[0]}"]
    command += [str(Path(__file__).with_name("accidents.py")), str(tmp_path / "launch_0.txt"), json.dumps(launch)]
    output = tmp_path / "output.txt"
    with output.open("w") as file:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        until((tmp_path / "launch_0.crashed").exists)
        since_crash = IdleClock()
        while process.poll() is None and since_crash.seconds < GONE:
            since_crash.tick()
        assert process.poll() is not None, output.read_text()
        assert process.returncode > 0 and process.pid not in sessions().values(), output.read_text()
        assert "SIGTERM: saving after this step" in output.read_text()
        assert "error: rank 0 lost contact with rank 1" in output.read_text()
    finally:
        for number in [number for number, session in sessions().items() if session == process.pid]:
            os.kill(number, signal.SIGKILL)
