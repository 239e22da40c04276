"""Calibration (is 0.8 right in 8 of 10 cases?): errors, Brier score, likelihood, temperature scaling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

Array = np.ndarray[Any, np.dtype[Any]]
NUM_BINS = 15  # as Guo et al. (2017)
LOWEST, HIGHEST = 0.05, 20.0  # temperatures
FLAT = 1e-4  # nats: a bound that is worse by less is as good


@dataclass(frozen=True)
class Bins:
    """A reliability diagram: examples by the probability of the predicted class; each array is (bins,)."""

    count: Array  # examples
    confidence: Array  # mean probability of the predicted class, nan for an empty bin
    accuracy: Array  # share of right predictions, nan for an empty bin

    @property
    def error(self) -> float:
        """Expected calibration error: the mean of |accuracy - confidence|, weighted by the examples of the bins."""
        filled = self.count > 0
        gaps = np.abs(self.accuracy[filled] - self.confidence[filled])
        return float((gaps * self.count[filled]).sum() / self.count.sum())


def log_probabilities(logits: Array, temperature: float = 1.0) -> Array:
    """Returns the log-softmax (N, C) in float64, safe for logits of any size."""
    return np.asarray(log_softmax(np.asarray(logits, dtype=np.float64) / temperature, axis=1))


def confidences(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Returns the probability of each predicted class (N,), and True where it is the label (N,), from logits (N, C)."""
    log_p = log_probabilities(logits)
    return np.exp(log_p.max(axis=1)), log_p.argmax(axis=1) == labels


def reliability(confidence: Array, correct: Array, num_bins: int = NUM_BINS, equal_mass: bool = False) -> Bins:
    """Returns bins of equal width over [0, 1], or of equal mass: as many examples in each.

    A bin of equal width holds its upper end; equally sure examples may fall into neighbouring bins of equal mass.

    Arguments (N,) are those that `confidences` returns.
    """
    if not equal_mass:
        index = np.clip(np.ceil(confidence * num_bins).astype(int) - 1, 0, num_bins - 1)
    else:
        index = np.empty(len(correct), dtype=int)
        index[np.argsort(confidence, kind="stable")] = np.arange(len(correct)) * num_bins // len(correct)
    count, sure, right = (np.bincount(index, weights, num_bins) for weights in (None, confidence, correct))
    with np.errstate(invalid="ignore"):
        return Bins(count, sure / count, right / count)


class Temperature(NamedTuple):
    """A temperature to divide logits by."""

    value: float  # in LOWEST..HIGHEST
    at_bound: bool  # the likelihood is best at a bound, as where all held-out rows are right: the value means nothing


def pooled_temperature(runs: Sequence[tuple[Array, Array]]) -> Temperature:
    """Returns the one temperature with the best mean likelihood over several runs (Guo et al., 2017).

    A run's held-out rows are few: with 20 of them all right, its own best temperature is 0. So one is fitted for all
    runs of a system. It scales all logits of an example alike, so that no prediction changes.

    Args:
        runs: logits (N, C) and labels (N,) of each run, on rows that it did not learn from.
    """

    def loss(log_t: float) -> float:
        return float(np.mean([negative_log_likelihood(logits, labels, math.exp(log_t)) for logits, labels in runs]))

    bounds = (math.log(LOWEST), math.log(HIGHEST))
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-6})
    at_bound = min(map(loss, bounds)) < loss(found.x) + FLAT
    return Temperature(math.exp(found.x), at_bound)


def brier_score(logits: Array, labels: Array) -> float:
    """Returns the mean squared distance of the probabilities and the one-hot label, summed over classes: 0 to 2."""
    one_hot = np.eye(logits.shape[1])[np.asarray(labels, dtype=int)]
    return float(((np.exp(log_probabilities(logits)) - one_hot) ** 2).sum(axis=1).mean())


def negative_log_likelihood(logits: Array, labels: Array, temperature: float = 1.0) -> float:
    """Returns the mean of -ln p(label), in nats."""
    rows = np.arange(len(labels))
    return float(-log_probabilities(logits, temperature)[rows, np.asarray(labels, dtype=int)].mean())


def calibration(logits: Array, labels: Array, temperature: float = 1.0) -> dict[str, float]:
    """Returns `ece` (equal width), `ece_mass` (equal mass), `brier` and `nll` of logits divided by a temperature."""
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    predicted = confidences(scaled, labels)
    return {
        "ece": reliability(*predicted).error,
        "ece_mass": reliability(*predicted, equal_mass=True).error,
        "brier": brier_score(scaled, labels),
        "nll": negative_log_likelihood(scaled, labels),
    }
