"""MediaWiki markup to plain text, on a parser's tree. What cannot be shown as text leaves the mark `HOLE`."""

from __future__ import annotations

import re
from collections.abc import Callable

import mwparserfromhell
from mwparserfromhell import nodes
from mwparserfromhell.wikicode import Wikicode

HOLE = "\ufffc"  # OBJECT REPLACEMENT CHARACTER: something that is no text stood here
_ITEM = "\x1f"  # INFORMATION SEPARATOR: a list's item begins here and ends with the line
_ITEM_TAGS = {"li", "dd", "dt"}
_SILENT_TAGS = {"ref", "references", "table", "gallery", "timeline", "score", "imagemap"}
_BLOCK_TAGS = {"pre", "source", "syntaxhighlight"}
_PLAIN_FORMULA = re.compile(r"[\w\s+=<>,.;()|!/*'-]+")
_TORN_MARKUP = re.compile(r"<ref\b[^>]*/>|<ref\b.*?(?:</ref>|$)|^.*</ref>|</?[a-z]+/?>|^(?:\{\||\|[-}+ ]|! ).*")
_EMPTY_BRACKETS = re.compile(r" ?[(\[][\s,;:–-]*[)\]]")
_BRACKETS_WITH_HOLE = re.compile(rf"([(\[])([^()\[\]\n]*{HOLE}[^()\[\]\n]*)([)\]])")
_DANGLING = re.compile(r"(?<=[(\[])[\s,;:–-]+|[\s,;:]+(?=[)\]])")  # "(; born" and "born, )"
_BLANKS = re.compile(r"  +|(?<=\w) (?=[.,](?: [^.]|$))")  # what stood between is gone

_CATEGORY = re.compile(
    r"(?i)\s*(?:[ck]at[eé]gor\w*|категория|категорія|κατηγορία|تصنيف|קטגוריה|分类|分類|カテゴリ|분류)\s*:"
)
_MEDIA = re.compile(
    r"(?i)\s*(?:[^\W\d_]+:.*\.(?:jpe?g|png|svg|gif|tiff?|og[gv]|webm|webp|pdf|djvu|mp[34]|wav|mid)\s*$"
    r"|(?:file|image|media|datei|bild|fichier|archivo|imagen|immagine|файл|изображение)\s*:)"
)
_PROJECT = re.compile(r"\s*:?\s*(?:wikt|wiktionary|[wsqbdnvm]|[a-z]{2,3}(?:-[a-z-]+)?|simple|commons|meta)\s*:(?=\S)")

_UNITS = {
    **{"km": "kilometres", "m": "metres", "cm": "centimetres", "mm": "millimetres", "mi": "miles", "ft": "feet"},
    **{"in": "inches", "yd": "yards", "nmi": "nautical miles", "km2": "square kilometres", "sqkm": "square kilometres"},
    **{"m2": "square metres", "sqm": "square metres", "sqmi": "square miles", "sqft": "square feet", "acre": "acres"},
    **{"ha": "hectares", "kg": "kilograms", "g": "grams", "t": "tonnes", "lb": "pounds", "oz": "ounces"},
    **{"L": "litres", "l": "litres", "m3": "cubic metres", "cuft": "cubic feet", "C": "°C", "F": "°F", "K": "K"},
    **{"km/h": "kilometres per hour", "mph": "miles per hour", "ly": "light-years", "hp": "horsepower"},
}
_MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October"]
_MONTHS += ["November", "December"]
_BETWEEN = {
    **{word: f" {word} " for word in ("to", "and", "or", "by")},
    **{"-": "–", "–": "–", "x": " × ", "×": " × ", "+": "+"},
}

