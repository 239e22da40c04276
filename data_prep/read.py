"""Reads documents from an input file or a share of one, one at a time."""

import bz2
import codecs
import csv
import html
import io
import json
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import chain, takewhile
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from data_prep.settings import BuildOptions
from data_prep.sources import (
    Layout,
    SourceFile,
    damage,
    open_bytes,
    open_raw,
    stem,
    unread,
)
from multicls.errors import UserError
from multicls.tables import separator_of

LONGEST_RECORD = 1 << 26  # bytes of a line or a page; a longer line is cut
TOO_LONG = "a page or an object of more than 64 MB"
LONGEST_DOCUMENT = 1 << 22  # characters of a plain text, after which the next blank line ends it
CHUNK = 1 << 20  # bytes
ROWS = 256  # of a table, read at a time
OTHERS = ("id", "title", "url")  # columns that are read beside the text
# Rows that are sentences: one whose hash is 0 modulo BOUNDARY begins a document.
BOUNDARY, FEWEST_ROWS, MOST_ROWS = 512, 256, 1024
_DOC = re.compile(r'<doc id="([^"]*)"(?:[^>]*?title="(.*)")?[^>]*>')
_PROLOG = re.compile(r"\A\s*(?:<[?!][^>]*>\s*)*")  # declaration and document type
_BZ2_STREAM = re.compile(rb"BZh[1-9]1AY&SY")  # how one begins
_WIKIPEDIA = re.compile(r"https?://[\w.-]*\bwikipedia\.org/")

Rows = Callable[[SourceFile, Sequence[str]], Iterable[tuple[int, Any]]]


class RawDocument(NamedTuple):
    """A document as it stands in the input.

    `dropped` is the reason why a record cannot be read. Then the text is that of the record, and
    `lost` the number of characters of text that it may have held.
    """

    source: str
    id: str
    title: str
    text: str
    layout: Layout
    dropped: str = ""
    lost: int = 0
    titles: int = 0  # number of first lines that are fields of their own, and so no headings


def read_documents(file: SourceFile, settings: BuildOptions) -> Iterator[RawDocument]:
    """Yields the documents of a file, and bad records with the reason to drop them; UserError if it is out of reach."""
    documents = _to_the_damage(file, settings)
    yield from _join_rows(documents) if file.layout == "sentences" else documents


def _to_the_damage(file: SourceFile, settings: BuildOptions) -> Iterator[RawDocument]:
    """Yields the documents of a file; what cannot be read of it is the last one."""
    seen = 0
    try:
        for document in _READERS[file.format](file, settings):
            seen += document.lost if document.dropped else len(document.text)
            yield document
    except UserError:
        raise
    except Exception as error:
        bad = _bad(file, f"{file.start}-damaged", "records_file_damaged", damage(file, error))
        yield bad._replace(lost=unread(file, seen))


def _document(
    file: SourceFile, record: object, title: str, text: str, layout: Layout
) -> RawDocument:
    name = _utf8(f"{file.name}#{record}")
    return RawDocument(file.source, name, _utf8(title), _utf8(text), layout)


def _bad(file: SourceFile, record: object, reason: str, text: str) -> RawDocument:
    return _document(file, record, "", text, "plain")._replace(dropped=reason, lost=len(text))


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
    title, lines, is_row = stem(file.name), list[str](), file.layout == "sentences"
    first = size = count = 0
    damaged: Exception | None = None
    try:
        for offset, text in _lines(file):
            blank = not text.strip()
            ends = is_row or (blank and settings.documents == "blank_line")
            if lines and (ends or size > LONGEST_DOCUMENT * (1 if blank else 2)):
                yield _document(file, first, title, "\n".join(lines), file.layout)
                lines, size, count = [], 0, count + 1
            if lines or not blank or is_row:
                first = first if lines else offset
                lines.append(text)
                size += len(text) + 1
    except Exception as error:  # what was read before the damage is a document
        damaged = error
    if lines or not (count or damaged):
        yield _document(file, first, title, "\n".join(lines), file.layout)
    if damaged:
        raise damaged


def _join_rows(rows: Iterable[RawDocument]) -> Iterator[RawDocument]:
    """Joins consecutive rows, one sentence each, to documents; an empty row ends a document.

    Where documents begin depends on the rows themselves. The same book in another place of the
    stream therefore gives the same documents, but for its edges, and is found as a duplicate.
    """
    group = list[RawDocument]()
    for row in chain(rows, [RawDocument("", "", "", "", "sentences")]):
        if row.dropped:
            yield row
            continue
        row = row._replace(text=" ".join(row.text.split()))
        begins = xxhash.xxh3_64_intdigest(row.text.encode()) % BOUNDARY == 0
        is_full = len(group) == MOST_ROWS or (begins and len(group) >= FEWEST_ROWS)
        if group and (is_full or not row.text):
            yield group[0]._replace(text="\n".join(member.text for member in group))
            group = []
        group += [row] if row.text else []


