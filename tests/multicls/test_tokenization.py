"""Facets in tokenizers of many kinds: other names, other models, sentencepiece files, nothing unused."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data_prep.encode import load_tokenizer_files
from multicls.corpus import tokenizer_fingerprint
from multicls.errors import UserError
from multicls.tokenization import facet_ids, facet_tokens, keep_words, load_tokenizer, with_facets
from tests.encoders import ANGLES, FAMILIES, WORDS, byte_level, wordpiece


@pytest.mark.parametrize("kind", FAMILIES)
def test_facets_stand_after_cls_and_text_stays_text(kind: str, tmp_path: Path) -> None:
    theirs = FAMILIES[kind][1]()
    types = "token_type_ids" in theirs("a", "a")
    with_facets(theirs, 2, types).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    cls, sep, mask = (getattr(theirs, f"{name}_token") for name in ("cls", "sep", "mask"))
    first, second = map(str, tokenizer.convert_ids_to_tokens(list(facet_ids(tokenizer))))
    assert len(tokenizer) == len(theirs) + 2 * (first == "[C1]")
    plain, ours = theirs("bal del", "fil"), tokenizer("bal del", "fil")
    (start, *rest), inserted = plain["input_ids"], facet_ids(tokenizer)
    assert ours["input_ids"] == [start, *inserted, *rest]
    assert ours.get("token_type_ids") == ([0, 0, *plain["token_type_ids"]] if types else None)
    literal = tokenizer(f"bal {mask} {first}", f"{sep} fil", split_special_tokens=True)
    tokens = tokenizer.convert_ids_to_tokens(literal["input_ids"])
    expected = tokenizer.convert_ids_to_tokens(ours["input_ids"])
    assert tokens[:3] == [cls, first, second] and tokens[-1] == sep
    if kind not in ("xlm-roberta", "camembert", "deberta-v2"):  # unigram models find pieces in text
        assert tokens.count(sep) == expected.count(sep) and mask not in tokens[1:]
        assert tokens.count(first) == 1
    special = tokenizer.get_special_tokens_mask(ours["input_ids"], already_has_special_tokens=True)
    assert special == [token in (cls, first, second, sep) for token in expected]
    assert tokenizer.mask_token_id == theirs.mask_token_id
    long = tokenizer("bal " * 50, "del " * 50, truncation=True)
    assert len(long["input_ids"]) == theirs.model_max_length < 65
    keep_words(theirs)  # camembert has special tokens without a role
    same, one = tokenizer.backend_tokenizer, theirs.backend_tokenizer
    assert tokenizer_fingerprint(same.to_str()) == tokenizer_fingerprint(one.to_str())
    one.normalizer = None if one.normalizer else Lowercase()  # the control
    assert tokenizer_fingerprint(same.to_str()) != tokenizer_fingerprint(one.to_str())


def test_bos_and_eos_stand_in_and_missing_roles_are_named() -> None:
    backend = byte_level(ANGLES, [], 2).backend_tokenizer
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="<mask>", **names)
    assert with_facets(tokenizer, 1)("bal").tokens()[:2] == ["<s>", "[C1]"]
    with pytest.raises(UserError, match="has no mask_token, which pretraining needs"):
        with_facets(PreTrainedTokenizerFast(tokenizer_object=backend, **names), 1)


def test_facets_are_the_first_unused_entries_by_id_or_all_new() -> None:
    vocabulary = {"[PAD]": 0, "[unused10]": 3, "[unused2]": 1, "[unused]": 2, "a[unused1]": 4}
    assert facet_tokens(vocabulary, 2) == ["[unused2]", "[unused10]"]
    assert facet_tokens(vocabulary, 3) == ["[C1]", "[C2]", "[C3]"]
    assert facet_tokens(vocabulary, 0) == []
    assert facet_tokens({"<unused0>": 5, "[unused_3]": 4}, 2) == ["[unused_3]", "<unused0>"]


@pytest.mark.parametrize(
    ("kind", "file"),
    [("XLMRobertaTokenizer", "sentencepiece.bpe.model"), ("DebertaV2Tokenizer", "spm.model")],
)
def test_sentencepiece_models_without_tokenizer_json(kind: str, file: str, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    prefix, text = str(tmp_path / file).removesuffix(".model"), iter([" ".join(WORDS)] * 20)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=text, model_prefix=prefix, vocab_size=70, minloglevel=2
    )
    config = {"tokenizer_class": kind, "model_max_length": 62}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = load_tokenizer(str(tmp_path))
    tokenizer = with_facets(theirs, 2, token_types=False)
    plain, ours = theirs("bal del", "fil")["input_ids"], tokenizer("bal del", "fil")["input_ids"]
    assert ours == [plain[0], *facet_ids(tokenizer), *plain[1:]] and len(plain) > 5
    assert theirs.unk_token_id not in plain
    prepared = load_tokenizer_files(str(tmp_path))["tokenizer.json"].decode()
    assert Tokenizer.from_str(prepared).encode("bal del").ids == theirs("bal del")["input_ids"]


def test_tokenizers_that_do_not_work_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "EsmTokenizer"}')
    (tmp_path / "vocab.txt").write_text("<cls>\n<pad>\n<eos>\n<unk>\nA\nC\n<mask>\n")
    with pytest.raises(UserError, match="is slow, and transformers cannot convert it"):
        load_tokenizer(str(tmp_path))
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(UserError, match="its tokenizer (cannot be loaded|has no vocabulary)"):
        load_tokenizer(str(tmp_path))
    wordpiece().save_pretrained(tmp_path)
    assert isinstance(load_tokenizer(str(tmp_path)).backend_tokenizer, Tokenizer)
