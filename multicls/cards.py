"""Model cards: the README.md of a saved model, with the metadata that the Hub reads. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from multicls.files import read_json
from multicls.sample import SAMPLE, SAMPLE_MODEL_ID, sample_model

CARD = "README.md"
TRANSFORMERS = "5.17"  # the oldest release that loads the models; pyproject.toml has the same
METHOD = "multicls"
LANGUAGE = r"[a-z]{2,3}(-[A-Za-z]+)?|multilingual"
HUB_ID = (
    r"(bert|roberta|distilbert|xlm-roberta|camembert)-(base|large)[\w-]*"
    r"|\w[\w.-]*/(?!checkpoint-\d)\w[\w.-]*"
)
PAPERS = {  # what to cite for the method and for heads, as BibTeX fields
    METHOD: {
        "title": "Multi-CLS BERT: An Efficient Alternative to Traditional Ensembling",
        "author": "Chang, Haw-Shiuan and Sun, Ruei-Yao and Ricci, Kathryn and McCallum, Andrew",
        "year": "2022",
        "eprint": "2210.05043",
    },
    "isobn": {
        "title": "IsoBN: Fine-Tuning BERT with Isotropic Batch Normalization",
        "author": "Zhou, Wenxuan and Lin, Bill Yuchen and Ren, Xiang",
        "year": "2020",
        "eprint": "2005.02178",
    },
    "hire": {
        "title": "Deepening Hidden Representations from Pre-trained Language Models",
        "author": "Yang, Junjie and Zhao, Hai",
        "year": "2019",
        "eprint": "1911.01940",
    },
    "cln": {
        "title": "Improving minBERT with Conditional Layer Normalization",
        "author": "Abrams, Matan",
        "howpublished": "Report of the course CS224N, Stanford University",
    },
}


def hub_id(name: object) -> str | None:
    """Returns `name` if it can be a repository of the Hub, as OWNER/NAME or an old BERT's NAME."""
    return None if Path(str(name)).exists() else _matching(HUB_ID, name)


def inherited_metadata(checkpoint: str) -> dict[str, Any]:
    """Returns `base_model`, `license` and `language` of a model that is trained from `checkpoint`, as far as known.

    They come from the card of the checkpoint (a folder, Hub id, or "sample"). A folder's base model is the one that its
    card or, in `_name_or_path`, its config.json names: the Hub refuses a path.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.repocard import metadata_load

    folder, card = Path(checkpoint), dict[str, Any]()
    if checkpoint == SAMPLE and not folder.exists():
        return inherited_metadata(str(sample_model())) | {"base_model": SAMPLE_MODEL_ID}
    with suppress(Exception):  # no card, a broken one, or whatever the Hub's transports raise
        path = folder / CARD if folder.is_dir() else hf_hub_download(checkpoint, CARD)
        card = dict(metadata_load(path) or {})
    base = hub_id(checkpoint)
    if folder.is_dir():
        config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
        base = hub_id(card.get("base_model")) or hub_id(config.get("_name_or_path"))
    languages = card.get("language") or []
    languages = [languages] if isinstance(languages, str) else languages
    metadata = {
        "base_model": base,
        "license": _matching(r"[a-z0-9][a-z0-9.+-]*", card.get("license")),
        "license_name": _matching(r"[\w.-]+", card.get("license_name")),
        "license_link": _matching(r"https://\S+", card.get("license_link")),
        "language": [name for name in languages if _matching(LANGUAGE, name)],
    }
    return {key: value for key, value in metadata.items() if value}


def _matching(pattern: str, value: object) -> str | None:
    return value if isinstance(value, str) and re.fullmatch(pattern, value) else None


def model_link(metadata: Mapping[str, Any]) -> str:
    """Returns a Markdown link to the base model, or "a local checkpoint" if its Hub id is not known."""
    base = metadata.get("base_model")
    return f"[{base}](https://huggingface.co/{base})" if base else "a local checkpoint"


def bibtex(name: str) -> str:
    """Returns the BibTeX entry of a paper in `PAPERS`."""
    fields = PAPERS[name] | ({"archivePrefix": "arXiv"} if "eprint" in PAPERS[name] else {})
    key = f"{fields['author'].split(',')[0].lower()}{fields.get('year', '')}{name}"
    return (
        f"@misc{{{key},\n"
        + "".join(f"  {field} = {{{value}}},\n" for field, value in fields.items())
        + "}"
    )


def cell(text: object) -> str:
    """Returns a user's text, escaped so that it breaks neither a table nor the Markdown around it."""
    return re.sub(r"([|`<>\[\]*\\])", r"\\\1", " ".join(str(text).split()))
