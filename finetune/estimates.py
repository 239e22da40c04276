"""Estimates and tests over replicates, by scipy.

A replicate is a pretrained checkpoint with its own training subsets and seeds. With one checkpoint it is a training
subset; with one subset, too, it is a seed, which shows nothing about other rows. What is inside a replicate is averaged
first: runs that share a checkpoint or a subset are no independent evidence.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from finetune.heads import WITHOUT_MODEL
from finetune.metrics import predictions_of, score_predictions
from finetune.tasks import Array, Task

RESAMPLES = 1000  # of the bootstrap over examples
KEYS = ["task", "train_size", "system"]  # of a group of runs
UNITS = {"pretraining": "pretrained checkpoint", "subset": "training subset", "seed": "seed"}


@dataclass(frozen=True)
class Estimate:
    """The mean of a system's replicates, with its standard error and 95 % interval.

    Both are nan with one replicate. Equal replicates have no interval: they do not show the spread.
    """

    mean: float
    error: float
    low: float
    high: float
    units: pd.Series  # mean of each replicate, by its first and last training subset
    kind: str  # key of `UNITS`


def summarise(runs: pd.DataFrame) -> Estimate:
    """Returns the estimate of one system from its runs (columns score, pretraining, subset, seed, weights_sha256)."""
    kind = unit = next((name for name in UNITS if runs[name].nunique() > 1), "seed")
    if unit == "pretraining" and runs["weights_sha256"].nunique() == 1:
        kind = "subset"  # one checkpoint, numbered so that it pairs with several
    replicates = runs.groupby(unit)
    subsets = pd.MultiIndex.from_frame(replicates["subset"].agg(["min", "max"]))
    units = replicates["score"].mean().set_axis(subsets)
    mean, error = float(units.mean()), float(units.sem())
    half = error * float(stats.t.ppf(0.975, len(units) - 1)) if error > 1e-12 else math.nan
    return Estimate(mean, error, mean - half, mean + half, units, kind)


@dataclass(frozen=True)
class Comparison:
    """The difference of two systems, A - B. With too few replicates, all fields but difference and paired are NaN."""

    difference: float
    paired: bool
    low: float = math.nan  # 95 % interval
    high: float = math.nan
    p: float = math.nan  # t-test over replicates
    needed: float = math.nan  # replicates of each that would show it at 5 % with 80 % power


def compare(first: pd.Series, second: pd.Series) -> Comparison:
    """Compares two systems' replicates (`Estimate.units`); paired where both have the same subsets of their own.

    Otherwise it is Welch's test. `needed` is ((z + z_power) / d)^2 + z^2 / 2 with the difference d in standard
    deviations (Guenther, 1981).
    """
    shared = first.index.intersection(second.index)
    paired = first.index.is_unique and second.index.is_unique and len(shared) > 1
    if paired:
        first, second = first.reindex(shared), second.reindex(shared)
    difference = float(first.mean() - second.mean())
    spread = (first - second).std() if paired else math.hypot(first.std(), second.std())
    if not spread > 1e-12:  # one replicate, or constants: a t-test has no answer
        return Comparison(difference, paired)
    test = stats.ttest_rel if paired else partial(stats.ttest_ind, equal_var=False)
    result = test(first, second)
    z, power = stats.norm.ppf([0.975, 0.8])
    needed = ((z + power) * spread / difference) ** 2 + z**2 / 2 if difference else math.inf
    low, high = result.confidence_interval()
    return Comparison(difference, paired, low, high, result.pvalue, needed)


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns Holm's corrected p-values; nan stays nan and does not count."""
    p = pd.Series(p_values, dtype=float).dropna().sort_values()
    corrected = (p * np.arange(len(p), 0, -1)).cummax().clip(upper=1.0)
    return list(corrected.reindex(range(len(p_values))))


def example_interval(task: Task, predictions: Mapping[str, Array]) -> tuple[float, float]:
    """Returns the 95 % interval of one run's main score over the choice of the examples of a split.

    Accuracy of independent examples has Wilson's interval. Other scores have the percentiles of a bootstrap of
    passages; (nan, nan) with fewer than two of them.
    """
    passages = predictions["passages"]
    units = np.where(passages != "", passages, predictions["ids"])
    members = list(pd.Series(units).groupby(units).indices.values())
    if task.metrics[0] == "acc" and len(members) == len(units):
        right = predictions_of(task, predictions["logits"]) == predictions["labels"]
        interval = stats.binomtest(int(right.sum()), len(right)).proportion_ci(method="wilson")
        return float(interval.low), float(interval.high)
    if len(members) < 2:
        return math.nan, math.nan

    def score(drawn: Array) -> float:
        rows = np.concatenate([members[unit] for unit in drawn])
        sample = {name: array[rows] for name, array in predictions.items()}
        return next(iter(score_predictions(task, sample).values()))

    sampling: dict[str, Any] = {"n_resamples": RESAMPLES, "vectorized": False, "rng": 0}
    result = stats.bootstrap((range(len(members)),), score, method="percentile", **sampling)
    low, high = map(float, result.confidence_interval)
    return low, high


def choose_candidates(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the runs of the candidate that each system, task and size chooses from a search.

    It is the one with the best mean score on the rows that pick the checkpoint, among those with the most runs. Column
    `candidate` has the values of the settings that are searched.
    """
    texts = [", ".join(f"{k} {v}" for k, v in search.items()) for search in runs["search"]]
    runs = runs.assign(candidate=texts)
    scores = runs.groupby([*KEYS, "candidate"])["selection_score"].agg(["count", "mean"])
    best = scores.sort_values(["count", "mean"]).groupby(level=KEYS).tail(1)
    return runs.merge(best.index.to_frame(index=False))


def best_runs(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns for each task the best run of the best system that leaves a model, by the rows that pick it."""
    runs = choose_candidates(runs[~runs["head"].isin(WITHOUT_MODEL)])
    systems = runs.groupby(KEYS)["selection_score"]
    ranked = runs.assign(mean=systems.transform("mean")).sort_values(["mean", "selection_score"])
    return ranked.groupby("task").tail(1).sort_values("task").to_dict("records")
