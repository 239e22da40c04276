"""Linear models by scikit-learn: the head `probe` on a frozen embedding, `tfidf`, and the start `--init probe`."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.dummy import DummyClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import GridSearchCV, StratifiedGroupKFold
from sklearn.pipeline import Pipeline

from finetune.encoding import Encoded
from finetune.heads.build import Incompatible
from finetune.heads.modeling_task import TaskModel
from finetune.tasks import Array, Example, Task, TaskData
from finetune.training import predict_rows
from multicls.errors import UserError, first_line
from multicls.probe import NO_TOPICS, standardisation

REGRESSION = LogisticRegression(max_iter=2000)
STRENGTHS = np.logspace(-4, 2, 13)  # C of the logistic regression on standardised features
WORD_STRENGTHS = np.logspace(0, 3, 4)  # C of the one on TF-IDF
ALPHAS = np.logspace(-1, 5, 13)  # of the ridge regression
FOLDS = 5
TUNING_ROWS = 10_000  # most rows that choose C: more take hours and hardly change it
UNSEEN = 30.0  # logits of a class that no training row has are lower by this

Layer = tuple[Array, Array]  # weight (C, F) and bias (C,)
embed = partial(predict_rows, read=itemgetter("features"))  # what a classifier reads, (N, F)


def fit_probe(
    rows: TaskData, model: TaskModel, encoded: Mapping[str, Encoded], seed: int
) -> list[dict[str, Array]]:
    """Fits the classifier of a frozen model, which becomes a linear layer of it.

    Returns the outputs (N, C) of the one task by split, without "train". A task with choices is `Incompatible`.
    """
    task = rows.task
    if task.num_choices:
        raise Incompatible(f"--head: {task.name} is more than a text or two; use another head.")
    features = {split: embed(model, part, 0) for split, part in encoded.items()}
    fit = partial(fit_layer, task, seed=seed, topics=model.head.topic_columns)
    layer, outputs = fit_on_all_labels(rows, features, fit, apply_layer)
    set_layer(model, 0, layer)
    return [outputs]


def fit_on_all_labels(
    rows: TaskData, inputs: dict[str, Array], fit: Callable[..., Any], apply: Callable[..., Array]
) -> tuple[Any, dict[str, Array]]:
    """Returns what `fit` makes of training and validation rows, and its outputs for the other splits.

    The outputs for the validation rows are those of a fit on the training rows alone.
    """
    outputs, train, examples = dict[str, Array](), inputs["train"], rows.train
    if rows.validation:
        held = inputs["validation"]
        outputs["validation"] = apply(fit(train, examples), held)
        train, examples = np.concatenate([train, held]), [*examples, *rows.validation]
    fitted = fit(train, examples)
    others = {split: apply(fitted, of) for split, of in inputs.items() if split in ("dev", "test")}
    return fitted, outputs | others


def start_from_probe(model: TaskModel, encoded: Sequence[Mapping[str, Encoded]], seed: int) -> None:
    """Sets the classifier of each task to a probe of its training rows (LP-FT, arXiv:2202.10054)."""
    for number, splits in enumerate(encoded):
        train = splits["train"]
        if train.task.num_choices:
            raise Incompatible(f"--init probe: task {train.task.name} has choices; leave it out.")
        features = embed(model, train, number)
        layer = fit_layer(train.task, features, train.examples, seed, model.head.topic_columns)
        set_layer(model, number, layer)


def fit_layer(
    task: Task, features: Array, examples: Sequence[Example], seed: int, topics: slice = NO_TOPICS
) -> Layer:
    """Returns a linear layer whose outputs are a regression's: logits, or scores divided by the task's scale.

    The features (N, F) are standardised first, columns of `topics` by `multicls.probe.standardisation`, and the layer
    includes that: W' = W / sigma, b' = b - W' mean.
    """
    mean, scale = standardisation(features, topics)
    scaled, units = (features - mean) / scale, [example.unit for example in examples]
    classify = partial(fit_classifier, REGRESSION, {"C": STRENGTHS}, scaled, units=units, seed=seed)
    labels = np.array([example.label for example in examples])
    if task.is_regression:
        regression = RidgeCV(ALPHAS).fit(scaled, labels / task.label_scale)
        weight, bias = regression.coef_[None], np.array([regression.intercept_])
    elif task.multi_label:
        marks = np.array([example.labels for example in examples], dtype=int)
        binary = [as_layer(classify(column), 2, features.shape[1]) for column in marks.T]
        weight = np.stack([layer[0][1] - layer[0][0] for layer in binary])
        bias = np.array([layer[1][1] - layer[1][0] for layer in binary])
    else:
        weight, bias = as_layer(classify(labels.astype(int)), task.num_labels, features.shape[1])
    weight = weight / scale
    return weight, bias - weight @ mean


def as_layer(classifier: Any, classes: int, width: int) -> Layer:
    """Returns a fitted classifier as weight and bias of all classes; those that no training row has are unlikely."""
    weight, bias = np.zeros((classes, width)), np.zeros(classes)
    seen = classifier.classes_
    if hasattr(classifier, "coef_"):
        coefficients, intercepts = classifier.coef_, classifier.intercept_
        if len(seen) == 2:  # one row, the log-odds of the second class
            coefficients = np.concatenate([-coefficients, coefficients]) / 2
            intercepts = np.concatenate([-intercepts, intercepts]) / 2
        weight[seen], bias[seen] = coefficients, intercepts
    unseen = np.setdiff1d(np.arange(classes), seen)
    weight[unseen], bias[unseen] = weight[seen].mean(axis=0), bias[seen].mean() - UNSEEN
    return weight, bias


def apply_layer(layer: Layer, features: Array) -> Array:
    """Returns the outputs (N, C) of a layer for features (N, F)."""
    weight, bias = layer
    return np.asarray(features @ weight.T + bias, dtype=np.float32)


def set_layer(model: TaskModel, task: int, layer: Layer) -> None:
    """Makes the layer the classifier of one of the model's tasks."""
    weight, bias = map(torch.from_numpy, layer)
    model.classifiers[task].load_state_dict({"weight": weight, "bias": bias})


