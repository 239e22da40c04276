"""The pictures of finetune/report.py (SVG) and finetune/analyze.py (PNG), readable in black and white."""

from __future__ import annotations

import html
import io
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from finetune.stats.calibration import NUM_BINS, confidences, reliability
from finetune.stats.systems import SystemResult

Array = np.ndarray[Any, np.dtype[Any]]
LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
HATCHES = ("", "///", "...", "xxx")
MARKERS = "osD^vP*X<>"
GREY = "#808080"  # legible on white and on black
WIDTH, LINE = 4.6, 0.15  # of a panel, of a line of text; inches
SVG: dict[Any, Any] = {"svg.fonttype": "none", "text.parse_math": False, "font.size": 8.5}  # text stays text
Panels = Iterator[tuple[str, Figure]]  # with their titles


@dataclass(frozen=True)
class Picture:
    """Panels that a page lays side by side as its width allows."""

    title: str
    caption: str
    panels: list[str]  # SVG of each; what is black there takes the page's text colour


def strip_plots(rows: Sequence[SystemResult]) -> list[Picture]:
    """Returns a picture of all runs for each train size and benchmark, with a panel for each task."""
    caption = (
        "Each marker is a run (runs of one pretraining share a marker), the line below it the 95 % interval of the "
        "mean, the bar the mean; a line that reaches the edge goes on. Dashed: a constant answer."
    )
    several = [row for row in rows if any(len(other.records) > 1 for other in rows if other.task == row.task)]
    return _pictures("Runs", caption, several, _panels_of_tasks)


def reliability_diagrams(rows: Sequence[SystemResult]) -> list[Picture]:
    """Returns a picture of the calibration for each train size and benchmark, with a panel for each classifier."""
    caption = (
        "All tasks and runs of a system in 15 bins of equal width, before temperature scaling. On the dashed line "
        "confidence is accuracy; hatched bars show the share of examples."
    )
    return _pictures("Reliability", caption, [row for row in rows if row.classified], _panels_of_systems)


def _pictures(
    title: str, caption: str, rows: Sequence[SystemResult], panels: Callable[[Sequence[SystemResult]], Panels]
) -> list[Picture]:
    """Returns a picture for each train size and benchmark."""
    groups: dict[str, list[SystemResult]] = {}
    for row in rows:
        benchmark = {"glue": "GLUE, ", "superglue": "SuperGLUE, "}.get(row.records[0].get("benchmark", ""), "")
        groups.setdefault(f"{title}: {benchmark}{row.train_size} train rows", []).append(row)
    with matplotlib.rc_context(SVG):
        return [Picture(heading, caption, [_svg(figure, f"{heading}: {name}") for name, figure in panels(here)])
                for heading, here in groups.items()]  # fmt: skip


def _svg(figure: Figure, label: str) -> str:
    """Returns the figure as an SVG element without ids that repeat in a page, in the colours of the page."""
    file, metadata = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": label}):
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    text = file.getvalue()
    text = re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg") :]).replace("#000000", "currentColor")
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1)


def _panels_of_tasks(rows: Sequence[SystemResult]) -> Panels:
    for task, metric in {row.task: row.metric for row in rows}.items():
        title = f"{task} ({metric})"
        yield title, _strip_plot(title, [row for row in rows if row.task == task])


def _panels_of_systems(rows: Sequence[SystemResult]) -> Panels:
    for name in dict.fromkeys(row.system.title for row in rows):
        yield name, _reliability(name, [run for row in rows if row.system.title == name for run in row.classified])


def _wrap(name: str) -> list[str]:
    return textwrap.wrap(name, 60, max_lines=3, placeholder=" ...")


def _axis(title: Sequence[str], height: float, below: float = 0.35, left: float = 0.1) -> tuple[Figure, Axes]:
    """Returns a panel of the usual width around a plot of this height; `below` and `left` have room for its labels."""
    above = 0.12 + LINE * 1.2 * len(title)
    total = height + above + below
    figure = Figure(figsize=(WIDTH, total))
    axis = figure.add_axes((left / WIDTH, below / total, 1 - (left + 0.1) / WIDTH, height / total))
    axis.set_title("\n".join(title), fontsize=9.5, loc="left", fontweight="bold")
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


def _strip_plot(title: str, rows: Sequence[SystemResult]) -> Figure:
    """Returns a panel with a strip for each system: its name, its runs, and below them mean and interval."""
    names = [_wrap(row.system.title) for row in rows]
    ends = np.cumsum([LINE * len(name) + 0.32 for name in names])
    bottom = float(ends[-1]) + 0.05
    figure, axis = _axis([title], bottom)
    for row, name, end in zip(rows, names, ends, strict=True):
        axis.text(0.005, end - LINE * len(name) - 0.29, "\n".join(name), transform=axis.get_yaxis_transform(),
                  va="top", fontsize=8)  # fmt: skip
        axis.plot([row.constant] * 2, [end - 0.28, end], color=GREY, ls="--", lw=1, zorder=0)
        for index, (_, runs) in enumerate(row.frame.groupby("pretraining", sort=True)):
            axis.plot(runs["score"], [end - 0.18] * len(runs), MARKERS[index % len(MARKERS)], color="black",
                      fillstyle="none", ms=5, mew=0.8, clip_on=False)  # fmt: skip
        axis.plot([row.estimate.low, row.estimate.high], [end - 0.06] * 2, color="black", lw=1)
        axis.plot([row.estimate.mean] * 2, [end - 0.1, end - 0.02], color="black", lw=2.5)
        axis.axhline(end, color=GREY, lw=0.3)
    shown = np.concatenate([[row.constant, *row.frame["score"]] for row in rows])
    low, high = np.nanmin(shown), np.nanmax(shown)
    margin = 0.06 * (high - low) or 1.0
    axis.set(xlim=(low - margin, high + margin), ylim=(bottom, 0.0), yticks=[])
    axis.spines["left"].set_visible(False)
    return figure


