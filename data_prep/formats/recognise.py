"""Recognises the format of a file from its first bytes and its suffix, or names why it is not read."""

import codecs
import os
import re
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from data_prep.formats import base
from data_prep.formats.base import FORMATS, UTF8, Entry, Layout, Skipped, SourceFile
from data_prep.settings import BuildOptions
from multicls.errors import did_you_mean

HEAD_BYTES = 1 << 16
MOST_NULS, MOST_BAD = 1e-3, 5e-3  # shares of the bytes and characters; more are no text of UTF-8
_MARKDOWN = (".md", ".markdown")
_PROSE = ("", *_MARKDOWN, ".txt", ".text", ".asc")  # suffixes of text; others are code or data
_REFUSED = re.compile(  # by the first bytes; a group names the reason
    rb"(?P<lfs_pointer>version https://git-lfs\.github\.com/spec/)|(?P<archive>7z\xbc\xaf\x27\x1c|Rar!\x1a\x07)"
    rb"|(?P<office>\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1|\{\\rtf)|(?P<utf16>\xff\xfe|\xfe\xff)"
    rb"|(?P<media>\x89PNG|\xff\xd8\xff|GIF8[79]a|ID3[\2-\4]|OggS\0|fLaC\0|\x1aE\xdf\xa3|II\*\0|MM\0\*"
    rb"|(?s:RIFF.{4}(?:WAVE|AVI |WEBP)|\0\0..ftyp))"
)
_REFUSED_SUFFIXES = {".br": "archive", ".rar": "archive", ".7z": "archive", ".odt": "office"}
_REFUSED_SUFFIXES |= {".xlsx": "office", ".pptx": "office", ".ods": "office", ".odp": "office"}
_OTHER_XML = re.compile(r"<\?xml|<(?:rss|feed|TEI)\b")


def recognise(file: SourceFile, settings: BuildOptions) -> Entry:
    """Returns the file with format, compression, encoding and layout, or why it is skipped.

    Raises what reading its first bytes raises.
    """
    with base.open_bytes(file) as raw:
        head = raw.read(HEAD_BYTES)
    if packed := base.packing(head, file.name):
        file = file._replace(packed=packed)
        with base.open_bytes(file) as stream:
            head = _head(stream)
    suffix = suffix_of(file.name)
    found = _by_head(file, suffix, head, settings)
    if isinstance(found, Skipped):
        return found
    chosen = FORMATS[found.format]
    if chosen.fields and (missing := missing_fields(settings, chosen.fields(found))):
        return file.skipped("missing_field", missing)
    module, command = chosen.needs
    is_needed = chosen.name != "html" or "main_text" in settings.rules
    if module and is_needed and not _is_installed(module):
        return file.skipped("not_installed", command)
    is_markdown = settings.format == "auto" and suffix in _MARKDOWN
    return found._replace(layout=layout_of(settings, "markdown" if is_markdown else "plain"))


def _is_installed(module: str) -> bool:
    try:
        import_module(module)
    except ImportError:
        return False
    return True


def _head(stream: Any) -> bytes:
    """Returns the first bytes of a compressed file; of a damaged one, those that can be read, if there are any."""
    head = b""
    try:
        while len(head) < HEAD_BYTES and (part := stream.read1(512)):
            head += part
    except Exception:
        if not head:
            raise
    return head[:HEAD_BYTES]


def _by_head(file: SourceFile, suffix: str, head: bytes, settings: BuildOptions) -> Entry:
    """Returns the file with its format and encoding, or the reason why it is not read."""
    is_free = settings.format in ("auto", "wikipedia")
    if not head:
        return file.skipped("empty")
    refused = _REFUSED.match(head)
    if refused and (refused.lastgroup != "utf16" or settings.encoding == UTF8):
        return file.skipped(str(refused.lastgroup))
    matches = [entry for entry in FORMATS.values() if entry.magic and entry.magic.match(head)]
    named = [entry for entry in matches if suffix in entry.suffixes]
    chosen = "" if is_free else settings.format
    if matches and chosen not in ("", *(entry.name for entry in matches)):
        return file.skipped("binary", f"{matches[0].name}; leave out --format {chosen}")
    if suffix in _REFUSED_SUFFIXES and (is_free or matches):
        return file.skipped(_REFUSED_SUFFIXES[suffix])
    if matches or (chosen and FORMATS[chosen].magic):
        return file._replace(format=chosen or (named or matches)[0].name)
    return _text_format(file, suffix, head, settings.encoding, chosen)


