"""Builds a Multi-CLS model for pretraining from any BERT checkpoint."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multicls.errors import UserError, first_line
from multicls.files import missing_folder, read_json, sha256_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from multicls.configuration_multicls import MultiClsBertConfig
    from multicls.modeling_multicls import MultiClsBertForPreTraining

# Substrings of weight names, by part of the model. All parts but the encoder may be new.
PARTS = {
    "encoder": (".embeddings.", ".attention.", ".intermediate.", ".output."),
    "pooler": (".pooler.",),
    "MLM head": ("cls.predictions.",),
    "order classifier": ("cls.seq_relationship.",),
    "order transform": ("cls.order_transform.",),
    "TF-IDF head": ("cls.tfidf.",),
    "facets": (".facets.", ".facet_head."),
}

# Encoders that equal BERT's but name their weights differently: pattern of their name -> our name.
OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "electra": {r"^electra\.": "bert."},
    "roberta": {
        r"^roberta\.": "bert.",
        r"^lm_head\.dense\.": "cls.predictions.transform.dense.",
        r"^lm_head\.layer_norm\.": "cls.predictions.transform.LayerNorm.",
        r"^lm_head\.": "cls.predictions.",
    },
}
NOT_OF_BERT = ("embedding_size", "summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout")


def from_bert(
    checkpoint: str,
    *,
    num_facets: int = 5,
    facet_layers: list[int] | None = None,
    mcqt_lambda: float = 0.1,
    hard_negatives: bool = True,
    random_weights: bool = False,
    local_files_only: bool = False,
    report: Callable[[str], None] = print,
) -> tuple[MultiClsBertForPreTraining, PreTrainedTokenizerBase]:
    """Builds a Multi-CLS model and its tokenizer from a checkpoint: BERT, RoBERTa, ELECTRA or Multi-CLS BERT.

    RoBERTa, and an ELECTRA whose embeddings are as wide as its layers, have BERT's encoder under other names. The
    encoder, the pooler, the MLM head and the next-sentence classifier keep the checkpoint's weights if it has them; the
    next-sentence classifier initialises the sentence-order classifier. New weights are drawn from torch's global
    generator. Code in the checkpoint's folder is never executed.

    Args:
        checkpoint: Hub id or folder of a model with any head.
        num_facets: K; must equal the checkpoint's K if it is a Multi-CLS model. This and the next three: see
            `MultiClsBertConfig`.
        random_weights: use only the shape and the tokenizer of the checkpoint.
        local_files_only: do not ask the Hub; another process on this machine has fetched the checkpoint.
        report: receives one line that says which parts are kept, new or left over.

    Returns:
        The model in float32 and its tokenizer, which inserts the facets.

    Raises:
        UserError: the checkpoint cannot be loaded, is of another model type, or lacks weights of the encoder.
    """
    from transformers import AutoTokenizer

    from multicls.configuration_multicls import MultiClsBertConfig
    from multicls.modeling_multicls import MultiClsBertForPreTraining
    from multicls.tokenization import facet_ids, with_facets

    base = load_config(checkpoint, local_files_only)
    with _load_problems(checkpoint):
        tokenizer = AutoTokenizer.from_pretrained(
            checkpoint, trust_remote_code=False, local_files_only=local_files_only
        )
    has_facets = base.model_type == MultiClsBertConfig.model_type
    settings: dict[str, Any] = {"num_facets": num_facets, "mcqt_lambda": mcqt_lambda, "hard_negatives": hard_negatives}
    if facet_layers is not None or not has_facets:
        settings["facet_layers"] = facet_layers
    tokenizer = tokenizer if has_facets else with_facets(tokenizer, num_facets)
    config = _config(checkpoint, base, settings | {"facet_ids": list(facet_ids(tokenizer))}, has_facets)
    if random_weights:
        model = MultiClsBertForPreTraining(config)
        report(f"weights: random, in the shape of {checkpoint}")
    else:
        model, found = _load(checkpoint, config, base, local_files_only)
        report(_describe(checkpoint, found))
    if len(tokenizer) > model.config.vocab_size:
        model.resize_token_embeddings(len(tokenizer))
    return model, tokenizer


def checkpoint_fingerprint(checkpoint: str, *, weights: bool = True) -> str:
    """Returns the SHA-256 of a checkpoint's config.json and weight files.

    It depends on the content only, so a moved folder, or the Hub id of the same files, has the same fingerprint. The
    weights are hashed whole: names, shapes and sizes are equal for all models trained from one checkpoint. A model of
    random weights has none: then `weights` is False.

    Raises:
        UserError: the checkpoint cannot be had.
    """
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

    names, _ = ["config.json"], _cached_file(checkpoint, "config.json")  # a wrong name fails here, with one look-up
    if weights:
        known = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)  # as transformers looks
        found = next((name for name in known if _has_file(checkpoint, name)), SAFE_WEIGHTS_NAME)
        names.append(found)
        if found.endswith(".index.json"):
            names += sorted(set(read_json(_cached_file(checkpoint, found))["weight_map"].values()))
    digests = [sha256_of(_cached_file(checkpoint, name)) for name in names]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _cached_file(checkpoint: str, name: str) -> str:
    from transformers.utils import cached_file

    with _load_problems(checkpoint):
        found = cached_file(checkpoint, name)
    if found is None:
        inside = Path(checkpoint, "hf")
        hint = f"; did you mean {inside}?" if (inside / name).exists() else "."
        raise UserError(f"model {checkpoint}: holds no {name}{hint}")
    return str(found)


def _has_file(checkpoint: str, name: str) -> bool:
    try:
        return bool(_cached_file(checkpoint, name))
    except UserError:
        return False


def load_config(checkpoint: str, local_files_only: bool = False) -> Any:
    """Returns the configuration of a checkpoint that `from_bert` can start from.

    Raises:
        UserError: it cannot be loaded, or is of another model type.
    """
    from transformers import AutoConfig

    if missing := missing_folder(checkpoint):
        raise UserError(f"model {checkpoint}: {missing}")
    with _load_problems(checkpoint):
        base = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False, local_files_only=local_files_only)
    works = "BERT (MiniLM is one), RoBERTa, and ELECTRA whose embedding_size is its hidden_size"
    if base.model_type not in ("bert", "multicls-bert", *OTHER_NAMES):
        raise UserError(f"model {checkpoint}: its model_type is '{base.model_type}'. What works: {works}.")
    if base.model_type == "electra" and base.embedding_size != base.hidden_size:
        raise UserError(
            f"model {checkpoint}: its embedding_size = {base.embedding_size} is projected to hidden_size = "
            f"{base.hidden_size}, which BERT's encoder does not. What works: {works}."
        )
    return base


def _config(checkpoint: str, base: Any, settings: Mapping[str, Any], has_facets: bool) -> MultiClsBertConfig:
    """Combines the checkpoint's configuration with our settings; existing facets must agree with them."""
    from multicls.configuration_multicls import MultiClsBertConfig

    for key in ("num_facets", "facet_layers") if has_facets else ():
        if key in settings and getattr(base, key) != settings[key]:
            raise UserError(
                f"model {checkpoint}: has {key} = {getattr(base, key)}, the settings ask for {settings[key]}."
            )
    if len(settings["facet_ids"]) != settings["num_facets"]:
        raise UserError(
            f"model {checkpoint}: its tokenizer inserts {len(settings['facet_ids'])} facets, the model has "
            f"{settings['num_facets']}; put back the tokenizer files that were saved with it."
        )
    dropped = ("model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype", *NOT_OF_BERT)
    kept = {key: value for key, value in base.to_dict().items() if key not in dropped}
    if base.model_type == "roberta":
        kept |= {"max_position_embeddings": base.max_position_embeddings - base.pad_token_id - 1, "type_vocab_size": 2}
    try:
        return MultiClsBertConfig(**(kept | dict(settings)))
    except ValueError as error:
        raise UserError(f"model.{error}.") from None


