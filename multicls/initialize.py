"""A Multi-CLS model for pretraining, started from any BERT checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from multicls.errors import UserError

if TYPE_CHECKING:
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

    Nothing of the checkpoint is dropped: the encoder, the pooler, the MLM head and the next-sentence classifier (which
    starts the sentence-order classifier) keep their weights where they exist. New weights are drawn from torch's
    global generator. Code that lies in the checkpoint's folder is never executed.

    Args:
        checkpoint: Hub id or folder of a BERT with any head.
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
    if base.model_type not in ("bert", MultiClsBertConfig.model_type):
        raise UserError(f"model {checkpoint}: its model_type is '{base.model_type}', not 'bert'.")
    settings: dict[str, Any] = {"num_facets": num_facets, "mcqt_lambda": mcqt_lambda, "hard_negatives": hard_negatives}
    if facet_layers is not None or base.model_type == "bert":
        settings["facet_layers"] = facet_layers
    config = _config(checkpoint, base, settings)
    if base.model_type == "bert":
        tokenizer = with_facets(tokenizer, num_facets)
    if random_weights:
        model = MultiClsBertForPreTraining(config)
        report(f"weights: random, in the shape of {checkpoint}")
    else:
        model, found = _load(checkpoint, config)
        report(_describe(checkpoint, found))
    if len(tokenizer) > model.config.vocab_size:
        model.resize_token_embeddings(len(tokenizer))
    return model, tokenizer


def _config(checkpoint: str, base: Any, settings: Mapping[str, Any]) -> MultiClsBertConfig:
    """The checkpoint's configuration with our settings; facets that are there already cannot change their number."""
    from multicls.configuration_multicls import MultiClsBertConfig

    for key in ("num_facets", "facet_layers") if base.model_type != "bert" else ():
        if key in settings and getattr(base, key) != settings[key]:
            raise UserError(
                f"model {checkpoint}: has {key} = {getattr(base, key)}, the settings ask for {settings[key]}."
            )
    dropped = ("model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype")
    kept = {key: value for key, value in base.to_dict().items() if key not in dropped}
    try:
        return MultiClsBertConfig(**(kept | dict(settings)))
    except ValueError as error:
        raise UserError(f"model.{error}.") from None


def _load(checkpoint: str, config: MultiClsBertConfig) -> tuple[MultiClsBertForPreTraining, dict[str, Any]]:
    import torch

    from multicls.modeling_multicls import MultiClsBertForPreTraining

    with _load_problems(checkpoint), quiet_transformers():
        loaded: Any = MultiClsBertForPreTraining.from_pretrained(
            checkpoint, config=config, output_loading_info=True, dtype=torch.float32
        )
    model, found = loaded
    return model, found


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
