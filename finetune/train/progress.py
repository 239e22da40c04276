"""Shows a run in training: a bar on a terminal, lines in a log, curves in TensorBoard. Only rank 0 shows anything."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from multicls.console import Progress
from multicls.distributed import rank_and_world
from multicls.words import duration

if TYPE_CHECKING:
    from finetune.train.loop import FinetuneResult

log = logging.getLogger("finetune")


class RunProgress(Progress):
    """Shows a run of `steps` steps, of which `done` are done; its curves are in the folder `tensorboard`, if given."""

    def __init__(self, steps: int, done: int, tensorboard: Path | None) -> None:
        first_rank = rank_and_world()[0] == 0
        super().__init__("fine-tuning", steps, done=done, unit="steps", shown=first_rank)
        self.board, self._newest = None, ""
        if tensorboard and first_rank:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(tensorboard), purge_step=done + 1)

    def close(self) -> None:
        """Ends the bar and the file of TensorBoard."""
        super().close()
        if self.board is not None:
            self.board.close()

    def step(self) -> None:
        """Counts a step."""
        self.update(self.done + 1, self._newest)

    def evaluation(self, result: FinetuneResult, curves: dict[str, float], seconds: float) -> None:
        """Shows the newest evaluation of `result`, after `seconds` of the run; `curves` are for TensorBoard."""
        step, loss, mains = result.history[-1]
        self._newest = f"loss {loss:.4f}  score {sum(mains) / len(mains):.4f}"
        eta = duration(seconds / step * (self.total - step))
        log.info("step %d/%d  %s  eta %s", step, self.total, self._newest, eta)
        if self.board is not None:
            for name, value in curves.items():
                self.board.add_scalar(name, value, step)
