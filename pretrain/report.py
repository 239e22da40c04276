"""Draws the curves of pretraining runs into one picture and prints their last values as a Markdown table.

python pretrain/report.py runs/base runs/k1 --output report.png --markdown report.md
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not pretrain/, whose names must not hide packages

from multicls.errors import UserError, did_you_mean, run_command
from multicls.files import atomic_write, read_jsonl
from pretrain.run_folder import DONE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METRICS = "metrics.jsonl"
LEAST_VARIANCE = "least facets/variance"
PANELS = {  # title -> key
    "Total loss": "loss/total",
    "MLM loss": "loss/mlm",
    "TF-IDF loss": "loss/tfidf",
    "SO loss": "loss/so",
    "MCQT loss": "loss/mcqt",
    "MLM accuracy": "acc/mlm",
    "TF-IDF R²": "r2/tfidf",
    "SO accuracy": "acc/so",
    "MCQT accuracy": "acc/mcqt",
    "Cosine of facets, after the head": "facets/mean_cosine",
    "Cosine of facets, before the head": "facets/mean_cosine_hidden",
    "Least variance of a facet": LEAST_VARIANCE,
    "Entropy of the winning pair": "facets/pair_entropy",
    "Learning rate": "optim/lr",
    "Gradient norm (log)": "optim/grad_norm",
    "Tokens per second": "speed/tokens_per_second",
}
CHANCE = {"loss/so": math.log(2), "acc/so": 0.5}
COLUMNS: dict[str, tuple[str, str]] = {  # heading -> key of the last validation, format
    "loss": ("loss/total", "{:.3f}"),
    "MLM": ("loss/mlm", "{:.3f}"),
    "TF-IDF": ("loss/tfidf", "{:.3f}"),
    "SO": ("loss/so", "{:.3f}"),
    "MCQT": ("loss/mcqt", "{:.3f}"),
    "MLM acc": ("acc/mlm", "{:.3f}"),
    "TF-IDF R²": ("r2/tfidf", "{:.3f}"),
    "SO acc": ("acc/so", "{:.3f}"),
    "MCQT acc": ("acc/mcqt", "{:.3f}"),
    "facet cosine": ("facets/mean_cosine", "{:.3f}"),
    "facet variance": (LEAST_VARIANCE, "{:.4f}"),
}
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """A run folder as far as it has come."""

    name: str
    state: str
    train: list[Record]
    validation: list[Record]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; unfinished ones as far as they are")
    parser.add_argument("--output", default="report.png", help="picture of the curves (default: %(default)s)")
    parser.add_argument("--markdown", help="file for the table, which is printed in any case")
    args = parser.parse_args(argv)
    runs = read_runs(args.runs)
    text = table(runs)
    print(text, end="")
    if args.markdown:
        with atomic_write(args.markdown) as file:
            file.write(text)
    draw(runs, Path(args.output))
    print(f"\ncurves: {args.output}")


def read_runs(paths: Sequence[str]) -> list[Run]:
    """The runs, named by their folders, or by their paths where two folders have one name.

    Raises:
        UserError: folders that hold no run, or nothing has been measured in any.
    """
    folders = [Path(path) for path in dict.fromkeys(paths)]
    if problems := [_no_run(folder) for folder in folders if not (folder / METRICS).is_file()]:
        raise UserError(*problems)
    names = [folder.resolve().name for folder in folders]
    runs = [
        _read_run(folder, name if names.count(name) == 1 else str(folder))
        for folder, name in zip(folders, names, strict=True)
    ]
    if not any(run.train or run.validation for run in runs):
        raise UserError(f"{', '.join(run.name for run in runs)}: nothing measured yet; try again after the first step.")
    return runs


def _no_run(folder: Path) -> str:
    """What is wrong with a folder that is no run, and the nearest that are: in it, above it, or beside it."""
    inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
    near = [
        *folder.parents,
        *(path.parent for place in (folder.parent, Path("runs")) for path in place.glob(f"*/{METRICS}")),
    ]
    known = {str(path) for path in near if (path / METRICS).is_file()}
    hint = f" Runs in it: {', '.join(inside)}." if inside else did_you_mean(str(folder), known)
    return f"{folder}: no run there (it has no {METRICS}).{hint}"


def _read_run(folder: Path, name: str) -> Run:
    import yaml

    records = [_with_least_variance(record) for record in read_jsonl(folder / METRICS)]
    step = max((record["step"] for record in records), default=0)
    settings = folder / "settings.yaml"
    planned = yaml.safe_load(settings.read_text(encoding="utf-8"))["train"].get("steps") if settings.is_file() else None
    state = str(step) if (folder / DONE).exists() else f"{step} of {planned or '?'}"
    train, validation = ([r for r in records if r["split"] == split] for split in ("train", "validation"))
    return Run(name, state, train, validation)


def _with_least_variance(record: Record) -> Record:
    variances = [value for name, value in record.items() if name.startswith("facets/variance_")]
    return {**record, LEAST_VARIANCE: min(variances)} if variances else record


def table(runs: Sequence[Run]) -> str:
    """Markdown: a run a line, with its last validation, its typical time per step and the tokens it has seen."""
    rows = [["run", "steps", *COLUMNS, "ms a step", "tokens"]]
    for run in runs:
        last = run.validation[-1] if run.validation else {}
        paces = [record["speed/seconds_per_step"] for record in run.train if "speed/seconds_per_step" in record]
        tokens = [record["data/tokens"] for record in run.train if "data/tokens" in record]
        cells = [form.format(last[key]) if key in last else "-" for key, form in COLUMNS.values()]
        pace = f"{1000 * statistics.median(paces):.0f}" if paces else "-"
        rows.append([run.name.replace("|", r"\|"), run.state, *cells, pace, _short(sum(tokens)) if tokens else "-"])
    rows.insert(1, ["---"] * len(rows[0]))
    text = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return text + (
        "\nLosses, accuracies and facets: the last validation. Facet variance: of the facet that varies least. Time a "
        "step: the median. Tokens: all but padding. Losses of runs with other objectives, weights or numbers of "
        "candidates do not compare.\n"
    )


def _short(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def draw(runs: Sequence[Run], picture: Path) -> None:
    """Draws what has been measured, a panel a key; runs differ in line, marker and lightness, so also in print."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    measured = {key for run in runs for record in run.train + run.validation for key in record}
    panels = {title: key for title, key in PANELS.items() if key in measured}
    columns = min(4, len(panels))
    height = math.ceil(len(panels) / columns)
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, hspace=0.03)
    figure = Figure(figsize=(4.2 * columns, 3 * height + 0.8), dpi=120, layout=layout)
    grid = figure.subplots(height, columns, squeeze=False).flat
    shades = matplotlib.colormaps["viridis"]
    styles: list[dict[str, Any]] = [
        {"color": shades(0.8 * number / max(1, len(runs) - 1)), "marker": marker, "linestyle": line}
        for number, marker, line in zip(range(len(runs)), cycle("os^Dv*PX<>"), cycle(("-", "--", "-.", ":")))
    ]
    for (title, key), axes in zip(panels.items(), grid, strict=False):  # panels first: no axes get lost
        axes.set_title(title, fontsize=11, fontweight="bold")
        _draw_panel(axes, key, runs, styles)
    for axes in list(grid):
        axes.set_axis_off()
    handles = [Line2D([], [], label=_label(run.name), **style) for run, style in zip(runs, styles, strict=True)]
    handles.append(Line2D([], [], color="grey", linewidth=0.8, label="thin: training, smoothed"))
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 6), frameon=False)
    with atomic_write(picture, "wb") as file:
        figure.savefig(file, format="png")


