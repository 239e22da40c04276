"""Facets in tokenizers from elsewhere: other names, other models, nothing unused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from multicls.corpus import tokenizer_fingerprint
from multicls.errors import UserError
from multicls.tokenization import facet_ids, facet_tokens, with_facets

NAMES = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>"}


def byte_level(unknown: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer in the manner of RoBERTa's."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [*NAMES.values(), *unknown, "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["hello world"] * 9, trainer)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    mask = AddedToken("<mask>", lstrip=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, mask_token=mask, unk_token=unknown[0] if unknown else None, **NAMES
    )


@pytest.mark.parametrize("unknown", [["<unk>"], []])
def test_special_tokens_may_have_other_names(unknown: list[str], tmp_path: Path) -> None:
    theirs = byte_level(unknown)
    with_facets(theirs, 2).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert facet_ids(tokenizer) == (len(theirs), len(theirs) + 1) and len(tokenizer) == len(theirs) + 2
    pair = tokenizer("hello <mask> [C1]", "</s> world", split_special_tokens=True)
    tokens = tokenizer.convert_ids_to_tokens(pair["input_ids"])
    assert tokens[:4] == ["<s>", "[C1]", "[C2]", "hello"] and tokens[-1] == "</s>"
    assert tokens.count("</s>") == 2 and tokens.count("[C1]") == 1 and "<mask>" not in tokens
    assert tokenizer.decode(pair["input_ids"], skip_special_tokens=True) == "hello <mask> [C1]</s> world"
    assert tokenizer.mask_token_id == theirs.mask_token_id
    assert tokenizer_fingerprint(tokenizer.backend_tokenizer) == tokenizer_fingerprint(theirs.backend_tokenizer)


def test_tokenizer_without_special_tokens_is_refused_by_their_names() -> None:
    backend = byte_level([]).backend_tokenizer
    with pytest.raises(UserError, match="has no cls_token, mask_token, which BERT needs"):
        with_facets(PreTrainedTokenizerFast(tokenizer_object=backend, sep_token="</s>", pad_token="<pad>"), 2)


def test_facets_are_the_first_unused_entries_by_id_or_all_new() -> None:
    vocabulary = {"[PAD]": 0, "[unused10]": 3, "[unused2]": 1, "[unused]": 2, "a[unused1]": 4}
    assert facet_tokens(vocabulary, 2) == ["[unused2]", "[unused10]"]
    assert facet_tokens(vocabulary, 3) == ["[C1]", "[C2]", "[C3]"]
    assert facet_tokens(vocabulary, 0) == []
