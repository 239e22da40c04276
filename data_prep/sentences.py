"""Splits paragraphs into sentences."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, chain, pairwise

import sentencex

# Scripts without blanks between words, of which the first ones also have no full stop: for classes of patterns.
NO_STOPS = "\u0e00-\u0fff"  # Thai, Lao, Tibetan
NO_SPACES = (
    f"{NO_STOPS}\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff00-\uff65\U00020000-\U0003ffff"
)
_SCRIPTS = re.compile(  # of a group's letters, sentencex has the rules of the language that names it
    "(?P<ja>[\u3040-\u30ff])|(?P<zh>[\u3400-\u9fff])|(?P<hi>[\u0900-\u097f])|(?P<bn>[\u0980-\u09ff])"
    "|(?P<pa>[\u0a00-\u0a7f])|(?P<gu>[\u0a80-\u0aff])|(?P<ta>[\u0b80-\u0bff])|(?P<te>[\u0c00-\u0c7f])"
    "|(?P<kn>[\u0c80-\u0cff])|(?P<ml>[\u0d00-\u0d7f])|(?P<my>[\u1000-\u109f])|(?P<hy>[\u0530-\u058f])"
    "|(?P<ar>[\u0600-\u06ff])|(?P<ru>[\u0400-\u04ff])|(?P<el>[\u0370-\u03ff])|(?P<am>[\u1200-\u137f])"
    "|(?P<en>[^\\W\\d_])"
)
_OTHER_SCRIPT = re.compile("[\u0370-\u1fff\u2e80-\U0003ffff]")
OWN_LANGUAGES = ("zh", "th", "lo", "km", "ur", "bo")  # which the rules for English split well
LONG, PIECE = 1000, 400  # characters of a sentence that is cut, and of its pieces
LONG_WIDE, PIECE_WIDE = 300, 150  # where no blanks stand between words
_CLAUSE = re.compile(r"[,;:–—]\s|[，；：、،؛]\s?")
_WIDE = re.compile(f"[{NO_SPACES}]")

QUOTES = '"“”„«»‘‚‹›`'
# sentencex never splits inside quotation marks, so a speech of ten sentences would be one. It also misses abbreviations
# right after a mark, as in `"Dr.` and `--Mr.`. So it gets blanks for these marks, and for single quotes that open.
_BLANKED = (*QUOTES, "''", "--", "—")
# sentencex does not split an item that begins with (1), either.
_LIST_NUMBER = re.compile(r"\((?<!\S.)(\w{1,2}|[ivx]+)\)(?=\s)")
# Marks that belong to the sentence after them, in Chinese without a blank before them; but tokenized text closes with
# '' that stands apart, and French with such a ».
_OPENING = re.compile(
    rf"(?:(?<=\s)|(?=[—-])|(?<=[。！？”’])(?=[“‘]))(?!(?:''|»)\s)[{QUOTES}'—\s-]+$"
)
# Marks that belong to the sentence before them, and pages of a reference.
_CLOSING = re.compile(rf"[{QUOTES}’'_)\]]+\.?(?![^\s—-])\s*|:\d[\d–,: ]*(?=\s)")


def _after(words: str, end: str = r"\.\s") -> str:
    """Returns a pattern that holds right after one of the words; a look-behind has one width."""
    return "(?:" + "|".join(rf"(?<=\b(?i:{word}){end})" for word in words.split()) + ")"


# Boundaries that sentencex misses.
_BEFORE_I = "am can could did do had have not said says shall should than thought was will would"
_MISSED = re.compile(
    rf"[.!?](?:[{QUOTES}’']?[)\]]\s+(?=[{QUOTES}'(]?[A-Z])"  # (He was wrong.) | She
    rf"|(?<=\b(?:me|[Nn]o).)[{QUOTES}’']*\s+(?=[{QUOTES}']?(?!(?:[VX]|[IVX]{{2,}})\b)[A-Z])"  # Maine, number
    rf"|(?<=[{QUOTES}’'].)\s+(?=[A-Z])"  # the letter "s". | In
    r"|(?<=[!?][!?])\s+(?=I\b)"
    r"|\s+(?=(?:(?:Some|Any|No|Every)(?:body|one|thing)|Nobody|Nothing)\b)"
    rf"|(?<= [A-K].)(?:{_after(_BEFORE_I, ' I.')}|(?<=itamin [A-K].))\s+(?=[A-Z])"  # no initials
    r"|(?<=[a-z]{3}.)(?<!etc.)\s+(?=[a-z]{1,2}[A-Z]))"  # iPhone
)
_OTHER_STOPS = re.compile(r"[។៕།۔]\s*")  # Khmer, Tibetan, Urdu
# A boundary without doubt, as most are: a fast test.
_PLAIN = re.compile(r"(?<=[a-z]{4}[.!?]\s)[A-Z]")
# Boundaries of sentencex that are none: the sentence continues after them.
_SAYS = (
    "said|says|asked|asks|cried|replied|answered|whispered|shouted|exclaimed|yelled|screamed|muttered|murmured|inquired"
    "|enquired|demanded|repeated|added|continued|began|called|snapped|growled|snarled|gasped|retorted"
)
_NAME = r"(?!(?:He|She|It|We|They|You|And|But|Then|So)\b)[A-Z][\w’'-]+(?: [A-Z][\w’'-]+)?"
_SPEAKER = rf"(?:I|The \w+|(?:(?:Mr|Mrs|Ms|Dr)\.? )?{_NAME})"
_BEFORE_NUMBER = "pag pagg cap eq eqs vol vols no nos p pp ch fig figs sec secs art arts para paras ca c fl approx"
_CLOCK = (
    r"Eastern|Central|Mountain|Pacific|[A-Z]{1,3}T\b|UTC|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
)
_GOES_ON = re.compile(
    r"(?![a-z]{1,2}[A-Z])[\s\[.…–—-]{0,20}[a-zß-öø-ÿа-я]|[,;:]"
    r"|(?<=[!-~])(?=[^\s—-])(?!(?<=[a-z]{2}[.!?])[A-Z][a-z’'-]+[\s,.])"  # no blank: MUL.APIN, nn.LayerNorm
    rf"|(?<=[?!…—-][{QUOTES}’'_]\s){_SPEAKER} (?:\w+ly )?(?:{_SAYS})\b"  # "Where?" Anna asked.
    r"|(?<=\s\.\.\s)"  # 1 .. 5
    rf"|(?=\d){_after(_BEFORE_NUMBER)}|(?=[IVXLC]+\b){_after('vol vols pp')}"
    rf"|{_after('[ap].m')}(?:{_CLOCK})"
    r"|(?<=[。！？」』][」』])と|(?<=डॉ\.\s)|(?<=श्री\.\s)|(?<=प्रो\.\s)"  # Japanese: ..., he said; Hindi: Dr.
)
_GERMAN_ORDINAL = re.compile(
    r"\b(?i:im|am|zum|vom|beim|seit|bis|d(?:er|ie|as|em|en|es)) \d{1,2}\.\s$"
)
_MARKER = re.compile(r"\W*(?:\d{1,3}[.)]\W*)?")  # not a sentence, but a mark before one: 12.


LONG_PARAGRAPH = 20_000  # characters
_WIDE_STOP = re.compile(r"[。．！？][”’」』）]*")


def split_paragraph(paragraph: str, language: str) -> Iterator[str]:
    """Returns the sentences of a paragraph in order; only white space is lost.

    The language `auto` is that of the script.

    sentencex takes quadratic time where there are no spaces, so long paragraphs are cut at full stops first.
    """
    if language == "auto":
        language = language_of(paragraph)
    if language in OWN_LANGUAGES:
        language = "en"
    if len(paragraph) <= LONG_PARAGRAPH:
        return _split(paragraph, language)
    cuts = [0]
    for match in _WIDE_STOP.finditer(paragraph):
        if match.end() - cuts[-1] >= LONG_PARAGRAPH:
            cuts.append(match.end())
    parts = (paragraph[start:end] for start, end in pairwise([*cuts, len(paragraph)]))
    return chain.from_iterable(_split(part, language) for part in parts)


def language_of(paragraph: str) -> str:
    """Returns the language whose rules fit the script of most letters; `en` for Latin letters."""
    if paragraph.isascii() or len(_OTHER_SCRIPT.findall(paragraph)) < len(paragraph) / 8:
        return "en"
    found = Counter(match.lastgroup for match in _SCRIPTS.finditer(paragraph[:200]))
    if found["ja"] > found["zh"] / 10:
        return "ja"
    return str(max(found, key=found.__getitem__, default="en"))


def cut_long(sentence: str) -> list[str]:
    """Returns the pieces of a text without full stops, cut after clauses or at blanks; most sentences are one."""
    if len(sentence) <= LONG_WIDE:
        return [sentence]
    is_wide = not sentence.isascii() and len(_WIDE.findall(sentence)) > len(sentence) / 2
    longest, piece = (LONG_WIDE, PIECE_WIDE) if is_wide else (LONG, PIECE)
    pieces, start = list[str](), 0
    while len(sentence) - start > (longest if start == 0 else piece * 3 // 2):
        first, last = start + piece // 2, start + piece
        cuts = [match.end() for match in _CLAUSE.finditer(sentence, first, last)]
        cut = cuts[-1] if cuts else sentence.rfind(" ", first, last) + 1
        if not cut:
            cut = last if is_wide else sentence.find(" ", last) + 1
        if not cut:
            break
        pieces.append(sentence[start:cut].strip())
        start = cut
    return list(filter(None, [*pieces, sentence[start:].strip()]))


def _split(paragraph: str, language: str) -> Iterator[str]:
    hidden = _hide(paragraph, language)
    missed = [match.end() for match in _MISSED.finditer(paragraph)]
    if not paragraph.isascii():
        missed += [match.end() for match in _OTHER_STOPS.finditer(paragraph)]
    cuts = sorted({*accumulate(map(len, sentencex.segment(language, hidden))), *missed})
    start = 0
    for cut in cuts[:-1]:
        if not paragraph[cut - 1].isspace() or hidden[cut - 2] != paragraph[cut - 2]:
            if opening := _OPENING.search(paragraph, max(start, cut - 6), cut):
                cut = opening.start()
            elif closing := _CLOSING.match(paragraph, cut):
                cut = closing.end()
        if _PLAIN.match(paragraph, cut) or not (
            _GOES_ON.match(paragraph, cut)
            or (language == "de" and _GERMAN_ORDINAL.search(paragraph, max(start, cut - 12), cut))
            or (cut - start < 9 and _MARKER.fullmatch(paragraph, start, cut))
        ):
            yield paragraph[start:cut].strip()
            start = cut
    if rest := paragraph[start:].strip():
        yield rest


def _hide(text: str, language: str) -> str:
    """Replaces each character that misleads sentencex by one of the same length."""
    for mark in _BLANKED:
        if mark in text:
            text = text.replace(mark, " " * len(mark))
    if "'" in text:
        text = (" " + text).replace(" '", "  ")[1:].replace("'", "*")
    if "(" in text:
        text = _LIST_NUMBER.sub(r"X\1X", text)
    return text.replace("M. ", "M  ") if language == "fr" else text  # M. Dupont
