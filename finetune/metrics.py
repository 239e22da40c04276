"""The metrics of the benchmarks and of own rows, by scikit-learn and scipy, all as fractions of 1."""

import operator
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from finetune.tasks import Array, Example, Task, example_arrays
from multicls.errors import UserError
from multicls.measures import MEASURES, score


def metric(name: str, labels: Array, predictions: Array) -> float:
    """Returns a metric, 0 where it is undefined; classes without label and prediction do not count.

    `f1a` is the F1 of all of MultiRC's answers.
    """
    return score("f1" if name == "f1a" else name, labels, predictions)


def predictions_of(task: Task, outputs: Array) -> Array:
    """Returns class indices (N,) of logits (N, C), zeros and ones (N, C) for multi-label tasks, or scores (N,)."""
    if task.multi_label:
        return (outputs > np.array(task.cuts or 0.0)).astype(int)
    return task.to_label(outputs[:, 0]) if task.is_regression else outputs.argmax(axis=1)


def names_of(task: Task, values: Array) -> list[str]:
    """Returns labels or predictions as people read them: names, several with commas, or scores."""
    if task.multi_label:
        labels = np.array(task.labels, dtype=object)
        return [", ".join(labels[marks == 1]) for marks in values]
    if task.is_regression:
        return [f"{value:g}" for value in values]
    return [str(int(n)) if task.num_choices else task.labels[int(n)] for n in values]


def score_predictions(task: Task, predictions: Mapping[str, Array]) -> dict[str, float]:
    """Returns all metrics of the task, the main one first.

    The plain name is the metric over all rows; `name_part` is that of a part of the dev set. `predictions` are of one
    split, made by `example_arrays`; outputs that are not finite are a `UserError`.
    """
    outputs, parts = predictions["logits"], predictions["parts"]
    if broken := int((~np.isfinite(outputs)).any(axis=1).sum()):
        what = f"the model's outputs for {broken} of {len(outputs)} rows are not finite numbers"
        raise UserError(f"task {task.name}: {what}. Lower train.learning_rate; check the weights.")
    values = _values(task, predictions)
    for part in sorted(set(parts.tolist()) - {""}):
        rows = {name: array[parts == part] for name, array in predictions.items()}
        values |= {f"{name}_{part}": value for name, value in _values(task, rows).items()}
    return values


def majority_scores(task: Task, train: list[Example], dev: list[Example]) -> dict[str, float]:
    """Returns the scores of train's most frequent class (labels of most rows, the first choice, any score).

    Of equally frequent ones, as after a draw of N rows a class, it is the one that dev has most of.
    """
    if task.multi_label:
        output = np.mean([example.labels for example in train], axis=0) - 0.5
    elif task.is_regression:
        output = task.to_target(np.array([np.mean([example.label for example in train])]))
    elif task.num_choices:
        output = np.eye(task.num_choices)[0]
    else:
        labels = [int(row.label) for row in (*train, *dev)]
        weights = [1.0] * len(train) + [1 / (len(dev) + 1)] * len(dev)  # those of dev decide ties
        output = np.bincount(labels, weights, minlength=task.num_labels)
    return score_predictions(task, example_arrays(dev, np.tile(output, (len(dev), 1))))


def _values(task: Task, predictions: Mapping[str, Array]) -> dict[str, float]:
    labels, predicted = predictions["labels"], predictions_of(task, predictions["logits"])
    values: dict[str, float] = {}
    for name in task.metrics:
        if name == "f1a" or name in MEASURES:
            values[name] = metric(name, labels, predicted)
        elif name == "em":  # MultiRC: questions with all answers right
            right = pd.Series(labels == predicted).groupby(predictions["groups"])
            values[name] = float(right.all().mean())
        elif name in MATCHES:
            values[name] = float(_record(predictions, MATCHES[name]).mean())
    mean = sum(values.values()) / len(values)
    return {name: mean if name.startswith("mean(") else values[name] for name in task.metrics}


def row_values(task: Task, predictions: Mapping[str, Array]) -> tuple[Array | None, Array]:
    """Returns values (of rows, or ReCoRD's queries) whose mean is the main score, or None, and the unit of each."""
    passages, main = predictions["passages"], task.metrics[0]
    units = np.where(passages != "", passages, predictions["ids"])
    if main in ("acc", "exact_match"):
        right = predictions_of(task, predictions["logits"]) == predictions["labels"]
        return right.reshape(len(units), -1).all(axis=1).astype(float), units
    if main.startswith("mean(") and set(task.metrics[1:]) <= MATCHES.keys():
        values = [_record(predictions, MATCHES[name]) for name in task.metrics[1:]]
        of_query = pd.Series(units).groupby(predictions["groups"], sort=False).first()
        return np.mean(values, axis=0), of_query.to_numpy()
    return None, units


def _record(predictions: Mapping[str, Array], match: Callable[[str, str], float]) -> Array:
    """Returns ReCoRD's score of each query: the chosen entity's best match with a right one."""
    groups, answers = predictions["groups"].tolist(), predictions["answers"].tolist()
    right: dict[str, list[str]] = {group: [] for group in groups}
    for row in np.flatnonzero(predictions["labels"] == 1):
        right[groups[row]].append(_normalised(answers[row]))
    matches = []
    margins = pd.Series(predictions["logits"][:, 1] - predictions["logits"][:, 0])
    for group, chosen_row in margins.groupby(groups, sort=False).idxmax().items():
        chosen = _normalised(answers[chosen_row])
        matches.append(max((match(chosen, gold) for gold in right[group]), default=0.0))
    return np.array(matches, dtype=float)


def _normalised(answer: str) -> str:
    """Returns the answer in lower case, without punctuation, articles and superfluous blanks (as in SQuAD)."""
    plain = answer.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def _token_f1(answer: str, gold: str) -> float:
    first, second = Counter(answer.split()), Counter(gold.split())
    common = (first & second).total()
    return 2 * common / (first.total() + second.total()) if common else 0.0


MATCHES = {"record_f1": _token_f1, "record_em": operator.eq}  # of an answer with a right one
