"""Vocabularies of one's own: loadable, repeatable, the same ids as SentencePiece's own, and honest about bad input."""

from __future__ import annotations

import hashlib
import os
import random
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import get_args

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from data_prep import vocabulary
from data_prep.encode import load_tokenizer_files
from data_prep.vocabulary import MODEL_FILE, SPECIALS, Kind, train_vocabulary
from multicls.errors import UserError
from multicls.files import REPOSITORY
from multicls.tokenization import facet_ids, with_facets

KINDS = get_args(Kind)
SIZE = 200


def invented(sentences: int = 400) -> Iterator[str]:
    """Sentences of made-up words."""
    draw = random.Random(1)
    words = [
        "".join(draw.choice("bdfgklmnprst") + draw.choice("aeiouüß") for _ in range(1 + n % 4)) for n in range(300)
    ]
    for _ in range(sentences):
        yield " ".join(draw.choices(words, k=8)).capitalize() + f", {draw.randrange(100)}."


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """A vocabulary of each kind, uncased and cased."""
    folder = tmp_path_factory.mktemp("vocabularies")
    return {
        (kind, cased): train_vocabulary(
            invented(), folder / f"{kind} {cased}", kind=kind, size=SIZE, cased=cased, log=lambda _: None
        )
        for kind in KINDS
        for cased in (False, True)
    }


def as_data_preparation_reads(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_str(load_tokenizer_files(str(folder))["tokenizer.json"].decode("utf-8"))
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_folder_loads_and_facets_take_the_unused_entries(
    kind: Kind, folders: dict[tuple[str, bool], Path], tmp_path: Path
) -> None:
    assert set(load_tokenizer_files(str(folders[kind, False]))) == {"tokenizer.json", "tokenizer_config.json"}
    tokenizer = AutoTokenizer.from_pretrained(folders[kind, False])
    assert len(tokenizer) == SIZE and tokenizer.convert_ids_to_tokens(list(range(len(SPECIALS)))) == SPECIALS
    assert tokenizer.pad_token_id == 0 and tokenizer.model_max_length == 512
    text = " ".join(islice(invented(), 1)).lower()
    assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]
    with_facets(tokenizer, 16).save_pretrained(tmp_path)
    faceted = AutoTokenizer.from_pretrained(tmp_path)
    assert len(faceted) == SIZE and facet_ids(faceted) == tuple(range(1, 17))
    ids = faceted(text, text)["input_ids"]
    assert ids[0] == faceted.cls_token_id and ids[-1] == faceted.sep_token_id
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[17:-1] == [*plain, faceted.sep_token_id, *plain]
    if kind == "unigram":  # WordPiece loses accents and what stands next to punctuation
        assert faceted.decode(plain) == text
    assert facet_ids(with_facets(tokenizer, 17)) == tuple(range(SIZE, SIZE + 17))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cased", [False, True])
def test_special_tokens_in_text_are_text(kind: Kind, cased: bool, folders: dict[tuple[str, bool], Path]) -> None:
    tokenizer = as_data_preparation_reads(folders[kind, cased])
    unknown = tokenizer.token_to_id("[UNK]")
    text = "".join(f"{special} a{special}a " for special in SPECIALS)
    ids = set(tokenizer.encode(text, add_special_tokens=False).ids)
    assert ids and not ids & (set(range(len(SPECIALS))) - {unknown})
    if kind == "unigram" and cased:
        assert unknown not in ids  # all they are written with has an entry


@pytest.mark.parametrize("kind", KINDS)
def test_case(kind: Kind, folders: dict[tuple[str, bool], Path]) -> None:
    for cased in (False, True):
        tokenizer = as_data_preparation_reads(folders[kind, cased])
        assert (tokenizer.encode("Bato").ids != tokenizer.encode("bato").ids) == cased


