"""The harness of the benchmarks: cases that take turns, ratios with verdicts, reports in JSON and Markdown.

Cases run in one process in rounds, each round in another order, so that whatever else the machine does slows down all
of them. A ratio is judged only if two estimates of it agree: that of the minima, which the other load of a machine
disturbs least, and the median over rounds.
"""

from __future__ import annotations

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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from multicls.errors import UserError
from multicls.files import REPOSITORY, atomic_write, read_json, write_json

RESULTS = REPOSITORY / "runs" / "benchmarks"
PAGE = REPOSITORY / "docs" / "performance.md"
AGREEMENT = 0.10  # largest difference of the two estimates of a ratio that gets a verdict
PACKAGES = ("torch", "deepspeed", "transformers", "numpy", "datasets")
INCONCLUSIVE, MET, NOT_MET, STATED = "INCONCLUSIVE", "met", "not met", "stated only"


@dataclass(frozen=True)
class Bar:
    """A limit that a figure has to keep."""

    sign: Literal["<=", ">="]
    limit: float

    def met(self, value: float) -> bool:
        """Returns whether `value` keeps the limit."""
        return value <= self.limit if self.sign == "<=" else value >= self.limit

    def __str__(self) -> str:
        return f"{self.sign} {self.limit:,g}"


@dataclass
class Samples:
    """Seconds of one case, an entry a round: wall clock, and CPU of this process and its children."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Ratio:
    """Two estimates of the time of a case as a share of its baseline's."""

    of_minima: float
    median: float


