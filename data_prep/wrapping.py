"""Joins the lines of text that was wrapped by hand, judging from all line breaks of a document."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np

WIDTHS = np.arange(50, 161)  # columns at which text is taken to be wrapped
LEAST_SHARE = 0.25  # of the line breaks that the width explains; in other text it is about 0.1
_ITEM = re.compile(r"\s*(?:[-*•+–]|\d{1,3}[.)]|\(?[a-z]\))\s")
_BROKEN_WORD = re.compile(r"(?<=\w-)\n(?=\w)|(?<=--)\n(?=\w)")


def unwrap(lines: list[str]) -> list[str]:
    """Returns the paragraphs of a text given by its lines, without the blank ones.

    Whoever wraps at W columns breaks a line where the next word would pass W. So each break says
    that W is at least the line's length and at most that with the next line's first word. A break
    before a capital, as in verse, speaks against its widths. If a width explains many breaks, lines
    that are full at this width are joined to the next, and so are lines before a small letter.
    """
    filled = [line for line in lines if line.strip()]
    lines = [line.expandtabs().rstrip() for line in lines]
    breaks = [(a, b) for a, b in pairwise(lines) if a and b and not _begins_paragraph(a, b)]
    if not breaks:
        return filled
    length = np.array([len(line) for line, _ in breaks])
    longest = length + [len(following.split()[0]) for _, following in breaks]
    votes = np.array([-1 if following.lstrip()[0].isupper() else 1 for _, following in breaks])
    explains = (length[:, None] <= WIDTHS) & (longest[:, None] >= WIDTHS)  # (breaks, widths)
    totals = votes @ explains
    best = int(totals.argmax())
    if totals[best] <= 0 or explains[:, best].mean() < LEAST_SHARE:
        return filled
    paragraphs: list[str] = []
    for last, line in pairwise(["", *lines]):
        text = line.lstrip()
        if not text:
            continue
        is_full = len(last) + len(text.split()[0]) >= WIDTHS[best]
        if last and not _begins_paragraph(last, line) and (is_full or text[0].islower()):
            paragraphs[-1] += f"\n{text}"
        else:
            paragraphs.append(text)
    return [_BROKEN_WORD.sub("", text).replace("\n", " ") for text in paragraphs]


def _begins_paragraph(last: str, line: str) -> bool:
    """Returns whether a line is an item of a list or is indented after the line before it."""
    is_indented = len(line) - len(line.lstrip()) > len(last) - len(last.lstrip())
    begins = is_indented and line.lstrip()[0].isupper() and not _ITEM.match(last)
    return begins or _ITEM.match(line) is not None
