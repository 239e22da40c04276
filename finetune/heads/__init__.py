"""The heads: ways to read a label off an encoder. A new head is one file with `build` and one line here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from finetune.checkpoint import Checkpoint

HEADS = {
    "cls": "linear layer on BERT's tanh-pooled [CLS], on any BERT-family checkpoint",
    "multicls": "linear layer on the re-parameterised sum of the facets, on Multi-CLS checkpoints",
}


def build_head(name: str, checkpoint: Checkpoint, num_labels: int) -> PreTrainedModel:
    """The model that is fine-tuned: `model(**batch, labels=...)` gives `loss` and `logits` (B, num_labels).

    Args:
        name: a key of `HEADS`.
        num_labels: 1 means regression with mean squared error.

    Raises:
        UserError: the head cannot be put on this checkpoint.
    """
    module = importlib.import_module(f"finetune.heads.{name}")  # one file a head; torch is imported only now
    model: PreTrainedModel = module.build(checkpoint, num_labels)
    return model
