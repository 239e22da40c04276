"""Cleans the text of a document and returns the sentences to keep. What each rule drops is counted."""

import re
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from data_prep.drops import READ, DropLog
from data_prep.read import RawDocument, TextFormat
from data_prep.sentences import QUOTES, split_paragraph
from data_prep.wikitext import HOLE, plain_text

HEADING_LENGTH = 100
LONGEST_SENTENCE = 10_000
PROSE_LENGTH = 150
BAD_CHARACTER = "\ufffd"  # REPLACEMENT CHARACTER: a byte that is not UTF-8


class Line(NamedTuple):
    """A paragraph or a heading. `level`: 1 to 6 for a heading that its markup marks, else 0."""

    text: str
    level: int = 0


def clean(raw: RawDocument, rules: frozenset[str], language: str, drops: DropLog) -> list[str]:
    """Returns the sentences of a document that the rules (of `settings.RULES`) keep."""
    text = plain_text(raw.text) if raw.format == "wikitext" else raw.text
    drops.characters[raw.source][READ] += len(text)
    if "unicode" in rules:
        text, removed = _plain_characters(text)
        if removed:
            drops.add("characters_control", raw, " ".join(removed), 0, len(removed))
    lines = lines_of(text, raw.format)
    if raw.format in ("wikitext", "wikipedia"):
        lines = _with_holes(lines, raw.format, "holes" in rules)
    else:
        rules -= {"holes"}
    for rule, reason, find in LINE_RULES if raw.format != "sentences" else ():
        dropped = find(lines, raw.format == "wikipedia") if rule in rules else ()
        for i in sorted(dropped):
            drops.add(reason, raw, lines[i].text, len(lines[i].text))
        lines = [line for i, line in enumerate(lines) if i not in dropped]
    texts = [line.text.strip() for line in lines]
    if raw.format != "sentences":
        texts = [sentence for text in texts for sentence in split_paragraph(text, language)]
    for rule, reason, is_bad in SENTENCE_RULES:
        if rule in rules and (bad := list(filter(is_bad, texts))):
            for sentence in bad:
                drops.add(reason, raw, sentence, len(sentence))
            texts = [sentence for sentence in texts if not is_bad(sentence)]
    return texts


# From text to lines.

_WIKI_HEADING = re.compile(r"(={1,6}) (.*) \1")
_MARKDOWN_HEADING = re.compile(r"(#{1,6})(?: +(.*?))?[ #]*")
_QUOTES_OPEN = tuple(QUOTES + "‘'")


def lines_of(text: str, text_format: TextFormat) -> list[Line]:
    """Returns the paragraphs of a document, with the levels of headings where markup marks them."""
    lines = text.split("\n")
    texts = unwrap(lines) if text_format == "plain" else [line for line in lines if line.strip()]
    marks = {"wikitext": ("=", _WIKI_HEADING), "plain": ("#", _MARKDOWN_HEADING)}
    if text_format not in marks:
        return [Line(text) for text in texts]
    mark, heading = marks[text_format]
    marked = []
    for line in texts:
        match = heading.fullmatch(line) if line[0] == mark else None
        marked.append(Line(match[2] or "", len(match[1])) if match else Line(line))
    return [line for line in marked if line.text.strip() or line.level]


# Text that was wrapped by hand.

WIDTHS = np.arange(50, 161)  # columns at which text is taken to be wrapped
LEAST_SHARE = 0.25  # of the line breaks that the width explains; in other text it is about 0.1
_ITEM = re.compile(r"\s*(?:[-*•+–]|\d{1,3}[.)]|\(?[a-z]\))\s")
_BROKEN_WORD = re.compile(r"(?<=\w-)\n(?=\w)|(?<=--)\n(?=\w)")


