"""Word by word or not: the ids are those of the Hugging Face tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from data_prep import encode
from data_prep.encode import TextEncoder, encoder_for, load_tokenizer_files
from data_prep.read import read_piece
from data_prep.settings import ReadOptions
from data_prep.sources import find_files
from data_prep.units import Piece
from multicls.errors import UserError
from multicls.sample import sample_model


@pytest.fixture(scope="module")
def bert() -> str:
    try:
        return (sample_model() / "tokenizer.json").read_text(encoding="utf-8")
    except UserError as error:
        pytest.skip(str(error))


def expected(tokenizer_json: str, sentences: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [encoding.ids for encoding in tokenizer.encode_batch(sentences, add_special_tokens=False)]


def assert_equal(encoder: TextEncoder, tokenizer_json: str, sentences: list[str]) -> None:
    found, lengths = encoder.encode(sentences)
    wanted = expected(tokenizer_json, sentences)
    assert lengths.tolist() == [len(ids) for ids in wanted]
    np.testing.assert_array_equal(found, np.concatenate([np.array(ids, np.int64) for ids in wanted]))


def random_lines(count: int) -> Iterator[list[str]]:
    """Lines of characters from all over Unicode, many of them next to those where tokenizers split."""
    rng = random.Random(0)
    planes = [(0x20, 0x7F)] * 4 + [(0, 0x20), (0x7F, 0x250), (0x250, 0x600), (0x600, 0x1000), (0x1000, 0x3100)]
    planes += [(0x300, 0x370), (0x3000, 0xD800), (0xE000, 0x10000), (0x10000, 0x20000), (0x1F300, 0x1FB00)]
    planes += [(0xAC00, 0xB000), (0x20000, 0x2A6E0), (0x2000, 0x2070), (0xFE00, 0xFE10), (0xE0000, 0xE0080)]
    for _ in range(count // 1000):
        lines = []
        for _ in range(1000):
            words = []
            for _ in range(rng.randrange(6)):
                plane = rng.choice(planes)
                word = "".join(chr(rng.randrange(*rng.choice((plane, (97, 123))))) for _ in range(rng.randrange(1, 8)))
                words.append(word)
            lines.append(rng.choice(" \t\u00a0\u3000-,'").join(words))
        yield lines


@pytest.mark.slow
def test_random_unicode(bert: str) -> None:
    encoder = TextEncoder(bert)
    assert encoder.word_by_word
    lines = 0
    for batch in random_lines(100_000):
        assert_equal(encoder, bert, batch)
        lines += len(batch)
    assert lines == 100_000


@pytest.mark.slow
def test_lines_of_the_corpus(bert: str, multicls_data: Path) -> None:
    """Compares every tenth file."""
    encoder = TextEncoder(bert)
    lines: list[str] = []
    count = 0
    for file in find_files([str(multicls_data / "corpus")]).files[::10]:
        for document in read_piece(file, Piece(0, 0, file.size), ReadOptions()):
            lines += document.text.split("\n")
        assert_equal(encoder, bert, lines)
        count += len(lines)
        lines = []
    assert count > 50_000


def test_cased_without_chinese_and_with_accents(bert: str) -> None:
    parts = json.loads(bert)
    lines = [line for batch in random_lines(3000) for line in batch]
    for change in (
        {"lowercase": False, "strip_accents": False},
        {"handle_chinese_chars": False},
        {"clean_text": False},
    ):
        parts["normalizer"] |= change
        text = json.dumps(parts)
        assert TextEncoder(text).word_by_word
        assert_equal(TextEncoder(text), text, lines)


def test_sentences_without_tokens_line_ends_and_special_tokens(bert: str) -> None:
    lines = ["", " ", "[SEP] is [MASK]ed", "two\nlines", "a", "", "\u200b", "Don't!", "x" * 300, "[unused1]"]
    encoder = TextEncoder(bert)
    assert_equal(encoder, bert, lines)
    assert not set(encoder.encode(lines)[0].tolist()) & {101, 102, 103, 2}
    assert [len(part) for part in encoder.encode([])] == [0, 0]


def test_a_full_table_starts_anew(bert: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "TABLE_WORDS", 50)
    encoder = TextEncoder(bert)
    for batch in random_lines(3000):
        assert_equal(encoder, bert, batch[:100])


def test_other_tokenizers_get_whole_sentences() -> None:
    corpus = ["the cat sat on one mat and then it ran far away from all those dogs"] * 3
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        corpus, trainers.UnigramTrainer(vocab_size=40, unk_token="<unk>", show_progress=False)
    )
    encoder = TextEncoder(tokenizer.to_str())
    assert not encoder.word_by_word
    assert_equal(encoder, tokenizer.to_str(), [*corpus, "", "away from one catdog?"])


def test_added_tokens_of_the_text_are_left_to_the_tokenizer(bert: str) -> None:
    tokenizer = Tokenizer.from_str(bert)
    tokenizer.add_tokens(["cat sat"])
    encoder = TextEncoder(tokenizer.to_str())
    assert not encoder.word_by_word
    assert_equal(encoder, tokenizer.to_str(), ["a cat sat here", "cat  sat"])
    tokenizer = Tokenizer.from_str(bert)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    assert not TextEncoder(tokenizer.to_str()).word_by_word


def test_a_process_keeps_its_encoders(bert: str) -> None:
    assert encoder_for(bert) is encoder_for(bert)
    assert encoder_for(bert).encode(["a cat"])[0].dtype == np.uint16


def test_the_embedded_tokenizer_has_a_name(bert: str) -> None:
    assert load_tokenizer_files("sample")["tokenizer.json"].decode("utf-8") == bert


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "a/b/c", "runs/tokenizer.json", "two words"])
def test_what_cannot_be_a_model_id_is_not_looked_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: pytest.fail("asked the Hub"))
    with pytest.raises(UserError, match='not a model id of the Hub .*"sample" is the embedded tokenizer'):
        load_tokenizer_files(name)


def test_an_error_of_the_hub_keeps_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: str) -> str:
        raise OSError("no such repository\n\nlong advice")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(UserError, match=r"does not provide it \(no such repository\);"):
        load_tokenizer_files("owner/model")
