"""Starting from a BERT checkpoint: nothing of it is lost; the saved folder stands on its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AlbertConfig,
    AutoConfig,
    AutoModelForPreTraining,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertModel,
    ElectraConfig,
    ElectraForPreTraining,
    RobertaConfig,
    RobertaForMaskedLM,
)

from multicls.errors import UserError
from multicls.from_bert import checkpoint_fingerprint, from_bert
from multicls.modeling_multicls import MultiClsBertForPreTraining
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
    assert model.config.facet_ids == [1, 2, 3]
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
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="tokenizer inserts 0 facets, the model has 3"):
        from_bert(str(tmp_path), num_facets=3)


def test_weights_repeat_with_the_seed(tiny_bert: Path) -> None:
    def facets(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return from_bert(str(tiny_bert), report=lambda _: None)[0].bert.facet_head.dense.weight

    assert torch.equal(facets(1), facets(1))
    assert not torch.equal(facets(1), facets(2))


SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}


def other_encoder(tiny_bert: Path, folder: Path, kind: str) -> Any:
    """A folder with a RoBERTa or an ELECTRA of random weights, with no parameter at 0 or 1."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    tokenizer.save_pretrained(folder)
    if kind == "roberta":
        shape = SIZES | {"max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1}
        model: Any = RobertaForMaskedLM(RobertaConfig(vocab_size=len(tokenizer), layer_norm_eps=1e-5, **shape))
    else:
        shape = SIZES | {"max_position_embeddings": 64, "embedding_size": 32}
        model = ElectraForPreTraining(ElectraConfig(vocab_size=len(tokenizer), **shape))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("kind", ["roberta", "electra"])
def test_encoders_that_are_berts_under_other_names(tiny_bert: Path, tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    theirs = other_encoder(tiny_bert, tmp_path, kind)
    notes: list[str] = []
    ours, tokenizer = from_bert(str(tmp_path), num_facets=0, facet_layers=[], report=notes.append)
    ids = torch.randint(20, 90, (3, 14))
    mask = torch.ones_like(ids)
    ids[1, 9:], mask[1, 9:] = theirs.config.pad_token_id, 0
    with torch.no_grad():
        hidden = theirs.base_model(ids, attention_mask=mask).last_hidden_state
        out = ours.eval().bert(ids, attention_mask=mask, token_type_ids=ids % 2 * (kind == "roberta"))
        torch.testing.assert_close(out.last_hidden_state[mask.bool()], hidden[mask.bool()], rtol=1e-5, atol=1e-5)
        if kind == "roberta":
            out = ours.cls.predictions(hidden)
            torch.testing.assert_close(out, theirs(ids, attention_mask=mask).logits, rtol=1e-4, atol=1e-5)
            assert "weights: encoder, MLM head from" in notes[0] and "left over" not in notes[0]
        else:
            assert "weights: encoder from" in notes[0] and "left over: discriminator_predictions" in notes[0]
    with_facets, tokenizer = from_bert(str(tmp_path), num_facets=3, report=notes.append)
    with_facets.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    again, _ = from_bert(str(tmp_path / "saved"), num_facets=3, report=notes.append)
    assert again.config.model_type == "multicls-bert" and again.config.facet_layers == [1, 2]
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in with_facets.state_dict().items())


@pytest.mark.parametrize("local", [True, False])
def test_no_load_asks_the_hub_where_another_rank_has(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    asked: dict[str, Any] = {}

    def watch(owner: Any) -> None:
        original = owner.from_pretrained

        def from_pretrained(*args: Any, **kwargs: Any) -> Any:
            asked[owner.__name__] = kwargs.get("local_files_only")
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, "from_pretrained", from_pretrained)

    other_encoder(tiny_bert, tmp_path, "roberta")  # which takes one load more than a BERT
    owners = (AutoConfig, AutoTokenizer, AutoModelForPreTraining, MultiClsBertForPreTraining)
    for owner in owners:
        watch(owner)
    from_bert(str(tmp_path), num_facets=0, facet_layers=[], local_files_only=local)
    assert asked == {owner.__name__: local for owner in owners}


def test_other_models_are_refused(tiny_bert: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        from_bert(str(tmp_path / "nothing"))
    for config, reason in (
        (AlbertConfig(), "its model_type is 'albert'. What works: BERT"),
        (ElectraConfig(), "embedding_size = 128 is projected to hidden_size = 256"),
    ):
        config.save_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path)
        with pytest.raises(UserError, match=reason):
            from_bert(str(tmp_path))


def test_encoder_of_another_shape_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    BertModel.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    config = BertConfig.from_pretrained(tiny_bert)
    config.num_hidden_layers += 1
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="weights of the encoder"):
        from_bert(str(tmp_path))


