"""Builds a Multi-CLS model for pretraining from a checkpoint of any encoder of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multicls.errors import UserError, first_line
from multicls.files import missing_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from multicls.modeling_multicls import MultiClsForPreTraining

VOCABULARY_MULTIPLE = 64  # rows of the word embeddings, so that 16-bit matrix products are aligned
WHAT_WORKS = (
    "An encoder of transformers with a masked-LM class works: BERT, RoBERTa, XLM-R, CamemBERT, ModernBERT, DeBERTa-v2 "
    "and v3, MPNet, DistilBERT, ELECTRA and others."
)


def build(
    checkpoint: str,
    *,
    num_facets: int = 5,
    facet_layers: list[int] | None = None,
    mcqt_lambda: float = 0.1,
    hard_negatives: bool = True,
    random_weights: bool = False,
    report: Callable[[str], None] = print,
) -> tuple[MultiClsForPreTraining, PreTrainedTokenizerFast]:
    """Builds a Multi-CLS model in float32, and its tokenizer, from the checkpoint of an encoder or a Multi-CLS model.

    The encoder and the MLM head keep the checkpoint's weights if it has them. New weights are drawn from torch's global
    generator. The vocabulary grows to a multiple of 64, and never shrinks. Code in the checkpoint is never executed.

    Args:
        checkpoint: Hub id or folder of a model with any head.
        num_facets: K; this and the next three as in `MultiClsConfig`. A Multi-CLS model keeps its K and its layers.
        random_weights: use only the shape and the tokenizer of the checkpoint.
        report: receives one line that says which parts are kept and which are new.

    Raises:
        UserError: the checkpoint cannot be loaded, does not fit, or lacks weights of the encoder.
    """
    from multicls.modeling_multicls import MultiClsConfig, MultiClsForPreTraining
    from multicls.tokenization import facet_ids, load_tokenizer, with_facets

    base, tokenizer = load_config(checkpoint), load_tokenizer(checkpoint)
    objective: dict[str, Any] = {"mcqt_lambda": mcqt_lambda, "hard_negatives": hard_negatives}
    with load_problems(checkpoint), quiet_transformers():
        if continued := isinstance(base, MultiClsConfig):
            config = base
            config.update(objective)
            _check_facets(config, num_facets, facet_layers, len(facet_ids(tokenizer)))
        else:
            tokenizer = with_facets(tokenizer, num_facets, getattr(base, "type_vocab_size", 0) > 1)
            facets: dict[str, Any] = {"num_facets": num_facets, "facet_layers": facet_layers}
            config = MultiClsConfig(encoder=base, **facets, **objective)
        config.facet_ids = list(facet_ids(tokenizer))
        if continued and not random_weights:
            model, _ = _load(MultiClsForPreTraining, checkpoint, config=config)
            text = f"all from {checkpoint}"
        else:
            model, text = MultiClsForPreTraining(config), f"random, in the shape of {checkpoint}"
            if not random_weights:
                text = _copy_weights(model, checkpoint)
        rows = max(len(tokenizer), config.vocab_size)
        model.resize_token_embeddings(rows, VOCABULARY_MULTIPLE, mean_resizing=False)
    report(f"weights: {text}")
    return model, tokenizer


def load_config(checkpoint: str) -> Any:
    """Returns the configuration of a checkpoint that `build` can start from.

    Raises:
        UserError: it cannot be loaded, or is no encoder; the message says why and what works.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, PreTrainedConfig

    import multicls.modeling_multicls  # noqa: F401 (registers the model type)

    if missing := missing_folder(checkpoint):
        raise UserError(f"model {checkpoint}: {missing}")
    with load_problems(checkpoint):
        fields = PreTrainedConfig.get_config_dict(checkpoint)[0]
    if not fields:
        inside = Path(checkpoint, "hf")
        hint = f"; did you mean {inside}?" if inside.is_dir() else "."
        raise UserError(f"model {checkpoint}: holds no config.json{hint}")
    known: Any = CONFIG_MAPPING
    kind, reason = fields.get("model_type"), ""
    if kind not in known:
        reason = "is not one of transformers. Code in a checkpoint is never executed"
    elif fields.get("is_encoder_decoder") or known[kind].is_encoder_decoder:
        reason = "is an encoder-decoder"
    elif fields.get("is_decoder") or known[kind] not in MODEL_FOR_MASKED_LM_MAPPING:
        reason = "has no masked-LM class in transformers; decoders do not work"
    elif fields.get("legacy") is False:  # of DeBERTa-v2
        reason = "with legacy = false has an MLM head that reads the encoder's embeddings"
    if reason:
        raise UserError(f"model {checkpoint}: model_type '{kind}' {reason}. {WHAT_WORKS}")
    with load_problems(checkpoint):
        config = known[kind].from_pretrained(checkpoint)
    config.architectures = config.dtype = None  # of the weights there, not of the model here
    return config


