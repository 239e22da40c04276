"""Builds a head on a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers import CONFIG_MAPPING

from finetune.heads.checkpoint import Checkpoint, load_encoder
from finetune.heads.modeling_heads import PooledHead, TaskModel, TaskModelConfig, find_head
from multicls.errors import UserError

if TYPE_CHECKING:
    from finetune.data.tasks import Task
    from finetune.settings import FinetuneSettings


def check_head(settings: FinetuneSettings, checkpoint: Checkpoint) -> None:
    """Checks that the head, and the pooling below it, make sense on the checkpoint.

    Raises:
        UserError: one does not; it says why. Or the model could not be saved as the settings ask.
    """
    reads = {"head": settings.head}
    if issubclass(find_head(settings.head), PooledHead):
        reads["pooling"] = settings.pooling
    for option, name in reads.items():
        if reason := find_head(name).why_not(checkpoint.encoder):
            raise UserError(f"--{option} {name}: {checkpoint.name}: {reason}")
    if settings.save_model and checkpoint.encoder.get("model_type") not in CONFIG_MAPPING:
        raise UserError(f"--save_model: {checkpoint.name} brings code of its own, which a saved model would not have.")


def build_head(settings: FinetuneSettings, checkpoint: Checkpoint, tasks: Sequence[Task]) -> TaskModel:
    """The checkpoint's encoder in float32 with a head and a classifier for each task.

    New weights are drawn from torch's global generator. A checkpoint that is itself a fine-tuned `TaskModel` gives
    every weight of the same name and shape but those of its classifiers.

    Raises:
        UserError: the head makes no sense there, or the checkpoint cannot be loaded.
    """
    check_head(settings, checkpoint)
    options = getattr(settings, settings.head, None)
    config = TaskModelConfig(
        encoder=checkpoint.encoder,
        head=settings.head,
        head_options=options.model_dump() if options else {},
        pooling=settings.pooling,
        tasks=[describe(task) for task in tasks],
        dropout=settings.train.dropout,
    )
    if checkpoint.model_type != TaskModelConfig.model_type:
        return TaskModel(config, load_encoder(checkpoint))
    model, saved = TaskModel(config), TaskModel.from_pretrained(checkpoint.folder).state_dict()
    fits = {
        name: saved[name]
        for name, own in model.state_dict().items()
        if name in saved and saved[name].shape == own.shape and not name.startswith("classifiers.")
    }
    model.load_state_dict(fits, strict=False)
    return model


def describe(task: Task) -> dict[str, Any]:
    """What a `TaskModel` has to know of a task."""
    names = ("name", "num_labels", "num_choices", "num_spans", "is_regression")
    return {"labels": list(task.labels), **{name: getattr(task, name, 0) for name in names}}
