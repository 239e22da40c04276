"""Tables of text, a header first: for the console, as Markdown and as CSV."""

import csv
from collections.abc import Sequence
from pathlib import Path

from multicls.cards import cell
from multicls.files import atomic_write

Table = Sequence[Sequence[str]]
SHOWN = 300  # characters of a cell in Markdown


def aligned(table: Table) -> list[str]:
    """Returns the lines of a table for the console."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) for row in table]


def markdown(table: Table) -> str:
    """Returns a table as Markdown; long cells are cut."""
    lines = ["| " + " | ".join(cell(text[:SHOWN]) for text in row) + " |" for row in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]])


def write_csv(path: Path, table: Table) -> None:
    """Writes a table."""
    with atomic_write(path) as file:
        csv.writer(file).writerows(table)
