"""The first hour on a card: tests, losses, steps of several shapes, resume, the loader; one report.

python benchmarks/gpu.py --output runs/gpu
python benchmarks/gpu.py --output runs/gpu --small

Each part is a process of its own with a limit; all limits together are ten minutes. After each row OUTPUT/report.md and
report.json are complete: the benchmark may be cut short at any time. `--small` makes everything tiny, so that it also
ends within a minute on an idle CPU; its figures say nothing.

A step is one of `pretrain/run.py` with ZeRO 1, against `AutoModelForMaskedLM` in a plain loop with the same batches,
precision and optimizer, and the logits of the full vocabulary. Tokens are random; "fill" is the share of real ones.
MFU counts 6 FLOPs a weight and real token, and those of attention, over the card's dense 16-bit peak.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import Field

from benchmarks.harness import Report, table_text
from multicls.errors import UserError, run_command
from multicls.files import REPOSITORY, atomic_write, read_jsonl, write_json
from multicls.settings import Settings, parse

LIMITS = {"tests": 110, "losses": 50, "shapes": 180, "switches": 100}  # seconds
LIMITS |= {"elastic": 100, "loader": 30, "finetune": 30}
SHAPES = {"BERT-base": ("bert", 768, 12), "ModernBERT-base": ("modernbert", 768, 22)}
LENGTHS = {128: (30, 240, 960), 512: (30, 240), 2048: (30, 60)}  # tokens -> sequences of a step
Row = dict[str, Any]


class Options(Settings):
    """Options of the benchmark."""

    output: Path = Field(description="folder of report.md, report.json and the parts' logs")
    small: bool = Field(False, description="tiny shapes, to try the benchmark itself")
    part: str = Field("", description="run this part only, in this process; prints its rows")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts one after the other and writes the report."""
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
    if device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    title, results = Report("The first hour on a card", device).text, dict[str, Row]()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the part, too
    for part, limit in LIMITS.items():
        for result in run_part(part, options, limit):
            results[part] = result
            tables = [part_table(name, result) for name, result in results.items()]
            write_json(options.output / "report.json", {"device": device, "parts": results})
            with atomic_write(options.output / "report.md") as file:
                file.write("".join([title, *tables]))
        print(tables[-1], flush=True)
    print(f"written: {options.output / 'report.md'}")
    return 0


def part_table(part: str, result: Row) -> str:
    """Returns the rows of a part as Markdown."""
    columns = list(dict.fromkeys(name for row in result["rows"] for name in row))
    rows = [[row.get(name, "") for name in columns] for row in result["rows"]]
    return table_text(f"{part} ({result['state']}, {result['seconds']:.0f} s)", columns, rows)


def run_part(part: str, options: Options, limit: float) -> Generator[Row, None, None]:
    """Runs a part in a process of its own; yields its state, seconds and rows after each row, and at its end."""
    command = [sys.executable, __file__, "--output", str(options.output), "--part", part]
    log, begun = options.output / f"{part}.log", time.monotonic()
    rows: list[Row] = []

    def result(state: str) -> Row:
        return {"state": state, "seconds": time.monotonic() - begun, "rows": rows}

    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, *["--small"] * options.small],
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    end = partial(os.killpg, process.pid, signal.SIGKILL)
    timer = threading.Timer(limit, end)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b"{"):
                rows.append(json.loads(line))
                yield result("not ended")
    finally:
        timer.cancel()
        with suppress(ProcessLookupError):  # also of what it has started
            end()
        process.wait()
    state = f"failed: see {log.name}" if process.returncode else "done"
    yield result(f"cut after {limit} s" if time.monotonic() - begun >= limit else state)


