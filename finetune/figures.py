"""The two figures of finetune/report.py, readable in black and white."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from finetune.report_tables import Group

PANELS = 12  # reliability diagrams on a page


def draw_runs(groups: Sequence[Group]) -> str:
    """Draws each group's runs, the mean with its 95 % interval, and the baseline; returns SVG in base64."""
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
    return _svg(figure)


def draw_calibration(groups: Sequence[Group]) -> str:
    """Draws the accuracy by confidence of the first classifiers; returns SVG in base64, "" without classifiers."""
    drawn = [(group, group.bins) for group in groups if group.bins is not None][:PANELS]
    if not drawn:
        return ""
    rows = math.ceil(len(drawn) / 3)
    figure = Figure(figsize=(7, 2.5 * rows), layout="constrained")
    for number, (group, bins) in enumerate(drawn, 1):
        panel = figure.add_subplot(rows, 3, number, xlim=(0, 1), ylim=(0, 1))
        panel.plot([0, 1], [0, 1], "--", color="0.5", lw=0.8)
        panel.bar([bin.mid for bin in bins.index], bins["share"], 1 / 15, color="0.85")
        panel.plot(bins["confidence"], bins["accuracy"], "o-", color="black", ms=3, lw=1)
        title = f"{group['system']}, {group['task']}\nECE {100 * group.ece:.1f} %"
        panel.set_title(title, fontsize=7)
    return _svg(figure)


def _svg(figure: Figure) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return base64.b64encode(file.getvalue()).decode()
