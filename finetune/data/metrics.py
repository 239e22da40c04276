"""The metrics of the benchmarks and of own rows, by scikit-learn and scipy, all as fractions of 1."""

from __future__ import annotations

import math
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from finetune.data.examples import LabeledExample
from finetune.data.tasks import Task
from multicls.errors import UserError

Array = np.ndarray[Any, np.dtype[Any]]


def _f1(labels: Array, predictions: Array, average: str) -> float:
    """Returns the F1 of class 1 ("binary"), of all labels together ("micro"), or the mean over classes ("macro").

    A class that is neither labelled nor predicted does not count; without any class that counts the F1 is 0.
    """
    value = float(f1_score(labels, predictions, average=average, zero_division=math.nan))
    return value if math.isfinite(value) else 0.0


def _correlation(labels: Array, predictions: Array, kind: Callable[[Array, Array], Any]) -> float:
    """Returns a correlation; 0 if it is undefined (constant predictions), as Matthews' is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about constant input, which the value 0 already says
        value = float(kind(labels, predictions)[0]) if len(labels) > 1 else 0.0
    return value if math.isfinite(value) else 0.0


METRICS: dict[str, Callable[[Array, Array], float]] = {
    "acc": lambda labels, predictions: float(accuracy_score(labels, predictions)),
    "exact_match": lambda labels, predictions: float(accuracy_score(labels, predictions)),  # all labels of a row right
    "f1": partial(_f1, average="binary"),
    "f1a": partial(_f1, average="binary"),  # MultiRC: over all answers of all questions
    "macro_f1": partial(_f1, average="macro"),
    "micro_f1": partial(_f1, average="micro"),
    "matthews": lambda labels, predictions: float(matthews_corrcoef(labels, predictions)),
    "pearson": partial(_correlation, kind=pearsonr),
    "spearman": partial(_correlation, kind=spearmanr),
}


def exact_match(labels: Array, predictions: Array, groups: Sequence[str]) -> float:
    """Returns the share of groups in which each row is right (MultiRC's EM: all answers of a question)."""
    wrong = {group for group, right in zip(groups, labels == predictions, strict=True) if not right}
    return 1 - len(wrong) / len(set(groups))


def gender_parity(predictions: Array, groups: Sequence[str]) -> float:
    """Returns the share of minimal pairs with equal predictions (AX-g)."""
    kinds = Counter(group for group, _ in set(zip(groups, predictions.tolist(), strict=True)))
    return sum(count == 1 for count in kinds.values()) / len(kinds)


def choose_answers(outputs: Array, groups: Sequence[str]) -> dict[str, int]:
    """Returns the row of each group whose class 1 is the most likely by the outputs (N, 2).

    In ReCoRD it is the entity chosen for a query.
    """
    margins = (outputs[:, 1] - outputs[:, 0]).tolist()
    best: dict[str, int] = {}
    for row, group in enumerate(groups):
        if group not in best or margins[row] > margins[best[group]]:
            best[group] = row
    return best


def record(labels: Array, outputs: Array, groups: Sequence[str], answers: Sequence[str]) -> tuple[float, float]:
    """Returns ReCoRD's token F1 and exact match: by its normalisation, the best over a query's right entities.

    Both are means over queries. A query none of whose entities is right scores 0.

    Args:
        labels: (N,) 1 for right entities; `outputs` (N, 2) are logits.
        groups: (N,) the query of each row; `answers` (N,) its entity.
    """
    golds: dict[str, list[str]] = {}
    for label, group, answer in zip(labels.tolist(), groups, answers, strict=True):
        if label == 1:
            golds.setdefault(group, []).append(_normalised(answer))
    chosen = choose_answers(outputs, groups)
    answer_of = {group: _normalised(answers[row]) for group, row in chosen.items()}
    f1s = [max((_token_f1(answer, gold) for gold in golds.get(group, [])), default=0.0)
           for group, answer in answer_of.items()]  # fmt: skip
    matches = [answer in golds.get(group, []) for group, answer in answer_of.items()]
    return sum(f1s) / len(f1s), sum(matches) / len(matches)


def predictions_of(task: Task, outputs: Array) -> Array:
    """Returns class indices (N,) of logits (N, C), zeros and ones (N, C) for multi-label tasks, or scores (N,)."""
    if task.multi_label:
        return (outputs > 0).astype(int)
    return outputs[:, 0] if task.is_regression else outputs.argmax(axis=1)


def score_examples(task: Task, examples: Sequence[LabeledExample], outputs: Array) -> dict[str, float]:
    """Returns `score` of the outputs (N, C) for these rows."""
    labels = np.array([example.labels if task.multi_label else example.label for example in examples])
    parts = [example.part for example in examples]
    groups, answers = [example.group for example in examples], [example.answer for example in examples]
    return score(task, labels, outputs, parts, groups, answers)


def score(
    task: Task, labels: Array, outputs: Array, parts: Sequence[str] = (), groups: Sequence[str] = (),
    answers: Sequence[str] = (),
) -> dict[str, float]:  # fmt: skip
    """Returns all metrics of the task, the main one first.

    Args:
        task: names the metrics.
        labels: (N,) class indices or scores; (N, C) 0 and 1 if a row has several labels.
        outputs: (N, C) logits, or (N, 1) for regression.
        parts: (N,) part of the dev set that each row belongs to. Each part's metrics are returned as `name_part`; the
            plain name is the metric over all rows.
        groups: (N,) `LabeledExample.group` of each row, for the tasks that have it.
        answers: (N,) `LabeledExample.answer` of each row (ReCoRD); without it F1 is taken to be the exact match.

    Raises:
        UserError: Some outputs are not finite.
    """
    if broken := int((~np.isfinite(outputs)).any(axis=1).sum()):
        raise UserError(
            f"task {task.name}: the model's outputs for {broken} of {len(outputs)} rows are not finite numbers (NaN or "
            "infinity), so they have no score. Lower train.learning_rate, or check the checkpoint's weights."
        )
    values = _values(task, labels, outputs, groups, answers)
    for part in sorted(set(parts) - {""}):
        rows = np.array([own == part for own in parts])
        values |= {f"{name}_{part}": value for name, value in _values(task, labels[rows], outputs[rows]).items()}
    return values


def constant_scores(task: Task, train: Sequence[LabeledExample], dev: Sequence[LabeledExample]) -> dict[str, float]:
    """Returns the scores on dev of one constant answer, learnt from the labels of train.

    It is the most frequent class; a regression's mean; the first choice; the labels of more than half of the rows.
    """
    if task.multi_label:
        output = np.mean([example.labels for example in train], axis=0) - 0.5
    elif task.is_regression:
        output = np.array([np.mean([example.label for example in train]) / task.label_scale])
    else:
        counts = np.bincount([int(example.label) for example in train], minlength=task.num_labels)
        output = np.eye(task.num_choices or task.num_labels)[0 if task.num_choices else counts.argmax()]
    return score_examples(task, dev, np.tile(output, (len(dev), 1)))


def _values(
    task: Task, labels: Array, outputs: Array, groups: Sequence[str] = (), answers: Sequence[str] = ()
) -> dict[str, float]:
    predictions = predictions_of(task, outputs)
    values: dict[str, float] = {}
    if "record_f1" in task.metrics:
        entities = answers if len(answers) else [f"{row}" for row in range(len(labels))]
        values["record_f1"], values["record_em"] = record(labels, outputs, groups, entities)
    for name in task.metrics:
        if name in METRICS:
            values[name] = METRICS[name](labels, predictions)
        elif name == "em":
            values[name] = exact_match(labels, predictions, groups)
        elif name == "gender_parity":
            values[name] = gender_parity(predictions, groups)
    mean = sum(values.values()) / len(values)
    return {name: mean if name.startswith("mean(") else values[name] for name in task.metrics}


def _normalised(answer: str) -> str:
    """Returns the answer in lower case, without punctuation, articles and superfluous blanks (ReCoRD's, from SQuAD)."""
    plain = "".join(character for character in answer.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def _token_f1(answer: str, gold: str) -> float:
    first, second = Counter(answer.split()), Counter(gold.split())
    common = (first & second).total()
    return 2 * common / (first.total() + second.total()) if common else 0.0
