"""Model cards: the README.md of a saved model, with the metadata that the Hub reads. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from multicls.files import read_json
from multicls.sample import SAMPLE, SAMPLE_MODEL_ID, sample_model

CARD = "README.md"
TRANSFORMERS = "5.17"  # the oldest release that loads the models; pyproject.toml has the same
METHOD = "multicls"
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


def is_hub_id(name: object) -> bool:
    """Returns True if `name` can be a repository of the Hub, as `OWNER/NAME` or `NAME`, and is no path on this disk."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not isinstance(name, str) or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def inherited_metadata(checkpoint: str, local_files_only: bool = True) -> dict[str, Any]:
    """Returns `base_model`, `license` and `language` of a model that is trained from `checkpoint`, as far as known.

    They come from the card of the checkpoint (a folder, Hub id, or "sample"). A folder's base model is the one that its
    card or, in `_name_or_path`, its config.json names: a path is nobody else's business, and the Hub refuses it.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.repocard import metadata_load

    folder, card = Path(checkpoint), dict[str, Any]()
    if checkpoint == SAMPLE and not folder.exists():
        return inherited_metadata(str(sample_model())) | {"base_model": SAMPLE_MODEL_ID}
    path: str | Path = folder / CARD
    with suppress(Exception):  # no card, somebody's broken one, or whatever the Hub's transports raise
        if not folder.is_dir():
            path = hf_hub_download(checkpoint, CARD, local_files_only=local_files_only)
        card = dict(metadata_load(path) or {})
    base = checkpoint if is_hub_id(checkpoint) else None
    if folder.is_dir():
        config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
        named = [card.get("base_model"), config.get("_name_or_path")]
        base = next((name for name in named if _named_elsewhere(name)), None)
    languages = card.get("language") or []
    languages = [languages] if isinstance(languages, str) else languages
    found = {
        "base_model": base,
        "license": _matching(r"[a-z0-9][a-z0-9.+-]*", card.get("license")),
        "license_name": _matching(r"[\w.-]+", card.get("license_name")),
        "license_link": _matching(r"https://\S+", card.get("license_link")),
        "language": list(filter(None, (_matching(r"[a-z]{2,3}(-[A-Za-z]+)?|multilingual", one) for one in languages))),
    }
    return {key: value for key, value in found.items() if value}


def _named_elsewhere(name: object) -> bool:
    """Returns True if a name that a card or configuration states is a Hub id, not some folder of another machine."""
    canonical = r"(bert|roberta|distilbert|xlm-roberta)-(base|large)(-[\w-]+)?"
    return is_hub_id(name) and bool(re.fullmatch(rf"{canonical}|[^/]+/(?!checkpoint-\d)[^/]+", str(name)))


def _matching(pattern: str, value: object) -> str | None:
    return value if isinstance(value, str) and re.fullmatch(pattern, value) else None


def model_link(metadata: Mapping[str, Any]) -> str:
    """Returns a Markdown link to the base model, or "a local BERT checkpoint" if its Hub id is not known."""
    base = metadata.get("base_model")
    return f"[{base}](https://huggingface.co/{base})" if base else "a local BERT checkpoint"


def bibtex(name: str) -> str:
    """Returns the BibTeX entry of a paper in `PAPERS`."""
    fields = PAPERS[name] | ({"archivePrefix": "arXiv"} if "eprint" in PAPERS[name] else {})
    key = f"{fields['author'].split(',')[0].lower()}{fields.get('year', '')}{name}"
    return f"@misc{{{key},\n" + "".join(f"  {field} = {{{value}}},\n" for field, value in fields.items()) + "}"


def cell(text: object) -> str:
    """Returns a text of the user's that breaks neither a table nor the Markdown around it."""
    return re.sub(r"([|`<>\[\]*\\])", r"\\\1", " ".join(str(text).split()))


def render_card(template: Path, metadata: Mapping[str, Any], *, papers: Sequence[str], **values: Any) -> str:
    """Returns a model card.

    Args:
        template: Jinja template that extends `base_card.md.jinja` of this package.
        metadata: arguments of `huggingface_hub.ModelCardData`; those that are None or empty are left out.
        papers: names in `PAPERS` to cite; others are left out.
    """
    from huggingface_hub import ModelCardData
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folders = [template.parent, Path(__file__).parent]
    environment = Environment(
        loader=FileSystemLoader(folders), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["cell"] = cell
    data = {key: value for key, value in metadata.items() if value}
    entries = [bibtex(name) for name in dict.fromkeys(papers) if name in PAPERS]
    return environment.get_template(template.name).render(
        values,
        metadata=ModelCardData(**data).to_yaml(),
        base=model_link(data),
        license=data.get("license_name") or data.get("license"),
        transformers=TRANSFORMERS,
        citations=entries,
    )
