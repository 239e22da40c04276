"""Data preparation against plain `datasets.map`, and the speed of the loader.

OMP_NUM_THREADS=1 python benchmarks/data_prep.py FOLDER --rounds 3

FOLDER holds `.txt` files, one document a file. Each measurement is a process of its own, from the files to what lies on
disk. The baseline splits sentences with the same splitter and tokenizes them, one document at a time or in batches of
1,000; it does less, for it neither cleans nor finds duplicates nor counts document frequencies. The loader delivers
batches of 10 examples of three sequences of 128 tokens from the corpus that was made.
"""

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import Field
from pydantic_settings import CliPositionalArg

from benchmarks.harness import Case, Report, take_turns
from data_prep.examples import ExampleStream, SpecialIds
from multicls.corpus import Corpus
from multicls.errors import UserError, run_command
from multicls.files import REPOSITORY
from multicls.sample import sample_model
from multicls.settings import Settings, parse

EXAMPLES, SEQUENCES = 10, 30  # of a batch
SPECIAL = SpecialIds(cls=101, sep=102, pad=0, mask=103, facets=(1, 2, 3, 4, 5))
MAP = "datasets.map, one document at a time, 2 processes"
BASELINE = """
import sys, datasets, sentencex, transformers
folder, tokenizer, output, documents = sys.argv[1:]
datasets.disable_progress_bars()
encode = transformers.AutoTokenizer.from_pretrained(tokenizer)

def prepare(rows):
    sentences = [list(sentencex.segment("en", text)) for text in rows["text"]]
    ids = iter(encode(sum(sentences, []), add_special_tokens=False)["input_ids"])
    return {"input_ids": [[next(ids) for _ in document] for document in sentences]}

files = {"data_files": f"{folder}/*.txt", "cache_dir": f"{output}/cache", "split": "train"}
data = datasets.load_dataset("text", sample_by="document", **files)
options = {"batched": True, "batch_size": int(documents), "num_proc": 2}
data = data.map(prepare, remove_columns=["text"], **options)
data.save_to_disk(f"{output}/data")
"""


class Options(Settings):
    """Options of the benchmark."""

    folder: CliPositionalArg[str] = Field(description="folder of .txt files, one document a file")
    rounds: int = Field(3, ge=1, description="rounds of each comparison")


def preparations(text: str, folder: Path) -> dict[str, Case]:
    """Returns functions that prepare the text in a fresh folder; ours with one worker leaves its corpus in `folder`."""
    tokenizer = str(sample_model())

    def run(*command: str) -> None:
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{text}: {done.stderr.strip()[-2000:]}")

    def ours(workers: int) -> None:
        output = folder / f"corpus_{workers}"
        shutil.rmtree(output, ignore_errors=True)
        flags = ["--input", text, "--tokenizer", tokenizer, "--output", str(output)]
        run(str(REPOSITORY / "data_prep/run.py"), *flags, "--workers", str(workers))

    def baseline(documents: int) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as output:
            run("-c", BASELINE, text, tokenizer, output, str(documents))

    return {
        MAP: lambda: baseline(1),
        "datasets.map, batched, 2 processes": lambda: baseline(1000),
        "data_prep/run.py, 1 worker": lambda: ours(1),
        "data_prep/run.py, 2 workers": lambda: ours(2),
    }


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


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes the report."""
    options = parse(Options, argv, prog="benchmarks/data_prep.py", doc=__doc__)
    report = Report("Data preparation")
    from pretrain.batches import start_loader_server  # torch, after --help

    megabytes = sum(file.stat().st_size for file in Path(options.folder).glob("*.txt")) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        cases = preparations(options.folder, Path(folder))
        samples = take_turns(cases, rounds=options.rounds, warmup=0)
        report.compare(f"{megabytes:.1f} MB of text", samples, MAP)
        corpus = Corpus(Path(folder) / "corpus_1")
        stream = ExampleStream(corpus, SPECIAL, seq_length=128, seed=1)
        start_loader_server()
        rows = []
        for workers in (0, 1, 2):
            speeds = [sequences_per_second(stream, workers) for _ in range(options.rounds)]
            rows.append([workers, statistics.median(speeds), min(speeds), max(speeds)])
    columns = ["loader processes", "sequences/s (median)", "least", "most"]
    report.table("Loader, three-part examples of 128 tokens", columns, rows)
    report.write()
    return 0


if __name__ == "__main__":
    run_command(main)
