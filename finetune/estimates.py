"""Estimates and tests over replicates and evaluated rows.

A replicate is a pretrained checkpoint with its own training subsets and seeds. With one checkpoint it is a training
subset; with one subset, too, it is a seed, which shows nothing about other rows. What is inside a replicate is averaged
first: runs that share a checkpoint or a subset are no independent evidence.

All replicates are scored on the same rows of dev or test, so their spread does not show what other rows would give.
The variance of a mean has two parts, each estimated on its own: that of the replicates, and that of the rows, by a
jackknife over the rows (`row_effects`), of which the part counts that the replicates share. An interval is the root of
the squares of both intervals (as in Zou's MOVER), since few replicates need a wider one than the many rows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize, special, stats

from finetune.metrics import row_values, score_predictions
from finetune.tasks import Array, Task

GROUPS = 50  # of the jackknife: that many times rows are left out
KEYS = ["task", "train_size", "system"]  # of a group of runs
UNITS = {"pretraining": "pretrained checkpoint", "subset": "training subset", "seed": "seed"}
CORRELATIONS = ("matthews", "pearson", "spearman")
NOTHING = 1e-12  # a smaller standard error is rounding


@dataclass(frozen=True)
class Uncertain:
    """A mean with its standard errors, by the replicates and by the rows, and the degrees of freedom of each.

    It is for new replicates and new rows. One replicate, or equal ones, which show no spread, have nan for freedom, and
    so for all that follows from it.
    """

    mean: float
    error: float
    freedom: float
    rows_error: float
    rows_freedom: float

    def half_width(self, quantile: float) -> float:
        """Returns half the width of the interval that leaves 1 - quantile on either side."""
        of_replicates = self.error * float(special.stdtrit(self.freedom, quantile))
        of_rows = self.rows_error * float(special.stdtrit(self.rows_freedom, quantile))
        return math.hypot(of_replicates, of_rows)

    def interval(self, tests: int = 1) -> tuple[float, float]:
        """Returns the 95 % interval, or one of several that hold together with 95 % (Bonferroni)."""
        half = self.half_width(1 - 0.025 / max(1, tests))
        return self.mean - half, self.mean + half

    @property
    def p(self) -> float:
        """The p-value of a mean of 0: 1 minus the level of the widest interval without 0."""

        def beyond(quantile: float) -> float:
            return self.half_width(quantile) - abs(self.mean)

        if math.isnan(self.freedom):
            return math.nan
        widest = 1 - 1e-10  # smaller p-values are not told apart
        quantile = widest if beyond(widest) < 0 else optimize.brentq(beyond, 0.5, widest)
        return float(2 * (1 - quantile))

    @property
    def detectable(self) -> float:
        """The smallest true mean that such an experiment finds at 5 % in 80 % of cases."""
        return self.half_width(0.975) + self.half_width(0.8)


@dataclass(frozen=True)
class Estimate(Uncertain):
    """The mean of a system's replicates."""

    units: Array  # mean of each replicate, (R,)
    keys: list[tuple[str, int, int]]  # weights, first and last training subset of each
    rows: Array  # effects of the rows (G, R) of each replicate; see `row_effects`
    kind: str  # key of `UNITS`


@dataclass(frozen=True)
class Comparison(Uncertain):
    """The mean difference of two systems, A - B."""

    paired: bool


def summarise(runs: pd.DataFrame) -> Estimate:
    """Returns the estimate of one system from its runs; column `effects`, by `row_effects`, may be missing."""
    unit = next((name for name in UNITS if runs[name].nunique() > 1), "seed")
    replicates = runs.groupby(unit)
    units, subsets = replicates["score"].mean().to_numpy(), replicates["subset"]
    weights = replicates["weights_sha256"].first()
    keys = list(zip(weights, subsets.min(), subsets.max(), strict=True))
    rows = np.zeros((0, len(units)))
    if "effects" in runs and len({len(effects) for effects in runs["effects"]}) == 1:
        rows = np.stack([np.mean(list(of_unit["effects"]), axis=0) for _, of_unit in replicates], 1)
    # One checkpoint may be numbered so that it pairs with several.
    kind = "subset" if unit == "pretraining" and runs["weights_sha256"].nunique() == 1 else unit
    return Estimate(*_uncertainty(units, rows), units, keys, rows, kind)


def _uncertainty(units: Array, rows: Array) -> tuple[float, float, float, float, float]:
    """Returns the fields of `Uncertain` for replicates (R,) with the effects of rows (G, R)."""
    number, mean = len(units), float(units.mean())
    error = float(units.std(ddof=1)) / math.sqrt(number) if number > 1 else math.nan
    freedom = number - 1 if error > NOTHING else math.nan
    return mean, error, freedom, math.sqrt(shared_variance(rows)), max(1, len(rows) - 1)


def shared_variance(rows: Array) -> float:
    """Returns the variance by the rows that R replicates (G, R) share: the mean covariance of two of them."""
    replicates = rows.shape[1]
    if not rows.size or replicates == 1:
        return float(np.square(rows).sum())
    between = np.square(rows.sum(axis=1)).sum() - np.square(rows).sum()
    return max(0.0, float(between)) / (replicates * (replicates - 1))


