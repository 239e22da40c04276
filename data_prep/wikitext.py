"""MediaWiki markup to plain text, on a parser's tree."""

from __future__ import annotations

import re

import mwparserfromhell
from mwparserfromhell import nodes
from mwparserfromhell.wikicode import Wikicode

_SILENT_TAGS = {"ref", "table", "gallery", "math", "code", "pre", "source", "syntaxhighlight", "timeline", "score"}
_NAMESPACE = re.compile(r"\s*(?!:)[^\W\d_][\w -]*:\S")  # [[File:...]], [[Category:...]], [[fr:...]]
_EMPTY_BRACKETS = re.compile(r"\s*[(\[][\s,;:–-]*[)\]]")


def plain_text(markup: str) -> str:
    """The running text without templates, tables, references, files, categories and headings; a line a paragraph."""
    text = _text(mwparserfromhell.parse(markup))
    return "\n".join(_EMPTY_BRACKETS.sub("", line) for line in text.split("\n"))


def _text(code: Wikicode | None) -> str:
    return "".join(_node(node) for node in code.nodes) if code is not None else ""


def _node(node: nodes.Node) -> str:
    if isinstance(node, nodes.Text):
        return str(node.value)
    if isinstance(node, nodes.Wikilink):
        if _NAMESPACE.match(str(node.title)):
            return ""
        return _text(node.text if node.text is not None else node.title)
    if isinstance(node, nodes.Tag):
        tag = str(node.tag).strip().lower()
        if tag == "br":
            return "\n"
        return "" if tag in _SILENT_TAGS else _text(node.contents)
    if isinstance(node, nodes.ExternalLink):
        return _text(node.title)
    if isinstance(node, nodes.HTMLEntity):
        return str(node.normalize())
    return "\n" if isinstance(node, nodes.Heading) else ""
