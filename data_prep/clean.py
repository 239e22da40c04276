"""Cleans the text of a document and returns the sentences to keep. What each rule drops is counted."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from itertools import chain, compress, filterfalse, pairwise
from typing import NamedTuple

import numpy as np

from data_prep.drops import DropLog
from data_prep.read import RawDocument, unescape
from data_prep.sentences import QUOTES, split_paragraph
from data_prep.sources import Layout
from data_prep.wikitext import HOLE, mend_extract, plain_text

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
    text = plain_text(raw.text) if raw.layout == "wikitext" else raw.text
    drops.text[raw.source] += len(text)
    is_typeset = "\f" in text
    if is_typeset and "markup" in rules:
        text = _without_page_lines(text, raw, drops)
    text = text.replace("\f", "\n")
    if "unicode" in rules:
        text = _plain_characters(text, raw, drops)
    if "markup" in rules and raw.layout == "markdown":
        text = _without_markup(text, raw, drops)
    elif "markup" in rules and raw.layout == "wikipedia":
        text = mend_extract(text)
    lines = lines_of(text, raw.layout, is_typeset)
    if raw.layout in ("wikitext", "wikipedia"):
        lines = _with_holes(lines, raw.layout, "holes" in rules)
    else:
        rules -= {"holes"}
    titles, lines = lines[: raw.titles], lines[raw.titles :]
    if raw.layout in ("sentences", "lines"):
        rules -= LINE_RULES.keys()
    for rule, (reason, find) in LINE_RULES.items():
        dropped = find(lines, raw.layout) if rule in rules else ()
        for i in sorted(dropped):
            drops.add(reason, raw, lines[i].text, len(lines[i].text))
        lines = [line for i, line in enumerate(lines) if i not in dropped]
    texts = [line.text.strip() for line in (*titles, *lines)]
    if raw.layout != "sentences":
        texts = [sentence for text in texts for sentence in split_paragraph(text, language)]
    for rule, (reason, is_bad) in SENTENCE_RULES.items():
        if rule in rules and (bad := list(filter(is_bad, texts))):
            for sentence in bad:
                drops.add(reason, raw, sentence, len(sentence))
            texts = list(filterfalse(is_bad, texts))
    return texts


# From text to lines.

_HEADING = {"wikitext": re.compile(r"(={1,6}) (.*) \1")}
_HEADING["plain"] = _HEADING["markdown"] = re.compile(r"(#{1,6})(?: +(.*?))?[ #]*")
_QUOTES_OPEN = tuple(QUOTES + "‘'")


def lines_of(text: str, layout: Layout, is_typeset: bool = False) -> list[Line]:
    """Returns the paragraphs of a document, with the levels of headings where markup marks them."""
    lines = text.split("\n")
    if layout == "markdown":
        texts = markdown_paragraphs(lines)
    elif layout == "plain":
        texts = unwrap(lines, is_typeset)
    else:
        texts = [line for line in lines if line.strip()]
    heading, marked = _HEADING.get(layout), list[Line]()
    for text in texts:
        match = heading.fullmatch(text) if heading else None
        marked.append(Line(match[2] or "", len(match[1])) if match else Line(text))
    return marked


# Text that was wrapped by hand.

WIDTHS = np.arange(50, 161)  # columns at which text is taken to be wrapped
LEAST_SHARE = 0.25  # of the line breaks that the width explains; in other text it is about 0.1
TYPESET_SHARE = 0.9  # of the length that nine of ten lines of a typeset text have at most
CAPITAL_SHARE = 0.15  # of the words; German has 0.3, English 0.05
FEWEST_RECORDS = 4  # lines; fewer may be one wrapped sentence
_LINE_ENDS_SENTENCE = (r"[.!?…][\"”’')\]]*\s+\S", r"[.!?…:;][\"”’')\]]*\s*$")
_HYPHENATED = re.compile(r"(\w+)-\n([a-zß-öø-ÿ]\w*)")
_ITEM = re.compile(r"\s*(?:[-*•+–]|\d{1,3}[.)]|\(?[a-z]\))\s")
_BROKEN_WORD = re.compile(r"(?<=\w-)\n(?=\w)|(?<=--)\n(?=\w)")


def unwrap(lines: list[str], is_typeset: bool = False) -> list[str]:
    """Returns the paragraphs of a text, without blank lines.

    Text wrapped at W columns has a break where the next word would pass W. So each break implies
    that W is at least the line's length and at most that with the next line's first word. A break
    before a capital, as in verse, speaks against its widths. If a width explains many breaks, lines
    that are full at this width are joined to the next, and so are lines before a small letter.
    Lines of a typeset text, of pages, are of one width but not of one number of characters.
    """
    filled = [line for line in lines if line.strip()]
    lines = [line.expandtabs().rstrip() for line in lines]
    pairs = list(pairwise(["", *lines]))
    may_join = [bool(a and b) and not _begins_paragraph(a, b) for a, b in pairs]
    breaks = list(compress(pairs, may_join))
    if not breaks:
        return filled
    length = np.array([len(line) for line, _ in breaks])
    longest = length + [len(following.split(None, 1)[0]) for _, following in breaks]
    capital = 0.0 if _has_capital_nouns(lines) else -1.0
    votes = np.array([capital if b.lstrip()[0].isupper() else 1.0 for _, b in breaks])
    explains = (length[:, None] <= WIDTHS) & (longest[:, None] >= WIDTHS)  # (breaks, widths)
    totals = votes @ explains
    best = int(totals.argmax())
    width = WIDTHS[best]
    is_wrapped = totals[best] > 0 and explains[:, best].mean() >= LEAST_SHARE
    if is_typeset:
        width, is_wrapped = TYPESET_SHARE * np.quantile(length, 0.9), True
    if not is_wrapped or _are_records(filled[:: max(len(filled) // 400, 1)]):
        return filled
    paragraphs: list[str] = []
    for (last, line), joins in zip(pairs, may_join, strict=True):
        text = line.lstrip()
        if joins and (text[0].islower() or len(last) + len(text.split(None, 1)[0]) >= width):
            paragraphs[-1] += f"\n{text}"
        elif text:
            paragraphs.append(text)
    if any("-\n" in text for text in paragraphs):
        whole = "\n".join(lines)
        paragraphs = [_mended(text, whole) if "-\n" in text else text for text in paragraphs]
    return [text.replace("\n", " ") for text in paragraphs]


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
            line = Line(text[:-1] + HOLE + ":")
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
    r"!\[[^\]]*\](?:\([^()\s]*(?:\([^()]*\)[^()]*)*[^()]*\)|\[[^\]]*\])"
    r"|(?<=[^\s`(])\[\^[\w-]+\](?!:)|(?m:^)\[\^[\w-]+\]:"
)
_LINK = re.compile(r"\[([^\[\]]+)\](?:\((?:[^()]|\([^()]*\))*\)|\[[^\]\n]*\])")
_EMPHASIS = re.compile(r"(?<![\w*`])(\*\*|__|`+|\*)(?=\S)([^*`\n]+?)(?<=\S)\1(?![\w*`])")
_MARKUP_TAG = re.compile(r"</?[a-zA-Z][^<>\n]*>")


def _without_markup(text: str, raw: RawDocument, drops: DropLog) -> str:
    """Returns Markdown's text without code, tables and the targets of links."""

    def drop(match: re.Match[str]) -> str:
        lines = match[0].strip("\n").count("\n") + 1
        drops.add("lines_markup", raw, match[0], len(match[0]), lines)
        return ""

    text = _UNDERLINED.sub(r"# \1", _BLOCKS.sub(drop, text))
    for pattern, target in ((_IMAGE, ""), (_LINK, r"\1"), (_EMPHASIS, r"\2"), (_MARKUP_TAG, "")):
        if found := [match[0] for match in pattern.finditer(text)]:
            before, text = len(text), pattern.sub(target, text)
            drops.add("characters_of_markup", raw, " ".join(found), before - len(text), len(found))
    return unescape(text).replace("\xa0", " ")


