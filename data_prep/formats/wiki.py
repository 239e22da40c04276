"""Wikipedia: dumps in MediaWiki's XML, and what WikiExtractor makes of them."""

import bz2
import html
import math
import re
from collections.abc import Iterator
from itertools import chain
from xml.etree import ElementTree

from data_prep.formats import base
from data_prep.formats.base import Format, Record, SourceFile, bad, chunks, document, lines_of
from data_prep.formats.tables import without_title
from data_prep.ledger import Left, size
from data_prep.settings import BuildOptions

_DOC = re.compile(r'<doc id="([^"]*)"(?:[^>]*?title="(.*)")?[^>]*>')
_DUMP_BEGINS = re.compile(r"(?s)(?=<).{0,2000}<mediawiki")
_BZ2_STREAM = re.compile(rb"BZh[1-9]1AY&SY")  # how one begins


def _wikiextractor(file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    """Yields what lies between `<doc id=...>` and `</doc>`; text elsewhere is a bad record."""
    opened: re.Match[str] | None = None
    lines, first, length = list[str](), 0, 0
    for offset, line in chain(lines_of(file), [(0, "<doc id=")]):  # which ends the last one
        begins = line.startswith("<doc id=")
        if opened and line.startswith("</doc>"):
            title = html.unescape(opened[2] or "")
            text, repeated = without_title("\n".join(lines), title)
            out = tuple(repeated)
            yield document(file, opened[1], title, text, layout="wikipedia", left=out)
            opened, lines, length = None, [], 0
        elif begins or length > 2 * base.LONGEST_DOCUMENT:
            if opened or any(map(str.strip, lines)):
                yield bad(file, first, "records_doc_not_closed", "\n".join(lines))
            opened, lines, length = _DOC.match(line) if begins else None, [], 0
            if not begins:
                lines.append(line)
        else:
            lines.append(line)
            length += len(line) + 1
        first = first if lines else offset


def _mediawiki(file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    """Yields the pages of a dump, each parsed by itself."""
    for number, data in enumerate(_pages(file)):
        try:
            page = ElementTree.fromstring(data)
        except ElementTree.ParseError:
            yield bad(file, number, "records_not_xml", data[6:].decode("utf-8", "replace"))
            continue
        title = page.findtext("{*}title") or ""
        name = page.findtext("{*}id") or number
        # A dump with history has several revisions; the last one wins among equal dates.
        revisions = page.findall("{*}revision")[::-1]
        newest = max(revisions, key=lambda r: r.findtext("{*}timestamp") or "", default=page)
        text = newest.findtext("{*}text") or ""
        if page.findtext("{*}ns", "0") != "0":
            yield bad(file, name, "pages_not_articles", title, size(text))
        elif page.find("{*}redirect") is not None:
            yield bad(file, name, "pages_redirects", title, size(text))
        else:
            older = [r.findtext("{*}text") or "" for r in revisions if r is not newest]
            out = [Left("pages_older_revisions", title, size(text)) for text in older]
            yield document(file, name, title, text, layout="wikitext", left=tuple(out))


def _pages(file: SourceFile) -> Iterator[bytes]:
    """Yields the bytes of each page of a dump that begins in the share."""
    with base.open_bytes(file) as stream:
        is_packed = file.packed == "bz2"
        stop = math.inf if is_packed or not file.stop else file.stop
        parts = chunks(stream)
        offset, buffer = file.start, b""
        if is_packed and file.stop:
            parts = _bz2_streams(file)
        elif file.start:
            stream.seek(file.start)
        for chunk in parts:
            *pages, buffer = (buffer + chunk).split(b"</page>")
            for page in pages:
                start = page.find(b"<page>")
                if offset + start >= stop:
                    return
                if start >= 0:
                    yield page[start:] + b"</page>"
                offset += len(page) + len(b"</page>")
            if len(buffer) > base.LONGEST_RECORD:
                raise EOFError(base.TOO_LONG)
        if b"<page>" in buffer and offset + buffer.find(b"<page>") < stop:
            raise EOFError("it ends inside a page")


def _bz2_streams(file: SourceFile) -> Iterator[bytes]:
    """Yields the text of each stream that begins in a share; Wikipedia's have 100 whole pages each."""
    with open(file.path, "rb") as raw:
        raw.seek(file.start)
        data = raw.read(file.stop - file.start)
        data += raw.read(len(b"BZh91AY&SY") - 1)
        for match in _BZ2_STREAM.finditer(data):
            stream = bz2.BZ2Decompressor()
            text = stream.decompress(memoryview(data)[match.start() :])
            while not stream.eof and (chunk := raw.read(1 << 20)):
                text += stream.decompress(chunk)
            yield text
            if not stream.eof:
                raise EOFError("it ends inside a compressed stream")


base.register(
    Format("mediawiki", _mediawiki, begins=_DUMP_BEGINS, can_cut=True),
    Format("wikiextractor", _wikiextractor, begins=re.compile("<doc id=")),
)
