"""The loader of three-part batches: speed, start-up on many documents, memory over an epoch.

    OMP_NUM_THREADS=1 python benchmarks/run.py loader CORPUS [--documents 1000000] [--repeats 5] [--seconds 3]

Speed: sequences of 128 tokens a second, against what one H200 takes in training BERT-base. The measurements take turns,
so that all of them see the same machine; medians. Memory: pages of the process's own (RssAnon), not those of the mapped
shards, which the system may drop at any time. Start-up: of an invented corpus of `--documents` tiny documents, whose
files (400 bytes a document) lie in a temporary folder meanwhile, and in the page cache. Writes tables.
"""

from __future__ import annotations

import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from pydantic import Field

from benchmarks.compare import Report
from data_prep.examples import ExampleStream, SpecialIds
from multicls.corpus import FORMAT, FORMAT_VERSION, Corpus, ShardRow, occurrences, write_manifest, write_shard
from multicls.settings import Settings
from pretrain.batches import RankSampler, load_steps

NEED = 15_000  # sequences of 128 tokens a second: an upper bound, the peak arithmetic of an H200 training BERT-base
LENGTH, EXAMPLES = 128, 10
DOCUMENTS_PER_SHARD = 100_000
SPECIAL = SpecialIds(cls=101, sep=102, pad=0, mask=103, facets=(1, 2, 3, 4, 5))
LOADERS = {"in the training process": 0, "1 loader process": 1, "2 loader processes": 2}


class Options(Settings):
    """Options of the benchmark."""

    corpus: str = Field(description="a folder of data_prep/run.py")
    documents: int = Field(1_000_000, description="documents of the invented corpus; 0 leaves it out")
    repeats: int = Field(5, description="repeats of each measurement")
    seconds: float = Field(3.0, description="seconds of each measurement")


def sequences_per_second(stream: ExampleStream, workers: int, seconds: float) -> float:
    """Returns the sequences a second that the loader delivers after its first batch, so without start-up."""
    batches = load_steps(stream, RankSampler(1, 0, 1), range(1 << 40), size=EXAMPLES, workers=workers)
    next(batches)
    start, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        next(batches)
        count += 1
    return count * EXAMPLES * 3 / elapsed


def speeds(report: Report, stream: ExampleStream, repeats: int, seconds: float) -> None:
    """Adds the table of speeds."""
    rates: dict[str, list[float]] = {name: [] for name in LOADERS}
    for _ in range(repeats):
        for name, workers in LOADERS.items():
            rates[name].append(sequences_per_second(stream, workers, seconds))
    rows = []
    for name, values in rates.items():
        rate = statistics.median(values)
        rows.append([name, rate, rate / NEED, f"{min(values):,.0f} to {max(values):,.0f}"])
    columns = ["loader", "sequences/s (median)", f"x need of {NEED:,}/s", "range"]
    report.table("Batches of 10 examples x 3 sequences of 128", columns, rows)


def memory(report: Report, stream: ExampleStream) -> None:
    """Adds the process's own memory over an epoch."""
    groups = stream.examples_per_epoch // (32 * EXAMPLES)
    own = {0: own_megabytes()}
    for tenth in range(1, 11):
        for group in range(round(groups * (tenth - 1) / 10), round(groups * tenth / 10)):
            stream.micro_batches(range(32 * group, 32 * group + 32), EXAMPLES)
        own[tenth] = own_megabytes()
    what = f"The process's own memory over an epoch of {stream.examples_per_epoch:,} examples"
    report.table(what, ["", *(f"{10 * tenth} %" for tenth in own)], [["MB", *own.values()]])


def own_megabytes() -> float:
    """Returns the anonymous resident memory of this process."""
    return int(re.findall(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1024


def start_up(report: Report, folder: Path, documents: int, seconds: float) -> None:
    """Adds how long the loader takes to begin on a corpus of so many documents, and how fast it is then."""
    invent(folder, documents)
    start = time.perf_counter()
    stream = ExampleStream(Corpus.open(folder), SPECIAL, seq_length=LENGTH, seed=0)
    opened = time.perf_counter() - start
    stream.micro_batches([0], EXAMPLES)
    first = time.perf_counter() - start
    rate = sequences_per_second(stream, 0, seconds)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e9
    columns = ["documents", "shards", "GB", "seconds to open", "seconds to the first batch", "sequences/s then"]
    report.table("Start-up", columns, [[documents, stream.corpus.num_shards, size, opened, first, rate]])


def invent(folder: Path, documents: int) -> None:
    """Writes a corpus of tiny documents (6 to 12 sentences of 4 to 12 tokens), all shards alike."""
    generator = np.random.default_rng(0)
    rows = []
    for number in range(min(documents, DOCUMENTS_PER_SHARD)):
        offsets = np.append(0, np.cumsum(generator.integers(4, 13, generator.integers(6, 13)))).astype(np.int32)
        tokens = generator.integers(1000, 30_000, offsets[-1]).astype(np.uint16)
        digest = int(generator.integers(1 << 63)) * 2
        rows.append(ShardRow("invented", str(number), "", digest, tokens, offsets, occurrences(tokens)))
    shards = []
    for number, first in enumerate(range(0, documents, DOCUMENTS_PER_SHARD)):
        path = folder / f"shard-{number:05d}.arrow"
        count = min(DOCUMENTS_PER_SHARD, documents - first)
        if number and count == len(rows):
            shutil.copyfile(folder / "shard-00000.arrow", path)
        else:
            write_shard(path, rows[:count])
        shards.append({"name": path.name, "documents": count, "rows": count, "bytes": path.stat().st_size})
    np.save(folder / "document_frequency.npy", np.full(30_522, max(1, documents // 500)))
    counts = {"documents": documents, "rows": documents, "tokenizer": {"vocabulary_size": 30_522}}
    manifest = {"format": FORMAT, "format_version": FORMAT_VERSION, "shards": shards, "files": {}}
    write_manifest(folder, manifest | counts)


def main(args: Options, argv: Sequence[str]) -> None:
    """Measures and writes the results."""
    torch.set_num_threads(1)
    stream = ExampleStream(Corpus.open(args.corpus), SPECIAL, seq_length=LENGTH, seed=0)
    report = Report("loader", "The loader of three-part batches", argv)
    memory(report, stream)
    speeds(report, stream, args.repeats, args.seconds)
    if args.documents:
        with tempfile.TemporaryDirectory() as folder:
            start_up(report, Path(folder), args.documents, args.seconds)
    report.write()
