"""`cls`: BERT as published. Logits = W dropout(tanh(W_p h_[CLS] + b_p)) + b."""

from __future__ import annotations

from transformers import PreTrainedModel

from finetune.checkpoint import Checkpoint, load_classifier


def build(checkpoint: Checkpoint, num_labels: int) -> PreTrainedModel:
    """Hugging Face's own classifier of the checkpoint's type; on a Multi-CLS checkpoint its facets are not read."""
    options = {"classifier_pooling": "cls"} if checkpoint.is_multicls else {}
    return load_classifier(checkpoint, num_labels, **options)
