"""Reads documents from a piece of a file or data set, one at a time, so that memory stays constant for any input."""

from __future__ import annotations

import bz2
import html
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import IO, Any, NamedTuple
from xml.etree import ElementTree

from data_prep.settings import ReadOptions
from data_prep.sources import COMPRESSIONS, SourceFile, damage, extension, load_rows, open_bytes, open_raw
from data_prep.units import LONGEST_DOCUMENT, Piece
from multicls.errors import UserError, did_you_mean, first_line

LONGEST_RECORD = 1 << 26  # bytes of a line or a page; a document with a longer one is left out
SENTENCES = 512  # in a document where each line or row is a sentence and nothing says where documents end
_SEARCH = 1 << 20  # bytes after a cut in a plain text in which a blank line is looked for
_CHUNK = 1 << 18
_ROWS = 256  # of a table, read at a time
_SAMPLE = 200  # characters of a bad record
_DOC = re.compile(r'<doc id="([^"]*)"(?:[^>]*?title="(.*)")?[^>]*>')
_BZ2_STREAM = re.compile(rb"BZh[1-9]1AY&SY")


class RawDocument(NamedTuple):
    """A document as it stands in the input.

    `layout` says what a line is: "blocks" (blank lines between paragraphs), "lines" or "dotted_lines" (a line is a
    paragraph; in the second, headings end with a full stop), "sentences" (a line is a sentence), "wikitext".
    `dropped` is the reason why it is left out; then the text is empty and the title is a sample of the record.
    """

    source: str
    id: str
    title: str
    text: str
    layout: str
    dropped: str = ""


class _Bad(NamedTuple):
    """A record that cannot be read."""

    place: int  # its first byte, or the number of its row
    reason: str
    sample: str
    why: str  # what is wrong, for the error message


_Line = tuple[int, str, str]  # offset, text without its end, and the reason why its document cannot be kept


def read_piece(file: SourceFile, piece: Piece, options: ReadOptions) -> Iterator[RawDocument]:
    """Yields the documents that begin in a piece, in order.

    Raises:
        UserError: the text field is missing in the first record, the file cannot be reached, or, with
            `bad_records="stop"`, a record is bad or the file damaged. The message names the place.
    """
    try:
        for record in _READERS[file.format](file, piece, options):
            yield _dropped(file, piece, options, record) if isinstance(record, _Bad) else record
    except UserError:
        raise
    except Exception as error:  # of remote files, whatever their transports raise
        why = damage(file.path, error)
        yield _dropped(file, piece, options, _Bad(-1, "records_file_damaged", why, why))


def _dropped(file: SourceFile, piece: Piece, options: ReadOptions, bad: _Bad) -> RawDocument:
    if options.bad_records == "stop":
        raise UserError(
            f"{_place(file, piece, bad)}: {bad.why}; repair it, leave the file out (--exclude), or leave such records "
            "out (--bad_records drop)."
        )
    place = bad.place if bad.place >= 0 else f"{piece.start}-damaged"
    return RawDocument(file.source, f"{file.name}#{place}", _sample(bad.sample), "", "blocks", bad.reason)


def _place(file: SourceFile, piece: Piece, bad: _Bad) -> str:
    """Returns `file:line`, `file: row N`, or the file alone where neither is known."""
    if file.format in ("parquet", "dataset") and bad.place >= 0:
        return f"{file}: row {bad.place}"
    if bad.place < 0 or (file.format == "mediawiki" and extension(file.path) in COMPRESSIONS):
        return str(file)
    stream, raw = open_bytes(file.path)
    line, left = 1, bad.place
    with raw, stream:
        while left and (data := stream.read(min(left, _CHUNK))):
            line += data.count(b"\n")
            left -= len(data)
    return f"{file}:{line}"


def _sample(text: str) -> str:
    return " ".join(text[:_SAMPLE].split()).encode("utf-8", "backslashreplace").decode("utf-8")


