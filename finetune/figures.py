"""The figures of finetune/report.py and finetune/analyze.py, readable in black and white."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from finetune.calibration import EDGES

if TYPE_CHECKING:
    from finetune.report_tables import Group

Array = np.ndarray[Any, np.dtype[Any]]
LINES = ["k-", "k--", "k:", "k-."]


def runs(groups: Sequence[Group]) -> Figure:
    """Draws each group's runs, the mean with its 95 % interval, and the baseline."""
    figure = Figure(figsize=(7, 1.2 + 0.42 * len(groups)), layout="constrained")
    axis = figure.subplots()
    for row, group in enumerate(groups):
        scores = 100 * group.runs["score"]
        axis.plot(scores, [row] * len(scores), "o", color="black", fillstyle="none")
        axis.plot(100 * np.array(group.interval), [row + 0.25] * 2, "-", color="black", lw=1)
        axis.plot([100 * group.estimate.mean], [row + 0.25], "|", color="black", ms=10, mew=2)
        axis.plot([100 * group["baseline"]], [row], "x", color="0.5")
    labels = [f"{g['system']}\n{g['task']}, {g['train_size']}" for g in groups]
    axis.set(yticks=range(len(groups)), xlabel="score, percent", ylim=(len(groups) - 0.5, -0.6))
    axis.set_yticklabels(labels, fontsize=7)
    return figure


def reliability(groups: Sequence[Group]) -> Figure:
    """Draws the accuracy by confidence of classifiers, and the share of the examples in each bin."""
    rows = math.ceil(len(groups) / 3)
    figure = Figure(figsize=(7, 2.5 * rows), layout="constrained")
    panels = figure.subplots(rows, 3, squeeze=False).flat
    for group, panel in zip(groups, panels, strict=False):
        bins = group.bins
        panel.plot([0, 1], [0, 1], "--", color="0.5", lw=0.8)
        panel.bar([bin.mid for bin in bins.index], bins["share"], 1 / len(EDGES), color="0.85")
        panel.plot(bins["confidence"], bins["accuracy"], "o-", color="black", ms=3, lw=1)
        panel.set(xlim=(0, 1), ylim=(0, 1))
        title = f"{group['system']}, {group['task']}\nECE {100 * group.ece:.1f} %"
        panel.set_title(title, fontsize=7)
    for panel in panels:
        panel.axis("off")
    return figure


def isotropy(
    path: Path,
    title: str,
    variance: Mapping[str, Array],
    stds: Mapping[str, Array],
    correlations: Mapping[str, Array],
) -> None:
    """Draws IsoBN's Figures 7 (EV_k), 4 (standard deviations, (D,)) and 5 (|Pearson|, (D, D)).

    Each argument has entries by name: "before" and "after" fine-tuning, or more.
    """
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    figure.suptitle(title)
    (left, right), below = figure.subplots(2, 2)
    curves = pd.DataFrame({name: pd.Series(ev[:50]) for name, ev in variance.items()})
    curves.index += 1
    curves.plot(ax=left, style=LINES, title="Explained variance", xlabel="k", ylim=(0, 1.02))
    logs = [np.log10(np.maximum(std, 1e-10)) for std in stds.values()]
    right.hist(logs, 40, histtype="step", color=["black", "0.6"], label=list(stds))
    right.set(title="Standard deviation of the dimensions", xlabel="log10 of it")
    right.legend()
    for panel, (name, matrix) in zip(below, correlations.items(), strict=True):
        image = panel.imshow(matrix, cmap="Greys", vmin=0, vmax=1)
        panel.set(title=f"|Pearson| between dimensions, {name}", xticks=[], yticks=[])
    figure.colorbar(image, ax=below[1])
    figure.savefig(path, dpi=110)


def layers(path: Path, title: str, importance: Array) -> None:
    """Draws HIRE's Figure 2: the importance of the layers for each example, (rows, layers + 1)."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    panel = figure.subplots()
    image = panel.imshow(importance, cmap="Greys", aspect="auto")
    panel.set(title=title, xlabel="layer (0: the embeddings)", ylabel="example")
    figure.colorbar(image, ax=panel, label="importance")
    figure.savefig(path, dpi=110)
