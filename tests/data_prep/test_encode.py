"""Word by word or not: the ids are those of the Hugging Face tokenizer."""

import json
import random

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from data_prep.encode import TextEncoder, load_tokenizer_files
from multicls.errors import UserError


@pytest.fixture(scope="module")
def bert() -> str:
    try:
        return load_tokenizer_files("sample")["tokenizer.json"].decode("utf-8")
    except UserError as error:
        pytest.skip(str(error))


def assert_equal(encoder: TextEncoder, tokenizer_json: str, sentences: list[str]) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encodings = tokenizer.encode_batch(sentences, add_special_tokens=False)
    tokens, lengths = encoder.encode(sentences)
    assert lengths.tolist() == [len(encoding.ids) for encoding in encodings]
    assert tokens.tolist() == [number for encoding in encodings for number in encoding.ids]


# Code points from all over Unicode, many of them next to those where tokenizers split.
PLANES = [(0x20, 0x7F)] * 4 + [
    (0, 0x20), (0x7F, 0x250), (0x250, 0x600), (0x600, 0x1000), (0x1000, 0x3100), (0x300, 0x370),
    (0x3000, 0xD800), (0xE000, 0x10000), (0x10000, 0x20000), (0x1F300, 0x1FB00), (0xAC00, 0xB000),
    (0x20000, 0x2A6E0), (0x2000, 0x2070), (0xFE00, 0xFE10), (0xE0000, 0xE0080),
]  # fmt: skip


def random_line(rng: random.Random) -> str:
    words = []
    for plane in rng.choices(PLANES, k=rng.randrange(6)):
        planes = rng.choices((plane, (97, 123)), k=rng.randrange(1, 8))
        words.append("".join(chr(rng.randrange(*span)) for span in planes))
    return rng.choice(" \t\u00a0\u3000-,'~").join(words)


CHANGES = [{"lowercase": False, "strip_accents": False}, {"handle_chinese_chars": False}]


@pytest.mark.parametrize("change", [{}, *CHANGES, {"clean_text": False}])
def test_random_unicode_with_bert_normalizers(change: dict[str, bool], bert: str) -> None:
    """A small table starts anew with each call."""
    parts, rng = json.loads(bert), random.Random(0)
    parts["normalizer"] |= change
    encoder = TextEncoder(json.dumps(parts), table_words=50)
    assert encoder.word_by_word
    for _ in range(1 if change else 20):
        assert_equal(encoder, json.dumps(parts), [random_line(rng) for _ in range(1000)])


def test_sentences_without_tokens_line_ends_and_special_tokens(bert: str) -> None:
    lines = ["", " ", "[SEP] is [MASK]ed", "two\nlines", "a", "", "\u200b", "Don't!", "x" * 300]
    lines.append("[unused1]")
    encoder = TextEncoder(bert)
    assert_equal(encoder, bert, lines)
    assert not set(encoder.encode(lines)[0].tolist()) & {101, 102, 103, 2}
    assert [len(part) for part in encoder.encode([])] == [0, 0]


def test_other_tokenizers_get_whole_sentences(bert: str) -> None:
    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    corpus = ["the cat sat on one mat and then it ran far away from all those dogs"] * 3
    trainer = trainers.UnigramTrainer(vocab_size=40, unk_token="<unk>", show_progress=False)
    unigram.train_from_iterator(corpus, trainer)
    with_words = Tokenizer.from_str(bert)
    with_words.add_tokens(["cat sat"])
    normalized = Tokenizer.from_str(bert)
    normalized.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    for tokenizer in (unigram, with_words, normalized):
        encoder = TextEncoder(tokenizer.to_str())
        assert not encoder.word_by_word
        lines = [*corpus, "", "a cat sat here", "cat  sat", "away from one catdog?", "[SEP]"]
        assert_equal(encoder, tokenizer.to_str(), lines)
        assert encoder.dtype == np.uint16


def test_an_error_of_the_hub_keeps_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: str, **__: object) -> str:
        raise OSError("no such repository\n\nlong advice")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(UserError, match=r"\(no such repository\); "):
        load_tokenizer_files("owner/model")
