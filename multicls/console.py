"""Lines that a person reads while a command works: clock, progress, summary, numbers in words."""

import sys
import time
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def print_line(text: str) -> None:
    """Prints the text after the time of day, at once and above a progress bar."""
    line = f"{time.strftime('%H:%M:%S')} {text}"
    if sys.stderr.isatty():
        tqdm.write(line)
    else:
        print(line, flush=True)


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
    """Returns a tqdm bar; without a terminal it is drawn every 10 seconds.

    `total` is 0 if it is not known. `options` are tqdm's: `initial` units were finished before.
    """
    on_terminal = sys.stderr.isatty()
    options["mininterval"] = 0.1 if on_terminal else 10.0
    options["leave"] = not on_terminal
    return tqdm(total=total, unit=f" {unit}", desc=description, **options)
