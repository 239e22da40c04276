"""Difference of two systems: over pretrainings and draws of train rows, or over the examples of dev.

The two questions are different. `compare` asks if other pretrainings or draws would show the same; its units are those
of `finetune.stats.estimates`. `bootstrap_difference` asks if other dev examples would, with these runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import bootstrap, permutation_test

from finetune.data import metrics
from finetune.data.tasks import Task
from finetune.stats.estimates import (
    Array,
    StudentMean,
    add,
    cell_means,
    complete,
    component,
    cross,
    in_cells,
    interaction_variance,
    left_out_in_words,
    mean_of_cells,
    seed_units,
    units_in_words,
)
from multicls.errors import UserError

Predictions = Mapping[str, Array]
PERMUTATIONS = 9999  # of a sign-flip test; exact up to 13 units
RESAMPLES = 1000  # of a bootstrap


@dataclass(frozen=True)
class Comparison:
    """Difference of two systems on one task at one train size."""

    difference: float  # mean score of A minus that of B
    low: float  # lower end of the 95 % interval; nan for a single unit, as the next three
    high: float
    p: float  # two-sided, of the t-test
    df: float  # degrees of freedom of the t-test
    # Two-sided p-value of the sign-flip test; nan where there are no paired units, and where pretrainings and draws are
    # crossed: flips of pretrainings would say nothing about other draws.
    flip_p: float
    flip_least: float  # least p-value that the sign-flip test can give with so many units; nan likewise
    units: str  # what the error covers, in words


def compare(a: pd.DataFrame, b: pd.DataFrame) -> Comparison:
    """Returns the difference of two systems, A minus B, with its tests.

    Systems that fine-tune the same pretrained models are compared within each (pretraining, draw) cell that both have;
    systems of unrelated models by Welch's test over pretrainings, at the draws that both have.

    Args:
        a: Runs of one system on one task at one size, as for `estimate`.
        b: Runs of the other.

    Raises:
        UserError: The two have no cell, or no draw, in common.
    """
    first, second = cell_means(a), cell_means(b)
    if not set(first.index) & set(second.index):
        return _compare_unrelated(a, b, *complete_together(first, second))
    shared = (first - second).dropna(how="all", axis=0).dropna(how="all", axis=1)
    if shared.empty:
        raise UserError(f"the two systems share pretrained models, but {_no_common_draw(first, second)}")
    cells = complete(shared)
    differences = cells.to_numpy()
    if cells.size == 1:
        pairs = pd.merge(in_cells(a, cells), in_cells(b, cells), on="seed", suffixes=("_a", "_b"))
        if len(pairs) < 2:  # other seeds: nothing to pair
            place = cells.index, cells.columns
            return _compare_unrelated(a, b, first.loc[place], second.loc[place])
        differences = (pairs["score_a"] - pairs["score_b"]).to_numpy()[:, None]
    models, draws = cells.shape
    units = f"{units_in_words(models, draws, len(differences))}, paired" + _left_out(a, b, cells, cells)
    return _comparison(mean_of_cells(differences), sign_flip_units(differences), units)


def _compare_unrelated(a: pd.DataFrame, b: pd.DataFrame, first: pd.DataFrame, second: pd.DataFrame) -> Comparison:
    """Returns the comparison of systems whose cells are not paired, in complete tables with the same draws."""
    left_out = _left_out(a, b, first, second)
    values, models, draws = (first.to_numpy(), second.to_numpy()), (len(first), len(second)), first.shape[1]
    if models == (1, 1) and draws > 1:
        differences = values[0] - values[1]
        units = f"{draws} draws, one pretraining each{left_out}"
        return _comparison(mean_of_cells(differences), sign_flip_units(differences), units)
    if models == (1, 1):
        values = seed_units(in_cells(a, first)), seed_units(in_cells(b, second))
        words = f"{len(values[0])} and {len(values[1])} seeds, one pretraining each, one draw (seeds only)"
    else:
        words = f"{models[0]} and {models[1]} pretrainings " + (f"x {draws} draws" if draws > 1 else "at one draw")
    if min(len(side) for side in values) == 1:
        words += "; no test, because one unit does not tell how much others would differ"
    return _comparison(difference_of_cells(*values), None, words + left_out)


def _comparison(found: StudentMean, flips: Array | None, units: str) -> Comparison:
    mean, low, high, p, df = map(float, (found.mean, *found.interval, found.p_value(), found.df))
    flip = (math.nan, math.nan) if flips is None else (float(sign_flip_p(flips)), least_sign_flip_p(len(flips)))
    return Comparison(mean, low, high, p, df, *flip, units)


def _left_out(a: pd.DataFrame, b: pd.DataFrame, first: pd.DataFrame, second: pd.DataFrame) -> str:
    """Returns in words how many runs of both systems are in no cell of their table."""
    return left_out_in_words(len(a) - len(in_cells(a, first)) + len(b) - len(in_cells(b, second)))


def complete_together(first: pd.DataFrame, second: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns both tables without missing cells and with the same draws.

    Raises:
        UserError: No draw is left.
    """
    unfinished = "the two systems have no draw of train rows with all pretrainings in common; finish the grid."
    for problem in (_no_common_draw(first, second), unfinished):
        shared = first.columns.intersection(second.columns)
        if shared.empty:
            raise UserError(problem)
        first, second = complete(first[shared]), complete(second[shared])
    return first, second