# Templates by name (lower case, with _ for blanks): the text that they are.
_TEXTS = {
    name: text
    for text, names in {
        " ": "nbsp space spaces thinsp nnbsp hsp",
        "–": "ndash endash en_dash",
        " – ": "spaced_ndash snd spnd spndash mdashb",
        "—": "mdash emdash em_dash spaced_mdash",
        " · ": "dot · • bullet middot",
        **{"'": "' apostrophe", "'s": "'s", "' \"": "'_\"", "\" '": "\"_'", '"': '-"', "|": "!", "=": "="},
        **{"π": "pi", "ʻ": "okina", "ʼ": "hamza"},
    }.items()
    for name in names.split()
}
# Those that show their n-th unnamed argument; -1 is the last one.
_ARGUMENTS = {
    name: number
    for number, names in {
        1: "abbr tooltip nowrap nobr nobold small smaller big larger large sc smallcaps small_caps em strong sub "
        "sup var math mvar code mono tt key kbd keypress unicode polytonic hebrew script/hebrew script/arabic vanchor "
        "visible_anchor not_a_typo typo ill vr angbr flag flagcountry flagu nts overline underline strike railgauge "
        "track_gauge",
        2: "lang script rtl-lang font color colored_link",
        -1: "transl transliteration",
    }.items()
    for name in names.split()
}
_QUOTES = {"quote", "blockquote", "quotation", "cquote", "bquote", "poemquote"}
_SHIPS = {"uss", "hms", "ss", "rms", "hmas", "hmcs", "mv", "ms", "usns", "uscgc", "sms"}
_MONEY = {"gbp": "£", "£": "£", "€": "€", "euro": "€", "eur": "€", "us$": "US$", "usd": "US$", "inr": "₹", "jpy": "¥"}
# Nothing is missed where these vanish: references, remarks of editors, icons, anchors, boxes.
_NOTHING = re.compile(
    r"cit(?:e|ation)(?:_|\b)|vcite|harv(?!txt)|sfn|efn|refn?\b|(?:rp?|nb|fact|cn|cit|full|sic|when|who|whom|which|where)$"
    r"|.*(?:needed|inline|\?|verification|citation|source|_icon)$|#|note\b|wayback|webarchive|isbn|issn|oclc|doi|pmid|asin"
    r"|clarify|(?:by|according_to)_whom|dubious|disputed|vague|weasel|peacock|update|dead_?link|specify|contradict|pov\b"
    r"|anchor|flag_?icon|iso_639|use_\w+_(?:english|dates)|defaultsort|dmoz|main\b|see\b|further|portal|commons"
    r"|inflation-fn|eqm$|hidden"
)


def plain_text(markup: str) -> str:
    """Returns the running text, a line a paragraph.

    Headings keep their marks of level (`== History ==`). Templates, tables, references, files and categories are left
    out; where a sentence misses one, it has the mark `HOLE`.
    """
    text = _text(mwparserfromhell.parse(markup), "\n")
    paragraphs: list[str] = []
    is_open = False  # the next line goes on with the last paragraph
    for line in text.split("\n"):
        line = _mended(line)
        if not line.strip():
            is_open = False
        elif is_open and line[0] not in f"{_ITEM} =":
            paragraphs[-1] = f"{paragraphs[-1].rstrip()} {line}"
        else:
            is_open = line[0] not in f"{_ITEM} ="
            paragraphs.append(line.lstrip(f"{_ITEM} "))
    return "\n".join(paragraphs)


def _mended(line: str) -> str:
    """Returns the line without torn markup, empty brackets, holes in brackets and holes that are all of it."""
    if "<" in line or line[:1] in "|!{":
        line = _TORN_MARKUP.sub("", line)
    if HOLE in line:
        line = _BRACKETS_WITH_HOLE.sub(_without_holes, line) if line.replace(HOLE, "").strip() else ""
    if "(" in line or "[" in line:
        line = _EMPTY_BRACKETS.sub("", _DANGLING.sub("", line))
    return _BLANKS.sub(lambda blanks: " " if len(blanks[0]) > 1 else "", line)


def _without_holes(brackets: re.Match[str]) -> str:
    """Returns the brackets without those of their parts, between commas and semicolons, that have a hole."""
    parts = re.findall(r"[^,;]+[,;]?", brackets[2])
    return brackets[1] + "".join(part for part in parts if HOLE not in part) + brackets[3]