def row_effects(task: Task, predictions: Mapping[str, Array]) -> Array:
    """Returns how one run's main score depends on the rows: (G,), whose squares sum to its variance.

    It is a jackknife: the score without each of up to 50 groups of units (passages, or rows). The same rows have the
    same groups in each run, so that the product of two runs' effects is their covariance.
    """
    values, units = row_values(task, predictions)
    distinct, unit_of = np.unique(units, return_inverse=True)
    count = min(GROUPS, len(distinct))
    if count < 2:
        return np.zeros(0)
    groups = (np.random.default_rng(0).permutation(len(distinct)) % count)[unit_of]
    if values is not None:  # the score is their mean
        sums, sizes = np.bincount(groups, values), np.bincount(groups)
        scores = (values.sum() - sums) / (len(values) - sizes)
    else:
        scores = np.empty(count)
        for group in range(count):
            rest = {name: array[groups != group] for name, array in predictions.items()}
            scores[group] = next(iter(score_predictions(task, rest).values()))
    return np.asarray((scores - scores.mean()) * math.sqrt((count - 1) / count))


def compare(first: Estimate, second: Estimate) -> Comparison:
    """Compares two systems, paired where replicates have the same checkpoints or subsets, else as Welch's test does."""
    same_rows = len(first.rows) == len(second.rows)
    if places := _pairs(first.keys, second.keys):
        here, there = map(list, zip(*places, strict=True))
        none = np.zeros((0, len(places)))
        rows = first.rows[:, here] - second.rows[:, there] if same_rows else none
        return Comparison(*_uncertainty(first.units[here] - second.units[there], rows), True)
    error, freedom = math.hypot(first.error, second.error), math.nan
    if error > NOTHING:
        freedom = error**4 / sum(x.error**4 / (len(x.units) - 1) for x in (first, second))
    of_rows = shared_variance(first.rows) + shared_variance(second.rows)
    if same_rows:
        of_rows -= 2 * float(first.rows.mean(axis=1) @ second.rows.mean(axis=1))
    errors = error, freedom, math.sqrt(max(0.0, of_rows))
    return Comparison(first.mean - second.mean, *errors, max(1, len(first.rows) - 1), False)


def _pairs(first: Sequence[Any], second: Sequence[Any]) -> list[tuple[int, int]]:
    """Returns the positions of replicates with the same checkpoint and subsets, or else with the same subsets."""
    for start in (0, 1):
        here, there = ([key[start:] for key in keys] for keys in (first, second))
        shared = [key for key in here if key in there]
        if len(set(here)) == len(here) and len(set(there)) == len(there) and len(shared) > 1:
            return [(here.index(key), there.index(key)) for key in shared]
    return []


def averages(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns a run for the average over the tasks, of each system and size that has them all.

    Runs go together that have the same checkpoint, subset and seed; the rows of different tasks are independent.
    """
    keys = ["train_size", "system", "pretraining", "subset", "seed", "weights_sha256"]
    number, runs = runs["task"].nunique(), runs.sort_values("task")
    means = runs.groupby(keys).agg({"task": "count", "score": "mean", "effects": list})
    means = means[means["task"] == number].reset_index()
    return means.assign(effects=[np.concatenate(of) / number for of in means["effects"]])


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns Holm's corrected p-values; nan stays nan and does not count."""
    p = pd.Series(p_values, dtype=float).dropna().sort_values()
    corrected = (p * np.arange(len(p), 0, -1)).cummax().clip(upper=1.0)
    return list(corrected.reindex(range(len(p_values))))


def example_interval(task: Task, predictions: Mapping[str, Array]) -> tuple[float, float]:
    """Returns the 95 % interval of one run's main score over the choice of the examples of a split.

    Accuracy of independent examples has Wilson's interval, other scores one by the jackknife over passages. Where that
    has no width, a share of 0 or 1 has Wilson's interval for as many passages; (nan, nan) for others.
    """
    values, units = row_values(task, predictions)
    number = len(np.unique(units))
    main = task.metrics[0]
    if main == "acc" and values is not None and number == len(units):
        return _wilson(int(values.sum()), number)
    score = next(iter(score_predictions(task, predictions).values()))
    error = float(np.linalg.norm(row_effects(task, predictions)))
    if number < 2:
        return math.nan, math.nan
    if error < NOTHING:
        is_share = main not in CORRELATIONS and score in (0.0, 1.0)
        return _wilson(int(score) * number, number) if is_share else (math.nan, math.nan)
    half = error * float(stats.t.ppf(0.975, min(GROUPS, number) - 1))
    floor = -1.0 if main in CORRELATIONS else 0.0
    return max(floor, score - half), min(1.0, score + half)


def _wilson(right: int, number: int) -> tuple[float, float]:
    interval = stats.binomtest(right, number).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def choose_candidates(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the runs of the candidate that each system, task and size chooses from a search.

    It has the best mean score on the rows that pick the checkpoint, among those with the most runs. Column `candidate`
    has its values.
    """
    texts = [", ".join(f"{k} {v}" for k, v in search.items()) for search in runs["search"]]
    runs = runs.assign(candidate=texts)
    scores = runs.groupby([*KEYS, "candidate"])["selection_score"].agg(["count", "mean"])
    best = scores.sort_values(["count", "mean"]).groupby(level=KEYS).tail(1)
    return runs.merge(best.index.to_frame(index=False))
