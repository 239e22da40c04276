"""`probe`: scikit-learn's logistic (or ridge) regression on the frozen embedding. No saved model holds this file."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from scipy.special import log_softmax
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from finetune.data.encoding import Encoded
from finetune.data.metrics import Array
from finetune.data.tasks import Task
from finetune.heads.modeling_heads import PooledHead, TaskModel, TaskModelOutput
from finetune.settings import FinetuneSettings
from finetune.train.loop import predict

log = logging.getLogger("finetune")
STRENGTHS = np.logspace(-5, 1, 13)  # C of the logistic regression
ALPHAS = np.logspace(-1, 5, 13)
FOLDS = 5
CHOOSING_ROWS = 10_000  # at most so many rows choose C: more take hours and hardly change it
LOWEST = 1e-12  # probability of a class, so that its logarithm is a number


class Head(PooledHead):
    """The embedding of its pooling; for "cls" the last hidden state of [CLS] without a pooler.

    BERT's pooler was pretrained for next sentences only, that of many distilled models not at all, and RoBERTa and
    ELECTRA have none.
    """

    def forward(self, states: BaseModelOutput, attention_mask: Tensor) -> Tensor:
        """Returns the embedding, (B, D), from hidden states (B, L, D)."""
        if type(self.pooling).__module__.endswith(".cls"):
            assert states.last_hidden_state is not None
            return states.last_hidden_state[:, 0]
        return super().forward(states, attention_mask)


class _Embedder(nn.Module):
    """A model whose outputs are the features of its classifier, (B, E + S * D); a row's choices are side by side."""

    def __init__(self, model: TaskModel, sequences_per_row: int) -> None:
        super().__init__()
        self.model, self.sequences_per_row = model, sequences_per_row

    def forward(self, **batch: Any) -> TaskModelOutput:
        output: TaskModelOutput = self.model(**batch)
        assert output.features is not None
        output.logits = output.features.reshape(-1, self.sequences_per_row * output.features.shape[-1])
        return output


def fit_probe(
    model: TaskModel, train: Encoded, asked: Encoded, task: Task, settings: FinetuneSettings, device: torch.device
) -> Array:
    """Fits the regression on the frozen embeddings that `model` makes of `train`, and predicts `asked`.

    Embeddings (and the means over marked spans after them) are standardised. A choice task is a logistic regression
    without intercept on the difference between the right choice's embedding and each wrong one's: it scores every
    choice, and softmax makes probabilities of the scores. A multi-label task is one logistic regression for each
    label. Five-fold cross-validation on train rows chooses C of the logistic regression by log loss; leave-one-out
    chooses alpha of the ridge regression.

    Returns:
        (N, C) log-probabilities, of a multi-label task log-odds, or (N, 1) predictions on the scale of the encoded
        labels; float32.
    """
    embedder = _Embedder(model, max(1, task.num_choices)).to(device)
    train_NF, asked_NF = (predict(embedder, rows, device, settings.train) for rows in (train, asked))
    labels = train.labels.numpy()
    if task.multi_label:
        pairs = [_classes(train_NF, own, asked_NF, 2, settings.seed) for own in labels.T.astype(int)]
        outputs = np.stack([pair[:, 1] - pair[:, 0] for pair in pairs], axis=1)
    elif task.is_regression:
        outputs = _ridge(train_NF, labels, asked_NF)
    elif task.num_choices:
        outputs = _choices(train_NF, labels, asked_NF, task.num_choices, settings.seed)
    else:
        outputs = _classes(train_NF, labels, asked_NF, task.num_labels, settings.seed)
    return outputs.astype(np.float32)


def _ridge(train_NF: Array, labels: Array, asked_NF: Array) -> Array:
    fitted = make_pipeline(StandardScaler(), RidgeCV(ALPHAS)).fit(train_NF, labels)
    log.info("probe: ridge regression, alpha = %g", fitted[-1].alpha_)
    predictions: Array = fitted.predict(asked_NF)[:, None]
    return predictions


def _classes(train_NF: Array, labels: Array, asked_NF: Array, num_classes: int, seed: int) -> Array:
    seen = np.unique(labels)
    found = _logistic(train_NF, labels, seed).predict_proba(asked_NF) if len(seen) > 1 else np.ones((len(asked_NF), 1))
    return log_probabilities(found, seen, num_classes)


def log_probabilities(found: Array, seen: Array, num_classes: int) -> Array:
    """Returns (N, C) log-probabilities from those of the classes `seen` in train; others are the least likely."""
    probabilities = np.full((len(found), num_classes), LOWEST)
    probabilities[:, seen] = np.maximum(found, LOWEST)
    return np.log(probabilities)


def _choices(train_NF: Array, labels: Array, asked_NF: Array, num_choices: int, seed: int) -> Array:
    train_NCF, asked_NCF = (rows.reshape(len(rows), num_choices, -1) for rows in (train_NF, asked_NF))
    right_N1F = np.take_along_axis(train_NCF, labels[:, None, None], axis=1)
    wrong = np.arange(num_choices) != labels[:, None]
    differences = (right_N1F - train_NCF)[wrong]
    differences = np.resize(differences, (max(2, len(differences)), differences.shape[1]))
    signs = np.where(np.arange(len(differences)) % 2, 1, -1)  # there have to be two classes; without intercept any do
    fitted = _logistic(differences * signs[:, None], signs, seed, intercept=False)
    weight_F = fitted[-1].coef_[0] / fitted[0].scale_
    scores: Array = log_softmax(asked_NCF @ weight_F, axis=1)
    return scores


def _logistic(rows_NF: Array, labels: Array, seed: int, intercept: bool = True) -> Any:
    """Returns a fitted scaling and logistic regression; cross-validation chooses C if each class has two rows."""
    pipeline = make_pipeline(
        StandardScaler(with_mean=intercept), LogisticRegression(fit_intercept=intercept, max_iter=2000)
    )
    chosen = np.random.default_rng(seed).permutation(len(labels))[:CHOOSING_ROWS]
    folds = min(FOLDS, np.unique(labels[chosen], return_counts=True)[1].min())
    strength = float(np.median(STRENGTHS))
    if folds > 1 and len(np.unique(labels[chosen])) == len(np.unique(labels)):
        split = StratifiedKFold(folds, shuffle=True, random_state=seed)
        grid = {"logisticregression__C": STRENGTHS}
        search = GridSearchCV(pipeline, grid, scoring="neg_log_loss", cv=split, refit=False)
        strength = search.fit(rows_NF[chosen], labels[chosen]).best_params_["logisticregression__C"]
    log.info("probe: logistic regression, C = %g (%d-fold cross-validation)", strength, folds if folds > 1 else 0)
    return pipeline.set_params(logisticregression__C=strength).fit(rows_NF, labels)
