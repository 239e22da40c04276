"""Files beside a saved model: its card with the metadata that the Hub reads, and sentence-transformers' settings."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multicls.files import read_json, write_json
from multicls.sample import SAMPLE, SAMPLE_MODEL_ID, sample_model

CARD = "README.md"
SENTENCE_CONFIG = "sentence_bert_config.json"
EXPORT_INFO = "export.json"  # in RUN/model: facts for the card; in an export its step, too
TRANSFORMERS = "5.17"  # the oldest release that loads the models; pyproject.toml has the same
METHOD = "multicls"
HUB_ID = (
    r"(bert|roberta|distilbert|xlm-roberta|camembert)-(base|large)[\w-]*"
    r"|\w[\w.-]*/(?!checkpoint-\d)\w[\w.-]*"
)
INHERITED = ("base_model", "license", "license_name", "license_link", "language")  # of a card
PAPERS = {  # to cite for the method and for heads
    METHOD: "Chang et al., 2022: Multi-CLS BERT: An Efficient Alternative to Traditional Ensembling. "
    "[arXiv:2210.05043](https://arxiv.org/abs/2210.05043)",
    "isobn": "Zhou et al., 2020: IsoBN: Fine-Tuning BERT with Isotropic Batch Normalization. "
    "[arXiv:2005.02178](https://arxiv.org/abs/2005.02178)",
    "hire": "Yang and Zhao, 2019: Deepening Hidden Representations from Pre-trained Language Models. "
    "[arXiv:1911.01940](https://arxiv.org/abs/1911.01940)",
    "cln": "Abrams: Improving minBERT with Conditional Layer Normalization. Report of the course CS224N, Stanford.",
}
# The model pools itself (`MultiClsModel.embed_sentences`), so the folder needs no pooling module. For the method
# `forward`, sentence-transformers would pack texts for flash attention, and facets would have other positions.
SENTENCE_TRANSFORMER: dict[str, Any] = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ],
    SENTENCE_CONFIG: {
        "modality_config": {"text": {"method": "embed_sentences", "method_output_name": None}},
        "module_output_name": "sentence_embedding",
        "processor_kwargs": {"split_special_tokens": True},  # a literal "[SEP]" in a text is text
    },
}
ENCODING = ("max_seq_length", "do_lower_case")  # what an export keeps of the checkpoint's
PROMPTS = ("prompts", "default_prompt_name", "similarity_fn_name")
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
POOLING_FLAGS = {  # of older files -> their names since
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class SentenceEmbedding:
    """How the SentenceTransformer of a checkpoint makes an embedding of a text.

    Attributes:
        pooling: "mean" or "cls"; "": the checkpoint has no module for it.
        normalize: Its length is 1.
        replaced: What has to be replaced, and by what, in words.
        files: `SENTENCE_TRANSFORMER` with the checkpoint's prompts, similarity and length.
    """

    pooling: str
    normalize: bool
    replaced: tuple[str, ...]
    files: dict[str, Any]


def sentence_embedding(
    checkpoint: str, revision: str | None = None, kind: str = "bert"
) -> SentenceEmbedding:
    """Returns the sentence embedding of a checkpoint (a folder or Hub id) from the files of sentence-transformers.

    Args:
        kind: The encoder's model type, which names a file in older checkpoints.
    """
    pooling, normalize, replaced, files = "", False, list[str](), dict(SENTENCE_TRANSFORMER)
    for module in _read(checkpoint, "modules.json", revision, []):
        name = str(module["type"]).rpartition(".")[2]
        if name == "Pooling":
            config = _read(checkpoint, f"{module['path']}/config.json", revision, {})
            modes = _pooling_modes(config)
            pooling = "cls" if modes == ["cls"] else "mean"
            if modes != [pooling]:
                replaced.append(f"{' and '.join(modes)} pooling by the mean over tokens")
            if config.get("include_prompt") is False:
                replaced.append("pooling without the prompt by pooling with it")
        elif name == "Normalize":
            normalize = True
        elif name not in ("Transformer", "Dropout"):
            replaced.append(f"the module {name} by nothing")
    for file in dict.fromkeys((SENTENCE_CONFIG, f"sentence_{kind}_config.json")):
        settings = _read(checkpoint, file, revision, {})
        kept = {name: settings[name] for name in ENCODING if settings.get(name)}
        files[SENTENCE_CONFIG] = files[SENTENCE_CONFIG] | kept
    settings = _read(checkpoint, "config_sentence_transformers.json", revision, {})
    kept = {name: settings[name] for name in PROMPTS if settings.get(name)}
    if kept.get("similarity_fn_name") not in SIMILARITIES:
        kept.pop("similarity_fn_name", None)
    if kept:
        files["config_sentence_transformers.json"] = kept
    return SentenceEmbedding(pooling, normalize, tuple(replaced), files)


def _pooling_modes(config: Mapping[str, Any]) -> list[str]:
    """Returns the poolings of a Pooling module, by sentence-transformers' names; older files have a flag for each."""
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in POOLING_FLAGS.items() if config.get(flag)]
    return [modes] if isinstance(modes, str) else list(modes) or ["mean"]


def _read(checkpoint: str, name: str, revision: str | None, otherwise: Any) -> Any:
    """Returns the content of a JSON file of a checkpoint, or `otherwise` if it has none."""
    from transformers.utils import cached_file

    path = cached_file(
        checkpoint, name, revision=revision, _raise_exceptions_for_missing_entries=False
    )
    return read_json(Path(path)) if path else otherwise


def write_sentence_transformer(
    folder: Path, files: Mapping[str, Any] = SENTENCE_TRANSFORMER
) -> None:
    """Writes the files with which sentence-transformers loads a model folder."""
    for name, content in files.items():
        write_json(folder / name, content)


def inherited_metadata(checkpoint: str) -> dict[str, Any]:
    """Returns `base_model`, `license` and `language` of a model that is trained from `checkpoint`, as far as known.

    They come from the card of the checkpoint (a folder, Hub id, or "sample"). A folder's base model is the one that its
    card names: the Hub refuses a path.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.repocard import metadata_load

    folder, card = Path(checkpoint), dict[str, Any]()
    if checkpoint == SAMPLE and not folder.exists():
        return inherited_metadata(str(sample_model())) | {"base_model": SAMPLE_MODEL_ID}
    with suppress(Exception):  # no card, a broken one, or whatever the Hub's transports raise
        path = folder / CARD if folder.is_dir() else hf_hub_download(checkpoint, CARD)
        card = dict(metadata_load(path) or {})
    if not folder.is_dir():
        card["base_model"] = checkpoint
    metadata = {field: card[field] for field in INHERITED if card.get(field)}
    if isinstance(metadata.get("language"), str):
        metadata["language"] = [metadata["language"]]
    if not re.fullmatch(HUB_ID, str(metadata.get("base_model"))):
        metadata.pop("base_model", None)
    return metadata


def model_link(metadata: Mapping[str, Any]) -> str:
    """Returns a Markdown link to the base model, or "a local checkpoint" if its Hub id is not known."""
    base = metadata.get("base_model")
    return f"[{base}](https://huggingface.co/{base})" if base else "a local checkpoint"


def cell(text: object) -> str:
    """Returns a user's text, escaped so that it breaks neither a table nor the Markdown around it."""
    return re.sub(r"([|`<>\[\]*\\])", r"\\\1", " ".join(str(text).split()))
