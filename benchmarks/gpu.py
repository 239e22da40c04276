"""Times training steps of several shapes on a GPU, beside a plain loop of masked LM.

python benchmarks/gpu.py --output runs/gpu

A step is one of `pretrain/run.py` with ZeRO 2. The plain loop trains `AutoModelForMaskedLM` with the same batches,
precision and optimizer, and computes the logits of the full vocabulary. "x plain" is a step's time divided by that of
the plain loop. Each row is measured in a process of its own, the most important ones first. After each, report.md and
report.json in OUTPUT are complete. Rows begin within `--minutes`. Tokens are random, 85 % of them real. MFU counts the
matrix products of the model with its losses, over the card's dense 16-bit peak. `--small` tries it on a CPU.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import Field

from benchmarks.harness import Report
from multicls.errors import UserError, run_command
from multicls.files import REPOSITORY, write_json
from multicls.settings import Settings, parse

# Model, tokens and sequences of a step, the most important ones first.
STEPS = [("BERT-base", 128, 30), ("MiniLM", 64, 120), ("ModernBERT-base", 128, 30)]
STEPS += [("BERT-base", 128, 240), ("BERT-base", 512, 240), ("ModernBERT-base", 128, 240)]
STEPS += [("BERT-base", 128, 960), ("ModernBERT-base", 512, 240), ("ModernBERT-base", 128, 960)]
WHAT = ("plain", "default", "eager", "graph", "graph, unpad")


class Options(Settings):
    """Options of the benchmark."""

    output: Path = Field(description="folder of report.md and report.json")
    minutes: float = Field(8, gt=0, description="time in which rows begin")
    small: bool = Field(False, description="tiny shapes, to try the benchmark itself")


def measure(step: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of a step, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu_steps", json.dumps(step)]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return step | {"ms": f"failed with exit code {done.returncode}"}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Measures rows; each is written at once."""
    options = parse(Options, argv, prog="benchmarks/gpu.py", doc=__doc__)
    import torch  # after --help

    if not (torch.cuda.is_available() or options.small):
        raise UserError("no GPU was found; --small tries the benchmark on a CPU.")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    plan = [(*step, what) for step in STEPS for what in WHAT]
    if options.small:  # the compiler takes minutes, and packed attention needs a GPU
        plan = [("tiny BERT", 32, 6, what) for what in ("plain", "graph")]
    rows, begun = list[dict[str, Any]](), time.monotonic()
    for step in plan:
        if time.monotonic() - begun > 60 * options.minutes:
            break
        row = measure(dict(zip(("model", "length", "sequences", "what"), step, strict=True)))
        same = (old for old in rows if [*old.values()][:3] == list(step[:3]))
        plain = next(same, row)["ms"]
        if isinstance(plain, float) and isinstance(row["ms"], float):
            row["x plain"] = row["ms"] / plain
        rows.append(row)
        report = Report("Training steps on a GPU", device)
        columns = list(dict.fromkeys(name for row in rows for name in row))
        report.table("steps", columns, [[row.get(name, "") for name in columns] for row in rows])
        report.write(options.output, "report.md")
        write_json(options.output / "report.json", {"device": device, "rows": rows})
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_command(main)
