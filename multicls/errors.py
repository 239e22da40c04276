"""Errors that a user can put right, and how a command line reports them."""

from __future__ import annotations

import contextlib
import difflib
import multiprocessing
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, TextIO


class UserError(Exception):
    """Bad settings or data: what is wrong, where, and how to put it right.

    The command line prints every problem on its own line, without a traceback, and exits with 2.

    Args:
        *problems: one complete message each.
        on_all_ranks: True if all ranks raise the same error, so that one of them tells it.
    """

    def __init__(self, *problems: str, on_all_ranks: bool = False) -> None:
        super().__init__("\n".join(problems))
        self.problems, self.on_all_ranks = problems, on_all_ranks


def did_you_mean(name: str, known: Iterable[str], listed: bool = True) -> str:
    """Returns `" Did you mean 'x'?"` with the known name nearest to `name`; if none is near, a list of all or ""."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if nearest:
        return f" Did you mean '{nearest[0]}'?"
    return f" Known: {', '.join(known)}." if known and listed else ""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def print_stderr(line: str) -> None:
    """Writes a line to stderr in one call: `print` writes the newline apart if unbuffered, and ranks share stderr."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def run_command(main: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None = None) -> None:
    """Runs `main(argv)` and ends the process with the project's exit codes.

    0: done, 2: bad settings or data (`UserError`), 130: interrupted, 1: crash, or losses that
    are not finite (`FloatingPointError`), a lost rank (`ConnectionAbortedError`) or a closed stdout, all three told
    without a traceback.

    An exception ends the process without exit handlers: they wait for child processes, threads and other ranks.
    """
    try:
        code = main(argv) or 0
        print(end="", flush=True)
    except SystemExit:  # of --help
        raise
    except BaseException as error:
        _end(error)
    finally:
        _kill_children()
    sys.exit(code)


def _end(error: BaseException) -> NoReturn:
    """Reports the error and ends the process at once."""
    code = 2 if isinstance(error, UserError) else 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    try:
        _flush(sys.stdout)
        if isinstance(error, BrokenPipeError) and _has_no_reader(sys.stdout):
            print_stderr("error: nothing reads the output any more (stdout is closed)")
        elif isinstance(error, ConnectionAbortedError):  # every rank that is left tells
            print_stderr(f"error: {error}")
        elif isinstance(error, (UserError, FloatingPointError)):
            for problem in getattr(error, "problems", [error]) if _is_to_tell(error) else ():
                print_stderr(f"error: {problem}")
        elif not isinstance(error, KeyboardInterrupt):
            sys.excepthook(type(error), error, error.__traceback__)
        _flush(sys.stderr)
        _kill_children()
    finally:  # also where stderr is closed or memory is short
        os._exit(code)


def _is_to_tell(error: BaseException) -> bool:
    """Returns True on the ranks that print an error: once for all ranks that agree on it, else once for each node."""
    rank, local_rank = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0")
    if rank == "0" or "DataLoader worker" in str(error):  # a loader's error is of its rank alone
        return True
    return isinstance(error, UserError) and not error.on_all_ranks and local_rank == "0"


def _flush(stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(end="", file=stream, flush=True)


def _has_no_reader(stream: TextIO) -> bool:
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return bool(poll.poll(0))


def _kill_children() -> None:
    """Kills the processes that multiprocessing has started: its exit handler would wait for them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error when a loader process dies
    for child in multiprocessing.active_children():
        child.kill()