TRAIN = """
import sys
from pathlib import Path
from data_prep.vocabulary import train_vocabulary
_, text, output, kind, size = sys.argv
train_vocabulary(Path(text).read_text("utf-8").splitlines(), output, kind=kind, size=int(size))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_do_not_depend_on_hashes_or_threads(
    kind: Kind, folders: dict[tuple[str, bool], Path], tmp_path: Path
) -> None:
    def digests(folder: Path) -> dict[str, str]:
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}

    expected = digests(folders[kind, False])
    text = tmp_path / "text"
    text.write_text("\n".join(invented()), "utf-8")
    for run in ("1", "3"):
        changed = {"PYTHONHASHSEED": run, "RAYON_NUM_THREADS": run, "TOKENIZERS_PARALLELISM": "true"}
        command = [sys.executable, "-c", TRAIN, str(text), str(tmp_path / run), kind, str(SIZE)]
        subprocess.run(command, check=True, env=os.environ | changed, cwd=REPOSITORY)
        assert digests(tmp_path / run) == expected


def strings(draw: random.Random, last: int, count: int) -> list[str]:
    lengths = (draw.randint(1, 30) for _ in range(count))
    return ["".join(chr(draw.randint(1, last)) for _ in range(length)) for length in lengths]


def different(folder: Path, texts: list[str]) -> list[str]:
    """The texts that SentencePiece itself splits into other ids."""
    tokenizer = as_data_preparation_reads(folder)
    own = SentencePieceProcessor(model_file=str(folder / MODEL_FILE))
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [text for text, theirs, ours in zip(texts, own.encode(texts), encoded, strict=True) if theirs != ours.ids]


@pytest.mark.parametrize("cased", [False, True])
def test_ids_are_those_of_sentencepiece(cased: bool, folders: dict[tuple[str, bool], Path]) -> None:
    folder = folders["unigram", cased]
    own = SentencePieceProcessor(model_file=str(folder / MODEL_FILE))
    tokenizer = as_data_preparation_reads(folder)
    assert [own.id_to_piece(n) for n in range(SIZE)] == [tokenizer.id_to_token(n) for n in range(SIZE)]
    draw = random.Random(0)
    texts = list(invented(1000))
    texts += [unicodedata.normalize("NFD", text) for text in texts]
    texts += [text.translate({ord("a"): "A\u032f", ord("e"): "E\u200d", ord("i"): " \u3000"}) for text in texts]
    texts += [
        "",
        " ",
        "▁",
        "a▁ ▁b",
        "x\r\ny",
        "a\x00b",
        "\ufeffa",
        "[MASK] a[unused0]",
        "ﬁﬃ Ⅷ ①",
        "İSTANBUL ẞ",
        "\u0301",
    ]
    texts += strings(draw, 0x7F, 3000) + strings(draw, 0x2FF, 3000)
    texts += [chr(code) for code in range(1, 0x30000) if not 0xD800 <= code < 0xE000]
    assert different(folder, texts) == []
    # Where several combining marks that belong together stand on one letter, the order can come out another.
    heaps = strings(draw, 0x5FF, 3000)
    assert len(different(folder, heaps)) < 0.02 * len(heaps)


def read_corpus(folder: Path, number: int) -> list[str]:
    lines = sorted(folder.glob("wiki/*/*"))[number].read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip() and not line.startswith(("<doc", "</doc"))]


@pytest.mark.slow
def test_ids_are_those_of_sentencepiece_on_real_text(multicls_data: Path, tmp_path: Path) -> None:
    train_vocabulary(
        read_corpus(multicls_data / "corpus", 0), tmp_path / "v", kind="unigram", size=2000, log=lambda _: None
    )
    texts = read_corpus(multicls_data / "corpus", 1) + read_corpus(multicls_data / "corpus", 2)
    assert len(texts) > 1000 and different(tmp_path / "v", texts) == []
    tokenizer = as_data_preparation_reads(tmp_path / "v")
    pieces = sum(len(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    assert pieces / sum(len(text.split()) for text in texts) < 2.4


@pytest.mark.parametrize("kind", KINDS)
def test_rare_characters_get_no_entry(kind: Kind, tmp_path: Path) -> None:
    rare = [chr(code) for code in range(0x4E00, 0x4E10)]
    text = [*invented(6000), *rare]
    train_vocabulary(text, tmp_path / "v", kind=kind, size=SIZE, log=lambda _: None)
    tokenizer = Tokenizer.from_file(str(tmp_path / "v" / "tokenizer.json"))
    assert not tokenizer.get_vocab().keys() & set(rare)
    assert "ü" in tokenizer.get_vocab() or kind == "wordpiece"  # which drops accents


def test_of_too_many_different_words_the_rare_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "MOST_WORDS", 30)
    text = (f"often {sentence} sometimes" if n % 2 else f"often {sentence}" for n, sentence in enumerate(invented()))
    counts = vocabulary._count_words(text)
    assert counts["often"] == 400 and counts["sometimes"] == 200 and len(counts) == 30


@pytest.mark.parametrize("kind", KINDS)
def test_largest_size_is_named_and_works(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--size 50000: too large for this text; it gives at most \d+") as caught:
        train_vocabulary(invented(), tmp_path / "v", kind=kind, size=50_000)
    assert not list(tmp_path.iterdir())
    largest = int(re.findall(r"\d+", str(caught.value))[-1])
    train_vocabulary(invented(), tmp_path / "v", kind=kind, size=largest)
    assert AutoTokenizer.from_pretrained(tmp_path / "v").vocab_size == largest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("sentences", "size", "message"),
    [
        ([], 100, "no text in the input"),
        (["  ", "\n"], 100, "no text in the input"),
        (["a b c"] * 9, 21, "--size 21: too small"),
        (["a b c"] * 9, -1, "--size -1: too small"),
        ([chr(code) for code in range(0x391, 0x3A0)] * 9, 30, "--size 30: too small; special tokens and alphabet"),
        (["\x01 \x02"], 100, "--size 100: too large|cannot train on this text"),
    ],
)
def test_bad_input_leaves_nothing(kind: Kind, sentences: list[str], size: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        train_vocabulary(sentences, tmp_path / "a" / "v", kind=kind, size=size, log=lambda _: None)
    assert not list(tmp_path.rglob("*.*")) and not (tmp_path / "a" / "v").exists()


def test_output_in_use_is_refused_before_the_text_is_read(tmp_path: Path) -> None:
    def unread() -> Iterator[str]:
        raise AssertionError("the text was read")
        yield ""

    (tmp_path / "notes.txt").write_text("mine")
    for output in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(UserError, match="new or empty"):
            train_vocabulary(unread(), output)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_failure_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: object, value: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(vocabulary, "write_json", full)
    with pytest.raises(OSError, match="No space"):
        train_vocabulary(invented(), tmp_path / "v", size=SIZE)
    assert not list(tmp_path.iterdir())
