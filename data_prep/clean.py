"""Cleans the text of a document and returns the sentences to keep. What each rule drops is counted."""

import re
import unicodedata
from collections.abc import Callable
from itertools import compress, pairwise
from typing import NamedTuple

import numpy as np

from data_prep.formats.base import Layout, RawDocument
from data_prep.formats.tables import without_tags
from data_prep.ledger import HOLE, Left, left, size
from data_prep.sentences import LONG_WIDE, NO_SPACES, NO_STOPS, QUOTES, cut_long, split_paragraph
from data_prep.wikitext import mend_extract, plain_text

HEADING_LENGTH = 100
LONGEST_SENTENCE = 10_000
PROSE_LENGTH = 150
_PAGE_ENDS = re.compile(r"\n*\f\n*")  # a paragraph may go on on the next page
_NO_STOPS = re.compile(f"[{NO_STOPS}]")
FEWEST_LINES, LINE_WORDS = 3, 4  # lines, and words of each, of a text without full stops
BAD_CHARACTER = "\ufffd"  # REPLACEMENT CHARACTER: a byte that is not UTF-8


class Line(NamedTuple):
    """A paragraph or a heading. `level`: 1 to 6 for a heading that its markup marks, else 0."""

    text: str
    level: int = 0


def clean(raw: RawDocument, rules: frozenset[str], language: str) -> tuple[list[str], list[Left]]:
    """Returns the sentences of a document that the rules (of `settings.RULES`) keep, and what is left out."""
    out = list[Left]()
    is_wiki = raw.layout in ("wikitext", "wikipedia")
    text = _rewritten(raw.text, rules, raw.layout, out)
    is_typeset = raw.layout == "plain" and "\f" in raw.text  # as pdftotext writes it
    lines = lines_of(text, "pages" if is_typeset else raw.layout, out)
    lines = _with_holes(lines, raw.layout, "holes" in rules) if is_wiki else lines
    rules = rules if is_wiki else rules - {"holes"}
    titles, lines = lines[: raw.titles], lines[raw.titles :]
    if raw.layout in ("sentences", "lines"):
        rules -= LINE_RULES.keys()
    for rule, (reason, find) in LINE_RULES.items():
        dropped = find(lines, raw.layout) if rule in rules else set()
        if rule == "headings" and raw.layout in ("plain", "pages"):
            kept = without_stops(lines, dropped)
            out += [Left("lines_without_stops", lines[i].text, 0) for i in sorted(kept)]
            dropped -= kept
        out += [left(reason, lines[i].text) for i in sorted(dropped)]
        lines = [line for i, line in enumerate(lines) if i not in dropped]
    texts = [line.text.strip() for line in (*titles, *lines)]
    if raw.layout != "sentences":
        texts = [sentence for text in texts for sentence in split_paragraph(text, language)]
        if max(map(len, texts), default=0) > LONG_WIDE:
            texts = [piece for text in texts for piece in _cut(text, out)]
    for rule, (reason, is_bad) in SENTENCE_RULES.items():
        if rule in rules and any(bad := list(map(is_bad, texts))):
            out += [left(reason, sentence) for sentence in compress(texts, bad)]
            texts = [sentence for sentence, goes in zip(texts, bad, strict=True) if not goes]
    return texts, out


def _cut(sentence: str, out: list[Left]) -> list[str]:
    pieces = cut_long(sentence)
    if len(pieces) > 1:
        out.append(Left("sentences_cut", sentence, 0))
    return pieces


def _rewritten(text: str, rules: frozenset[str], layout: Layout, out: list[Left]) -> str:
    """Returns the text without markup and with plain characters; adds to `out` what goes."""
    if layout == "wikitext":
        before, text = text, plain_text(text)
        out.append(Left("characters_of_wikitext", before, size(before) - size(text)))
    text = _PAGE_ENDS.sub("\n", text) if "\f" in text else text
    if "unicode" in rules:
        text = _plain_characters(text, out)
    if "markup" in rules and layout == "markdown":
        text = _without_markup(text, out)
    elif "markup" in rules and layout == "plain" and "|" in text:
        text = _without_tables(text, out)
    elif "markup" in rules and layout == "wikipedia":
        before = text
        text, removed = mend_extract(text)
        if removed:
            out.append(Left("characters_of_markup", before, removed))
    return text


