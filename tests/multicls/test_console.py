"""Numbers in words, and lines with a clock above a bar of progress."""

import re
import sys

import pytest

from multicls.console import count, print_line, print_verdict, progress_bar


def test_numbers_in_words() -> None:
    counts = ["0 documents", "1 document", "2,000 documents"]
    assert [count(n, "document") for n in (0, 1, 2000)] == counts


@pytest.mark.parametrize("on_terminal", [True, False])
def test_lines_stand_above_the_bar(
    on_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal)
    with progress_bar(9, "run", "grid"), progress_bar(4, "step", "training", initial=1) as progress:
        print_line("a line")
        progress.update(2)
        progress.refresh()
    printed = capsys.readouterr()
    assert re.search(r"training:.* 1/4", printed.err) and " 3/4" in printed.err
    assert re.search(r"\d\d:\d\d:\d\d a line\n", printed.out)
    assert (printed.err.index("1/4") < printed.err.rindex("1/4")) == on_terminal  # drawn anew
    for mark in ("\r", "\x1b"):
        assert (mark in printed.err) == on_terminal, "redirected, each state is a line"


@pytest.mark.parametrize("no_color", [False, True])
def test_a_verdict_is_colored_unless_the_user_wants_none(
    no_color: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FORCE_COLOR stands for a terminal; redirected, lines are plain and never broken."""
    lines = [
        "mean  +1.0 (+0.5 to +1.5)   better",
        "cls   worse",
        "facets   no clear change",
        "x" * 200,
    ]
    print_verdict(lines)
    assert capsys.readouterr().out.splitlines() == lines
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    print_verdict(lines)
    better, worse, unclear, _ = capsys.readouterr().out.splitlines()
    assert ("\x1b[32m" in better, "\x1b[31m" in worse) == (not no_color, not no_color)
    assert unclear == lines[2]
