"""Numbers in words, and lines with a clock above a bar of progress."""

import re
import sys

import pytest

from multicls.console import count, print_line, progress_bar


def test_numbers_in_words() -> None:
    counts = ["0 documents", "1 document", "2,000 documents"]
    assert [count(n, "document") for n in (0, 1, 2000)] == counts


@pytest.mark.parametrize("on_terminal", [True, False])
def test_lines_stand_above_the_bar(
    on_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal)
    with progress_bar(4, "step", "training", initial=1) as progress:
        print_line("a line")
        progress.update(2)
        progress.refresh()
    printed = capsys.readouterr()
    assert re.search(r"training:.* 1/4", printed.err) and " 3/4" in printed.err
    assert re.search(r"\d\d:\d\d:\d\d a line\n", printed.out)
    assert (printed.err.index("1/4") < printed.err.rindex("1/4")) == on_terminal  # drawn anew
