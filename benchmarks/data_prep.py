"""Data preparation against plain `datasets.map` that cleans, splits and tokenizes alike, in one run.

python benchmarks/run.py data_prep NAME=PATH [NAME=PATH ...] [--tokenizer PATH_OR_ID] [--repeats 3] [--check]

Every measurement is a process of its own, from the files to what lies on disk; the order is shuffled in each round, so
that no one always runs on the warmer machine. Prints medians as a Markdown table, then where the time goes. `--check`
compares the ids with the Hugging Face tokenizer's on every line of the input first.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare import Report, new_parser
from data_prep.build import BuildSettings, build
from data_prep.cleaning import RULES, Drops, clean, paragraphs
from data_prep.encode import load_tokenizer_files
from data_prep.readers import RawDocument, Reading, ReadOptions
from data_prep.sentences import split_paragraph
from data_prep.sources import find_files
from data_prep.worker import MIN_SENTENCES, Worker, WorkSettings
from multicls.corpus import Corpus, write_shard
from multicls.sample import sample_model

CHUNK = 1 << 19


def documents(inputs: list[str]) -> Iterator[RawDocument]:
    """All documents of the input."""
    for file in find_files(inputs):
        yield from Reading(file, ReadOptions())


def ours(inputs: list[str], tokenizer: str, output: Path, processes: int) -> None:
    """The product."""
    build(BuildSettings(tuple(inputs), tokenizer), output, processes, log=lambda _: None)


def baseline(inputs: list[str], tokenizer: str, output: Path, batched: bool, processes: int) -> None:
    """Prepares the text in ten lines with `datasets`: a generator, a map, save_to_disk; finds no duplicates."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    encode = AutoTokenizer.from_pretrained(tokenizer)

    def rows() -> Iterator[dict[str, Any]]:
        for raw in documents(inputs):
            yield raw._asdict()

    def sentences_of(row: RawDocument) -> list[str]:
        kept = [sentence for line in clean(row, frozenset(RULES), "en", Drops()) for sentence in line]
        return kept if len(kept) >= MIN_SENTENCES else []

    def one(row: dict[str, Any]) -> dict[str, Any]:
        kept = sentences_of(RawDocument(**row))
        return {"input_ids": encode(kept, add_special_tokens=False)["input_ids"] if kept else [], "kept": bool(kept)}

    def many(batch: dict[str, list[Any]]) -> dict[str, Any]:
        kept = [
            sentences_of(RawDocument(*values))
            for values in zip(*(batch[name] for name in RawDocument._fields), strict=True)
        ]
        ids = encode([sentence for document in kept for sentence in document], add_special_tokens=False)["input_ids"]
        taken = iter(ids)
        whole = [i for i, document in enumerate(kept) if document]
        names = {name: [batch[name][i] for i in whole] for name in ("source", "id", "title")}
        return names | {"input_ids": [[next(taken) for _ in kept[i]] for i in whole]}

    data = datasets.Dataset.from_generator(rows, cache_dir=str(output / "cache"))
    if batched:
        data = data.map(many, batched=True, num_proc=processes, remove_columns=data.column_names)
    else:
        names = [name for name in data.column_names if name not in ("source", "id", "title")]
        data = data.map(one, remove_columns=names).filter(bool, input_columns="kept")
    data.save_to_disk(str(output / "data"))


def pieces_in(output: Path) -> int:
    """Returns the tokens that a system has written."""
    if (output / "manifest.json").exists():
        return int(Corpus.open(output).manifest["tokens"])
    import datasets

    column = datasets.load_from_disk(str(output / "data")).with_format("arrow")["input_ids"]
    return sum(len(chunk.flatten().flatten()) for chunk in column.chunks)


SYSTEMS = {
    "datasets.map, one document at a time": (baseline, {"batched": False, "processes": 1}),
    "datasets.map, batched, num_proc=2": (baseline, {"batched": True, "processes": 2}),
    "data_prep/run.py, 1 process": (ours, {"processes": 1}),
    "data_prep/run.py, 2 processes": (ours, {"processes": 2}),
}


