"""Metrics against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from finetune.metrics import METRICS, score
from finetune.tasks import TASKS

LABELS, PREDICTED = np.array([1, 1, 1, 0, 0]), np.array([1, 1, 0, 0, 1])  # tp 2, fn 1, tn 1, fp 1


@pytest.mark.parametrize(("name", "expected"), [("acc", 3 / 5), ("f1", 2 / 3), ("matthews", (2 - 1) / math.sqrt(36))])
def test_classes(name: str, expected: float) -> None:
    assert METRICS[name](LABELS, PREDICTED) == pytest.approx(expected, abs=1e-12)


def test_f1_is_that_of_class_one() -> None:
    assert METRICS["f1"](1 - LABELS, 1 - PREDICTED) == pytest.approx(1 / 2)


def test_correlations() -> None:
    # deviations -1 0 1 and -4/3 -1/3 5/3: 3 / sqrt(2 * 42/9); the ranks agree
    first, second = np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 4.0])
    assert METRICS["pearson"](first, second) == pytest.approx(3 / math.sqrt(2 * 42 / 9))
    assert METRICS["spearman"](first, second) == pytest.approx(1.0)
    assert METRICS["spearman"](first, np.array([1.0, 9.0, 2.0])) == pytest.approx(1 - 6 * 2 / (3 * 8))


@pytest.mark.parametrize("name", ["matthews", "pearson", "spearman", "f1"])
@pytest.mark.filterwarnings("error")
def test_constant_predictions_score_zero(name: str) -> None:
    assert METRICS[name](np.array([0, 1, 1]), np.array([0, 0, 0])) == 0.0


def test_parts_are_pooled_and_reported() -> None:
    labels, parts = np.array([0, 1, 2, 0]), ["m", "m", "m", "mm"]
    outputs = np.eye(3)[[0, 1, 0, 0]]
    expected = {"acc": 3 / 4, "acc_m": 2 / 3, "acc_mm": 1.0}
    assert score(TASKS["mnli"], labels, outputs, parts) == pytest.approx(expected)
    assert next(iter(score(TASKS["mnli"], labels, outputs, parts))) == "acc"


def test_main_metrics_of_the_paper() -> None:
    main = {name: task.metrics[0] for name, task in TASKS.items() if task.hub}
    assert main == {
        "cola": "matthews", "sst2": "acc", "mrpc": "f1", "stsb": "spearman", "rte": "acc", "wnli": "acc", "qnli": "acc",
        "qqp": "f1", "mnli": "acc",
    }  # fmt: skip


def test_regression_reads_the_only_output() -> None:
    outputs = np.array([[0.1], [0.5], [0.9]])
    assert score(TASKS["stsb"], np.array([1.0, 2.0, 5.0]), outputs, ["", "", ""])["spearman"] == pytest.approx(1.0)
