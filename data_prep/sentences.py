"""From the text of a document to its sentences: layout, headings, splitting."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import metadata
from itertools import groupby

import sentencex

WRAP_WIDTH = 100  # a block of several lines, none longer than this, is a paragraph wrapped by hand
HEADING_LENGTH = 100
_QUOTES = '"“”„«»‘`'
# sentencex never splits inside quotation marks, so a speech of ten sentences would be one: hide them from it.
_HIDE_QUOTES = str.maketrans(dict.fromkeys(_QUOTES, "*"))
_CLOSING = re.compile(rf"[{_QUOTES}’')\]]+(?=\s|$|[-–—])")
# Two boundaries it misses: after a bracketed sentence, and after the word "me." (to it, the state of Maine).
_MISSED = re.compile(rf"(?:[.!?][{_QUOTES}’']?\)|\bme\.)\s+(?=[{_QUOTES}'(]?[A-Z])")
# Two that it sees wrongly: after an abbreviation that stands before a number, and after a title behind a hidden mark.
_BEFORE_NUMBER = re.compile(r"(?i:\b(?:vols?|nos?|pp?|ch|figs?|secs?|arts?|ca?|fl))\.\s*$")
_TITLE = re.compile(r"(?:^|\W)(?:Dr|Mr|Mrs|Ms|St|Prof|Rev|Capt|Col|Gen|Lt|Hon|Messrs|Mme|Mlle)\.\s*$")
_NUMBER_WORDS = "one|two|three|four|five|six|seven|eight|nine|ten|first|second|third|fourth|fifth|last"
_CHAPTER = re.compile(
    rf"(?i:(?:chapter|book|part|volume|section|canto|letter|act|scene|stave)\s+(?:[ivxlc]+|\d+|{_NUMBER_WORDS})\b.{{0,80}})"
    r"|[IVXLC]+\.?"
)


def splitter_name(language: str) -> dict[str, str]:
    """What the manifest says about the splitter."""
    return {"name": "sentencex, quotation marks hidden", "version": metadata.version("sentencex"), "language": language}


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
    last = text.rstrip(_QUOTES + "’')]")[-1:]
    if not last or not unicodedata.category(last).startswith("P"):
        return True
    if dotted and last == "." and len(text.split()) <= (10 if paragraph[0] == " " else 5):
        return True
    return _CHAPTER.fullmatch(text) is not None


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
