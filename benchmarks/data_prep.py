"""Data preparation against plain `datasets.map` that cleans, splits and tokenizes alike, in one run.

python benchmarks/run.py data_prep NAME=PATH [NAME=PATH ...] [--tokenizer PATH_OR_ID] [--repeats 3]

Each measurement is a process of its own, from the files to what lies on disk; the order is shuffled in each round.
Then: CPU time of the process that coordinates, against its workers'; CPU time of each step, and the tokenizer alone on
the same sentences; and how long a model of 64 workers takes for 25 GB, from the units timed here.
"""

from __future__ import annotations

import heapq
import math
import random
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
from pydantic import Field
from transformers import AutoTokenizer

from benchmarks.compare import Report
from data_prep.build import CleanText, EncodeText, ReadUnit, WritePart
from data_prep.clean import Drops, clean
from data_prep.encode import TextEncoder, load_tokenizer_files
from data_prep.plan import WorkPlan
from data_prep.prepare import prepare
from data_prep.read import RawDocument, read_piece
from data_prep.settings import MIN_SENTENCES, RULES, ExecutorOptions, PrepareSettings, ReadOptions
from data_prep.sources import find_files
from data_prep.units import cut_units
from multicls.corpus import Corpus
from multicls.sample import sample_model
from multicls.settings import Settings

WORKERS, TARGET_BYTES, LARGEST_UNIT = 64, 25e9, 32 << 20  # of the model
MEASURED_PER_UNIT = 20  # the units timed here are about as much smaller
STARTUP, TASK = 2.0, 0.05  # seconds until a worker begins, and around a task
SLOW, BATCHED = "datasets.map, one document at a time", "datasets.map, batched, num_proc=2"
ONE, TWO = "data_prep/run.py, 1 worker", "data_prep/run.py, 2 workers"


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


def baseline(inputs: list[str], tokenizer: str, output: Path, **how: Any) -> None:
    """Prepares the text in ten lines with `datasets`, as `ours` does; finds no duplicates. `how` is for `map`."""
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()  # `map` cannot hash the function, and says so
    encode = AutoTokenizer.from_pretrained(tokenizer)

    def rows() -> Iterator[dict[str, Any]]:
        for raw in documents(inputs):
            yield raw._asdict()

    def prepared(batch: dict[str, list[Any]]) -> dict[str, Any]:
        found: dict[str, list[Any]] = {name: [] for name in ("source", "id", "title", "sentences")}
        for values in zip(*(batch[name] for name in RawDocument._fields), strict=True):
            raw = RawDocument(*values)
            kept = [sentence for line in clean(raw, frozenset(RULES), "en", Drops()) for sentence in line]
            if len(kept) >= MIN_SENTENCES:
                for name, value in zip(found, (raw.source, raw.id, raw.title, kept), strict=True):
                    found[name].append(value)
        texts = found.pop("sentences")
        joined = [sentence for document in texts for sentence in document]
        ids = iter(encode(joined, add_special_tokens=False)["input_ids"] if joined else [])
        return found | {"input_ids": [[next(ids) for _ in document] for document in texts]}

    data = datasets.Dataset.from_generator(rows, cache_dir=str(output / "cache"))
    data = data.map(prepared, batched=True, remove_columns=data.column_names, **how)
    data.save_to_disk(str(output / "data"))


def tokens_in(output: Path) -> int:
    """Returns the tokens that a system has written."""
    if (output / "manifest.json").exists():
        return int(Corpus.open(output).manifest["tokens"])
    column = datasets.load_from_disk(str(output / "data")).with_format("arrow")["input_ids"]
    return sum(len(chunk.flatten().flatten()) for chunk in column.chunks)


SYSTEMS = {
    SLOW: (baseline, {"batch_size": 1}),
    BATCHED: (baseline, {"num_proc": 2}),
    ONE: (ours, {"workers": 1}),
    TWO: (ours, {"workers": 2}),
}


def timed(name: str, inputs: list[str], tokenizer: str) -> dict[str, Any]:
    """Prepares the text with a system in this process, which has imported all; returns times and tokens."""
    system, settings = SYSTEMS[name]
    with tempfile.TemporaryDirectory() as folder:
        output, start, before = Path(folder) / "output", time.monotonic(), time.process_time()
        system(inputs, tokenizer, output, **settings)  # type: ignore[operator]
        seconds, own, tokens = time.monotonic() - start, time.process_time() - before, tokens_in(output)
    workers = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = workers.ru_utime + workers.ru_stime
    return {"system": name, "seconds": seconds, "tokens": tokens, "share": own / spent if spent else math.nan}


