"""Draws docs/images/method.svg, the method in one figure.

python tools/method_figure.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "method.svg"
FACET = {"facecolor": "#1f4e79", "color": "white"}  # dark, light and hatched: readable without colours, too
TEXT = {"facecolor": "#e4e4e4"}
INSERTED = {"facecolor": "#f2b66d", "hatch": "////"}
LOSS = {"facecolor": "white", "linewidth": 2.2, "rounded": True, "weight": "bold"}
PLAIN = {"facecolor": "white"}


def box(axes: Axes, x: float, y: float, width: float, height: float, label: str, **style: Any) -> None:
    """Draws a labelled box whose lower left corner is (x, y)."""
    shape = "round,pad=0,rounding_size=0.12" if style.get("rounded") else "square,pad=0"
    keys = ("facecolor", "hatch", "linewidth", "linestyle")
    looks = {"linewidth": 1.0} | {key: style[key] for key in keys if key in style}
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, edgecolor="black", **looks))
    back = {"facecolor": "#f2b66d", "edgecolor": "none", "pad": 1.0} if "hatch" in style else None
    axes.text(
        x + width / 2, y + height / 2, label, ha="center", va="center", fontsize=style.get("size", 8.5), bbox=back,
        color=style.get("color", "black"), weight=style.get("weight", "normal"),
    )  # fmt: skip


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    """Draws an arrow."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "black", "lw": 1.1} | style)


