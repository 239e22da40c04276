"""Lines with a clock, numbers in words, and progress as a bar on a terminal or as lines elsewhere."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from multicls.console import count, duration, print_line, print_summary


def test_numbers_in_words() -> None:
    assert [duration(s) for s in (0, 59.6, 754, 11_520)] == ["0s", "1m00s", "12m34s", "3h12m"]
    assert [count(n, "document") for n in (0, 1, 2000)] == [
        "0 documents",
        "1 document",
        "2,000 documents",
    ]


def test_lines_have_the_time_and_summaries_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("fresh run")
    assert re.fullmatch(r"\d\d:\d\d:\d\d fresh run\n", capsys.readouterr().out)
    print_summary([("model", Path("a/b")), ("best score", 3)], "python x.py")
    assert capsys.readouterr().out == "model:      a/b\nbest score: 3\nnext:       python x.py\n"


PROGRAM = """
from multicls.console import Progress, print_line
with Progress(4, "step", "training") as progress:
    progress.update(1)
    print_line("a line")
    import time; time.sleep(0.3)
    progress.update(1)
print("the end")
"""


def test_a_terminal_gets_a_bar_with_the_lines_above_it() -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))  # rows, columns
    done = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=follower, stderr=follower)
    os.close(follower)
    shown = b""
    with open(leader, "rb", buffering=0) as terminal:
        try:
            while block := terminal.read(4096):
                shown += block
        except OSError:  # how Linux tells the end of a terminal
            pass
    text = shown.decode()
    assert done.wait() == 0, text
    assert re.search(r"training:.*1/4", text) and "2/4" in text
    assert re.search(r"\r\d\d:\d\d:\d\d a line\r?\n", text) and "the end" in text
