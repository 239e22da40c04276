"""The metrics of the benchmarks and of own rows. Each is the mean of one value per row (`multicls.measures`)."""

import operator
import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

import numpy as np

from finetune.tasks import Array, Example, Task
from multicls import measures
from multicls.errors import UserError


def metric_values(task: Task, name: str, predictions: Mapping[str, Array]) -> Array:
    """Returns one value per row, (N,), whose mean is the metric; 0 where it is undefined.

    `f1a` is the F1 of all of MultiRC's answers, `em` the share of its questions with all answers right; `record_f1` and
    `record_em` are means over ReCoRD's queries; "mean(..)" is the mean of the task's other metrics.
    """
    if name.startswith("mean("):
        others = [other for other in task.metrics if other != name]
        return np.mean([metric_values(task, other, predictions) for other in others], axis=0)
    labels, predicted = predictions["labels"], predictions_of(task, predictions["logits"])
    if name != "em" and name not in MATCHES:
        return measures.row_values("f1" if name == "f1a" else name, labels, predicted)
    _, group_of, sizes = np.unique(predictions["groups"], return_inverse=True, return_counts=True)
    if name == "em":
        of_groups = (np.bincount(group_of, labels != predicted) == 0).astype(float)
    else:
        of_groups = _record(predictions, group_of, MATCHES[name])
    influence = (of_groups - of_groups.mean()) * len(labels) / (len(sizes) * sizes)
    values: Array = of_groups.mean() + influence[group_of]
    return values


def main_values(task: Task, predictions: Mapping[str, Array]) -> tuple[Array, Array]:
    """Returns the values of the main metric, (N,), and the unit of each row: its passage or itself."""
    passages = predictions["passages"]
    units = np.where(passages != "", passages, predictions["ids"])
    return metric_values(task, task.metrics[0], predictions), units.astype(str)


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
    scores = {name: float(metric_values(task, name, predictions).mean()) for name in task.metrics}
    for part in sorted(set(parts.tolist()) - {""}):
        rows = {name: array[parts == part] for name, array in predictions.items()}
        for name in task.metrics:
            scores[f"{name}_{part}"] = float(metric_values(task, name, rows).mean())
    return scores


def majority_output(task: Task, train: list[Example], dev: list[Example]) -> Array:
    """Returns the output (C,) that train's most frequent class asks for (labels of most rows, first choice, any score).

    Of equally frequent ones, as after a draw of N rows a class, it is the one that dev has most of.
    """
    if task.multi_label:
        return np.mean([example.labels for example in train], axis=0) - 0.5
    if task.is_regression:
        return task.to_target(np.array([np.mean([example.label for example in train])]))
    if task.num_choices:
        return np.eye(task.num_choices)[0]
    labels = [int(row.label) for row in (*train, *dev)]
    weights = [1.0] * len(train) + [1 / (len(dev) + 1)] * len(dev)  # those of dev decide ties
    return np.bincount(labels, weights, minlength=task.num_labels)


def _record(
    predictions: Mapping[str, Array], group_of: Array, match: Callable[[str, str], float]
) -> Array:
    """Returns ReCoRD's score of each query: the chosen entity's best match with a right one."""
    margins = predictions["logits"][:, 1] - predictions["logits"][:, 0]
    answers = list(map(_normalised, predictions["answers"].tolist()))
    chosen, right = dict[int, int](), defaultdict[int, list[str]](list)
    for row, group in enumerate(group_of.tolist()):
        if margins[row] > margins[chosen.setdefault(group, row)]:
            chosen[group] = row
        if predictions["labels"][row] == 1:
            right[group].append(answers[row])
    matches = [
        max((match(answers[chosen[group]], gold) for gold in right[group]), default=0.0)
        for group in range(len(chosen))
    ]
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
