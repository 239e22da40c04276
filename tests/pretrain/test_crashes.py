"""A crash, a lost rank or loader process, or a closed stdout ends every process of a run within 15 seconds.

What still lives after 15 seconds of an idle machine shows as None; see accidents.py.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.pretrain import accidents
from tests.pretrain.conftest import Fork, logs
from tests.processes import completed, free_ports, program

pytestmark = pytest.mark.launcher
MANY_STEPS = ("--steps", "500")  # the loader processes have more ready than a pipe takes, and wait
EVERY_2 = ("--run.eval_every", "2", "--run.save_every", "2", "--run.milestone_every", "2")
FLAGS = (*EVERY_2, "--global_batch_size", "9")
LOADER = ("--data.num_workers", "1")
ALONE: dict[str, Any] = {"ranks": 1}
FIRST, SECOND, THIRD = ({"ranks": 3, "on": rank} for rank in range(3))
QUICK = [  # the accident, where it happens, the exit codes of all ranks, what they print
    ("RuntimeError in a step", SECOND, [1, 1, 1], "RuntimeError: injected"),
    ("stdout closed in a step", ALONE, [1], "BrokenPipeError"),
    ("loader killed", ALONE, [1], "DataLoader worker"),
    ("killed in a step", FIRST, [-9, 1, 1], ""),
    # Before the loop nothing is to save; a swallowed SIGTERM would let the set-up continue for minutes.
    ("SIGTERM in the set-up", ALONE, [-15], ""),
]
SLOW = [
    ("OutOfMemoryError in a step", ALONE, [1], "OutOfMemoryError: injected"),
    ("RuntimeError in an evaluation", SECOND, [1, 1, 1], "RuntimeError: injected"),
    ("RuntimeError in a save", SECOND, [1, 1, 1], "RuntimeError: injected"),
    ("RuntimeError in an export", FIRST, [1, 1, 1], "RuntimeError: injected"),
    ("killed in a step", THIRD, [1, 1, -9], ""),
    # A rank lost before the loop: only a launcher can know, and its SIGTERM ends the ranks that wait.
    ("killed in the meeting", SECOND | {"launcher": True}, [-15, -9, -15], ""),
    ("MemoryError in the set-up", SECOND | {"launcher": True}, [-15, 1, -15], ""),
]


@pytest.mark.parametrize(
    ("crash", "place", "codes", "reason"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_an_accident_ends_every_process(
    fork: Fork, tmp_path: Path, crash: str, place: dict[str, Any], codes: list[int], reason: str
) -> None:
    """A lone rank has a loader process. An export follows the last step."""
    launch, flags = place | {"accident": crash, "step": 1}, FLAGS + LOADER * (place == ALONE)
    flags += ("--steps", "2") if "export" in crash else MANY_STEPS
    assert fork(tmp_path / "run", launch, flags=flags) == [codes], logs(tmp_path / "run")
    assert reason in logs(tmp_path / "run")


DEEPSPEED = ("deepspeed --num_gpus=2", "killed in a step")
TORCHRUN = ("torchrun --nproc_per_node=2", "RuntimeError in a step")


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "crash"), [DEEPSPEED, TORCHRUN])
def test_launchers_say_why(tiny_run: list[str], tmp_path: Path, launcher: str, crash: str) -> None:
    """A command with two ranks, of which one crashes, ends with all its processes, which have its streams."""
    arguments = [*tiny_run, "--output_dir", str(tmp_path / "run"), *MANY_STEPS, *LOADER]
    launch = {"accident": crash, "step": 1, "on": 1, "arguments": arguments}
    name, ranks = launcher.split()
    command: list[object] = [program(name), ranks, f"--master_port={free_ports(1)[0]}"]
    command += [accidents.__file__, tmp_path / "launch_0.txt", json.dumps(launch)]
    done = completed(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300)
    seconds = time.time() - (tmp_path / "launch_0.crashed").stat().st_mtime
    text = done.stdout + done.stderr
    assert done.returncode and seconds < 2 * accidents.GONE, text  # the machine may be busy
    killed = ("return code = -9", "SIGKILL", "Connection reset", "Connection closed")
    reasons = ("injected",) if "RuntimeError" in crash else killed
    assert any(reason in text for reason in reasons), text