def _text(code: Wikicode | None, before: str = "") -> str:
    """Returns the text of a tree. `before` is "\n" if it begins a line; within a sentence it is empty."""
    parts = [before]
    found = code.nodes if code is not None else []
    for node, following in zip(found, [*found[1:], None], strict=False):
        if isinstance(node, nodes.Template):
            goes_on = isinstance(following, nodes.Text) and re.match(r" [a-z]", str(following.value)) is not None
            text = _template(node, parts[-1], goes_on)
        else:
            text = _node(node)
        if text:
            parts.append(text)
    return "".join(parts[1:])


def _node(node: nodes.Node) -> str:
    if isinstance(node, nodes.Text):
        return str(node.value)
    if isinstance(node, nodes.Wikilink):
        return _link(node)
    if isinstance(node, nodes.Tag):
        return _tag(node)
    if isinstance(node, nodes.ExternalLink):
        return _text(node.title)
    if isinstance(node, nodes.HTMLEntity):
        return str(node.normalize())
    if isinstance(node, nodes.Heading):
        marks = "=" * node.level
        return f"\n{marks} {_text(node.title).strip()} {marks}\n"
    return ""


def _link(link: nodes.Wikilink) -> str:
    """Returns a link's label, or its title; nothing for files, categories and links to other languages' articles."""
    title = str(link.title)
    if _CATEGORY.match(title) or _MEDIA.match(title):
        return ""
    if link.text is not None:
        return _text(link.text)
    if (project := _PROJECT.match(title)) and not title.lstrip().startswith(":"):
        return "" if re.match(r"\s*(?!wikt)[a-z]{2,3}\b|\s*simple", title) else title[project.end() :]
    return (title[project.end() :] if project else _text(link.title)).strip("\n").lstrip(":")


def _tag(tag: nodes.Tag) -> str:
    name = str(tag.tag).strip().lower()
    if name == "br":
        return "\n\n"
    if name in _SILENT_TAGS:
        return ""
    if name in _ITEM_TAGS:
        return _ITEM + _text(tag.contents)
    if name in _BLOCK_TAGS:
        return HOLE
    if name in ("math", "chem", "ce"):
        formula = str(tag.contents).strip()
        return formula if _PLAIN_FORMULA.fullmatch(formula) else HOLE
    if name in ("blockquote", "p", "div", "center", "poem"):
        return f"\n\n{_text(tag.contents)}\n\n"
    return _text(tag.contents)


def _template(template: nodes.Template, before: str, goes_on: bool) -> str:
    """Returns a template's text, or `HOLE` if what it shows is not known and a sentence would miss it."""
    name = "_".join(str(template.name).replace("_", " ").lower().split())
    if name in _QUOTES:
        return f"\n\n{_named(template, 'text', 'quote') or _argument(template, 1)}\n\n"
    text = _rendered(name, template)
    if text is not None:
        return text
    if before.endswith("\n"):
        return HOLE if goes_on and "\n" not in str(template) else ""  # mostly a box
    return "" if before.endswith(tuple('.!?…"”»)]')) else HOLE  # after a sentence's end: a note on it


def _rendered(name: str, template: nodes.Template) -> str | None:
    if name in _TEXTS:
        return _TEXTS[name]
    if name in _ARGUMENTS:
        return _argument(template, _ARGUMENTS[name])
    if render := _RENDERED.get(name):
        return render(template)
    if name.startswith("lang-"):
        return _argument(template, 1)
    if name.startswith("formatnum:"):
        return name.partition(":")[2].strip()
    if name in _SHIPS:
        return " ".join([name.upper(), *_arguments(template)[:1]])
    if name in _MONEY:
        return _MONEY[name] + _argument(template, 1)
    return "" if _NOTHING.match(name) else None


def _arguments(template: nodes.Template) -> list[str]:
    """Returns the unnamed arguments as text."""
    return [_text(parameter.value).strip() for parameter in template.params if not parameter.showkey]


def _argument(template: nodes.Template, number: int) -> str:
    """Returns the text of an argument by its number, which may be given as a name ("2=..."); -1 is the last one."""
    arguments = _arguments(template)
    if number > 0 and template.has(str(number)):
        return _text(template.get(str(number)).value).strip()
    return arguments[-1] if number < 0 and arguments else ""