def _document(file: SourceFile, name: object, title: str, text: str, layout: str, dropped: str = "") -> RawDocument:
    return RawDocument(file.source, f"{file.name}#{name}", title, text, layout, dropped)


def _lines(
    file: SourceFile, piece: Piece, begins: Callable[[bytes], bool], search: float = math.inf
) -> Iterator[_Line]:
    """Yields the lines from the first record that begins at or after the piece's start to the one at or after its stop.

    Args:
        begins: whether a record begins with a line.
        search: bytes after a cut; the first line beyond them begins a record in any case.
    """
    stream, raw = open_bytes(file.path)
    start, stop = piece.start, piece.stop if piece.stop < file.size else math.inf
    with raw, stream:
        offset = max(start - 1, 0)
        if start:  # compressed streams may not seek, and are read from the start
            stream.seek(offset)
            offset += _skip_line(stream)
        inside = not start
        while line := stream.readline(LONGEST_RECORD):
            if not inside or offset >= stop:
                is_first = begins(line)
                inside = inside or is_first or offset - start >= search
                if inside and offset >= stop and (is_first or offset - stop >= search):
                    return
            size, problem = len(line), ""
            if size == LONGEST_RECORD and not line.endswith(b"\n"):
                size += _skip_line(stream)
                line, problem = line[:_SAMPLE], "documents_line_too_long"
            if inside:
                try:
                    text = line.decode("utf-8" if offset else "utf-8-sig").rstrip("\r\n")
                except UnicodeDecodeError:
                    text, problem = line[:_SAMPLE].decode("utf-8", "backslashreplace"), problem or "documents_not_utf8"
                yield offset, text, problem
            offset += size


def _skip_line(stream: IO[bytes]) -> int:
    """Reads to the end of a line; returns the number of bytes."""
    size = 0
    while part := stream.readline(LONGEST_RECORD):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def _bad_line(line: _Line) -> _Bad:
    offset, text, problem = line
    return _Bad(offset, problem, text, problem.partition("_")[2].replace("_", " "))


def _joined(lines: list[_Line], document: RawDocument) -> RawDocument | _Bad:
    """Returns a document with these lines as its text, or the first of them that is bad."""
    bad = next((line for line in lines if line[2]), None)
    return _bad_line(bad) if bad else document._replace(text="\n".join([text for _, text, _ in lines]))


def _text(file: SourceFile, piece: Piece, options: ReadOptions) -> Iterator[RawDocument | _Bad]:
    """Yields documents of a plain text, which end at blank lines."""
    if options.documents == "sentences":
        lines = _lines(file, piece, lambda _: True)
        yield from _group_sentences(file, (_bad_line(line) if line[2] else line[:2] for line in lines))
        return

    def document() -> RawDocument | _Bad:
        return _joined(own, _document(file, own[0][0] if own else 0, stem(file), "", "blocks"))

    own: list[_Line] = []
    size, emitted = 0, False
    for line in _lines(file, piece, lambda line: not line.strip(), _SEARCH):
        blank = not (line[1].strip() or line[2])
        ends = blank and (options.documents == "blank_line" or size > LONGEST_DOCUMENT)
        if own and (ends or size > 2 * LONGEST_DOCUMENT):
            yield document()
            own, size, emitted = [], 0, True
        if own or not blank:
            own.append(line)
            size += len(line[1]) + 1
    if own or not (emitted or piece.start):
        yield document()


def _group_sentences(file: SourceFile, rows: Iterable[tuple[int, str] | _Bad]) -> Iterator[RawDocument | _Bad]:
    """Yields documents of consecutive sentences, one a row; an empty row ends a document."""
    first, group = 0, list[str]()
    for row in rows:
        if isinstance(row, _Bad):
            yield row
            continue
        sentence = " ".join(row[1].split())
        if sentence:
            first = first if group else row[0]
            group.append(sentence)
        if group and (len(group) == SENTENCES or not sentence):
            yield _document(file, first, stem(file), "\n".join(group), "sentences")
            group = []
    if group:
        yield _document(file, first, stem(file), "\n".join(group), "sentences")


