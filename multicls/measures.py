"""Metrics of predictions. Each is the mean of one value per row, which is what intervals and paired tests need.

The value of a row is the metric plus the row's influence on it (Hampel, 1974), N times what the row changes in it. For
accuracy that is 1 or 0; influences of a ratio or a correlation sum to 0 over the rows.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from multicls.labels import LabelType

Array = np.ndarray[Any, np.dtype[Any]]
METRICS: dict[LabelType, tuple[str, ...]] = {  # the first is the main metric unless another is set
    "class": ("acc", "macro_f1"),
    "multi_label": ("micro_f1", "macro_f1", "exact_match"),
    "score": ("spearman", "pearson", "r2", "mae"),
}
LOWER_IS_BETTER = ("mae",)
SHARES = {"", "acc", "exact_match", "f1", "macro_f1", "micro_f1"}  # "": any share of 1
SHARES |= {"f1a", "em", "record_f1", "record_em"}  # of the benchmarks
RANGES = {"r2": (-np.inf, 1.0), "mae": (0.0, np.inf)}  # others are shares or correlations


def predictions_of(kind: LabelType, outputs: Array) -> Array:
    """Returns class indices (N,), or scores (N,), or 0 and 1 (N, C) of several labels, from outputs (N, C).

    A row has the labels whose output is above 0.
    """
    if kind == "score":
        return outputs[:, 0]
    return outputs.argmax(axis=1) if kind == "class" else (outputs > 0).astype(int)


def row_values(metric: str, targets: Array, predicted: Array) -> Array:
    """Returns one value per row, (N,), whose mean is the metric; 0 where it is undefined.

    Args:
        targets: Class indices (N,), scores (N,), or 0 and 1 (N, C).
        predicted: The same of the predictions.
    """
    with np.errstate(all="ignore"):
        values = MEASURES[metric](targets, predicted)
    return values if np.isfinite(values).all() else np.zeros(len(targets))


def score(metric: str, targets: Array, predicted: Array) -> float:
    """Returns the metric of predictions, as a fraction of 1; MAE is in the unit of the labels."""
    return float(row_values(metric, targets, predicted).mean())


def range_of(metric: str) -> tuple[float, float]:
    """Returns the lowest and the highest value that a metric can have; "mean(a,b)" is that of other metrics."""
    if metric in RANGES:
        return RANGES[metric]
    is_share = set(metric.removeprefix("mean(").rstrip(")").split(",")) <= SHARES
    return (0.0, 1.0) if is_share else (-1.0, 1.0)


def in_words(metric: str, value: float, sign: str = "") -> str:
    """Returns a metric's value in percent, or MAE, in the unit of the labels; `sign` is "+" for differences."""
    if metric not in LOWER_IS_BETTER:
        return f"{100 * value:{sign}.1f}"
    return f"{value:{sign}.3g}" if abs(value) < 1000 else f"{value:{sign},.0f}"


def larger_is_better(metric: str, value: float) -> float:
    """Returns a metric's value, or minus it if it is the better the lower."""
    return -value if metric in LOWER_IS_BETTER else value


def _equal(targets: Array, predicted: Array) -> Array:
    same = targets == predicted
    return (same if same.ndim == 1 else same.all(axis=1)).astype(float)


def _correlation(x_NC: Array, y_NC: Array) -> Array:
    """Returns the values of sum cov(x_c, y_c) / sqrt(sum var(x_c) sum var(y_c)): Pearson's, and Matthews'."""
    x_NC, y_NC = x_NC - x_NC.mean(axis=0), y_NC - y_NC.mean(axis=0)
    products = (x_NC * y_NC).sum(axis=1)
    x_squares, y_squares = np.square(x_NC).sum(axis=1), np.square(y_NC).sum(axis=1)
    spread = np.sqrt(x_squares.mean() * y_squares.mean())
    correlation = products.mean() / spread
    lost = x_squares / x_squares.mean() + y_squares / y_squares.mean()
    values: Array = correlation + products / spread - correlation * lost / 2
    return values


def _pearson(targets: Array, predicted: Array) -> Array:
    return _correlation(targets[:, None], predicted[:, None])


def _spearman(targets: Array, predicted: Array) -> Array:
    from scipy.stats import rankdata

    return _pearson(rankdata(targets), rankdata(predicted))


def _one_hot(targets: Array, predicted: Array) -> tuple[Array, Array]:
    """Returns marks (N, C) of labels and of predictions, of class indices or of marks."""
    if targets.ndim == 2:
        return targets.astype(float), predicted.astype(float)
    classes = np.union1d(targets, predicted)
    return (targets[:, None] == classes).astype(float), (predicted[:, None] == classes).astype(
        float
    )


def _matthews(targets: Array, predicted: Array) -> Array:
    return _correlation(*_one_hot(targets, predicted))


def _f1(targets_NC: Array, predicted_NC: Array) -> Array:
    """Returns the values of each column's F1, (N, C): a ratio of the means of 2 t p and t + p."""
    both, either = 2 * targets_NC * predicted_NC, targets_NC + predicted_NC
    f1 = both.mean(axis=0) / either.mean(axis=0)
    values: Array = f1 + (both - f1 * either) / either.mean(axis=0)
    return values


def _macro_f1(targets: Array, predicted: Array) -> Array:
    t_NC, p_NC = _one_hot(targets, predicted)
    occur = (t_NC + p_NC).any(axis=0)  # a class without label and prediction does not count
    values: Array = _f1(t_NC[:, occur], p_NC[:, occur]).sum(axis=1) / occur.sum()
    return values


def _micro_f1(targets: Array, predicted: Array) -> Array:
    t_NC, p_NC = _one_hot(targets, predicted)
    both, either = 2 * (t_NC * p_NC).sum(axis=1), (t_NC + p_NC).sum(axis=1)
    f1 = both.mean() / either.mean()
    return np.asarray(f1 + (both - f1 * either) / either.mean())


def _second_f1(targets: Array, predicted: Array) -> Array:
    return _f1((targets == 1.0)[:, None] * 1.0, (predicted == 1.0)[:, None] * 1.0)[:, 0]


def _r2(targets: Array, predicted: Array) -> Array:
    errors, squares = np.square(targets - predicted), np.square(targets - targets.mean())
    share = errors.mean() / squares.mean()
    values: Array = 1 - share - (errors - share * squares) / squares.mean()
    return values


MEASURES: dict[str, Callable[[Array, Array], Array]] = {
    "acc": _equal,
    "exact_match": _equal,
    "f1": _second_f1,
    "macro_f1": _macro_f1,
    "micro_f1": _micro_f1,
    "matthews": _matthews,
    "pearson": _pearson,
    "spearman": _spearman,
    "r2": _r2,
    "mae": lambda targets, predicted: np.abs(targets - predicted),
}
