"""How a command ends: its exit code, its last words, and no child process that keeps it."""

import os
import re
import subprocess
import sys

import pytest

from multicls.errors import did_you_mean
from multicls.files import REPOSITORY
from tests.processes import completed, free_ports

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
    f"{ON_RANK_1}UserError('a')": (2, ""),  # ranks that have not met fail alike: the first reports
    "raise FloatingPointError('a')": (1, "error: a\n"),
    "raise MemoryError": (1, "Traceback .*MemoryError\n"),
    "import torch; raise torch.OutOfMemoryError('a')": (
        1,
        "Traceback .*OutOfMemoryError: a\nhint: .*--micro_batch_size.*--data.seq_length.*\n",
    ),
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


RANKS = """
import os, sys
from datetime import timedelta
from torch import distributed as dist
from multicls.distributed import on_rank_0
from multicls.errors import UserError, run_command

def fail():
    raise UserError("a", "b")

def main(argv):
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    if sys.argv[1] == "shared":
        on_rank_0(fail)
    elif dist.get_rank() == 1:
        fail()
    dist.barrier()  # rank 0 loses rank 1

run_command(main)
"""


@pytest.mark.parametrize("kind", ["shared", "alone"])
def test_two_ranks_print_a_shared_error_once_and_another_with_its_rank(kind: str) -> None:
    """The second rank of a machine is silent about an error of both, but reports its own."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    variables["WORLD_SIZE"] = "2"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, kind],
            cwd=REPOSITORY,
            env=os.environ | variables | {"RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    first, second = (process.communicate(timeout=2 * LIMIT)[1] for process in processes)
    codes = [process.returncode for process in processes]
    if kind == "shared":
        assert (codes, first, second) == ([2, 2], "error: a\nerror: b\n", "")
    else:
        assert codes == [1, 2] and "RuntimeError" in first, first
        assert second == "error: rank 1: a\nerror: rank 1: b\n"


def test_did_you_mean_names_the_nearest_or_lists_all() -> None:
    known = ["zero_optimization", "optimizer"]
    assert did_you_mean("zero_optimisation", known) == " Did you mean 'zero_optimization'?"
    assert did_you_mean("xyz", ["beta", "alpha"]) == " Known: alpha, beta."
    assert did_you_mean("xyz", ["alpha"], listed=False) == did_you_mean("xyz", []) == ""
