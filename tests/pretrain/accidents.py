"""Runs pretrain/run.py several times over, with an accident each, as lines of JSON on stdin ask for.

{"folder": FOLDER, "launches": [{"accident": NAME, "step": STEP, "ranks": N, "on": RANK, "arguments": [...]}, ...]}

An accident is one that `arrange` knows. Instead of it "crash" names one of `arrange_crash`: with "others_stuck" the
other ranks wait for ever at that step, and with "launcher" they get SIGTERM when a rank has ended.

Every rank is a fork of this process, which has imported everything already, in a session of its own. Answers with a
line, a list of the ranks' exit codes for each launch (-9: killed, null: the rank or a process that it started is still
there after the deadline). Leaves in FOLDER what the ranks printed, `launch_0.txt` and so on, and in `examples.jsonl`
which examples every step took.

With two arguments, OUTPUT and one launch, this process is a rank of that launch; a launcher starts it.
"""

from __future__ import annotations

import json
import multiprocessing.util
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])
os.environ["DS_ACCELERATOR"] = "cpu"

# All that a run imports, early or late, so that no fork has to.
import deepspeed  # noqa: F401
import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import pandas  # noqa: F401  # pyarrow imports it for NumPy arrays
import torch
import torch.utils.tensorboard

import pretrain.checkpoints
import pretrain.job
import pretrain.run
import pretrain.training
from multicls.errors import run_command
from multicls.files import append_jsonl
from tests.processes import IdleClock, sessions

DEADLINE = 120.0  # seconds of an idle machine that a launch may take
GONE = 15.0  # such seconds after a crash in which every process of the run must end
RAISED = {error.__name__: error for error in (RuntimeError, MemoryError, torch.OutOfMemoryError)}
Checkpoints, Trainer = pretrain.checkpoints.Checkpoints, pretrain.training.Trainer


def before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Has `action` called with the arguments of `owner.name` before each call of it."""
    original = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        action(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, replacement)


def die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def close_stdout(*args: Any, **kwargs: Any) -> None:
    """Leaves stdout without a reader, as `| head` does."""
    reader, writer = os.pipe()
    os.dup2(writer, sys.stdout.fileno())
    os.close(reader)
    os.close(writer)


def arrange_crash(accident: str, step: int, crashed: Path) -> None:
    """Prepares `WHAT in PLACE` for the first time that the run is at that place after step `step` has begun."""
    what, _, place = accident.partition(" in ")

    def raise_it(*args: Any, **kwargs: Any) -> None:
        raise RAISED[what]("injected")

    action = {"killed": die, "stdout closed": close_stdout}.get(what, raise_it)

    def now(*args: Any, **kwargs: Any) -> None:
        crashed.touch()
        action()

    places = {
        "meeting": (pretrain.job, "prepare_deepspeed"),
        "set-up": (pretrain.job, "build_engine"),
        "evaluate": (Trainer, "evaluate"),
        "save": (Checkpoints, "save"),
        "export": (pretrain.job, "export"),
    }
    if place in ("meeting", "set-up"):
        before(*places[place], now)
    elif place == "train_step":
        before(Trainer, place, lambda trainer, batches, number, *_, **__: now() if number == step else None)
    else:
        before(Trainer, "train_step", lambda trainer, batches, number, *_, **__: before(*places[place], now))


def get_stuck(step: int) -> None:
    """Prepares to wait at `step` for ever, as in a collective of NCCL, which neither fails nor returns."""
    before(
        Trainer, "train_step", lambda trainer, batches, number, *_, **__: time.sleep(1000) if number == step else None
    )


def arrange(accident: str, step: int) -> None:
    """Prepares what is to happen at `step` (done before it, for a step; done with it, for the rest)."""

    def at_step(action: Callable[[], None]) -> None:
        def now(trainer: Any, batches: Any, number: int, *args: Any, **kwargs: Any) -> None:
            if number == step:
                action()

        before(Trainer, "train_step", now)

    def at_save(action: Callable[[], None]) -> None:
        def now(checkpoints: Any, engine: Any, done: int, state: Any) -> None:
            if done == step:
                action()

        before(Checkpoints, "save", now)

    if accident.startswith("SIG"):
        at_step(lambda: os.kill(os.getpid(), signal.Signals[accident]))
    elif accident == "killed in a step":  # in its first forward pass
        at_step(lambda: before(pretrain.training, "loss_terms", die))
    elif accident == "killed in an evaluation":
        at_step(lambda: before(Trainer, "evaluate", lambda trainer: before(pretrain.training, "loss_terms", die)))
    elif accident == "killed in a save":  # with a file half written
        at_save(lambda: before(torch, "save", _die_half_written))
    elif accident == "killed before the marker":
        at_save(lambda: before(pretrain.checkpoints, "atomic_write", die))
    elif accident == "killed in an export":
        before(Path, "rename", die)
    elif accident == "killed after the export":
        before(pretrain.job, "write_json", lambda path, value: die() if path.name == "DONE" else None)
    elif accident == "full disk":  # while the checkpoint of this step is written
        at_save(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY)))
        at_step(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)))
    else:
        assert accident == "none", accident


def _die_half_written(state: Any, file: Any) -> None:
    file.write(b"half")
    file.flush()
    die()


def _note_examples(output: Path, batches: list[Any], step: int) -> None:
    examples = {str(batch.number): batch.example_ids.tolist() for batch in batches}
    record = {"launch": output.stem, "step": step, "examples": examples}
    append_jsonl(output.with_name("examples.jsonl"), record)


def be_rank(launch: dict[str, Any], rank: int, output: Path) -> None:
    """Runs one rank of a launch and leaves the process."""
    before(Trainer, "train_step", lambda trainer, batches, step, *_, **__: _note_examples(output, batches, step))
    accident, step = launch.get("accident", "none"), launch.get("step", 0)
    if rank != launch.get("on", 0):
        if launch.get("others_stuck"):
            get_stuck(step)
    elif "crash" in launch:
        arrange_crash(launch["crash"], step, output.with_suffix(".crashed"))
    else:
        arrange(accident, step)
    run_command(pretrain.run.main, launch["arguments"])


def start(launch: dict[str, Any], rank: int, port: int, output: Path) -> int:
    """Forks one rank; returns its process id, which is also that of its session."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": launch.get("ranks", 1), "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1")
    try:
        be_rank(launch, rank, output)
    except SystemExit as leaving:
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # as the interpreter does at its end
        os._exit(int(leaving.code or 0))
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    os._exit(1)


