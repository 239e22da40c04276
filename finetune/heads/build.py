"""Finds a Hugging Face model, checks that it can be trusted and fits, and builds a head on it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multicls.errors import UserError, first_line
from multicls.files import missing_folder, read_json, sha256_of
from multicls.sample import sample_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune.heads.modeling_task import TaskModel
    from finetune.settings import RunSettings
    from finetune.tasks import Task

WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
PADDING = 1024  # most entries of a vocabulary that its tokenizer may lack
TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
DOWNLOADED = ("*.json", "*.txt", "*.model", "README.md")
FINE_TUNED = "encoder-with-head"  # model type of what finetune/run.py saves


class Incompatible(UserError):
    """A head does not work on a model: no failure, a grid leaves such runs out."""


@dataclass(frozen=True)
class Checkpoint:
    """The folder of an encoder."""

    name: str  # as the user named it
    folder: Path
    config: dict[str, Any] = field(compare=False)  # its config.json
    sha256: str  # 16 hex digits over weights, configuration and tokenizer


@lru_cache(maxsize=16)
def find_checkpoint(name: str) -> Checkpoint:
    """Returns the model folder `name`, or the Hub's model of that id; a process reads it once.

    "sample" is the model that comes with a Python package (`multicls.sample`).

    Raises:
        UserError: It does not exist, lacks config.json or a tokenizer, or is fine-tuned.
    """
    folder = sample_model() if name == "sample" and not Path(name).exists() else Path(name)
    if not folder.is_dir():
        folder = _from_hub(name)
    if not (folder / "config.json").exists():
        inside = next((folder / sub for sub in ("hf", "model") if (folder / sub).is_dir()), None)
        hint = f"did you mean {inside}?" if inside else "pass the exported model (RUN/hf)."
        raise UserError(f"--model {name}: holds no config.json; {hint}")
    _check_tokenizer_files(folder, f"--model {name}")
    config = read_json(folder / "config.json")
    if config.get("model_type") == FINE_TUNED:
        raise UserError(f"--model {name}: is fine-tuned; pass the model that it was trained from.")
    patterns = (*WEIGHTS, "config.json", *TOKENIZERS)
    files = (path for pattern in patterns for path in sorted(folder.glob(pattern)))
    digests = "\n".join(f"{path.name}:{sha256_of(path)}" for path in files)
    sha256 = hashlib.sha256(digests.encode()).hexdigest()[:16]
    return Checkpoint(name, folder, config, sha256)


def build_model(
    settings: RunSettings, checkpoint: Checkpoint, tasks: Sequence[Task]
) -> tuple[TaskModel, PreTrainedTokenizerBase]:
    """Returns the checkpoint's encoder with a head and a classifier for each task, and its tokenizer.

    New weights are drawn from torch's generator, seeded by `settings.seed`. The head `probe` gets the plain embedding
    of its pooling.

    Raises:
        Incompatible: The head does not work on the checkpoint.
        UserError: The checkpoint cannot be loaded, or has no positions for sequences as long as the tasks'.
    """
    import torch

    from finetune.heads.modeling_task import IncompatibleHead, TaskModel, TaskModelConfig

    torch.manual_seed(settings.seed)
    longest = max(settings.max_length or task.max_length for task in tasks)
    encoder, tokenizer = load_encoder(checkpoint, longest)
    head = settings.pooling if settings.head == "probe" else settings.head
    config = TaskModelConfig(
        encoder=checkpoint.config,
        head=head,
        head_options=settings.model_dump().get(head, {}),
        pooling=settings.pooling,
        tasks=[task.describe(settings.max_length) for task in tasks],
        dropout=settings.train.dropout,
    )
    try:
        return TaskModel(config, encoder), tokenizer
    except IncompatibleHead as error:
        raise Incompatible(f"--head {settings.head}: {checkpoint.name}: {error}") from None


def load_encoder(
    checkpoint: Checkpoint, max_length: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Returns the checkpoint's encoder in float32, without the heads of its pretraining, and its tokenizer.

    No code in the folder runs. The tokenizer treats all text as text: "[SEP]" is split like any word.

    Raises:
        UserError: They cannot be loaded without code of their own, weights other than the pooler's are missing, the
            tokenizer is not the model's, or the model has no `max_length` positions.
    """
    from transformers import AutoModel

    import multicls.modeling_multicls  # noqa: F401 (registers the model type)
    from multicls.build import load_problems, quiet_transformers
    from multicls.configuration_multicls import OFFSET_POSITIONS

    name, folder = checkpoint.name, checkpoint.folder
    config = checkpoint.config.get("encoder") or checkpoint.config
    with load_problems(name), quiet_transformers():
        tokenizer = load_tokenizer(folder, f"--model {name}", config)
        positions = int(config.get("max_position_embeddings", 512))
        if config.get("model_type") in OFFSET_POSITIONS:
            positions -= int(config.get("pad_token_id", 1)) + 1
        positions = min(positions, tokenizer.model_max_length)
        least = len(tokenizer([""], [""])["input_ids"][0]) + 2  # a token of each of two texts
        if not least <= max_length <= positions:
            raise UserError(
                f"--max_length {max_length}: {name} takes sequences of {least} to {positions} tokens."
            )
        encoder, report = AutoModel.from_pretrained(
            folder, dtype="float32", trust_remote_code=False, output_loading_info=True
        )
    if lost := sorted(key for key in report["missing_keys"] if "pooler." not in key):
        raise UserError(f"--model {name}: weights are missing: {', '.join(lost[:3])}, ...")
    return encoder, tokenizer