def _wikiextractor(file: SourceFile, settings: BuildOptions) -> Iterator[RawDocument]:
    """Yields what lies between `<doc id=...>` and `</doc>`; text elsewhere is a bad record."""
    opened: re.Match[str] | None = None
    lines, first, size = list[str](), 0, 0
    for offset, line in chain(_lines(file), [(0, "<doc id=")]):  # which ends the last one
        begins = line.startswith("<doc id=")
        if opened and line.startswith("</doc>"):
            title = html.unescape(opened[2] or "")
            text = _without_title("\n".join(lines), title)
            yield _document(file, opened[1], title, text, "wikipedia")
            opened, lines, size = None, [], 0
        elif begins or size > 2 * LONGEST_DOCUMENT:
            if opened or any(map(str.strip, lines)):
                yield _bad(file, first, "records_doc_not_closed", "\n".join(lines))
            opened, lines, size = _DOC.match(line) if begins else None, [], 0
        else:
            lines.append(line)
            size += len(line) + 1
        first = first if lines else offset


def _without_title(text: str, title: str) -> str:
    """Returns the text of an article without a first line that repeats the title."""
    first, _, rest = text.partition("\n")
    return rest if first.strip() == title else text


def _table(read: Rows, file: SourceFile, settings: BuildOptions) -> Iterator[RawDocument]:
    """Yields the rows of JSON, tables, Parquet and data sets; several text fields are joined."""
    fields = settings.text_field
    for number, row in read(file, fields):
        if isinstance(row, RawDocument):
            yield row
            continue
        record = row if isinstance(row, dict) else {}
        texts = [record[field] for field in fields if isinstance(record.get(field), str)]
        if not texts:
            bad = _bad(file, number, "records_without_text", str(row))
            yield bad._replace(lost=0) if record.keys() & fields else bad
            continue
        title, layout, titles = str(record.get("title") or ""), file.layout, 0
        name = number if record.get("id") is None else record["id"]
        if layout == "plain" and _WIKIPEDIA.match(str(record.get("url"))):
            layout = "wikipedia"
        if layout in ("plain", "markdown", "lines"):
            texts = list(map(_without_tags, texts))
        if len(fields) > 1:
            texts = list(filter(str.strip, texts))
            titles = len(list(takewhile(lambda text: "\n" not in text.strip(), texts)))
        elif layout == "wikipedia":
            texts = [_without_title(texts[0], title)]
        text = "\n\n".join(texts)
        yield _document(file, name, title, text, layout)._replace(titles=titles)


_BLOCKS = (
    "p|div|br|hr|li|ul|ol|dl|dt|dd|h[1-6]|blockquote|table|tr|td|th|thead|tbody|caption|pre|section|article|header|footer"
    "|figure|figcaption|center|details|summary|iframe|video|audio"
)
_INLINE = (
    "em|strong|span|code|img|sup|sub|font|small|big|tt|kbd|del|ins|mark|abbr|cite|var|samp|wbr"
)
_TAG = re.compile(  # `<b and c>` is none
    r"(?is)<(?P<unseen>script|style)\b[^<>]*>(?:(?!<(?P=unseen)).)*?</(?P=unseen)>|<!--(?:(?!<!--).)*?-->"
    rf"|</?(?:(?P<block>{_BLOCKS})|{_INLINE})(?=[\s/>])[^<>]*>|</?[abiqsu](?:\s[^<>=]*=[^<>]*|\s*/?)>"
    r"|<(?:form|label|input|button)\s[^<>=]*=[^<>]*>|</(?:form|label|button)>"
)
_ENTITY = re.compile(r"&(?:#\d+|#x[\da-fA-F]+|[a-zA-Z]{2,8});")


def _without_tags(text: str) -> str:
    """Returns the text of a fragment of HTML; other text stays as it is."""
    if "<" in text:
        text = _TAG.sub(lambda match: "\n\n" if match["block"] else "", text)
    return unescape(text)


def unescape(text: str) -> str:
    """Returns the text with the characters of HTML's entities, such as `&amp;`; `&copy=1` of an address is none."""
    return _ENTITY.sub(lambda match: html.unescape(match[0]), text) if "&" in text else text


def _json_rows(file: SourceFile, fields: Sequence[str]) -> Iterator[tuple[int, Any]]:
    for offset, text in _lines(file):
        if text.strip():
            try:
                yield offset, json.loads(text)
            except (ValueError, RecursionError):
                yield offset, _bad(file, offset, "records_not_json", text)


_VALUE = re.compile(r"[^\s,\[\]]")  # where one begins


