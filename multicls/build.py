"""Builds a Multi-CLS model for pretraining from a checkpoint of any encoder of transformers."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerFast
from transformers.utils import cached_file, logging
from transformers.utils.hub import extract_commit_hash

from multicls.cards import (
    EXPORT_INFO,
    SENTENCE_CONFIG,
    SENTENCE_TRANSFORMER,
    sentence_embedding,
)
from multicls.errors import UserError, first_line
from multicls.files import missing_folder, read_json
from multicls.modeling_multicls import MultiClsConfig, MultiClsForPreTraining
from multicls.tokenization import facet_ids, load_tokenizer, with_facets

MLM_HEAD = "MLM head"
PARTS = {  # of a model, and how the names of their weights begin; the encoder has the others
    "pooler": r"multicls\.encoder\.pooler\.",
    MLM_HEAD: r"mlm\.",
    "facets": r"multicls\.facet_head\.|multicls\.encoder\..*\.facets\.weight$",
    "TF-IDF head": r"tfidf\.",
    "order head": r"order\.",
}
HEADS = (
    r"(mlm|tfidf|order)\..*|multicls\.encoder\.pooler\..*"  # which a Multi-CLS checkpoint may lack
)
WHAT_WORKS = "BERT, RoBERTa, XLM-R, CamemBERT, ModernBERT, DeBERTa, MPNet, DistilBERT, ELECTRA and others work"


def build(
    checkpoint: str,
    *,
    num_facets: int | None = 5,
    facet_layers: list[int] | None = None,
    mcqt_lambda: float = 0.1,
    mcqt_scale: float = 1.0,
    hard_negatives: bool = True,
    random_weights: bool = False,
    revision: str | None = None,
    report: Callable[[str], None] = print,
) -> tuple[MultiClsForPreTraining, PreTrainedTokenizerFast]:
    """Builds a Multi-CLS model in float32, and its tokenizer, from the checkpoint of an encoder or a Multi-CLS model.

    The encoder and the MLM head keep the checkpoint's weights if it has them. New weights are drawn from torch's global
    generator. The vocabulary grows to a multiple of 64, and never shrinks. Code in the checkpoint is never executed.

    Args:
        checkpoint: Hub id or folder of a model with any head.
        num_facets: K; None: the checkpoint's, 0 if it has none. It and the next four are those of `MultiClsConfig`. A
            Multi-CLS checkpoint keeps K and layers.
        revision: branch, tag or commit of a Hub id.
        random_weights: use only the shape and the tokenizer of the checkpoint.
        report: receives a line with the parts that are kept and those that are new, and one if padding changes facets.

    Raises:
        UserError: the checkpoint cannot be loaded, is no encoder, does not fit, or lacks weights of the encoder.
    """
    if missing := missing_folder(checkpoint):
        raise UserError(f"model {checkpoint}: {missing}")
    with load_problems(checkpoint), quiet_transformers():
        source = _load_config(checkpoint, revision)
        tokenizer = load_tokenizer(checkpoint, revision)
        config = _config(
            source,
            tokenizer,
            num_facets,
            facet_layers,
            mcqt_lambda=mcqt_lambda,
            mcqt_scale=mcqt_scale,
            hard_negatives=hard_negatives,
        )
        if not (isinstance(source, MultiClsConfig) and source.num_facets):
            tokenizer = with_facets(tokenizer, config.num_facets, config.has_token_types)
        tokenizer.model_max_length = min(tokenizer.model_max_length, config.max_tokens)
        model, new = _with_weights(config, source, checkpoint, revision, random_weights)
        rows = max(len(tokenizer), config.vocab_size)
        # A multiple of 64 rows, so that 16-bit matrix products are aligned.
        model.resize_token_embeddings(rows, 64, mean_resizing=False)
        model.new_weights = frozenset(new & {name for name, _ in model.named_parameters()})
        file = cached_file(checkpoint, "config.json", revision=revision)
        model.config._commit_hash = extract_commit_hash(file, None)  # of the Hub; None: a folder
        report(f"weights: {'random' if random_weights else _origin(model)}")
        model.sentence_files = SENTENCE_TRANSFORMER
        if not random_weights:
            _keep_embedding(model, source, checkpoint, revision, report)
        _check_encoder_works(model, tokenizer, report)
    return model, tokenizer


def _config(
    source: Any,
    tokenizer: Any,
    num_facets: int | None,
    facet_layers: list[int] | None,
    **fields: Any,
) -> MultiClsConfig:
    """Returns the configuration of a Multi-CLS model on an encoder; a checkpoint with facets keeps its own."""
    if not isinstance(source, MultiClsConfig):
        return MultiClsConfig(
            encoder=source, num_facets=num_facets or 0, facet_layers=facet_layers, **fields
        )
    _check_facets(source, len(facet_ids(tokenizer)), num_facets, facet_layers)
    if source.num_facets:
        num_facets, facet_layers = source.num_facets, source.facet_layers
    return MultiClsConfig(
        encoder=source.encoder, num_facets=num_facets or 0, facet_layers=facet_layers, **fields
    )


def _with_weights(
    config: MultiClsConfig,
    source: Any,
    checkpoint: str,
    revision: str | None,
    random_weights: bool,
) -> tuple[Any, set[str]]:
    """Returns a model with the weights of a checkpoint of configuration `source`, and the names of its new weights."""
    if random_weights:
        model = MultiClsForPreTraining(config)
        return model, {name for name, _ in model.named_parameters() if ".encoder." not in name}
    if isinstance(source, MultiClsConfig):
        return _continued(config, source, checkpoint, revision)
    model = MultiClsForPreTraining(config)
    return model, _copy_weights(model, checkpoint, revision)


def _keep_embedding(
    model: Any, source: Any, checkpoint: str, revision: str | None, report: Callable[[str], None]
) -> None:
    """Lets the model embed texts as the checkpoint's SentenceTransformer does; reports what is replaced."""
    embedding = sentence_embedding(checkpoint, revision, model.config.encoder.model_type)
    pooling, normalize = "mean", False
    if isinstance(source, MultiClsConfig):
        pooling, normalize = source.pooling, source.normalize
    model.config.pooling = embedding.pooling or pooling
    model.config.normalize = embedding.normalize or normalize
    model.sentence_files = embedding.files
    if tokens := getattr(source, "encoder_tokens", None):  # of an export with topics
        sentence = embedding.files[SENTENCE_CONFIG] | {"max_seq_length": tokens}
        model.sentence_files = embedding.files | {SENTENCE_CONFIG: sentence}
    if embedding.replaced:
        report(f"sentence embedding: replaces {', '.join(embedding.replaced)}")


