"""Settings of data preparation and options of its commands. Imports nothing heavy, so that help is printed at once."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from multicls.errors import did_you_mean
from multicls.settings import Settings

FileFormat = Literal["text", "wikiextractor", "jsonl", "mediawiki", "html", "parquet", "dataset"]
MIN_SENTENCES = 6  # a document needs two sentences for each of three parts
RULES = (  # of cleaning; docs/data.md says what each does
    *("mojibake", "unicode", "control_characters", "disambiguation", "boilerplate", "end_matter", "headings", "holes"),
    *("sentences_without_letter", "long_sentences", "repeated_lines", "duplicate_documents"),
)

_WHAT = (
    "files and folders (.gz .bz2 .xz .zst, too; s3:// and other fsspec paths), wikipedia[:DATE.LANGUAGE], bookcorpus, "
    "bookcorpusopen or a data set of the Hub, OWNER/DATASET[:CONFIG[:SPLIT]]; NAME: name of the source"
)


class ReadOptions(Settings):
    """How files are divided into documents."""

    documents: Literal["file", "blank_line", "sentences"] = Field(
        "file",
        description="plain text: a document is a file, or the text between blank lines; or each line (or row) is a "
        "sentence",
    )
    text_field: str = Field("text", description="JSON lines, Parquet, data sets: field with the text")
    bad_records: Literal["drop", "stop"] = Field("drop", description="drop and count bad records, or stop")


class InputSettings(ReadOptions):
    """The text to read, and how it is divided into documents and cleaned."""

    input: tuple[str, ...] = Field(
        min_length=1,
        title="[NAME=]WHAT",
        description=f"the text to read; {_WHAT}",
    )
    include: tuple[str, ...] = Field((), title="GLOB", description="read only these files of a folder")
    exclude: tuple[str, ...] = Field((), title="GLOB", description="leave out these files of a folder")
    format: Literal["auto", FileFormat] = Field("auto", description="format of the files")
    language: str = Field("en", description="language of the text: its ISO 639 code, for the sentence splitter")
    without: tuple[str, ...] = Field((), title="RULE", description="cleaning rules to leave out")

    @field_validator("language")
    @classmethod
    def _is_code(cls, language: str) -> str:
        if not re.fullmatch(r"[a-z]{2,3}(-[a-z]+)*", language):  # the splitter takes any other word for English
            raise ValueError("must be an ISO 639 code, such as en for English or de for German")
        return language

    @field_validator("without")
    @classmethod
    def _known_rules(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if hints := dict.fromkeys(did_you_mean(name, RULES) for name in names if name not in RULES):
            raise ValueError(f"no such rule.{''.join(hints)}")
        return names

    @property
    def rules(self) -> frozenset[str]:
        """Names of the cleaning rules in force."""
        return frozenset(RULES) - frozenset(self.without)


class PrepareSettings(InputSettings):
    """Settings of a corpus; together with the text they decide its bytes."""

    tokenizer: str = Field(
        title="PATH_OR_ID",
        description="a folder with tokenizer.json, that file, a Hub id like bert-base-uncased, or sample; --sample "
        "gives it",
    )
    min_sentences: int = Field(
        MIN_SENTENCES, ge=3, description="drop documents of fewer sentences; three are one for each part"
    )
    near_duplicates: bool = Field(False, description="drop documents nearly equal to an earlier one")


class ExecutorOptions(Settings):
    """Options that say where the tasks run."""

    executor: Literal["local", "slurm", "ray"] = Field("local", description="this machine, SLURM or Ray")
    workers: PositiveInt = Field(
        default_factory=lambda: (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        ),
        description="most tasks at a time; one per core",
    )
    partition: str = Field("", description="SLURM: partition of the jobs")
    time: str = Field("04:00:00", description="SLURM: time limit of a job")
    tasks_per_job: PositiveInt = Field(1, description="SLURM: tasks of each job of the array")
    sbatch: tuple[str, ...] = Field((), title="OPTION=VALUE", description="SLURM: further options, e.g. account=nlp")

    @field_validator("sbatch")
    @classmethod
    def _has_values(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [option for option in options if "=" not in option]:
            raise ValueError(f"write OPTION=VALUE instead of {wrong[0]}")
        return options


class BuildOptions(ExecutorOptions, PrepareSettings):
    """Options of the command that prepares a corpus."""

    input: tuple[str, ...] = Field(
        min_length=1, title="[NAME=]WHAT", description=f"the text to prepare, or --sample; {_WHAT}"
    )
    output: str = Field(description="the corpus folder: new, or of a stopped run")
    sample: bool = Field(False, description="use the embedded sample as --input and --tokenizer")
    plan: bool = Field(False, description="print the expected size and time, and do nothing")

    @model_validator(mode="before")
    @classmethod
    def _sample(cls, values: dict[str, Any]) -> dict[str, Any]:
        if not values.get("sample"):
            return values
        if values.get("input"):
            raise ValueError("--sample takes the place of --input: give one of them")
        from multicls.sample import sample_dump

        return {"input": (str(sample_dump()),), "tokenizer": "sample"} | values

    @model_validator(mode="after")
    def _fit_for_slurm(self) -> BuildOptions:
        if self.executor == "slurm" and not self.partition:
            raise ValueError("--executor slurm: needs --partition; `sinfo` lists them")
        if self.executor == "slurm" and len(str(Path(self.output).absolute()).split()) > 1:
            raise ValueError(f"--output {self.output}: with --executor slurm, its path must have no spaces")
        return self

    def settings(self) -> PrepareSettings:
        """Returns the settings of the corpus."""
        return PrepareSettings(**{name: getattr(self, name) for name in PrepareSettings.model_fields})


class CorpusOptions(Settings):
    """Options of the command `verify`."""

    corpus: str = Field(description="a corpus folder")


class ExampleOptions(CorpusOptions):
    """Options that decide how text becomes examples."""

    seq_length: PositiveInt = Field(128, description="tokens of a sequence")
    num_facets: int = Field(5, ge=0, description="extra CLS tokens of a sequence")


class ShowOptions(ExampleOptions):
    """Options of the command `show`."""

    row: int = Field(description="a row from 0: a document, or a part of a very long one")
    seed: int = Field(0, description="seed of the training run")
    epoch: int = Field(0, ge=0, description="pass over the corpus, from 0")
    window: int = Field(0, ge=0, description="number of the window in the row, from 0")


class StatsOptions(ExampleOptions):
    """Options of the command `stats`."""

    output: str | None = Field(None, title="PNG", description="the picture; default: beside the corpus, DIR.png")


class VocabularyOptions(InputSettings):
    """Options of the command `vocabulary`."""

    output: str = Field(description="the folder of the tokenizer, new or empty")
    type: Literal["wordpiece", "unigram"] = Field("wordpiece", description="BERT's, or SentencePiece's")
    size: int = Field(30_522, description="entries, special tokens included")
    cased: bool = Field(False, description="keep upper case and accents")
    max_mb: float = Field(2000.0, gt=0, title="MB", description="most text to read, spread over the input")
