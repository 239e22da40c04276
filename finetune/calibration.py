"""Calibration: is a probability of 0.8 right in 8 of 10 cases?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy.special import softmax

Array = np.ndarray[Any, np.dtype[Any]]
EDGES = np.linspace(0, 1, 16)  # of 15 bins, as Guo et al. (2017); a bin holds its upper end


def reliability(logits: Array, labels: Array) -> pd.DataFrame:
    """Returns a row for each bin of the predicted class's probability that has examples, of logits (N, C).

    Columns: confidence (mean of that probability), accuracy, share (of the examples).
    """
    probabilities = softmax(np.asarray(logits, dtype=np.float64), axis=1)
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    frame = pd.DataFrame({"confidence": confidence, "accuracy": right})
    bins = frame.groupby(pd.cut(frame["confidence"], EDGES), observed=True)
    return bins.mean().assign(share=bins.size() / len(frame))


def expected_calibration_error(bins: pd.DataFrame) -> float:
    """Returns the mean of |accuracy - confidence| over the examples of `reliability`."""
    return float(((bins["accuracy"] - bins["confidence"]).abs() * bins["share"]).sum())
