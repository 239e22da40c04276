"""What a person sees while a command works: lines with a clock that fit 120 columns, and a bar on a terminal."""

from __future__ import annotations

import logging
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from multicls.errors import print_stderr
from multicls.words import duration

WIDTH = 120  # columns
CLOCK = "%H:%M:%S"
LINE_EVERY = 10.0  # seconds between two lines of progress
REDRAW_EVERY = 0.2  # seconds between two drawings of a bar


def fold(text: str, width: int = WIDTH) -> str:
    """Returns the text in lines of at most `width` columns; words, paths and flags stay whole."""
    how: dict[str, Any] = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(textwrap.fill(line, width, **how) for line in text.splitlines())


def with_clock(text: str) -> str:
    """Returns the text after the time of day, in lines of at most 120 columns."""
    return fold(f"{time.strftime(CLOCK)} {text}")


def print_line(text: str) -> None:
    """Prints the text after the time of day, at once."""
    print(with_clock(text), flush=True)


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_stderr(with_clock(self.format(record)))  # to the stderr of the moment: a bar puts its own there


def show_log(name: str, level: int) -> None:
    """Shows the messages of the logger `name` on stderr, with the clock; of other loggers only warnings."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_Handler()])
    logging.getLogger(name).setLevel(level)


class Pulse:
    """Tells when the next line of progress is due: every 10 seconds."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Starts the wait for the next line anew."""
        self._last = time.monotonic()

    def due(self) -> bool:
        """Returns True if it is time for a line, and starts the wait anew."""
        if time.monotonic() - self._last < LINE_EVERY:
            return False
        self.reset()
        return True


class Progress:
    """Shows how far some work is: a bar on a terminal, else a line every 10 seconds.

    Args:
        done: Amount that was done before.
        unit: Unit of the amounts, for instance "steps"; "MB" means that they are bytes, and adds the speed.
        say: Receives the lines; None: no lines, the caller has its own.
        shown: False for ranks that show nothing.
    """

    def __init__(
        self,
        what: str,
        total: float,
        *,
        done: float = 0,
        unit: str,
        say: Callable[[str], object] | None = None,
        shown: bool = True,
    ) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done = self._before = done
        self._say = say if shown else None
        self._began = self._drawn = time.monotonic()
        self._pulse, self._bar = Pulse(), _open_bar(what, total) if shown and sys.stderr.isatty() else None

    @property
    def on_terminal(self) -> bool:
        """True if there is a bar."""
        return self._bar is not None

    def update(self, done: float, note: str = "") -> None:
        """Shows that `done` of the total is done; `note` comes first in the line."""
        self.done = done
        now = time.monotonic()
        if self._bar is not None and now - self._drawn >= REDRAW_EVERY:
            self._drawn = now
            self._bar.update(self._bar.task_ids[0], completed=done, line=self.line(note), refresh=True)
        elif self._bar is None and self._say is not None and self._pulse.due():
            self.tell(note)

    def tell(self, note: str = "") -> None:
        """Says a line now."""
        if self._say is not None:
            self._say(f"{self.what}: {self.line(note)}")

    def line(self, note: str = "") -> str:
        """Returns amount, speed and remaining time in words."""
        speed = (self.done - self._before) / max(time.monotonic() - self._began, 1e-9)
        if self.unit == "MB":
            amount = f"{self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB, {speed / 1e6:,.1f} MB/s"
        else:
            amount = f"{self.done:,} of {self.total:,} {self.unit}"
        parts = [note] * bool(note) + [amount]
        if speed > 0 and self.done < self.total:
            parts.append(f"eta {duration((self.total - self.done) / speed)}")
        return ", ".join(parts)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Takes the bar away while the block shows one of its own."""
        self.close()
        yield
        if self._bar is not None:
            _start(self._bar)

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()


def _open_bar(what: str, total: float) -> Any:
    """Returns a bar of rich on stderr. Lines printed meanwhile stand above it; a redirected stdout is left alone."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(file=sys.stderr)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[line]}")
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
    bar.add_task(what, total=total, line="")
    _start(bar)
    return bar


def _start(bar: Any) -> None:
    bar.start()
    bar.console.show_cursor(True)  # a process that is killed could not bring it back


def table_console() -> Any:
    """Returns a console of rich for tables on stdout, of at most 120 columns, that takes all text as it is."""
    from rich.console import Console

    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    return Console(markup=False, highlight=False, emoji=False, width=width)