def _named(template: nodes.Template, *names: str) -> str:
    return next((_text(template.get(name).value).strip() for name in names if template.has(name)), "")


def _convert(template: nodes.Template) -> str:
    """Returns the quantity as it was given: {{convert|5|to|7|km|mi}}, {{convert|6|ft|2|in|m}}."""
    arguments = [argument.replace("&nbsp;", " ") for argument in _arguments(template)]
    text = ""
    while arguments and re.match(r"[-−+]?[\d.,/⁄+ ]*\d", arguments[0]):
        number, *arguments = arguments
        if arguments and (between := _BETWEEN.get(arguments[0].strip("()"))):
            text, arguments = text + number + between, arguments[1:]
            continue
        unit, arguments = (arguments[0], arguments[1:]) if arguments else ("", [])
        written = unit if _named(template, "abbr") in ("on", "in") else _UNITS.get(unit, unit)
        text += f"{number} {written}"
        if not (
            unit in ("ft", "lb", "st", "mi", "yd") and len(arguments) > 1 and arguments[1] in ("in", "oz", "lb", "ft")
        ):
            return text
        text += " "
    return text.strip() or HOLE


def _fraction(template: nodes.Template) -> str:
    arguments = _arguments(template)
    if len(arguments) == 3:
        return f"{arguments[0]} {arguments[1]}/{arguments[2]}"
    return "/".join(arguments) if len(arguments) == 2 else f"1/{''.join(arguments)}"


def _date(template: nodes.Template) -> str:
    """Returns {{birth date|1879|3|14}} as "March 14, 1879"; a date given as text as it stands."""
    numbers = _arguments(template)[:3]
    if len(numbers) == 3 and numbers[1].isdigit() and 1 <= int(numbers[1]) <= 12:
        return f"{_MONTHS[int(numbers[1]) - 1]} {numbers[2].lstrip('0')}, {numbers[0]}"
    return numbers[0] if len(numbers) == 1 else HOLE


def _as_of(template: nodes.Template) -> str:
    year, month, *day = [*_arguments(template), "", ""][:3]
    month = _MONTHS[int(month) - 1] if month.isdigit() and 1 <= int(month) <= 12 else month
    words = _named(template, "alt") or " ".join(filter(None, ("As of", *day, month, year)))
    return words[:1].lower() + words[1:] if _named(template, "lc") else words


def _nihongo(template: nodes.Template) -> str:
    english, *others = [*_arguments(template), ""][:3]
    return f"{english} ({', '.join(filter(None, others))})" if any(others) else english


def _value(template: nodes.Template) -> str:
    exponent, unit = _named(template, "e"), _named(template, "u", "ul")
    return "".join([_argument(template, 1), f" × 10^{exponent}" if exponent else "", f" {unit}" if unit else ""])


_RENDERED: dict[str, Callable[[nodes.Template], str]] = {
    name: render
    for names, render in {
        "convert cvt conv": _convert,
        "frac sfrac fraction": _fraction,
        "birth_date death_date start_date end_date birth_date_and_age death_date_and_age start_date_and_age film_date "
        "dts date oldstyledate": _date,
        "as_of": _as_of,
        "nihongo nihongo2 nihongo3": _nihongo,
        "val": _value,
        "circa c. ca.": lambda template: f"c. {_argument(template, 1)}".strip(),
        "chem chem2 linktext": lambda template: "".join(_arguments(template)),
        "bibleverse bibleref bibleref2": lambda template: " ".join(_arguments(template)[:2]),
        "e": lambda template: f" × 10^{_argument(template, 1)}",
        "music": lambda template: {"flat": "♭", "sharp": "♯", "natural": "♮"}.get(_argument(template, 1), HOLE),
        "sqrt": lambda template: f"√{_argument(template, 1)}",
        "zh": lambda template: "; ".join(filter(None, (_named(template, name) for name in ("c", "s", "t", "p")))),
        "sortname": lambda template: " ".join(_arguments(template)[:2]),
    }.items()
    for name in names.split()
}
