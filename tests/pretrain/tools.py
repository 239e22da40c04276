"""Builds micro-batches as the loader does, from tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.batches import MicroBatch


def micro_batch_of(
    inputs: dict[str, Tensor], parts: int, number: int = 0, example_ids: Tensor | None = None
) -> MicroBatch:
    """Returns a micro-batch with the counts of its inputs."""
    sequences, length = inputs["input_ids"].shape
    facets = length - inputs["tfidf_labels"].shape[1]
    lengths = inputs["attention_mask"].sum(dim=1)
    masked = (inputs["labels"].flatten() != -100).nonzero().squeeze(1)
    counts = {
        "mlm": float(len(masked)),
        "tfidf": float(lengths.sum() - facets * sequences),
        "so": float((inputs["so_labels"] != -100).sum()),
        "examples": float(sequences // parts),
        "sequences": float(sequences),
        "tokens": float(lengths.sum()),
        "squared_lengths": float(lengths.square().sum()),
    }
    if example_ids is None:
        example_ids = torch.zeros(sequences // parts, 2, dtype=torch.long)
    return MicroBatch(number, example_ids.numpy(), inputs | {"masked_positions": masked}, counts)