def load_fine_tuned(folder: str) -> tuple[TaskModel, PreTrainedTokenizerBase]:
    """Returns model and tokenizer that `finetune/run.py --save_model` has saved.

    Raises:
        UserError: They cannot be loaded, or the tokenizer is missing or not the model's.
    """
    import multicls.modeling_multicls  # noqa: F401 (registers the model type of the encoder in it)
    from finetune.heads.modeling_task import TaskModel
    from multicls.build import load_problems, quiet_transformers

    with load_problems(folder), quiet_transformers():
        model: TaskModel = TaskModel.from_pretrained(folder)
        encoder = model.config.encoder
        return model, load_tokenizer(Path(folder), folder, encoder.get("encoder") or encoder)


def load_tokenizer(folder: Path, name: str, config: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Returns a folder's tokenizer, which treats all text as text: "[SEP]" is split like any word.

    Args:
        name: of the model in messages.
        config: fields of its encoder's configuration.

    Raises:
        UserError: It is missing, or not the model's.
    """
    from transformers import AutoTokenizer

    _check_tokenizer_files(folder, name)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        folder, split_special_tokens=True, trust_remote_code=False
    )
    vocabulary = int(config.get("vocab_size", len(tokenizer)))
    if not max(0.9 * vocabulary, vocabulary - PADDING) <= len(tokenizer) <= vocabulary:
        raise UserError(
            f"{name}: its tokenizer has {len(tokenizer):,} entries, the model's vocabulary {vocabulary:,}: it is not "
            "this model's. Put the right tokenizer.json into the folder."
        )
    return tokenizer


def _check_tokenizer_files(folder: Path, name: str) -> None:
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        raise UserError(
            f"{name}: holds no tokenizer. Save the model's own beside its weights: "
            f"AutoTokenizer.from_pretrained(BASE).save_pretrained({str(folder)!r})."
        )


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    if missing := missing_folder(name):
        raise UserError(f"--model {name}: {missing}")
    try:
        for pattern in WEIGHTS:  # the second one only where there is none of the first
            folder = Path(snapshot_download(name, allow_patterns=[*DOWNLOADED, pattern]))
            if any(folder.glob(pattern)):
                break
    except Exception as error:  # huggingface_hub, its HTTP client and sockets raise their own kinds
        reason = first_line(error).rstrip(".")
        raise UserError(
            f"--model {name}: no such folder, and the Hub did not deliver it: {reason}."
        ) from None
    return folder