def _wikiextractor(file: SourceFile, piece: Piece, options: ReadOptions) -> Iterator[RawDocument | _Bad]:
    """Yields what lies between `<doc id=...>` and `</doc>`; text elsewhere is a bad record."""
    opened: re.Match[str] | None = None
    lines: list[_Line] = []
    size = 0
    for line in _lines(file, piece, lambda line: line.startswith(b"<doc id=")):
        if line[1].startswith("<doc id="):
            yield from _not_closed(lines)
            opened, lines, size = _DOC.match(line[1]), [line], 0
        elif opened and line[1].startswith("</doc>"):
            name, title = opened[1], html.unescape(opened[2] or "")
            repeated = len(lines) > 1 and lines[1][1].strip() == title
            yield _joined(lines[2 if repeated else 1 :], _document(file, name, title, "", "dotted_lines"))
            opened, lines = None, []
        else:
            lines.append(line)
            size += len(line[1]) + 1
            if size > 2 * LONGEST_DOCUMENT:
                yield from _not_closed(lines)
                opened, lines, size = None, [], 0
    yield from _not_closed(lines)


def _not_closed(lines: list[_Line]) -> Iterator[_Bad]:
    if filled := [line for line in lines if line[1].strip()]:
        sample = " ".join(line[1] for line in filled[:3])
        yield _Bad(filled[0][0], "records_doc_not_closed", sample, "text outside <doc id=...> ... </doc>")


def _table(file: SourceFile, piece: Piece, options: ReadOptions) -> Iterator[RawDocument | _Bad]:
    """Yields the rows of JSON lines, Parquet and data sets."""
    source = {"jsonl": _json_rows, "parquet": _parquet_rows, "dataset": _dataset_rows}[file.format]
    rows = _checked_rows(source(file, piece, options), file, options.text_field, first=piece.start == 0)
    if "sentences" in (options.documents, file.hub and file.hub.documents):
        texts = (row if isinstance(row, _Bad) else (row[0], row[1][options.text_field]) for row in rows)
        yield from _group_sentences(file, texts)
        return
    layout = file.hub.layout if file.hub else "blocks"
    for row in rows:
        yield row if isinstance(row, _Bad) else _row(file, *row, options.text_field, layout)


def _checked_rows(
    rows: Iterable[tuple[int, Any] | _Bad], file: SourceFile, field: str, first: bool
) -> Iterator[tuple[int, dict[str, Any]] | _Bad]:
    """Yields rows that have text, and a bad record for every other one; the file's first record must have the field."""
    for row in rows:
        if isinstance(row, _Bad):
            yield row
            continue
        number, record = row
        if first and isinstance(record, dict):
            _check_field(file, field, record)
            first = False
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            yield _Bad(number, "records_without_text", str(record)[:_SAMPLE], f"no text in {field!r}")
        elif not _encodable(f"{text}{record.get('title')}{record.get('id')}"):
            yield _Bad(number, "documents_half_a_surrogate_pair", text, "half a surrogate pair")
        else:
            yield number, record


def _check_field(file: SourceFile, field: str, names: Iterable[str]) -> None:
    if field not in names:
        raise UserError(f"{file}: no field {field!r}; set --text_field.{did_you_mean(field, names)}")


def _row(file: SourceFile, number: int, record: dict[str, Any], field: str, layout: str) -> RawDocument:
    name, title, text = record.get("id"), str(record.get("title") or ""), record[field]
    if file.format == "jsonl" and {"id", "url", "title", "text"} <= record.keys():  # WikiExtractor's JSON
        first, _, rest = text.partition("\n")
        text, layout = rest if first.strip() == title else text, "dotted_lines"
    return _document(file, number if name is None else name, title, text, layout)


