"""Kills data preparation at random moments and compares what it ends with: the same bytes in every file.

python benchmarks/run.py kill_data_prep NAME=PATH [NAME=PATH ...] [--kills 20] [--tokenizer PATH_OR_ID] [--seed 0]

Prepares the input whole with one process and with two; then again, killed with -9 (the whole process group) after a
random part of the time that a run takes, and started again, as often as `--kills` says, with one or two processes by
chance; then left to finish.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare import Report, new_parser
from multicls.corpus import Corpus
from multicls.files import REPOSITORY, sha256_of
from multicls.sample import sample_model


def digests(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file of a corpus, without its log and the input's dates."""
    apart = ("log.jsonl", "inputs.json")
    return {path.name: sha256_of(path) for path in sorted(folder.iterdir()) if path.name not in apart}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it; returns 1 if any byte differs."""
    parser = new_parser("kill_data_prep", __doc__)
    parser.add_argument("inputs", nargs="+", metavar="NAME=PATH")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--tokenizer", default=None, help="default: the embedded sample's")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    command = [sys.executable, str(REPOSITORY / "data_prep" / "run.py"), "--input", *args.inputs]
    command += ["--tokenizer", args.tokenizer or str(sample_model())]

    def words(output: Path, workers: int) -> list[str]:
        return [*command, "--output", str(output), "--workers", str(workers)]

    with tempfile.TemporaryDirectory() as folder:
        one, two, killed = (Path(folder) / name for name in ("one", "two", "killed"))
        subprocess.run(words(one, 1), check=True, stdout=subprocess.DEVNULL)
        start = time.monotonic()
        subprocess.run(words(two, 2), check=True, stdout=subprocess.DEVNULL)
        whole = time.monotonic() - start
        for number in range(args.kills):
            process = subprocess.Popen(
                words(killed, rng.choice((1, 2))), stdout=subprocess.DEVNULL, start_new_session=True
            )
            delay = rng.uniform(0.0, 1.2) * whole
            try:
                process.wait(delay)
                state = "had finished"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                state = "killed"
            parts = len(list(killed.glob("work/parts/*")))
            written = "finished" if (killed / "manifest.json").exists() else f"{parts} parts"
            print(f"{number + 1}: {state} after {delay:.1f} s; {written}", flush=True)
            if state == "had finished":
                shutil.rmtree(killed)  # once more from the start, to be killed again
        subprocess.run(words(killed, 2), check=True, stdout=subprocess.DEVNULL)
        Corpus.open(killed).verify()
        same = digests(one) == digests(two) == digests(killed)
        report = Report("kill_data_prep", "Data preparation killed at random moments", argv)
        row = [len(digests(one)), args.kills, "yes" if same else "NO"]
        report.table("One process, two, and after kills", ["files", "kills", "all files equal"], [row])
        report.write()
        return int(not same)
