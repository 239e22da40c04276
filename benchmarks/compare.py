"""The harness of the benchmarks: cases that take turns, ratios with verdicts, reports in JSON and Markdown.

Cases run in one process in rounds, each round in another order, so that whatever else the machine does slows down all
of them. A ratio is judged only if two estimates of it agree: that of the minima, which the other load of a machine
disturbs least, and the median over rounds.
"""

from __future__ import annotations

import math
import os
import platform
import re
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from multicls.errors import UserError
from multicls.files import REPOSITORY, atomic_write, read_json, write_json

RESULTS = REPOSITORY / "runs" / "benchmarks"
PAGE = REPOSITORY / "docs" / "performance.md"
AGREEMENT = 0.10  # largest difference of the two estimates of a ratio that gets a verdict
PACKAGES = ("torch", "deepspeed", "transformers", "numpy", "datasets")
INCONCLUSIVE, MET, NOT_MET, STATED = "INCONCLUSIVE", "met", "not met", "stated only"
Case = Callable[[], Any]
Ratio = tuple[float, float]  # of the minima; median over rounds


@dataclass(frozen=True)
class Bar:
    """A limit that a figure has to keep."""

    sign: Literal["<=", ">="]
    limit: float

    def met(self, *values: float) -> bool:
        """Returns whether all `values` keep the limit."""
        return all(value <= self.limit if self.sign == "<=" else value >= self.limit for value in values)

    def __str__(self) -> str:
        return f"{self.sign} {self.limit:,g}"


@dataclass
class Samples:
    """Seconds of one case, an entry a round: wall clock, and CPU of this process and its children."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def ratio(case: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Returns the ratio of the minima, and the median over rounds of the ratio within a round."""
    rounds = [one / other for one, other in zip(case, baseline, strict=True)]
    return min(case) / min(baseline), statistics.median(rounds)


def verdict(found: Ratio, bar: Bar | None) -> str:
    """Returns INCONCLUSIVE if the two estimates differ by more than `AGREEMENT`, "met" if both keep the bar."""
    if abs(found[0] - found[1]) > AGREEMENT:
        return INCONCLUSIVE
    return STATED if bar is None else MET if bar.met(*found) else NOT_MET