def measure(report: Report, inputs: list[str], tokenizer: str, repeats: int) -> None:
    """Adds the table of medians, the gain of a second worker, and the coordinating process's share of the CPU time."""
    megabytes = sum(file.size for file in find_files(inputs).files) / 1e6
    runs = []
    for _ in range(repeats):
        for name in random.sample(list(SYSTEMS), len(SYSTEMS)):
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                runs.append(pool.submit(timed, name, inputs, tokenizer).result())
    systems = pd.DataFrame(runs).groupby("system")
    seconds, tokens = systems["seconds"], systems["tokens"].first()
    median, least, most = seconds.median(), seconds.min(), seconds.max()
    rows = []
    for name in SYSTEMS:
        ratios = [value / median[name] for value in (megabytes, median[SLOW], median[BATCHED])]
        rows.append([name, median[name], f"{least[name]:.1f} to {most[name]:.1f}", *ratios, int(tokens[name])])
    columns = ["system", "seconds (median)", "range", "MB/s", "x unbatched", "x batched", "tokens"]
    report.table(f"{megabytes:.1f} MB, {repeats} rounds", columns, rows)
    report.figure("2 workers against 1, ratio of medians", median[ONE] / median[TWO])
    report.figure("2 workers against 1, ratio of minima", least[ONE] / least[TWO])
    share = systems["share"].median()[TWO]
    report.figure("CPU time of the coordinating process / of its workers (median)", share)


def where_the_time_goes(report: Report, inputs: list[str], tokenizer_json: str) -> list[float]:
    """Adds the CPU time of each step in one process; returns the CPU seconds a byte of each unit."""
    with tempfile.TemporaryDirectory() as folder:
        files = find_files(inputs).files
        settings = PrepareSettings(input=tuple(inputs), tokenizer="")
        plan = WorkPlan(Path(folder), {}, settings, tokenizer_json, files, cut_units(files))
        plan.save()
        steps: dict[str, Any] = {
            "read": ReadUnit,
            "clean and split": CleanText,
            "encode and hash": EncodeText,
            "write": WritePart,
        }
        spent, bare = [], []
        for unit in range(len(plan.units)):
            result: Any = None
            taken = {}
            for name, step in steps.items():
                start = time.process_time()
                result = list(step(folder).run(result, rank=unit))
                taken[name] = time.process_time() - start
                if name == "clean and split":
                    bare.append([sentence for kept, _ in result for document in kept for line in document.lines
                                 for sentence in line])  # fmt: skip
            spent.append(taken)
    encode, start = TextEncoder(tokenizer_json).tokenizer.encode_batch_fast, time.process_time()
    for sentences in bare:
        encode(sentences, add_special_tokens=False)
    encoding, frame = time.process_time() - start, pd.DataFrame(spent)
    times = {**frame.sum(), "all": frame.to_numpy().sum(), "the bare tokenizer": encoding}
    rows = [[name, 1000 * seconds / (sum(plan.unit_bytes) / 1e6)] for name, seconds in times.items()]
    report.table("CPU time of one process", ["step", "ms a MB of text"], rows)
    report.figure("bare tokenizer's CPU time / that of all steps", encoding / times["all"])
    return list(frame.sum(axis=1) / [max(size, 1) for size in plan.unit_bytes])


def simulate(report: Report, per_byte: list[float]) -> None:
    """Adds how a model of many workers fares: units of 25 GB with the speeds measured here, first come, first served.

    `per_byte` are the CPU seconds a byte of each unit that was timed.
    """
    rng = random.Random(0)
    units = round(TARGET_BYTES / LARGEST_UNIT)
    pieces = [LARGEST_UNIT / MEASURED_PER_UNIT] * MEASURED_PER_UNIT  # each as fast as one of the units timed here
    times = [sum(rng.choice(per_byte) * size for size in pieces) + TASK for _ in range(units)]
    workers = [STARTUP] * WORKERS
    for seconds in times:
        heapq.heapreplace(workers, workers[0] + seconds)
    what = f"{TARGET_BYTES / 1e9:.0f} GB in {units} units, {WORKERS} workers"
    report.figure(f"{what}: seconds", max(workers))
    report.figure(f"{what}: efficiency", sum(times) / (WORKERS * max(workers)))


class Options(Settings):
    """Options of the benchmark."""

    inputs: list[str] = Field(min_length=1, title="NAME=PATH", description="the text to prepare")
    tokenizer: str = Field("sample", description="tokenizer; `sample` is the embedded one")
    repeats: int = Field(3, description="repeats of each measurement")


def main(args: Options, argv: Sequence[str]) -> None:
    """Measures what the command line asks for."""
    tokenizer = str(sample_model()) if args.tokenizer == "sample" else args.tokenizer
    report = Report("data_prep", "Data preparation against datasets.map", argv)
    measure(report, args.inputs, tokenizer, args.repeats)
    tokenizer_json = load_tokenizer_files(tokenizer)["tokenizer.json"].decode("utf-8")
    simulate(report, where_the_time_goes(report, args.inputs, tokenizer_json))
    report.write()
