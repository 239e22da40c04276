"""The first hour on a card: tests, steps of several shapes, compiling, unpadding, the loader; one report.

python benchmarks/gpu.py --output runs/gpu
python benchmarks/gpu.py --output runs/gpu --small

Each part is a process of its own with a limit. After each, OUTPUT/report.md and report.json are complete: the benchmark
may be cut short at any time. All limits together are ten minutes. `--small` makes everything tiny, so that it also ends
within a minute on a CPU; its figures say nothing.

A step is one of `pretrain/run.py` with ZeRO 1, against `AutoModelForMaskedLM` in a plain loop with the same batches,
precision and optimizer, and the logits of the full vocabulary. Tokens are random; "fill" is the share of real ones.
MFU counts 6 FLOPs a weight and real token, and those of attention, over the card's dense 16-bit peak.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import Field

from benchmarks.harness import Report
from multicls.errors import UserError, run_command
from multicls.files import REPOSITORY, write_json
from multicls.settings import Settings, parse

LIMITS = {"tests": 180, "shapes": 240, "switches": 120, "loader": 30, "finetune": 30}  # seconds
SHAPES = {"BERT-base": ("bert", 768, 12), "ModernBERT-base": ("modernbert", 768, 22)}
LENGTHS = {128: (30, 240, 960), 512: (30, 240), 2048: (30, 60)}  # tokens -> sequences of a step
Row = dict[str, Any]


class Options(Settings):
    """Options of the benchmark."""

    output: Path = Field(description="folder of report.md, report.json and the parts' logs")
    small: bool = Field(False, description="tiny shapes, to try the benchmark itself")
    part: str = Field("", description="run this part only, in this process; prints its rows")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts one after the other and writes the report after each."""
    options = parse(Options, argv, prog="benchmarks/gpu.py", doc=__doc__)
    if options.part:
        if options.part not in PARTS:
            raise UserError(f"--part {options.part}: there are {', '.join(PARTS)}.")
        for row in PARTS[options.part](options.small):
            print(json.dumps(row), flush=True)
        return 0
    import torch

    if not (torch.cuda.is_available() or options.small):
        raise UserError("no GPU was found; --small tries the benchmark on a CPU.")
    options.output.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    report, results = Report("The first hour on a card", device), dict[str, Any]()
    for part, limit in LIMITS.items():
        results[part] = run_part(part, options, limit)
        rows = results[part]["rows"]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        title = f"{part} ({results[part]['state']}, {results[part]['seconds']:.0f} s)"
        report.table(title, columns, [[row.get(name, "") for name in columns] for row in rows])
        write_json(options.output / "report.json", {"device": device, "parts": results})
        report.write(options.output, "report.md")
    return 0


def run_part(part: str, options: Options, limit: float) -> Row:
    """Runs a part in a process of its own; returns its state, seconds and the rows that it came to."""
    command = [sys.executable, __file__, "--output", str(options.output), "--part", part]
    log, begun = options.output / f"{part}.log", time.monotonic()
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, *["--small"] * options.small], stdout=subprocess.PIPE, stderr=errors
        )
        try:
            output, _ = process.communicate(timeout=limit)
            state = "done" if process.returncode == 0 else f"failed: see {log.name}"
        except subprocess.TimeoutExpired:
            process.kill()
            output, state = process.communicate()[0], f"cut after {limit} s"
    rows = [json.loads(line) for line in output.decode().splitlines() if line.startswith("{")]
    return {"state": state, "seconds": time.monotonic() - begun, "rows": rows}


def tests(small: bool) -> Iterator[Row]:
    """Runs the tests that need a GPU: ZeRO 1 to 3 against plain PyTorch, and waits of the host."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/pretrain/test_gpu.py"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    print(done.stdout, file=sys.stderr)
    counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)
    row: Row = {"tests": "tests/pretrain/test_gpu.py"}
    numbers: Row = {what: int(number) for number, what in counts}
    yield row | (numbers or {"skipped": "all"})


def shapes(small: bool) -> Iterator[Row]:
    """Measures the shapes at each length and batch, up to the largest that fits."""
    from benchmarks.gpu_steps import measure

    lengths = {32: (6,)} if small else LENGTHS
    for name, shape in SHAPES.items():
        for length, batches in lengths.items():
            for sequences in batches:
                yield {"model": name} | measure(shape, length, sequences, small=small)


def switches(small: bool) -> Iterator[Row]:
    """Measures compiling and unpadding at two fills."""
    import torch

    from benchmarks.gpu_steps import measure

    for name, shape in SHAPES.items():
        for fill in (0.5, 0.9):
            for train in ({}, {"compile": True}, {"unpad": True}):
                if train and not torch.cuda.is_available():
                    continue  # the compiler takes minutes, and packed attention needs a GPU
                length, sequences = (32, 6) if small else (512, 240)
                row = measure(shape, length, sequences, small=small, fill=fill, **train)
                yield {"model": name, "with": " ".join(train) or "neither"} | row


def loader(small: bool) -> Iterator[Row]:
    """Measures how many sequences one loader process delivers."""
    from benchmarks.training_step import Workload
    from pretrain.run import prepare_sample_corpus

    prepare_sample_corpus()
    work, count = Workload((256, 4)), 8 if small else 800
    begun = time.perf_counter()
    batches = work.batches(count)
    seconds = time.perf_counter() - begun
    sequences = sum(batch.counts["sequences"] for batch in batches)
    yield {"sequences of 128 a second, one process": sequences / seconds}


def finetune(small: bool) -> Iterator[Row]:
    """Times the fine-tuning of the sample's encoder on 100 rows, start of the process included."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.csv"
        count = 20 if small else 100
        lines = [f"a {'good' if n % 2 else 'bad'} text number {n},{n % 2}" for n in range(count)]
        rows.write_text("\n".join(["text,label", *lines]))
        command = [sys.executable, "finetune/run.py", "--model", "sample", "--head", "mean"]
        command += ["--train_file", str(rows), "--output_dir", f"{folder}/run"]
        command += ["--max_steps", "4"] * small
        begun = time.perf_counter()
        done = subprocess.run(command, cwd=REPOSITORY, stdout=sys.stderr, check=False)
        seconds = time.perf_counter() - begun
    yield {"rows": count, "seconds": seconds, "exit code": done.returncode}


PARTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "tests": tests,
    "shapes": shapes,
    "switches": switches,
    "loader": loader,
    "finetune": finetune,
}

if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_command(main)