def ratio(case: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Returns the ratio of the minima, and the median over rounds of the ratio within a round."""
    rounds = [one / other for one, other in zip(case, baseline, strict=True)]
    return Ratio(min(case) / min(baseline), statistics.median(rounds))


def verdict(found: Ratio, bar: Bar | None) -> str:
    """Returns INCONCLUSIVE if the two estimates differ by more than `AGREEMENT`, "met" if both keep the bar."""
    if abs(found.of_minima - found.median) > AGREEMENT:
        return INCONCLUSIVE
    if bar is None:
        return STATED
    return MET if bar.met(found.of_minima) and bar.met(found.median) else NOT_MET


def take_turns(
    cases: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warmup: int = 1,
    seconds: float | None = None,
    wait: Callable[[], Any] = lambda: None,
) -> dict[str, Samples]:
    """Calls each case once a round and returns its times.

    Args:
        cases: Functions by name.
        rounds: Number of rounds that count.
        warmup: Number of rounds before them that do not.
        seconds: Ends after the round in which this time is over, warm-up left out, but not before the third round.
        wait: Called before each reading of the clock: waits for the device, or for the other ranks.
    """
    names, samples = list(cases), {name: Samples() for name in cases}
    started = 0.0
    for number in range(-warmup, rounds):
        if number == 0:
            started = time.perf_counter()
        if seconds is not None and number >= 3 and time.perf_counter() - started > seconds:
            break
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            wait()
            cpu, wall = cpu_seconds(), time.perf_counter()
            cases[name]()
            wait()
            wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
            if number >= 0:
                samples[name].wall.append(wall)
                samples[name].cpu.append(cpu)
    return samples


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Report:
    """The results of one benchmark.

    Args:
        name: Name of the benchmark, or NAME.PART; the results go to `runs/benchmarks/{name}.json` and `.md`.
        title: What is measured, in one line.
        argv: Arguments of the benchmark.
        device: Name of the GPU, or "cpu".
    """

    def __init__(self, name: str, title: str, argv: Sequence[str] | None, device: str = "cpu") -> None:
        words = [f"benchmarks/run.py {name.split('.')[0]}", *map(without_folders, argv or [])]
        self.content: dict[str, Any] = {
            "name": name,
            "title": title,
            "command": "python " + " ".join([words[0], *map(shlex.quote, words[1:])]),
            "device": device,
            "machine": machine(),
            "threads": 0,  # these two are known in the end
            "versions": {},
            "results": [],
        }

    def compare(
        self, what: str, samples: Mapping[str, Samples], baseline: str, bars: Mapping[str, Bar] | None = None
    ) -> None:
        """Adds cases and their ratios to `baseline`; those without a bar are stated only."""
        rows = []
        for name, one in samples.items():
            row: dict[str, Any] = {"case": name, "wall": one.wall, "cpu": one.cpu}
            if name != baseline:
                found, bar = ratio(one.wall, samples[baseline].wall), (bars or {}).get(name)
                row |= {"ratio_of_minima": found.of_minima, "median_ratio": found.median}
                row |= {"bar": str(bar) if bar else "-", "verdict": verdict(found, bar)}
            rows.append(row)
        self._add({"kind": "comparison", "what": what, "baseline": baseline, "cases": rows})

    def figure(self, what: str, value: float, bar: Bar | None = None, detail: Any = None) -> None:
        """Adds a count or another figure that has no spread; `detail` goes to the JSON only."""
        judged = STATED if bar is None else MET if bar.met(value) else NOT_MET
        row = {"kind": "figure", "what": what, "value": value, "bar": str(bar) if bar else "-", "verdict": judged}
        self._add(row | {"detail": detail})

    def table(self, what: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], computed: bool = False) -> None:
        """Adds a table; one that was `computed`, not measured, stays out of the page."""
        self._add({"kind": "table", "what": what, "columns": columns, "rows": rows, "computed": computed})

    def _add(self, result: dict[str, Any]) -> None:
        self.content["results"].append(result)
        print(_markdown_of([result]), flush=True)

    def write(self, folder: Path = RESULTS) -> Path:
        """Writes the JSON and the Markdown table beside it; returns the path of the JSON."""
        self.content |= {"threads": _threads(), "versions": _versions()}
        path = folder / f"{self.content['name']}.json"
        write_json(path, self.content)
        with atomic_write(path.with_name(f"{self.content['name']}.md")) as file:
            file.write(to_markdown(self.content))
        print(f"written: {path} and {path.with_suffix('.md').name}")
        return path


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a Markdown table; numbers get four significant digits."""
    lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def to_markdown(content: Mapping[str, Any], measured_only: bool = False) -> str:
    """Returns the section of one benchmark's JSON: command, machine and tables."""
    versions = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    where = "" if content["device"] == "cpu" else f"{content['device']}; "
    text = f"## {content['title']}\n\n`{content['command']}`\n\n"
    text += f"{where}{content['machine']}; {content['threads']} thread(s); {versions}.\n\n"
    return text + _markdown_of([one for one in content["results"] if not (measured_only and one.get("computed"))])


def _markdown_of(results: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    if figures := [one for one in results if one["kind"] == "figure"]:
        rows = [[one["what"], one["value"], one["bar"], one["verdict"]] for one in figures]
        parts.append(markdown(["figure", "value", "bar", "verdict"], rows))
    for one in results:
        if one["kind"] == "table":
            note = " (computed, not measured)" if one["computed"] else ""
            parts.append(f"{one['what']}{note}:\n\n" + markdown(one["columns"], one["rows"]))
        elif one["kind"] == "comparison":
            columns = ["case", "seconds (least)", "CPU seconds (least)", "ratio of minima", "median ratio"]
            rows = [
                [row["case"], min(row["wall"]), min(row["cpu"]), row["ratio_of_minima"], row["median_ratio"]]
                + [row["bar"], row["verdict"]]
                if "verdict" in row
                else [row["case"], min(row["wall"]), min(row["cpu"]), "baseline", "", "", ""]
                for row in one["cases"]
            ]
            rounds = len(one["cases"][0]["wall"])
            table = markdown([*columns, "bar", "verdict"], rows)
            parts.append(f"{one['what']}, {rounds} rounds against `{one['baseline']}`:\n\n{table}")
    return "\n".join(parts)


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
    text += "".join("\n" + to_markdown(content, measured_only=True) for content in found)
    if all(content["device"] == "cpu" for content in found):
        text += "\n## Not yet run on a GPU\n\n`python benchmarks/run.py step --device cuda` has no results here.\n"
    return text


def write_page() -> None:
    """Writes docs/performance.md."""
    text = page()
    with atomic_write(PAGE) as file:
        file.write(text)
    print(f"written: {PAGE}")


def machine() -> str:
    """Returns processor, number of cores and memory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {gib:.0f} GiB"


def without_folders(word: str) -> str:
    """Returns an argument whose absolute path is cut to its last name: `a=/b/c` becomes `a=c`."""
    return re.sub(r"(^|=)/(?:[^/\s]+/)*", r"\1", word.rstrip("/"))


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _threads() -> int:
    torch: Any = sys.modules.get("torch")
    return int(torch.get_num_threads()) if torch else 1


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found |= {name: version(name)} if name in sys.modules else {}
        except PackageNotFoundError:  # a module that no package brought
            continue
    return found
