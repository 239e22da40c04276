"""Models that bring code, lack weights, or are of another kind; texts that look like special tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from finetune.heads.build import find_checkpoint, load_encoder, load_tokenizer
from multicls.errors import UserError


def changed(folder: Path, target: Path, **config: object) -> Path:
    """A copy of a model folder with another configuration."""
    shutil.copytree(folder, target)
    old = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(old | config), encoding="utf-8")
    return target


def malicious(folder: Path, target: Path, marker: Path, model_type: str) -> Path:
    auto_map = {"AutoConfig": "evil.EvilConfig", "AutoModel": "evil.EvilModel"}
    changed(folder, target, model_type=model_type, auto_map=auto_map)
    code = f"open({str(marker)!r}, 'w').close()\nfrom transformers import BertConfig, BertModel\n"
    code += f"class EvilConfig(BertConfig):\n    model_type = {model_type!r}\n"
    code += "class EvilModel(BertModel):\n    config_class = EvilConfig\n"
    (target / "evil.py").write_text(code, encoding="utf-8")
    return target


def test_code_in_a_model_folder_runs_only_with_the_flag(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    marker = tmp_path / "executed"
    folder = malicious(tiny_bert, tmp_path / "evil", marker, "evil-bert")
    with pytest.raises(UserError, match="--trust_remote_code"):
        find_checkpoint(str(folder))
    assert not marker.exists()
    checkpoint = find_checkpoint(str(folder), trust_remote_code=True)
    load_encoder(checkpoint)
    assert marker.exists(), "the control: with the flag the code does run"


def test_code_beside_a_known_type_is_not_run(tiny_bert: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    checkpoint = find_checkpoint(str(malicious(tiny_bert, tmp_path / "evil", marker, "bert")))
    load_tokenizer(checkpoint, 32)
    load_encoder(checkpoint)
    assert not marker.exists()


def test_text_does_not_inject_special_tokens(tiny_bert: Path, tiny_multicls: Path) -> None:
    for folder, facets in ((tiny_bert, 0), (tiny_multicls, 2)):
        tokenizer = load_tokenizer(find_checkpoint(str(folder)), 32)
        ids = tokenizer("len [MASK] bal [SEP]", "del [unused0]", truncation=True, max_length=32)[
            "input_ids"
        ]
        tokens = tokenizer.convert_ids_to_tokens(ids)
        assert tokens.count("[SEP]") == 2 and tokens.count("[CLS]") == 1 and "[MASK]" not in tokens
        assert sum(token.startswith("[unused") for token in tokens) == facets
        assert tokens[0] == "[CLS]" and tokens[1 + facets : 3 + facets] == ["len", "["]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "holds no tokenizer"),
    ],
)
def test_what_a_folder_may_lack(
    missing: str, message: str, tiny_bert: Path, tmp_path: Path
) -> None:
    folder = changed(tiny_bert, tmp_path / "model")
    (folder / missing).unlink()
    with pytest.raises(UserError, match=message):
        find_checkpoint(str(folder))


def test_an_unknown_type(tiny_bert: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="knows no model_type 'berd'"):
        find_checkpoint(str(changed(tiny_bert, tmp_path / "berd", model_type="berd")))


def test_a_hub_id(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no-one/no-bert: no such folder, and the Hub did not"):
        find_checkpoint("no-one/no-bert")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tiny_bert))
    assert find_checkpoint("someone/some-bert").folder == tiny_bert


def test_a_misspelt_folder(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_bert, tmp_path / "demo" / "hf")
    monkeypatch.chdir(tmp_path)
    for name, message in (
        ("demo/hff", r"^--model demo/hff: no such folder\. Did you mean 'hf'\?$"),
        ("demo", "^--model demo: holds no config.json; did you mean demo/hf?"),
        ("demo/some-bert", "no such folder, and the Hub did not deliver it"),  # like a Hub id
    ):
        with pytest.raises(UserError, match=message):
            find_checkpoint(name)


def test_encoder_weights_may_not_be_missing(tiny_bert: Path, tmp_path: Path) -> None:
    folder = changed(tiny_bert, tmp_path / "deeper", num_hidden_layers=4)
    with pytest.raises(UserError, match="weights of the encoder are missing: encoder.layer.3"):
        load_encoder(find_checkpoint(str(folder)))


def test_hash_is_of_the_content(tiny_bert: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_bert, tmp_path / "copy")
    other = changed(tiny_bert, tmp_path / "other", hidden_dropout_prob=0.3)
    hashes = [find_checkpoint(str(path)).sha256 for path in (tiny_bert, tmp_path / "copy", other)]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("size", [5, 10_000])
def test_a_tokenizer_of_another_model(size: int, tiny_bert: Path, tmp_path: Path) -> None:
    folder = changed(tiny_bert, tmp_path / "other", vocab_size=size)
    with pytest.raises(UserError, match="entries, the model's vocabulary"):
        load_tokenizer(find_checkpoint(str(folder)), 32)


def test_positions_of_roberta(tiny_bert: Path, tmp_path: Path) -> None:
    folder = changed(tiny_bert, tmp_path / "roberta", model_type="roberta", pad_token_id=1)
    with pytest.raises(UserError, match="of 5 to 62 tokens"):
        load_tokenizer(find_checkpoint(str(folder)), 63)
