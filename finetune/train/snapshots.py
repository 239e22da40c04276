"""Snapshots of a run in training: a run that was killed goes on from the newest one with the same numbers.

A snapshot is a folder. Its `state.pt` is replaced last and as a whole: it holds the result so far, the best weights,
and (without DeepSpeed) the weights and the optimizer's state. With DeepSpeed these are in `step_N/`, from all ranks.
"""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from multicls.distributed import on_rank_0, rank_and_world
from multicls.files import atomic_write

if TYPE_CHECKING:
    from finetune.train.loop import FinetuneResult, Stepper

log = logging.getLogger("finetune")
STATE = "state.pt"


class Snapshots:
    """Writes and reads the snapshots of one run. All ranks call every method together.

    Args:
        folder: where the snapshot is; None: none is written.
        minutes: least time between two snapshots.
        identity: JSON values on which a snapshot must agree with the run.
    """

    def __init__(self, folder: Path | None, minutes: float, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        self.minutes = minutes
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))
        self._last = time.monotonic()

    def load(self, stepper: Stepper, result: FinetuneResult) -> None:
        """Puts the newest snapshot into `stepper` and `result`; changes nothing if there is none that fits."""
        if self.folder is None or not on_rank_0(self._fits):
            return
        state = torch.load(self.folder / STATE, map_location="cpu", weights_only=True)
        stepper.load_state(self.folder, state["stepper"])
        for name, value in state["result"].items():
            setattr(result, name, value)
        result.outputs = [output.numpy() for output in result.outputs]  # type: ignore[attr-defined]
        log.info("going on from step %d, from %s", result.steps, self.folder)

    def save_if_due(self, stepper: Stepper, result: FinetuneResult, seconds: float) -> None:
        """Writes a snapshot if the last one is old enough. A full disk ends no run of one process."""
        if self.folder is None or not on_rank_0(lambda: time.monotonic() - self._last >= 60 * self.minutes):
            return
        try:
            self._save(self.folder, stepper, vars(result) | {"seconds": seconds})
        except OSError as error:
            if rank_and_world()[1] > 1:  # the other ranks wait for this one
                raise
            log.warning("warning: no snapshot at step %d: %s", result.steps, error)
        self._last = time.monotonic()

    def _save(self, folder: Path, stepper: Stepper, result: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        result["outputs"] = [torch.from_numpy(output) for output in result["outputs"]]
        state = {"identity": self.identity, "result": result, "stepper": stepper.state(folder, result["steps"])}
        rank, world_size = rank_and_world()
        if world_size > 1:
            dist.barrier()  # the files of all ranks are whole before state.pt names them
        if rank == 0:
            with atomic_write(folder / STATE, "wb") as file:
                torch.save(state, file)
            for old in set(folder.glob("step_*")) - {folder / f"step_{result['steps']}"}:
                shutil.rmtree(old, ignore_errors=True)

    def _fits(self) -> bool:
        """Returns whether there is a snapshot of this run; says why one that is there is not used."""
        assert self.folder is not None
        path = self.folder / STATE
        if not path.exists():
            return False
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["identity"]
        except (OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
            log.warning("warning: %s cannot be read, the run starts again: %s", path, str(error).partition("\n")[0])
            return False
        other = [name for name in self.identity if self.identity[name] != found.get(name)]
        if other:
            log.warning("warning: %s is of a run with other %s: the run starts again", path, ", ".join(other))
        return not other
