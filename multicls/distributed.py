"""DeepSpeed under any launcher (`deepspeed`, `torchrun`, `srun`, plain `python`), and safe loading of its files."""

import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from multicls.errors import UserError, first_line

Value = TypeVar("Value")
LONGEST_WORK = timedelta(hours=1)  # of rank 0 in `on_rank_0`; other collectives wait for 10 minutes
_patient_group: Any = None  # all ranks, with that limit


def uses_cuda() -> bool:
    """Returns True if the run computes on GPUs: there are some, and DS_ACCELERATOR does not ask for the CPU."""
    import torch

    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"


def prepare_deepspeed() -> ModuleType:
    """Imports DeepSpeed and joins the process group: gloo on CPU, nccl on CUDA, nothing compiled.

    All ranks wait here for each other; a second call does nothing. Without a launcher the process is the only rank.
    """
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    if os.environ["WORLD_SIZE"] == "1":
        os.environ["MASTER_PORT"] = "0"  # any free port: a launcher's may be another run's
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # torchrun's store listens at its own
    import torch
    import torch.distributed as dist

    on_cuda = uses_cuda()
    if not on_cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed guesses, and warns of it
    import deepspeed
    import deepspeed.ops
    from deepspeed.runtime import compiler
    from deepspeed.utils.logging import set_log_level_from_string

    set_log_level_from_string("warning")
    # DeepSpeed still calls collectives by names that torch 2.13 renames.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # On CPU, init_distributed would compile shared-memory collectives, and probe every op, for a minute.
    names = ("deepspeed_shm_comm", "deepspeed_not_implemented")
    deepspeed.ops.__compatible_ops__ = dict.fromkeys(names, False)
    # The decorator of an optimizer that nothing here uses would import torch's compiler, a second at every start.
    compiler.compile = lambda: lambda function: function
    if on_cuda:
        # DeepSpeed's device is LOCAL_RANK, too. A launcher may show each process its own GPU alone.
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks_here()))
    deepspeed.init_distributed(dist_backend="nccl" if on_cuda else "gloo", verbose=False)
    global _patient_group
    if _patient_group is None and rank_and_world()[1] > 1:
        _patient_group = dist.new_group(timeout=LONGEST_WORK)
    return deepspeed


def ranks_here() -> int:
    """Returns the number of ranks on this machine, as deepspeed's or torchrun's variables state it."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)


def rank_and_world() -> tuple[int, int]:
    """Returns this process's rank and the number of ranks; (0, 1) outside a process group."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def on_rank_0(function: Callable[[], Value]) -> Value:
    """Returns rank 0's result of `function` on all ranks, which wait for it.

    If it fails there, all ranks raise its `UserError`, which is printed once; of another exception they raise its text
    as a RuntimeError.
    """
    import torch.distributed as dist

    rank, world_size = rank_and_world()
    if world_size == 1:
        return function()
    outcome: list[Any] = [None]
    if rank == 0:
        try:
            outcome[0] = function()
        except UserError as error:
            error.is_shared = True
            outcome[0] = error
        except Exception as error:
            failed = RuntimeError(f"rank 0 failed: {type(error).__name__}: {first_line(error)}")
            dist.broadcast_object_list([failed], group=_patient_group)
            raise
    dist.broadcast_object_list(outcome, group=_patient_group)
    if isinstance(outcome[0], UserError | RuntimeError):
        raise outcome[0]
    return outcome[0]


def leave_deepspeed() -> None:
    """Leaves the process group, all ranks together; call it once at the end of a run that went well."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)  # a gloo thread that is still busy when Python ends aborts the process


@contextmanager
def safe_unpickling(path: Path) -> Iterator[None]:
    """Makes DeepSpeed read the files of a checkpoint with `weights_only=True`; the folder may be somebody else's.

    From then on torch loads all files of the process this way. Raises UserError for objects DeepSpeed does not write.
    """
    import torch
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # DeepSpeed passes weights_only=False
    known = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    try:
        with torch.serialization.safe_globals(known):
            yield
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: holds other objects than DeepSpeed writes; it was not loaded: {first_line(error)}"
        ) from None
