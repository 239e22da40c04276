"""Reads documents from an input file or a share of one, one at a time."""

import html
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from data_prep.settings import BuildOptions
from data_prep.sources import Layout, SourceFile, damage, open_bytes, stem
from multicls.errors import UserError, did_you_mean

LONGEST_RECORD = 1 << 26  # bytes of a line or a page; a longer line is cut
TOO_LONG = "a page of more than 64 MB"
LONGEST_DOCUMENT = 1 << 22  # characters of a plain text, after which the next blank line ends it
ROWS = 256  # of a table, read at a time
SAMPLE = 200  # characters of a bad record
# Rows that are sentences: one whose hash is 0 modulo BOUNDARY begins a document.
BOUNDARY, FEWEST_ROWS, MOST_ROWS = 512, 256, 1024
_DOC = re.compile(r'<doc id="([^"]*)"(?:[^>]*?title="(.*)")?[^>]*>')
_PROLOG = re.compile(r"\A\s*(?:<[?!][^>]*>\s*)*")  # declaration and document type
_WIKIPEDIA = re.compile(r"https?://[\w.-]*\bwikipedia\.org/")

# The layouts of files; paragraphs: a paragraph a line; wikitext: MediaWiki markup.
TextFormat = Layout | Literal["paragraphs", "wikitext"]
Rows = Callable[[SourceFile, str], Iterable[tuple[int, Any]]]


class RawDocument(NamedTuple):
    """A document as it stands in the input.

    `dropped` is the reason why a record cannot be read. Then the text is a sample of the record.
    """

    source: str
    id: str
    title: str
    text: str
    format: TextFormat
    dropped: str = ""


def read_documents(file: SourceFile, settings: BuildOptions) -> Iterator[RawDocument]:
    """Yields the documents of a file, in order; bad records with the reason to drop them.

    Raises:
        UserError: The first row lacks the text field, or the file cannot be reached.
    """
    documents = _READERS[file.format](file, settings)
    try:
        yield from _joined(documents) if file.layout == "sentences" else documents
    except UserError:
        raise
    except Exception as error:
        yield _bad(file, f"{file.start}-damaged", "records_file_damaged", damage(file, error))


def _document(
    file: SourceFile, record: object, title: str, text: str, text_format: TextFormat
) -> RawDocument:
    name = _utf8(f"{file.name}#{record}")
    return RawDocument(file.source, name, _utf8(title), _utf8(text), text_format)


def _bad(file: SourceFile, record: object, reason: str, sample: str) -> RawDocument:
    text = " ".join(sample[:SAMPLE].split())
    return _document(file, record, "", text, "plain")._replace(dropped=reason)


