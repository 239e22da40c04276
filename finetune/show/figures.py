"""The pictures of finetune/analyze.py, readable in black and white. Imports matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

matplotlib.use("Agg")

Array = np.ndarray[Any, np.dtype[Any]]
LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
HATCHES = ("", "///", "...", "xxx")


def isotropy(
    path: Path,
    title: str,
    variance: Mapping[str, Array],
    stds: Mapping[str, Array],
    shares: Mapping[str, Array],
    correlations: Mapping[str, Array],
) -> None:
    """IsoBN's Figures 7, 4, 3 and 5 for one model, each of it by name: "before", "after", ...

    EV_k; the standard deviation of every dimension; the share of the logits' variance of every principal component;
    |Pearson|, (D, D), re-ordered.
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
    """HIRE's Figures 2 and 3: importance of the layers, (layers + 1,) for each task or example; `ylabel` says which."""
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
    """Cosines between facets, "cosines" (K, K) and "mean cosine": a row for each model, a column for each state."""
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
