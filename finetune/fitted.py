"""The heads that scikit-learn fits: `probe` on a frozen embedding, and `tfidf`, a bag of words without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import log_softmax
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import FunctionTransformer, MaxAbsScaler, StandardScaler

from finetune.examples import Array, Example
from finetune.tasks import Task
from multicls.errors import UserError

if TYPE_CHECKING:
    from finetune.encoding import Encoded
    from finetune.heads.modeling_task import TaskModel

STRENGTHS = np.logspace(-5, 1, 13)  # C of the logistic regression; 100 times that for bags of words
ALPHAS = np.logspace(-1, 5, 13)
FOLDS = 5
TUNING_ROWS = 10_000  # at most so many rows choose C: more take hours and hardly change it
LOWEST = 1e-12  # probability of a class, so that its logarithm is a number


def embed(model: TaskModel, rows: Encoded) -> Array:
    """Returns what the model's classifier reads of each row, (N, F); a row's choices are side by side.

    The head `cls` gives the last hidden state of [CLS] without its pooler: BERT's was pretrained for next sentences
    only, that of many distilled models not at all, and RoBERTa and ELECTRA have none.
    """
    from torch import nn

    from finetune.heads.pooling import ClsHead
    from finetune.training import EVAL_BATCH_SIZE, find_device, predict_rows

    def give_features(_: nn.Module, __: Any, output: Any) -> None:
        output.logits = output.features.reshape(len(output.logits), -1)

    if isinstance(model.head, ClsHead):
        model.head.dense = model.head.activation = nn.Identity()
    hook = model.register_forward_hook(give_features)
    device, bf16 = find_device()
    features = predict_rows(model, rows, 0, device, EVAL_BATCH_SIZE, bf16)
    hook.remove()
    return features


def fit_probe(task: Task, train: Array, labels: Array, predicted: Array, seed: int) -> Array:
    """Fits a regression on standardised embeddings, and predicts others.

    A choice task is a logistic regression without intercept on the difference between the right choice's embedding and
    each wrong one's. Cross-validation on the training rows picks C of the logistic regression by log loss, and alpha
    of the ridge regression.

    Args:
        task: the task.
        train: (N, F) embeddings, made by `embed`.
        labels: (N,) class indices, or scores on the scale of the encoded labels.
        predicted: (M, F) embeddings to predict.
        seed: seed of the folds.

    Returns:
        (M, C) log-probabilities, or (M, 1) predictions.
    """
    if task.is_regression:
        fitted = make_pipeline(StandardScaler(), RidgeCV(ALPHAS)).fit(train, labels)
        return np.asarray(fitted.predict(predicted)[:, None], np.float32)
    labels = labels.astype(int)
    if not task.num_choices:
        steps = [StandardScaler(), LogisticRegression(max_iter=2000)]
        return _classes(task, steps, train, labels, predicted, seed, STRENGTHS)
    train_NCF = train.reshape(len(train), task.num_choices, -1)
    right_N1F = np.take_along_axis(train_NCF, labels[:, None, None], axis=1)
    differences = (right_N1F - train_NCF)[np.arange(task.num_choices) != labels[:, None]]
    # There have to be two classes; without intercept any will do.
    signs = np.where(np.arange(len(differences)) % 2, 1, -1)
    logistic = LogisticRegression(fit_intercept=False, max_iter=2000)
    steps = [StandardScaler(with_mean=False), logistic]
    fitted = _tuned(steps, differences * signs[:, None], signs, seed, STRENGTHS)
    scores = fitted.decision_function(predicted.reshape(len(predicted) * task.num_choices, -1))
    return np.asarray(log_softmax(scores.reshape(len(predicted), -1), axis=1), np.float32)


def fit_tfidf(
    task: Task, train: Sequence[Example], predicted: Sequence[Example], seed: int
) -> Array:
    """Fits TF-IDF of words and pairs of words, each text of a pair apart, with the regressions of `fit_probe`.

    Returns:
        (M, C) log-probabilities, or (M, 1) predictions divided by the task's scale.
    """
    labels = np.array([example.label for example in train])
    rows, others = ([example.texts for example in part] for part in (train, predicted))
    texts = make_union(*(_tfidf_of(index) for index in range(len(task.fields))))
    if task.is_regression:
        fitted = make_pipeline(texts, RidgeCV(ALPHAS)).fit(rows, labels / task.label_scale)
        return np.asarray(fitted.predict(others)[:, None], np.float32)
    steps = [texts, MaxAbsScaler(), LogisticRegression(max_iter=2000)]
    return _classes(task, steps, rows, labels.astype(int), others, seed, 100 * STRENGTHS)


def check_fitted(task: Task, head: str) -> None:
    """Refuses tasks that a head of scikit-learn cannot take.

    Raises:
        UserError: The task has several labels a row, or for `tfidf` more than plain texts.
    """
    if task.multi_label or (head == "tfidf" and (task.num_choices or task.num_spans)):
        what = "has several labels a row" if task.multi_label else "is more than a text or two"
        raise UserError(f"--head {head}: task {task.name} {what}; use another head.")


def _tfidf_of(index: int) -> Any:
    column = FunctionTransformer(lambda rows: [texts[index] for texts in rows], validate=False)
    return make_pipeline(column, TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True))


def _classes(
    task: Task,
    steps: list[Any],
    train: Any,
    labels: Array,
    predicted: Any,
    seed: int,
    strengths: Array,
) -> Array:
    """Returns (M, C) log-probabilities; classes that no training row has are the least likely."""
    probabilities = np.full((len(predicted), task.num_labels), LOWEST)
    seen = np.unique(labels)
    probabilities[:, seen] = 1.0
    if len(seen) > 1:
        known = _tuned(steps, train, labels, seed, strengths).predict_proba(predicted)
        probabilities[:, seen] = np.maximum(known, LOWEST)
    return np.log(probabilities).astype(np.float32)


def _tuned(steps: list[Any], rows: Any, labels: Array, seed: int, strengths: Array) -> Any:
    """Returns a fitted pipeline; cross-validation picks C if each class has two rows."""
    pipeline, C = make_pipeline(*steps), np.median(strengths)
    tuning = np.random.default_rng(seed).permutation(len(labels))[:TUNING_ROWS]
    classes, sizes = np.unique(labels[tuning], return_counts=True)
    if sizes.min() > 1 and len(classes) == len(np.unique(labels)):
        folds = StratifiedKFold(min(FOLDS, sizes.min()), shuffle=True, random_state=seed)
        grid = {"logisticregression__C": strengths}
        search = GridSearchCV(pipeline, grid, scoring="neg_log_loss", cv=folds, refit=False)
        search.fit([rows[row] for row in tuning], labels[tuning])
        C = search.best_params_["logisticregression__C"]
    return pipeline.set_params(logisticregression__C=C).fit(rows, labels)
