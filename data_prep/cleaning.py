"""From the text of a document to the sentences that are kept. Every rule has a name, and what it drops is counted."""

from __future__ import annotations

import heapq
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

import xxhash

from data_prep.readers import RawDocument
from data_prep.sentences import QUOTES, split_paragraph
from data_prep.wikitext import plain_text

RULES = {
    "unicode": "composed characters (NFC), plain spaces and line ends",
    "control_characters": "control characters and invisible marks are removed",
    "boilerplate": "licences, notices of ebooks, lists of references and links at the end of articles",
    "headings": "headings, chapter titles and other short lines without final punctuation",
    "sentences_without_letter": "sentences with no letter",
    "long_sentences": "sentences of more than 10,000 characters: no text, but data",
    "repeated_lines": "lines of 40 characters or more that stood in 10 documents before",
    "duplicate_documents": "documents whose sentences are those of an earlier one",
}
SAMPLES = 8  # of everything that is dropped, by reason
SAMPLE_LENGTH = 200
WRAP_WIDTH = 100  # a block of several lines, none longer than this, is a paragraph wrapped by hand
HEADING_LENGTH = 100
LONGEST_SENTENCE = 10_000
_SPACES = re.compile("[\t\x0b\x0c\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_LINE_ENDS = re.compile("\r\n?|[\u2028\u2029]")
# Not the zero-width joiners, which belong to words of Persian and Indian scripts.
_CONTROL = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_ODD = re.compile(
    "[\x00-\t\x0b-\x1f\x7f-\xa0\xad\u1680\u2000-\u200b\u200e\u200f\u2028-\u202f\u205f-\u2064\u3000\ufeff]"
)
_NUMBER_WORDS = "one|two|three|four|five|six|seven|eight|nine|ten|first|second|third|fourth|fifth|last"
_CHAPTER = re.compile(
    r"(?i:(?:chapter|book|part|volume|section|canto|letter|act|scene|stave|kapitel|chapitre|cap[ií]tulo|capitolo|глава)"
    rf"\s+(?:[ivxlc]+|\d+|{_NUMBER_WORDS})\b.{{0,80}})"
    r"|[IVXLC]+\.?"
)
_EBOOK_START = re.compile(r"\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG")
_EBOOK_END = re.compile(r"\*\*\* ?END OF (?:THE|THIS) PROJECT GUTENBERG|End of (?:the )?Project Gutenberg")
_END_MATTER = re.compile(
    r"(?i:see also|references|notes|footnotes|notes and references|external links|further reading|bibliography"
    r"|works cited|citations|literatur|weblinks|einzelnachweise|siehe auch|voir aussi|références|liens externes"
    r"|notes et références|véase también|referencias|enlaces externos|collegamenti esterni|bibliografia)\W*"
)
_NOTICE = re.compile(
    r"(?i)all rights reserved|project gutenberg|distributed proofread|(?:©|\(c\)|copyright)\W{0,3}(?:by\b|\d{4})"
    r"|this article (?:is a stub|incorporates text)|terms of (?:use|service)|privacy policy|enable javascript"
    r"|^\[(?:illustration|image|picture|frontispiece)\b"
)
_NOTICE_LENGTH = 300
# Most documents have none of these, in lower case, and need no search for notices.
_NOTICE_WORDS = (
    *("all rights reserved", "project gutenberg", "distributed proofread", "©", "(c)", "copyright"),
    *("this article is a stub", "this article incorporates text", "terms of use", "terms of service", "privacy policy"),
    *("enable javascript", "[illustration", "[image", "[picture", "[frontispiece"),
)


class Dropped(NamedTuple):
    """A sample of what was dropped."""

    source: str
    document: str
    text: str


class Drops:
    """Counts what is dropped by reason, and keeps a fair sample: the few with the smallest hashes.

    So the sample depends neither on the order in which drops come nor on how they are merged.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.samples: dict[str, list[tuple[int, Dropped]]] = {}

    def add(self, reason: str, raw: RawDocument, text: str, count: int = 1) -> None:
        """Counts a drop from the document `raw`; `text` shows it."""
        self.counts[reason] += count
        sample = Dropped(raw.source, raw.id, text[:SAMPLE_LENGTH])
        self._keep(reason, [(xxhash.xxh3_64_intdigest("\0".join(sample).encode("utf-8", "replace")), sample)])

    def merge(self, other: Drops) -> None:
        """Adds all that `other` has."""
        self.counts.update(other.counts)
        for reason, entries in other.samples.items():
            self._keep(reason, entries)

    def _keep(self, reason: str, entries: Iterable[tuple[int, Dropped]]) -> None:
        kept = self.samples.setdefault(reason, [])
        for entry in entries:
            if len(kept) < SAMPLES or entry < kept[-1]:
                self.samples[reason] = kept = heapq.nsmallest(SAMPLES, {*kept, entry})


def clean(raw: RawDocument, rules: frozenset[str], language: str, drops: Drops) -> list[list[str]]:
    """The kept sentences of a document, by line.

    Args:
        rules: names out of `RULES`.
        language: of the sentence splitter.
        drops: counts what is left out.
    """
    text, layout = (plain_text(raw.text), "lines") if raw.layout == "wikitext" else (raw.text, raw.layout)
    odd = _ODD.search(text) is not None  # one search instead of three, for most documents
    if "unicode" in rules:
        text = text if text.isascii() else unicodedata.normalize("NFC", text)
        text = _SPACES.sub(" ", _LINE_ENDS.sub("\n", text)) if odd else text
    if odd and "control_characters" in rules and (found := _CONTROL.findall(text)):
        drops.add("characters_control", raw, " ".join(f"U+{ord(character):04X}" for character in found), len(found))
        text = _CONTROL.sub("", text)
    lines: Iterable[str] = paragraphs(text, "blocks" if layout == "blocks" else "lines")
    dotted = layout == "dotted_lines"
    if "boilerplate" in rules:
        lowered = text.lower()
        notices = any(word in lowered for word in _NOTICE_WORDS)
        lines = _without_boilerplate(list(lines), raw, dotted, notices, drops)
    result = []
    for line in lines:
        if "headings" in rules and is_heading(line, dotted):
            drops.add("lines_heading", raw, line)
        elif kept := list(_kept(split_paragraph(line.strip(), language), raw, rules, drops)):
            result.append(kept)
    return result


def _kept(sentences: Iterable[str], raw: RawDocument, rules: frozenset[str], drops: Drops) -> Iterator[str]:
    for sentence in sentences:
        if "sentences_without_letter" in rules and not any(map(str.isalpha, sentence)):
            drops.add("sentences_without_letter", raw, sentence)
        elif "long_sentences" in rules and len(sentence) > LONGEST_SENTENCE:
            drops.add("sentences_too_long", raw, sentence)
        else:
            yield sentence


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
        if filled:
            lines = list(group)
            result += [" ".join(line.strip() for line in lines)] if _is_wrapped(lines) else lines
    return result


def _is_wrapped(lines: list[str]) -> bool:
    """Whether lines are one paragraph wrapped by hand: none is long, and they do not all end where a sentence does."""
    if len(lines) < 2 or max(map(len, lines)) > WRAP_WIDTH:
        return False
    return sum(_last_character(line) in ".!?…" for line in lines[:-1]) < 0.9 * (len(lines) - 1)


def _last_character(text: str) -> str:
    return text.rstrip(" " + QUOTES + "’')]*_")[-1:] or " "


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


def _without_boilerplate(
    lines: list[str], raw: RawDocument, dotted: bool, notices: bool, drops: Drops
) -> Iterator[str]:
    start, end = 0, len(lines)
    if notices and any("PROJECT GUTENBERG" in line.upper() for line in lines):
        start = next((i + 1 for i, line in enumerate(lines) if _EBOOK_START.search(line)), 0)
        end = next((i for i, line in enumerate(lines) if i >= start and _EBOOK_END.search(line)), len(lines))
    end_matter = False
    for i, line in enumerate(lines):
        if len(line) <= HEADING_LENGTH and is_heading(line, dotted):
            end_matter = _END_MATTER.fullmatch(line.strip()) is not None
        notice = notices and len(line) <= _NOTICE_LENGTH and _NOTICE.search(line)
        if end_matter or notice or not start <= i < end:
            drops.add("lines_boilerplate", raw, line)
        else:
            yield line
