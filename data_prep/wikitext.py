"""Turns MediaWiki markup into plain text, with mwparserfromhell's `strip_code`.

What is no text (templates, tables, formulas) is taken out of the parser's tree first. Where a
sentence would miss it, the mark `HOLE` stays, and the rule `holes` drops that sentence.
"""

import re

import mwparserfromhell
from mwparserfromhell import nodes
from mwparserfromhell.wikicode import Wikicode

from data_prep.ledger import HOLE, size

_ITEM = "\x1f"  # INFORMATION SEPARATOR: a list's item begins here and ends with the line
_HEADING = "\x1d"  # GROUP SEPARATOR, once for each level of a heading
_SILENT_TAGS = {"ref", "references", "table", "gallery", "timeline", "score", "imagemap"}
_HOLE_TAGS = {"pre", "source", "syntaxhighlight", "math", "chem", "ce"}
_BLOCK_TAGS = {"blockquote", "p", "div", "center", "poem"}
_TORN_MARKUP = re.compile(
    r"<ref\b[^>]*/>|<ref\b.*?(?:</ref>|$)|^.*</ref>|</?[a-z]+/?>|^(?:\{\||\|[-}+ ]|! ).*"
)
_BREAK = re.compile(r"<br ?/?>")
_ODD_OPENING = re.compile(r"\([),; ]")
_BRACKETS_WITH_HOLE = re.compile(rf" ?[(\[][^()\[\]\n]*{HOLE}[^()\[\]\n]*[)\]]")
_EMPTY_BRACKETS = re.compile(r" ?[(\[][\s,;:–-]*[)\]]")
_DANGLING = re.compile(r"(?<=[(\[])[\s,;:–-]+|[\s,;:]+(?=[)\]])")  # "(; born" and "born, )"
_BLANKS = re.compile(r" +(?= )|(?<=\w) (?=[.,](?: [^.]|$))")  # what stood between is gone
_SILENT_LINK = re.compile(
    r"(?i)\s*(?:[^\W\d_]+:.*\.(?:jpe?g|png|svg|gif|tiff?|og[gv]|webm|pdf|djvu)\s*$"
    r"|(?:file|image|media|datei|bild|fichier|archivo|immagine|файл)\s*:"
    r"|[ck]at[eé]gor\w*\s*:)"
)
# Templates without which nothing is missed: references, remarks of editors, icons.
_SILENT_TEMPLATE = re.compile(
    r"cit(?:e|ation)|harv(?!txt)|sfn|efn|refn?\b|rp?$|main\b|see\b|further|#|.*(?:needed|inline|\?|icon)$"
)


def plain_text(markup: str) -> str:
    """Returns the running text, a line a paragraph; headings keep their marks (`== History ==`)."""
    code = mwparserfromhell.parse(markup.replace("\0", ""))  # where the parser would stop
    _take_out(code)
    paragraphs: list[str] = []
    is_open = False  # the next line continues the last paragraph
    for line in code.strip_code(normalize=True, collapse=False).split("\n"):
        line = _mended(line)
        begins = line[:1] in (_ITEM, _HEADING, " ")
        if not line.strip(f"{_ITEM} "):
            is_open = False
        elif is_open and not begins:
            paragraphs[-1] = f"{paragraphs[-1].rstrip()} {line}"
        else:
            is_open = not begins
            level = len(line) - len(line.lstrip(_HEADING))
            text = line.lstrip(f"{_ITEM}{_HEADING} ")
            paragraphs.append(f"{'=' * level} {text.strip()} {'=' * level}" if level else text)
    return "\n".join(paragraphs)


def mend_extract(text: str) -> tuple[str, int]:
    """Returns an extract without the tags, empty brackets and blanks before commas of WikiExtractor, and their size."""
    lines, removed = text.split("\n"), 0
    for i, line in enumerate(lines):  # searches for strings take far less time than patterns
        is_odd = "<" in line or " ," in line or " )" in line or "[]" in line
        if is_odd or ("(" in line and _ODD_OPENING.search(line)):
            lines[i] = _mended(line)
            removed += size(line) - size(lines[i])
    return "\n".join(lines), removed


def _mended(line: str) -> str:
    """Returns the line without torn markup, empty brackets, and brackets or lines that miss text."""
    if "<" in line or line[:1] in "|!{":
        line = _TORN_MARKUP.sub("", _BREAK.sub(" ", line))
    if HOLE in line:
        line = _BRACKETS_WITH_HOLE.sub("", line) if line.replace(HOLE, "").strip() else ""
    if "(" in line or "[" in line:
        line = _EMPTY_BRACKETS.sub("", _DANGLING.sub("", line))
    return _BLANKS.sub("", line)


def _take_out(code: Wikicode, before: str = "\n") -> None:
    """Replaces what is no text in a tree, in place. `before` is the text before its first node."""
    for i, node in enumerate(code.nodes):
        replacement: str | None = None
        if isinstance(node, nodes.Text):
            before = str(node.value) or before
        elif isinstance(node, nodes.Template):
            following = str(code.nodes[i + 1]) if i + 1 < len(code.nodes) else ""
            replacement = _template(node, before, following)
        elif isinstance(node, nodes.Wikilink):
            replacement = _link(node)
        elif isinstance(node, nodes.Tag):
            replacement = _tag(node)
        elif isinstance(node, nodes.Heading):
            _take_out(node.title)
            title = node.title.strip_code().strip()
            replacement = f"\n{_HEADING * node.level}{title}\n"
        elif isinstance(node, nodes.ExternalLink) and node.title is not None:
            _take_out(node.title, "")
        if replacement is not None:
            code.nodes[i] = nodes.Text(replacement)
            before = replacement or before
        elif not isinstance(node, nodes.Text):
            before = "word"


def _link(link: nodes.Wikilink) -> str | None:
    """Returns the text of a link without a label; None to keep the label."""
    title = str(link.title)
    if _SILENT_LINK.match(title):
        return ""
    if link.text is None:
        return title.strip("\n").lstrip(":")
    _take_out(link.text, "")
    return None


def _tag(tag: nodes.Tag) -> str | None:
    """Returns the text in place of a tag; None to keep its contents."""
    name = str(tag.tag).strip().lower()
    if name == "br":
        return "\n\n"
    if name in ("li", "dd", "dt"):
        return _ITEM
    if name in _SILENT_TAGS:
        return ""
    if name in _HOLE_TAGS:
        return HOLE
    if tag.contents is not None:
        _take_out(tag.contents, "" if name not in _BLOCK_TAGS else "\n")
    if name in _BLOCK_TAGS:
        return f"\n\n{tag.contents.strip_code(normalize=True, collapse=False)}\n\n"
    return None


def _template(template: nodes.Template, before: str, following: str) -> str:
    """Returns the text in place of a template: `HOLE` if a sentence would miss it."""
    if _SILENT_TEMPLATE.match(str(template.name).strip().lower()):
        return ""
    if before.endswith("\n"):  # mostly a box
        return HOLE if re.match(r" [a-z]", following) and "\n" not in str(template) else ""
    return "" if before.endswith(tuple('.!?…"”»)]')) else HOLE  # after a sentence: a note on it