def part_of(name: str) -> str:
    """Returns the part of a model that a weight belongs to."""
    parts = (part for part, pattern in PARTS.items() if re.match(pattern, name))
    return next(parts, "encoder")


def new_parts(model: Any) -> list[str]:
    """Returns the parts of a model of `build` all of whose weights are new, in the order of `PARTS`."""
    kept = {part_of(n) for n, _ in model.named_parameters() if n not in model.new_weights}
    new = {part_of(name) for name in model.new_weights} - kept
    return [part for part in PARTS if part in new]


def _origin(model: Any) -> str:
    """Returns in words which parts of the model are kept and which are new."""
    new = new_parts(model)
    if not new:
        return "all"
    kept = [part for part in PARTS if part not in (*new, "pooler")]
    loss = f"{MLM_HEAD} (its loss begins near {math.log(model.config.vocab_size):.1f})"
    shown = [loss if part == MLM_HEAD else part for part in new]
    return f"{', '.join(['encoder', *kept])}; new: {', '.join(shown)}"


def _load_config(checkpoint: str, revision: str | None) -> Any:
    """Returns the configuration of an encoder's checkpoint. Raises ValueError with the reason and what works."""
    if revision and Path(checkpoint).is_dir():
        raise ValueError(f"model.revision = {revision}: this is a folder, not a Hub id")
    known: Any = transformers.CONFIG_MAPPING
    get_fields = transformers.PreTrainedConfig.get_config_dict
    kind = get_fields(checkpoint, revision=revision)[0].get("model_type")
    if kind is None:
        raise ValueError("it holds no config.json; of a run, pass RUN/hf")
    config: Any = None
    if kind in known:
        config = known[kind].from_pretrained(checkpoint, revision=revision)
    masked: Any = transformers.MODEL_FOR_MASKED_LM_MAPPING.get(type(config), None)
    reason = ""
    if config is None:
        reason = "is not one of transformers. Code in a checkpoint is never executed"
    elif config.is_encoder_decoder or getattr(config, "is_decoder", False):
        reason = "is a decoder or an encoder-decoder"
    elif masked is None:
        reason = "has no masked-LM class in transformers; decoders do not work"
    elif not config.tie_word_embeddings and len(masked._tied_weights_keys or {}) > 1:
        reason = (
            "with tie_word_embeddings = false has an MLM head with two biases, which cannot grow"
        )
    if reason:
        raise ValueError(f"model_type '{kind}' {reason}. {WHAT_WORKS}")
    config.architectures = config.dtype = None  # of the weights there, not of the model here
    return config


def _check_facets(
    config: MultiClsConfig, inserted: int, num_facets: int | None, facet_layers: list[int] | None
) -> None:
    """Refuses a tokenizer, or settings, that differ from the facets of a Multi-CLS checkpoint that has some."""
    if inserted != config.num_facets:
        raise ValueError(
            f"its tokenizer inserts {inserted} facets, the model has {config.num_facets}"
        )
    wanted = {"num_facets": num_facets, "facet_layers": facet_layers} if inserted else {}
    for name, value in wanted.items():
        if value not in (None, getattr(config, name)):
            raise ValueError(f"has {name} = {getattr(config, name)}, the settings ask for {value}")


