"""Data preparation against a plain script and `datasets.map`, the speed of the loader, and memory for N documents.

OMP_NUM_THREADS=1 python benchmarks/data_prep.py FOLDER --rounds 3
python benchmarks/data_prep.py FOLDER --scale 1000000000

FOLDER holds `.txt` files, one document a file. Each measurement is a process of its own, from the files to what lies on
disk. Both baselines split sentences with the same splitter and tokenize them; they do less, for they neither clean nor
find duplicates nor count document frequencies. The loader delivers batches of 10 examples of three sequences of 128
tokens from the corpus that was made.

With `--scale N`, FOLDER is a place on the disk. N synthetic documents (12 bytes each, a tenth of them copies) lie there
as units while their copies are found, and one million rows as all shards of a corpus while the windows of its training
split are counted. Memory is what the process allocates; the pages of mapped files, which the system takes back, are not
part of it.
"""

import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from pydantic import Field
from pydantic_settings import CliPositionalArg

from benchmarks.harness import Case, Report, take_turns
from data_prep.build import write_hashes
from data_prep.examples import ExampleStream, SpecialIds
from data_prep.merge import find_copies
from data_prep.windows import WindowIndex
from multicls.corpus import FORMAT_VERSION, MANIFEST, Corpus, ShardRow, join_shards, write_shard
from multicls.errors import UserError, run_command
from multicls.files import REPOSITORY, write_json
from multicls.sample import sample_model
from multicls.settings import Settings, parse

EXAMPLES, SEQUENCES = 10, 30  # of a batch
SPECIAL = SpecialIds(cls=101, sep=102, pad=0, mask=103, facets=(1, 2, 3, 4, 5))
UNIT = 1_000_000  # synthetic documents of a unit
ROWS, SHARD_PARTS = 1 << 15, 1 << 5  # rows that are made, and how often a shard has them
PLAIN = "a plain script, 1 process"
PLAIN_SCRIPT = """
import os, sys, pathlib, numpy, sentencex, tokenizers
os.environ["TOKENIZERS_PARALLELISM"] = "false"
folder, model, output = sys.argv[1:]
encoder = tokenizers.Tokenizer.from_file(f"{model}/tokenizer.json")
encoder.no_truncation()
paths, arrays = sorted(pathlib.Path(folder).glob("*.txt")), []
for first in range(0, len(paths), 1000):
    texts = (path.read_text("utf-8") for path in paths[first : first + 1000])
    sentences = [sentence for text in texts for sentence in sentencex.segment("en", text)]
    for encoding in encoder.encode_batch_fast(sentences, add_special_tokens=False):
        arrays.append(numpy.array(encoding.ids, "uint16"))
numpy.save(f"{output}/tokens.npy", numpy.concatenate(arrays))
numpy.save(f"{output}/lengths.npy", list(map(len, arrays)))
"""
ONE, TWO = "data_prep/run.py, 1 worker", "data_prep/run.py, 2 workers"
MAP = "datasets.map, one document at a time, 2 processes"
MAP_SCRIPT = """
import sys, datasets, sentencex, transformers
folder, tokenizer, output = sys.argv[1:]
datasets.disable_progress_bars()
encode = transformers.AutoTokenizer.from_pretrained(tokenizer)

def prepare(row):
    sentences = list(sentencex.segment("en", row["text"]))
    return {"input_ids": encode(sentences, add_special_tokens=False)["input_ids"]}

files = {"data_files": f"{folder}/*.txt", "cache_dir": f"{output}/cache", "split": "train"}
data = datasets.load_dataset("text", sample_by="document", **files)
data = data.map(prepare, remove_columns=["text"], num_proc=2)
data.save_to_disk(f"{output}/data")
"""


class Options(Settings):
    """Options of the benchmark."""

    folder: CliPositionalArg[str] = Field(description="folder of .txt files, one document a file")
    rounds: int = Field(3, ge=1, description="rounds of each comparison")
    scale: int = Field(0, ge=0, description="number of synthetic documents, instead of text")


def preparations(text: str, folder: Path, cpu: dict[str, list[float]]) -> dict[str, Case]:
    """Returns functions that prepare the text in a fresh folder, and add the CPU seconds that they took to `cpu`.

    Ours with one worker leaves its corpus in `folder`.
    """
    tokenizer = str(sample_model())

    def run(name: str, *command: str) -> None:
        before = cpu_of_children()
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{text}: {done.stderr.strip()[-2000:]}")
        cpu.setdefault(name, []).append(cpu_of_children() - before)

    def ours(name: str, workers: int) -> None:
        output = folder / f"corpus_{workers}"
        shutil.rmtree(output, ignore_errors=True)
        flags = ["--input", text, "--tokenizer", tokenizer, "--output", str(output)]
        run(name, str(REPOSITORY / "data_prep/run.py"), *flags, "--workers", str(workers))

    def baseline(name: str, script: str) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as output:
            run(name, "-c", script, text, tokenizer, output)

    return {
        PLAIN: lambda: baseline(PLAIN, PLAIN_SCRIPT),
        MAP: lambda: baseline(MAP, MAP_SCRIPT),
        ONE: lambda: ours(ONE, 1),
        TWO: lambda: ours(TWO, 2),
    }


