"""Settings of data preparation. Imports nothing heavy, so that help and errors are printed at once."""

import codecs
from typing import Any, Literal, get_args

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator
from pydantic_settings import CliPositionalArg

from multicls.settings import Settings

MIN_SENTENCES = 6  # a document needs two sentences for each of three parts
# Rules of cleaning; docs/data.md explains each.
TextRule = Literal["unicode", "html", "main_text", "markup", "end_matter", "headings", "holes"]
SentenceRule = Literal["replacement_characters", "sentences_without_letter", "long_sentences"]
Rule = Literal[TextRule, SentenceRule, "duplicate_documents"]
RULES: tuple[Rule, ...] = get_args(Rule)
# Languages for which sentencex 1.0 has rules, and those that its English splits well.
LANGUAGES = (
    "auto am ar bg bn bo ca da de el en es fi fr gu hi hy it ja km kk kn lo ml mr my nl pa pl pt ru sk ta te th "
    "uk ur zh"
)
INPUT_HELP = (
    "[NAME=]WHAT: files, folders (also compressed), wikipedia[:DATE.LANGUAGE], "
    "bookcorpus, or OWNER/DATASET[:CONFIG[:SPLIT]] of the Hub; NAME names the source"
)


def known_encoding(name: str) -> str:
    """Returns the name of an encoding of text as Python knows it, or "" if it does not."""
    try:
        b"ab".decode(name, "replace")  # also fails for the codecs of Python that are no encodings
        return codecs.lookup(name).name
    except (LookupError, UnicodeError):
        return ""


class BuildOptions(Settings):
    """Options of the command that prepares a corpus: together with the text they decide its bytes."""

    input: list[str] = Field(min_length=1, description=INPUT_HELP)
    include: list[str] = Field([], description="read only these files of a folder, like *.txt")
    exclude: list[str] = Field([], description="leave out these files of a folder")
    format: str = Field(
        "auto",
        description="text, jsonl ... (docs/data.md), or wikipedia: an article a row, a paragraph a line",
    )
    encoding: str = Field("utf-8", description="of text that is not UTF-8, such as cp1252")
    documents: Literal["file", "blank_line", "sentences"] = Field(
        "file", description="plain text: a document is a file or block, or each line is a sentence"
    )
    layout: Literal["auto", "lines"] = Field(
        "auto",
        description="lines: each line is a message or a record of its own; none is a heading",
    )
    text_field: list[str] = Field(
        ["text"],
        min_length=1,
        description="field of the text, or its path, such as body.text; several are joined",
    )
    tokenizer: str = Field(description="folder or Hub id of a tokenizer, or the word sample")
    min_sentences: PositiveInt = Field(
        MIN_SENTENCES, description="least number of sentences of a document; 1 for masked-LM alone"
    )
    short_documents: Literal["drop", "join"] = Field(
        "drop", description="drop short documents, or join them in the order of the input"
    )
    language: str = Field(
        "auto",
        pattern=f"^({LANGUAGES.replace(' ', '|')})$",
        description=f"whose rules split sentences: {LANGUAGES}; auto: by the script",
    )
    without: list[Rule] = Field([], description=f"cleaning rules to leave out: {', '.join(RULES)}")
    near_duplicates: Literal["keep", "report", "drop"] = Field(
        "keep", description="documents that share most of their text with an earlier one (MinHash)"
    )
    decontaminate: list[str] = Field(
        [], description="tables of evaluation rows, whose text is dropped from the documents"
    )
    validation_input: list[str] = Field(
        [], description="inputs, as in --input, that are held out as the validation split"
    )
    limit: NonNegativeInt = Field(
        0, description="for a trial: number of documents to read of each source; 0: all"
    )
    keep_dropped: bool = Field(
        False, description="write all text that is left out, with the reason, to dropped.jsonl"
    )

    # These do not change the corpus.
    output: str = Field(exclude=True, description="corpus folder: new, empty, or of a stopped run")
    sample: bool = Field(False, exclude=True, description="prepare the sample with its tokenizer")
    workers: NonNegativeInt = Field(0, exclude=True, description="processes; 0: one for each core")
    scheduler: str | None = Field(None, exclude=True, description="Dask cluster's file or address")

    @field_validator("encoding")
    @classmethod
    def _encoding(cls, value: str) -> str:
        if name := known_encoding(value):
            return name
        raise ValueError(f"no encoding that Python knows: {value}")

    @property
    def rules(self) -> frozenset[str]:
        """Names of the cleaning rules in force."""
        return frozenset(RULES) - frozenset(self.without)

    @model_validator(mode="before")
    @classmethod
    def _sample(cls, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("sample") not in (True, "true", "True", "1"):
            return values
        if values.get("input"):
            raise ValueError("--sample takes the place of --input: set one of them")
        from multicls.sample import sample_dump

        return {"tokenizer": "sample"} | values | {"input": [str(sample_dump())]}


class CorpusOptions(Settings):
    """Compares every file of a corpus with the manifest's checksums."""

    corpus: CliPositionalArg[str] = Field(description="a corpus folder")


class ExampleOptions(CorpusOptions):
    """Prints sources, drops, lengths and what training sees."""

    seq_length: PositiveInt = Field(128, description="tokens of a sequence")
    num_facets: int = Field(5, ge=0, description="extra CLS tokens of a sequence")
    num_parts: int = Field(3, ge=2, le=3, description="parts of an example; 2: pairs")


class StatsOptions(ExampleOptions):
    """Prints sources, drops, lengths and what training sees."""

    as_json: bool = Field(False, alias="json", description="print all of it as a JSON object")


class ShowOptions(ExampleOptions):
    """Prints a row and a training example of it, exactly as the model sees it."""

    row: CliPositionalArg[int] = Field(description="row, from 0: a document, or part of a long one")
    seed: int = Field(1, description="seed of the training run")
    epoch: int = Field(0, ge=0, description="pass over the corpus, from 0")
    window: int = Field(0, ge=0, description="number of the window in the row, from 0")
