"""Small corpora for the tests of data preparation."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from data_prep.examples import SpecialIds
from data_prep.formats import read_documents
from data_prep.formats.base import Skipped, SourceFile
from data_prep.prepare import LARGE_UNIT, SMALL_UNIT, group_units, prepare
from data_prep.settings import BuildOptions
from data_prep.sources import list_inputs
from multicls.corpus import Corpus
from multicls.errors import UserError
from multicls.sample import sample_dump, sample_model
from tests.encoders import wordpiece

WORDS = ["the", "cat", "sat", "on", "one", "mat", "and", "then", "it", "ran", "far", "away", "from"]
WORDS += ["all", "those", "dogs", "who", "had", "come", "to", "eat", "dinner", "here"]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"[unused{k}]" for k in range(5))]
SPECIAL_IDS = SpecialIds(cls=2, sep=3, pad=0, mask=4, facets=(5, 6, 7, 8, 9))
SAMPLE_IDS = SpecialIds(cls=101, sep=102, pad=0, mask=103, facets=(1, 2, 3, 4, 5))


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A WordPiece tokenizer of letters and a few words, in a folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = wordpiece(special=(*SPECIALS, *WORDS)).backend_tokenizer
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def sample_corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The embedded sample, prepared."""
    try:
        model, dump = sample_model(), sample_dump()
    except UserError as error:
        pytest.skip(str(error))
    return prepared(model, tmp_path_factory.mktemp("sample") / "corpus", dump)


def prepared(
    tokenizer: Path,
    output: Path,
    *inputs: Path | str,
    shard_tokens: int = 1 << 24,
    shard_bytes: int = 1,
    **settings: Any,
) -> Corpus:
    """Prepares a corpus of the inputs, of which two small files are a unit and, by default, a shard; opens it."""
    settings = {"workers": 1, "tokenizer": str(tokenizer), "output": str(output)} | settings
    chosen = BuildOptions(input=list(map(str, inputs)), **settings)
    return prepare(chosen, small_unit=9000, shard_tokens=shard_tokens, shard_bytes=shard_bytes)


def options(*inputs: object, **values: Any) -> BuildOptions:
    """Options that name inputs."""
    return BuildOptions(input=list(map(str, inputs)), tokenizer="sample", output="", **values)


def listed(*inputs: object, **values: Any) -> tuple[list[SourceFile], list[Skipped]]:
    """The files of inputs, and what is skipped."""
    return list_inputs(options(*inputs, **values))


def read_all(*inputs: object, **values: Any) -> list[Any]:
    """The documents and bad records of inputs; files of more than `large` bytes are cut."""
    large, chosen = values.pop("large", LARGE_UNIT), options(*inputs, **values)
    units = group_units(list_inputs(chosen)[0], {}, SMALL_UNIT, large)
    shares = [file for unit in units for file in unit.files]
    return [document for file in shares for document in read_documents(file, chosen)]


@pytest.fixture
def corpus_of(tiny_tokenizer: Path, tmp_path: Path) -> Callable[..., Corpus]:
    """A function that prepares one text, or JSON lines of several, in the test's folder."""

    def make(content: str | bytes | list[str], **settings: Any) -> Corpus:
        path = tmp_path / ("in.jsonl" if isinstance(content, list) else "in.txt")
        if isinstance(content, list):
            content = "".join(json.dumps({"text": text}) + "\n" for text in content)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return prepared(tiny_tokenizer, tmp_path / "out", path, **settings)

    return make


def text_of(corpus: Corpus, number: int) -> list[str]:
    """The sentences of a row, tokens joined without white space."""
    tokenizer = Tokenizer.from_file(str(corpus.path / "tokenizer.json"))
    row = corpus.row(number)
    tokens = [str(tokenizer.id_to_token(int(i))).removeprefix("##") for i in row.tokens]
    bounds = zip(row.offsets[:-1], row.offsets[1:], strict=True)
    return ["".join(tokens[first:end]) for first, end in bounds]


def squeezed(text: str) -> list[str]:
    """The sentences of a story as `text_of` returns them."""
    return [sentence.replace(" ", "").lower() + "." for sentence in text.split(".") if sentence]


def story(sentences: int, start: int = 0) -> str:
    """A text of plain, different sentences."""
    return " ".join(
        " ".join(WORDS[(start + 7 * s + i) % len(WORDS)] for i in range(3 + s % 9)).capitalize()
        + "."
        for s in range(sentences)
    )


def large_input(folder: Path, files: int = 8) -> Path:
    """Makes files of a unit each. Their first documents are the same, and they end with a hole of the file system."""
    folder.mkdir()
    for number in range(files):
        rows = [story(2000), *(story(2000, 7 * i + number) for i in range(1, 12))]
        lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
        (folder / f"{number}.jsonl").write_text(lines)
        os.truncate(folder / f"{number}.jsonl", 5 << 20)
    return folder


def same_files(one: Path, other: Path) -> None:
    """Asserts that two corpora have the same files with the same bytes."""
    names = [sorted(path.name for path in folder.iterdir()) for folder in (one, other)]
    assert names[0] == names[1]
    for name in names[0]:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
