"""The card of a pretrained model: metadata that the Hub takes, true numbers and no path."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from multicls import MultiClsBertConfig
from multicls.files import append_jsonl, write_json
from pretrain import card
from tests.hub_rules import checked_card

SETTINGS = """
model: {checkpoint: /home/anna/bert, random_weights: false, num_facets: 2}
data: {corpus: /home/anna/corpus, local_copy: /scratch/anna, seq_length: 48}
objective: {mlm: 1.0, tfidf: 0.5, so: 0.0, mcqt: 1.0, own: 0.1}
train: {seed: 7, steps: 40, global_batch_size: 6, negatives_group: 3, learning_rate: 5.0e-5, warmup_ratio: 0.001,
        weight_decay: 0.02, max_grad_norm: 1.0}
run: {output_dir: /home/anna/run, eval_examples: 60}
"""
MANIFEST = {
    "documents": 40, "sentences": 1200, "tokens": 7500, "made_from": {"splitter": {"language": "de"}},
    "sources": {"wiki|pedia": {"documents": 30, "tokens": 5000}, "notes": {"documents": 10, "tokens": 2500}},
    "hub_datasets": {"wiki|pedia": "wikimedia/wikipedia"},
}  # fmt: skip
CONFIG = MultiClsBertConfig(num_facets=2, facet_layers=[1], num_hidden_layers=3, hidden_size=32, num_attention_heads=2)
BASE = {"base_model": "google-bert/bert-base-uncased", "license": "apache-2.0", "language": ["en"]}


def losses(value: float) -> dict[str, float]:
    return {f"loss/{name}": value for name in ("mlm", "tfidf", "mcqt")}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder at step 20 of 40, with validations at steps 0, 20 and, later, 40."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "settings.yaml").write_text(SETTINGS)
    write_json(
        folder / "env.json", {"versions": {"torch": "2.13"}, "git_commit": "abc", "world_size": 2, "device": "X1"}
    )
    write_json(folder / "ds_config.json", {"fp16": {"enabled": False}, "bf16": {"enabled": True}})
    for step, split, values in (
        (0, "validation", losses(4.0) | {"acc/mcqt": 0.2, "facets/variance_1": 0.5, "facets/variance_2": 0.1}),
        (10, "train", losses(3.5) | {"data/tokens": 4000.0}),
        (20, "train", losses(3.0) | {"data/tokens": 4000.0}),
        (20, "validation", losses(2.0) | {"acc/mcqt": 0.5, "facets/variance_1": 0.4, "facets/variance_2": 0.3}),
        (40, "validation", losses(1.0)),
    ):
        append_jsonl(folder / "metrics.jsonl", {"step": step, "split": split, **values})
    return folder


def written(run_folder: Path, facts: dict[str, Any] | None = None, step: int = 20) -> tuple[dict[str, Any], str]:
    folder = run_folder.with_name(f"export_{step}")
    folder.mkdir(exist_ok=True)
    known = {"origin": card.origin_of(BASE, MANIFEST)} if facts is None else facts
    card.write_card(folder, run_folder, step, CONFIG, json.loads(json.dumps(known)))
    return checked_card((folder / "README.md").read_text(encoding="utf-8"))


def test_metadata(run: Path) -> None:
    data, _ = written(run)
    assert data == BASE | {
        "language": ["en", "de"], "datasets": ["wikimedia/wikipedia"], "library_name": "transformers",
        "pipeline_tag": "feature-extraction", "tags": card.TAGS,
    }  # fmt: skip


def test_the_body_tells_data_settings_and_results(run: Path) -> None:
    _, text = written(run)
    assert "40 documents, 1,200 sentences, 7,500 tokens" in text
    assert "| wiki\\|pedia | 30 | 5,000 | wikimedia/wikipedia |" in text and "| notes | 10 | 2,500 | none |" in text
    assert "20 of 40 planned optimizer steps of 6 examples" in text and "read 8,000 tokens" in text
    assert "warm-up over 0.1 % of the steps" in text and "2 x X1 in bf16; torch 2.13" in text
    assert "masked-LM (weight 1), TF-IDF (weight 0.5)" in text and "(SO) (weight" not in text
    assert "own (weight 0.1)" in text, "an objective that somebody added"
    assert "| Masked-LM: cross-entropy of a masked token, nats | 4.000 | 2.000 |  |" in text
    chance = f"{2 * math.log(6):.3f}"  # two directions, each among 3 + 3 passages
    assert f"summed over directions | 4.000 | 2.000 | {chance} |" in text
    assert "found among 6 | 20.0% | 50.0% | 16.7% |" in text
    assert "it is the same for every text) | 0.100 | 0.300 |  |" in text, "the least of all facets"
    assert "little text: 8,000 tokens" in text and "2210.05043" in text and "stated: en, de." in text
    assert "anna" not in text, "no path of the user's"
    details = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert details["train"]["seed"] == 7 and "run" not in details and "corpus" not in details["data"]


def test_curves_are_a_small_picture_of_what_was_measured(run: Path) -> None:
    _, text = written(run)
    file = run.with_name("export_20") / "curves.png"
    with Image.open(file) as picture:
        assert picture.width == round(3 * 2.6 * 120), "a panel for each objective in use"
        colors = picture.convert("RGB").getcolors(1 << 20)
    assert colors is not None and all(len(set(color)) == 1 for _, color in colors), "black, white and grey"
    assert f"]({file.name})" in text and file.stat().st_size < 60_000
    first = file.read_bytes()
    written(run)
    assert file.read_bytes() == first, "the same export has the same bytes"
    written(run, step=40)
    assert (run.with_name("export_40") / "curves.png").read_bytes() != first


def test_what_is_not_known_is_left_out(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "env.json").unlink()
    data, text = written(run, {"base_model": "/home/anna/bert", "data": "40 documents"})  # as version 0.1 wrote it
    assert not {"base_model", "license", "language", "datasets"} & data.keys() and "anna" not in text
    assert "No license is stated" in text and "Not validated yet." in text and "did not record its data" in text
    assert "curves.png" not in text and not (run.with_name("export_20") / "curves.png").exists()


def test_random_weights_are_trained_from_nothing(run: Path) -> None:
    (run / "settings.yaml").write_text(SETTINGS.replace("random_weights: false", "random_weights: true"))
    _, text = written(run, {"origin": card.origin_of({}, MANIFEST)})
    assert "whose pretraining was started from random weights" in text