def log_likelihood(classifier: Any, features: Any, labels: Array) -> float:
    """Returns the mean log-probability of the labels; classes that the classifier has not seen do not count."""
    known = np.isin(labels, classifier.classes_)
    if not known.any():
        return 0.0
    columns = np.searchsorted(classifier.classes_, labels[known])
    chosen = classifier.predict_proba(features)[known, columns]
    return float(np.log(np.maximum(chosen, 1e-12)).mean())


def fit_classifier(
    estimator: Any, options: Any, features: Any, labels: Array, units: Sequence[str], seed: int
) -> Any:
    """Returns a fitted classifier, whose options cross-validation picks by the likelihood.

    Features are (N, F), or texts (N, fields). If all labels (N,) are alike, it always predicts that one. A class of one
    row does not count where the others have not seen it. Rows of a unit (passage) are not in two folds.
    """
    if len(np.unique(labels)) == 1:
        return DummyClassifier().fit(features, labels)
    estimator = clone(estimator)
    tuning = np.random.default_rng(seed).permutation(len(labels))[:TUNING_ROWS]
    groups = np.array(units)[tuning]
    folds = min(FOLDS, len(np.unique(groups)), int(np.bincount(labels[tuning]).max()))
    with warnings.catch_warnings():  # few rows a class are usual here
        warnings.filterwarnings("ignore", "The (least populated class|number of unique classes)")
        cuts = list[tuple[Array, Array]]()
        if folds > 1:
            splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
            cuts = [
                (train, test)
                for train, test in splitter.split(tuning, labels[tuning], groups)
                if len(test) and len(np.unique(labels[tuning][train])) > 1
            ]
        if cuts:
            search = GridSearchCV(estimator, options, scoring=log_likelihood, cv=cuts, refit=False)
            estimator.set_params(**search.fit(features[tuning], labels[tuning]).best_params_)
        return estimator.fit(features, labels)


def fit_words(rows: TaskData, seed: int) -> list[dict[str, Array]]:
    """Fits a regression on TF-IDF of words, or of words and pairs of words, whichever cross-validation picks.

    Returns log-probabilities or scores (N, C) of the one task by split, without "train". Tasks with several labels or
    choices a row, or marked words, are `Incompatible`.
    """
    task = rows.task
    if task.multi_label or task.num_choices or task.num_spans:
        what = "has several labels a row" if task.multi_label else "is more than a text or two"
        raise Incompatible(f"--head: {task.name} {what}; use another head.")
    texts = {
        split: np.array([example.texts for example in part], dtype=object)
        for split, part in rows.splits.items()
    }
    try:
        fit, apply = partial(_fit_words, task, seed=seed), partial(_word_outputs, task)
        return [fit_on_all_labels(rows, texts, fit, apply)[1]]
    except ValueError as error:  # "empty vocabulary"
        raise UserError(f"--head tfidf: the training texts: {first_line(error)}.") from None


def _fit_words(task: Task, texts: Array, examples: Sequence[Example], *, seed: int) -> Any:
    names = [f"text{number}" for number in range(len(task.fields))]
    columns = [(name, TfidfVectorizer(sublinear_tf=True), n) for n, name in enumerate(names)]
    words = ("words", ColumnTransformer(columns, sparse_threshold=1.0))
    labels = np.array([example.label for example in examples])
    if task.is_regression:
        ridge = Pipeline([words, ("regression", RidgeCV(ALPHAS))])
        return ridge.fit(texts, labels / task.label_scale)
    options = [
        {f"words__{name}__ngram_range": [(1, most)] for name in names}
        | {"classifier__C": WORD_STRENGTHS}
        for most in (1, 2)
    ]
    pipeline = Pipeline([words, ("classifier", REGRESSION)])
    units = [example.unit for example in examples]
    return fit_classifier(pipeline, options, texts, labels.astype(int), units, seed)


def _word_outputs(task: Task, fitted: Any, texts: Array) -> Array:
    """Returns the outputs (N, C): scores, or log-probabilities; unseen classes are the least likely."""
    if task.is_regression:
        return np.asarray(fitted.predict(texts)[:, None], dtype=np.float32)
    outputs = np.full((len(texts), task.num_labels), -UNSEEN)
    outputs[:, fitted.classes_] = np.log(np.maximum(fitted.predict_proba(texts), np.exp(-UNSEEN)))
    return outputs.astype(np.float32)
