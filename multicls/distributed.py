"""DeepSpeed ready for use under any launcher: `deepspeed`, `torchrun`, `srun` or plain `python`."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from multicls.errors import UserError
from multicls.lifeline import Lifeline

Value = TypeVar("Value")
DEFAULT_ENVIRONMENT = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
_lifeline: Lifeline | None = None


def prepare_deepspeed() -> ModuleType:
    """Imports DeepSpeed and joins the process group: gloo on CPU, nccl on CUDA, nothing compiled.

    Call it before `deepspeed.initialize`; all ranks wait here for each other, and a second call does nothing. Without a
    launcher the process becomes the only rank. Afterwards `torch.distributed` tells rank and world size. A rank that
    then ends without `leave_deepspeed`, for whatever reason, ends all others with exit code 1.
    """
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    import torch

    on_cuda = torch.cuda.is_available()
    if not on_cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed guesses, and warns of its guess
    import deepspeed
    import deepspeed.ops
    from deepspeed.runtime import compiler
    from deepspeed.utils.logging import set_log_level_from_string

    set_log_level_from_string("warning")
    # DeepSpeed still calls collectives by names that torch 2.13 renames.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # On CPU, init_distributed compiles shared-memory collectives with g++ and ninja, which takes a minute and needs
    # a compiler; with the op marked as not available DeepSpeed uses gloo. Assigning before the first look also skips
    # DeepSpeed's probing of every op, which runs compilers too.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False, "deepspeed_not_implemented": False}
    # DeepSpeed imports its Muon optimizer, which nothing here uses. Its decorator would import all of torch's compiler,
    # which takes a second at every start.
    compiler.compile = lambda: lambda function: function
    if on_cuda:
        # DeepSpeed takes its device from LOCAL_RANK, too. A launcher may show each process its own GPU alone.
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif "OMP_NUM_THREADS" not in os.environ:
        ranks = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1  # deepspeed's or torchrun's
        torch.set_num_threads(max(1, torch.get_num_threads() // int(ranks)))
    deepspeed.init_distributed(dist_backend="nccl" if on_cuda else "gloo", verbose=False)
    _open_lifeline()
    return deepspeed


def _open_lifeline() -> None:
    global _lifeline
    rank, world_size = rank_and_world()
    if _lifeline is None and world_size > 1:
        from torch.distributed.distributed_c10d import _get_default_store  # as of torch 2.11 and 2.13

        _lifeline = Lifeline(_get_default_store(), rank, world_size, host=os.environ["MASTER_ADDR"])


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) outside a process group."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def on_rank_0(function: Callable[[], Value]) -> Value:
    """Returns rank 0's result of `function` on all ranks; all must call it. All ranks raise its `UserError`."""
    import torch.distributed as dist

    rank, world_size = rank_and_world()
    if world_size == 1:
        return function()
    outcome: list[Any] = [None, None]
    if rank == 0:
        try:
            outcome[0] = function()
        except UserError as error:
            outcome[1] = error.problems
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise UserError(*outcome[1], on_all_ranks=True)
    value: Value = outcome[0]
    return value


def leave_deepspeed() -> None:
    """Leaves the process group, all ranks together; call it once at the end of a run that went well."""
    global _lifeline
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    if _lifeline is not None:
        _lifeline.leave()
        _lifeline = None
    # A gloo thread that lets go of the last collective's tensors takes the interpreter's lock. Where the interpreter
    # shuts down at that moment the process aborts (seen in 4 of 48 processes with ZeRO-3): let the threads finish.
    time.sleep(0.2)
