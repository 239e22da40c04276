"""A Multi-CLS model for pretraining, started from any BERT checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from multicls.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from multicls.configuration_multicls import MultiClsBertConfig
    from multicls.modeling_multicls import MultiClsBertForPreTraining

# Parts of the model by what their weights' names contain; all but the first may be new.
PARTS = {
    "encoder": (".embeddings.", ".attention.", ".intermediate.", ".output."),
    "pooler": (".pooler.",),
    "MLM head": ("cls.predictions.",),
    "order classifier": ("cls.seq_relationship.",),
    "order transform": ("cls.order_transform.",),
    "TF-IDF head": ("cls.tfidf.",),
    "facets": (".facets.", ".facet_head."),
}

# Encoders that are BERT's under other names, and those names as patterns.
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
    report: Callable[[str], None] = print,
) -> tuple[MultiClsBertForPreTraining, PreTrainedTokenizerBase]:
    """Builds a Multi-CLS model and its tokenizer from a BERT (or an earlier Multi-CLS) checkpoint.

    An ELECTRA whose embeddings are as wide as its layers, or a RoBERTa, is a BERT under other names and does as well.
    Nothing of the checkpoint is dropped: the encoder, the pooler, the MLM head and the next-sentence classifier (which
    starts the sentence-order classifier) keep their weights where they exist. New weights are drawn from torch's
    global generator. Code that lies in the checkpoint's folder is never executed.

    Args:
        checkpoint: Hub id or folder of such a model with any head.
        num_facets: K; must agree with the checkpoint's if that is a Multi-CLS model already.
        facet_layers: as `MultiClsBertConfig`.
        mcqt_lambda: as `MultiClsBertConfig`.
        hard_negatives: as `MultiClsBertConfig`.
        random_weights: takes the shape of the checkpoint only.
        report: receives a line on what was kept, what is new and what was left over.

    Raises:
        UserError: the checkpoint cannot be had, is no BERT, or lacks weights of the encoder.
    """
    from transformers import AutoConfig, AutoTokenizer

    from multicls.configuration_multicls import MultiClsBertConfig
    from multicls.modeling_multicls import MultiClsBertForPreTraining
    from multicls.tokenization import with_facets

    with _load_problems(checkpoint):
        base = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    _check_kind(checkpoint, base)
    has_facets = base.model_type == MultiClsBertConfig.model_type
    settings: dict[str, Any] = {"num_facets": num_facets, "mcqt_lambda": mcqt_lambda, "hard_negatives": hard_negatives}
    if facet_layers is not None or not has_facets:
        settings["facet_layers"] = facet_layers
    config = _config(checkpoint, base, settings, has_facets)
    if not has_facets:
        tokenizer = with_facets(tokenizer, num_facets)
    if random_weights:
        model = MultiClsBertForPreTraining(config)
        report(f"weights: random, in the shape of {checkpoint}")
    else:
        model, found = _load(checkpoint, config, base)
        report(_describe(checkpoint, found))
    if len(tokenizer) > model.config.vocab_size:
        model.resize_token_embeddings(len(tokenizer))
    return model, tokenizer


def _check_kind(checkpoint: str, base: Any) -> None:
    works = "BERT (MiniLM is one), RoBERTa, and ELECTRA whose embedding_size is its hidden_size"
    if base.model_type not in ("bert", "multicls-bert", *OTHER_NAMES):
        raise UserError(f"model {checkpoint}: its model_type is '{base.model_type}'. What works: {works}.")
    if base.model_type == "electra" and base.embedding_size != base.hidden_size:
        raise UserError(
            f"model {checkpoint}: its embedding_size = {base.embedding_size} is projected to hidden_size = "
            f"{base.hidden_size}, which BERT's encoder does not. What works: {works}."
        )


def _config(checkpoint: str, base: Any, settings: Mapping[str, Any], has_facets: bool) -> MultiClsBertConfig:
    """The checkpoint's configuration with our settings; facets that are there already cannot change their number."""
    from multicls.configuration_multicls import MultiClsBertConfig

    for key in ("num_facets", "facet_layers") if has_facets else ():
        if key in settings and getattr(base, key) != settings[key]:
            raise UserError(
                f"model {checkpoint}: has {key} = {getattr(base, key)}, the settings ask for {settings[key]}."
            )
    dropped = ("model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype", *NOT_OF_BERT)
    kept = {key: value for key, value in base.to_dict().items() if key not in dropped}
    if base.model_type == "roberta":
        kept |= {"max_position_embeddings": base.max_position_embeddings - base.pad_token_id - 1, "type_vocab_size": 2}
    try:
        return MultiClsBertConfig(**(kept | dict(settings)))
    except ValueError as error:
        raise UserError(f"model.{error}.") from None


def _load(checkpoint: str, config: MultiClsBertConfig, base: Any) -> tuple[MultiClsBertForPreTraining, dict[str, Any]]:
    import torch

    from multicls.modeling_multicls import MultiClsBertForPreTraining

    with _load_problems(checkpoint), quiet_transformers():
        source: dict[str, Any] = {"pretrained_model_name_or_path": checkpoint}
        if base.model_type in OTHER_NAMES:
            source = {"pretrained_model_name_or_path": None, "state_dict": _renamed_weights(checkpoint, base)}
        loaded: Any = MultiClsBertForPreTraining.from_pretrained(
            **source, config=config, output_loading_info=True, dtype=torch.float32
        )
    model, found = loaded
    return model, found


def _renamed_weights(checkpoint: str, base: Any) -> dict[str, Tensor]:
    """All weights that lie in the checkpoint, under BERT's names."""
    import torch
    from transformers import AutoModelForPreTraining

    loaded: Any = AutoModelForPreTraining.from_pretrained(checkpoint, output_loading_info=True, dtype=torch.float32)
    model, found = loaded
    weights = {}
    for name, tensor in model.state_dict().items():
        if name not in found["missing_keys"]:
            for theirs, ours in OTHER_NAMES[base.model_type].items():
                name = re.sub(theirs, ours, name)
            weights[name] = tensor
    if base.model_type == "roberta":  # its positions begin behind the padding's, and its token types are all the same
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
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"model {checkpoint}: cannot be loaded: {reason} "
            "Give the folder or the Hub id of a BERT checkpoint with its tokenizer."
        ) from None


def _describe(checkpoint: str, found: dict[str, Any]) -> str:
    missing = sorted(found["missing_keys"])
    new = [part for part, marks in PARTS.items() if any(mark in key for key in missing for mark in marks)]
    if "encoder" in new or found["mismatched_keys"]:
        lost = [key for key in missing if any(mark in key for mark in PARTS["encoder"])]
        names = ", ".join((lost or sorted(str(key) for key in found["mismatched_keys"]))[:3])
        raise UserError(f"model {checkpoint}: weights of the encoder are missing or of another shape ({names}, ...).")
    text = f"weights: {', '.join(part for part in PARTS if part not in new)} from {checkpoint}"
    if new:
        text += f"; new: {', '.join(new)}"
    if found["unexpected_keys"]:
        text += f"; left over: {', '.join(sorted(found['unexpected_keys']))}"
    return text


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers' load report and progress bars: what matters of them is told in our own words."""
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