def unwrap(lines: list[str]) -> list[str]:
    """Returns the paragraphs of a text, without blank lines.

    Text wrapped at W columns has a break where the next word would pass W. So each break implies
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
    mended = (_BROKEN_WORD.sub("", text) if "-\n" in text else text for text in paragraphs)
    return [text.replace("\n", " ") for text in mended]


def _begins_paragraph(last: str, line: str) -> bool:
    """Returns whether a line is an item of a list or is indented after the line before it."""
    is_indented = len(line) - len(line.lstrip()) > len(last) - len(last.lstrip())
    begins = is_indented and line.lstrip()[0].isupper() and not _ITEM.match(last)
    return begins or _ITEM.match(line) is not None


def _with_holes(lines: list[Line], text_format: TextFormat, wanted: bool) -> list[Line]:
    """Marks each line that announces a list which is gone; without `wanted`, removes all marks.

    Wikipedia's text lacks all lists, but no quotations; of markup, items like headings are dropped.
    """
    if not wanted:
        return [Line(line.text.replace(HOLE, ""), line.level) for line in lines]
    result = []
    for line, following in zip(lines, [*lines, Line("", 1)][1:], strict=True):
        text = line.text.rstrip(" .") if line.text[-2:] in (":.", ": ") else line.text
        lost = is_heading(following.text)
        if text_format == "wikipedia":
            lost = following.text[:1] not in _QUOTES_OPEN
        if text[-1:] == ":" and (lost or following.level):
            line = Line(text[:-1] + HOLE + ":")
        result.append(line)
    return result


# The rule for the text.

# Line ends, spaces, and control characters, but not the zero-width joiners of Persian and Indian scripts.
_LINE_ENDS = "\r\u2028\u2029"
_SPECIAL = re.compile(
    f"[{_LINE_ENDS}\t\x0b\x0c\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u202f\u205f\u3000"
    "\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\ufeff]"
)


def _plain_characters(text: str) -> tuple[str, list[str]]:
    """Returns the text with plain characters, and the codes of those that were removed."""
    removed: list[str] = []

    def plain(match: re.Match[str]) -> str:
        if match[0].isspace():
            return "\n" if match[0] in _LINE_ENDS else " "
        removed.append(f"U+{ord(match[0]):04X}")
        return ""

    text = text if text.isascii() else unicodedata.normalize("NFC", text)
    return _SPECIAL.sub(plain, text.replace("\r\n", "\n")), removed


# Rules for lines: function(lines, dotted) -> the indices of those to drop; dotted: see is_heading.

_NUMBERS = "one|two|three|four|five|six|seven|eight|nine|ten|first|second|third|fourth|fifth|last"
_CHAPTER = re.compile(
    r"(?i:(?:chapter|book|part|volume|section|canto|letter|act|scene|stave|kapitel|chapitre"
    rf"|cap[ií]tulo|capitolo|глава)\s+(?:[ivxlc]+|\d+|{_NUMBERS})\b.{{0,80}})|[IVXLC]+\.?"
)
_END_MATTER_WORDS = (
    "see also|references|notes|footnotes|endnotes|external links|further reading|bibliography"
    "|bibliographies|citations|sources|web ?links|(?:works|literature) cited"
    "|(?:cited|reference) (?:texts|works|literature)|publications|filmography|discography"
    "|(?:selected|annotated|general|primary|secondary|additional|other|partial|etymological) "
    "(?:bibliography|works|publications|sources|references|readings?|filmography|discography)"
    "|literatur|weblinks|einzelnachweise|siehe auch|anmerkungen|quellen|voir aussi|références"
    "|liens externes|bibliographie|notes et références|véase también|referencias|enlaces externos"
    "|bibliografía|collegamenti esterni|bibliografia|altri progetti|voci correlate"
)
_END_MATTER = re.compile(
    rf"(?i)(?:{_END_MATTER_WORDS})(?:(?:,? and |, | & |/)(?:{_END_MATTER_WORDS}))*\.?"
)
_CITATION = re.compile(
    r"\bISBN\b|\bISSN\b|\bdoi\b|\bOCLC\b|\b[pP]{1,2}\.\s?\d|\bRetrieved\b|\((?:[Ee]ds?|[Tt]rans)\.\)"
    r"|\b[Vv]ol\.\s?\d|https?://|\((?:[A-Z]\w+ )?\d{4}[a-z]?\)[.,:]|\bPress\b|\^ "
)
_SENTENCE_END = re.compile(
    rf"[.!?…][{QUOTES}’')\]]*(?=\s+[{QUOTES}‘'(\[]?[^\W\d_a-z])|[.!?…][{QUOTES}’')\]]*\s*$"
)


def is_prose(text: str) -> bool:
    """Returns whether a line is long, of two sentences at least, and no citation of a work."""
    if len(text) < PROSE_LENGTH or 200 * len(_CITATION.findall(text)) >= len(text):
        return False
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return len(ends) >= 2 and ends[-1] == len(text)


def is_heading(paragraph: str, dotted: bool = False) -> bool:
    """Returns whether a paragraph is short and without final punctuation, or "CHAPTER IV. ...".

    With `dotted`, headings may end with a full stop, as WikiExtractor's do: then five words or
    fewer are a heading, ten if indented.
    """
    text = paragraph.strip()
    if len(text) > HEADING_LENGTH:
        return False
    last = text.rstrip(QUOTES + " ’')]")[-1:]  # blanks, too: tokenized text ends with ? ''
    if not last or not unicodedata.category(last).startswith("P"):
        return True
    if dotted and last == "." and len(text.split()) <= (10 if paragraph[0] == " " else 5):
        return True
    return _CHAPTER.fullmatch(text) is not None


def _end_matter(lines: list[Line], dotted: bool) -> set[int]:
    """Finds end matter: from a heading such as References to the next of its level, or, without levels, to prose."""
    numbers = set()
    inside: int | None = None  # level of the heading that began it, 0 if it has none
    for i, (text, level) in enumerate(lines):
        if inside is not None and (0 < level <= (inside or 6) or (not inside and is_prose(text))):
            inside = None
        if inside is None and len(text) <= HEADING_LENGTH and _END_MATTER.fullmatch(text.strip()):
            inside = level
        if inside is not None:
            numbers.add(i)
    return numbers


def _headings(lines: list[Line], dotted: bool) -> set[int]:
    return {i for i, (text, level) in enumerate(lines) if level or is_heading(text, dotted)}


LINE_RULES = [
    ("end_matter", "lines_end_matter", _end_matter),
    ("headings", "lines_heading", _headings),
]

# Rules for sentences: function(sentence) -> whether to drop it.


def _has_no_letter(sentence: str) -> bool:
    return not any(map(str.isalpha, sentence))


def _has_hole(sentence: str) -> bool:
    return HOLE in sentence or "formula_" in sentence or "codice_" in sentence  # of WikiExtractor


SENTENCE_RULES: list[tuple[str, str, Callable[[str], bool]]] = [
    ("sentences_without_letter", "sentences_without_letter", _has_no_letter),
    ("long_sentences", "sentences_too_long", lambda s: len(s) > LONGEST_SENTENCE),
    ("replacement_characters", "sentences_not_utf8", lambda s: BAD_CHARACTER in s),
    ("holes", "sentences_with_holes", _has_hole),
]
