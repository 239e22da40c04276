"""Tiny models with random weights, for the tests of heads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, DistilBertConfig, ElectraConfig, RobertaConfig
from transformers import PreTrainedConfig as Config

from finetune.heads.build import build_model
from finetune.heads.modeling_task import TaskModel, TaskModelConfig
from finetune.settings import RunSettings
from finetune.tasks import TASKS
from multicls.modeling_multicls import MultiClsConfig

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "initializer_range": 0.2,  # so that what one token says is heard by others
}
ENCODERS: dict[str, Config] = {
    "bert": BertConfig(**SIZES),
    "roberta": RobertaConfig(**SIZES, type_vocab_size=1),
    "electra": ElectraConfig(**SIZES, embedding_size=8),
    "distilbert": DistilBertConfig(**SIZES, hidden_dim=32),
    "multicls": MultiClsConfig(
        encoder=BertConfig(**SIZES), num_facets=3, num_topics=3, facet_layers=[1]
    ),
}


def about(labels: str = "xy", **values: Any) -> dict[str, Any]:
    """Returns one task of a `TaskModelConfig`; without labels it is a regression."""
    plain = {"name": "a", "num_labels": max(1, len(labels)), "num_choices": 0, "num_spans": 0}
    return plain | {"labels": list(labels), "is_regression": not labels} | values


def make(encoder: Config | str, head: str, *tasks: dict[str, Any], **values: Any) -> Any:
    """Returns a model with random weights, always the same ones, in evaluation mode."""
    torch.manual_seed(0)
    config = ENCODERS[encoder] if isinstance(encoder, str) else encoder
    tasks = tasks or (about(),)
    return TaskModel(TaskModelConfig(encoder=config, head=head, tasks=list(tasks), **values)).eval()


def load(folder: Path | str, head: str = "cls", task: str = "sst2", **values: Any) -> Any:
    """Returns a checkpoint's encoder with a head for a task, and its tokenizer."""
    values = {"model": str(folder), "head": head, "task": task, "max_length": 24} | values
    settings = RunSettings(**values)
    return build_model(settings, [replace(TASKS[task], max_length=settings.max_length or 128)])


def batch(lengths: tuple[int, ...] = (12, 7, 12, 12)) -> dict[str, Tensor]:
    """Returns rows of these numbers of tokens, padded."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(5, 60, mask.shape, generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}


def parameters(model: torch.nn.Module) -> int:
    """Returns the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
