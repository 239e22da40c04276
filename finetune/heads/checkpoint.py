"""A Hugging Face model to fine-tune: finds, fingerprints and loads it without running code from its folder.

A process reads weights, tokenizer and rows once for all runs that share them.
"""

from __future__ import annotations

import copy
import hashlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multicls.cards import CARD
from multicls.errors import UserError, first_line
from multicls.files import missing_folder, nearest_folder, read_json, sha256_of
from multicls.from_bert import quiet_transformers
from multicls.sample import sample_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune.data.encoding import Encoded
    from finetune.data.examples import LabeledExample
    from finetune.data.tasks import Task

WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
TEXT_FILES = ("*.json", "*.txt", "*.model", "*.py")
HASHED_FILES = ("config.json", "tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "*.model")
HASHED_OPTIONS = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True,
                  "add_prefix_space": False}  # of tokenizer_config.json, with their defaults  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A model folder."""

    name: str  # as the user gave it
    folder: Path
    config: dict[str, Any] = field(compare=False)  # its config.json, for which the fingerprint stands
    fingerprint: str  # SHA-256 (16 hex digits) over weights, configuration and tokenizer
    trust_remote_code: bool  # the user allows the code in the folder to run

    @property
    def model_type(self) -> str:
        """Returns `model_type` of config.json, "" if it has none."""
        return str(self.config.get("model_type", ""))

    @property
    def encoder(self) -> dict[str, Any]:
        """Returns the configuration of the encoder, also of a fine-tuned model with a head."""
        encoder: dict[str, Any] = self.config.get("encoder", self.config)
        return encoder

    @property
    def num_facets(self) -> int:
        """Returns K, the number of facets; 0 for a single-CLS model."""
        return int(self.encoder.get("num_facets", 0)) if self.encoder.get("model_type") == "multicls-bert" else 0


@lru_cache(maxsize=4)  # fingerprinted once for all runs of a grid
def find_checkpoint(name: str, trust_remote_code: bool = False) -> Checkpoint:
    """Returns the model folder `name`, or the hub's model of that id.

    A process reads it once: it does not see later changes to the folder.

    Raises:
        UserError: It is not there, not whole, of a type that transformers does not know, or needs its own code to run
            and `trust_remote_code` is not given.
    """
    folder = find_folder(name)
    config = read_json(folder / "config.json")
    _check_code(name, folder, config, trust_remote_code)
    return Checkpoint(name, folder, config, fingerprint_of(folder, trust_remote_code), trust_remote_code)


def find_folder(name: str) -> Path:
    """Returns the folder of the model `name`, fetched from the hub if it is no folder. Imports no transformers.

    "sample" is the BERT that comes with a Python package (`multicls.sample`).

    Raises:
        UserError: It is not there, or not whole.
    """
    folder = sample_model() if name == "sample" and not Path(name).exists() else Path(name)
    if not folder.is_dir():
        if missing := missing_folder(name):
            raise UserError(f"--model {name}: {missing}")
        folder = _from_hub(name)
    if not (folder / "config.json").exists():
        inside = folder / "hf"
        hint = f"did you mean {inside}?" if inside.is_dir() else "give the folder with the exported model (RUN/hf)."
        raise UserError(f"--model {name}: holds no config.json; {hint}")
    if not _weights(folder):
        raise UserError(f"--model {name}: holds no weights (model.safetensors).")
    return folder


def fingerprint_of(folder: Path, trust_remote_code: bool = False) -> str:
    """Returns the SHA-256 (16 hexadecimal digits) over weights, configuration and tokenizer of a model folder.

    Code that is allowed to run counts, too. Options of the tokenizer count unless they are defaults.
    """
    patterns = [*HASHED_FILES, *["*.py"] * trust_remote_code]
    files = [*_weights(folder), *(path for pattern in patterns for path in sorted(folder.glob(pattern)))]
    digests = [f"{path.name}:{sha256_of(path)}" for path in files]
    about = folder / "tokenizer_config.json"
    given = read_json(about) if about.exists() else {}
    options = {name: given.get(name, default) for name, default in HASHED_OPTIONS.items()}
    digests += [f"{name}:{value}" for name, value in options.items() if value != HASHED_OPTIONS[name]]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]


def _weights(folder: Path) -> list[Path]:
    return next((found for pattern in WEIGHTS if (found := sorted(folder.glob(pattern)))), [])


