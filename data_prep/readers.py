"""Readers: from files to documents, one at a time, so that memory stays constant however large the input is."""

from __future__ import annotations

import bz2
import gzip
import html
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple, cast
from xml.etree import ElementTree

from multicls.errors import UserError

FORMATS = ("text", "wikiextractor", "jsonl", "mediawiki")
LONGEST_DOCUMENT = 1 << 22  # characters; a longer plain text is cut into several documents at a blank line
_HEAD = 1 << 16
_DOC = re.compile(r'<doc id="([^"]*)"[^>]*?title="(.*)"[^>]*>')


class SourceFile(NamedTuple):
    """An input file: `name` is its path below the input it was found in, `source` the name of that input."""

    path: Path
    source: str
    name: str
    format: str


class RawDocument(NamedTuple):
    """A document as it stands in the input.

    `layout` says what a line is: "blocks" (blank lines between paragraphs), "lines" or "dotted_lines" (a line is a
    paragraph; in the second, headings end with a full stop), "wikitext". `dropped`: the reason why it is left out.
    """

    source: str
    id: str
    title: str
    text: str
    layout: str
    dropped: str = ""


def find_files(inputs: Iterable[str], file_format: str = "auto") -> list[SourceFile]:
    """All input files in a fixed order, each checked by a look at its head.

    Args:
        inputs: `PATH` or `NAME=PATH`; folders are walked in sorted order, hidden files left out.
        file_format: one of `FORMATS`, or "auto".

    Raises:
        UserError: every path that is missing, empty, not readable or not UTF-8.
    """
    files: list[SourceFile] = []
    problems: list[str] = []
    for given in inputs:
        name, equals, rest = given.partition("=")
        path = Path(rest if equals and not Path(given).exists() else given)
        source = name if equals and not Path(given).exists() else path.resolve().name.split(".")[0]
        found = _walk(path) if path.is_dir() else [path] if path.is_file() else []
        filled = [file for file in found if file.stat().st_size]
        if not path.exists():
            problems.append(f"--input {given}: no such file or folder.")
        elif not filled:
            problems.append(f"--input {given}: {'no text in this folder' if path.is_dir() else 'the file is empty'}.")
        for file in filled:
            try:
                kind = _sniff(file) if file_format == "auto" else (_head(file), file_format)[1]
            except UserError as error:
                problems += error.problems
                continue
            files.append(SourceFile(file, source, str(file.relative_to(path)) if path.is_dir() else file.name, kind))
    if problems:
        raise UserError(*problems[:20], *([f"... and {len(problems) - 20} more."] if len(problems) > 20 else []))
    return files


def _walk(folder: Path) -> list[Path]:
    found = []
    for parent, folders, names in os.walk(folder):  # does not follow links to folders, so no loops
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(parent, name) for name in sorted(names) if not name.startswith(".")]
    return [path for path in found if path.is_file()]


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.suffix == ".bz2":
        return bz2.open(path, "rb")
    return open(path, "rb")


def _head(path: Path) -> str:
    """The first characters of a file, decompressed.

    Raises:
        UserError: it is not readable, binary or not UTF-8.
    """
    try:
        with _open(path) as file:
            head = file.read(_HEAD)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {error}.") from None
    if b"\0" in head:
        raise UserError(f"{path}: holds NUL bytes, so it is no UTF-8 text; convert it or leave it out.")
    try:
        return head.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.start >= len(head) - 3 and len(head) == _HEAD:  # a character cut by the end of the head
            return head[: error.start].decode("utf-8-sig")
        raise _not_utf8(path, error.start) from None


def _not_utf8(path: Path, offset: int) -> UserError:
    return UserError(f"{path}: not UTF-8 at byte {offset}; convert it (iconv -t utf-8) or leave it out.")


def _sniff(path: Path) -> str:
    head = _head(path).lstrip()
    if head.startswith(("<mediawiki", "<?xml")):
        return "mediawiki"
    if head.startswith("<doc "):
        return "wikiextractor"
    if head.startswith("{"):
        return "jsonl"
    return "text"