def markdown_paragraphs(lines: list[str]) -> list[str]:
    """Returns the paragraphs of Markdown: a line continues the last, but for a heading or an item."""
    paragraphs, is_open = list[str](), False
    for line in lines:
        text = line.lstrip(" \t>").rstrip()
        text = text if text.strip("-=*_ ") else ""  # a rule
        is_marked = text.startswith("#")
        item = _ITEM.match(text)
        if is_open and text and not is_marked and not item:
            paragraphs[-1] += f" {text}"
        elif text:
            paragraphs.append(text[item.end() :] if item else text)
        is_open = bool(text) and not is_marked
    return list(filter(None, paragraphs))


def _without_page_lines(text: str, raw: RawDocument, drops: DropLog) -> str:
    """Returns a text of pages, divided by form feeds, without headers and footers.

    These are the two first or last lines of a page that occur on at least half of the pages, whatever their numbers.
    """
    pages = [page.split("\n") for page in text.split("\f") if page.strip()]
    edges = list[dict[int, str]]()  # of each page, the places of these lines, and their text
    for page in pages:
        filled = [i for i, line in enumerate(page) if line.strip()]
        edges.append({i: re.sub(r"\d+", "0", page[i].strip()) for i in filled[:2] + filled[-2:]})
    repeated = Counter(chain.from_iterable(set(edge.values()) for edge in edges))
    for page, edge in zip(pages, edges, strict=True):
        for i, line in edge.items():
            if repeated[line] >= max(3, len(pages) / 2):
                drops.add("lines_of_pages", raw, page[i], len(page[i]))
                page[i] = ""
    texts = ("\n".join(page).strip("\n") for page in pages)
    return "\n".join(filter(None, texts))  # a paragraph may go on on the next page