def _no_common_draw(first: pd.DataFrame, second: pd.DataFrame) -> str:
    lists = [", ".join(str(draw) for draw in table.columns) for table in (first, second)]
    return f"no draw of train rows (A: {lists[0]}; B: {lists[1]}); run both with the same data_seeds."


def difference_of_cells(a: Array, b: Array) -> StudentMean:
    """Returns the mean of A minus that of B, for unrelated pretrainings.

    One draw: Welch's test over pretrainings. Several: they are the same for both systems, so the variance of the
    difference over draws is added (`cross`). Variances are nan if one side has a single pretraining.

    Args:
        a: (..., P, D) complete cells of A.
        b: (..., Q, D) complete cells of B, at the same draws.
    """
    mean = a.mean(axis=(-2, -1)) - b.mean(axis=(-2, -1))
    if min(a.shape[-2], b.shape[-2]) == 1:
        nothing = np.full(mean.shape, math.nan)
        return StudentMean(mean, nothing, nothing)
    models = [component(side.mean(axis=-1)) for side in (a, b)]
    if a.shape[-1] == 1:
        part = add(models)
    else:
        draws = component(a.mean(axis=-2) - b.mean(axis=-2))
        part = cross(models, draws, interaction_variance(a) + interaction_variance(b))
    return StudentMean(mean, part.variance, np.asarray(part.df))


def sign_flip_units(differences: Array) -> Array | None:
    """Returns what a sign-flip test may flip, (..., n), of paired differences (..., P, D); None if both are several."""
    models, draws = differences.shape[-2:]
    return None if models > 1 and draws > 1 else differences.reshape(*differences.shape[:-2], models * draws)