# From text to lines.

_HEADING = {"wikitext": re.compile(r"(={1,6}) (.*) \1")}
_HEADING["plain"] = _HEADING["markdown"] = re.compile(r"(#{1,6})(?: +(.*?))?[ #]*")
_QUOTES_OPEN = tuple(QUOTES + "‘'")


def lines_of(text: str, layout: Layout, out: list[Left]) -> list[Line]:
    """Returns the paragraphs of a document, with the levels of headings where markup marks them.

    The marks of headings and items, and hyphens at line ends, are added to `out`.
    """
    lines, marks = text.split("\n"), 0
    if layout == "markdown":
        texts, marks = markdown_paragraphs(lines)
    elif layout in ("plain", "pages"):
        texts, marks = unwrap(lines, layout == "pages")
    else:
        texts = [line for line in lines if line.strip()]
    heading, marked = _HEADING.get(layout), list[Line]()
    for text in texts:
        match = heading.fullmatch(text) if heading and text[0] in "#=" else None
        if match:
            marks += size(text) - size(match[2] or "")
        marked.append(Line(match[2] or "", len(match[1])) if match else Line(text))
    if marks:
        out.append(Left("characters_of_layout", "", marks))
    return marked


# Text that was wrapped by hand.

WIDTHS = np.arange(50, 161)  # columns at which text is taken to be wrapped
LEAST_SHARE = 0.25  # of the line breaks that the width explains; in other text it is about 0.1
BREAKS = 4096  # line breaks that decide on the width, taken at equal distances
TYPESET_SHARE = 0.9  # of the length that nine of ten lines of a typeset text have at most
CAPITAL_SHARE = 0.15  # of the words; German has 0.3, English 0.05
FEWEST_RECORDS = 4  # lines; fewer may be one wrapped sentence
WIDE_SHARE = 0.3  # of the characters; more are a text without spaces between words
LEAST_WIDE, MOST_WIDE = 16, 0.1  # columns of such a text, and share of the lines that are longer
_LINE_ENDS_SENTENCE = (r"[.!?…][\"”’')\]]*\s+\S", r"[.!?…:;][\"”’')\]]*\s*$")
_HYPHENATED = re.compile(r"(\w+)-\n([a-zß-öø-ÿ]\w*)")
_ITEM = re.compile(r"\s*(?:[-*•+–]|\d{1,3}[.)]|\(?[a-z]\))\s")
_BROKEN_WORD = re.compile(r"(?<=\w-)\n(?=\w)|(?<=--)\n(?=\w)")
_BREAK_WITHOUT_SPACE = re.compile(f"(?<=[{NO_SPACES}])\n(?=[{NO_SPACES}])")
_FIRST_WORD = re.compile(f"[^\\s{NO_SPACES}]+")


