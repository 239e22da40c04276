"""Commands run to their end, waiting for what happens instead of for a time, free ports, and living processes."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

LIMIT = 900.0  # seconds; only a hang takes as long


def program(name: str) -> str:
    """Returns the path of a command that is installed beside this Python."""
    return str(Path(sys.executable).with_name(name))


def completed(words: Sequence[object], **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; returns its exit code and output. `options` are those of `subprocess.run`."""
    command = [str(word) for word in words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


FORKS = """
import json, os, runpy, sys
import pydantic_settings, yaml
heavy = {"torch", "transformers", "deepspeed", "datasets", "pandas", "distributed"}
end = os._exit
os._exit = lambda code: (print("heavy:", sorted(heavy & set(sys.modules)), flush=True), end(code))
for words in json.load(sys.stdin):
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), end="\\0", flush=True)
        continue
    os.dup2(1, 2)
    sys.argv = words
    try: runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as left: os._exit(left.code or 0)
"""


def answers_of(commands: Iterable[Sequence[str]]) -> list[str]:
    """Runs scripts in forks of one process that has imported what all settings need.

    Returns what each prints, then a line with the frameworks that it has imported, then its exit code.
    """
    options: Any = {"cwd": Path(__file__).parents[1], "input": json.dumps(list(commands))}
    return completed([sys.executable, "-c", FORKS], **options).stdout.split("\0")


def until(condition: Callable[[], object], what: Callable[[], str] = lambda: "") -> None:
    """Returns once `condition()` is true; fails with the text of `what` if it never is."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"waited {LIMIT} s in vain; {what()}"
        time.sleep(0.02)


class IdleClock:
    """Counts the seconds that an idle machine would have needed, so that limits hold on a busy one as well.

    Each second counts as the share of a core that a process has at that time.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = time.monotonic()

    def tick(self, counts: bool = True) -> None:
        """Adds the time since the last tick if it `counts`."""
        now, last = time.monotonic(), self._last
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
        self._last = now
        if counts:
            self.seconds += (now - last) * min(1.0, len(os.sched_getaffinity(0)) / max(running, 1))


def free_ports(count: int) -> list[int]:
    """Returns ports that nothing listens on, below those that the kernel hands out.

    A port of the kernel's may be another process's before ours listens on it: gloo alone takes several a rank.
    """
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            found.add(port)
    return sorted(found)


def sessions() -> dict[int, int]:
    """Returns the session id of each living process, by process id."""
    return {number: int(stat[3]) for number, stat in _stats().items()}


def children(parent: int) -> list[int]:
    """Returns the process ids of a process's living children."""
    return [number for number, stat in _stats().items() if int(stat[1]) == parent]


def _stats() -> dict[int, list[str]]:
    """Returns state, parent, group and session of each living process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            stat = path.read_text().rpartition(")")[2].split()[:4]
            if stat[0] != "Z":
                found[int(path.parent.name)] = stat
    return found