# The rule for the text.

# Line ends, spaces, and control characters, but not the zero-width joiners of Persian and Indian scripts.
_LINE_ENDS = "\r\u2028\u2029"
_LIGATURES = "\ufb00\ufb01\ufb02\ufb03\ufb04\ufb05\ufb06"  # ff, fi, fl, ffi ... of PDF
_SPECIAL = re.compile(
    f"[{_LINE_ENDS}{_LIGATURES}\t\x0b\x0c\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u202f\u205f\u3000"
    "\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\ufeff\ufffc]"
)


def _plain_characters(text: str, raw: RawDocument, drops: DropLog) -> str:
    """Returns the text with plain characters; counts those that are removed."""
    removed: list[str] = []

    def plain(match: re.Match[str]) -> str:
        if match[0].isspace():
            return "\n" if match[0] in _LINE_ENDS else " "
        if match[0] in _LIGATURES:
            return unicodedata.normalize("NFKC", match[0])
        removed.append(f"U+{ord(match[0]):04X}")
        return ""

    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    text = _SPECIAL.sub(plain, text.replace("\r\n", "\n"))
    if removed:
        drops.add("characters_control", raw, " ".join(removed), 0, len(removed))
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
    if layout not in ("plain", "markdown"):
        return found
    return {i for i in found if lines[i].level or not _is_sentence(lines, i)}


_MARKS_AFTER_END = re.compile(r"(?:\s*(?:\[\d{1,3}\]|[¹²³⁰-⁹*†‡]))+$")
_EMOJI = "\u2600-\u27bf\ufe0f\u200d\U0001f000-\U0001faff"
_ENDS_WITH_EMOJI = re.compile(rf"[{_EMOJI}]$|\s[:;]-?[)(DP]$")


def _is_sentence(lines: list[Line], i: int) -> bool:
    """Returns whether a line without final punctuation is a sentence nevertheless.

    So are: a line that ends with an emoji; one with a full stop before a footnote's mark; one of five words or more
    that ends with a bracket; and one of eight words or more between two others as long.
    """
    text = lines[i].text.strip()
    if _CHAPTER.fullmatch(text):
        return False
    bare = _MARKS_AFTER_END.sub("", text)
    words = len(text.split())
    if (bare != text and bare[-1:] in ".!?…") or _ENDS_WITH_EMOJI.search(text):
        return words >= 3
    if text[-1:] == ")" and words >= 5:
        return True
    if words < 8 or not 0 < i < len(lines) - 1:
        return False
    return all(8 <= len(lines[k].text.split()) <= 2 * words for k in (i - 1, i + 1))


LINE_RULES = {
    "end_matter": ("lines_end_matter", _end_matter),
    "headings": ("lines_heading", _headings),
}


def _has_no_letter(sentence: str) -> bool:
    return not any(map(str.isalpha, sentence))


# Rules for sentences: function(sentence) -> whether to drop it. WikiExtractor writes formula_1 and codice_1.
SENTENCE_RULES: dict[str, tuple[str, Callable[[str], bool]]] = {
    "sentences_without_letter": ("sentences_without_letter", _has_no_letter),
    "long_sentences": ("sentences_too_long", lambda s: len(s) > LONGEST_SENTENCE),
    "replacement_characters": ("sentences_not_utf8", lambda s: BAD_CHARACTER in s),
    "holes": ("sentences_with_holes", lambda s: HOLE in s or "formula_" in s or "codice_" in s),
}
