"""Splits paragraphs into sentences."""

import re
from collections.abc import Iterator
from itertools import accumulate, chain, pairwise

import sentencex

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
# A boundary without doubt, as most are: a fast test.
_PLAIN = re.compile(r"(?<=[a-z]{4}[.!?]\s)[A-Z]")
# Boundaries of sentencex that are none: the sentence continues after them.
_SAYS = (
    "said|says|asked|asks|cried|replied|answered|whispered|shouted|exclaimed|yelled|screamed|muttered|murmured|inquired"
    "|enquired|demanded|repeated|added|continued|began|called|snapped|growled|snarled|gasped|retorted"
)
_NAME = r"(?!(?:He|She|It|We|They|You|And|But|Then|So)\b)[A-Z][\w’'-]+(?: [A-Z][\w’'-]+)?"
_SPEAKER = rf"(?:I|The \w+|(?:(?:Mr|Mrs|Ms|Dr)\.? )?{_NAME})"
_BEFORE_NUMBER = (
    "eq eqs vol vols no nos p pp ch fig figs sec secs art arts para paras ca c fl approx"
)
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
)
_MARKER = re.compile(r"\W*(?:\d{1,3}[.)]\W*)?")  # not a sentence, but a mark before one: 12.


LONG_PARAGRAPH = 20_000  # characters
_WIDE_STOP = re.compile(r"[。．！？][”’」』）]*")


def split_paragraph(paragraph: str, language: str) -> Iterator[str]:
    """Returns the sentences of a paragraph in order; only white space is lost.

    sentencex takes quadratic time where there are no spaces, so long paragraphs are cut at full stops first.
    """
    if len(paragraph) <= LONG_PARAGRAPH:
        return _split(paragraph, language)
    cuts = [0]
    for match in _WIDE_STOP.finditer(paragraph):
        if match.end() - cuts[-1] >= LONG_PARAGRAPH:
            cuts.append(match.end())
    parts = (paragraph[start:end] for start, end in pairwise([*cuts, len(paragraph)]))
    return chain.from_iterable(_split(part, language) for part in parts)


def _split(paragraph: str, language: str) -> Iterator[str]:
    hidden = _hide(paragraph, language)
    missed = [match.end() for match in _MISSED.finditer(paragraph)]
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
