"""Ranks without torch: each is a small forked process that ends in its own way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from multicls.files import REPOSITORY

RANKS = """
import contextlib, os, signal, socket, sys, time
from pathlib import Path
from multicls import lifeline

how, folder = sys.argv[1], Path(sys.argv[2])
lifeline.GRACE = 0.5

class Store:
    def set(self, key, value):
        (folder / "new").write_text(value)
        (folder / "new").rename(folder / key)

    def get(self, key):
        while not (folder / key).exists():
            time.sleep(0.01)
        return (folder / key).read_bytes()

def be_rank(rank):
    if how == "strangers" and rank == 2:
        port = int(Store().get(lifeline.KEY).split()[0])
        for text in (b"", b"GET / HTTP/1.0", b"x" * 16 + b"1234"):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(text)
    line = lifeline.Lifeline(Store(), rank, 4, "127.0.0.1")
    if how == "killed" and rank == 2:
        loader = os.fork()
        if not loader:  # it outlives its rank
            os.closerange(1, 3)
            time.sleep(600)
            os._exit(0)
        (folder / "loader").write_text(str(loader))
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "ended" and rank == 0:
        os._exit(0)
    if how in ("killed", "ended"):
        time.sleep(600)
    time.sleep(0.3 * rank)
    line.leave()
    time.sleep(0.3 * (3 - rank))

ranks = []
for rank in range(4):
    ranks.append(os.fork())
    if not ranks[-1]:
        be_rank(rank)
        os._exit(0)
print([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks])
if (folder / "loader").exists():
    os.kill(int((folder / "loader").read_text()), signal.SIGKILL)  # fails if it has ended
"""


def run(how: str, folder: Path) -> tuple[str, str]:
    """Returns the exit codes of the ranks, and what they printed on stderr."""
    command = [sys.executable, "-c", RANKS, how, str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize("how", ["left", "strangers"])
def test_ranks_that_say_goodbye_may_end_at_any_time(tmp_path: Path, how: str) -> None:
    codes, told = run(how, tmp_path)
    assert codes == "[0, 0, 0, 0]" and told == ""


@pytest.mark.parametrize(("how", "victim", "code"), [("killed", 2, -9), ("ended", 0, 0)])
def test_a_rank_that_is_gone_ends_the_others(tmp_path: Path, how: str, victim: int, code: int) -> None:
    """A process that it forked may live on, and its exit code may be 0."""
    codes, told = run(how, tmp_path)
    assert codes == str([code if rank == victim else 1 for rank in range(4)])
    for rank in {0, 1, 2, 3} - {victim}:
        assert told.count(f"error: rank {rank} lost contact with rank {victim}") == 1
