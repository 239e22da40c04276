"""The official GLUE metrics, by scikit-learn and scipy, all as fractions of 1."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from finetune.tasks import Task

Array = np.ndarray[Any, np.dtype[Any]]


def accuracy(labels: Array, predictions: Array) -> float:
    """Share of equal labels."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels, predictions))


def f1(labels: Array, predictions: Array) -> float:
    """F1 of class 1; 0 when nothing is predicted or labelled 1."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, zero_division=0.0))


def matthews(labels: Array, predictions: Array) -> float:
    """Matthews' correlation; 0 when all predictions are equal."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predictions))


def pearson(labels: Array, predictions: Array) -> float:
    """Pearson's correlation; 0 where it is undefined (constant predictions), as Matthews' is."""
    from scipy.stats import pearsonr

    return _zero_if_undefined(pearsonr, labels, predictions)


def spearman(labels: Array, predictions: Array) -> float:
    """Spearman's rank correlation; 0 where it is undefined (constant predictions), as Matthews' is."""
    from scipy.stats import spearmanr

    return _zero_if_undefined(spearmanr, labels, predictions)


METRICS: dict[str, Callable[[Array, Array], float]] = {
    "acc": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


def predictions_of(task: Task, outputs: Array) -> Array:
    """Class indices of logits (N, C), or the scores (N,) of a regression's outputs (N, 1)."""
    return outputs[:, 0] if task.is_regression else outputs.argmax(axis=1)


def score(task: Task, labels: Array, outputs: Array, parts: Sequence[str]) -> dict[str, float]:
    """All metrics of the task, the main one first.

    Args:
        labels: (N,) class indices or scores.
        outputs: (N, C) logits, or (N, 1) for regression.
        parts: the part of the dev set each row belongs to; with several parts each metric is reported for each as
            `name_part` as well, the plain name being that of all rows pooled.
    """
    predictions = predictions_of(task, outputs)
    values = {name: METRICS[name](labels, predictions) for name in task.metrics}
    for part in sorted(set(parts) - {""}):
        rows = np.array([own == part for own in parts])
        values |= {f"{name}_{part}": METRICS[name](labels[rows], predictions[rows]) for name in task.metrics}
    return values


def _zero_if_undefined(correlation: Callable[[Array, Array], Any], labels: Array, predictions: Array) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both warn about constant input, which the value 0 already says
        value = float(correlation(labels, predictions)[0])
    return value if math.isfinite(value) else 0.0
