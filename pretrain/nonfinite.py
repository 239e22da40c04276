"""Handles steps whose losses or gradients are not finite: no update, a named cause, and an end after too many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from multicls.errors import print_stderr
from pretrain.batches import MicroBatch
from pretrain.engine import at_smallest_loss_scale, loss_scale, updated


class NonFiniteGuard:
    """Judges the optimizer steps of a rank; all ranks come to the same verdict.

    The optimizer makes no update if the gradients of any rank are not finite; weights and moments stay unchanged. To
    skip a step, the guard makes its gradients NaN. In fp16 a gradient overflow counts only at the minimum loss scale;
    above it, DeepSpeed halves the scale.

    The run may have `skips` steps without update; `skipped` counts them.
    """

    def __init__(self, engine: Any, skips: int) -> None:
        self._engine, self._allowed = engine, skips
        self.skipped = 0
        self._seen: list[tuple[MicroBatch, dict[str, Tensor]]] = []
        self._scale_may_fall = False  # before the step: DeepSpeed halves an fp16 loss scale in it

    def watch(self, batch: MicroBatch, losses: Mapping[str, Tensor], total: Tensor) -> Tensor:
        """Remembers a micro-batch's losses; returns `total`, multiplied by NaN if it is not finite."""
        self._scale_may_fall = not at_smallest_loss_scale(self._engine)
        self._seen.append((batch, {name: loss.detach() for name, loss in losses.items()}))
        return total * torch.where(total.detach().isfinite(), 1.0, torch.nan)

    def judge(self, step: int) -> None:
        """Checks, after `engine.step()` has ended optimizer step `step`, that the weights were updated.

        Raises:
            FloatingPointError: They were not, and no more steps may be skipped. The weights are those before the step.
        """
        seen, self._seen = self._seen, []
        if updated(self._engine):
            return
        broken = [(batch, values) for batch, losses in seen if (values := _not_finite(losses))]
        ranks = torch.tensor(float(bool(broken)), device=self._engine.device)
        dist.all_reduce(ranks)
        if not ranks and self._scale_may_fall:
            return
        for batch, values in broken or ([] if ranks else [(batch, {}) for batch, _ in seen]):
            what = ", ".join(f"loss/{name} = {value}" for name, value in values.items()) or "losses are finite"
            examples = " ".join("{}:{}".format(*pair) for pair in batch.example_ids.tolist())
            print_stderr(f"step {step}, rank {dist.get_rank()}: {what}; examples (epoch:index) {examples}")
        what = f"a loss is not finite on {int(ranks)} rank(s)" if ranks else "the gradients are not finite"
        if (scale := loss_scale(self._engine)) and not ranks:
            what += f", and the loss scale is at its smallest ({scale:g})"
        self._count(f"step {step}: {what}; the weights are as before the step.")

    def _count(self, what: str) -> None:
        if self.skipped >= self._allowed:
            raise FloatingPointError(
                f"{what} train.skip_nonfinite = {self._allowed} step(s) may go without update, so the run stops; its "
                "checkpoints are from before. Look at the examples named above, try a lower train.learning_rate or "
                "train.precision = fp32, or allow more steps without update."
            )
        self.skipped += 1
        if dist.get_rank() == 0:
            left = self._allowed - self.skipped
            print_stderr(f"{what} No update; {left} more step(s) may go without.")


def _not_finite(losses: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(loss) for name, loss in losses.items() if not loss.isfinite()}