def _array_rows(file: SourceFile, fields: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yields the objects of a JSON array, or those of a file that stand one after another."""
    decode, rest, number = json.JSONDecoder().raw_decode, "", 0
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    with open_bytes(file.path) as stream:
        for chunk in _chunks(stream):
            rest, at = rest + decoder.decode(chunk), 0
            with suppress(json.JSONDecodeError):  # the last one goes on in the next chunk
                while found := _VALUE.search(rest, at):
                    value, at = decode(rest, found.start())
                    yield number, value
                    number += 1
            rest = rest[at:]
            if len(rest) > LONGEST_RECORD:
                raise EOFError(TOO_LONG)
    if _VALUE.search(rest):
        raise EOFError("it ends inside an object, or is no JSON")


def _chunks(stream: Any) -> Iterator[bytes]:
    """Yields the bytes of a stream, about a MB at a time; of a damaged one, what can be read of it before its error."""
    read, parts = getattr(stream, "read1", stream.read), list[bytes]()
    try:
        while part := read(CHUNK):
            parts.append(part)
            if sum(map(len, parts)) >= CHUNK:
                yield b"".join(parts)
                parts = []
    except Exception:
        yield b"".join(parts)
        raise
    yield b"".join(parts)


def _whole(file: SourceFile) -> str:
    """Returns the text of a file of one record."""
    with open_bytes(file.path) as stream:
        data = stream.read(LONGEST_RECORD + 1)
    if len(data) > LONGEST_RECORD:
        raise EOFError(TOO_LONG)
    return data.decode("utf-8-sig", "replace")


def _csv_rows(file: SourceFile, fields: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yields the rows of a table; a quoted cell may have line breaks."""
    csv.field_size_limit(LONGEST_RECORD)
    with open_bytes(file.path) as stream:
        text = io.TextIOWrapper(stream, "utf-8-sig", "replace", newline="")
        header = text.readline()
        mark = separator_of(header)
        names = next(csv.reader([header], delimiter=mark))
        for number, cells in enumerate(_cells(text, mark)):
            if len(cells) == len(names):
                yield number, dict(zip(names, cells, strict=True))
            elif cells:
                yield number, _bad(file, number, "records_not_a_row", mark.join(cells))


def _cells(text: Iterable[str], mark: str) -> Iterator[list[str]]:
    """Yields the cells of each row of a table.

    A quotation mark that opens a cell and does not close it is text: the lines that it would join are rows.
    """
    taken, again = list[str](), deque[str]()  # lines of a row, and lines to read again
    source = iter(text)

    def lines() -> Iterator[str]:
        while again or (line := next(source, "")):
            taken.append(again.popleft() if again else line)
            yield taken[-1]

    reader = csv.reader(lines(), delimiter=mark, strict=True)
    while True:
        taken.clear()
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error:
            first, *rest = taken
            again.extendleft(reversed(rest))
            is_closed = not rest and first.count('"') % 2 == 0  # as in `"a, b" ,c`
            quoting: Any = csv.QUOTE_MINIMAL if is_closed else csv.QUOTE_NONE
            yield from csv.reader([first], delimiter=mark, quoting=quoting)
            reader = csv.reader(lines(), delimiter=mark, strict=True)  # the other has met the end
        else:
            yield row


def _parquet_rows(file: SourceFile, fields: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yields the rows of a file; a share has the row groups whose first byte lies in it."""
    with open_bytes(file.path) as raw, closing(pq.ParquetFile(raw)) as table:
        columns, first = [n for n in table.schema_arrow.names if n in (*fields, *OTHERS)], 0
        for number in range(table.num_row_groups):
            group = table.metadata.row_group(number)
            offset = group.column(0).dictionary_page_offset or group.column(0).data_page_offset
            if file.start <= offset < (file.stop or math.inf):
                batches = table.iter_batches(ROWS, [number], columns)
                yield from enumerate((row for batch in batches for row in batch.to_pylist()), first)
            first += group.num_rows


def _arrow_rows(file: SourceFile, fields: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yields the rows of a file of a data set; a share in bytes has its part of the rows."""
    table = pa.ipc.open_stream(pa.memory_map(file.path)).read_all()
    size = os.path.getsize(file.path)
    first, end = (len(table) * offset // size for offset in (file.start, file.stop or size))
    batches = table.select([n for n in table.column_names if n in (*fields, *OTHERS)])[
        first:end
    ].to_batches(ROWS)
    yield from enumerate((row for batch in batches for row in batch.to_pylist()), first)


def _mediawiki(file: SourceFile, settings: BuildOptions) -> Iterator[RawDocument]:
    """Yields the pages of a dump, each parsed by itself."""
    for number, data in enumerate(_pages(file)):
        try:
            page = ElementTree.fromstring(data)
        except ElementTree.ParseError:
            yield _bad(file, number, "records_not_xml", data[6:].decode("utf-8", "replace"))
            continue
        title = page.findtext("{*}title") or ""
        name = page.findtext("{*}id") or number
        if page.findtext("{*}ns", "0") != "0":
            yield _bad(file, name, "pages_not_articles", title)
        elif page.find("{*}redirect") is not None:
            yield _bad(file, name, "pages_redirects", title)
        else:
            # A dump with history has several revisions; the last one wins among equal dates.
            revisions = page.findall("{*}revision")[::-1]
            newest = max(revisions, key=lambda r: r.findtext("{*}timestamp") or "", default=page)
            text = newest.findtext("{*}text") or ""
            yield _document(file, name, title, text, "wikitext")


def _pages(file: SourceFile) -> Iterator[bytes]:
    """Yields the bytes of each page of a dump that begins in the share."""
    with open_bytes(file.path) as stream:
        is_packed = file.path.endswith(".bz2")
        stop = math.inf if is_packed or not file.stop else file.stop
        chunks = _chunks(stream)
        offset, buffer = file.start, b""
        if is_packed and file.stop:
            chunks = _bz2_streams(file)
        elif file.start:
            stream.seek(file.start)
        for chunk in chunks:
            *pages, buffer = (buffer + chunk).split(b"</page>")
            for page in pages:
                start = page.find(b"<page>")
                if offset + start >= stop:
                    return
                if start >= 0:
                    yield page[start:] + b"</page>"
                offset += len(page) + len(b"</page>")
            if len(buffer) > LONGEST_RECORD:
                raise EOFError(TOO_LONG)
        if b"<page>" in buffer and offset + buffer.find(b"<page>") < stop:
            raise EOFError("it ends inside a page")


def _bz2_streams(file: SourceFile) -> Iterator[bytes]:
    """Yields the text of each stream that begins in a share; Wikipedia's have 100 whole pages each."""
    with open_raw(file.path) as raw:
        raw.seek(file.start)
        data = raw.read(file.stop - file.start)
        data += raw.read(len(b"BZh91AY&SY") - 1)
        for match in _BZ2_STREAM.finditer(data):
            stream = bz2.BZ2Decompressor()
            text = stream.decompress(memoryview(data)[match.start() :])
            while not stream.eof and (chunk := raw.read(1 << 20)):
                text += stream.decompress(chunk)
            yield text


def _html(file: SourceFile, settings: BuildOptions) -> Iterator[RawDocument]:
    """Yields the main text of a page of the Web."""
    import trafilatura

    # It takes a page without <html> in its first 50 characters for another thing.
    page = "<html>" + _PROLOG.sub("", _whole(file))
    article: Any = trafilatura.bare_extraction(page, include_comments=False, with_metadata=True)
    title, text = (article.title, article.text) if article else (None, None)
    yield _document(file, 0, title or stem(file.name), text or "", "paragraphs")


def _notebook(file: SourceFile, settings: BuildOptions) -> Iterator[RawDocument]:
    """Yields the Markdown cells of a Jupyter notebook as one document."""
    book = json.loads(_whole(file))
    sheets = [book] if "cells" in book else book["worksheets"]
    cells = [cell for sheet in sheets for cell in sheet["cells"]]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    yield _document(file, 0, stem(file.name), "\n\n".join(texts), file.layout)


_CUE = re.compile(r"(?:\d+\n)?[\d:,.]+ --> .*|\{\\[^{}]*\}")  # number and times, or a style


def _subtitles(file: SourceFile, settings: BuildOptions) -> Iterator[RawDocument]:
    """Yields what is spoken in a file of subtitles: sentences go on in the next cue, or none has a full stop."""
    lines = (line.strip() for _, line in _lines(file))
    spoken = _without_tags(_CUE.sub("", "\n".join(filter(None, lines))))
    cues = [line for line in spoken.split("\n") if line.strip()]
    if len(re.findall(r"[.!?…。！？]", spoken)) < len(cues) / 20:
        yield _document(file, 0, stem(file.name), "\n".join(cues), "lines")
    else:
        yield _document(file, 0, stem(file.name), " ".join(cues), "paragraphs")


_READERS: dict[str, Callable[[SourceFile, BuildOptions], Iterator[RawDocument]]] = {
    "text": _text,
    "wikiextractor": _wikiextractor,
    "jsonl": partial(_table, _json_rows),
    "parquet": partial(_table, _parquet_rows),
    "arrow": partial(_table, _arrow_rows),
    "json": partial(_table, _array_rows),
    "csv": partial(_table, _csv_rows),
    "ipynb": _notebook,
    "srt": _subtitles,
    "mediawiki": _mediawiki,
    "html": _html,
}