def _json_rows(file: SourceFile, piece: Piece, options: ReadOptions) -> Iterator[tuple[int, Any] | _Bad]:
    for offset, text, problem in _lines(file, piece, lambda _: True):
        if problem:
            yield _bad_line((offset, text, problem))
        elif text.strip():
            try:
                yield offset, json.loads(text)
            except (ValueError, RecursionError) as error:
                yield _Bad(offset, "records_not_json", text, f"not JSON: {first_line(error)}")


def _parquet_rows(file: SourceFile, piece: Piece, options: ReadOptions) -> Iterator[tuple[int, Any]]:
    import pyarrow.parquet as pq

    with open_raw(file.path) as raw, closing(pq.ParquetFile(raw)) as table:
        columns = _columns(file, options, table.schema_arrow.names)
        groups = range(piece.start, piece.stop) if file.rows else range(table.num_row_groups)
        number = sum(table.metadata.row_group(i).num_rows for i in range(groups.start))
        for batch in table.iter_batches(_ROWS, row_groups=groups, columns=columns):
            yield from enumerate(batch.to_pylist(), number)
            number += len(batch)


def _columns(file: SourceFile, options: ReadOptions, names: list[str]) -> list[str]:
    _check_field(file, options.text_field, names)
    return [name for name in dict.fromkeys((options.text_field, "id", "title")) if name in names]


def _dataset_rows(file: SourceFile, piece: Piece, options: ReadOptions) -> Iterator[tuple[int, Any]]:
    """Yields rows of a data set on disk, or of a file on the Hub that is not Parquet."""
    if file.rows:
        data = load_rows(file.path, file.hub).select(range(piece.start, piece.stop))
    else:
        import datasets

        assert file.hub is not None
        data = datasets.load_dataset(file.hub.kind, data_files=[file.path], split="train", streaming=True)
    if data.features is not None:
        data = data.select_columns(_columns(file, options, list(data.features)))
    number = piece.start
    for batch in data.iter(_ROWS):
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        yield from enumerate(rows, number)
        number += len(rows)


def _mediawiki(file: SourceFile, piece: Piece, options: ReadOptions) -> Iterator[RawDocument | _Bad]:
    """Yields the pages whose `<page>` begins in the piece, each parsed by itself."""
    for place, data in _pages(_page_chunks(file, piece), piece.start):
        if not data:
            yield _Bad(place, "documents_page_too_long", "", "a page that is too long")
            continue
        try:
            page = ElementTree.fromstring(data)
        except ElementTree.ParseError as error:
            sample = data[:_SAMPLE].decode("utf-8", "backslashreplace").replace("<page>", "")
            yield _Bad(place, "records_not_xml", sample, f"a page that is not well-formed XML ({error}): {sample!r}")
            continue
        dropped = ""
        if page.findtext("{*}ns", "0") != "0":
            dropped = "documents_not_articles"
        elif page.find("{*}redirect") is not None:
            dropped = "documents_redirects"
        text = "" if dropped else page.findtext("{*}revision/{*}text") or ""
        name, title = page.findtext("{*}id") or place, page.findtext("{*}title") or ""
        yield _document(file, name, title, text, "wikitext", dropped)


def _pages(chunks: Iterator[bytes | None], base: int) -> Iterator[tuple[int, bytes]]:
    """Yields the offset and the bytes of every page, no bytes if they are too many.

    Args:
        chunks: of the decompressed file, `None` where the piece ends; what follows it only completes a page.
        base: offset of the first chunk.
    """
    buffer, limit, opened, too_long = b"", math.inf, False, False
    for chunk in chunks:
        if chunk is None:
            limit = base + len(buffer)
            continue
        at, searched = 0, len(buffer)
        buffer += chunk
        while True:
            if not opened:
                start = buffer.find(b"<page>", at)
                at = start if start >= 0 else max(at, len(buffer) - len(b"<page"))
                if base + at >= limit:
                    return
                if start < 0:
                    break
                opened, searched = True, at
            end = buffer.find(b"</page>", max(at, searched - len(b"</page")))
            if end < 0:
                break
            end += len(b"</page>")
            yield base + at, b"" if too_long else buffer[at:end]
            at, opened, too_long = end, False, False
        if opened and len(buffer) - at > LONGEST_RECORD:
            too_long, at = True, len(buffer) - len(b"</page")
        buffer, base = buffer[at:], base + at
    if opened:
        raise EOFError("it ends inside a page")