def cpu_of_children() -> float:
    """Returns the CPU seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def sequences_per_second(stream: ExampleStream, workers: int, seconds: float = 3.0) -> float:
    """Returns the sequences a second that the loader delivers in `seconds` after its first batch."""
    from pretrain.batches import load_steps

    batches = load_steps(stream, range(1 << 40), size=EXAMPLES, per_step=1, workers=workers)
    next(batches)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        next(batches)
        count += 1
    return count * SEQUENCES / (time.perf_counter() - start)


def copies_among(number: int, folder: Path) -> Callable[[], int]:
    """Writes the hashes of `number` synthetic documents; returns a function that counts the copies among them."""
    folders, generator, before = list[Path](), np.random.default_rng(0), np.zeros(0, np.uint64)
    for first in range(0, number, UNIT):
        hashes = generator.integers(1 << 64, size=min(UNIT, number - first), dtype=np.uint64)
        copies = before[: len(hashes) // 10]  # a tenth are copies of the unit before
        hashes[: len(copies)] = copies
        before = hashes[::-1].copy()
        folders.append(folder / str(first))
        folders[-1].mkdir()
        write_hashes(folders[-1], hashes[None])
    return lambda: sum(
        int(np.count_nonzero(kinds)) for kinds in find_copies(folders, True, "keep", None)
    )


def windows_of(number: int, folder: Path) -> Callable[[], int]:
    """Writes a corpus of about `number` rows, whose shards are one file; returns a function that counts its windows."""
    hashes = np.random.default_rng(0).integers(1 << 64, size=min(number, ROWS), dtype=np.uint64)
    tokens, offsets = np.ones(60, np.uint16), np.arange(0, 61, 12, dtype=np.int32)
    rows = [ShardRow("web", str(h), "", int(h), tokens, offsets, tokens) for h in hashes]
    part, shard = folder / "part.arrow", folder / "shard.arrow"
    write_shard(part, rows)
    parts = [part] * min(-(-number // len(rows)), SHARD_PARTS)
    join_shards(shard, parts)
    size = len(rows) * len(parts)
    entry = {"name": shard.name, "rows": size, "bytes": shard.stat().st_size}
    manifest = {"format_version": FORMAT_VERSION, "documents": number, "files": {}}
    manifest["shards"] = [entry] * round(number / size)
    manifest["tokenizer"] = {"vocabulary_size": 2, "fingerprint": ""}
    write_json(folder / MANIFEST, manifest)
    options: Any = {"num_parts": 3, "tokens_per_window": 315, "source_weights": {}}
    return lambda: (
        WindowIndex(Corpus(folder), validation=False, validation_fraction=0.01, **options).per_epoch
    )


def measure_scale(number: int, folder: Path, report: Report) -> None:
    """Adds a table of the memory that finding the copies and counting the windows of `number` documents take."""
    rows = []
    for name, prepare in (("copies", copies_among), ("windows", windows_of)):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            measured = prepare(number, Path(scratch))
            tracemalloc.start()
            start = time.process_time()
            found = measured()
            seconds, gigabytes = (
                time.process_time() - start,
                tracemalloc.get_traced_memory()[1] / 1e9,
            )
            tracemalloc.stop()
        rows.append([f"{found:,} {name}", gigabytes, seconds])
    report.table(f"{number:,} documents", ["found", "peak memory (GB)", "CPU seconds"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes the report."""
    options = parse(Options, argv, prog="benchmarks/data_prep.py", doc=__doc__)
    report = Report("Data preparation")
    if options.scale:
        measure_scale(options.scale, Path(options.folder), report)
    else:
        measure_speed(options, report)
    report.write()
    return 0


def measure_speed(options: Options, report: Report) -> None:
    """Adds the times of all preparations, and the speed of the loader."""
    from pretrain.batches import start_loader_server  # torch, after --help

    megabytes = sum(file.stat().st_size for file in Path(options.folder).glob("*.txt")) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        cpu = dict[str, list[float]]()
        cases = preparations(options.folder, Path(folder), cpu)
        samples = take_turns(cases, rounds=options.rounds, warmup=0)
        report.compare(f"{megabytes:.1f} MB of text", samples, PLAIN)
        del cpu[TWO]  # a process of Dask's own starts the workers, so their time is not known
        report.compare("CPU seconds", cpu, PLAIN)
        corpus = Corpus(Path(folder) / "corpus_1")
        stream = ExampleStream(corpus, SPECIAL, seq_length=128, seed=1)
        start_loader_server()
        rows = []
        for workers in (0, 1, 2):
            speeds = [sequences_per_second(stream, workers) for _ in range(options.rounds)]
            rows.append([workers, statistics.median(speeds), min(speeds), max(speeds)])
    columns = ["loader processes", "sequences/s (median)", "least", "most"]
    report.table("Loader, three-part examples of 128 tokens", columns, rows)


if __name__ == "__main__":
    run_command(main)