def take_turns(
    cases: Mapping[str, Case], *, rounds: int, warmup: int = 1, seconds: float = math.inf, wait: Case = lambda: None
) -> dict[str, Samples]:
    """Calls each case once a round and returns its times.

    Args:
        rounds: Number of rounds that count.
        warmup: Number of rounds before them that do not.
        seconds: Ends after the round in which this time is over, warm-up left out, but not before the third round.
        wait: Called before each reading of the clock: waits for the device, or for the other ranks.
    """
    names, samples, started = list(cases), {name: Samples() for name in cases}, 0.0
    for number in range(-warmup, rounds):
        if number == 0:
            started = time.perf_counter()
        if number >= 3 and time.perf_counter() - started > seconds:
            break
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            wait()
            cpu, wall = cpu_seconds(), time.perf_counter()
            cases[name]()
            wait()
            if number >= 0:
                samples[name].wall.append(time.perf_counter() - wall)
                samples[name].cpu.append(cpu_seconds() - cpu)
    return samples


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Report:
    """The results of one benchmark; they go to `runs/benchmarks/{name}.json` and `.md`.

    Args:
        name: Name of the benchmark, or NAME.PART.
        title: What is measured, in one line.
        device: Name of the GPU, or "cpu".
    """

    def __init__(self, name: str, title: str, argv: Sequence[str], device: str = "cpu") -> None:
        command = shlex.join(["python", "benchmarks/run.py", name.split(".")[0], *map(without_folders, argv)])
        self.content: dict[str, Any] = {"name": name, "title": title, "command": command, "device": device}
        self.content |= {"machine": machine(), "results": []}

    def compare(
        self, what: str, samples: Mapping[str, Samples], baseline: str, bars: Mapping[str, Bar] | None = None
    ) -> None:
        """Adds cases and their ratios to `baseline`; those without a bar are stated only."""
        rows = []
        for name, one in samples.items():
            row: dict[str, Any] = {"case": name, **vars(one)}
            if name != baseline:
                found, bar = ratio(one.wall, samples[baseline].wall), (bars or {}).get(name)
                row |= {"ratio_of_minima": found[0], "median_ratio": found[1]}
                row |= {"bar": str(bar or "-"), "verdict": verdict(found, bar)}
            rows.append(row)
        self._add({"kind": "comparison", "what": what, "baseline": baseline, "cases": rows})

    def figure(self, what: str, value: float, bar: Bar | None = None) -> None:
        """Adds a count or another figure that has no spread."""
        judged = verdict((value, value), bar)
        self._add({"kind": "figure", "what": what, "value": value, "bar": str(bar or "-"), "verdict": judged})

    def table(self, what: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Adds a table."""
        self._add({"kind": "table", "what": what, "columns": columns, "rows": rows})

    def _add(self, result: dict[str, Any]) -> None:
        self.content["results"].append(result)
        print(_markdown_of([result]), flush=True)

    def write(self, folder: Path = RESULTS) -> Path:
        """Writes the JSON and the Markdown table beside it; returns the path of the JSON."""
        torch: Any = sys.modules.get("torch")
        versions = {name: version(name) for name in PACKAGES if name in sys.modules}
        self.content |= {"threads": torch.get_num_threads() if torch else 1}
        self.content |= {"versions": {"Python": platform.python_version()} | versions}
        path = folder / f"{self.content['name']}.json"
        write_json(path, self.content)
        with atomic_write(folder / f"{self.content['name']}.md") as file:
            file.write(to_markdown(self.content))
        print(f"written: {path} and {self.content['name']}.md")
        return path


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a Markdown table; numbers get four significant digits."""
    lines = [columns, ["---"] * len(columns), *(map(_cell, row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def to_markdown(content: Mapping[str, Any]) -> str:
    """Returns the section of one benchmark's JSON: command, machine and tables."""
    versions = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    where = "" if content["device"] == "cpu" else f"{content['device']}; "
    where += f"{content['machine']}; {content['threads']} thread(s); {versions}"
    return f"## {content['title']}\n\n`{content['command']}`\n\n{where}.\n\n{_markdown_of(content['results'])}"


def _markdown_of(results: Sequence[Mapping[str, Any]]) -> str:
    figures, parts = [], []
    for one in results:
        if one["kind"] == "figure":
            figures.append([one["what"], one["value"], one["bar"], one["verdict"]])
        elif one["kind"] == "table":
            parts.append(f"{one['what']}:\n\n{markdown(one['columns'], one['rows'])}")
        else:
            columns = ["case", "seconds (least)", "CPU seconds (least)", "ratio of minima", "median ratio"]
            rows = []
            for row in one["cases"]:
                ratios = [row.get(name, "") for name in ("ratio_of_minima", "median_ratio", "bar", "verdict")]
                rows.append([row["case"], min(row["wall"]), min(row["cpu"]), ratios[0] or "baseline", *ratios[1:]])
            rounds, table = len(one["cases"][0]["wall"]), markdown([*columns, "bar", "verdict"], rows)
            parts.append(f"{one['what']}, {rounds} rounds against `{one['baseline']}`:\n\n{table}")
    return "\n".join([markdown(["figure", "value", "bar", "verdict"], figures)] * bool(figures) + parts)


def page(folder: Path = RESULTS) -> str:
    """Returns docs/performance.md, made of the JSON files in `folder`.

    Raises:
        UserError: There are none.
    """
    found = [read_json(path) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise UserError(f"{folder}: no results; run a benchmark first, e.g. `python benchmarks/run.py step`.")
    text = (
        "# Performance\n\nWritten by `python benchmarks/run.py page` from the results of the benchmarks. Cases take "
        "turns in one process. A ratio is the time of a case as a share of the baseline's; it gets a verdict if the "
        "ratio of the minima and the median of the ratios over rounds differ by no more than "
        f"{AGREEMENT:g}, and is {INCONCLUSIVE} otherwise. A bar is met if both keep it.\n"
    )
    text += "".join("\n" + to_markdown(content) for content in found)
    if all(content["device"] == "cpu" for content in found):
        text += "\n## Not yet run on a GPU\n\n`python benchmarks/run.py step --device cuda` has no results here.\n"
    return text


def machine() -> str:
    """Returns processor, number of cores and memory."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{found[1].strip() if found else platform.machine()}, {os.cpu_count()} cores, {gib:.0f} GiB"


def without_folders(word: str) -> str:
    """Returns an argument whose absolute path is cut to its last name: `a=/b/c` becomes `a=c`."""
    return re.sub(r"(^|=)/(?:[^/\s]+/)*", r"\1", word.rstrip("/"))
