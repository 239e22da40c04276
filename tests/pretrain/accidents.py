"""Runs pretrain/run.py several times over, with an accident each, as lines of JSON on stdin ask for.

{"folder": FOLDER, "launches": [{"accident": NAME, "step": STEP, "ranks": N, "on": RANK, "arguments": [...]}, ...]}

An accident is "WHAT" or "WHAT in PLACE", from step STEP on; `arrange` knows them. With "launcher" the other ranks get
SIGTERM when a rank has ended.

Every rank is a fork of this process, which has imported everything already, in a session of its own. Answers with a
line, a list of the ranks' exit codes for each launch (-9: killed, null: the rank or a process that it started is still
there after the deadline). Leaves in FOLDER what the ranks printed, `launch_0.txt` and so on, and in `examples.jsonl`
which examples every step took.

With two arguments, OUTPUT and one launch, this process is a rank of that launch; a launcher starts it.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.util
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])
os.environ["DS_ACCELERATOR"] = "cpu"

# All that a run imports, early or late, so that no fork has to.
import deepspeed  # noqa: F401
import pandas  # noqa: F401  # pyarrow imports it for NumPy arrays
import torch
import torch.utils.tensorboard

import pretrain.checkpoints
import pretrain.job
import pretrain.run
import pretrain.training
from multicls.errors import run_command
from multicls.files import append_jsonl
from tests.processes import IdleClock, free_ports, sessions

DEADLINE = 120.0  # seconds of an idle machine that a launch may take
GONE = 15.0  # such seconds after an accident in which every process of the run must end
RAISED = {error.__name__: error for error in (RuntimeError, MemoryError, torch.OutOfMemoryError)}
Checkpoints, Trainer = pretrain.checkpoints.Checkpoints, pretrain.training.Trainer
BEFORE_THE_LOOP = {
    "the meeting": (pretrain.job, "prepare_deepspeed"),
    "the set-up": (pretrain.job, "build_engine"),
    "a rename": (Path, "rename"),  # of a folder: an export
    "the end": (pretrain.training, "write_json"),
}
IN_THE_LOOP = {
    "a step": (pretrain.training, "loss_terms"),  # after the first forward pass
    "an evaluation": (Trainer, "evaluate"),
    "a save": (Checkpoints, "save"),
    "a file": (torch, "save"),
    "the marker": (pretrain.checkpoints, "atomic_write"),
    "an export": (pretrain.training, "write_model"),
}


def before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Has `action` called with the arguments of `owner.name` before each call of it."""
    original = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        action(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, replacement)


def happen(what: str) -> None:
    """Lets an accident happen to this rank."""
    number = what.removeprefix("all get ")
    if what in RAISED:
        raise RAISED[what]("injected")
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "loader killed":
        for process in multiprocessing.active_children():
            process.kill()
    elif what == "stdout closed":  # as by `| head`
        reader, writer = os.pipe()
        os.dup2(writer, sys.stdout.fileno())
        os.close(reader)
        os.close(writer)
    elif what == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    else:  # twice: a launcher passes on what its ranks may have received already
        pids = [os.getpid()]
        if number != what:  # all that this rank has started, as from a terminal or SLURM
            pids = [pid for pid, session in sessions().items() if session == os.getpid()]
        for pid in pids * 2:
            os.kill(pid, signal.Signals[number])


def arrange(accident: str, step: int, output: Path) -> None:
    """Prepares the accident: at the beginning of `step`, or where the run is next in its place."""
    what, _, place = accident.partition(" in ")

    def now(*args: Any, **kwargs: Any) -> None:
        output.with_suffix(".crashed").touch()
        happen(what)

    def at_step(trainer: Any, batches: Any, number: int, *args: Any, **kwargs: Any) -> None:
        if number == step and place:
            before(*IN_THE_LOOP[place], now)
        elif number == step:
            now()

    if what == "note the engine's weights":  # as they are when the last checkpoint is saved
        before(Checkpoints, "save", lambda checkpoints, engine, *_: _note_weights(engine))
    elif what.startswith("killed after"):  # some seconds of this rank's processor time
        what = "killed"
        signal.signal(signal.SIGPROF, now)
        signal.setitimer(signal.ITIMER_PROF, float(accident.split()[2]))
    elif place in BEFORE_THE_LOOP:
        before(*BEFORE_THE_LOOP[place], now)
    elif what:
        before(Trainer, "train_step", at_step)


def _note_weights(engine: Any) -> None:
    """Writes the engine's weights in fp32: master weights where there are some. Rank 0 writes, all take part."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {}
    for name, parameter in engine.module.named_parameters():
        full = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            weights[name] = (parameter if full is None else full).detach().float().clone()
    if torch.distributed.get_rank() == 0:
        torch.save(weights, Path(os.environ["NOTES"]) / "engine_weights.pt")


def be_rank(launch: dict[str, Any], rank: int, output: Path) -> None:
    """Runs one rank of a launch and leaves the process."""

    def note_examples(trainer: Any, batches: list[Any], step: int, *_: Any, **__: Any) -> None:
        examples = {str(batch.number): batch.example_ids.tolist() for batch in batches}
        record = {"launch": output.stem, "step": step, "examples": examples}
        append_jsonl(output.with_name("examples.jsonl"), record)

    before(Trainer, "train_step", note_examples)
    del sys.modules["__main__"].__file__  # or loader processes would import this file again
    os.environ["NOTES"] = str(output.parent)
    accident = launch.get("accident", "")
    if accident.startswith("note") or rank == launch.get("on", 0):  # all ranks note
        arrange(accident, launch.get("step", 0), output)
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
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"WORLD_SIZE": str(launch.get("ranks", 1)), "MASTER_PORT": str(port)}
    code = 1
    try:
        be_rank(launch, rank, output)
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # as the interpreter does at its end
    os._exit(code)


def wait(ranks: list[int], crashed: Path, terminate: bool) -> list[int | None]:
    """Returns the ranks' exit codes; None for one that is not gone in time with all processes of its session.

    Args:
        ranks: Their process ids. What is left of them in the end is killed.
        crashed: A file that an injected crash writes.
        terminate: Send SIGTERM to the others when a rank has ended, as launchers do.
    """
    codes: dict[int, int] = {}
    launched, since_crash, since_end = IdleClock(), IdleClock(), IdleClock()
    while True:
        for rank in set(ranks) - codes.keys():
            found, state = os.waitpid(rank, os.WNOHANG)
            if found:
                codes[rank] = os.waitstatus_to_exitcode(state)
        left = set(ranks) - codes.keys()
        launched.tick()
        since_crash.tick(crashed.exists())
        since_end.tick(bool(codes))
        if terminate and since_end.seconds > 2:  # the others have begun to wait
            terminate = False
            for rank in left:
                os.kill(rank, signal.SIGTERM)
        late = launched.seconds > DEADLINE or since_crash.seconds > GONE
        processes = {number: one for number, one in sessions().items() if one in ranks}
        if late or not (left or processes):
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
            (port,) = free_ports(1)
            output = Path(request["folder"]) / f"launch_{number}.txt"
            ranks = [start(launch, rank, port, output) for rank in range(launch.get("ranks", 1))]
            codes.append(wait(ranks, output.with_suffix(".crashed"), launch.get("launcher", False)))
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:  # deepspeed puts its --local_rank first
        be_rank(json.loads(sys.argv[-1]), int(os.environ["RANK"]), Path(sys.argv[-2]))
    main()
