"""`setfit`: SetFit (Tunstall et al., 2022), run by its own package. Leaves no model to save.

SetFit trains a sentence embedding on pairs of rows: embeddings of one class move together, those of two classes apart.
A logistic regression on the embeddings then gives the classes. The embedding is the mean of the last hidden states.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression

from finetune.data.examples import LabeledExample
from finetune.data.metrics import Array
from finetune.data.tasks import Task
from finetune.heads.checkpoint import Checkpoint, load_tokenizer
from finetune.heads.mean import Head as MeanHead
from finetune.heads.modeling_heads import TaskModelConfig
from finetune.heads.probe import log_probabilities
from finetune.settings import FinetuneSettings
from multicls.errors import UserError, first_line
from multicls.from_bert import quiet_transformers

log = logging.getLogger("finetune")
ITERATIONS = 20  # pairs of each kind for each row, the paper's R
BATCH_SIZE = 16  # pairs of a step, the paper's
INSTALL = "pip install 'multicls[setfit]'"


class Head(MeanHead):
    """The embedding that SetFit trains."""

    @classmethod
    def why_not(cls, encoder: dict[str, Any]) -> str:
        """Says what to install if the package is missing."""
        return "" if importlib.util.find_spec("setfit") else f"the package setfit is not installed: {INSTALL}."


def fit_setfit(
    checkpoint: Checkpoint, train: Sequence[LabeledExample], asked: Sequence[LabeledExample], task: Task,
    settings: FinetuneSettings, device: torch.device,
) -> Array:  # fmt: skip
    """Trains SetFit on `train` for one epoch and predicts `asked`.

    The texts of a row become one text with the tokenizer's separator between them. In such tasks a separator that
    stands in a text therefore counts as one, unlike with the other heads.

    Returns:
        (N, C) log-probabilities, float32; a class without train rows is the least likely one.

    Raises:
        UserError: the task is no classification of texts, or the package or the model cannot be loaded.
    """
    if task.is_regression or task.num_choices or task.num_spans or task.multi_label:
        raise UserError(f"--head setfit: it classifies texts, each into one class; task {task.name} is another kind.")
    if checkpoint.model_type == TaskModelConfig.model_type:
        raise UserError(f"--head setfit: {checkpoint.name} is fine-tuned already; give a pretrained model.")
    labels = np.array([int(example.label) for example in train])
    seen = np.unique(labels)
    if len(seen) == 1:
        return log_probabilities(np.ones((len(asked), 1)), seen, task.num_labels).astype(np.float32)
    separator = f" {load_tokenizer(checkpoint, settings.max_length or task.max_length).sep_token} "
    texts, questions = ([separator.join(example.texts) for example in rows] for rows in (train, asked))
    try:
        model = _model(checkpoint, task, settings, device)
        _train(model, texts, labels, settings.seed)
    except (ImportError, OSError, ValueError) as error:
        raise UserError(
            f"--head setfit: {first_line(error)}. If packages do not fit together, install them by {INSTALL}."
        ) from error
    found = model.predict_proba(questions, as_numpy=True, show_progress_bar=False)
    return log_probabilities(found, model.model_head.classes_, task.num_labels).astype(np.float32)


def _model(checkpoint: Checkpoint, task: Task, settings: FinetuneSettings, device: torch.device) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from setfit import SetFitModel

    trust = {"trust_remote_code": checkpoint.trust_remote_code}
    with quiet_transformers():
        transformer = Transformer(
            str(checkpoint.folder), max_seq_length=settings.max_length or task.max_length, model_kwargs=trust,
            config_kwargs=trust, processor_kwargs=trust | {"split_special_tokens": len(task.fields) == 1},
        )  # fmt: skip
    pooling = Pooling(int(checkpoint.encoder["hidden_size"]), "mean")
    body = SentenceTransformer(modules=[transformer, pooling], device=str(device))
    return SetFitModel(model_body=body, model_head=LogisticRegression(max_iter=2000))


def _train(model: Any, texts: list[str], labels: Array, seed: int) -> None:
    from datasets import Dataset
    from setfit import Trainer, TrainingArguments
    from transformers.trainer_callback import ProgressCallback

    rows = Dataset.from_dict({"text": texts, "label": labels.tolist()})
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, batch_size=BATCH_SIZE, num_epochs=1, num_iterations=ITERATIONS, seed=seed,
            report_to="none", logging_strategy="no", save_strategy="no", show_progress_bar=False,
        )  # fmt: skip
        log.info("setfit: %d pairs of %d rows", 2 * ITERATIONS * len(texts), len(texts))
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        if not sys.stderr.isatty():  # `show_progress_bar` of setfit 1.2.0 does not reach this bar
            trainer.remove_callback(ProgressCallback)
        trainer.train()
