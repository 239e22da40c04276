"""Builds a head on a checkpoint, and saves and finds what was built. Importing it makes the auto classes know it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForSequenceClassification
from transformers.dynamic_module_utils import get_relative_import_files

import multicls
from finetune.checkpoint import Checkpoint, load_encoder
from finetune.heads.modeling_heads import PooledHead, TaskModel, TaskModelConfig, find_head
from multicls.errors import UserError
from multicls.files import atomic_folder
from multicls.from_bert import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.settings import FinetuneSettings
    from finetune.tasks import Task

AutoConfig.register(TaskModelConfig.model_type, TaskModelConfig)
AutoModelForSequenceClassification.register(TaskModelConfig, TaskModel)

ENTRY = "modeling_task"  # the saved folder's first module: imports what its head needs, and nothing else
MULTICLS_ENTRY = """
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel
from .modeling_multicls import MultiClsBertConfig, MultiClsBertModel

if MultiClsBertConfig.model_type not in CONFIG_MAPPING:
    AutoConfig.register(MultiClsBertConfig.model_type, MultiClsBertConfig)
    AutoModel.register(MultiClsBertConfig, MultiClsBertModel)
"""


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


def save_model(model: TaskModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Saves model and tokenizer with the code that loads them; the folder takes its name only when it is whole.

    `AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)` loads it without this project.
    """
    model.config.auto_map = {
        "AutoConfig": f"{ENTRY}.TaskModelConfig",
        "AutoModelForSequenceClassification": f"{ENTRY}.TaskModel",
    }
    heads = [model.config.head, *([model.config.pooling] if isinstance(model.head, PooledHead) else [])]
    files = {Path(__file__).with_name(f"{name}.py") for name in heads}
    files |= {Path(needed) for file in files for needed in get_relative_import_files(file)}
    entry = '"""Loads this model; written when it was saved."""\n\n'
    entry += "from .modeling_heads import TaskModel, TaskModelConfig\n"
    entry += "".join(f"from .{name} import Head as {name}\n" for name in heads)
    if model.config.encoder["model_type"] == "multicls-bert":
        entry += MULTICLS_ENTRY
        files |= {Path(multicls.__file__).with_name(f"{kind}_multicls.py") for kind in ("configuration", "modeling")}
    with atomic_folder(folder) as fresh, quiet_transformers():
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        for file in files:
            shutil.copy(file, fresh)
        (fresh / f"{ENTRY}.py").write_text(entry, encoding="utf-8")
