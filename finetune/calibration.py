"""Calibrates a model's probabilities on its validation split: one temperature, and thresholds for several labels.

A temperature T (Guo et al., 2017) divides the outputs. It is folded into the classifier, W / T and b / T, so that
whatever loads the model has the calibrated probabilities; the most likely class stays the same.
"""

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_expit, log_softmax, softmax
from sklearn.metrics import f1_score

from finetune.tasks import Array, Task

FEWEST = 10  # validation rows for a temperature
FEWEST_POSITIVE = 5  # validation rows with a label for its threshold
BINS = 15  # of the calibration error
SPREAD = 0.5  # standard deviation of the prior of log T: few rows without an error ask for T = 0


def fit_temperature(task: Task, outputs: Array, labels: Array) -> float:
    """Returns the T that makes labels (N,), or (N, C), the most likely; 1.0 for scores, and for fewer than 10 rows."""
    if task.is_regression or len(labels) < FEWEST:
        return 1.0

    def cost(log_t: float) -> float:
        scaled = outputs.astype(np.float64) / np.exp(log_t)
        if task.multi_label:
            likelihood = log_expit(np.where(labels == 1, scaled, -scaled)).sum()
        else:
            rows = np.arange(len(labels))
            likelihood = log_softmax(scaled, axis=1)[rows, labels.astype(int)].sum()
        return float(0.5 * (log_t / SPREAD) ** 2 - likelihood)

    return float(np.exp(minimize_scalar(cost, bounds=(-3, 3), method="bounded").x))


def fit_thresholds(outputs: Array, labels: Array) -> list[float]:
    """Returns the probability from which on each label (N, C) is given, that with the best F1; 0.5 for few rows."""
    thresholds = []
    for column, marks in zip(expit(outputs.astype(np.float64)).T, labels.T, strict=True):
        best = 0.5
        if marks.sum() >= FEWEST_POSITIVE:
            cuts = np.unique(np.append(column, 0.5))
            middles = [0.5, *((cuts[1:] + cuts[:-1]) / 2)]
            scores = [f1_score(marks, column >= cut, zero_division=0.0) for cut in middles]
            best = float(middles[int(np.argmax(scores))])
        thresholds.append(round(min(max(best, 1e-9), 1 - 1e-9), 9))
    return thresholds


def calibration_error(outputs: Array, labels: Array) -> float:
    """Returns the expected calibration error (Guo et al., 2017) of logits (N, C) for class indices (N,), in 15 bins.

    It is the mean over the rows of |accuracy - confidence| of their bin; the confidence is the probability of the
    predicted class, and a bin holds its upper end.
    """
    probabilities = softmax(outputs.astype(np.float64), axis=1)
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    gaps = np.bincount(np.ceil(confidence * BINS).astype(int), right - confidence)
    return float(np.abs(gaps).sum() / len(labels))