def tests(small: bool) -> Iterator[Row]:
    """Runs the tests that need a GPU: ZeRO 1 to 3 against plain PyTorch, and waits of the host."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/pretrain/test_gpu.py"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    print(done.stdout, file=sys.stderr)
    counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)
    row: Row = {"tests": "tests/pretrain/test_gpu.py"}
    numbers: Row = {what: int(number) for number, what in counts}
    yield row | (numbers or {"skipped": "all"})


def losses(small: bool) -> Iterator[Row]:
    """Compares the losses of three steps with those of plain PyTorch in fp32 on the CPU."""
    import torch

    from benchmarks.gpu_steps import losses_beside_plain

    for precision in ("bf16", "fp16") if torch.cuda.is_available() else ("fp32",):
        for stage in (1, 2, 3):
            yield {"ZeRO": stage, "precision": precision} | losses_beside_plain(stage, precision)


def elastic(small: bool) -> Iterator[Row]:
    """Stops a run of the sample on two GPUs, continues it on one, then on two, and compares it with one left alone."""
    import torch
    from safetensors.torch import load_file

    if torch.cuda.device_count() < 2:
        yield {"needs": "two GPUs"}
        return
    flags = (
        "--recipe sample --steps 3 --micro_batch_size 6 --train.compile false --run.eval_examples 6"
    )
    two, one = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"], list[str]()
    stop = ["--run.time_limit", "0.001"]  # after a step
    for stage in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            common = ["pretrain/run.py", *flags.split(), "--config", f"ds_configs/zero{stage}.json"]
            moved, alone = ([*common, "--output_dir", f"{folder}/{n}"] for n in ("moved", "alone"))
            plan = [[*two, *moved, *stop], [*one, *moved, *stop], [*two, *moved], [*one, *alone]]
            row: Row = {"ZeRO": stage, "GPUs": "2, 1, 2"}
            row["exit codes"] = " ".join(str(in_repository(command)) for command in plan)
            if not row["exit codes"].strip(" 0"):
                first, second = (
                    load_file(f"{folder}/{n}/hf/model.safetensors") for n in ("moved", "alone")
                )
                changes = [(w - second[name]).abs().max() for name, w in first.items()]
                row["largest difference of a weight"] = float(max(changes))
                row["loss, moved"], row["alone"] = (
                    f"{read_jsonl(f'{folder}/{n}/metrics.jsonl')[-1]['loss/total']:.5f}"
                    for n in ("moved", "alone")
                )
            yield row


def in_repository(arguments: list[str]) -> int:
    """Runs Python in the repository, with its output in the part's log; returns the exit code."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, stdout=sys.stderr, check=False).returncode


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
    from benchmarks.data_prep import SPECIAL, sequences_per_second
    from data_prep.examples import ExampleStream
    from multicls.corpus import Corpus
    from multicls.sample import SAMPLE_CORPUS
    from pretrain.run import prepare_sample_corpus

    prepare_sample_corpus()
    stream = ExampleStream(Corpus(SAMPLE_CORPUS), SPECIAL, seq_length=128, seed=1)
    speed = sequences_per_second(stream, workers=1, seconds=0.1 if small else 3.0)
    yield {"sequences of 128 a second, one process": speed}


def finetune(small: bool) -> Iterator[Row]:
    """Times the fine-tuning of the sample's encoder on 100 rows, start of the process included."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.csv"
        count = 20 if small else 100
        lines = [f"a {'good' if n % 2 else 'bad'} text number {n},{n % 2}" for n in range(count)]
        rows.write_text("\n".join(["text,label", *lines]))
        command = ["finetune/run.py", "--model", "sample", "--head", "mean"]
        command += ["--train_file", str(rows), "--output_dir", f"{folder}/run"]
        command += ["--max_steps", "4"] * small
        begun = time.perf_counter()
        code = in_repository(command)
    yield {"rows": count, "seconds": time.perf_counter() - begun, "exit code": code}


PARTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "tests": tests,
    "losses": losses,
    "elastic": elastic,
    "shapes": shapes,
    "switches": switches,
    "loader": loader,
    "finetune": finetune,
}

if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_command(main)