def _utf8(text: str) -> str:
    """Returns the text with U+FFFD for halves of surrogate pairs, which JSON can hold."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _lines(file: SourceFile) -> Iterator[tuple[int, str]]:
    """Yields offset and text of each line that begins in the share; bytes that are no UTF-8 become U+FFFD.

    A line of more than `LONGEST_RECORD` bytes is cut into several; all of them belong to the share of its first byte.
    """
    with open_bytes(file.path) as stream:
        offset, is_open = 0, False  # the last line was cut
        if file.start:  # a line belongs to the share in which its first byte lies
            stream.seek(file.start - 1)
            offset = file.start - 1 + len(stream.readline())
        while is_open or not file.stop or offset < file.stop:
            if not (line := stream.readline(LONGEST_RECORD)):
                break
            text = line.decode("utf-8" if offset else "utf-8-sig", "replace")
            yield offset, text.rstrip("\r\n")
            offset, is_open = offset + len(line), not line.endswith(b"\n")


def _text(file: SourceFile, settings: BuildOptions) -> Iterator[RawDocument]:
    """Yields documents of a plain text: a line each, or up to a blank line, or the whole file."""
    title, lines = stem(file.name), list[str]()
    first = size = count = 0
    for offset, text in _lines(file):
        blank = not text.strip()
        ends = blank and settings.documents == "blank_line"
        if lines and (ends or size > LONGEST_DOCUMENT * (1 if blank else 2)):
            yield _document(file, first, title, "\n".join(lines), file.layout)
            lines, size, count = [], 0, count + 1
        if file.layout == "sentences":
            yield _document(file, offset, title, text, file.layout)
            count += 1
        elif lines or not blank:
            first = first if lines else offset
            lines.append(text)
            size += len(text) + 1
    if lines or not count:
        yield _document(file, first, title, "\n".join(lines), file.layout)


def _joined(rows: Iterable[RawDocument]) -> Iterator[RawDocument]:
    """Joins consecutive rows, one sentence each, to documents; an empty row ends a document.

    Where documents begin depends on the rows themselves. The same book in another place of the
    stream therefore gives the same documents, but for its edges, and is found as a duplicate.
    """
    first, group = None, list[str]()
    for row in chain(rows, [RawDocument("", "", "", "", "sentences")]):
        if row.dropped:
            yield row
            continue
        sentence = " ".join(row.text.split())
        begins = xxhash.xxh3_64_intdigest(sentence.encode()) % BOUNDARY == 0
        is_full = len(group) == MOST_ROWS or (begins and len(group) >= FEWEST_ROWS)
        if first and (is_full or not sentence):
            yield first._replace(text="\n".join(group))
            first, group = None, []
        if sentence:
            first = first or row
            group.append(sentence)


def _wikiextractor(file: SourceFile, settings: BuildOptions) -> Iterator[RawDocument]:
    """Yields what lies between `<doc id=...>` and `</doc>`; text elsewhere is a bad record."""
    opened: re.Match[str] | None = None
    lines, first, size = list[str](), 0, 0
    for offset, line in chain(_lines(file), [(0, "<doc id=")]):  # which ends the last one
        begins = line.startswith("<doc id=")
        if opened and line.startswith("</doc>"):
            yield _article(file, opened[1], html.unescape(opened[2] or ""), "\n".join(lines))
            opened, lines, size = None, [], 0
        elif begins or size > 2 * LONGEST_DOCUMENT:
            if opened or any(map(str.strip, lines)):
                yield _bad(file, first, "records_doc_not_closed", " ".join(lines[:3]))
            opened, lines, size = _DOC.match(line) if begins else None, [], 0
        else:
            lines.append(line)
            size += len(line) + 1
        first = first if lines else offset


def _article(file: SourceFile, record: object, title: str, text: str) -> RawDocument:
    """Returns an article of Wikipedia, without a first line that repeats the title."""
    first, _, rest = text.partition("\n")
    return _document(file, record, title, rest if first.strip() == title else text, "wikipedia")


def _table(read: Rows, file: SourceFile, settings: BuildOptions) -> Iterator[RawDocument]:
    """Yields the rows of JSON lines, Parquet and data sets; the first one must have the text."""
    field, is_first = settings.text_field, not file.start
    for number, row in read(file, field):
        if is_first and isinstance(row, dict):
            is_first = False
            if field not in row:
                hint = did_you_mean(field, row)
                raise UserError(f"{file}: no field {field!r}; set --text_field.{hint}")
        text = row.get(field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            is_read = not isinstance(row, RawDocument)
            yield _bad(file, number, "records_without_text", str(row)) if is_read else row
            continue
        title, url = str(row.get("title") or ""), str(row.get("url") or "")
        name = number if row.get("id") is None else row["id"]
        if file.layout == "wikipedia" or (file.layout == "plain" and _WIKIPEDIA.match(url)):
            yield _article(file, name, title, text)
        else:
            yield _document(file, name, title, text, file.layout)


def _json_rows(file: SourceFile, field: str) -> Iterator[tuple[int, Any]]:
    for offset, text in _lines(file):
        if text.strip():
            try:
                yield offset, json.loads(text)
            except (ValueError, RecursionError):
                yield offset, _bad(file, offset, "records_not_json", text)


def _columns(field: str, names: list[str]) -> list[str]:
    """Returns the columns to read; all, to be named in the error, if the text is missing."""
    return [name for name in names if name in (field, "id", "title", "url") or field not in names]


def _parquet_rows(file: SourceFile, field: str) -> Iterator[tuple[int, Any]]:
    with open_bytes(file.path) as raw, closing(pq.ParquetFile(raw)) as table:
        columns = _columns(field, table.schema_arrow.names)
        batches = table.iter_batches(ROWS, columns=columns)
        yield from enumerate(row for batch in batches for row in batch.to_pylist())


def _arrow_rows(file: SourceFile, field: str) -> Iterator[tuple[int, Any]]:
    """Yields the rows of a file of a data set; a share in bytes has its part of the rows."""
    table = pa.ipc.open_stream(pa.memory_map(file.path)).read_all()
    size = os.path.getsize(file.path)
    first, end = (len(table) * offset // size for offset in (file.start, file.stop or size))
    batches = table.select(_columns(field, table.column_names))[first:end].to_batches(ROWS)
    yield from enumerate((row for batch in batches for row in batch.to_pylist()), first)


def _mediawiki(file: SourceFile, settings: BuildOptions) -> Iterator[RawDocument]:
    """Yields the pages of a dump, each parsed by itself."""
    for number, data in enumerate(_pages(file)):
        try:
            page = ElementTree.fromstring(data)
        except ElementTree.ParseError:
            sample = data[6 : SAMPLE + 6].decode("utf-8", "replace")
            yield _bad(file, number, "records_not_xml", sample)
            continue
        title = page.findtext("{*}title") or ""
        name = page.findtext("{*}id") or number
        if page.findtext("{*}ns", "0") != "0":
            yield _bad(file, name, "pages_not_articles", title)
        elif page.find("{*}redirect") is not None:
            yield _bad(file, name, "pages_redirects", title)
        else:
            text = page.findtext("{*}revision/{*}text") or ""
            yield _document(file, name, title, text, "wikitext")


def _pages(file: SourceFile) -> Iterator[bytes]:
    """Yields the bytes of each page of a dump."""
    with open_bytes(file.path) as stream:
        buffer = b""
        while chunk := stream.read(1 << 20):
            *pages, buffer = (buffer + chunk).split(b"</page>")
            for page in pages:
                if (start := page.find(b"<page>")) >= 0:
                    yield page[start:] + b"</page>"
            if len(buffer) > LONGEST_RECORD:
                raise EOFError(TOO_LONG)
        if b"<page>" in buffer:
            raise EOFError("it ends inside a page")


def _html(file: SourceFile, settings: BuildOptions) -> Iterator[RawDocument]:
    """Yields the main text of a page of the Web."""
    import trafilatura

    with open_bytes(file.path) as stream:
        data = stream.read(LONGEST_RECORD + 1)
    if len(data) > LONGEST_RECORD:
        raise EOFError(TOO_LONG)
    # trafilatura takes a page without <html> in its first 50 characters for another thing.
    page = "<html>" + _PROLOG.sub("", data.decode("utf-8-sig", "replace"))
    article: Any = trafilatura.bare_extraction(page, include_comments=False, with_metadata=True)
    title, text = (article.title, article.text) if article else (None, None)
    yield _document(file, 0, title or stem(file.name), text or "", "paragraphs")


_READERS: dict[str, Callable[[SourceFile, BuildOptions], Iterator[RawDocument]]] = {
    "text": _text,
    "wikiextractor": _wikiextractor,
    "jsonl": partial(_table, _json_rows),
    "parquet": partial(_table, _parquet_rows),
    "arrow": partial(_table, _arrow_rows),
    "mediawiki": _mediawiki,
    "html": _html,
}
