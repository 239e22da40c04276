"""A tiny model, and micro-batches as the loader builds them, from tensors."""

from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig

from multicls.modeling_multicls import MultiClsConfig, MultiClsForPreTraining
from pretrain.batches import MicroBatch
from pretrain.engine import Engine
from pretrain.settings import ObjectiveSettings
from tests.encoders import encoder_config

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
OURS = {*MultiClsConfig.__dataclass_fields__, "num_labels"}


class PlainEngine(Engine):
    """An engine without DeepSpeed and optimizer, which evaluates a model."""

    def __init__(self, model: Any) -> None:
        self.deepspeed = self.module = self._network = model
        self.device, self._weights = torch.device("cpu"), ObjectiveSettings().in_use
        self._group, self._unpad = 1, False


def tiny(**changes: Any) -> MultiClsConfig:
    """Returns the configuration of a tiny BERT; `changes` are fields of ours or of the encoder."""
    ours = {name: value for name, value in changes.items() if name in OURS}
    theirs = {name: value for name, value in changes.items() if name not in OURS}
    return MultiClsConfig(encoder=BertConfig(**(TINY | theirs)), **({"num_facets": 3} | ours))


def tiny_model(
    facets: int = 2, hard_negatives: bool = True, *, encoder: str = "", **changes: Any
) -> MultiClsForPreTraining:
    """Returns a model of random weights, the same for the same arguments.

    Args:
        encoder: A family of tests/encoders.py; "": a tiny BERT with the `changes`.
    """
    fields: dict[str, Any] = {"num_facets": facets, "hard_negatives": hard_negatives}
    config = tiny(**fields, **changes)
    if encoder:
        config = MultiClsConfig(encoder=encoder_config(encoder), **fields)
    torch.manual_seed(1)
    return MultiClsForPreTraining(config)


def micro_batch_of(
    inputs: dict[str, Tensor], parts: int, number: int = 0, windows: Tensor | None = None
) -> MicroBatch:
    """Returns a micro-batch with the counts of its inputs."""
    sequences, length = inputs["input_ids"].shape
    facets = length - inputs["tfidf_labels"].shape[1]
    lengths = inputs["attention_mask"].sum(dim=1)
    masked = (inputs["labels"].flatten() != -100).nonzero().squeeze(1)
    counts = {
        "mlm": len(masked),
        "tfidf": int(lengths.sum()) - facets * sequences,
        "so": int((inputs["so_labels"] != -100).sum()),
        "examples": sequences // parts,
        "sequences": sequences,
        "tokens": int(lengths.sum()),
    }
    if windows is None:
        windows = torch.zeros(sequences // parts, 3, dtype=torch.long)
    return MicroBatch(number, windows.numpy(), inputs | {"masked_positions": masked}, counts)


def random_inputs(seed: int, rows: int, facets: int, length: int = 16) -> dict[str, Tensor]:
    """Returns random ids and targets of padded sequences, some of them parts of a single segment."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 50, (rows, length), generator=random)
    lengths = torch.randint(length // 2, length + 1, (rows, 1), generator=random)
    real = torch.arange(length) < lengths
    masked = torch.rand(rows, length, generator=random) < 0.3
    masked &= (torch.arange(length) > facets) & real
    text = torch.cat([real[:, :1], real[:, 1 + facets :]], dim=1)
    orders = torch.randint(0, 2, (rows,), generator=random)
    return {
        "input_ids": ids * real,
        "attention_mask": real.long(),
        "labels": torch.where(masked, ids, -100),
        "tfidf_labels": 10 * torch.rand(rows, length - facets, generator=random) * text,
        "so_labels": torch.where(torch.rand(rows, generator=random) < 0.3, -100, orders),
    }
