"""Mean score of a system with its standard error and 95 % interval.

A run is one fine-tuning. Runs that share a pretrained model, or a draw of train rows, are not independent: counted as
independent they make intervals far too short (`benchmarks/finetune_statistics.py` shows how far). The units are
therefore pretrainings and draws; the fine-tuning seeds of a (pretraining, draw) cell are averaged first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import t

from multicls.errors import UserError
from multicls.words import counted

Array = np.ndarray[Any, np.dtype[Any]]
CONFIDENCE = 0.95


class StudentMean(NamedTuple):
    """Means whose errors follow Student's t distribution, as arrays of one shape.

    With a single unit the variance and its degrees of freedom are nan.
    """

    mean: Array
    variance: Array
    df: Array

    @property
    def interval(self) -> tuple[Array, Array]:
        """Lower and upper end of the 95 % interval."""
        half = t.ppf((1 + CONFIDENCE) / 2, self.df) * np.sqrt(self.variance)
        return self.mean - half, self.mean + half

    def p_value(self) -> Array:
        """Returns the two-sided p-values of the t-test that the true mean is 0."""
        distance, error = np.abs(self.mean), np.sqrt(self.variance)
        with np.errstate(divide="ignore", invalid="ignore"):  # without any variance: p is 1 if nothing differs, else 0
            ratio = np.where((distance == 0) & (error == 0), 0.0, distance / error)
        return np.asarray(2 * t.sf(ratio, self.df))


class Component(NamedTuple):
    """One source's part of the variance of a mean, with its degrees of freedom."""

    variance: Array
    df: Array | float


def component(units: Array) -> Component:
    """Returns the variance (...) of the mean of independent units (..., n); nan if n is 1."""
    count = units.shape[-1]
    if count == 1:
        return Component(np.full(units.shape[:-1], math.nan), math.nan)
    return Component(np.asarray(units.var(axis=-1, ddof=1) / count), count - 1.0)


def add(parts: Sequence[Component]) -> Component:
    """Returns the sum of independent components with the degrees of freedom of Satterthwaite (1946)."""
    total = np.asarray(sum(part.variance for part in parts))
    with np.errstate(invalid="ignore"):
        df = total**2 / np.asarray(sum(part.variance**2 / part.df for part in parts))
    return Component(total, np.where(total > 0, df, sum(part.df for part in parts)))


def cross(pretrainings: Sequence[Component], draws: Component, interaction: Array) -> Component:
    """Returns the variance of a mean over pretrainings and draws that are crossed.

    Both parts contain the interaction (and the seed noise), so it is subtracted once: the usual two-way random-effects
    estimate, but never less than either part. The degrees of freedom are those of the sum before the subtraction
    (Satterthwaite, 1946), and at most twice those of the part with fewer: the plain formula covers too rarely where a
    part with few levels happens to look small (`benchmarks/finetune_statistics.py`).

    Args:
        pretrainings: One component for each system.
        interaction: (...) part of the variance that both contain.
    """
    models, both = add(pretrainings), add([*pretrainings, draws])
    variance = np.maximum(both.variance - interaction, np.maximum(models.variance, draws.variance))
    return Component(variance, np.minimum(both.df, 2 * np.minimum(models.df, draws.df)))


def interaction_variance(cells: Array) -> Array:
    """Returns the part (...) of the variance of the mean of cells (..., P, D) that is neither P's nor D's alone."""
    models, draws = cells.shape[-2:]
    rest = cells - cells.mean(axis=-1, keepdims=True) - cells.mean(axis=-2, keepdims=True)
    rest = rest + cells.mean(axis=(-2, -1), keepdims=True)
    return np.asarray((rest**2).sum(axis=(-2, -1)) / ((models - 1) * (draws - 1) * models * draws))


def mean_of_cells(cells: Array) -> StudentMean:
    """Returns the means (...) of complete tables (..., P, D) of cells, with their variances.

    With one draw the units are the P pretrainings, with one pretraining the D draws; else both, crossed (`cross`).
    """
    models, draws = cells.shape[-2:]
    mean = cells.mean(axis=(-2, -1))
    if models == 1 or draws == 1:
        part = component(cells.reshape(*mean.shape, models * draws))
    else:
        of_models, of_draws = component(cells.mean(axis=-1)), component(cells.mean(axis=-2))
        part = cross([of_models], of_draws, interaction_variance(cells))
    return StudentMean(mean, part.variance, np.broadcast_to(np.asarray(part.df), mean.shape))


