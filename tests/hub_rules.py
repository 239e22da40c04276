"""The Hub's rules for the metadata of a model card, as its documentation and `huggingface_hub` state them.

`ModelCard.validate` asks the Hub's server. These are the checks that need no network: the fields that the server
refuses, by the rules of https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id

# The ids of https://huggingface.co/docs/hub/repositories-licenses that BERT checkpoints have.
LICENSES = {"apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-sa-3.0",
            "cc0-1.0", "gpl-3.0", "openrail", "afl-3.0", "other", "unknown"}  # fmt: skip
PIPELINES = {"feature-extraction", "fill-mask", "sentence-similarity", "text-classification"}
LIBRARIES = {"transformers", "sentence-transformers"}
METRICS = {"accuracy", "f1", "matthews_correlation", "pearsonr", "spearmanr"}
LANGUAGE = re.compile(r"[a-z]{2,3}|multilingual|code")  # ISO 639
KNOWN = {"base_model", "datasets", "language", "library_name", "license", "license_name", "license_link", "metrics",
         "model-index", "pipeline_tag", "tags"}  # fmt: skip


def checked_card(text: str) -> tuple[dict[str, Any], str]:
    """Returns metadata and body of a card whose metadata the Hub would take."""
    assert text.startswith("---\n"), "the metadata are the first lines of the file"
    _, block, body = text.split("---\n", 2)
    raw = yaml.safe_load(block)
    card = ModelCard(text, ignore_metadata_errors=False)
    assert card.data.to_dict() == raw, "huggingface_hub reads what is written, the model index included"
    assert raw.keys() <= KNOWN and all(raw.values()), "no field is unknown or empty"
    for field in ("datasets", "language", "metrics", "tags"):
        values = raw.get(field, [])
        assert isinstance(values, list) and all(isinstance(value, str) for value in values), field
        assert len(set(values)) == len(values), field
    assert all(LANGUAGE.fullmatch(language) for language in raw.get("language", []))
    assert raw["library_name"] in LIBRARIES and raw.get("pipeline_tag") in PIPELINES | {None}
    assert set(raw.get("metrics", [])) <= METRICS and raw.get("license") in LICENSES | {None}
    assert ("license_name" in raw) <= (raw.get("license") == "other"), "only a license without an id has a name"
    for repository in [*raw.get("datasets", []), *filter(None, [raw.get("base_model")])]:
        validate_repo_id(repository)
    for model in raw.get("model-index", []):
        assert model["name"] and model["results"]
        for result in model["results"]:
            assert result["task"]["type"] in PIPELINES and result["dataset"]["name"]
            validate_repo_id(result["dataset"]["type"])
            assert result["metrics"] and all(metric["type"] in METRICS for metric in result["metrics"])
            assert all(isinstance(metric["value"], float) for metric in result["metrics"])
    return raw, body


def snippets(body: str) -> list[str]:
    """Returns the Python blocks of a card."""
    return re.findall(r"^```python\n(.*?)^```", body, re.MULTILINE | re.DOTALL)
