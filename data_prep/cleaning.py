"""From the text of a document to the sentences that are kept: layout, headings, letters."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby

from data_prep.sentences import QUOTES, split_paragraph

WRAP_WIDTH = 100  # a block of several lines, none longer than this, is a paragraph wrapped by hand
HEADING_LENGTH = 100
_NUMBER_WORDS = "one|two|three|four|five|six|seven|eight|nine|ten|first|second|third|fourth|fifth|last"
_CHAPTER = re.compile(
    rf"(?i:(?:chapter|book|part|volume|section|canto|letter|act|scene|stave)\s+(?:[ivxlc]+|\d+|{_NUMBER_WORDS})\b.{{0,80}})"
    r"|[IVXLC]+\.?"
)


def paragraphs(text: str, layout: str) -> list[str]:
    """Splits a document into paragraphs.

    Args:
        layout: "lines", every line is a paragraph; "blocks", blank lines lie between paragraphs and the lines of a
            hand-wrapped one are joined.
    """
    if layout == "lines":
        return [line for line in text.split("\n") if line.strip()]
    result: list[str] = []
    for filled, group in groupby(text.split("\n"), key=lambda line: bool(line.strip())):
        if not filled:
            continue
        lines = list(group)
        wrapped = len(lines) > 1 and max(map(len, lines)) <= WRAP_WIDTH
        result += [" ".join(line.strip() for line in lines)] if wrapped else lines
    return result


def is_heading(paragraph: str, dotted: bool = False) -> bool:
    """Whether a paragraph is a heading or chapter title: short and without final punctuation, or "CHAPTER IV. ...".

    Args:
        dotted: headings carry a full stop (WikiExtractor's do): five words or fewer are one, ten if indented.
    """
    text = paragraph.strip()
    if len(text) > HEADING_LENGTH:
        return False
    last = text.rstrip(QUOTES + "’')]")[-1:]
    if not last or not unicodedata.category(last).startswith("P"):
        return True
    if dotted and last == "." and len(text.split()) <= (10 if paragraph[0] == " " else 5):
        return True
    return _CHAPTER.fullmatch(text) is not None


def sentences(text: str, layout: str, language: str, dropped: Counter[str]) -> list[str]:
    """The sentences of a document that are kept; what is dropped is counted by reason in `dropped`."""
    return list(_with_letters(_all_sentences(text, layout, language, dropped), dropped))


def _all_sentences(text: str, layout: str, language: str, dropped: Counter[str]) -> Iterator[str]:
    for paragraph in paragraphs(text, "blocks" if layout == "blocks" else "lines"):
        if is_heading(paragraph, dotted=layout == "dotted_lines"):
            dropped["headings"] += 1
        else:
            yield from split_paragraph(paragraph.strip(), language)


def _with_letters(candidates: Iterable[str], dropped: Counter[str]) -> Iterator[str]:
    for sentence in candidates:
        if any(map(str.isalpha, sentence)):
            yield sentence
        else:
            dropped["sentences_without_letter"] += 1