def _page_chunks(file: SourceFile, piece: Piece) -> Iterator[bytes | None]:
    stop = piece.stop if piece.stop < file.size else math.inf
    if extension(file.path) == ".bz2":
        with open_raw(file.path) as raw:
            yield from _bz2_chunks(raw, piece.start, stop)
        return
    stream, raw = open_bytes(file.path)
    with raw, stream:
        if piece.start:
            stream.seek(piece.start)
        left = stop - piece.start
        while chunk := stream.read(int(min(left, _CHUNK)) or _CHUNK):
            yield chunk
            left -= len(chunk)
            if not left:
                yield None
                left = math.inf


def _bz2_chunks(raw: IO[bytes], start: int, stop: float) -> Iterator[bytes | None]:
    """Yields what decompresses from the streams that begin in a range, `None`, and what the streams after them hold."""
    data = _seek_stream(raw, start, stop)
    decompressor, owned = bz2.BZ2Decompressor(), True
    while data or not decompressor.needs_input:
        if chunk := decompressor.decompress(data, _CHUNK):
            yield chunk
        data = b""
        if decompressor.eof:
            data = decompressor.unused_data or raw.read(_CHUNK)
            if owned and raw.tell() - len(data) >= stop:
                owned = False
                yield None
            if not data:
                return
            decompressor = bz2.BZ2Decompressor()
        elif decompressor.needs_input and not (data := raw.read(_CHUNK)):
            raise EOFError("Compressed file ended before the end-of-stream marker was reached")


def _seek_stream(raw: IO[bytes], start: int, stop: float) -> bytes:
    """Finds the first stream that begins in a range; returns the bytes from there to the next place to read."""
    raw.seek(start)
    data = b""
    while start < stop and (more := raw.read(_CHUNK)):
        data += more
        if match := _BZ2_STREAM.search(data):
            return data[match.start() :] if start + match.start() < stop else b""
        kept = data[-9:]  # a stream's first bytes may lie across two reads
        start += len(data) - len(kept)
        data = kept
    return b""


def _html(file: SourceFile, piece: Piece, options: ReadOptions) -> Iterator[RawDocument | _Bad]:
    """Yields the main text of a page of the Web."""
    import trafilatura

    if file.size > LONGEST_RECORD:
        yield _Bad(0, "documents_page_too_long", file.name, "a page that is too long")
        return
    lines = list(_lines(file, piece, lambda _: True))
    page = _joined(lines, _document(file, 0, stem(file), "", "lines"))
    if isinstance(page, RawDocument):
        title = re.search(r"<title[^>]*>([^<]*)", page.text, re.IGNORECASE)
        text = trafilatura.extract(page.text, include_comments=False) or ""
        page = page._replace(title=html.unescape(title[1]).strip() if title else page.title, text=text)
    yield page


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def stem(file: SourceFile) -> str:
    """Returns the name of a file without any suffix."""
    return os.path.basename(file.name).split(".")[0]


_READERS: dict[str, Callable[[SourceFile, Piece, ReadOptions], Iterator[RawDocument | _Bad]]] = {
    "text": _text,
    "wikiextractor": _wikiextractor,
    "jsonl": _table,
    "parquet": _table,
    "dataset": _table,
    "mediawiki": _mediawiki,
    "html": _html,
}
