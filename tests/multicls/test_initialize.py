"""Starting from a BERT checkpoint: nothing of it is lost; the saved folder stands on its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertForPreTraining, BertModel

from multicls.errors import UserError
from multicls.initialize import from_bert
from multicls.tokenization import facet_ids, with_facets


def test_everything_of_a_pretraining_checkpoint_is_kept(tiny_bert: Path) -> None:
    notes: list[str] = []
    model, tokenizer = from_bert(str(tiny_bert), num_facets=3, report=notes.append)
    ours, theirs = model.state_dict(), BertForPreTraining.from_pretrained(tiny_bert).state_dict()
    assert theirs.keys() - ours.keys() == set()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    assert ours["bert.embeddings.word_embeddings.weight"].shape[0] == len(AutoTokenizer.from_pretrained(tiny_bert))
    assert model.config.num_facets == 3 and facet_ids(tokenizer) == (1, 2, 3)
    assert "encoder, pooler, MLM head, order classifier from" in notes[0]
    assert "left over" not in notes[0]


def test_what_a_checkpoint_lacks_is_named(tiny_bert: Path, tmp_path: Path) -> None:
    for kind, kept in ((BertModel, "encoder, pooler from"), (BertForMaskedLM, "encoder, MLM head from")):
        kind.from_pretrained(tiny_bert).save_pretrained(tmp_path / kind.__name__)
        AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path / kind.__name__)
        notes: list[str] = []
        from_bert(str(tmp_path / kind.__name__), num_facets=2, report=notes.append)
        assert kept in notes[0]


def test_goes_on_from_a_multicls_checkpoint(tiny_bert: Path, tmp_path: Path) -> None:
    model, tokenizer = from_bert(str(tiny_bert), num_facets=3, report=lambda _: None)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, same = from_bert(str(tmp_path), num_facets=3, mcqt_lambda=0.5, report=lambda _: None)
    assert again.config.mcqt_lambda == 0.5
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert same("a", "b").input_ids == tokenizer("a", "b").input_ids
    with pytest.raises(UserError, match="num_facets = 3"):
        from_bert(str(tmp_path), num_facets=5)
    with pytest.raises(UserError, match="facet_layers"):
        from_bert(str(tmp_path), num_facets=3, facet_layers=[])


def test_weights_repeat_with_the_seed(tiny_bert: Path) -> None:
    def facets(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return from_bert(str(tiny_bert), report=lambda _: None)[0].bert.facet_head.dense.weight

    assert torch.equal(facets(1), facets(1))
    assert not torch.equal(facets(1), facets(2))


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be loaded"):
        from_bert(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text('{"model_type": "roberta"}')
    with pytest.raises(UserError, match="roberta|cannot be loaded"):
        from_bert(str(tmp_path))


def test_encoder_of_another_shape_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    BertModel.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    config = BertConfig.from_pretrained(tiny_bert)
    config.num_hidden_layers += 1
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="weights of the encoder"):
        from_bert(str(tmp_path))


def test_tokenizer_puts_facets_in_and_takes_text_for_text(tiny_bert: Path, tmp_path: Path) -> None:
    with_facets(AutoTokenizer.from_pretrained(tiny_bert), 2).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    pair = tokenizer("a [MASK]", "[unused0] [SEP] b")
    tokens = tokenizer.convert_ids_to_tokens(pair["input_ids"])
    assert tokens[:3] == ["[CLS]", "[unused0]", "[unused1]"] and tokens[-1] == "[SEP]"
    assert tokens.count("[SEP]") == 2 and tokens.count("[unused0]") == 1 and "[MASK]" not in tokens
    second = tokens.index("[SEP]") + 1
    assert pair["token_type_ids"] == [0] * second + [1] * (len(tokens) - second)
    assert len(tokenizer("a " * 50, "b " * 50, truncation=True, max_length=16)["input_ids"]) == 16


def test_vocabulary_without_unused_tokens_grows(tiny_bert: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    model, grown = from_bert(str(tiny_bert), num_facets=20, facet_layers=[], report=lambda _: None)
    assert grown.convert_ids_to_tokens(facet_ids(grown)[0]) == "[C1]"
    assert len(grown) == len(tokenizer) + 20 == model.config.vocab_size
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert model.cls.predictions.bias.shape == (len(grown),)


STANDALONE = """
import sys
from transformers import AutoModel, AutoModelForPreTraining, AutoModelForSequenceClassification, AutoTokenizer
folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer(["a b", "b", "c"], return_tensors="pt", padding=True)
for auto in (AutoModel, AutoModelForPreTraining, AutoModelForSequenceClassification):
    model = auto.from_pretrained(folder, trust_remote_code=True).eval()
    outputs = model(**inputs)
    print(type(model).__name__, float(getattr(outputs, "facet_embeddings", outputs[0]).sum()))
assert "multicls" not in sys.modules
"""


def test_saved_folder_loads_without_this_project(tiny_bert: Path, tmp_path: Path) -> None:
    model, tokenizer = from_bert(str(tiny_bert), num_facets=3, report=lambda _: None)
    model.save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", "-c", STANDALONE, str(tmp_path / "hf")]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    printed = dict(line.split() for line in ran.stdout.splitlines())
    inputs = tokenizer(["a b", "b", "c"], return_tensors="pt", padding=True)
    expected = model.eval().bert(**inputs).facet_embeddings.sum().item()
    assert float(printed["MultiClsBertModel"]) == pytest.approx(expected, rel=1e-5)
    assert "MultiClsBertForSequenceClassification" in printed