def _draw_panel(axes: Axes, key: str, runs: Sequence[Run], styles: Sequence[Mapping[str, Any]]) -> None:
    drawn: list[float] = []
    for run, style in zip(runs, styles, strict=True):
        steps, values = _points(run.train, key)
        smooth = key != "optim/lr"
        if values:
            # Where there is no validation, the line of training has the run's style.
            alone = key.startswith(("optim/", "speed/"))
            line = {**style, "marker": ""} if alone else {"color": style["color"], "linewidth": 0.8}
            axes.plot(steps, _smoothed(values) if smooth else values, **line)
        drawn += _smoothed(values) if smooth else values
        steps, values = _points(run.validation, key)
        if values:
            axes.plot(steps, values, markevery=max(1, len(values) // 8), markersize=5, linewidth=1.6, **style)
        drawn += values
    if key in CHANCE:
        axes.axhline(CHANCE[key], color="grey", linestyle=":", linewidth=1)
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
        axes.annotate("chance", (1, CHANCE[key]), (0, 2), annotation_clip=True, **place)
    if key == "optim/grad_norm":
        axes.set_yscale("log")
        for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatted("{x:.2g}")
    elif key.startswith("loss/") and len(drawn) > 100:  # the first steps' losses must not flatten the others
        low, high = min(drawn), statistics.quantiles(drawn, n=50)[-1]
        axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    elif key == "speed/tokens_per_second":
        axes.set_ylim(bottom=0)
    axes.locator_params("x", integer=True)
    axes.set_xlabel("step", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


def _points(records: Sequence[Record], key: str) -> tuple[list[int], list[float]]:
    found = [(r["step"], float(r[key])) for r in records if key in r and math.isfinite(r[key])]
    return [step for step, _ in found], [value for _, value in found]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Mean over a window of a fortieth of the run around every point, narrower towards the ends."""
    half = len(values) // 80
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _label(text: str, most: int = 40) -> str:
    return (text if len(text) <= most else "…" + text[1 - most :]).replace("$", r"\$")


if __name__ == "__main__":
    run_command(main)
