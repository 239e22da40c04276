"""Cleans the text of a document and returns the sentences to keep. Each rule has a name; what it drops is counted."""

from __future__ import annotations

import heapq
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import xxhash

from data_prep.read import RawDocument
from data_prep.sentences import QUOTES, split_paragraph
from data_prep.wikitext import HOLE, plain_text
from data_prep.wrapping import unwrap

SAMPLES = 8  # of everything that is dropped, by reason
SAMPLE_LENGTH = 200
HEADING_LENGTH = 100
LONGEST_SENTENCE = 10_000
WARNING_SHARE = 0.2  # of a file's characters dropped by one rule
LEAST_CHARACTERS = 2000  # of a file for a warning


class Dropped(NamedTuple):
    """A sample of what was dropped."""

    source: str
    document: str
    text: str


class Drops:
    """Counts what is dropped by reason, and keeps a fair sample: the few with the smallest hashes.

    So the sample depends neither on the order in which drops come nor on how they are merged.

    Attributes:
        counts: number of drops by reason.
        samples: by reason, (hash, sample).
        characters: by file and rule, the number of characters dropped; by file and "", the number of all characters.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.samples: dict[str, list[tuple[int, Dropped]]] = {}
        self.characters: dict[str, Counter[str]] = {}

    def add(self, reason: str, raw: RawDocument, text: str, count: int = 1, rule: str = "") -> None:
        """Counts a drop from the document `raw`; `text` shows it. With `rule`, counts the characters of `text`, too."""
        self.counts[reason] += count
        if rule:
            self.count_characters(raw, rule, len(text))
        sample = Dropped(raw.source, raw.id, text[:SAMPLE_LENGTH])
        self._keep(reason, [(xxhash.xxh3_64_intdigest("\0".join(sample).encode("utf-8", "replace")), sample)])

    def count_characters(self, raw: RawDocument, rule: str, number: int) -> None:
        """Counts characters of the file of `raw` for a rule that dropped them; with rule "", as read."""
        self.characters.setdefault(raw.id.partition("#")[0], Counter())[rule] += number

    def merge(self, other: Drops) -> None:
        """Adds everything that `other` has counted."""
        self.counts.update(other.counts)
        for file, characters in other.characters.items():
            self.characters.setdefault(file, Counter()).update(characters)
        for reason, entries in other.samples.items():
            self._keep(reason, entries)

    def warnings(self) -> list[str]:
        """Returns a sentence for each file of which one rule drops more than a fifth; short files are left out."""
        return [
            f"{file}: the rule {rule} dropped {number / total:.0%} of the text ({number:,} of {total:,} "
            f"characters). If this is text to keep, prepare it with --without {rule}."
            for file, characters in sorted(self.characters.items())
            if (total := characters[""]) >= LEAST_CHARACTERS
            for rule, number in sorted(characters.items())
            if rule and number > WARNING_SHARE * total
        ]

    def to_json(self) -> dict[str, Any]:
        """Returns all that it holds as JSON values."""
        return {"counts": self.counts, "samples": self.samples, "characters": self.characters}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Drops:
        """Returns what `to_json` made JSON values of."""
        drops = cls()
        drops.counts.update(record["counts"])
        for reason, entries in record["samples"].items():
            drops.samples[reason] = [(key, Dropped(*sample)) for key, sample in entries]
        drops.characters = {file: Counter(characters) for file, characters in record["characters"].items()}
        return drops

    def _keep(self, reason: str, entries: Iterable[tuple[int, Dropped]]) -> None:
        kept = self.samples.setdefault(reason, [])
        for entry in entries:
            if len(kept) < SAMPLES or entry < kept[-1]:
                self.samples[reason] = kept = heapq.nsmallest(SAMPLES, {*kept, entry})


class Line(NamedTuple):
    """A paragraph or a heading. `level`: 1 to 6 for a heading whose markup tells it, else 0."""

    text: str
    level: int = 0


def clean(raw: RawDocument, rules: frozenset[str], language: str, drops: Drops) -> list[list[str]]:
    """Returns the kept sentences of a document, by line.

    Args:
        raw: The document.
        rules: Names out of `settings.RULES`.
        language: ISO 639 code for the sentence splitter.
        drops: Counts what is left out.
    """
    text = plain_text(raw.text) if raw.layout == "wikitext" else raw.text
    drops.count_characters(raw, "", len(text))
    for rule, reason, repair in TEXT_RULES:
        if rule in rules:
            text, removed = repair(text)
            if removed:
                drops.add(reason, raw, " ".join(removed), len(removed))
    lines = lines_of(text, raw.layout)
    is_wiki = raw.layout in ("wikitext", "dotted_lines")
    sentence_rules = [rule for rule in ROW_RULES + (WIKI_RULES if is_wiki else []) if rule[0] in rules]
    if raw.layout == "sentences":
        rows = ([line.text.strip()] for line in lines)
        return [kept for row in rows if (kept := _kept(row, sentence_rules, raw, drops))]
    if "disambiguation" in rules and _is_disambiguation(lines):
        drops.add("documents_disambiguation", raw, raw.title)
        drops.count_characters(raw, "disambiguation", len(text))
        return []
    if is_wiki:
        lines = _with_holes(lines, raw.layout, "holes" in rules)
    for rule, reason, find in LINE_RULES:
        if rule in rules and (found := find(lines, raw.layout)):
            for i in sorted(found):
                drops.add(reason, raw, lines[i].text, rule=rule)
            lines = [line for i, line in enumerate(lines) if i not in found]
    split = (list(split_paragraph(line.text.strip(), language)) for line in lines)
    return [kept for sentences in split if (kept := _kept(sentences, sentence_rules, raw, drops))]


def _kept(sentences: list[str], sentence_rules: list[SentenceRule], raw: RawDocument, drops: Drops) -> list[str]:
    """Returns the sentences that no rule drops."""
    for rule, reason, is_bad in sentence_rules:
        if any(map(is_bad, sentences)):
            for sentence in filter(is_bad, sentences):
                drops.add(reason, raw, sentence, rule=rule)
            sentences = [sentence for sentence in sentences if not is_bad(sentence)]
    return sentences


# Layout: from text to lines.

_WIKI_HEADING = re.compile(r"(={1,6}) (.*) \1")
_QUOTES_OPEN = tuple(QUOTES + "‘'")
_MARKDOWN_HEADING = re.compile(r"(#{1,6}) +(.*?)[ #]*")


def lines_of(text: str, layout: str) -> list[Line]:
    """Returns the paragraphs of a document with the levels of headings, where the layout has them."""
    lines = paragraphs(text, layout)
    marks = {"wikitext": ("=", _WIKI_HEADING), "blocks": ("#", _MARKDOWN_HEADING)}
    if layout not in marks:
        return list(map(Line, lines))
    mark, heading = marks[layout]
    return [
        Line(match[2], len(match[1])) if line[0] == mark and (match := heading.fullmatch(line)) else Line(line)
        for line in lines
    ]


def paragraphs(text: str, layout: str) -> list[str]:
    """Returns the lines of a document that are not blank; in the layout "blocks", hand-wrapped ones are joined."""
    lines = text.split("\n")
    return unwrap(lines) if layout == "blocks" else [line for line in lines if line.strip()]


def _with_holes(lines: list[Line], layout: str, wanted: bool) -> list[Line]:
    """Returns the lines with `HOLE` before each colon whose list is gone; without any `HOLE` if they are not wanted.

    WikiExtractor leaves out all lists, but no quotations; of MediaWiki markup, items that look like headings are lost.
    """
    if not wanted:
        return [Line(line.text.replace(HOLE, ""), line.level) for line in lines]
    result = []
    for line, following in zip(lines, [*lines, Line("", 1)][1:], strict=True):
        text = line.text.rstrip(" .") if line.text[-2:] in (":.", ": ") else line.text
        lost = following.text[:1] not in _QUOTES_OPEN if layout == "dotted_lines" else is_heading(following.text)
        if text[-1:] == ":" and (lost or following.level):
            line = Line(text[:-1] + HOLE + ":")
        result.append(line)
    return result


# Rules for the text: function(text) -> (the text repaired, what was removed).

TextRule = tuple[str, str, Callable[[str], tuple[str, list[str]]]]
_SPACES = re.compile("[\t\x0b\x0c\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_LINE_ENDS = re.compile("\r\n?|[\u2028\u2029]")
# Not the zero-width joiners, which belong to words of Persian and Indian scripts.
_CONTROL = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_ODD = re.compile(
    "[\x00-\t\x0b-\x1f\x7f-\xa0\xad\u1680\u2000-\u200b\u200e\u200f\u2028-\u202f\u205f-\u2064\u3000\ufeff]"
)
# The first byte of a UTF-8 sequence read as Latin-1 or Windows-1252, and a second one.
_MOJIBAKE_STARTS = "ÂÃÄÅÎÏÐÑâãð"
_MOJIBAKE = re.compile(f"[{_MOJIBAKE_STARTS}][\x80-\xbf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]")


def _repair_mojibake(text: str) -> tuple[str, list[str]]:
    if text.isascii() or not any(start in text for start in _MOJIBAKE_STARTS) or not _MOJIBAKE.search(text):
        return text, []
    from ftfy import fix_encoding

    lines = text.split("\n")
    fixed = [fix_encoding(line) if _MOJIBAKE.search(line) else line for line in lines]
    return "\n".join(fixed), [line for line, new in zip(lines, fixed, strict=True) if line != new]


@lru_cache(maxsize=1)  # two rules ask, mostly of the same text
def _is_odd(text: str) -> bool:
    return _ODD.search(text) is not None


def _plain_unicode(text: str) -> tuple[str, list[str]]:
    text = text if text.isascii() else unicodedata.normalize("NFC", text)
    return (_SPACES.sub(" ", _LINE_ENDS.sub("\n", text)) if _is_odd(text) else text), []


def _without_control_characters(text: str) -> tuple[str, list[str]]:
    found = _CONTROL.findall(text) if _is_odd(text) else []
    return (_CONTROL.sub("", text) if found else text), [f"U+{ord(character):04X}" for character in found]


TEXT_RULES: list[TextRule] = [
    ("mojibake", "lines_mojibake_repaired", _repair_mojibake),
    ("unicode", "", _plain_unicode),
    ("control_characters", "characters_control", _without_control_characters),
]

# Rules for lines: function(lines, layout) -> the indices of those to drop.

LineRule = tuple[str, str, Callable[[list[Line], str], set[int]]]
_NUMBER_WORDS = "one|two|three|four|five|six|seven|eight|nine|ten|first|second|third|fourth|fifth|last"
_CHAPTER = re.compile(
    r"(?i:(?:chapter|book|part|volume|section|canto|letter|act|scene|stave|kapitel|chapitre|cap[ií]tulo|capitolo|глава)"
    rf"\s+(?:[ivxlc]+|\d+|{_NUMBER_WORDS})\b.{{0,80}})"
    r"|[IVXLC]+\.?"
)
_EBOOK_START = re.compile(r"\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG")
_EBOOK_END = re.compile(r"\*\*\* ?END OF (?:THE|THIS) PROJECT GUTENBERG|End of (?:the )?Project Gutenberg")
# The beginnings of notices, in lower case, and what must follow them.
_RIGHTS = r"\W{0,3}(?:by\b|\d{4})"
_NOTICES = {
    **dict.fromkeys(("©", "(c)", "copyright"), _RIGHTS),
    **dict.fromkeys(("all rights reserved", "project gutenberg", "distributed proofread", "enable javascript"), ""),
    **dict.fromkeys(("this article is a stub", "this article incorporates ", "terms of use", "terms of service"), ""),
    "privacy policy": "",
}
_NOTICE = re.compile("|".join(re.escape(words) + rest for words, rest in _NOTICES.items()))
_NOTICE_LENGTH = 300
_NOTE = re.compile(r"(?i)\[?\W?(?:transcriber|transcription)['’]?s?['’]? notes?\b")
_BRACKETED_NOTE = re.compile(r"(?i)\[(?:illustration|image|picture|frontispiece|footnote|sidenote|note|\d{1,3}\] )")
_CONTENTS_ENTRY = re.compile(r".*\S(?:(?:\s*\.){4,}|\s{3,})\s*(?:\d{1,4}|[ivxlc]+)\.?\s*", re.IGNORECASE)
_CONTENTS = re.compile(r"(?i)(?:table of )?contents[.:]?|(?:list of )?illustrations[.:]?")
_END_MATTER_WORDS = (
    "see also|references|notes|footnotes|endnotes|external links|further reading|bibliography|bibliographies|citations"
    "|sources|web ?links|(?:works|literature) cited"
    "|(?:cited|reference) (?:texts|works|literature)|publications|filmography"
    "|discography|(?:selected|annotated|general|primary|secondary|additional|other|partial|etymological) "
    "(?:bibliography|works|publications|sources|references|readings?|filmography|discography)"
    "|literatur|weblinks|einzelnachweise|siehe auch|anmerkungen|quellen|voir aussi|références|liens externes"
    "|bibliographie|notes et références|véase también|referencias|enlaces externos|bibliografía|collegamenti esterni"
    "|bibliografia|altri progetti|voci correlate"
)
_END_MATTER = re.compile(rf"(?i)(?:{_END_MATTER_WORDS})(?:(?:,? and |, | & |/)(?:{_END_MATTER_WORDS}))*\.?")
_CITATION = re.compile(
    r"\bISBN\b|\bISSN\b|\bdoi\b|\bOCLC\b|\b[pP]{1,2}\.\s?\d|\bRetrieved\b|\((?:[Ee]ds?|[Tt]rans)\.\)|\b[Vv]ol\.\s?\d"
    r"|https?://|\((?:[A-Z]\w+ )?\d{4}[a-z]?\)[.,:]|\bPress\b|\^ "
)
_SENTENCE_END = re.compile(rf"[.!?…][{QUOTES}’')\]]*(?=\s+[{QUOTES}‘'(\[]?[^\W\d_a-z])|[.!?…][{QUOTES}’')\]]*\s*$")
_PROSE_LENGTH = 150
_DISAMBIGUATION = re.compile(
    r"(?i).{0,80}\b(?:(?:may|can|could|might)(?: also| either)* (?:refer to|mean|stand for)"
    r"|(?:commonly|often|usually) refers to|(?:steht|bezeichnet)\b.*|peut (?:désigner|faire référence à)"
    r"|puede (?:referirse a|hacer referencia a|designar)|può (?:riferirsi a|indicare))[^.]{0,60}:\.?\s*"
)


def is_prose(text: str) -> bool:
    """Returns whether a line is a paragraph of prose: long, of two sentences at least, and no citation of a work."""
    if len(text) < _PROSE_LENGTH or 200 * len(_CITATION.findall(text)) >= len(text):
        return False
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return len(ends) >= 2 and ends[-1] == len(text)


def is_heading(paragraph: str, dotted: bool = False) -> bool:
    """Returns whether a paragraph is a heading: short and without final punctuation, or "CHAPTER IV. ...".

    Args:
        paragraph: The text.
        dotted: Headings carry a full stop (WikiExtractor's do): five words or fewer are one, ten if indented.
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


def _is_disambiguation(lines: list[Line]) -> bool:
    first = next((line.text for line in lines if not line.level), "")
    return len(first) < 2 * HEADING_LENGTH and _DISAMBIGUATION.fullmatch(first.strip()) is not None


def _ebook_frame(lines: list[Line], layout: str) -> set[int]:
    """Finds the lines before and after a text of Project Gutenberg."""
    if layout not in ("blocks", "lines"):
        return set()
    marks = [i for i, line in enumerate(lines) if "PROJECT GUTENBERG" in line.text.upper()]
    start = next((i + 1 for i in marks if _EBOOK_START.search(lines[i].text)), 0)
    end = next((i for i in marks if i >= start and _EBOOK_END.search(lines[i].text)), len(lines))
    return {*range(start), *range(end, len(lines))}


def _notices(lines: list[Line], layout: str) -> set[int]:
    """Short lines with notices of rights and the like; notes of transcribers, footnotes, entries of contents."""
    lowered = [line.text.lower() if len(line.text) <= _NOTICE_LENGTH else "" for line in lines]
    text = "\n".join(lowered)
    found: set[int] = set()
    if any(words in text for words in _NOTICES):  # one search each, where most documents have none
        found = {i for i, line in enumerate(lowered) if _NOTICE.search(line)}
    for i, line in enumerate(lines):
        if line.text[0] == "[" and _BRACKETED_NOTE.match(line.text):
            found.add(i)
        elif line.text[0] in "[Tt*" and _NOTE.match(line.text):
            found.update((i, i + 1) if len(line.text) < 40 and i + 1 < len(lines) else (i,))
        elif (
            len(line.text) <= _NOTICE_LENGTH
            and line.text.rstrip()[-1:].isalnum()
            and _CONTENTS_ENTRY.fullmatch(line.text)
        ):
            found.add(i)
    return found


def _end_matter(lines: list[Line], layout: str) -> set[int]:
    """Finds lists from a heading like "References" to one of the same or a higher level; without levels, to prose."""
    found = set()
    inside: int | None = None  # level of the heading that began it, 0 if it has none
    for i, (text, level) in enumerate(lines):
        if inside is not None and (0 < level <= (inside or 6) or (not inside and is_prose(text))):
            inside = None
        if inside is None and len(text) <= HEADING_LENGTH and _END_MATTER.fullmatch(text.strip()):
            inside = level
        if inside is not None:
            found.add(i)
    return found


def _contents(lines: list[Line], layout: str) -> set[int]:
    """A table of contents: short lines from its heading to the first paragraph, or chapter that it has named."""
    start = next((i for i, line in enumerate(lines[:200]) if _CONTENTS.fullmatch(line.text.strip())), None)
    if start is None or layout != "blocks":
        return set()
    end = start + 1
    while end < len(lines) and len(lines[end].text) <= _PROSE_LENGTH:
        end += 1
    return set(range(start, end))


def _headings(lines: list[Line], layout: str) -> set[int]:
    dotted = layout == "dotted_lines"
    return {i for i, (text, level) in enumerate(lines) if level or is_heading(text, dotted)}


LINE_RULES: list[LineRule] = [
    ("boilerplate", "lines_boilerplate", _ebook_frame),
    ("boilerplate", "lines_boilerplate", _notices),
    ("boilerplate", "lines_boilerplate", _contents),
    ("end_matter", "lines_end_matter", _end_matter),
    ("headings", "lines_heading", _headings),
]

# Rules for sentences: function(sentence) -> whether to drop it.

SentenceRule = tuple[str, str, Callable[[str], bool]]


def _has_hole(sentence: str) -> bool:
    return HOLE in sentence or "formula_" in sentence or "codice_" in sentence  # the latter are WikiExtractor's


ROW_RULES: list[SentenceRule] = [
    ("sentences_without_letter", "sentences_without_letter", lambda sentence: not any(map(str.isalpha, sentence))),
    ("long_sentences", "sentences_too_long", lambda sentence: len(sentence) > LONGEST_SENTENCE),
]
WIKI_RULES: list[SentenceRule] = [("holes", "sentences_with_holes", _has_hole)]
