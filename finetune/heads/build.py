"""Finds a Hugging Face model, checks that it can be trusted and fits, and builds a head on it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.heads import POOLED
from finetune.settings import RunSettings
from finetune.tasks import Task
from multicls.errors import UserError, first_line
from multicls.files import missing_folder, read_json, sha256_of
from multicls.sample import sample_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune.heads.modeling_task import TaskModel

WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
TEXT_FILES = ("*.json", "*.txt", "*.model", "*.py", "README.md")
TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
MODEL_TYPE = "encoder-with-head"  # of models that finetune/run.py has saved


class Incompatible(UserError):
    """A head does not work on a model: no failure, a grid leaves such runs out."""


@dataclass(frozen=True)
class Checkpoint:
    """A model folder."""

    name: str  # as the user named it
    folder: Path
    config: dict[str, Any] = field(compare=False)  # its config.json
    sha256: str  # 16 hex digits over weights, configuration and tokenizer
    trust_remote_code: bool  # the user allows the code in the folder to run

    @property
    def is_fine_tuned(self) -> bool:
        """True for a model with a head."""
        return self.config.get("model_type") == MODEL_TYPE

    @property
    def encoder(self) -> dict[str, Any]:
        """The configuration of the encoder, also of a fine-tuned model with a head."""
        encoder: dict[str, Any] = self.config["encoder"] if self.is_fine_tuned else self.config
        return encoder


@lru_cache(maxsize=16)
def find_checkpoint(name: str, trust_remote_code: bool = False) -> Checkpoint:
    """Returns the model folder `name`, or the Hub's model of that id; a process reads it once.

    "sample" is the model that comes with a Python package (`multicls.sample`).

    Raises:
        UserError: It is not there, not whole, of a type that transformers does not know, or needs its own code to run
            and `trust_remote_code` is not set.
    """
    folder = sample_model() if name == "sample" and not Path(name).exists() else Path(name)
    if not folder.is_dir():
        if missing := missing_folder(name):
            raise UserError(f"--model {name}: {missing}")
        folder = _from_hub(name)
    if not (folder / "config.json").exists():
        inside = next((folder / sub for sub in ("hf", "model") if (folder / sub).is_dir()), None)
        hint = f"did you mean {inside}?" if inside else "give the exported model (RUN/hf)."
        raise UserError(f"--model {name}: holds no config.json; {hint}")
    config = read_json(folder / "config.json")
    weights = _files(folder, WEIGHTS[0]) or _files(folder, WEIGHTS[1])
    if not weights:
        raise UserError(f"--model {name}: holds no weights (model.safetensors).")
    if not _files(folder, *TOKENIZERS):
        raise UserError(
            f"--model {name}: holds no tokenizer (tokenizer.json). Save the model's own beside it: "
            f"AutoTokenizer.from_pretrained(BASE).save_pretrained({str(folder)!r})."
        )
    _check_code(name, folder, config, trust_remote_code)
    code = ["*.py"] * trust_remote_code
    files = [*weights, *_files(folder, "config.json", *TOKENIZERS, *code)]
    digests = "\n".join(f"{path.name}:{sha256_of(path)}" for path in files)
    sha256 = hashlib.sha256(digests.encode()).hexdigest()[:16]
    return Checkpoint(name, folder, config, sha256, trust_remote_code)


def check_head(settings: RunSettings, checkpoint: Checkpoint) -> None:
    """Checks that the head and its pooling work on the checkpoint.

    Raises:
        Incompatible: One does not; the message says why.
        UserError: The settings do not suit the head, or the model could not be saved.
    """
    from transformers import CONFIG_MAPPING

    from finetune.heads.modeling_task import find_head

    reads = {} if settings.head == "probe" else {"head": settings.head}
    if settings.head in POOLED:
        reads["pooling"] = settings.pooling
    for option, name in reads.items():
        if reason := find_head(name).incompatibility(checkpoint.encoder):
            raise Incompatible(f"--{option} {name}: {checkpoint.name}: {reason}")
    sizes = (settings.train.micro_batch_size, settings.train.batch_size)
    if settings.head in ("isobn", "batchnorm") and 1 in sizes:
        raise UserError(
            f"--head {settings.head}: it normalises over the rows of a forward pass, and a single row has no spread: "
            "train.micro_batch_size and train.batch_size must be 2 or more."
        )
    if settings.save_model and checkpoint.encoder.get("model_type") not in CONFIG_MAPPING:
        raise UserError(
            f"--save_model: {checkpoint.name} brings code of its own, which a saved model would not have."
        )


def build_model(settings: RunSettings, checkpoint: Checkpoint, tasks: Sequence[Task]) -> TaskModel:
    """Returns the checkpoint's encoder in float32 with a head and a classifier for each task.

    New weights are drawn from torch's generator, seeded by `settings.seed`. A fine-tuned checkpoint gives each weight
    of the same name and shape except its classifiers'. The head `probe` gets the plain embedding of its pooling.

    Raises:
        UserError: The head does not work on the checkpoint, or the checkpoint cannot be loaded.
    """
    import torch

    from finetune.heads.modeling_task import IncompatibleHead, TaskModel, TaskModelConfig

    check_head(settings, checkpoint)
    head = settings.pooling if settings.head == "probe" else settings.head
    config = TaskModelConfig(
        encoder=checkpoint.encoder,
        head=head,
        head_options=settings.model_dump().get(head, {}),
        pooling=settings.pooling,
        tasks=[task.describe(settings.max_length) for task in tasks],
        dropout=settings.train.dropout,
    )
    torch.manual_seed(settings.seed)
    try:
        encoder = None if checkpoint.is_fine_tuned else load_encoder(checkpoint)
        model = TaskModel(config, encoder)
    except IncompatibleHead as error:
        raise Incompatible(f"--head {head}: {checkpoint.name}: {error}") from None
    if checkpoint.is_fine_tuned:
        saved, new = load_fine_tuned(checkpoint).state_dict(), model.state_dict()
        fits = {name for name in saved.keys() & new.keys() if saved[name].shape == new[name].shape}
        kept = {name: saved[name] for name in fits if "classifiers." not in name}
        model.load_state_dict(kept, strict=False)
    return model


def load_fine_tuned(checkpoint: Checkpoint) -> TaskModel:
    """Returns a model that `finetune/run.py --save_model` has saved."""
    from finetune.heads.modeling_task import TaskModel
    from multicls.build import load_problems, quiet_transformers

    with load_problems(checkpoint.name), quiet_transformers():
        model: TaskModel = TaskModel.from_pretrained(checkpoint.folder)
    return model


def load_encoder(checkpoint: Checkpoint) -> PreTrainedModel:
    """Returns the checkpoint's encoder in float32, without the heads of its pretraining.

    Raises:
        UserError: It cannot be loaded, or weights other than the pooler's are missing.
    """
    import torch
    from transformers import AutoModel

    from multicls.build import load_problems, quiet_transformers

    with load_problems(checkpoint.name), quiet_transformers():
        encoder, report = AutoModel.from_pretrained(
            checkpoint.folder,
            dtype=torch.float32,
            trust_remote_code=checkpoint.trust_remote_code,
            output_loading_info=True,
        )
    if lost := sorted(key for key in report["missing_keys"] if "pooler." not in key):
        raise UserError(
            f"--model {checkpoint.name}: weights of the encoder are missing: {', '.join(lost[:3])}, ..."
        )
    return encoder


@lru_cache(maxsize=4)
def load_tokenizer(checkpoint: Checkpoint, max_length: int) -> PreTrainedTokenizerBase:
    """Returns the checkpoint's tokenizer, which treats all text as text: "[SEP]" is split like any word.

    Raises:
        UserError: It cannot be loaded or is not the model's, or the model has no `max_length` positions.
    """
    from transformers import AutoTokenizer

    from multicls.build import load_problems
    from multicls.configuration_multicls import OFFSET_POSITIONS

    with load_problems(checkpoint.name):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            checkpoint.folder,
            split_special_tokens=True,
            trust_remote_code=checkpoint.trust_remote_code,
        )
    encoder = checkpoint.encoder.get("encoder") or checkpoint.encoder
    vocabulary = int(encoder.get("vocab_size", len(tokenizer)))
    if not 0.9 * vocabulary <= len(tokenizer) <= vocabulary:
        raise UserError(
            f"--model {checkpoint.name}: its tokenizer has {len(tokenizer):,} entries, the model's vocabulary "
            f"{vocabulary:,}: it is not this model's. Put the right tokenizer.json into the folder."
        )
    positions = int(encoder.get("max_position_embeddings", 512))
    if encoder.get("model_type") in OFFSET_POSITIONS:
        positions -= int(encoder.get("pad_token_id", 1)) + 1
    positions = min(positions, tokenizer.model_max_length)
    least = len(tokenizer([""], [""])["input_ids"][0]) + 2  # a token of each of two texts
    if not least <= max_length <= positions:
        raise UserError(
            f"--max_length {max_length}: {checkpoint.name} takes sequences of {least} to {positions} tokens."
        )
    return tokenizer


def _files(folder: Path, *patterns: str) -> list[Path]:
    return [path for pattern in patterns for path in sorted(folder.glob(pattern))]


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        for pattern in WEIGHTS:  # the second one only where there is none of the first
            folder = Path(snapshot_download(name, allow_patterns=[*TEXT_FILES, pattern]))
            if _files(folder, pattern):
                break
    except Exception as error:  # huggingface_hub, its HTTP client and sockets raise their own kinds
        reason = first_line(error).rstrip(".")
        raise UserError(
            f"--model {name}: no such folder, and the Hub did not deliver it: {reason}."
        ) from None
    return folder


def _check_code(name: str, folder: Path, config: dict[str, Any], trust_remote_code: bool) -> None:
    """Refuses a folder that only its own code can load, before any loader has seen it."""
    from transformers import CONFIG_MAPPING

    import finetune.heads.registration  # noqa: F401
    import multicls.modeling_multicls  # noqa: F401

    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING and "auto_map" not in config:
        raise UserError(
            f"--model {name}: transformers knows no model_type {model_type!r} (config.json)."
        )
    if model_type not in CONFIG_MAPPING and not trust_remote_code:
        raise UserError(
            f"--model {name}: {folder} brings Python code of its own, which it needs to load (model_type "
            f"{model_type!r}). If you have read and trust that code, add --trust_remote_code."
        )
