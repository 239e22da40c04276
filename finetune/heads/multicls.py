"""`multicls`: Multi-CLS BERT, Eq. 4. Logits = W dropout(sum_k (W_O,k - mean_k' W_O,k') h_k + b_k) + b."""

from __future__ import annotations

from transformers import PreTrainedModel

from finetune.checkpoint import Checkpoint, load_classifier
from multicls.errors import UserError


def build(checkpoint: Checkpoint, num_labels: int) -> PreTrainedModel:
    """The re-parameterised pooling of all facets; with one facet there is nothing to centre: W_O,1 h_1 + b_1.

    Raises:
        UserError: the checkpoint has no facets.
    """
    if not checkpoint.is_multicls:
        raise UserError(
            f"--head multicls: {checkpoint.name} is a plain {checkpoint.model_type} checkpoint, it has no facets to "
            "pool. Use --head cls, or pretrain it with pretrain/run.py first."
        )
    if checkpoint.num_facets < 1:
        raise UserError(
            f"--head multicls: {checkpoint.name} was pretrained with num_facets = 0 (single [CLS]): use --head cls."
        )
    return load_classifier(checkpoint, num_labels, classifier_pooling="multicls")
