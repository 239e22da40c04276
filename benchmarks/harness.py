"""Shared by the benchmarks: cases that take turns, their ratios, and a report in Markdown.

Cases run in one process in rounds, each round in another order, so that other load on the machine slows down all of
them. A ratio has two estimates, the ratio of the minima, which other load disturbs least, and the median of the ratios
over rounds. If they differ by more than a tenth, the machine was too busy to tell.
"""

import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from multicls.environment import environment_record
from multicls.files import REPOSITORY, atomic_write

RESULTS = REPOSITORY / "runs" / "benchmarks"
Case = Callable[[], Any]


def take_turns(
    cases: Mapping[str, Case], *, rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Calls each case once a round and returns its seconds, one entry a round after the warm-up rounds."""
    names, seconds = list(cases), {name: list[float]() for name in cases}
    for number in range(-warmup, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            cases[name]()
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(case: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    """Returns the ratio of the minima, and the median over rounds of the ratio within a round."""
    rounds = [mine / theirs for mine, theirs in zip(case, baseline, strict=True)]
    return min(case) / min(baseline), statistics.median(rounds)


class Report:
    """The results of one benchmark script: printed at once, written to runs/benchmarks/NAME.md by `write`."""

    def __init__(self, title: str, device: str = "cpu") -> None:
        self.script = Path(sys.argv[0]).name
        command = ["python", f"benchmarks/{self.script}", *map(without_folders, sys.argv[1:])]
        record = environment_record()
        versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
        where = machine() if device == "cpu" else f"{device}; {machine()}"
        self.text = (
            f"## {title}\n\n`{shlex.join(command)}`, commit {str(record['git_commit'])[:10]}, "
            f"{time.strftime('%Y-%m-%d')}, {where}, {os.environ.get('OMP_NUM_THREADS', 'all')} "
            f"thread(s); {versions}.\n"
        )

    def compare(self, what: str, samples: Mapping[str, Sequence[float]], baseline: str) -> None:
        """Adds the times of all cases and their ratios to `baseline`."""
        rows = []
        for name, seconds in samples.items():
            estimates = ratio(seconds, samples[baseline]) if name != baseline else ("baseline", "")
            rows.append([name, min(seconds), *estimates])
        columns = ["case", "seconds (least)", "ratio of minima", "median ratio"]
        self.table(f"{what}, {len(samples[baseline])} rounds", columns, rows)

    def table(self, what: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Adds a table and prints it."""
        text = table_text(what, columns, rows)
        print(text, flush=True)
        self.text += text

    def write(self, folder: Path = RESULTS, name: str = "") -> Path:
        """Writes the Markdown, by default under the script's name; returns its path."""
        path = folder / (name or f"{Path(self.script).stem}.md")
        with atomic_write(path) as file:
            file.write(self.text)
        print(f"written: {path}")
        return path


def table_text(what: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a table in Markdown; numbers get four significant digits."""
    lines = [columns, ["---"] * len(columns), *([_cell(value) for value in r] for r in rows)]
    return f"\n{what}:\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def machine() -> str:
    """Returns processor, number of cores and memory."""
    match = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    processor = match[1].strip() if match else platform.machine()
    return f"{processor}, {os.cpu_count()} cores, {gib:.0f} GiB"


def without_folders(word: str) -> str:
    """Returns an argument whose absolute path is cut to its last name: `a=/b/c` becomes `a=c`."""
    return re.sub(r"(^|=)/(?:[^/\s]+/)*", r"\1", word.rstrip("/"))


def read_lines(path: Path) -> Any:
    """Returns compressed JSON lines as a pandas table."""
    import pandas as pd

    return pd.read_json(path, lines=True, dtype=False)
