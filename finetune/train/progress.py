"""Shows a run in training: a bar on a terminal, lines in a log, curves in TensorBoard. Only rank 0 shows anything."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from multicls.distributed import rank_and_world

if TYPE_CHECKING:
    from finetune.train.loop import FinetuneResult

log = logging.getLogger("finetune")


class Progress:
    """Shows the steps and evaluations of a run.

    Args:
        steps: steps of the run.
        done: steps that are done already.
        tensorboard: folder for TensorBoard; None: no curves.
    """

    def __init__(self, steps: int, done: int, tensorboard: Path | None) -> None:
        first_rank = rank_and_world()[0] == 0
        self.steps, self.board = steps, None
        hidden = not first_rank or not sys.stderr.isatty()
        self.bar: Any = tqdm(total=steps, initial=done, disable=hidden, unit="step", leave=False)
        if tensorboard and first_rank:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(tensorboard), purge_step=done + 1)

    def close(self) -> None:
        """Ends the bar and the file of TensorBoard."""
        self.bar.close()
        if self.board is not None:
            self.board.close()

    def step(self) -> None:
        """Counts a step."""
        self.bar.update()

    def evaluation(self, result: FinetuneResult, curves: dict[str, float], seconds: float) -> None:
        """Shows the newest evaluation.

        Args:
            result: of the run so far.
            curves: values for TensorBoard.
            seconds: time that the run has taken so far.
        """
        step, loss, mains = result.history[-1]
        main = sum(mains) / len(mains)
        self.bar.set_postfix(loss=f"{loss:.3f}", score=f"{main:.4f}")
        if self.bar.disable:
            left = divmod(round(seconds / step * (self.steps - step)), 60)
            log.info("step %d/%d  loss %.4f  score %.4f  eta %d:%02d", step, self.steps, loss, main, *left)
        if self.board is not None:
            for name, value in curves.items():
                self.board.add_scalar(name, value, step)
