"""Lines with a clock, and progress as a bar on a terminal or as lines elsewhere."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys

import pytest

from multicls import console
from multicls.console import Progress, Pulse, fold, show_log, with_clock


def test_long_lines_are_folded_and_words_stay_whole() -> None:
    path = "x" * 130
    text = f"{'word ' * 40}{path}\nsecond --num_facets=3"
    folded = fold(text)
    assert folded.split() == text.split()
    assert [len(line) <= 120 or line.strip() == path for line in folded.splitlines()] == [True] * 4
    assert folded.splitlines()[1].startswith("  ") and folded.endswith("\nsecond --num_facets=3")
    assert fold("a\n\nb") == "a\n\nb"


def test_lines_have_the_time_of_day() -> None:
    assert re.fullmatch(r"\d\d:\d\d:\d\d fresh run", with_clock("fresh run"))
    assert max(map(len, with_clock("word " * 100).splitlines())) <= 120


def test_log_messages_have_the_clock_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    show_log("of_this_test", logging.INFO)
    logging.getLogger("of_this_test").info("step %d", 3)
    logging.getLogger("of_another").info("silent")
    assert re.fullmatch(r"\d\d:\d\d:\d\d step 3\n", stream.getvalue())


def test_lines_come_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = [0.0], list[str]()
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    pulse = Pulse()
    progress = Progress("rows", 100, done=20, unit="rows", say=lines.append)
    hidden = Progress("rows", 100, unit="rows", say=lines.append, shown=False)
    for clock[0], done in ((9.0, 30), (10.0, 40), (19.0, 50), (20.0, 100)):
        progress.update(done, "loss 1.0")
        hidden.update(done)
    assert lines == ["rows: loss 1.0, 40 of 100 rows, eta 30s", "rows: loss 1.0, 100 of 100 rows"]
    assert pulse.due() and not pulse.due()


PROGRAM = """
import logging, sys
from multicls import console
console.show_log("of_this_test", logging.INFO)
console.REDRAW_EVERY = 0
progress = console.Progress("training", 4, unit="steps", say=print)
progress.update(1, "loss 2.0")
print("a line")
logging.getLogger("of_this_test").info("a message")
with progress.hidden():
    print("a validation")
progress.update(2)
progress.close()
print("the end")
"""


def on_a_terminal(program: str) -> str:
    """Returns what a terminal receives from a program."""
    leader, follower = pty.openpty()
    done = subprocess.Popen([sys.executable, "-c", program], stdout=follower, stderr=follower)
    os.close(follower)
    shown = b""
    with open(leader, "rb", buffering=0) as terminal:
        try:
            while block := terminal.read(4096):
                shown += block
        except OSError:  # how Linux tells the end of a terminal
            pass
    assert done.wait() == 0, shown
    return shown.decode()


def test_a_terminal_gets_a_bar_with_the_lines_above_it() -> None:
    text = on_a_terminal(PROGRAM)
    for said in ("training", "loss 2.0, 1 of 4 steps, eta", "a line", "a validation", "2 of 4 steps", "the end"):
        assert said in text, said
    assert re.search(r"\x1b\[2K\d\d:\d\d:\d\d a message", text), "a message of the log stands above the bar"


@pytest.mark.parametrize("last", ["progress.update(1", "progress.update(2"])
def test_a_process_that_ends_at_once_leaves_the_cursor(last: str) -> None:
    text = on_a_terminal(PROGRAM.replace(last, f"import os; os._exit(0); {last}"))
    assert "the end" not in text and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_redirected_output_stays_whole() -> None:
    """Stderr is a terminal, stdout is a file: the lines go to the file."""
    leader, follower = pty.openpty()
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=follower, check=True)
    os.close(follower)
    os.close(leader)
    assert done.stdout.decode().splitlines() == ["a line", "a validation", "the end"]
