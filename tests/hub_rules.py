"""The Hub's rules for the metadata of a model card, without its server, which `ModelCard.validate` would ask.

The rules are those of https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id

LICENSES = {"apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0", "cc-by-sa-4.0", "other", "unknown"}
PIPELINES = {"feature-extraction", "fill-mask", "sentence-similarity", "text-classification"}
LIBRARIES = {"transformers", "sentence-transformers"}
METRICS = {"accuracy", "f1", "matthews_correlation", "pearsonr", "spearmanr"}
LANGUAGE = re.compile(r"[a-z]{2,3}|multilingual|code")  # ISO 639
LISTS = {"datasets", "language", "metrics", "tags"}
KNOWN = {"base_model", "library_name", "license", "license_name", "license_link", "model-index"}
KNOWN |= {"pipeline_tag", *LISTS}


def checked_card(text: str) -> tuple[dict[str, Any], str]:
    """Returns metadata and body of a card whose metadata the Hub would take."""
    assert text.startswith("---\n"), "the metadata are the first lines of the file"
    _, block, body = text.split("---\n", 2)
    raw = yaml.safe_load(block)
    assert ModelCard(text, ignore_metadata_errors=False).data.to_dict() == raw
    assert raw.keys() <= KNOWN and all(raw.values()), "no field is unknown or empty"
    for field in LISTS & raw.keys():
        assert isinstance(raw[field], list) and len(set(raw[field])) == len(raw[field]), field
    assert all(LANGUAGE.fullmatch(language) for language in raw.get("language", []))
    assert raw["library_name"] in LIBRARIES and raw.get("pipeline_tag") in PIPELINES | {None}
    assert set(raw.get("metrics", [])) <= METRICS and raw.get("license") in LICENSES | {None}
    assert ("license_name" in raw) <= (raw.get("license") == "other"), "only of other licenses"
    for repository in [*raw.get("datasets", []), *filter(None, [raw.get("base_model")])]:
        validate_repo_id(repository)
    for result in [result for model in raw.get("model-index", []) for result in model["results"]]:
        assert result["task"]["type"] in PIPELINES and result["dataset"]["name"]
        validate_repo_id(result["dataset"]["type"])
        assert result["metrics"]
        for metric in result["metrics"]:
            assert metric["type"] in METRICS and isinstance(metric["value"], float)
    return raw, body


def snippets(body: str) -> list[str]:
    """Returns the Python blocks of a card."""
    return re.findall(r"^```python\n(.*?)^```", body, re.MULTILINE | re.DOTALL)
