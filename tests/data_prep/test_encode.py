"""Word by word or not: the ids are those of the Hugging Face tokenizer."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from data_prep import encode
from data_prep.encode import TextEncoder, load_tokenizer_files
from multicls.corpus import Corpus, tokenizer_fingerprint
from multicls.errors import UserError
from multicls.files import write_json
from multicls.passages import read_passages
from multicls.sample import sample_model
from multicls.tokenization import keep_words, load_tokenizer, with_facets
from tests.data_prep.conftest import prepared
from tests.encoders import FAMILIES


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
    tokens, lengths = encoder.encode([[sentence] for sentence in sentences])
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
    assert not set(encoder.encode([lines])[0].tolist()) & {101, 102, 103, 2}
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


# How each family writes the space between sentences.
KINDS = [
    "roberta",
    "modernbert",
    "eurobert",
    "xlm-roberta",
    "camembert",
    "deberta-v2",
    "bert",
    "mpnet",
]
ENGLISH = [
    f"{('Bal', 'Del', 'Fil')[i % 3]} gol {'nar ' * (i % 5)}pel{mark}"
    for i, mark in enumerate(".?!)" * 9)
]
CHINESE = [
    "我们去城里。",
    "“你好！”",
    "她说。",
    "他走了……",
    "そうです。",
    "Bal gol.",
    "好！",
    "nar pel.",
]
CHINESE_TEXT = "我们去城里。“你好！”她说。他走了……そうです。Bal gol. 好！nar pel."


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_whole_text(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents are divided into texts of five sentences, each with the one before as context."""
    monkeypatch.setattr(encode, "TEXT_SENTENCES", 5)
    parts = json.loads(FAMILIES[kind][1]().backend_tokenizer.to_str())
    if parts["model"]["type"] == "Unigram":  # a space before a sentence is then a token of its own
        parts["model"]["vocab"] += [[letter, -9.0] for letter in sorted(set(CHINESE_TEXT) - {" "})]
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    encoder = TextEncoder(tokenizer.to_str())
    assert encode.join_sentences(CHINESE)[0] == CHINESE_TEXT
    for document, text in ((ENGLISH, " ".join(ENGLISH)), (CHINESE, CHINESE_TEXT)):
        tokens, lengths = encoder.encode([document, document[:1]])
        whole, first = (
            tokenizer.encode(part, add_special_tokens=False) for part in (text, document[0])
        )
        assert tokens.tolist() == whole.ids + first.ids
        end = 0  # of the sentence in the text
        expected = []
        for sentence in document:
            begin, end = end, text.index(sentence, end) + len(sentence)
            expected.append(sum(begin < stop <= end for _, stop in whole.offsets))
        assert lengths.tolist() == [*expected, len(first.ids)]


def test_a_corpus_of_byte_level_tokens_has_the_spaces_between_sentences(tmp_path: Path) -> None:
    """Passages for recall are texts without the space before them. Corpora of sentences alone are refused."""
    FAMILIES["roberta"][1]().save_pretrained(tmp_path / "roberta")
    tokenizer = load_tokenizer(str(tmp_path / "roberta"))
    texts = [" ".join(ENGLISH[first:]) for first in (0, 4)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    corpus = prepared(
        tmp_path / "roberta", tmp_path / "out", tmp_path / "0.txt", tmp_path / "1.txt"
    )
    for number, text in enumerate(texts):
        assert (
            corpus.row(number).tokens.tolist()
            == tokenizer(text, add_special_tokens=False)["input_ids"]
        )
    passages = read_passages(corpus, 0.5, tokenizer).texts
    assert len(passages) > 1 and all(passage == passage.strip() for passage in passages)
    assert " ".join(passages) in " ".join(texts)
    write_json(corpus.path / "manifest.json", corpus.manifest | {"format_version": 5})
    with pytest.raises(UserError, match="format 5, .* without the space before it"):
        Corpus(corpus.path)


def test_special_tokens_of_a_user_are_words(tmp_path: Path, bert: str) -> None:
    """They are tokens in the corpus, in the pretrained model and in fine-tuning; roles and facets are text."""
    tokenizer = load_tokenizer(str(sample_model()))
    tokenizer.add_tokens([AddedToken("[DRUG]", special=True)], special_tokens=True)
    tokenizer.add_special_tokens({"extra_special_tokens": ["[GENE]"]})
    tokenizer.add_tokens(["crispr"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    text = "[DRUG] and [GENE] with crispr [SEP] [MASK] [unused0] [PAD]."
    words = tokenizer.convert_tokens_to_ids(["[DRUG]", "[GENE]", "crispr"])
    content = load_tokenizer_files(str(tmp_path / "tokenizer"))["tokenizer.json"].decode()
    tokens = TextEncoder(content).encode([[text]])[0].tolist()
    assert [token for token in tokens if token >= min(words)] == words
    assert not set(tokens) & set(
        tokenizer.convert_tokens_to_ids(["[SEP]", "[MASK]", "[PAD]", "[unused0]"])
    )
    with_facets(tokenizer, 2).save_pretrained(tmp_path / "exported")
    tuned = AutoTokenizer.from_pretrained(tmp_path / "exported", split_special_tokens=True)
    assert tuned(text, add_special_tokens=False)["input_ids"] == tokens
    plain = AutoTokenizer.from_pretrained(tmp_path / "tokenizer", split_special_tokens=True)
    keep_words(plain)
    assert plain(text, add_special_tokens=False)["input_ids"] == tokens
    prints = {tokenizer_fingerprint(t.backend_tokenizer.to_str()) for t in (plain, tuned)}
    assert prints == {tokenizer_fingerprint(content)} != {tokenizer_fingerprint(bert)}


def test_an_error_of_the_hub_keeps_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: str, **__: object) -> str:
        raise OSError("no such repository\n\nlong advice")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(UserError, match=r"\(no such repository\); "):
        load_tokenizer_files("owner/model")
