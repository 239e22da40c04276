"""The first hour on a card: tests, steps of several shapes, the loader, fine-tuning; one report.

python benchmarks/gpu.py --output runs/gpu
python benchmarks/gpu.py --output runs/gpu --small

Each part is a process of its own with a limit; all limits together are 11.5 minutes, 8 of them for steps. After each
row OUTPUT/report.md and report.json are complete: the benchmark may be cut short at any time. `--small` makes
everything tiny, so that it also ends within a minute on an idle CPU; its figures say nothing.

The tests compare the losses of ZeRO 1 to 3 in three precisions with plain PyTorch on the CPU, recorded steps with eager
ones, and with two cards a run that moves to one and back with a run left alone. A step is one of `pretrain/run.py` with
ZeRO 2, against `AutoModelForMaskedLM` in a plain loop with the same batches, precision and optimizer, and the logits of
the full vocabulary. Each row is measured in a process of its own, the most important ones first; "x plain" is its time
in those of the plain loop. Tokens are random, 85 % of them real. MFU counts the matrix products of the model with its
losses, over the card's dense 16-bit peak.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import Field

from benchmarks.harness import Report, table_text
from multicls.errors import UserError, run_command
from multicls.files import REPOSITORY, atomic_write, read_json, write_json
from multicls.settings import Settings, parse

LIMITS = {"steps": 480, "tests": 150, "loader": 30, "finetune": 30}  # seconds
# Model, tokens and sequences of a step, the most important ones first.
STEPS = [("BERT-base", 128, 30), ("MiniLM", 64, 120), ("ModernBERT-base", 128, 30)]
STEPS += [("BERT-base", 128, 240), ("BERT-base", 512, 240), ("ModernBERT-base", 128, 240)]
STEPS += [("BERT-base", 128, 960), ("ModernBERT-base", 512, 240), ("ModernBERT-base", 128, 960)]
WHAT = ("plain", "default", "eager", "graph", "graph, unpad")
Row = dict[str, Any]


class Options(Settings):
    """Options of the benchmark."""

    output: Path = Field(description="folder of report.md, report.json and the parts' logs")
    small: bool = Field(False, description="tiny shapes, to try the benchmark itself")
    part: str = Field("", description="run this part only, and add it to the report")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts one after the other; each adds its rows to the report."""
    options = parse(Options, argv, prog="benchmarks/gpu.py", doc=__doc__)
    if options.part:
        if options.part not in PARTS:
            raise UserError(f"--part {options.part}: there are {', '.join(PARTS)}.")
        rows = list[Row]()
        for row in PARTS[options.part](options.small):
            rows.append(row)
            record(options.output, options.part, state="not ended", rows=rows)
        return 0
    import torch

    if not (torch.cuda.is_available() or options.small):
        raise UserError("no GPU was found; --small tries the benchmark on a CPU.")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    title = Report("The first hour on a card", device).text
    report: Row = {"device": device, "title": title, "parts": {}}
    write_json(options.output / "report.json", report)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the part, too
    for part, limit in LIMITS.items():
        begun = time.monotonic()
        state = run_part(part, options, limit)
        print(record(options.output, part, state=state, seconds=time.monotonic() - begun))
    print(f"written: {options.output / 'report.md'}")
    return 0


def run_part(part: str, options: Options, limit: float) -> str:
    """Runs a part in a process of its own, with its output in OUTPUT/PART.log; returns its state."""
    command = [sys.executable, __file__, "--output", str(options.output), "--part", part]
    command += ["--small"] * options.small
    with (options.output / f"{part}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        return f"failed: see {log.name}" if process.wait(limit) else "done"
    except subprocess.TimeoutExpired:
        return f"cut after {limit} s"
    finally:
        with suppress(ProcessLookupError):  # also of what it has started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def record(folder: Path, part: str, **values: Any) -> str:
    """Changes the result of a part and writes both reports; returns the part's table."""
    report = read_json(folder / "report.json")
    result = report["parts"].setdefault(part, {"state": "", "seconds": 0.0, "rows": []})
    result.update(values)
    write_json(folder / "report.json", report)
    tables = {name: part_table(name, found) for name, found in report["parts"].items()}
    with atomic_write(folder / "report.md") as file:
        file.write("".join([report["title"], *tables.values()]))
    return tables[part]


def part_table(part: str, result: Row) -> str:
    """Returns the rows of a part as Markdown."""
    columns = list(dict.fromkeys(name for row in result["rows"] for name in row))
    rows = [[row.get(name, "") for name in columns] for row in result["rows"]]
    return table_text(f"{part} ({result['state']}, {result['seconds']:.0f} s)", columns, rows)


def tests(small: bool) -> Iterator[Row]:
    """Runs the tests that need a GPU."""
    command = [sys.executable, "-u", "-m", "pytest", "-vv", "tests/pretrain/test_gpu.py"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if found := re.match(r"\S+::(\S+) ([A-Z]+)", line):
                yield {"test": found[1], "outcome": found[2].lower()}
    if process.returncode > 1:  # 1: a test failed, as its row says
        yield {"test": "pytest itself", "outcome": f"exit code {process.returncode}"}


def steps(small: bool) -> Iterator[Row]:
    """Measures steps, each row in a process of its own."""
    plan = [(*step, what) for step in STEPS for what in WHAT]
    if small:  # the compiler takes minutes, and packed attention needs a GPU
        plan = [("tiny BERT", 32, 6, what) for what in ("plain", "graph")]
    plain = dict[tuple[str, int, int], Any]()
    for model, length, sequences, what in plan:
        step = {"model": model, "length": length, "sequences": sequences, "what": what}
        command = [sys.executable, "-m", "benchmarks.gpu_steps", json.dumps(step)]
        done = subprocess.run(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=False
        )
        row: Row = step | {"ms": f"failed with exit code {done.returncode}"}
        if not done.returncode:
            row = json.loads(done.stdout.splitlines()[-1])
        key = (model, length, sequences)
        if what == "plain":
            plain[key] = row["ms"]
        elif isinstance(row["ms"], float) and isinstance(plain[key], float):
            row["x plain"] = row["ms"] / plain[key]
        yield row


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
        code = subprocess.run([sys.executable, *command], cwd=REPOSITORY, check=False).returncode
        yield {"rows": count, "seconds": time.perf_counter() - begun, "exit code": code}


EVERY: tuple[Callable[[bool], Iterator[Row]], ...] = (steps, tests, loader, finetune)
PARTS = dict(zip(LIMITS, EVERY, strict=True))

if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_command(main)