def unwrap(lines: list[str], is_typeset: bool = False) -> tuple[list[str], int]:
    """Returns the paragraphs of a text, without blank lines, and the number of hyphens that go.

    Text wrapped at W columns has a break where the next word would pass W. So each break implies
    that W is at least the line's length and at most that with the next line's first word. A break
    before a capital, as in verse, speaks against its widths. If a width explains many breaks, lines
    that are full at this width are joined to the next, and so are lines before a small letter.
    Lines of a typeset text, of pages, are of one width but not of one number of characters.
    """
    filled = [line for line in lines if line.strip()]
    lines = [line.expandtabs().rstrip() if "\t" in line else line.rstrip() for line in lines]
    may_join = [bool(a and b) and not _begins_paragraph(a, b) for a, b in pairwise(["", *lines])]
    places = [i for i, joins in enumerate(may_join) if joins]
    breaks = [(lines[i - 1], lines[i]) for i in places[:: len(places) // BREAKS + 1]]
    if not breaks:
        return filled, 0
    sample = "".join(filled[:: len(filled) // 400 + 1])
    is_wide = len(re.findall(f"[{NO_SPACES}]", sample)) > WIDE_SHARE * len(sample)
    width = _wide_width(breaks) if is_wide else _width(breaks, filled, is_typeset)
    if not width:
        return filled, 0
    paragraphs: list[str] = []
    for i, line in enumerate(lines):
        text = line.lstrip()
        if may_join[i] and (text[0].islower() or _next_end(lines[i - 1], text, is_wide) >= width):
            paragraphs[-1] += f"\n{text}"
        elif text:
            paragraphs.append(text)
    marks = 0
    if any("-\n" in text for text in paragraphs):
        whole = "\n".join(lines)
        mended = [_mended(text, whole) if "-\n" in text else text for text in paragraphs]
        marks = sum(map(size, paragraphs)) - sum(map(size, mended))
        paragraphs = mended
    if is_wide:
        paragraphs = [_BREAK_WITHOUT_SPACE.sub("", text) for text in paragraphs]
    return [text.replace("\n", " ") for text in paragraphs], marks


def _width(breaks: list[tuple[str, str]], filled: list[str], is_typeset: bool) -> float:
    """Returns the width at which a text with spaces was wrapped; 0 if it was not."""
    length = np.array([len(line) for line, _ in breaks])
    longest = length + [len(following.split(None, 1)[0]) for _, following in breaks]
    if is_typeset:
        return float(TYPESET_SHARE * np.quantile(length, 0.9))
    capital = 0.0 if _has_capital_nouns(filled) else -1.0
    votes = np.array([capital if b.lstrip()[0].isupper() else 1.0 for _, b in breaks])
    explains = (length[:, None] <= WIDTHS) & (longest[:, None] >= WIDTHS)  # (breaks, widths)
    totals = votes @ explains
    best = int(totals.argmax())
    is_wrapped = totals[best] > 0 and explains[:, best].mean() >= LEAST_SHARE
    if not is_wrapped or _are_records(filled[:: max(len(filled) // 400, 1)]):
        return 0.0
    return float(WIDTHS[best])


def _wide_width(breaks: list[tuple[str, str]]) -> float:
    """Returns the width of a text without spaces, whose full lines have about one length; 0 if it was not wrapped."""
    length = np.array([len(line) for line, _ in breaks])
    ends = np.array([_next_end(line, following.lstrip(), True) for line, following in breaks])
    widths = np.arange(LEAST_WIDE, max(length.max(), LEAST_WIDE) + 1)
    fits = [((length <= width) & (ends >= width)).mean() for width in widths]
    best = int(np.argmax(fits))
    is_wrapped = fits[best] >= LEAST_SHARE and (length > widths[best]).mean() <= MOST_WIDE
    return float(widths[best]) if is_wrapped else 0.0


def _next_end(last: str, text: str, is_wide: bool) -> int:
    """Returns the length of a line with the first word of the next one; without spaces, two characters."""
    if not is_wide:
        return len(last) + len(text.split(None, 1)[0])
    word = _FIRST_WORD.match(text)
    return len(last) + max(len(word[0]) if word else 0, 2)


def _mended(text: str, document: str) -> str:
    """Returns a paragraph with its broken words joined; without the hyphen if `document` has the whole word."""

    def whole(match: re.Match[str]) -> str:
        joined = match[1] + match[2]
        occurs = joined in document and re.search(rf"\b{joined}\b", document)
        return joined if occurs else f"{match[1]}-{match[2]}"

    return _BROKEN_WORD.sub("", _HYPHENATED.sub(whole, text))


def _has_capital_nouns(lines: list[str]) -> bool:
    """Returns whether many words inside lines begin with a capital, as in German."""
    inner = [word for line in lines[:200] for word in line.split()[1:] if word[0].isalpha()]
    return sum(word[0].isupper() for word in inner) > CAPITAL_SHARE * len(inner)


def _are_records(lines: list[str]) -> bool:
    """Returns whether each line is a record, as in logs: no sentence ends inside one.

    Of wrapped prose, some lines have the end of a sentence inside, and some but not most end with one.
    """
    if len(lines) < FEWEST_RECORDS:
        return False
    ends = np.array([[bool(re.search(p, line)) for p in _LINE_ENDS_SENTENCE] for line in lines])
    inside, at_end = ends.mean(axis=0)
    return bool(inside < 0.05 and not 0.05 <= at_end <= 0.8)


def _begins_paragraph(last: str, line: str) -> bool:
    """Returns whether a line is an item of a list or is indented after the line before it."""
    text = line.lstrip()
    is_indented = text != line and len(line) - len(text) > len(last) - len(last.lstrip())
    begins = is_indented and text[0].isupper() and not _ITEM.match(last)
    return begins or _ITEM.match(line) is not None


def _with_holes(lines: list[Line], layout: Layout, wanted: bool) -> list[Line]:
    """Marks each line that announces a list which is gone; without `wanted`, removes all marks.

    Wikipedia's text lacks all lists, but no quotations; of markup, items like headings are dropped.
    """
    if not wanted:
        return [Line(line.text.replace(HOLE, ""), line.level) for line in lines]
    result = []
    for line, following in zip(lines, [*lines, Line("", 1)][1:], strict=True):
        text = line.text.rstrip(" .") if line.text[-2:] in (":.", ": ") else line.text
        lost = is_heading(following.text)
        if layout == "wikipedia":
            lost = following.text[:1] not in _QUOTES_OPEN
        if text[-1:] == ":" and (lost or following.level):
            place = len(text) - 1
            line = Line(line.text[:place] + HOLE + line.text[place:])
        result.append(line)
    return result


# Markup, and lines that repeat on each page.

_BLOCKS = re.compile(  # front matter, code, comments, rows of tables, targets of links
    r"\A---\n.*?\n---\n|^[ >]*(?:(?:[-*+]|\d+[.)])[ ]+)?(?P<fence>```+|~~~+)[^`\n]*$"
    r".*?(?:^[ >]*(?P=fence)[`~]*[ \t]*$|\Z)|<!--(?:(?!<!--).)*?-->"
    r"|^[ \t]*\|[^\n]*\|[ \t]*$|^ {0,3}\[(?!\^)[^\]\n]+\]:[ \t]*\S[^\n]*$",
    re.MULTILINE | re.DOTALL,
)
_UNDERLINED = re.compile(
    r"(?m)(?<![^\n]\n)^(?![ \t]*(?:[#>|*+-]|\d+[.)]))(\S.*)\n(?:=+|-{2,})[ \t]*$"
)
_IMAGE = re.compile(  # or the mark of a footnote
    r"!\[[^\]\n]{0,200}\](?:\([^()\s]*(?:\([^()\n]*\)[^()\n]*)*[^()\n]*\)|\[[^\]\n]*\])"
    r"|(?<=[^\s`(])\[\^[\w-]+\](?!:)|(?m:^)\[\^[\w-]+\]:"
)
_LINK = re.compile(r"\[([^\[\]]+)\](?:\((?:[^()\n]|\([^()\n]*\))*\)|\[[^\]\n]*\])")
_EMPHASIS = re.compile(r"(?<![\w*`])(\*\*|__|`+|\*)(?=\S)([^*`\n]+?)(?<=\S)\1(?![\w*`])")
_ADDRESS = re.compile(r"<((?:https?://|mailto:)[^<>\s]+)>")
_TABLE = re.compile(r"(?m)^[ \t]*\|[^\n]*\|[ \t]*$")


def _without_markup(text: str, out: list[Left]) -> str:
    """Returns Markdown's text without code, tables and the targets of links."""
    before, found = size(text), len(out)

    def drop(match: re.Match[str]) -> str:
        out.append(left("lines_markup", match[0], match[0].strip("\n").count("\n") + 1))
        return ""

    text = _UNDERLINED.sub(r"# \1", _BLOCKS.sub(drop, text))
    before -= sum(entry.characters for entry in out[found:])
    examples, count = list[str](), 0
    for pattern, target in ((_IMAGE, ""), (_LINK, r"\1"), (_EMPHASIS, r"\2"), (_ADDRESS, r"\1")):
        if matches := [match[0] for match in pattern.finditer(text)]:
            examples += matches[:3]
            count += len(matches)
            text = pattern.sub(target, text)
    text = without_tags(text).replace("\xa0", " ")
    if count or size(text) != before:
        example = " ".join(examples)
        out.append(Left("characters_of_markup", example, before - size(text), max(count, 1)))
    return text


def _without_tables(text: str, out: list[Left]) -> str:
    """Returns a plain text without the rows of tables, which begin and end with a bar."""

    def drop(match: re.Match[str]) -> str:
        out.append(left("lines_of_tables", match[0]))
        return ""

    return _TABLE.sub(drop, text) if len(_TABLE.findall(text)) > 1 else text


def markdown_paragraphs(lines: list[str]) -> tuple[list[str], int]:
    """Returns the paragraphs of Markdown and the number of characters of the marks that go.

    A line continues the last one, unless it is a heading or an item.
    """
    paragraphs, is_open, marks = list[str](), False, 0
    for line in lines:
        text = line.lstrip(" \t>").rstrip()
        text = text if text.strip("-=*_ ") else ""  # a rule
        is_marked = text.startswith("#")
        item = _ITEM.match(text)
        marks += size(line) - size(text) if len(text) < len(line) else 0
        if is_open and text and not is_marked and not item:
            paragraphs[-1] += f"\n{text}"
        elif text:
            paragraphs.append(text[item.end() :] if item else text)
            marks += size(item[0]) if item else 0
        is_open = bool(text) and not is_marked
    joined = (_BREAK_WITHOUT_SPACE.sub("", text).replace("\n", " ") for text in paragraphs)
    return list(filter(str.strip, joined)), marks


# The rule for the text.

# Line ends, spaces, and control characters, but not the zero-width joiners of Persian and Indian scripts.
_LINE_ENDS = "\r\u2028\u2029"
_LIGATURES = "\ufb00\ufb01\ufb02\ufb03\ufb04\ufb05\ufb06"  # ff, fi, fl, ffi ... of PDF
_SPECIAL = re.compile(
    f"[{_LINE_ENDS}{_LIGATURES}\t\x0b\x0c\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u202f\u205f\u3000"
    "\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\ufeff\ufffc]"
)


def _plain_characters(text: str, out: list[Left]) -> str:
    """Returns the text with plain characters; counts those that are removed."""
    removed, composed = list[str](), 0

    def plain(match: re.Match[str]) -> str:
        nonlocal composed
        if match[0].isspace():
            return "\n" if match[0] in _LINE_ENDS else " "
        if match[0] in _LIGATURES:
            written = unicodedata.normalize("NFKC", match[0])
            composed -= len(written) - 1
            return written
        removed.append(f"U+{ord(match[0]):04X}")
        return ""

    if not unicodedata.is_normalized("NFC", text):
        before, text = text, unicodedata.normalize("NFC", text)
        composed = size(before) - size(text)
    text = _SPECIAL.sub(plain, text.replace("\r\n", "\n"))
    if removed:
        out.append(Left("characters_control", " ".join(removed), len(removed), len(removed)))
    if composed:
        out.append(Left("characters_composed", "", composed))
    return text


# Rules for lines: function(lines, layout) -> the indices of those to drop.

_NUMBERS = "one|two|three|four|five|six|seven|eight|nine|ten|first|second|third|fourth|fifth|last"
_CHAPTER = re.compile(
    r"(?i:(?:chapter|book|part|volume|section|canto|letter|act|scene|stave|kapitel|chapitre"
    rf"|cap[ií]tulo|capitolo|глава)\s+(?:[ivxlc]+|\d+|{_NUMBERS})\b.{{0,80}})|[IVXLC]+\.?"
)
_WIKIPEDIA_WORDS = "notes|sources|publications|anmerkungen|quellen"  # prose in other texts
_END_MATTER_WORDS = (
    "see also|references|footnotes|endnotes|external links|further reading|bibliography"
    "|bibliographies|citations|web ?links|(?:works|literature) cited"
    "|(?:cited|reference) (?:texts|works|literature)|filmography|discography"
    "|(?:selected|annotated|general|primary|secondary|additional|other|partial|etymological) "
    "(?:bibliography|works|publications|sources|references|readings?|filmography|discography)"
    "|literatur|weblinks|einzelnachweise|siehe auch|voir aussi|références"
    "|liens externes|bibliographie|notes et références|véase también|referencias|enlaces externos"
    "|bibliografía|collegamenti esterni|bibliografia|altri progetti|voci correlate"
)


def _headings_of(words: str) -> re.Pattern[str]:
    return re.compile(rf"(?i)(?:{words})(?:(?:,? and |, | & |/)(?:{words}))*\.?")


_END_MATTER = _headings_of(_END_MATTER_WORDS)
_WIKIPEDIA_END_MATTER = _headings_of(f"{_WIKIPEDIA_WORDS}|{_END_MATTER_WORDS}")
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


_AFTER_END = QUOTES + " ’')]"


def is_heading(paragraph: str, dotted: bool = False) -> bool:
    """Returns whether a paragraph is short and without final punctuation, or "CHAPTER IV. ...".

    With `dotted`, headings may end with a full stop, as WikiExtractor's do: then five words or
    fewer are a heading, ten if indented.
    """
    text = paragraph.strip()
    if len(text) > HEADING_LENGTH or (not text.isascii() and _NO_STOPS.search(text)):
        return False
    last = text.rstrip(_AFTER_END)[-1:]  # blanks, too: tokenized text ends with ? ''
    if not last or not unicodedata.category(last).startswith("P"):
        return True
    if dotted and last == "." and len(text.split()) <= (10 if paragraph[0] == " " else 5):
        return True
    return _CHAPTER.fullmatch(text) is not None


def _end_matter(lines: list[Line], layout: Layout) -> set[int]:
    """Finds end matter: from a heading such as References to the next of its level or to prose.

    In wikitext, prose below a heading with a level belongs to it.
    """
    is_wiki = layout in ("wikitext", "wikipedia")
    pattern = _WIKIPEDIA_END_MATTER if is_wiki else _END_MATTER
    numbers = set()
    inside: int | None = None  # level of the heading that began it, 0 if it has none
    for i, (text, level) in enumerate(lines):
        if inside is not None and (
            0 < level <= (inside or 6) or ((not inside or not is_wiki) and is_prose(text))
        ):
            inside = None
        if inside is None and len(text) <= HEADING_LENGTH and pattern.fullmatch(text.strip()):
            inside = level
        if inside is not None:
            numbers.add(i)
    return numbers


def _headings(lines: list[Line], layout: Layout) -> set[int]:
    dotted = layout == "wikipedia"
    found = {i for i, (text, level) in enumerate(lines) if level or is_heading(text, dotted)}
    if layout not in ("plain", "pages", "markdown"):
        return found
    return {i for i in found if lines[i].level or not _is_sentence(lines[i].text.strip())}


_MARKS_AFTER_END = re.compile(r"(?:\s*(?:\[\d{1,3}\]|[¹²³⁰-⁹*†‡]))+$")
_EMOJI = "\u2600-\u27bf\ufe0f\u200d\U0001f000-\U0001faff"
_ENDS_WITH_EMOJI = re.compile(rf"[{_EMOJI}]$|\s[:;]-?[)(DP]$")


def _is_sentence(text: str) -> bool:
    """Returns whether a line without final punctuation ends with an emoji, or a full stop before a footnote's mark."""
    bare = _MARKS_AFTER_END.sub("", text)
    is_ended = (bare != text and bare[-1:] in ".!?…") or _ENDS_WITH_EMOJI.search(text) is not None
    return is_ended and len(text.split()) >= 3


def without_stops(lines: list[Line], found: set[int]) -> set[int]:
    """Returns the lines, of those that look like headings, of a text that has no full stops at all.

    Most lines of speech, chats and verse look like headings, and have several words.
    """
    texts = {i: lines[i].text for i in found if not lines[i].level}
    words = sum(len(text.split()) for text in texts.values())
    is_text = len(texts) >= FEWEST_LINES and words >= LINE_WORDS * len(texts)
    return set(texts) if is_text and len(texts) > len(lines) / 2 else set()


LINE_RULES = {
    "end_matter": ("lines_end_matter", _end_matter),
    "headings": ("lines_heading", _headings),
}


# Rules for sentences: the reason, and whether one is to be dropped.
SENTENCE_RULES: dict[str, tuple[str, Callable[[str], bool]]] = {
    "sentences_without_letter": (
        "sentences_without_letter",
        lambda s: not s[0].isalpha() and not any(map(str.isalpha, s)),
    ),
    "long_sentences": ("sentences_too_long", lambda s: len(s) > LONGEST_SENTENCE),
    "replacement_characters": ("sentences_not_utf8", lambda s: BAD_CHARACTER in s),
    # WikiExtractor writes formula_1 and codice_1.
    "holes": ("sentences_with_holes", lambda s: HOLE in s or "formula_" in s or "codice_" in s),
}
