"""The metrics of the benchmarks. Each is the mean of one value per row (`multicls.measures`)."""

import operator
import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from finetune.tasks import Array, Example, Task
from multicls import measures
from multicls.errors import UserError


def metric_values(task: Task, name: str, examples: Sequence[Example], outputs: Array) -> Array:
    """Returns one value per row, (N,), whose mean is the metric; 0 where it is undefined.

    `f1a` is the F1 of all of MultiRC's answers, `em` the share of its questions with all answers right; `record_f1` and
    `record_em` are means over ReCoRD's queries; "mean(..)" is the mean of the task's other metrics.

    Args:
        outputs: (N, C), of the classifier.
    """
    if name.startswith("mean("):
        others = [other for other in task.metrics if other != name]
        values = [metric_values(task, other, examples, outputs) for other in others]
        return np.mean(values, axis=0)
    labels, predicted = labels_of(examples), predictions_of(task, outputs)
    if name != "em" and name not in MATCHES:
        return measures.row_values("f1" if name == "f1a" else name, labels, predicted)
    groups = [example.group for example in examples]
    _, group_of, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if name == "em":
        of_groups = (np.bincount(group_of, labels != predicted) == 0).astype(float)
    else:
        of_groups = _record(examples, outputs, group_of, MATCHES[name])
    influence = (of_groups - of_groups.mean()) * len(labels) / (len(sizes) * sizes)
    return np.asarray(of_groups.mean() + influence[group_of])


def labels_of(examples: Sequence[Example]) -> Array:
    """Returns class indices or scores (N,), or 0.0 and 1.0 (N, C) of several labels."""
    return np.array([example.labels or example.label for example in examples], dtype=float)


def predictions_of(task: Task, outputs: Array) -> Array:
    """Returns class indices (N,) of logits (N, C), zeros and ones (N, C) for multi-label tasks, or scores (N,)."""
    predicted = measures.predictions_of(task.kind, outputs)
    return predicted * task.label_scale if task.is_regression else predicted


def names_of(task: Task, values: Array) -> list[str]:
    """Returns labels or predictions as people read them: names, or scores."""
    if task.is_regression:
        return [f"{value:g}" for value in values]
    return [str(int(n)) if task.num_choices else task.labels[int(n)] for n in values]


def score_predictions(task: Task, examples: Sequence[Example], outputs: Array) -> dict[str, float]:
    """Returns all metrics of the task, the main one first.

    The plain name is the metric over all rows; `name_part` is that of a part of the dev set. Outputs (N, C) that are
    not finite are a `UserError`.
    """
    if broken := int((~np.isfinite(outputs)).any(axis=1).sum()):
        what = f"the model's outputs for {broken} of {len(outputs)} rows are not finite numbers"
        raise UserError(f"task {task.name}: {what}. Lower train.learning_rate; check the weights.")
    of_part = {"": list(range(len(examples)))}
    for part in sorted({example.part for example in examples} - {""}):
        of_part[f"_{part}"] = [n for n, example in enumerate(examples) if example.part == part]
    return {
        f"{name}{part}": float(
            metric_values(task, name, [examples[n] for n in rows], outputs[rows]).mean()
        )
        for part, rows in of_part.items()
        for name in task.metrics
    }


def majority_output(task: Task, train: list[Example], dev: list[Example]) -> Array:
    """Returns the output (C,) that train's most frequent class asks for, or the first choice, or the mean score.

    Of equally frequent ones, as after a draw of N rows a class, it is the one that dev has most of.
    """
    if task.is_regression:
        return np.array([np.mean([example.label for example in train])]) / task.label_scale
    if task.num_choices:
        return np.eye(task.num_choices)[0]
    labels = [int(row.label) for row in (*train, *dev)]
    weights = [1.0] * len(train) + [1 / (len(dev) + 1)] * len(dev)  # those of dev decide ties
    return np.bincount(labels, weights, minlength=task.num_labels)


def _record(
    examples: Sequence[Example],
    outputs: Array,
    group_of: Array,
    match: Callable[[str, str], float],
) -> Array:
    """Returns ReCoRD's score of each query: the chosen entity's best match with a right one."""
    margins = outputs[:, 1] - outputs[:, 0]
    answers = [_normalised(example.answer) for example in examples]
    chosen, right = dict[int, int](), defaultdict[int, list[str]](list)
    for row, group in enumerate(group_of.tolist()):
        if margins[row] > margins[chosen.setdefault(group, row)]:
            chosen[group] = row
        if examples[row].label == 1:
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
