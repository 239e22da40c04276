"""The loader of three-part batches: speed, start-up on many documents, memory over an epoch.

    OMP_NUM_THREADS=1 python benchmarks/run.py loader CORPUS [--documents 1000000] [--repeats 5] [--seconds 3]

Speed: sequences of 128 tokens a second, against what one H200 takes in training BERT-base and against a collator as one
writes it first (Python lists, one example after the other) on the same corpus. The measurements take turns, so that all
of them see the same machine; medians. Memory: pages of the process's own (RssAnon), not those of the mapped shards,
which the system may drop at any time. Start-up: of an invented corpus of `--documents` tiny documents, whose files
(400 bytes a document) lie in a temporary folder meanwhile, and in the page cache. Writes tables.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field

from benchmarks.compare import Report
from data_prep.examples import ExampleStream, SpecialIds
from multicls.command_line import CommandLine
from multicls.corpus import FORMAT, FORMAT_VERSION, Corpus, ShardRow, occurrences, write_manifest, write_shard
from multicls.settings import Settings
from pretrain.batches import RankSampler, load_steps

NEED = 15_000  # sequences of 128 tokens a second: an upper bound, the peak arithmetic of an H200 training BERT-base
LENGTH, EXAMPLES = 128, 10
DOCUMENTS_PER_SHARD = 100_000
SPECIAL = SpecialIds(cls=101, sep=102, pad=0, mask=103, facets=(1, 2, 3, 4, 5))
SPECIALS = frozenset(SPECIAL.all())


def plain_batches(corpus: Corpus, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yields batches of a plain collator: the same inputs and targets, from lists; no fixed order, no epochs."""
    rng = random.Random(seed)
    idf = np.log(corpus.num_rows / np.maximum(corpus.document_frequency, 1)).tolist()
    while True:
        rows = [plain_part(run, rng, idf) for _ in range(EXAMPLES) for run in plain_runs(corpus, rng)]
        yield {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def plain_runs(corpus: Corpus, rng: random.Random) -> list[list[list[tuple[int, int]]]]:
    """Returns three consecutive parts of a random document: lists of sentences of (token, count in the document)."""
    document = corpus.row(rng.randrange(corpus.num_rows))
    place = rng.randrange(len(document.offsets) - 1)
    parts: list[list[list[tuple[int, int]]]] = []
    for _ in range(3):
        sentences: list[list[tuple[int, int]]] = []
        room = LENGTH - 3 - len(SPECIAL.facets)
        while place < len(document.offsets) - 1:
            span = slice(int(document.offsets[place]), int(document.offsets[place + 1]))
            if sentences and span.stop - span.start > room:
                break
            counted = zip(document.tokens[span].tolist(), document.counts[span].tolist(), strict=True)
            sentences.append(list(counted)[:room])
            room -= len(sentences[-1])
            place += 1
        parts.append(sentences)
    return parts


def plain_part(sentences: list[list[tuple[int, int]]], rng: random.Random, idf: list[float]) -> dict[str, Any]:
    """Returns the padded sequence of a part, with its targets."""
    scored = []
    for sentence in sentences:
        values = [count * idf[piece] for piece, count in sentence]
        low, spread = min(values), max(values) - min(values)
        scale = 10 / spread if spread else 0.0
        scored.append([(p, (value - low) * scale) for (p, _), value in zip(sentence, values, strict=True)])
    cut = rng.randint(1, max(1, len(scored) - 1))
    runs = [scored[:cut], scored[cut:]]
    swapped = len(scored) > 1 and rng.random() < 0.5
    ids, types, tfidf = [SPECIAL.cls, *SPECIAL.facets], [0] * (1 + len(SPECIAL.facets)), [0.0]
    for kind, run in enumerate(reversed(runs) if swapped else runs):
        pieces = [piece for sentence in run for piece in sentence]
        ids += [piece for piece, _ in pieces] + [SPECIAL.sep]
        tfidf += [value for _, value in pieces] + [0.0]
        types += [kind] * (len(pieces) + 1)
    text = [i for i, piece in enumerate(ids) if piece not in SPECIALS]
    labels = [-100] * LENGTH
    for i in rng.sample(text, round(0.15 * len(text))):
        labels[i] = ids[i]
        fate = rng.random()
        ids[i] = SPECIAL.mask if fate < 0.8 else rng.randrange(1000, 30_000) if fate < 0.9 else ids[i]
    padding = LENGTH - len(ids)
    return {
        "input_ids": ids + [SPECIAL.pad] * padding,
        "attention_mask": [1] * len(ids) + [0] * padding,
        "token_type_ids": types + [0] * padding,
        "labels": labels,
        "tfidf_labels": tfidf + [0.0] * padding,
        "so_labels": int(swapped) if len(scored) > 1 else -100,
    }


def sequences_per_second(batches: Iterator[Any], seconds: float) -> float:
    """Returns the sequences a second that `batches` delivers after its first item, so without start-up."""
    next(batches)
    start, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        next(batches)
        count += 1
    return count * EXAMPLES * 3 / elapsed


def speeds(report: Report, corpus: Corpus, stream: ExampleStream, repeats: int, seconds: float) -> None:
    """Adds the table of speeds."""

    def loaded(workers: int) -> Callable[[], Iterator[Any]]:
        sampler, steps = RankSampler(1, 0, 1), range(1 << 40)
        return lambda: (step[0] for step in load_steps(stream, sampler, steps, size=EXAMPLES, workers=workers))

    contenders: dict[str, Callable[[], Iterator[Any]]] = {
        "plain collator, in the training process": lambda: plain_batches(corpus, 0),
        "ours, in the training process": loaded(0),
        "ours, 1 loader process": loaded(1),
        "ours, 2 loader processes": loaded(2),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, start in contenders.items():
            rates[name].append(sequences_per_second(start(), seconds))
    plain = statistics.median(rates["plain collator, in the training process"])
    rows = []
    for name, values in rates.items():
        rate = statistics.median(values)
        rows.append([name, rate, rate / NEED, rate / plain, f"{min(values):,.0f} to {max(values):,.0f}"])
    columns = ["loader", "sequences/s (median)", f"x need of {NEED:,}/s", "x plain", "range"]
    report.table("Batches of 10 examples x 3 sequences of 128", columns, rows)


def memory(report: Report, stream: ExampleStream) -> None:
    """Adds the process's own memory over an epoch."""
    groups = stream.examples_per_epoch // (32 * EXAMPLES)
    marks = {round(groups * tenth / 10): tenth for tenth in range(1, 11)}
    own = {0: own_megabytes()}
    for group in range(groups):
        stream.micro_batches(range(32 * group, 32 * group + 32), EXAMPLES)
        if group + 1 in marks:
            own[marks[group + 1]] = own_megabytes()
    what = f"The process's own memory over an epoch of {stream.examples_per_epoch:,} examples"
    report.table(what, ["", *(f"{10 * tenth} %" for tenth in own)], [["MB", *own.values()]])


def own_megabytes() -> float:
    """Anonymous resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def start_up(report: Report, folder: Path, documents: int, seconds: float) -> None:
    """Adds how long the loader takes to begin on a corpus of so many documents, and how fast it is then."""
    invent(folder, documents)
    start = time.perf_counter()
    stream = ExampleStream(Corpus.open(folder), SPECIAL, seq_length=LENGTH, seed=0)
    opened = time.perf_counter() - start
    stream.micro_batches([0], EXAMPLES)
    first = time.perf_counter() - start
    batches = (step[0] for step in load_steps(stream, RankSampler(1, 0, 1), range(1 << 40), size=EXAMPLES, workers=0))
    rate = sequences_per_second(batches, seconds)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e9
    columns = ["documents", "shards", "GB", "seconds to open", "seconds to the first batch", "sequences/s then"]
    report.table("Start-up", columns, [[documents, stream.corpus.num_shards, size, opened, first, rate]])


def invent(folder: Path, documents: int) -> None:
    """Writes a corpus of tiny documents (6 to 12 sentences of 4 to 12 pieces), all shards alike."""
    generator = np.random.default_rng(0)
    rows = []
    for number in range(min(documents, DOCUMENTS_PER_SHARD)):
        offsets = np.append(0, np.cumsum(generator.integers(4, 13, generator.integers(6, 13)))).astype(np.int32)
        pieces = generator.integers(1000, 30_000, offsets[-1]).astype(np.uint16)
        digest = int(generator.integers(1 << 63)) * 2
        rows.append(ShardRow("invented", str(number), "", digest, pieces, offsets, occurrences(pieces)))
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


class LoaderOptions(Settings):
    """Options of the benchmark."""

    corpus: str = Field(description="a folder of data_prep/run.py")
    documents: int = Field(default=1_000_000, description="documents of the invented corpus; 0 leaves it out")
    repeats: int = Field(default=5, description="repeats of each measurement")
    seconds: float = Field(default=3.0, description="seconds of each measurement")


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the results."""
    args = CommandLine("benchmarks/run.py loader", __doc__, LoaderOptions, positional=("corpus",)).parse(argv)
    torch.set_num_threads(1)
    corpus = Corpus.open(args.corpus)
    stream = ExampleStream(corpus, SPECIAL, seq_length=LENGTH, seed=0)
    report = Report("loader", "The loader of three-part batches", argv)
    memory(report, stream)
    speeds(report, corpus, stream, args.repeats, args.seconds)
    if args.documents:
        with tempfile.TemporaryDirectory() as folder:
            start_up(report, Path(folder), args.documents, args.seconds)
    report.write()