def load_tokenizer(checkpoint: Checkpoint, max_length: int) -> PreTrainedTokenizerBase:
    """Returns the checkpoint's tokenizer, which treats all text as text: "[SEP]" in a row is split like any word.

    Raises:
        UserError: it cannot be loaded, or the model has no `max_length` positions.
    """
    tokenizer = _read_tokenizer(checkpoint)
    encoder = checkpoint.encoder
    positions = int(encoder.get("max_position_embeddings", 512))
    if "roberta" in encoder.get("model_type", ""):  # its positions begin after the padding's
        positions -= int(encoder.get("pad_token_id", 1)) + 1
    positions = min(positions, tokenizer.model_max_length)
    least = len(tokenizer([""], [""])["input_ids"][0]) + 2  # a token of each of two texts
    if not least <= max_length <= positions:
        raise UserError(
            f"--max_length {max_length}: {checkpoint.name} takes sequences of {least} to {positions} tokens."
        )
    return tokenizer


@lru_cache(maxsize=2)
def _read_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    with _load_problems(checkpoint, "the tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            checkpoint.folder, split_special_tokens=True, trust_remote_code=checkpoint.trust_remote_code
        )
    return tokenizer


def load_encoder(checkpoint: Checkpoint) -> PreTrainedModel:
    """Returns the checkpoint's encoder in float32, without the heads of its pretraining.

    A process reads the weights of the last two checkpoints once. A pooler that the checkpoint lacks is drawn from
    torch's global generator at every call.

    Raises:
        UserError: it cannot be loaded, or weights other than the pooler's are missing.
    """
    read, missing = _read_encoder(checkpoint)
    encoder = copy.deepcopy(read)
    for name in missing:
        weight = encoder.get_parameter(name)
        weight.data.normal_(0.0, encoder.config.initializer_range) if weight.ndim > 1 else weight.data.zero_()
    return encoder


@lru_cache(maxsize=2)
def _read_encoder(checkpoint: Checkpoint) -> tuple[PreTrainedModel, list[str]]:
    """Returns the encoder and the names of the weights that its file lacks."""
    import torch
    from transformers import AutoModel

    with _load_problems(checkpoint, "the model"), quiet_transformers(), torch.random.fork_rng(devices=[]):
        encoder, found = AutoModel.from_pretrained(
            checkpoint.folder, dtype=torch.float32, trust_remote_code=checkpoint.trust_remote_code,
            output_loading_info=True,
        )  # fmt: skip
    missing = sorted(found["missing_keys"])
    if lost := [key for key in missing if not key.startswith("pooler.")]:
        raise UserError(f"--model {checkpoint.name}: weights of the encoder are missing: {', '.join(lost[:3])}, ...")
    return encoder, missing


@lru_cache(maxsize=2)
def read_fine_tuned(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Returns the weights of a fine-tuned model; they are shared, do not change them."""
    from finetune.heads.modeling_heads import TaskModel

    with _load_problems(checkpoint, "the model"), quiet_transformers():
        return TaskModel.from_pretrained(checkpoint.folder).state_dict()


def encode_rows(checkpoint: Checkpoint, task: Task, rows: Sequence[LabeledExample], max_length: int) -> Encoded:
    """Returns the rows as token ids; a process that encodes the same rows again gets the same object.

    Raises:
        UserError: the tokenizer cannot be loaded, or the rows do not fit into `max_length` tokens.
    """
    return _encode_rows(checkpoint, task, tuple(rows), max_length)


@lru_cache(maxsize=8)  # train, dev, held-out and test rows of two tasks
def _encode_rows(checkpoint: Checkpoint, task: Task, rows: tuple[LabeledExample, ...], max_length: int) -> Encoded:
    from finetune.data.encoding import Encoded

    return Encoded(task, rows, load_tokenizer(checkpoint, max_length), max_length)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=[*TEXT_FILES, CARD, WEIGHTS[0]]))
        if not list(folder.glob(WEIGHTS[0])):
            folder = Path(snapshot_download(name, allow_patterns=[*TEXT_FILES, WEIGHTS[1]]))
    except Exception as error:  # huggingface_hub, its HTTP client and the sockets below raise kinds of their own
        text = f"--model {name}: no such folder, and the hub did not give it: {first_line(error).rstrip('.')}."
        raise UserError(text + nearest_folder(Path(name))) from None
    return folder


def _check_code(name: str, folder: Path, config: dict[str, Any], trust_remote_code: bool) -> None:
    """Refuses a folder that only its own code can load, before any loader has seen it."""
    import transformers  # registers "multicls-bert", too

    import finetune.heads.registration  # noqa: F401 (registers fine-tuned models)
    import multicls  # noqa: F401

    model_type = config.get("model_type")
    if model_type in transformers.CONFIG_MAPPING:
        return
    if "auto_map" not in config:
        raise UserError(f"--model {name}: transformers knows no model_type {model_type!r} (config.json).")
    if not trust_remote_code:
        raise UserError(
            f"--model {name}: {folder} brings Python code of its own, which it needs to load (model_type "
            f"{model_type!r}). If you have read and trust that code, add --trust_remote_code."
        )


@contextmanager
def _load_problems(checkpoint: Checkpoint, what: str) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise UserError(f"--model {checkpoint.name}: {what} cannot be loaded: {first_line(error)}") from error
