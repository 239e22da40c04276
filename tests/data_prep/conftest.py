"""Small corpora for the tests of data preparation."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from data_prep.examples import SpecialIds
from data_prep.prepare import prepare
from data_prep.settings import PrepareSettings
from multicls.corpus import Corpus
from multicls.errors import UserError
from multicls.sample import sample_dump, sample_model

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "one",
    "mat",
    "and",
    "then",
    "it",
    "ran",
    "far",
    "away",
    "from",
    "all",
    "those",
    "dogs",
]
WORDS += ["who", "had", "come", "to", "eat", "dinner", "here"]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"[unused{k}]" for k in range(5))]
SPECIAL_IDS = SpecialIds(cls=2, sep=3, pad=0, mask=4, facets=(5, 6, 7, 8, 9))


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A WordPiece tokenizer of letters and a few words, in a folder."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    vocabulary = (
        SPECIALS + WORDS + letters + [f"##{c}" for c in letters + list("0123456789")] + list(".,!?[]\"'0123456789")
    )
    tokenizer = Tokenizer(
        models.WordPiece({token: i for i, token in enumerate(dict.fromkeys(vocabulary))}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(SPECIALS)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def sample_corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The embedded sample, prepared."""
    try:
        settings = PrepareSettings(input=(str(sample_dump()),), tokenizer=str(sample_model()))
    except UserError as error:
        pytest.skip(str(error))
    return Corpus.open(prepare(settings, tmp_path_factory.mktemp("sample") / "corpus"))


@pytest.fixture(scope="session")
def sample_ids() -> SpecialIds:
    """Special ids of bert-base-uncased's vocabulary with five facets."""
    return SpecialIds(cls=101, sep=102, pad=0, mask=103, facets=(1, 2, 3, 4, 5))


def story(sentences: int, start: int = 0) -> str:
    """A text of plain, different sentences."""
    return " ".join(
        " ".join(WORDS[(start + 7 * s + i) % len(WORDS)] for i in range(3 + s % 9)).capitalize() + "."
        for s in range(sentences)
    )


def same_files(one: Path, other: Path) -> None:
    """Asserts that two corpora have the same files with the same bytes, but for the log and the input's dates."""
    names = [sorted(path.name for path in folder.iterdir()) for folder in (one, other)]
    assert names[0] == names[1]
    for name in set(names[0]) - {"log.jsonl", "inputs.json"}:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
