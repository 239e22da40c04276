"""Builds a head on a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import CONFIG_MAPPING

from finetune.data.tasks import Task
from finetune.heads.checkpoint import Checkpoint, load_encoder, read_fine_tuned
from finetune.heads.modeling_heads import PooledHead, TaskModel, TaskModelConfig, find_head
from finetune.settings import FinetuneSettings
from multicls.errors import UserError


def check_head(settings: FinetuneSettings, checkpoint: Checkpoint) -> None:
    """Checks that the head and its pooling work on the checkpoint, and that the settings suit the head.

    Raises:
        UserError: one does not; the message says why. Or the model could not be saved as the settings ask.
    """
    reads = {"head": settings.head}
    if issubclass(find_head(settings.head), PooledHead):
        reads["pooling"] = settings.pooling
    for option, name in reads.items():
        if reason := find_head(name).why_not(checkpoint.encoder):
            raise UserError(f"--{option} {name}: {checkpoint.name}: {reason}")
    if settings.head in ("isobn", "batchnorm") and 1 in (settings.train.micro_batch_size, settings.train.batch_size):
        raise UserError(
            f"--head {settings.head}: it normalises over the rows of a forward pass, and a single row has no spread: "
            "train.micro_batch_size and train.batch_size must be 2 or more."
        )
    if settings.save_model and checkpoint.encoder.get("model_type") not in CONFIG_MAPPING:
        raise UserError(f"--save_model: {checkpoint.name} brings code of its own, which a saved model would not have.")


def build_head(settings: FinetuneSettings, checkpoint: Checkpoint, tasks: Sequence[Task]) -> TaskModel:
    """Returns the checkpoint's encoder in float32 with a head and a classifier for each task.

    New weights are drawn from torch's global generator. A checkpoint that is itself a fine-tuned `TaskModel` gives
    each weight of the same name and shape except its classifiers'.

    Raises:
        UserError: the head does not work on the checkpoint, or the checkpoint cannot be loaded.
    """
    check_head(settings, checkpoint)
    config = TaskModelConfig(
        encoder=checkpoint.encoder,
        head=settings.head,
        head_options=settings.model_dump().get(settings.head, {}),
        pooling=settings.pooling,
        tasks=[describe(task, settings.max_length) for task in tasks],
        dropout=settings.train.dropout,
    )
    if checkpoint.model_type != TaskModelConfig.model_type:
        return TaskModel(config, load_encoder(checkpoint))
    model, saved = TaskModel(config), read_fine_tuned(checkpoint)
    fits = {
        name: saved[name]
        for name, own in model.state_dict().items()
        if name in saved and saved[name].shape == own.shape and not name.startswith("classifiers.")
    }
    model.load_state_dict(fits, strict=False)
    return model


def describe(task: Task, max_length: int | None = None) -> dict[str, Any]:
    """Returns what a `TaskModel` and those who use it have to know of a task, as JSON values."""
    names = ("name", "num_labels", "num_choices", "num_spans", "is_regression", "multi_label", "label_scale", "shape")
    return {
        **{name: getattr(task, name) for name in names},
        "labels": list(task.labels),
        "max_length": max_length or task.max_length,
        "text_columns": [columns[0] for columns in task.fields] if task.benchmark == "own" else [],
        "label_column": task.label[0],
    }