def note(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Writes text that begins at (x, y)."""
    axes.text(x, y, text, fontsize=8.5, va="center", **style)


def draw_example(axes: Axes) -> None:
    """Draws a document, its three parts and the segments of a part."""
    note(axes, 0, 4.1, "One document")
    box(axes, 0, 3.3, 10, 0.55, "sentences, from the first to the last", **TEXT)
    for name, x in (("A", 1.4), ("B", 3.9), ("C", 6.4)):
        box(axes, x, 2.05, 2.3, 0.65, f"part {name}", **PLAIN, weight="bold")
        arrow(axes, (x + 1.15, 3.3), (x + 1.15, 2.72))
    note(axes, 0, 1.45, "Each part has two segments. With probability 1/2 they are swapped:")
    tokens = [("[CLS]", 1.1, PLAIN), ("[C1] ... [CK]", 2.2, FACET), ("segment", 1.8, TEXT), ("[SEP]", 0.9, PLAIN),
              ("segment", 1.8, TEXT), ("[SEP]", 0.9, PLAIN)]  # fmt: skip
    left = 0.0
    for label, width, style in tokens:
        box(axes, left, 0.45, width, 0.6, label, **style)
        left += width + 0.1


def draw_encoder(axes: Axes) -> None:
    """Draws the encoder with its inserted layers, and the losses of a single part."""
    columns = [("[CLS]", 0.0, 1.0, PLAIN), ("[C1]", 1.2, 1.0, FACET), ("...", 2.3, 0.6, FACET),
               ("[CK]", 3.0, 1.0, FACET), ("text, 15 % masked", 4.2, 5.8, TEXT)]  # fmt: skip
    for label, x, width, style in columns:
        box(axes, x, 0.0, width, 0.5, label, **style)
        arrow(axes, (x + width / 2, 0.5), (x + width / 2, 0.75))
    for number, y in enumerate((0.75, 2.15, 3.55)):
        box(axes, 0, y, 10, 0.6, f"transformer layers, third {number + 1} of 3 (attention between all tokens)", **PLAIN)
        if number < 2:
            box(axes, 1.2, y + 0.75, 2.8, 0.5, r"$W_{l,1}\ \ldots\ W_{l,K}$", **INSERTED)
            note(axes, 4.2, y + 1.0, "inserted linear layers, at the facets only", style="italic")
    box(axes, 1.2, 4.4, 2.8, 0.5, r"$h_1\ \ldots\ h_K$", **FACET)
    box(axes, 4.2, 4.4, 5.8, 0.5, "hidden states of the text", **TEXT)
    losses = (("SO", 0.0, 1.8, 1.5), ("MCQT", 2.2, 1.8, 3.1), ("MLM", 4.4, 2.5, 5.65), ("TF-IDF", 7.3, 2.5, 8.55))
    for label, x, width, _ in losses:
        box(axes, x, 5.3, width, 0.55, label, **LOSS)
    for *_, x in losses:
        arrow(axes, (x, 4.9), (x, 5.3))


def draw_mcqt(axes: Axes) -> None:
    """Draws what MCQT compares: the facets of A with those of B and of the negatives."""
    note(axes, 0, 5.3, r"$c_k = \mathrm{LayerNorm}(\mathrm{GELU}(W_{O,k}\,h_k))$, the facets of a part")
    box(axes, 0, 2.6, 2.0, 0.9, "A\n" + r"$c_1 \ldots c_K$", **FACET)
    candidates = [(4.35, "B of the same example", "right"), (3.25, "B of the other examples", "negatives"),
                  (2.15, "C of the same example", "hard negative"),
                  (1.05, "C of the other examples", "negatives")]  # fmt: skip
    for y, label, role in candidates:
        line = "-" if role == "right" else "--"
        box(axes, 3.9, y, 3.7, 0.65, label, **PLAIN, linestyle=line, linewidth=2.2 if role == "right" else 1.0)
        arrow(axes, (2.0, 3.05), (3.9, y + 0.32), linestyle=line)
        note(axes, 7.75, y + 0.32, role, style="italic")
    note(axes, 0, 0.3, "The same again from C to B, with A as the hard negative.")


def draw_fine_tuning(axes: Axes) -> None:
    """Draws the re-parameterised sum that a label is read from."""
    for number, (label, x) in enumerate((("$h_1$", 0.6), ("...", 3.1), ("$h_K$", 5.6))):
        box(axes, x, 0.5, 1.8, 0.6, label, **FACET)
        if number != 1:
            index = "1" if number == 0 else "K"
            box(axes, x - 0.5, 1.75, 2.8, 0.75, rf"$(W_{{O,{index}}}-\overline{{W}})\,h_{index}+b_{index}$", **INSERTED)
            arrow(axes, (x + 0.9, 1.1), (x + 0.9, 1.75))
            arrow(axes, (x + 0.9, 2.5), (4.0, 3.2))
    box(axes, 3.1, 3.2, 1.8, 0.6, "sum", **PLAIN)
    arrow(axes, (4.0, 3.8), (4.0, 4.25))
    box(axes, 2.6, 4.25, 2.8, 0.6, "linear layer", **PLAIN)
    arrow(axes, (5.4, 4.55), (6.4, 4.55))
    box(axes, 6.4, 4.2, 1.9, 0.7, "label", **LOSS)
    note(axes, 6.6, 3.2, r"$\overline{W}$: the mean of all $W_{O,k}$")


def main() -> None:
    """Draws the figure."""
    plt.rcParams.update({"svg.hashsalt": "method", "font.family": "DejaVu Sans", "mathtext.fontset": "dejavusans"})
    panels = {
        "1  An example: three consecutive parts": (draw_example, (0, 4.4)),
        "2  A part in the encoder": (draw_encoder, (-0.1, 6.1)),
        "3  MCQT: which part follows?": (draw_mcqt, (0, 5.6)),
        "4  Fine-tuning: the re-parameterised sum": (draw_fine_tuning, (0.2, 5.3)),
    }
    figure, grid = plt.subplots(2, 2, figsize=(10.4, 7.4), layout="constrained", height_ratios=(1.15, 1))
    for axes, (title, (draw, limits)) in zip(grid.flat, panels.items(), strict=True):
        axes.set(xlim=(-0.1, 10.1), ylim=limits)
        axes.set_title(title, loc="left", fontsize=11, weight="bold")
        axes.axis("off")
        draw(axes)
    figure.savefig(PICTURE, metadata={"Date": None})  # a white ground: it stays readable on a dark page


if __name__ == "__main__":
    main()
