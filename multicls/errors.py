"""Errors that a user can put right, and how a command reports them."""

import difflib
import multiprocessing
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

OUT_OF_MEMORY = (
    "hint: the GPU has too little memory for a pass. Pretraining takes less with a smaller --micro_batch_size "
    "(a multiple of --train.negatives_group, so lower that, too), a smaller --data.seq_length, or "
    "--train.activation_checkpointing true; fine-tuning with a smaller --batch_size or --max_length."
)


class UserError(Exception):
    """Bad settings or data: what is wrong, where, and how to put it right, one complete message a problem.

    The command prints each problem on its own line, without a traceback, and exits with 2. `is_shared` is True if all
    ranks raise it together: then one rank of each machine prints it.
    """

    is_shared = False

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def did_you_mean(name: str, known: Iterable[str], listed: bool = True, cutoff: float = 0.6) -> str:
    """Returns `" Did you mean 'x'?"` with the nearest known name; if none is near, a list of all or ""."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    if nearest:
        return f" Did you mean '{nearest[0]}'?"
    return f" Known: {', '.join(known)}." if known and listed else ""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def print_stderr(line: str) -> None:
    """Writes a line to stderr in one call: ranks share stderr, and `print` may write the newline apart."""
    print(f"{line}\n", end="", file=sys.stderr, flush=True)


def run_command(main: Callable[[Sequence[str] | None], int | None]) -> None:
    """Runs `main(None)`, which reads sys.argv, and ends the process with the project's exit codes.

    0: done; 2: bad settings or data (`UserError`); 130: interrupted; 1: losses that are not finite
    (`FloatingPointError`), or a crash, with a traceback. The process ends without its exit handlers: they would wait
    for child processes and other ranks, and a thread of gloo that is still busy then aborts a run that went well.
    """
    try:
        code = main(None) or 0
        print(end="", flush=True)
    except SystemExit:  # of --help
        _kill_children()
        raise
    except BaseException as error:
        code = 2 if isinstance(error, UserError) else 1
        if isinstance(error, KeyboardInterrupt):
            code = 128 + signal.SIGINT
        try:
            _report(error)
            _kill_children()
        finally:  # also where stderr is closed or memory is short
            os._exit(code)
    _kill_children()
    with suppress(OSError, ValueError):  # stderr is closed
        print(end="", file=sys.stderr, flush=True)
    os._exit(code)


def _report(error: BaseException) -> None:
    """Prints a line for each problem of an error of the user, or a traceback.

    Before ranks meet, each of them checks the same settings, so the first rank of each machine reports for all.
    Afterwards a rank may fail alone, while the others lose their connection to it: then it reports by itself.
    """
    with suppress(OSError, ValueError):  # stdout is closed
        print(end="", flush=True)
    stdout = select.poll()
    stdout.register(1, 0)
    is_training = "RANK" in os.environ  # a closed pipe must not end it silently
    if isinstance(error, BrokenPipeError) and stdout.poll(0) and not is_training:  # `| head`
        return
    if isinstance(error, (UserError, FloatingPointError)):
        may_be_alone = isinstance(error, UserError) and not error.is_shared and _ranks_have_met()
        if may_be_alone or os.environ.get("LOCAL_RANK", "0") == "0":
            rank = f"rank {os.environ['RANK']}: " if may_be_alone else ""
            for problem in getattr(error, "problems", [error]):
                print_stderr(f"error: {rank}{problem}")
    elif not isinstance(error, KeyboardInterrupt):
        sys.excepthook(type(error), error, error.__traceback__)
        if type(error).__name__ == "OutOfMemoryError":  # torch's; its import would take seconds
            print_stderr(OUT_OF_MEMORY)


def _ranks_have_met() -> bool:
    """Returns True if this process has joined a group of several ranks. Imports no torch."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_initialized() and dist.get_world_size() > 1


def _kill_children() -> None:
    """Kills the processes that multiprocessing has started: its exit handler would wait for them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a loader dies
    for child in multiprocessing.active_children():
        child.kill()
