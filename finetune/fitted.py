"""The heads that scikit-learn fits: `probe` on a frozen embedding, and `tfidf`, a bag of words without a model."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from sklearn.compose import ColumnTransformer
from sklearn.dummy import DummyClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, StandardScaler
from torch import nn

from finetune.encoding import Encoded
from finetune.heads.build import Incompatible
from finetune.heads.modeling_task import ClsHead, TaskModel
from finetune.tasks import Array, TaskData
from finetune.training import predict_rows
from multicls.errors import UserError, first_line

STRENGTHS = np.logspace(-4, 2, 13)  # C of the logistic regression
ALPHAS = np.logspace(-1, 5, 13)  # of the ridge regression
FOLDS = 5
TUNING_ROWS = 10_000  # most rows that choose C: more take hours and hardly change it
LOWEST = 1e-12  # probability of a class, so that its logarithm is a number


def fit_head(
    rows: TaskData, model: TaskModel | None, encoded: Sequence[Mapping[str, Encoded]], seed: int
) -> list[dict[str, Array]]:
    """Fits a regression on the model's embeddings, or without a model on TF-IDF of words and pairs of words.

    Args:
        encoded: of the one task its splits, "train" first; empty without a model.

    Returns:
        The outputs (N, C) of the one task by split, without "train": log-probabilities or scores.

    Raises:
        Incompatible: The task has several labels or choices a row, or without a model marked words.
    """
    task, splits = rows.task, rows.splits
    if task.multi_label or task.num_choices or (task.num_spans and model is None):
        what = "has several labels a row" if task.multi_label else "is more than a text or two"
        raise Incompatible(f"--head: task {task.name} {what}; use another head.")
    if model:
        scaled, inputs = StandardScaler(), [embed(model, part) for part in encoded[0].values()]
    else:
        vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)  # of each text of a row
        columns = [(name, vectorizer, number) for number, name in enumerate(task.fields)]
        scaled = make_pipeline(ColumnTransformer(columns, sparse_threshold=1.0), MaxAbsScaler())
        inputs = [np.array([e.texts for e in part], dtype=object) for part in splits.values()]
    try:
        train = scaled.fit_transform(inputs[0])
    except ValueError as error:  # "empty vocabulary"
        raise UserError(f"--head tfidf: the training texts: {first_line(error)}.") from None
    unseen = list(map(scaled.transform, inputs[1:]))
    labels = np.array([example.label for example in splits["train"]])
    if task.is_regression:
        regression = RidgeCV(ALPHAS).fit(train, labels / task.label_scale)
        outputs = [regression.predict(features)[:, None].astype(np.float32) for features in unseen]
    else:
        classifier = fit_classifier(train, labels.astype(int), seed)
        outputs = [_log_probabilities(classifier, features, task.num_labels) for features in unseen]
    return [dict(zip(list(splits)[1:], outputs, strict=True))]


def embed(model: TaskModel, rows: Encoded) -> Array:
    """Returns what the model's classifier reads of each row, (N, F).

    For the head `cls` it is the last hidden state of [CLS] without pooler: BERT's was pretrained for next sentences
    only, that of many distilled models not at all, and RoBERTa and ELECTRA have none.
    """
    if isinstance(model.head, ClsHead):
        model.head.dense = model.head.activation = nn.Identity()
    return predict_rows(model, rows, 0, read=itemgetter("features"))


def fit_classifier(features: Any, labels: Array, seed: int) -> Any:
    """Returns a logistic regression on features (N, F), whose C cross-validation picks if each class has two rows.

    If all labels (N,) are alike, it always predicts that one.
    """
    if len(seen := np.unique(labels)) == 1:
        return DummyClassifier().fit(features, labels)
    classifier = LogisticRegression(max_iter=2000)
    tuning = np.random.default_rng(seed).permutation(len(labels))[:TUNING_ROWS]
    fewest = np.bincount(labels[tuning], minlength=seen[-1] + 1)[seen].min()
    if fewest > 1:
        folds = StratifiedKFold(min(FOLDS, fewest), shuffle=True, random_state=seed)
        options: dict[str, Any] = {"scoring": "neg_log_loss", "cv": folds, "refit": False}
        search = GridSearchCV(classifier, {"C": STRENGTHS}, **options)
        classifier.set_params(**search.fit(features[tuning], labels[tuning]).best_params_)
    return classifier.fit(features, labels)


def _log_probabilities(classifier: Any, features: Any, classes: int) -> Array:
    """Returns the log-probabilities of the classes (N, C); those that no training row has are the least likely."""
    probabilities = np.full((features.shape[0], classes), LOWEST)
    known = classifier.predict_proba(features)
    probabilities[:, classifier.classes_] = np.maximum(known, LOWEST)
    return np.log(probabilities).astype(np.float32)