def test_tokenizer_puts_facets_in_and_can_take_text_for_text(tiny_bert: Path, tmp_path: Path) -> None:
    with_facets(AutoTokenizer.from_pretrained(tiny_bert), 2).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("a [MASK]")["input_ids"][-2] == tokenizer.mask_token_id
    pair = tokenizer("a [MASK]", "[unused0] [SEP] b", split_special_tokens=True)
    tokens = tokenizer.convert_ids_to_tokens(pair["input_ids"])
    assert tokens[:3] == ["[CLS]", "[unused0]", "[unused1]"] and tokens[-1] == "[SEP]"
    assert tokens.count("[SEP]") == 2 and tokens.count("[unused0]") == 1 and "[MASK]" not in tokens
    second = tokens.index("[SEP]") + 1
    mask = tokenizer.get_special_tokens_mask(pair["input_ids"], already_has_special_tokens=True)
    assert mask == [token in ("[CLS]", "[unused0]", "[unused1]", "[SEP]") for token in tokens]
    assert pair["token_type_ids"] == [0] * second + [1] * (len(tokens) - second)
    assert len(tokenizer("a " * 50, "b " * 50, truncation=True, max_length=16)["input_ids"]) == 16


def test_vocabulary_without_unused_tokens_grows(tiny_bert: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    model, grown = from_bert(str(tiny_bert), num_facets=20, facet_layers=[], report=lambda _: None)
    assert grown.convert_ids_to_tokens(facet_ids(grown)[0]) == "[C1]"
    assert len(grown) == len(tokenizer) + 20 == model.config.vocab_size
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert model.cls.predictions.bias.shape == (len(grown),)


def test_a_run_folder_instead_of_its_model(tiny_bert: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no config.json"):
        checkpoint_fingerprint(str(tmp_path))
    shutil.copytree(tiny_bert, tmp_path / "hf")
    with pytest.raises(UserError, match="holds no config.json; did you mean .*/hf"):
        checkpoint_fingerprint(str(tmp_path))


def test_fingerprint_depends_on_content_only(tiny_bert: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(tiny_bert, tmp_path / "moved")
    expected = checkpoint_fingerprint(str(tiny_bert))
    assert checkpoint_fingerprint(str(moved)) == expected
    weights = load_file(moved / "model.safetensors")
    weights["bert.pooler.dense.bias"][-1] += 1e-6  # sizes, names and shapes stay as they are
    save_file(weights, moved / "model.safetensors", metadata={"format": "pt"})
    assert checkpoint_fingerprint(str(moved)) != expected
    assert checkpoint_fingerprint(str(moved), weights=False) == checkpoint_fingerprint(str(tiny_bert), weights=False)
    BertModel.from_pretrained(tiny_bert).save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    sharded = checkpoint_fingerprint(str(tmp_path / "shards"))
    shard = sorted((tmp_path / "shards").glob("*.safetensors"))[-1]
    save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard, metadata={"format": "pt"})
    assert checkpoint_fingerprint(str(tmp_path / "shards")) != sharded
    (moved / "model.safetensors").unlink()
    with pytest.raises(UserError, match="moved: cannot be loaded"):
        checkpoint_fingerprint(str(moved))
