"""Data preparation against plain `datasets.map` that cleans, splits and tokenizes alike, in one run.

python benchmarks/run.py data_prep NAME=PATH [NAME=PATH ...] [--tokenizer PATH_OR_ID] [--repeats 3]

Each measurement is a process of its own, from the files to what lies on disk; the order is shuffled in each round.
Then: CPU time of the process that coordinates, against its workers'; CPU time of each step, and the tokenizer alone on
the same sentences; and how long a model of 64 workers takes for 25 GB, from the units timed here.
"""

from __future__ import annotations

import heapq
import importlib
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks.compare import Report
from data_prep.build import CleanDocument, CleanText, EncodeText, ReadUnit, WritePart
from data_prep.clean import Drops, clean
from data_prep.encode import TextEncoder, load_tokenizer_files
from data_prep.plan import WorkPlan
from data_prep.prepare import prepare
from data_prep.read import RawDocument, read_piece
from data_prep.settings import MIN_SENTENCES, RULES, ExecutorOptions, PrepareSettings, ReadOptions
from data_prep.sources import find_files
from data_prep.units import cut_units
from multicls.command_line import CommandLine
from multicls.corpus import Corpus
from multicls.sample import sample_model
from multicls.settings import Settings

WORKERS, TARGET_BYTES = 64, 25e9
LARGEST_UNIT = 32 << 20
MEASURED_PER_UNIT = 20  # the units timed here are about as much smaller


def documents(inputs: list[str], how: str = "file") -> Iterator[RawDocument]:
    """Yields all documents of the input; `how` is `ReadOptions.documents`."""
    files = find_files(inputs).files
    for unit in cut_units(files):
        for piece in unit:
            yield from read_piece(files[piece.file], piece, ReadOptions(documents=how))


def ours(inputs: list[str], tokenizer: str, output: Path, workers: int) -> None:
    """Prepares the text with data_prep/run.py's function."""
    settings = PrepareSettings(input=tuple(inputs), tokenizer=tokenizer)
    prepare(settings, output, ExecutorOptions(workers=workers), log=lambda _: None)


def baseline(inputs: list[str], tokenizer: str, output: Path, batched: bool, workers: int) -> None:
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
        data = data.map(many, batched=True, num_proc=workers, remove_columns=data.column_names)
    else:
        names = [name for name in data.column_names if name not in ("source", "id", "title")]
        data = data.map(one, remove_columns=names).filter(bool, input_columns="kept")
    data.save_to_disk(str(output / "data"))


def tokens_in(output: Path) -> int:
    """Returns the tokens that a system has written."""
    if (output / "manifest.json").exists():
        return int(Corpus.open(output).manifest["tokens"])
    import datasets

    column = datasets.load_from_disk(str(output / "data")).with_format("arrow")["input_ids"]
    return sum(len(chunk.flatten().flatten()) for chunk in column.chunks)


SYSTEMS = {
    "datasets.map, one document at a time": (baseline, {"batched": False, "workers": 1}),
    "datasets.map, batched, num_proc=2": (baseline, {"batched": True, "workers": 2}),
    "data_prep/run.py, 1 worker": (ours, {"workers": 1}),
    "data_prep/run.py, 2 workers": (ours, {"workers": 2}),
}


def measure(report: Report, inputs: list[str], tokenizer: str, repeats: int) -> None:
    """Adds the table of medians, the gain of a second worker, and the coordinating process's share of the CPU time."""
    megabytes = sum(file.size for file in find_files(inputs).files) / 1e6
    seconds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    tokens: dict[str, str] = {}
    shares = []
    for _ in range(repeats):
        for name in random.sample(list(SYSTEMS), len(SYSTEMS)):
            with tempfile.TemporaryDirectory() as folder:
                entry = str(Path(__file__).with_name("run.py"))
                words = [sys.executable, entry, "data_prep", *inputs, "--tokenizer", tokenizer, "--run", name, folder]
                done = subprocess.run(words, capture_output=True, text=True, check=True)
                taken, tokens[name], own, workers = done.stdout.split()[-4:]
                seconds[name].append(float(taken))
                if name.endswith("2 workers"):
                    shares.append(float(own) / float(workers))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    slow, batched, one, two = medians.values()
    rows = []
    for name, median in medians.items():
        spread = f"{min(seconds[name]):.1f} to {max(seconds[name]):.1f}"
        rows.append([name, median, spread, megabytes / median, slow / median, batched / median, tokens[name]])
    columns = ["system", "seconds (median)", "range", "MB/s", "x unbatched", "x batched", "tokens"]
    report.table(f"{megabytes:.1f} MB, {repeats} rounds", columns, rows)
    report.figure("2 workers against 1, ratio of medians", one / two)
    least = min(seconds["data_prep/run.py, 1 worker"]) / min(seconds["data_prep/run.py, 2 workers"])
    report.figure("2 workers against 1, ratio of minima", least)
    report.figure("CPU time of the coordinating process / of its workers (median)", statistics.median(shares))


