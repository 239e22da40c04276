"""Calibrates a model's probabilities on its validation split: one temperature, and thresholds for several labels.

A temperature T (Guo et al., 2017) divides the outputs. It is folded into the classifier, W / T and b / T, so that
whatever loads the model has the calibrated probabilities; the most likely class stays the same.
"""

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_expit, log_softmax

from finetune.tasks import Array, Task
from multicls.systems import best_thresholds

FEWEST = 10  # validation rows for a temperature
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
    """Returns the probability above which each label (N, C) is given, that with the best F1; 0.5 for few rows."""
    thresholds = expit(best_thresholds(outputs.astype(np.float64), labels, default=0.0))
    return np.clip(thresholds, 1e-9, 1 - 1e-9).tolist()