def _reliability(title: str, runs: Sequence[Mapping[str, Array]]) -> Figure:
    """Returns a panel with the accuracy at each confidence, of the predictions of all runs together."""
    sure, right = zip(*(confidences(run["logits"], run["labels"]) for run in runs), strict=True)
    bins = reliability(np.concatenate(sure), np.concatenate(right))
    error = f"pooled ECE {100 * bins.error:.1f} %"
    figure, axis = _axis([*_wrap(title), error], 2.2, below=0.4, left=0.5)
    middle = (np.arange(NUM_BINS) + 0.5) / NUM_BINS
    axis.bar(middle, bins.count / bins.count.sum(), 1 / NUM_BINS, color="none", edgecolor=GREY, hatch="//", lw=0.5)
    axis.plot([0, 1], [0, 1], "--", color=GREY, lw=0.8)
    axis.plot(bins.confidence, bins.accuracy, "o-", color="black", ms=4, lw=1)
    axis.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy, share of examples")
    return figure


def isotropy(
    path: Path, title: str, variance: Mapping[str, Array], stds: Mapping[str, Array], shares: Mapping[str, Array],
    correlations: Mapping[str, Array],
) -> None:  # fmt: skip
    """Draws IsoBN's Figures 7, 4, 3 and 5 for one model; each argument has entries by name: "before", "after", ...

    Args:
        variance: EV_k (Eq. 9).
        stds: (D,) standard deviation of each dimension.
        shares: share of the logits' variance of each principal component.
        correlations: (D, D) |Pearson|, re-ordered.
    """
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    figure.suptitle(title)
    (left, middle, right), below = figure.subplots(2, 3)
    for (name, values), line in zip(variance.items(), LINES, strict=False):
        left.plot(range(1, 1 + len(values[:50])), values[:50], linestyle=line, color="black", label=name)
    left.set(title="Explained variance", xlabel="k", ylabel="EV$_k$", ylim=(0, 1.02))
    left.legend()
    logs = {name: np.log10(np.maximum(values, 1e-10)) for name, values in stds.items()}
    edges = np.linspace(min(v.min() for v in logs.values()) - 0.05, max(v.max() for v in logs.values()) + 0.05, 40)
    for (name, values), line in zip(logs.items(), LINES, strict=False):
        middle.hist(values, bins=edges, histtype="step", linestyle=line, color="black", label=name)
    middle.set(title="Standard deviation of the dimensions", xlabel="log$_{10}$ of it", ylabel="dimensions")
    middle.legend()
    for index, (name, values) in enumerate(shares.items()):
        heights = [100 * values[:top_k].sum() for top_k in (1, 5, 30)]
        bars = right.bar(np.arange(3) + 0.4 * (index - (len(shares) - 1) / 2), heights, 0.4, label=name,
                         color=str(0.9 - 0.3 * index), edgecolor="black", hatch=HATCHES[index])  # fmt: skip
        right.bar_label(bars, fmt="%.0f")
    right.set(title="Logit variance by component", ylabel="% of it", ylim=(0, 125),
              xticks=range(3), xticklabels=["top 1", "top 5", "top 30"])  # fmt: skip
    right.legend(loc="upper left", ncols=2)
    for panel, (name, matrix) in zip(below, correlations.items(), strict=False):
        image = panel.imshow(matrix, cmap="Greys", vmin=0, vmax=1)
        panel.set(title=f"|Pearson| between dimensions, {name}", xticks=[], yticks=[])
    figure.colorbar(image, ax=below[len(correlations) - 1])
    for panel in below[len(correlations) :]:
        panel.axis("off")
    figure.savefig(path, dpi=110)


def layers(path: Path, title: str, rows: Mapping[str, Sequence[float] | Array], ylabel: str) -> None:
    """Draws HIRE's Figures 2 and 3: importance of the layers (layers + 1,) by task or example; `ylabel` says which."""
    table = np.array(list(zip_longest(*rows.values(), fillvalue=np.nan)), dtype=float).T  # smaller models end earlier
    width = table.shape[1]
    figure = Figure(figsize=(3 + 0.45 * width, 1.6 + 0.28 * len(rows)), layout="constrained")
    panel = figure.subplots()
    image = panel.imshow(table, cmap="Greys", aspect="auto")
    panel.set(title=title, xlabel="layer (0: the embeddings)", ylabel=ylabel, xticks=range(width),
              yticks=range(len(rows)), yticklabels=list(rows))  # fmt: skip
    figure.colorbar(image, ax=panel, label="importance")
    figure.savefig(path, dpi=110)


def facets(path: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Draws "cosines" (K, K) and "mean cosine" of facets: a row for each model, a column for each state."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    figure = Figure(figsize=(2.6 * len(columns) + 1, 2.7 * len(rows) + 0.3), layout="constrained")
    panels = figure.subplots(len(rows), len(columns), squeeze=False)
    for line, (label, row) in zip(panels, rows.items(), strict=True):
        line[0].set_ylabel(label, fontsize=8)
        for panel, name in zip(line, columns, strict=True):
            panel.set(xticks=[], yticks=[])
            if name in row:
                image = panel.imshow(row[name]["cosines"], cmap="Greys", vmin=0, vmax=1)
                panel.set_title(f"{name}\nmean cosine {row[name]['mean cosine']:.2f}", fontsize=9)
                for (i, j), value in np.ndenumerate(np.array(row[name]["cosines"])):
                    color = "white" if value > 0.6 else "black"
                    panel.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
    figure.colorbar(image, ax=panels)
    figure.savefig(path, dpi=110)
