"""Measures what a checkpoint of BERT-base costs, and how long a step must be for that to be 3 % of the time.

    python benchmarks/run.py save_cost [FOLDER] [--saves 5]

One rank, ZeRO-2, random weights, moments of one step. FOLDER (default: a temporary one) is on the disk to be measured.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare import Report, new_parser
from benchmarks.workload import BASE, Workload
from pretrain import checkpoints
from pretrain.settings import RunSettings

SHARE, SEQUENCES = 0.03, 30  # of the time, of a step of base.yaml
seconds: defaultdict[str, float] = defaultdict(float)


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, which then adds its time to `seconds[name]`."""

    def call(*args: Any) -> Any:
        start = time.perf_counter()
        result = function(*args)
        seconds[name] += time.perf_counter() - start
        return result

    return call


def engine_with_moments() -> Any:
    """Returns the engine of BERT-base after one step."""
    engine = Workload(BASE).trainer().engine
    ids = torch.randint(1000, 2000, (3, 16), device=engine.device)
    engine.backward(engine(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss)
    engine.step()
    return engine


def main(argv: Sequence[str] | None = None) -> None:
    """Saves some times and writes the medians."""
    parser = new_parser("save_cost", __doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--saves", type=int, default=5)
    args = parser.parse_args(argv)
    torch.save, os.fsync = timed("torch.save", torch.save), timed("fsync", os.fsync)
    checkpoints.sha256_of = timed("SHA-256", checkpoints.sha256_of)
    checkpoints.full_weights = timed("full_weights", checkpoints.full_weights)
    checkpoints.save_file = timed("model.safetensors", checkpoints.save_file)
    engine = engine_with_moments()
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        saver = checkpoints.Checkpoints(Path(folder) / "checkpoints", 2, {}, 1, zero_stage=2)
        save = timed("all", saver.save)
        for number in range(args.saves):
            seconds.clear()
            assert save(engine, number + 1), saver.warning
            found.append(dict(seconds))
            print(*saver.new_notes(), {name: round(value, 2) for name, value in seconds.items()}, flush=True)
    whole = statistics.median(one["all"] for one in found)
    step = whole / SHARE / RunSettings().save_every
    report = Report("save_cost", "What a checkpoint of BERT-base costs", argv)
    rows = [[name, statistics.median(one[name] for one in found)] for name in found[0]]
    report.table(f"Median of {args.saves} saves", ["part", "seconds"], rows)
    report.figure(f"shortest step for {SHARE:.0%} of the time at the default run.save_every, ms", 1000 * step)
    report.figure(f"sequences a second of that step in micro-batches of {SEQUENCES}", SEQUENCES / step)
    report.write()
