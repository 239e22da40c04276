"""Joins the lines of text that was wrapped by hand, judging from the lengths of all lines of a document."""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from typing import NamedTuple

NARROWEST, WIDEST = 50, 160  # columns at which text is taken to be wrapped
_SHARE = 0.25  # of the line breaks that the width must explain; in text that is not wrapped it is about 0.1
_ITEM = re.compile(r"(?:[-*•+–]|\d{1,3}[.)]|\(?[a-z]\))\s")
_ENDS = re.compile(r"[.!?…:;][\"“”«»'’)\]*_]*$")
_BROKEN_WORD = re.compile(r"(?<=\w)-{1,2}$")


class _Line(NamedTuple):
    text: str
    indent: int
    length: int  # with the indent
    first: int  # length of the first word

    @property
    def lower(self) -> bool:
        return self.text[0].islower()


def _measured(line: str) -> _Line:
    line = line.expandtabs().rstrip()
    text = line.lstrip()
    return _Line(text, len(line) - len(text), len(line), len(text.partition(" ")[0]))


def unwrap(lines: list[str]) -> list[str]:
    """Returns the paragraphs of a text given by its lines, without the blank ones.

    Whoever wraps at W columns breaks a line where the next word would pass W. So each break within a paragraph says
    that W is at least the line's length and less than that with the next line's first word. If many breaks agree on a
    width, and those within sentences are mostly not before a capital as in verse, the text is wrapped at this width.
    Only lines that are full at this width are joined to the next: not those of verse and lists, which end early.
    """
    filled = [line for line in lines if line.strip()]
    if not any(line.strip() and following.strip() for line, following in pairwise(lines)):
        return filled
    measured = [_measured(line) if line.strip() else None for line in lines]
    width = _width(measured)
    if not width:
        return filled
    result: list[list[_Line]] = []
    last: _Line | None = None
    for line in measured:
        if line is not None and last is not None and _continues(result[-1][0], last, line, width):
            result[-1].append(line)
        elif line is not None:
            result.append([line])
        last = line
    return [_joined([line.text for line in paragraph]) for paragraph in result]


def _width(lines: list[_Line | None]) -> int:
    """Returns the width that explains most line breaks within sentences; 0 if the text is not wrapped."""
    pairs = [(a, b) for a, b in pairwise(lines) if a is not None and b is not None]
    breaks = [(a, b) for a, b in pairs if b.indent <= a.indent or b.lower]
    within = [(line, following) for line, following in breaks if not _ENDS.search(line.text[-6:])]
    # Differences: +1 where a break begins to support a width, -1 after its last one.
    votes = [0] * (WIDEST + 2)
    for line, following in within:
        low, high = max(line.length, NARROWEST), min(line.length + following.first, WIDEST)
        if low <= high and not _begins_anew(following):
            votes[low] += 1
            votes[high + 1] -= 1
    totals = list(accumulate(votes))
    best = max(totals)
    width = totals.index(best)
    explained = sum(a.length <= width <= a.length + b.first for a, b in breaks)
    anew = sum(_begins_anew(b) for a, b in within if a.length <= width <= a.length + b.first)
    is_wrapped = 0 < best >= max(anew, explained / 10) and explained >= _SHARE * len(breaks)
    return width if is_wrapped else 0


def _begins_anew(line: _Line) -> bool:
    return line.text[0].isupper() or _ITEM.match(line.text) is not None


def _continues(first: _Line, last: _Line, line: _Line, width: int) -> bool:
    """Returns whether a line goes on with the paragraph that began with `first` and came to `last`."""
    full = last.length + line.first >= width
    if _ITEM.match(line.text) and (not full or _ITEM.match(first.text)):
        return False
    if line.indent > last.indent and not line.lower and not _ITEM.match(last.text):
        return False
    return full or (line.lower and 2 * last.length >= width and not _ENDS.search(last.text))


def _joined(lines: list[str]) -> str:
    """Returns the lines as one. A word that was broken at its hyphen, or at a dash, is put together again."""
    text = lines[0]
    for line in lines[1:]:
        text += line if _BROKEN_WORD.search(text[-3:]) and line[0].isalnum() else f" {line}"
    return text