def read_file(file: SourceFile, documents: str = "file", text_field: str = "text") -> Iterator[RawDocument]:
    """Yields the documents of a file in order, those to be left out marked so.

    Args:
        documents: for plain text, "file" (one a file) or "blank_line" (blank lines between documents).
        text_field: the field of a JSON line that holds the text.

    Raises:
        UserError: the file is damaged, not UTF-8 or not of its format; the message names the place.
    """
    try:
        if file.format == "mediawiki":
            yield from _mediawiki(file)
        elif file.format == "wikiextractor":
            yield from _wikiextractor(file)
        elif file.format == "jsonl":
            yield from _jsonl(file, text_field)
        else:
            yield from _text(file, documents)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file.path}: cannot be read to its end: {error}.") from None


def _lines(path: Path) -> Iterator[str]:
    """Lines without their ends; a byte that is not UTF-8 ends in a UserError naming its offset."""
    offset = 0
    with _open(path) as stream:
        for raw in stream:
            try:
                line = raw.decode("utf-8-sig" if offset == 0 else "utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(path, offset + error.start) from None
            offset += len(raw)
            yield line.rstrip("\r\n")


def _text(file: SourceFile, documents: str) -> Iterator[RawDocument]:
    lines: list[str] = []
    size = count = 0
    for line in _lines(file.path):
        lines.append(line)
        size += len(line)
        if not line.strip() and size and (documents == "blank_line" or size > LONGEST_DOCUMENT):
            yield RawDocument(file.source, f"{file.name}#{count}", file.path.stem, "\n".join(lines), "blocks")
            lines, size, count = [], 0, count + 1
    if size or not count:
        yield RawDocument(file.source, f"{file.name}#{count}", file.path.stem, "\n".join(lines), "blocks")


def _wikiextractor(file: SourceFile) -> Iterator[RawDocument]:
    lines: list[str] = []
    identity: tuple[str, str] | None = None
    for number, line in enumerate(_lines(file.path), 1):
        if match := _DOC.match(line):
            identity = match[1], html.unescape(match[2])
            lines = []
        elif line.startswith("</doc>") and identity is not None:
            name, title = identity
            body = lines[1:] if lines and lines[0].strip() == title else lines
            yield RawDocument(file.source, f"{file.name}#{name}", title, "\n".join(body), "dotted_lines")
            identity = None
        elif identity is not None:
            lines.append(line)
        elif line.strip():
            raise UserError(f"{file.path}:{number}: text outside <doc ...> ... </doc>; is this WikiExtractor output?")
    if identity is not None:
        raise UserError(f"{file.path}: ends inside document {identity[0]!r}: cut short?")


def _jsonl(file: SourceFile, text_field: str) -> Iterator[RawDocument]:
    for number, line in enumerate(_lines(file.path), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            text = record[text_field]
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{file.path}:{number}: {text_field!r} holds half a surrogate pair.") from None
        except ValueError as error:
            raise UserError(f"{file.path}:{number}: not JSON: {error}.") from None
        except (KeyError, TypeError, AttributeError):
            fields = f" (fields: {', '.join(record)})" if isinstance(record, dict) else ""
            raise UserError(f"{file.path}:{number}: no text in {text_field!r}{fields}; set --text_field.") from None
        name, title = str(record.get("id", number)), str(record.get("title", ""))
        yield RawDocument(file.source, f"{file.name}#{name}", title, text, "blocks")


def _mediawiki(file: SourceFile) -> Iterator[RawDocument]:
    with _open(file.path) as stream:
        try:
            events = ElementTree.iterparse(stream, events=("start", "end"))
            _, root = next(events)
            for event, element in events:
                if event == "end" and element.tag.rpartition("}")[2] == "page":
                    yield _page(file, element)
                    root.clear()
        except ElementTree.ParseError as error:
            raise UserError(f"{file.path}: not well-formed MediaWiki XML: {error}.") from None


def _page(file: SourceFile, page: ElementTree.Element) -> RawDocument:
    title = page.findtext("{*}title") or ""
    dropped = ""
    if page.findtext("{*}ns", "0") != "0":
        dropped = "documents_not_articles"
    elif page.find("{*}redirect") is not None:
        dropped = "documents_redirects"
    text = "" if dropped else page.findtext("{*}revision/{*}text") or ""
    return RawDocument(file.source, f"{file.name}#{page.findtext('{*}id')}", title, text, "wikitext", dropped)