def _check_facets(config: Any, num_facets: int, facet_layers: Any, in_tokenizer: int) -> None:
    """Refuses settings, or a tokenizer, that differ from the facets of a Multi-CLS checkpoint."""
    for name, value in {"num_facets": num_facets, "facet_layers": facet_layers}.items():
        if value is not None and value != getattr(config, name):
            raise ValueError(f"has {name} = {getattr(config, name)}, the settings ask for {value}")
    if in_tokenizer != num_facets:
        raise ValueError(
            f"its tokenizer inserts {in_tokenizer} facets, the model has {num_facets}; put back the tokenizer files "
            "that were saved with it"
        )


def _load(kind: Any, checkpoint: str, may_lack: str | None = None, **options: Any) -> Any:
    """Returns a model in float32 and the names of its weights that the checkpoint lacks.

    Only those that begin with `may_lack` may be missing; the others, and other shapes, are a ValueError.
    """
    options |= {"dtype": "float32", "trust_remote_code": False, "output_loading_info": True}
    model, found = kind.from_pretrained(checkpoint, **options)
    missing = {str(name) for name in found["missing_keys"]}
    lost = {name for name in missing if may_lack is None or not name.startswith(may_lack)}
    if lost := lost | {str(key) for key in found["mismatched_keys"]}:
        names = ", ".join(sorted(lost)[:3])
        raise ValueError(f"weights of the encoder are missing or have another shape: {names} ...")
    return model, missing


def _copy_weights(model: MultiClsForPreTraining, checkpoint: str) -> str:
    """Copies the checkpoint's encoder and MLM head into the model; returns which parts are kept and which new."""
    from transformers import AutoModel, AutoModelForMaskedLM

    encoder, without_pooler = _load(AutoModel, checkpoint, may_lack="pooler.")
    model.multicls.encoder.load_state_dict(encoder.state_dict(), strict=False)
    masked, missing = _load(AutoModelForMaskedLM, checkpoint, may_lack="")
    inside = f"{masked.base_model_prefix}."
    head = {
        name: tensor
        for name, tensor in masked.state_dict().items()
        if name not in missing and not name.startswith(inside)
    }
    has_head = bool(head.keys() - masked.all_tied_weights_keys)
    if has_head:
        model.mlm.lm.load_state_dict(head, strict=False)
    model.tie_weights()
    is_new = {"pooler": bool(without_pooler), "MLM head": not has_head}
    new = [part for part, new in is_new.items() if new] + ["facets", "TF-IDF head", "order head"]
    kept = "encoder, MLM head" if has_head else "encoder"
    return f"{kept} from {checkpoint}; new: {', '.join(new)}"


@contextmanager
def load_problems(checkpoint: str) -> Iterator[None]:
    """Turns errors of loading a checkpoint into a `UserError` that names it."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"model {checkpoint}: does not work: {first_line(error)}") from None


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
