"""Metrics against values worked out by hand."""

import math
from typing import Any

import numpy as np
import pytest

from finetune.metrics import majority_output, metric_values, score_predictions
from finetune.tasks import TASKS, Example, Task
from multicls.errors import UserError


def score(task: Task, labels: Any, outputs: Any, **columns: list[str]) -> dict[str, float]:
    """Returns the scores of rows with these labels, and parts, groups or answers if some are passed."""
    rows = []
    for n, label in enumerate(labels):
        fields: Any = {name: values[n] for name, values in columns.items()}
        fields |= {"labels": tuple(label)} if np.ndim(label) else {}
        rows.append(Example("", (), 0.0 if np.ndim(label) else label, **fields))
    return score_predictions(task, rows, outputs)


def test_parts_are_pooled_and_reported() -> None:
    labels, parts = np.array([0, 1, 2, 0]), ["m", "m", "m", "mm"]
    found = score(TASKS["mnli"], labels, np.eye(3)[[0, 1, 0, 0]], part=parts)
    assert found == pytest.approx({"acc": 3 / 4, "acc_m": 2 / 3, "acc_mm": 1.0})
    assert next(iter(found)) == "acc"


def logits(predicted: list[int], classes: int) -> np.ndarray:
    return np.eye(classes)[predicted]


def test_cb_is_the_mean_of_accuracy_and_macro_f1() -> None:
    labels, predicted = np.array([0, 0, 0, 1, 1, 2]), [0, 0, 1, 1, 1, 0]
    # F1: class 0 tp 2 fp 1 fn 1: 2/3; class 1 tp 2 fp 1 fn 0: 4/5; class 2 never found: 0
    macro, acc = (2 / 3 + 4 / 5 + 0) / 3, 4 / 6
    found = score(TASKS["cb"], labels, logits(predicted, 3))
    expected = {"mean(acc,macro_f1)": (acc + macro) / 2, "acc": acc, "macro_f1": macro}
    assert found == pytest.approx(expected)


def test_multirc() -> None:
    groups = ["0:0", "0:0", "0:0", "0:1", "0:1", "1:0"]
    # tp 2, fp 1, fn 1; one question all right
    labels, predicted = np.array([1, 0, 1, 1, 0, 0]), [1, 0, 0, 1, 0, 1]
    found = score(TASKS["multirc"], labels, logits(predicted, 2), group=groups)
    assert found == pytest.approx({"mean(f1a,em)": (2 / 3 + 1 / 3) / 2, "f1a": 2 / 3, "em": 1 / 3})


def test_record() -> None:
    groups = ["q1", "q1", "q1", "q2", "q2", "q3", "q3"]
    answers = ["New York", "The New York City", "Bob", "A. Smith", "smith", "Xa", "Yo Zu"]
    labels = np.array([0, 1, 0, 1, 0, 0, 1])
    margins = np.array([3.0, 1.0, 2.0, 0.0, 5.0, 1.0, 0.5])
    outputs = np.stack([-2 * margins, -margins], axis=1)
    # q1: "new york" for "new york city", F1 2 * 2 / (2 + 3); q2: "smith" is "A. Smith" by normalisation; q3: wrong
    found = score(TASKS["record"], labels, outputs, group=groups, answer=answers)
    f1, em = (4 / 5 + 1 + 0) / 3, 1 / 3
    expected = {"mean(record_f1,record_em)": (f1 + em) / 2, "record_f1": f1, "record_em": em}
    assert found == pytest.approx(expected)
    two = np.array([1, 1, 0, 1, 0, 0, 1])  # with two right entities the better one counts
    found = score(TASKS["record"], two, outputs, group=groups, answer=answers)
    assert found["record_f1"] == pytest.approx(2 / 3)


def test_values_of_questions_and_queries_have_their_variance() -> None:
    """MultiRC's rows stand for questions of unequal size: 40 questions, two thirds of them right."""
    draw, rows = np.random.default_rng(0), list[Example]()
    for question in range(40):
        for _ in range(draw.integers(2, 6)):
            rows.append(Example(f"{len(rows)}", (), 1.0, group=f"{question}"))
    right = draw.random(40) < 2 / 3
    outputs = np.eye(2)[[int(right[int(row.group)]) for row in rows]]
    em = Task("em", (), ("0", "1"), ("em",))
    values = metric_values(em, "em", rows, outputs)
    groups = np.array([row.group for row in rows])
    assert values.mean() == pytest.approx(right.mean())
    sums = [(values - values.mean())[groups == f"{question}"].sum() for question in range(40)]
    assert np.std(sums) * 40 / len(rows) == pytest.approx(right.std())


@pytest.mark.parametrize(
    ("task", "labels", "outputs", "expected"),
    [
        ("copa", [0, 0], [[0.5, 0.1], [0.2, 0.3]], {"acc": 0.5}),
        ("stsb", [1.0, 3.0, 5.0], [[0.1], [0.5], [0.9]], {"spearman": 1.0, "pearson": 1.0}),
        ("sts", [1.0], [[0.1]], {"pearson": 0.0, "spearman": 0.0}),  # one row has no correlation
    ],
)
def test_outputs_of_choices_and_regressions(
    task: str, labels: Any, outputs: Any, expected: dict[str, float]
) -> None:
    found = score(TASKS[task], np.array(labels), np.array(outputs))
    assert found == pytest.approx(expected)


def majority_scores(task: Task, train: list[Example], dev: list[Example]) -> dict[str, float]:
    output = majority_output(task, train, dev)
    return score_predictions(task, dev, np.tile(output, (len(dev), 1)))


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_outputs_that_are_not_finite_have_no_score(broken: float) -> None:
    outputs = np.array([[broken, 0.0], [1.0, 0.0]])
    with pytest.raises(UserError, match="task rte: .* for 1 of 2 rows are not finite numbers"):
        score(TASKS["rte"], np.array([0, 1]), outputs)


@pytest.mark.parametrize(
    ("task", "train", "dev", "metric", "expected"),
    [
        ("rte", (1, 1, 0), (0, 0, 0, 1), "acc", 0.25),
        ("rte", (1, 0), (1, 1, 1, 0), "acc", 0.75),
        ("copa", (1, 1), (0, 0, 0, 1), "acc", 0.75),
        ("stsb", (1, 4), (0, 5), "spearman", 0.0),
        ("multirc", (0, 0, 1), (0, 1), "em", 0.5),
    ],
)
def test_majority(task: str, train: Any, dev: Any, metric: str, expected: float) -> None:
    rows = [[Example("", (), x, group=f"{n}") for n, x in enumerate(part)] for part in (train, dev)]
    assert majority_scores(TASKS[task], *rows)[metric] == pytest.approx(expected)
