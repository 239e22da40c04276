"""Models that bring code, lack weights, or are of another kind; texts that look like special tokens."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
from transformers import AutoModel, AutoTokenizer

from finetune.heads.build import find_checkpoint
from multicls.errors import UserError
from multicls.tokenization import model_tokenizer
from tests.encoders import save_encoder
from tests.finetune.models import load


def changed(folder: Path, target: Path, **config: object) -> Path:
    """Returns a copy of a model folder with another configuration."""
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


@pytest.mark.parametrize("model_type", ["evil-bert", "bert"])
def test_code_in_a_model_folder_never_runs(
    model_type: str, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, marker = tmp_path / "modules", tmp_path / "executed"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(cache))
    folder = malicious(tiny_bert, tmp_path / "evil", marker, model_type)
    if model_type == "bert":  # transformers has its own
        load(folder)
    else:
        with pytest.raises(UserError, match="contains custom code"):
            load(folder)
    assert not marker.exists()
    AutoModel.from_pretrained(folder, trust_remote_code=True)
    assert marker.exists(), "the control"


def test_text_does_not_inject_special_tokens(tiny_bert: Path, tiny_multicls: Path) -> None:
    for folder, facets in ((tiny_bert, 0), (tiny_multicls, 2)):
        _, tokenizer = load(folder)
        batch = tokenizer("len [MASK] bal [SEP]", "del [unused0]", truncation=True, max_length=32)
        tokens = tokenizer.convert_ids_to_tokens(batch["input_ids"])
        assert tokens.count("[SEP]") == 2 and tokens.count("[CLS]") == 1 and "[MASK]" not in tokens
        assert sum(token.startswith("[unused") for token in tokens) == facets
        assert tokens[0] == "[CLS]" and tokens[1 + facets : 3 + facets] == ["len", "["]


@pytest.mark.parametrize(
    ("missing", "changes", "message"),
    [
        ("config.json", {}, "no config.json"),
        ("model.safetensors", {}, "no file named model.safetensors"),
        ("tokenizer.json", {}, "its tokenizer"),
        ("", {"model_type": "berd"}, "model type `berd`"),
        ("", {"model_type": "encoder-with-head"}, "is fine-tuned; pass the model"),
        ("", {"num_hidden_layers": 4}, "weights of the encoder are missing.*encoder.layer.3"),
        ("", {"vocab_size": 10_000}, "cannot be loaded"),
    ],
)
def test_folders_that_do_not_fit(
    missing: str, changes: dict[str, object], message: str, tiny_bert: Path, tmp_path: Path
) -> None:
    folder = changed(tiny_bert, tmp_path / "model", **changes)
    if missing:
        (folder / missing).unlink()
    with pytest.raises(UserError, match=message):
        load(folder)


def test_positions_of_roberta_begin_after_the_padding(tmp_path: Path) -> None:
    folder = save_encoder("roberta", tmp_path, max_position_embeddings=40)
    encoder = load(folder, max_length=38)[0].encoder
    assert encoder.config._attn_implementation == "sdpa", "else padding would be read"
    with pytest.raises(UserError, match="--max_length 39: .* reads 6 to 38 tokens"):
        load(folder, max_length=39)


def test_a_hub_id(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tiny_bert))
    assert find_checkpoint("someone/some-bert") == tiny_bert


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-one/no-bert", "no-one/no-bert: no such folder, nor on the Hub"),
        ("demo/hff", r"^--model demo/hff: no such folder\. Did you mean 'hf'\?$"),
        ("demo", "^--model demo: holds no config.json; pass the exported model"),
        ("demo/some-bert", "no such folder, nor on the Hub"),  # like a Hub id
    ],
)
def test_a_misspelt_folder(
    name: str, message: str, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_bert, tmp_path / "demo" / "hf")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        find_checkpoint(name)


def test_a_vocabulary_is_at_most_padded(tiny_bert: Path) -> None:
    """BERT's cased tokenizer, 28,996 entries, is within a tenth of the uncased model's 30,522."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    tokenizer.add_tokens([f"[NEW{i}]" for i in range(28_996 - len(tokenizer))])
    with mock.patch("transformers.AutoTokenizer.from_pretrained", return_value=tokenizer):
        assert model_tokenizer(tiny_bert, 29_000) is tokenizer
        with pytest.raises(ValueError, match="28,996 entries, its vocabulary 30,522"):
            model_tokenizer(tiny_bert, 30_522)
        # As of DNA; an export pads it to a multiple of 64.
        with mock.patch.object(type(tokenizer), "__len__", return_value=72):
            assert model_tokenizer(tiny_bert, 128) is tokenizer
            with pytest.raises(ValueError, match="72 entries, its vocabulary 192"):
                model_tokenizer(tiny_bert, 192)
