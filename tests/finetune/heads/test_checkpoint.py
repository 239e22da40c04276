"""Models that bring code, lack weights, or are of another kind; texts that look like special tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from finetune.heads.checkpoint import find_checkpoint, fingerprint_of, load_encoder, load_tokenizer
from multicls.errors import UserError
from multicls.from_bert import load_config


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
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
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
        ids = tokenizer("len [MASK] bal [SEP]", "del [unused0]", truncation=True, max_length=32)["input_ids"]
        tokens = tokenizer.convert_ids_to_tokens(ids)
        assert tokens.count("[SEP]") == 2 and tokens.count("[CLS]") == 1 and "[MASK]" not in tokens
        assert sum(token.startswith("[unused") for token in tokens) == facets
        assert tokens[0] == "[CLS]" and tokens[1 + facets : 3 + facets] == ["len", "["]


def test_long_pairs_keep_facets_and_separators(tiny_multicls: Path) -> None:
    tokenizer = load_tokenizer(find_checkpoint(str(tiny_multicls)), 16)
    ids = tokenizer("len bal " * 20, "los pel " * 20, truncation=True, max_length=16)["input_ids"]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert len(ids) == 16 and tokens[1:3] == ["[unused0]", "[unused1]"] and tokens.count("[SEP]") == 2


def test_what_a_folder_may_lack(tiny_bert: Path, tmp_path: Path) -> None:
    for missing, message in (("config.json", "no config.json"), ("model.safetensors", "no weights")):
        folder = tmp_path / missing
        shutil.copytree(tiny_bert, folder)
        (folder / missing).unlink()
        with pytest.raises(UserError, match=message):
            find_checkpoint(str(folder))
    with pytest.raises(UserError, match="knows no model_type 'berd'"):
        find_checkpoint(str(changed(tiny_bert, tmp_path / "berd", model_type="berd")))


def test_a_hub_id(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append(name)
        return str(tiny_bert)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    checkpoint = find_checkpoint("bert-base-uncased")
    assert (checkpoint.name, checkpoint.folder, asked) == ("bert-base-uncased", tiny_bert, ["bert-base-uncased"])


def test_a_hub_id_without_network() -> None:
    with pytest.raises(UserError, match="--model no-one/no-such-bert: no such folder, and the hub did not give it"):
        find_checkpoint("no-one/no-such-bert")


def test_a_misspelt_folder(tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(tiny_bert, tmp_path / "demo" / "hf")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no such folder, and the hub .* Did you mean 'demo/hf'\?$"):
        find_checkpoint("dmeo/hf")
    for find in (find_checkpoint, load_config):  # demo/ is here, so demo/hff is no Hub id
        with pytest.raises(UserError, match=r"model demo/hff: no such folder\. Did you mean 'demo/hf'\?$"):
            find("demo/hff")
    with pytest.raises(
        UserError, match=rf"^--model {tmp_path}/demo/f: no such folder. Did you mean '{tmp_path}/demo/hf'"
    ):
        find_checkpoint(str(tmp_path / "demo" / "f"))
    with pytest.raises(UserError, match="^--model demo: holds no config.json; did you mean demo/hf?"):
        find_checkpoint("demo")
    with pytest.raises(UserError, match="no such folder, and the hub did not give it"):
        find_checkpoint("demo/some-bert")  # a Hub id may begin like a folder that is here


def test_a_folder_that_may_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UserError, match=r"/bert: no such folder\.$"):
        find_checkpoint(str(tmp_path / "bert"))


def test_encoder_weights_may_not_be_missing(tiny_bert: Path, tmp_path: Path) -> None:
    folder = changed(tiny_bert, tmp_path / "deeper", num_hidden_layers=4)
    with pytest.raises(UserError, match="weights of the encoder are missing: encoder.layer.3"):
        load_encoder(find_checkpoint(str(folder)))


def test_fingerprint_is_of_the_content(tiny_bert: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_bert, tmp_path / "copy")
    other = changed(tiny_bert, tmp_path / "other", hidden_dropout_prob=0.3)
    fingerprints = [find_checkpoint(str(path)).fingerprint for path in (tiny_bert, tmp_path / "copy", other)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_positions_of_roberta(tiny_bert: Path, tmp_path: Path) -> None:
    folder = changed(tiny_bert, tmp_path / "roberta", model_type="roberta", pad_token_id=1)
    with pytest.raises(UserError, match="of 5 to 62 tokens"):
        load_tokenizer(find_checkpoint(str(folder)), 63)


def test_fingerprint_is_also_of_what_splits_the_words(tiny_bert: Path, tmp_path: Path) -> None:
    def fingerprint(name: str, trust_remote_code: bool = False, **files: str) -> str:
        folder = tmp_path / name
        shutil.copytree(tiny_bert, folder)
        for file, content in files.items():
            (folder / file.replace("__", ".")).write_text(content, encoding="utf-8")
        return fingerprint_of(folder, trust_remote_code)

    plain = fingerprint_of(tiny_bert)
    assert fingerprint("default", tokenizer_config__json='{"do_lower_case": true, "model_max_length": 9}') == plain
    assert fingerprint("cased", tokenizer_config__json='{"do_lower_case": false}') != plain
    assert fingerprint("merges", merges__txt="a b") != plain
    assert fingerprint("unused code", modeling__py="x = 1") == plain
    assert fingerprint("code", True, modeling__py="x = 1") != plain
