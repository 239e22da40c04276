"""The card of a pretrained model: metadata that the Hub takes, true numbers and no path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import BertConfig

from multicls import MultiClsConfig
from multicls.files import append_jsonl, write_json
from pretrain import card
from tests.pretrain.tools import checked_card

SETTINGS = """
model: {checkpoint: /home/anna/bert, random_weights: false, num_facets: 2}
data: {corpus: /home/anna/corpus, seq_length: 48}
objective: {mlm: 1.0, tfidf: 0.5, so: 0.0, mcqt: 1.0}
train: {seed: 7, steps: 40, global_batch_size: 6, negatives_group: 3, learning_rate: 5.0e-5, warmup_ratio: 0.001,
        weight_decay: 0.02, max_grad_norm: 1.0}
run: {output_dir: /home/anna/run, eval_examples: 60}
"""
CORPUS = {
    "documents": 40,
    "sentences": 1200,
    "tokens": 7500,
    "language": "de",
    "sources": {"wiki|pedia": {"documents": 30, "tokens": 5000}},
    "hub_datasets": {"wiki|pedia": "wikimedia/wikipedia"},
}
CONFIG = MultiClsConfig(
    encoder=BertConfig(num_hidden_layers=3, hidden_size=32), num_facets=2, facet_layers=[1]
)
BASE = {"base_model": "google-bert/bert-base-uncased", "license": "apache-2.0", "language": ["en"]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder at step 20 of 40, with validations at steps 0, 20 and, later, 40."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "settings.yaml").write_text(SETTINGS)
    environment = {"versions": {"torch": "2.13"}, "git_commit": "abc", "world_size": 2}
    write_json(folder / "env.json", environment | {"device": "X1"})
    write_json(folder / "ds_config.json", {"fp16": {"enabled": False}, "bf16": {"enabled": True}})
    records: list[tuple[int, str, dict[str, float]]] = [
        (0, "validation", {"loss/mlm": 4.0, "acc/mcqt": 0.2, "facets/variance_1": 0.5}),
        (10, "train", {"loss/mlm": 3.5, "data/tokens": 4000.0}),
        (20, "train", {"loss/mlm": 3.0, "data/tokens": 4000.0}),
        (20, "validation", {"loss/mlm": 2.0, "acc/mcqt": 0.5, "facets/variance_1": 0.4}),
        (40, "validation", {"loss/mlm": 1.0}),
    ]
    for step, split, values in records:
        append_jsonl(folder / "metrics.jsonl", {"step": step, "split": split, **values})
    return folder


def written(run_folder: Path, metadata: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns metadata and text of the card after step 20."""
    info = {"step": 20, "metadata": metadata, "corpus": CORPUS}
    card.write_card(run_folder, run_folder, CONFIG, info)
    return checked_card((run_folder / "README.md").read_text(encoding="utf-8"))


def test_a_card_has_metadata_data_settings_and_results_and_no_path(run: Path) -> None:
    data, text = written(run, BASE)
    fixed = {"library_name": "transformers", "pipeline_tag": "feature-extraction"}
    found = {"language": ["en", "de"], "datasets": ["wikimedia/wikipedia"], "tags": card.TAGS}
    assert data == BASE | fixed | found
    for expected in (
        "40 documents, 1,200 sentences, 7,500 tokens",
        "| wiki\\|pedia | 30 | 5,000 | wikimedia/wikipedia |",
        "20 of 40 planned optimizer steps of 6 examples",
        "2 x X1 in bf16; torch 2.13, multicls at commit abc.",
        "| loss/mlm | 4.000 | 2.000 |",
        "`acc/mcqt` 0.167",  # among 3 + 3 passages
        "8,000 tokens",  # of two records
    ):
        assert expected in text, expected
    details = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert details["train"]["seed"] == 7 and "run" not in details and "anna" not in text


def test_a_card_without_base_model_and_validation(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "settings.yaml").write_text(SETTINGS.replace("weights: false", "weights: true"))
    data, text = written(run, {})
    assert not {"base_model", "license"} & data.keys()
    assert "started from random weights" in text and "Not validated yet." in text
    _, text = written(run, {"license": "other", "license_name": "llama-3"})
    assert "llama-3, the license of the base model" in text
