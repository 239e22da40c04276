"""The square-root rule of Adam: the learning rate for another batch size.

With k times the batch the gradient's noise has 1/k of its variance. Where noise dominates the gradient, Adam divides by
the size of the noise, so sqrt(k) times the learning rate makes as much progress an example: Malladi et al. 2022
(arXiv:2205.10287). docs/clusters.md has the other sources, and what of their rule we leave out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

LONGEST_WARMUP = 0.2  # of the steps: our own limit


class Schedule(NamedTuple):
    """A run's examples a step, peak learning rate, share of steps with rising learning rate, and steps."""

    batch: int
    learning_rate: float
    warmup_ratio: float
    steps: int

    @property
    def warmup_steps(self) -> int:
        """Steps with rising learning rate."""
        return round(self.warmup_ratio * self.steps)


def scaled(recipe: Schedule, batch: int) -> Schedule:
    """Returns what the square-root rule suggests for another batch size, with as many examples in all.

    The learning rate grows with the square root of the batch. The warm-up keeps its number of examples, but has no
    fewer steps than the recipe's, up to a fifth of the run: Adam averages its moments over a number of steps, not of
    examples (with beta2 = 0.999 over about 1,000; Ma and Yarats 2021, arXiv:1910.04209).
    """
    factor = batch / recipe.batch
    steps = max(1, round(recipe.steps / factor))
    same_examples = recipe.warmup_ratio * steps
    warmup = min(max(same_examples, recipe.warmup_ratio * recipe.steps), max(same_examples, LONGEST_WARMUP * steps))
    return Schedule(batch, recipe.learning_rate * math.sqrt(factor), warmup / steps, steps)


def batch_note(recipe: Schedule, run: Schedule) -> str:
    """Returns what the square-root rule suggests for a run whose batch is not the recipe's, else "".

    The recipe's steps do not matter: as a run of another batch, it takes as many examples as this one does.
    """
    if run.batch == recipe.batch:
        return ""
    steps = max(1, round(run.steps * run.batch / recipe.batch))
    rule = scaled(recipe._replace(steps=steps), run.batch)
    return (
        f"batch: {run.batch} examples a step, the recipe has {recipe.batch}; by the square-root rule the learning rate "
        f"would be {rule.learning_rate:.2g} and warm-up {round(rule.warmup_ratio * run.steps)} steps; the run uses "
        f"{run.learning_rate:.2g} and {run.warmup_steps}"
    )
