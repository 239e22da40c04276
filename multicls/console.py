"""Lines that a person reads while a command works: clock, progress, verdict, summary, numbers in words."""

import sys
import time
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

COLORS = {"better": "green", "worse": "red"}  # of lines that end so


class _Lines:
    """A file that writes each state of a bar as a line of its own to stderr."""

    def write(self, text: str) -> None:
        """Writes a state."""
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Does nothing: `write` flushes."""


def print_line(text: str) -> None:
    """Prints the text after the time of day, at once and above a progress bar."""
    line = f"{time.strftime('%H:%M:%S')} {text}"
    if sys.stderr.isatty():
        tqdm.write(line)
    else:
        print(line, flush=True)


def print_verdict(lines: Iterable[str]) -> None:
    """Prints a verdict, on a terminal in color: green for better and red for worse, unless NO_COLOR is set."""
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)
    for line in lines:
        colors = [color for word, color in COLORS.items() if line.endswith(word)]
        console.print(Text(line, style=colors[0] if colors else ""))


def print_summary(made: Iterable[tuple[str, object]], next_command: str = "") -> None:
    """Prints the end of a command: what it made and where, one a line, and the next command."""
    lines = [*made, *([("next", next_command)] if next_command else [])]
    width = max((len(name) for name, _ in lines), default=0) + 1
    for name, value in lines:
        print(f"{name + ':':{width}} {value}", flush=True)


def count(number: int, noun: str) -> str:
    """Returns a number with its noun, for instance `1 document` or `2,000 documents`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def progress_bar(total: float, unit: str, description: str, **options: Any) -> Any:
    """Returns a tqdm bar; without a terminal it is a line every 30 seconds, and at the end.

    `total` is 0 if it is not known. `options` are tqdm's: `initial` units were finished before.
    """
    on_terminal = sys.stderr.isatty()
    options["leave"] = not on_terminal
    if not on_terminal:
        layout = "{desc}: {n_fmt}/{total_fmt}{unit}, {elapsed}, {remaining} left"
        if not total:
            layout = "{desc}: {n_fmt}{unit}"
        options |= {"file": _Lines(), "mininterval": 30.0, "bar_format": layout, "position": 0}
    return tqdm(total=total, unit=f" {unit}", desc=description, **options)
