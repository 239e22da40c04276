"""Steps whose losses or gradients are not finite: no update, a named cause, and an end after too many."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from multicls.errors import print_stderr
from pretrain.batches import MicroBatch


def mask_nonfinite(total: Tensor) -> Tensor:
    """Returns `total`, multiplied by NaN if it is not finite: its gradients then are not finite either."""
    return total * torch.where(total.detach().isfinite(), 1.0, torch.nan)


class NonFiniteGuard:
    """Counts the optimizer steps without update; all ranks come to the same result.

    DeepSpeed makes no update if the gradients of any rank are not finite; weights and moments stay unchanged. With
    fp16 it also skips a step whose gradients overflow, and halves the loss scale; such a step does not count.

    The process may make `allowed` steps without update; `skipped` counts them.
    """

    def __init__(self, engine: Any, allowed: int) -> None:
        self._engine, self._allowed = engine, allowed
        self.skipped = 0

    def check_step(
        self, step: int, batches: Sequence[MicroBatch], losses: Sequence[Mapping[str, Tensor]]
    ) -> bool:
        """Returns True if `engine.step()`, which has ended optimizer step `step`, changed the weights.

        Args:
            losses: Losses of each of the rank's micro-batches, by name.

        Raises:
            FloatingPointError: It did not, and no more steps may be skipped. The weights are those before the step.
        """
        if self._engine.was_step_applied():
            return True
        wrong = [
            {name: loss.item() for name, loss in values.items() if not loss.isfinite()}
            for values in losses
        ]
        ranks = torch.tensor(float(any(wrong)), device=self._engine.device)
        dist.all_reduce(ranks)
        if not ranks and self._engine.fp16_enabled():
            return False
        for batch, named in zip(batches, wrong, strict=True):
            if named or not ranks:  # if all losses are finite, any example may be the cause
                values = ", ".join(f"loss/{name} = {value}" for name, value in named.items())
                examples = " ".join("{}:{}:{}".format(*window) for window in batch.windows.tolist())
                where = f"step {step}, rank {dist.get_rank()}: {values or 'the losses are finite'}"
                print_stderr(f"{where}; examples (row:window:epoch) {examples}")
        what = "gradients are not finite"
        if ranks:
            what = f"a loss is not finite on {int(ranks)} rank(s)"
        self.skipped += 1
        if self.skipped > self._allowed:
            raise FloatingPointError(
                f"step {step}: {what}; the weights are as before the step. train.skip_nonfinite = {self._allowed} "
                "step(s) may go without update, so the run stops. Look at the examples named above, try a lower "
                "train.learning_rate or train.precision = fp32, or allow more steps."
            )
        if dist.get_rank() == 0:
            left = self._allowed - self.skipped
            print_stderr(f"step {step}: {what}; no update, {left} more may follow")
        return False
