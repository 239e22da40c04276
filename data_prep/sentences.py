"""Splits paragraphs into sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

import sentencex

QUOTES = '"“”„«»‘`'
# sentencex never splits inside quotation marks, so a speech of ten sentences would be one: hide them from it.
_HIDE_QUOTES = str.maketrans(dict.fromkeys(QUOTES, "*"))
_CLOSING = re.compile(rf"[{QUOTES}’')\]]+(?=\s|$|[-–—])")
# Two boundaries it misses: after a bracketed sentence, and after the word "me." (to it, the state of Maine).
_MISSED = re.compile(rf"(?:[.!?][{QUOTES}’']?\)|\bme\.)\s+(?=[{QUOTES}'(]?[A-Z])")
# Two that it sees wrongly: after an abbreviation that stands before a number, and after a title behind a hidden mark.
_BEFORE_NUMBER = re.compile(r"(?i:\b(?:vols?|nos?|pp?|ch|figs?|secs?|arts?|ca?|fl))\.\s*$")
_TITLE = re.compile(r"(?:^|\W)(?:Dr|Mr|Mrs|Ms|St|Prof|Rev|Capt|Col|Gen|Lt|Hon|Messrs|Mme|Mlle)\.\s*$")


def splitter_name(language: str) -> dict[str, str]:
    """What the manifest says about the splitter."""
    return {"name": "sentencex, quotation marks hidden", "version": metadata.version("sentencex"), "language": language}


def split_paragraph(paragraph: str, language: str) -> Iterator[str]:
    """Sentences of a paragraph, in order and nothing lost but white space."""
    position = 0
    current = ""
    for segment in sentencex.segment(language, paragraph.translate(_HIDE_QUOTES)):
        text = paragraph[position : position + len(segment)]
        position += len(segment)
        if current and not current[-1].isspace() and (closing := _CLOSING.match(text)):
            current += closing.group()  # a closing mark belongs to the sentence before it
            text = text[closing.end() :]
        if current and _continues(current, text):
            current += text
            continue
        yield from _split_missed(current)
        current = text
    yield from _split_missed(current + paragraph[position:])


def _continues(before: str, text: str) -> bool:
    """Whether `text` goes on with the sentence `before`: ... " she said."""
    start = text.lstrip()[:1]
    if not start or start.islower():
        return True
    end = before[-12:]
    return bool(_BEFORE_NUMBER.search(end) if start.isdigit() else _TITLE.search(end))


def _split_missed(text: str) -> Iterator[str]:
    start = 0
    for match in _MISSED.finditer(text) if ")" in text or "me. " in text else ():  # the search costs most of the time
        yield text[start : match.end()].strip()
        start = match.end()
    if text[start:].strip():
        yield text[start:].strip()