def _text_format(file: SourceFile, suffix: str, head: bytes, encoding: str, chosen: str) -> Entry:
    """Returns a file of text with its format, unless it is `chosen`, and its encoding."""
    if encoding == UTF8:
        head = head.removeprefix(codecs.BOM_UTF8)
    text = head.decode(encoding, "replace").lstrip()
    file_format = chosen or _guess(text, suffix)
    if encoding == UTF8 and file_format == "html":
        encoding = base.declared_encoding(head) or UTF8
    if encoding == UTF8:
        if head.count(0) > MOST_NULS * len(head):
            is_utf16 = min(head[::2].count(0), head[1::2].count(0)) < 0.01 * len(head)
            is_utf16 = is_utf16 and head.count(0) > len(head) / 4
            return file.skipped("utf16" if is_utf16 else "binary")
        if text.count("\ufffd") > MOST_BAD * len(text):  # else single bad bytes
            try:
                codecs.getincrementaldecoder(UTF8)().decode(head, len(head) < HEAD_BYTES)
            except UnicodeDecodeError as error:
                return file.skipped("not_utf8", f"byte {error.start}")
    if not chosen and _OTHER_XML.match(text) and file_format not in ("html", "mediawiki"):
        return file.skipped("other_xml")
    if not file_format:
        return file.skipped("not_prose", suffix)
    return file._replace(format=file_format, encoding=encoding)


def _guess(text: str, suffix: str) -> str:
    """Returns the format by the suffix, or else by the first characters of a text; "" if it may be no prose."""
    if suffix in (".json", ".jsonl", ".ndjson"):
        ends_inside = r"[^\n]*[^}\s]" if suffix == ".json" else ""  # an object, of its first line
        return "json" if re.match(rf"\[|\{{({ends_inside})?\s*\n", text) else "jsonl"
    for entry in FORMATS.values():
        if suffix in entry.suffixes and entry.name != "text":
            return entry.name
    for entry in FORMATS.values():
        if entry.begins and entry.begins.match(text):
            return entry.name
    return "text" if suffix in _PROSE or not re.fullmatch(r"\.[a-z]\w{0,9}", suffix) else ""


def suffix_of(name: str) -> str:
    """Returns the suffix of a file, in small letters, without that of compression."""
    root, suffix = os.path.splitext(name.lower())
    return os.path.splitext(root)[1] if suffix[1:] in base.OPENERS else suffix


def missing_fields(settings: BuildOptions, found: Iterable[str]) -> str:
    """Returns the text fields that are not among those `found`, with the nearest of these; "" if none is missing.

    It looks at no more of them than it needs, and where there are none, it cannot say.
    """
    names = dict[str, None]()
    for name in found:
        names[name] = None
        if names.keys() >= set(settings.text_field):
            return ""
    if not names:
        return ""
    missing = [field for field in settings.text_field if field not in names]
    likely = [name for name in names if re.fullmatch(r"[\w .-]{1,40}", name)]
    hint = did_you_mean(missing[0], likely) or " The first line is no header."
    return f"{' and '.join(map(repr, missing))}.{hint}".rstrip(".")


def layout_of(settings: BuildOptions, known: Layout = "plain") -> Layout:
    """Returns the layout that the settings name, or else the known one."""
    if settings.documents == "sentences":
        return "sentences"
    if settings.layout == "lines":
        return "lines"
    return "wikipedia" if settings.format == "wikipedia" else known
