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

import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])
os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}  # ranks share no GPU

# All that a run imports or prepares, early or late, so that no fork has to.
import deepspeed  # noqa: F401
import pandas  # noqa: F401  # pyarrow imports it for NumPy arrays
import torch
import torch.utils.tensorboard
import transformers.generation.utils
import transformers.models.bert.modeling_bert
import transformers.models.bert.tokenization_bert  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import multicls.distributed
import pretrain.engine
import pretrain.folder
import pretrain.run
import pretrain.setup
import pretrain.trainer
from multicls.errors import run_command
from multicls.files import append_jsonl
from tests.processes import IdleClock, free_ports, sessions

get_checkpoint_conversion_mapping("bert")  # transformers keeps its table of 1,000 expressions
DEADLINE = 120.0  # seconds of an idle machine that a launch may take
GONE = 15.0  # such seconds after an accident in which every process of the run must end
RAISED = {error.__name__: error for error in (RuntimeError, MemoryError, torch.OutOfMemoryError)}
PLACES = {
    "": (pretrain.trainer, "train_step"),
    "the meeting": (multicls.distributed, "prepare_deepspeed"),
    "the set-up": (pretrain.setup, "Engine"),
    "a step": (pretrain.engine, "loss_terms"),  # after the first forward pass
    "an evaluation": (pretrain.trainer, "evaluate"),
    "a save": (pretrain.trainer.Trainer, "save"),
    "a file": (torch, "save"),
    "the marker": (pretrain.folder, "atomic_write"),
    "an export": (pretrain.trainer, "write_model"),
    "a rename": (Path, "rename"),  # of a folder: an export
    "the end": (pretrain.trainer, "write_json"),
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
    """Prepares the accident: where the run next comes to its place, once `step` has begun if that is in the loop."""
    what, _, place = accident.partition(" in ")
    has_begun = not step or place in ("the meeting", "the set-up")

    def begin(_engine: Any, _settings: Any, _batches: Any, number: int, **_: Any) -> None:
        nonlocal has_begun
        has_begun = has_begun or number == step

    def now(*args: Any, **kwargs: Any) -> None:
        if has_begun:
            output.with_suffix(".crashed").touch()
            happen(what)

    if what == "note the engine's weights":  # as they are when the last checkpoint is saved
        before(pretrain.trainer.Trainer, "save", lambda trainer, *_: _note_weights(trainer.engine))
    elif what.startswith("killed after"):  # some seconds of this rank's processor time
        what = "killed"
        signal.signal(signal.SIGPROF, now)
        signal.setitimer(signal.ITIMER_PROF, float(accident.split()[2]))
    elif what:
        before(*PLACES[place], now)
        before(pretrain.trainer, "train_step", begin)


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

    def note_examples(
        _engine: Any, _settings: Any, batches: list[Any], step: int, **_: Any
    ) -> None:
        examples = {str(batch.number): batch.windows.tolist() for batch in batches}
        record = {"launch": output.stem, "step": step, "examples": examples}
        append_jsonl(output.with_name("examples.jsonl"), record)

    before(pretrain.trainer, "train_step", note_examples)
    del sys.modules["__main__"].__file__  # or loader processes would import this file again
    os.environ["NOTES"] = str(output.parent)
    accident = launch.get("accident", "")
    if accident.startswith("note") or rank == launch.get("on", 0):  # all ranks note
        arrange(accident, launch.get("step", 0), output)
    run_command(lambda _: pretrain.run.main(launch["arguments"]))


def be_fork(launch: dict[str, Any], rank: int, port: int, output: Path) -> None:
    """Runs one rank in a session of its own, as a launcher would start it."""
    os.setsid()
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"WORLD_SIZE": str(launch.get("ranks", 1)), "MASTER_PORT": str(port)}
    be_rank(launch, rank, output)


def run(launch: dict[str, Any], output: Path) -> list[int | None]:
    """Returns the exit codes of a launch's ranks; None for one that is not gone in time with all its session."""
    (port,), fork = free_ports(1), multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=be_fork, args=(launch, rank, port, output))
        for rank in range(launch.get("ranks", 1))
    ]
    for rank in ranks:
        rank.start()
    launched, since_crash, since_end = IdleClock(), IdleClock(), IdleClock()
    has_launcher, pids = launch.get("launcher", False), [rank.pid for rank in ranks]
    while True:
        left = [rank for rank in ranks if rank.is_alive()]
        processes = {number: one for number, one in sessions().items() if one in pids}
        launched.tick()
        since_crash.tick(output.with_suffix(".crashed").exists())
        since_end.tick(len(left) < len(ranks))
        if has_launcher and since_end.seconds > 2:  # the others have begun to wait
            has_launcher = False
            for rank in left:
                rank.terminate()
        is_late = launched.seconds > DEADLINE or since_crash.seconds > GONE
        if is_late or not (left or processes):
            break
        time.sleep(0.02)
    for number in processes:
        os.kill(number, signal.SIGKILL)
    for rank in ranks:
        rank.kill()
        rank.join()
    stuck = [*left, *(rank for rank in ranks if rank.pid in processes.values())]
    return [None if rank in stuck else rank.exitcode for rank in ranks]


def main() -> None:
    """Runs the launches of each line one after the other."""
    for line in sys.stdin:
        request, codes = json.loads(line), []
        for number, launch in enumerate(request["launches"]):
            codes.append(run(launch, Path(request["folder"]) / f"launch_{number}.txt"))
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:  # deepspeed puts its --local_rank first
        be_rank(json.loads(sys.argv[-1]), int(os.environ["RANK"]), Path(sys.argv[-2]))
    main()