def where_the_time_goes(report: Report, inputs: list[str], tokenizer_json: str) -> list[float]:
    """Adds the CPU time of each step in one process; returns the CPU seconds a byte of each unit."""
    clock = time.process_time
    with tempfile.TemporaryDirectory() as folder:
        files = find_files(inputs).files
        settings = PrepareSettings(input=tuple(inputs), tokenizer="")
        plan = WorkPlan(Path(folder), {}, settings, tokenizer_json, files, cut_units(files))
        plan.save()
        taken = dict.fromkeys(("read", "clean and split", "encode and hash", "write"), 0.0)
        sentences: list[list[str]] = []
        per_byte, encoding = [], 0.0
        for unit in range(len(plan.units)):
            times = [clock()]
            chunks = list(ReadUnit(folder).run(rank=unit))
            times.append(clock())
            cleaned = list(CleanText(folder).run(chunks))
            times.append(clock())
            built = list(EncodeText(folder).run(cleaned))
            times.append(clock())
            list(WritePart(folder).run(built, rank=unit))
            times.append(clock())
            for name, start, end in zip(taken, times, times[1:], strict=False):
                taken[name] += end - start
            per_byte.append((times[-1] - times[0]) / max(plan.unit_bytes[unit], 1))
            sentences += [_sentences(kept) for kept, _ in cleaned]
        megabytes = sum(plan.unit_bytes) / 1e6
        bare = TextEncoder(tokenizer_json).tokenizer
        start = clock()
        for chunk in sentences:
            bare.encode_batch_fast(chunk, add_special_tokens=False)
        encoding = clock() - start
    rows = [[name, 1000 * value / megabytes] for name, value in taken.items()]
    rows += [["all", 1000 * sum(taken.values()) / megabytes], ["the bare tokenizer", 1000 * encoding / megabytes]]
    report.table("CPU time of one process", ["step", "ms a MB of text"], rows)
    report.figure("bare tokenizer's CPU time / that of all steps", encoding / sum(taken.values()))
    return per_byte


def _sentences(documents: list[CleanDocument]) -> list[str]:
    return [sentence for document in documents for line in document.lines for sentence in line]


def simulate(report: Report, per_byte: list[float], startup: float = 2.0, task: float = 0.05) -> None:
    """Adds how a model of many workers fares: units of 25 GB with the speeds measured here, first come, first served.

    Args:
        report: takes the figures.
        per_byte: CPU seconds a byte of each unit that was timed.
        startup: seconds until a worker begins.
        task: seconds around a task.
    """
    rng = random.Random(0)
    units = round(TARGET_BYTES / LARGEST_UNIT)
    pieces = [LARGEST_UNIT / MEASURED_PER_UNIT] * MEASURED_PER_UNIT  # each as fast as one of the units timed here
    times = [sum(rng.choice(per_byte) * size for size in pieces) + task for _ in range(units)]
    workers = [startup] * WORKERS
    heapq.heapify(workers)
    for seconds in times:
        heapq.heappush(workers, heapq.heappop(workers) + seconds)
    efficiency = sum(times) / (WORKERS * max(workers))
    report.figure(f"{TARGET_BYTES / 1e9:.0f} GB in {units} units, {WORKERS} workers: seconds", max(workers))
    report.figure(f"{TARGET_BYTES / 1e9:.0f} GB in {units} units, {WORKERS} workers: efficiency", efficiency)


class DataPrepOptions(Settings):
    """Options of the benchmark."""

    inputs: list[str] = Field(min_length=1, title="NAME=PATH", description="the text to prepare")
    tokenizer: str = Field(default="sample", description="tokenizer; `sample` is the embedded one")
    repeats: int = Field(default=3, description="repeats of each measurement")
    run: tuple[str, str] | None = None  # system and folder, of the processes that are measured


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the command line asks for."""
    args = CommandLine("benchmarks/run.py data_prep", __doc__, DataPrepOptions, positional=("inputs",)).parse(argv)
    tokenizer = str(sample_model()) if args.tokenizer == "sample" else args.tokenizer
    if args.run:
        system, settings = SYSTEMS[args.run[0]]
        importlib.import_module("datasets"), importlib.import_module("transformers")  # no one's time is for imports
        start, before = time.monotonic(), time.process_time()
        output = Path(args.run[1]) / "output"
        system(args.inputs, tokenizer, output, **settings)  # type: ignore[operator]
        seconds, own = time.monotonic() - start, time.process_time() - before
        of_workers = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(seconds, tokens_in(output), own, of_workers.ru_utime + of_workers.ru_stime)
        return
    tokenizer_json = load_tokenizer_files(tokenizer)["tokenizer.json"].decode("utf-8")
    report = Report("data_prep", "Data preparation against datasets.map", argv)
    measure(report, args.inputs, tokenizer, args.repeats)
    simulate(report, where_the_time_goes(report, args.inputs, tokenizer_json))
    report.write()