def sign_flip_p(units: Array) -> Array:
    """Returns the two-sided p-values (...) of the sign-flip test that units (..., n) are symmetric about 0."""
    batch = max(1, 10**7 // units.size)  # bounds the memory for thousands of simulated worlds
    return np.asarray(permutation_test((units,), np.mean, permutation_type="samples", n_resamples=PERMUTATIONS,
                                       axis=-1, vectorized=True, batch=batch, rng=0).pvalue)  # fmt: skip


def least_sign_flip_p(units: int) -> float:
    """Returns the least p-value that `sign_flip_p` can give; four units never show less than 0.125."""
    return 2 / min(2.0**units, PERMUTATIONS + 1)


def holm(p: Sequence[float]) -> list[float]:
    """Returns p-values corrected for their number by Holm's method (1979); nan stays nan and does not count."""
    values = np.asarray(p, dtype=float)
    order = np.argsort(values)[: np.isfinite(values).sum()]  # nan comes last
    corrected = np.full(len(values), math.nan)
    corrected[order] = np.minimum(1, np.maximum.accumulate(values[order] * np.arange(len(order), 0, -1)))
    return [float(value) for value in corrected]


@dataclass(frozen=True)
class Interval:
    """Difference of two systems over dev examples, in points."""

    low: float  # lower end of the 95 % percentile interval
    high: float
    p: float  # twice the smaller share of resamples on either side of 0


def bootstrap_difference(task: Task, a: Sequence[Predictions], b: Sequence[Predictions]) -> Interval:
    """Returns the difference of two systems in the main metric, by the paired bootstrap over dev examples.

    Scores are averaged over the runs of a system. The same examples are drawn for all runs of both systems. p is at
    least 2 / (`RESAMPLES` + 1).

    Args:
        task: Names the metrics.
        a: Predictions of the runs of A: arrays `ids`, `labels`, `logits` or `scores`, `groups`, and where there are
            some `passages` and `answers`.
        b: Predictions of the runs of B, on the same rows.

    Raises:
        UserError: The predictions are of different examples.
    """
    signs = [1 / len(a)] * len(a) + [-1 / len(b)] * len(b)
    found = _bootstrap(task, [*a, *b], signs, RESAMPLES)
    above, below = (found.bootstrap_distribution >= 0).sum(), (found.bootstrap_distribution <= 0).sum()
    low, high = map(float, found.confidence_interval)
    return Interval(low, high, min(1.0, float(2 * (1 + min(below, above)) / (RESAMPLES + 1))))


def bootstrap_score(task: Task, predictions: Predictions, resamples: int = RESAMPLES) -> float:
    """Returns a run's standard error over dev examples in the main metric, in percent."""
    return float(_bootstrap(task, [predictions], [1.0], resamples).standard_error)


def _bootstrap(task: Task, runs: Sequence[Predictions], weights: Sequence[float], resamples: int) -> Any:
    """Returns scipy's bootstrap of a weighted sum of the runs' scores."""
    units = units_of_rows(runs, task.name)
    if len(units) < 2:
        raise UserError(f"task {task.name}: an error over examples needs two or more of them; there is {len(units)}.")
    scorers = [scorer(task, predictions) for predictions in runs]
    sizes, rows_of_all = np.array([len(rows) for rows in units]), np.concatenate(units)
    ends = np.cumsum(sizes)

    def weighted_sum(drawn: Array) -> float:
        drawn_sizes = sizes[drawn]
        places = np.arange(drawn_sizes.sum()) + np.repeat(ends[drawn] - np.cumsum(drawn_sizes), drawn_sizes)
        rows = rows_of_all[places]
        value = sum(weight * score(rows) for weight, score in zip(weights, scorers, strict=True))
        return round(100 * value, 9)  # equal systems differ by exactly 0

    everything = (np.arange(len(units)),)
    return bootstrap(everything, weighted_sum, n_resamples=resamples, vectorized=False, method="percentile", rng=0)


def units_of_rows(runs: Sequence[Predictions], task: str) -> list[Array]:
    """Returns the rows that are drawn together: those of one passage, else of one group, else each row by itself.

    Raises:
        UserError: The runs predict different examples.
    """
    first = runs[0]
    if any(not np.array_equal(first["ids"], other["ids"]) for other in runs):
        raise UserError(f"task {task}: the runs were evaluated on different examples; they cannot be compared.")
    shared = [first[name].tolist() for name in ("passages", "groups") if name in first and any(first[name].tolist())]
    names = shared[0] if shared else [""] * len(first["ids"])
    members: dict[Any, list[int]] = {}
    for row, name in enumerate(names):
        members.setdefault(name or row, []).append(row)  # "": a unit of its own
    return [np.array(rows) for rows in members.values()]


def scorer(task: Task, predictions: Predictions) -> Callable[[Array], float]:
    """Returns a function that gives the main metric on some rows, which may be repeated, as a fraction of 1.

    Rows of one group must come together, as `units_of_rows` draws them.
    """
    parts = [_metric_of_rows(name, task, predictions) for name in parts_of(task.metrics[0])]
    return lambda rows: float(np.mean([part(rows) for part in parts]))


def parts_of(metric: str) -> list[str]:
    """Returns the metrics that a mean such as "mean(acc,f1)" is of, or the only one."""
    return metric.removeprefix("mean(").removesuffix(")").split(",")


def _metric_of_rows(name: str, task: Task, predictions: Predictions) -> Callable[[Array], float]:
    """Returns one metric as a function of rows, with everything computed beforehand that does not depend on them."""
    labels = predictions["labels"]
    outputs = predictions["logits"] if "logits" in predictions else predictions["scores"][:, None]
    if name in FROM_COUNTS and labels.ndim == 1:  # a thousand times as fast as scikit-learn
        classes, of_counts = outputs.shape[1], FROM_COUNTS[name]
        pairs = labels.astype(int) * classes + outputs.argmax(axis=1)
        return lambda rows: of_counts(np.bincount(pairs[rows], minlength=classes**2).reshape(classes, -1).astype(float))
    if name in ("em", "record_f1", "record_em"):
        first, values = _values_of_groups(name, predictions)
        return lambda rows: float(values[rows].sum() / first[rows].sum())
    guesses, metric = metrics.predictions_of(task, outputs), metrics.METRICS[name]
    return lambda rows: metric(labels[rows], guesses[rows])


def _values_of_groups(name: str, predictions: Predictions) -> tuple[Array, Array]:
    """Returns 1 at the first row of each group (N,), and the group's own score there; both 0 elsewhere."""
    labels, outputs, groups = predictions["labels"], predictions["logits"], pd.Series(predictions["groups"])
    answers = predictions.get("answers", np.arange(len(labels)).astype(str))  # without them F1 is the exact match
    first = ~groups.duplicated().to_numpy()
    if name == "em":
        values = pd.Series(labels == outputs.argmax(axis=1)).groupby(groups).transform("all")
    else:
        part = ("record_f1", "record_em").index(name)
        values = groups.map({
            group: metrics.record(labels[rows], outputs[rows], [group] * len(rows), answers[rows].tolist())[part]
            for group, rows in groups.groupby(groups).indices.items()
        })  # fmt: skip
    return first, first * values.to_numpy(dtype=float)


def _f1_of_classes(counts: Array) -> Array:
    """Returns the F1 of each class (C,), 0 where it is neither a label nor predicted."""
    return np.asarray(2 * counts.diagonal() / np.maximum(counts.sum(axis=0) + counts.sum(axis=1), 1))


def _f1(counts: Array) -> float:
    return float(_f1_of_classes(counts)[1])


def _macro_f1(counts: Array) -> float:
    return float(_f1_of_classes(counts)[counts.sum(axis=0) + counts.sum(axis=1) > 0].mean())


def _matthews(counts: Array) -> float:
    total, labelled, predicted = counts.sum(), counts.sum(axis=1), counts.sum(axis=0)
    scale = math.sqrt((total**2 - labelled @ labelled) * (total**2 - predicted @ predicted))
    return float((counts.trace() * total - labelled @ predicted) / scale) if scale else 0.0


def _accuracy(counts: Array) -> float:
    return float(counts.trace() / counts.sum())


# Metrics that are functions of the confusion matrix (label, prediction).
FROM_COUNTS = {"acc": _accuracy, "f1": _f1, "f1a": _f1, "macro_f1": _macro_f1, "matthews": _matthews}