def load_weights(kind: Any, checkpoint: str, may_lack: str = "", **options: Any) -> Any:
    """Returns a model of `kind`, a class or auto class, in float32, and the names of weights that the checkpoint lacks.

    `options` go to `from_pretrained`. Raises ValueError for other shapes, for missing names not matched by `may_lack`,
    and for weights that are not finite.
    """
    options |= {"dtype": "float32", "trust_remote_code": False, "output_loading_info": True}
    model, keys = kind.from_pretrained(checkpoint, **options)
    missing = set(map(str, keys["missing_keys"]))
    lost = {name for name in missing if not re.fullmatch(may_lack, name)}
    if lost := lost | set(map(str, keys["mismatched_keys"])):
        names = ", ".join(sorted(lost)[:3])
        part = part_of(min(lost))
        raise ValueError(f"weights of the {part} are missing or have another shape: {names} ...")
    for name, weight in model.state_dict().items():
        if not weight.isfinite().all():
            raise ValueError(f"its weight {name} holds NaN or infinite values")
    return model, missing


def _copy_weights(model: Any, checkpoint: str, revision: str | None) -> set[str]:
    """Copies the checkpoint's encoder and MLM head into the model; returns the names of the weights that stay new."""
    encoder, lacking = load_weights(
        transformers.AutoModel, checkpoint, r"pooler\..*", revision=revision
    )
    model.multicls.encoder.load_state_dict(encoder.state_dict(), strict=False)
    masked, missing = load_weights(
        transformers.AutoModelForMaskedLM, checkpoint, ".*", revision=revision
    )
    inside = f"{masked.base_model_prefix}."
    state = masked.state_dict()
    head = {name for name in state.keys() - missing if not name.startswith(inside)}
    if not head - masked.all_tied_weights_keys.keys():
        head = set()
    model.mlm.lm.load_state_dict({name: state[name] for name in head}, strict=False)
    model.tie_weights()
    kept = {f"mlm.lm.{name}" for name in head}
    parts = {name: part_of(name) for name, _ in model.named_parameters()}
    new = {name for name, part in parts.items() if part not in ("encoder", "pooler")}
    return new - kept | {f"multicls.encoder.{name}" for name in lacking}


def _continued(
    config: MultiClsConfig, source: MultiClsConfig, checkpoint: str, revision: str | None
) -> tuple[Any, set[str]]:
    """Returns a model with the weights of a Multi-CLS checkpoint, and the names of those that are new.

    New are the heads that it lacks, or that no run has trained yet, and facets where it has none.
    """
    source.num_topics = 0  # they belong to the corpus of its own run
    model, new = load_weights(
        MultiClsForPreTraining, checkpoint, HEADS, config=source, revision=revision
    )
    file = cached_file(
        checkpoint, EXPORT_INFO, revision=revision, _raise_exceptions_for_missing_entries=False
    )
    if file:
        new |= set(read_json(Path(file)).get("new_weights", []))
    state = {name: weight for name, weight in model.state_dict().items() if name not in new}
    if config.num_facets != source.num_facets:
        state = {n: w for n, w in state.items() if part_of(n) not in ("facets", "order head")}
    model = MultiClsForPreTraining(config)
    new |= set(model.load_state_dict(state, strict=False).missing_keys)
    return model, new


def _check_encoder_works(
    model: MultiClsForPreTraining, tokenizer: Any, report: Callable[[str], None]
) -> None:
    """Makes a forward and a backward pass. Raises ValueError if the encoder does not work."""
    kind, was_training = model.config.encoder.model_type, model.training
    fit: Any = {"padding": True, "truncation": True, "max_length": model.config.max_tokens}
    batch = tokenizer(["a"] * 6, **fit, return_tensors="pt")
    padded = tokenizer(["a"] * 5 + ["a " * 9], **fit, return_tensors="pt")
    try:
        out = model.eval()(**batch, labels=batch["input_ids"])
        out.loss.backward()
        facets = model(**padded).facet_embeddings[:5]
    except Exception as error:
        raise ValueError(f"model_type '{kind}' does not work: {first_line(error)}") from None
    weights = model.multicls.named_parameters()
    passed_by = any("facets.weight" in name and p.grad is None for name, p in weights)
    model.train(was_training).zero_grad()
    if passed_by:
        raise ValueError(f"model_type '{kind}' passes by its layers; set facet_layers to []")
    if not facets.allclose(out.facet_embeddings[:5], atol=1e-3):
        report(f"model_type '{kind}' reads padding: facets depend on the longest text of a batch")


@contextmanager
def load_problems(checkpoint: str) -> Iterator[None]:
    """Turns errors of loading a checkpoint into a `UserError` that names it."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, TypeError, SafetensorError) as error:
        raise UserError(f"model {checkpoint}: cannot be loaded: {first_line(error)}") from None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers' load report and progress bars; our own lines report the same."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