def measure(report: Report, inputs: list[str], tokenizer: str, repeats: int) -> None:
    """Adds the table of medians."""
    megabytes = sum(file.size for file in find_files(inputs)) / 1e6
    seconds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    pieces: dict[str, str] = {}
    for _ in range(repeats):
        for name in random.sample(list(SYSTEMS), len(SYSTEMS)):
            with tempfile.TemporaryDirectory() as folder:
                entry = str(Path(__file__).with_name("run.py"))
                words = [sys.executable, entry, "data_prep", *inputs, "--tokenizer", tokenizer, "--run", name, folder]
                done = subprocess.run(words, capture_output=True, text=True, check=True)
                taken, pieces[name] = done.stdout.split()[-2:]
                seconds[name].append(float(taken))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    slow, batched, *_ = medians.values()
    rows = []
    for name, median in medians.items():
        spread = f"{min(seconds[name]):.1f} to {max(seconds[name]):.1f}"
        rows.append([name, median, spread, megabytes / median, slow / median, batched / median, pieces[name]])
    columns = ["system", "seconds (median)", "range", "MB/s", "x unbatched", "x batched", "pieces"]
    report.table(f"{megabytes:.1f} MB, {repeats} rounds", columns, rows)


def where_the_time_goes(report: Report, inputs: list[str], tokenizer_json: str) -> None:
    """Adds what each stage takes in one process."""
    worker = Worker(WorkSettings(tokenizer_json))
    chunks: list[list[RawDocument]] = [[]]
    size = 0
    clock = time.process_time
    taken = {"reading": -clock()}
    for raw in documents(inputs):
        chunks[-1].append(raw)
        size += len(raw.text)
        if size > CHUNK * len(chunks):
            chunks.append([])
    taken["reading"] += clock()
    megabytes = sum(len(raw.text.encode()) for chunk in chunks for raw in chunk) / 1e6
    stages = dict.fromkeys(("splitting", "cleaning and splitting", "tokenizing", "all of a worker"), 0.0)
    rows = []
    for chunk in chunks:
        start = clock()
        for raw in chunk:
            for paragraph in paragraphs(raw.text, "blocks" if raw.layout == "blocks" else "lines"):
                list(split_paragraph(paragraph, "en"))
        stages["splitting"] += clock() - start
        start = clock()
        kept = [line for raw in chunk for line in clean(raw, frozenset(RULES), "en", Drops())]
        stages["cleaning and splitting"] += clock() - start
        start = clock()
        worker.encoder.encode([sentence for line in kept for sentence in line])
        stages["tokenizing"] += clock() - start
        start = clock()
        rows += [row for text in worker.prepare(chunk).texts for row in text.rows]
        stages["all of a worker"] += clock() - start
    with tempfile.TemporaryDirectory() as folder:
        taken |= stages | {"writing": -clock()}
        write_shard(Path(folder) / "shard.arrow", rows)
        taken["writing"] += clock()
    table = [[name, 1000 * value / megabytes] for name, value in taken.items()]
    report.table("CPU time of one process", ["stage", "ms a MB of text"], table)
    alone = taken["all of a worker"] / (taken["reading"] + taken["writing"])
    report.figure("workers that the one process which reads and writes keeps pace with", alone)


def check(inputs: list[str], tokenizer_json: str) -> None:
    """Compares the ids of every line of the input with the tokenizer's."""
    worker, reference = (Worker(WorkSettings(tokenizer_json)) for _ in range(2))
    reference.encoder.word_by_word = False
    count = 0
    for raw in documents(inputs):
        lines = raw.text.split("\n")
        found, expected = worker.encoder.encode(lines), reference.encoder.encode(lines)
        if not all((a == b).all() for a, b in zip(found, expected, strict=True)):
            raise SystemExit(f"{raw.source} {raw.id}: ids differ from the tokenizer's")
        count += len(lines)
    print(f"ids equal to the tokenizer's on all {count:,} lines\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the command line asks for."""
    parser = new_parser("data_prep", __doc__)
    parser.add_argument("inputs", nargs="+", metavar="NAME=PATH")
    parser.add_argument("--tokenizer", default=None, help="default: the embedded sample's")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--run", nargs=2, metavar=("SYSTEM", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    tokenizer = args.tokenizer or str(sample_model())
    if args.run:
        system, settings = SYSTEMS[args.run[0]]
        importlib.import_module("datasets"), importlib.import_module("transformers")  # no one's time is for imports
        start = time.monotonic()
        output = Path(args.run[1]) / "output"
        system(args.inputs, tokenizer, output, **settings)  # type: ignore[operator]
        print(time.monotonic() - start, pieces_in(output))
        return
    tokenizer_json = load_tokenizer_files(tokenizer)["tokenizer.json"].decode("utf-8")
    if args.check:
        check(args.inputs, tokenizer_json)
    report = Report("data_prep", "Data preparation against datasets.map", argv)
    measure(report, args.inputs, tokenizer, args.repeats)
    where_the_time_goes(report, args.inputs, tokenizer_json)
    report.write()