def _load(
    checkpoint: str, config: MultiClsBertConfig, base: Any, local_files_only: bool
) -> tuple[MultiClsBertForPreTraining, dict[str, Any]]:
    import torch

    from multicls.modeling_multicls import MultiClsBertForPreTraining

    how: dict[str, Any] = {"output_loading_info": True, "dtype": torch.float32, "local_files_only": local_files_only}
    with _load_problems(checkpoint), quiet_transformers():
        source: str | None = checkpoint
        if base.model_type in OTHER_NAMES:
            source, how["state_dict"] = None, _renamed_weights(checkpoint, base, how)
        loaded: Any = MultiClsBertForPreTraining.from_pretrained(source, config=config, **how)
    model, found = loaded
    return model, found


def _renamed_weights(checkpoint: str, base: Any, how: dict[str, Any]) -> dict[str, Tensor]:
    """Returns all weights of the checkpoint under BERT's names."""
    from transformers import AutoModelForPreTraining

    loaded: Any = AutoModelForPreTraining.from_pretrained(checkpoint, **how)
    model, found = loaded
    weights = {}
    for name, tensor in model.state_dict().items():
        if name not in found["missing_keys"]:
            for theirs, ours in OTHER_NAMES[base.model_type].items():
                name = re.sub(theirs, ours, name)
            weights[name] = tensor
    if base.model_type == "roberta":  # its positions start after the padding's; it has one token type
        positions, types = (f"bert.embeddings.{name}_embeddings.weight" for name in ("position", "token_type"))
        weights[positions] = weights[positions][base.pad_token_id + 1 :].clone()
        weights[types] = weights[types][:1].repeat(2, 1)
    return weights


@contextmanager
def _load_problems(checkpoint: str) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"model {checkpoint}: cannot be loaded: {first_line(error)} "
            "Give the folder or the Hub id of a BERT checkpoint with its tokenizer."
        ) from None


def _describe(checkpoint: str, found: dict[str, Any]) -> str:
    """Says which parts were kept, new or left over; refuses a checkpoint without the whole encoder."""
    missing = sorted(found["missing_keys"])
    new = [part for part, marks in PARTS.items() if any(mark in key for key in missing for mark in marks)]
    if "encoder" in new or found["mismatched_keys"]:
        lost = [key for key in missing if any(mark in key for mark in PARTS["encoder"])]
        names = ", ".join((lost or sorted(str(key) for key in found["mismatched_keys"]))[:3])
        raise UserError(f"model {checkpoint}: weights of the encoder are missing or have another shape ({names}, ...).")
    text = f"weights: {', '.join(part for part in PARTS if part not in new)} from {checkpoint}"
    if new:
        text += f"; new: {', '.join(new)}"
    if found["unexpected_keys"]:
        text += f"; left over: {', '.join(sorted(found['unexpected_keys']))}"
    return text


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers' load report and progress bars; our own lines report the same."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
