"""How a command ends: its exit code, its last words, and no child process that keeps it."""

import re
import sys

import pytest

from multicls.errors import did_you_mean
from multicls.files import REPOSITORY
from tests.processes import completed

LIMIT = 60  # seconds of a command; its child would keep it for 600
COMMAND = """
import multiprocessing, os, signal, sys, time
from multicls.errors import UserError, run_command

def main(argv):
    def outlive(ready):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready.set()
        time.sleep(600)

    context = multiprocessing.get_context("fork")
    ready = context.Event()
    context.Process(target=outlive, args=(ready,), daemon=True).start()
    ready.wait()
    print("printed")
    {statement}

run_command(main)
"""
ON_RANK_1 = 'os.environ["LOCAL_RANK"] = "1"; raise '
FATES = {  # what it does, its exit code and what it writes to stderr
    "return": (0, ""),
    "return 3": (3, ""),
    "sys.exit(2)": (2, ""),
    "raise KeyboardInterrupt": (130, ""),
    "raise UserError('a', 'b')": (2, "error: a\nerror: b\n"),
    f"{ON_RANK_1}UserError('a')": (2, ""),  # one rank of a node reports it
    f"{ON_RANK_1}UserError('a DataLoader worker')": (2, "error: a DataLoader worker\n"),
    "raise FloatingPointError('a')": (1, "error: a\n"),
    "raise MemoryError": (1, "Traceback .*MemoryError\n"),
}


@pytest.mark.parametrize("streams", ["", "<&- >&- 2>&-"])
@pytest.mark.parametrize("statement", FATES)
def test_a_command_ends_with_its_code_and_its_children(statement: str, streams: str) -> None:
    """With its streams or without them."""
    command = ["bash", "-c", f'exec "$0" -c "$1" {streams}', sys.executable]
    done = completed([*command, COMMAND.format(statement=statement)], cwd=REPOSITORY, timeout=LIMIT)
    code, text = FATES[statement]
    assert done.returncode == code, done.stderr
    if not streams:
        assert done.stdout == "printed\n"
        assert re.fullmatch(text, done.stderr, re.DOTALL), done.stderr


def test_did_you_mean_names_the_nearest_or_lists_all() -> None:
    known = ["zero_optimization", "optimizer"]
    assert did_you_mean("zero_optimisation", known) == " Did you mean 'zero_optimization'?"
    assert did_you_mean("xyz", ["beta", "alpha"]) == " Known: alpha, beta."
    assert did_you_mean("xyz", ["alpha"], listed=False) == did_you_mean("xyz", []) == ""