def wait(ranks: list[int], crashed: Path, terminate: bool) -> list[int | None]:
    """Exit codes of the ranks; None for one that is not gone in time with all processes of its session, and kills it.

    Args:
        ranks: their process ids.
        crashed: what an injected crash has written at its time.
        terminate: when a rank has ended, send SIGTERM to the others, as launchers do.
    """
    codes: dict[int, int] = {}
    launched, since_crash = IdleClock(), IdleClock()
    while True:
        for rank in set(ranks) - codes.keys():
            found, state = os.waitpid(rank, os.WNOHANG)
            if found:
                codes[rank] = os.waitstatus_to_exitcode(state)
        if terminate and codes:
            time.sleep(2)  # the others have begun to wait
            for rank in set(ranks) - codes.keys():
                os.kill(rank, signal.SIGTERM)
            terminate = False
        launched.tick()
        since_crash.tick(crashed.exists())
        late = launched.seconds > DEADLINE or since_crash.seconds > GONE
        left = set(ranks) - codes.keys()
        if late or not left:
            processes = {number: session for number, session in sessions().items() if session in ranks}
            if late or not processes:
                break
        time.sleep(0.02)
    for number in processes:
        os.kill(number, signal.SIGKILL)
    for rank in left:
        os.waitpid(rank, 0)
    return [None if rank in left or rank in processes.values() else codes[rank] for rank in ranks]


def main() -> None:
    """Runs the launches of each line one after the other."""
    for line in sys.stdin:
        request, codes = json.loads(line), []
        for number, launch in enumerate(request["launches"]):
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            output = Path(request["folder"]) / f"launch_{number}.txt"
            ranks = [start(launch, rank, port, output) for rank in range(launch.get("ranks", 1))]
            codes.append(wait(ranks, output.with_suffix(".crashed"), launch.get("launcher", False)))
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:  # deepspeed puts its --local_rank first
        be_rank(json.loads(sys.argv[-1]), int(os.environ["RANK"]), Path(sys.argv[-2]))
    main()