@dataclass(frozen=True)
class Estimate:
    """Mean score of a system on one task at one train size."""

    mean: float  # over cells, seeds averaged within
    error: float  # standard error of the mean; it and the next three are nan for a single unit
    low: float  # lower end of the 95 % interval
    high: float
    df: float  # degrees of freedom
    median: float  # over all runs
    pretrainings: int  # number of pretrained models in the mean
    draws: int
    runs: int
    left_out: int  # runs that are not in the mean, because not every pretraining has a run with their draw

    @property
    def units(self) -> str:
        """The units that the error covers, in words."""
        return units_in_words(self.pretrainings, self.draws, self.runs) + left_out_in_words(self.left_out)


def estimate(runs: pd.DataFrame) -> Estimate:
    """Returns the mean score of one system on one task at one size, with its error.

    Args:
        runs: One row a run: `pretraining` (identity of the pretrained model), `draw`, `seed`, `score` in percent. If
            cells are missing, `complete` says which of them count.

    Raises:
        UserError: There are no runs, or a score is not finite.
    """
    cells = complete(cell_means(runs))
    models, draws = cells.shape
    used = in_cells(runs, cells)
    found = mean_of_cells(seed_units(used) if cells.size == 1 else cells.to_numpy())
    mean, error, low, high, df = map(float, (found.mean, np.sqrt(found.variance), *found.interval, found.df))
    median, counts = float(runs["score"].median()), (models, draws, len(used), len(runs) - len(used))
    return Estimate(mean, error, low, high, df, median, *counts)


def cell_means(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the mean over seeds of each cell; rows are pretrainings, columns draws; nan where there is no run.

    Raises:
        UserError: There are no runs, or a score is not finite.
    """
    if runs.empty:
        raise UserError("there are no runs to average.")
    for _, run in runs[~np.isfinite(runs["score"])].iterrows():
        place = f"pretraining {run['pretraining']}, draw {run['draw']}, seed {run['seed']}"
        raise UserError(f"{place}: the score is {run['score']}; repeat this run or leave it out.")
    cells = runs.pivot_table(values="score", index="pretraining", columns="draw", aggfunc="mean")
    return cells.round(9)  # the order of equal scores makes no difference


def complete(cells: pd.DataFrame) -> pd.DataFrame:
    """Returns a table without missing cells: drops the row or column with the largest share missing until none is.

    On a tie a draw goes, so that the mean stays one over as many pretrainings as possible.
    """
    while cells.isna().any(axis=None):
        rows, columns = cells.isna().mean(axis=1), cells.isna().mean(axis=0)
        by_draw = columns.max() >= rows.max()
        cells = cells.drop(columns=columns.idxmax()) if by_draw else cells.drop(index=rows.idxmax())
    return cells


def in_cells(runs: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """Returns the runs that are in a row and a column of the table."""
    return runs[runs["pretraining"].isin(cells.index) & runs["draw"].isin(cells.columns)]


def seed_units(runs: pd.DataFrame) -> Array:
    """Returns a table (S, 1) of the scores of one cell, in the order of their seeds."""
    return runs.sort_values("seed")["score"].to_numpy(dtype=float)[:, None]


def units_in_words(pretrainings: int, draws: int, runs: int) -> str:
    """Returns what the units of a mean are, such as "4 pretrainings x 3 draws"."""
    if pretrainings == draws == 1:
        return f"{runs} seeds of one pretraining and draw (seeds only)" if runs > 1 else "one run (no error)"
    if pretrainings == 1:
        return f"{draws} draws of one pretraining"
    return f"{pretrainings} pretrainings " + (f"x {draws} draws" if draws > 1 else "at one draw")


def left_out_in_words(runs: int) -> str:
    """Returns the end of a sentence about runs in no complete row and column; empty if there are none."""
    return f"; {counted(runs, 'run')} of incomplete pretrainings or draws left out" if runs else ""
