"""The heads that scikit-learn fits: `probe` on a frozen embedding, and `tfidf`, a bag of words without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import log_softmax
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import FunctionTransformer, MaxAbsScaler, StandardScaler

from finetune.examples import Array, Example, example_arrays
from finetune.results import Predictions
from finetune.tasks import Task
from multicls.errors import UserError

if TYPE_CHECKING:
    from finetune.encoding import Encoded
    from finetune.heads.modeling_task import TaskModel
    from finetune.subsets import TaskRows

STRENGTHS = np.logspace(-4, 2, 13)  # C of the logistic regression
ALPHAS = np.logspace(-1, 5, 13)  # of the ridge regression
FOLDS = 5
TUNING_ROWS = 10_000  # at most so many rows choose C: more take hours and hardly change it
LOWEST = 1e-12  # probability of a class, so that its logarithm is a number


def fit_head(
    task_rows: TaskRows,
    model: TaskModel | None,
    encode: Callable[[Task, Sequence[Example]], Encoded],
    seed: int,
) -> tuple[Predictions, dict[str, str]]:
    """Fits a regression on the model's embeddings, or without a model on TF-IDF of words and pairs of words.

    In a choice task a row is a choice, right or wrong.

    Returns:
        The predictions, with log-probabilities (N, C) as logits; what the record says of the device.

    Raises:
        UserError: The task has several labels a row, or without a model more than plain texts.
    """
    from finetune.training import find_device

    task, train, splits = task_rows.task, task_rows.train, task_rows.splits()
    if task.multi_label or (model is None and (task.num_choices or task.num_spans)):
        what = "has several labels a row" if task.multi_label else "is more than a text or two"
        raise UserError(f"--head: task {task.name} {what}; use another head.")
    others = [example for examples in splits.values() for example in examples]
    labels = np.array([example.label for example in train])
    known: Any = train
    unknown: Any = others
    if model:
        steps = [StandardScaler()]
        known, unknown = (embed(model, encode(task, part)) for part in (train, others))
    else:
        texts = make_union(*(_tfidf_of(index) for index in range(len(task.fields))))
        steps = [texts, MaxAbsScaler()]
    if task.is_regression:
        regression = make_pipeline(*steps, RidgeCV(ALPHAS)).fit(known, labels / task.label_scale)
        outputs = regression.predict(unknown)[:, None]
    else:
        labels = labels.astype(int)
        if task.num_choices:
            labels = (np.arange(task.num_choices) == labels[:, None]).astype(int).ravel()
        outputs = _log_probabilities(steps, known, labels, unknown, max(2, task.num_labels), seed)
        if task.num_choices:
            outputs = log_softmax((outputs @ [-1, 1]).reshape(len(others), -1), axis=1)
    ends = np.cumsum([len(examples) for examples in splits.values()])[:-1]
    parts = zip(splits.items(), np.split(outputs.astype(np.float32), ends), strict=True)
    predictions = {f"{task.name}/{n}": example_arrays(rows, part) for (n, rows), part in parts}
    device, bf16 = find_device()
    return predictions, {"device": device.type, "precision": "bf16" if bf16 else "fp32"}


def embed(model: TaskModel, rows: Encoded) -> Array:
    """Returns what the model's classifier reads of each row, (N, F), or of each choice, (N * C, F).

    The head `cls` gives the last hidden state of [CLS] without its pooler: BERT's was pretrained for next sentences
    only, that of many distilled models not at all, and RoBERTa and ELECTRA have none.
    """
    from torch import nn

    from finetune.heads.pooling import ClsHead
    from finetune.training import find_device, predict_rows

    def give_features(_: nn.Module, __: Any, output: Any) -> None:
        output.logits = output.features.reshape(len(output.logits), -1)

    if isinstance(model.head, ClsHead):
        model.head.dense = model.head.activation = nn.Identity()
    hook = model.register_forward_hook(give_features)
    features = predict_rows(model, rows, 0, *find_device())
    hook.remove()
    return features.reshape(len(rows) * rows.sequences_per_row, -1)


def _tfidf_of(index: int) -> Any:
    """Returns the TF-IDF of one text of a row."""
    column = FunctionTransformer(lambda rows: [row.texts[index] for row in rows], validate=False)
    return make_pipeline(column, TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True))


def _log_probabilities(
    steps: list[Any], train: Any, labels: Array, others: Any, classes: int, seed: int
) -> Array:
    """Returns the log-probabilities of the classes (M, C) by logistic regression after some steps.

    Cross-validation on the training rows picks C by log loss if each class has two. Classes that no training row has
    are the least likely.
    """
    probabilities, seen = np.full((len(others), classes), LOWEST), np.unique(labels)
    probabilities[:, seen] = 1.0
    if len(seen) > 1:
        pipeline = make_pipeline(*steps, LogisticRegression(max_iter=2000))
        tuning = np.random.default_rng(seed).permutation(len(labels))[:TUNING_ROWS]
        fewest = np.bincount(labels[tuning], minlength=classes)[seen].min()
        if fewest > 1:
            folds = StratifiedKFold(min(FOLDS, fewest), shuffle=True, random_state=seed)
            grid = {"logisticregression__C": STRENGTHS}
            search = GridSearchCV(pipeline, grid, scoring="neg_log_loss", cv=folds, refit=False)
            search.fit([train[row] for row in tuning], labels[tuning])
            pipeline.set_params(**search.best_params_)
        known = pipeline.fit(train, labels).predict_proba(others)
        probabilities[:, seen] = np.maximum(known, LOWEST)
    return np.log(probabilities)
