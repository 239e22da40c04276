"""Pages of the Web: HTML files, and the records of WARC and WET files."""

import re
import zlib
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from typing import IO, Any

from data_prep.formats import base
from data_prep.formats.base import Format, Record, SourceFile, bad, declared_encoding, document
from data_prep.ledger import Left, size
from data_prep.settings import BuildOptions

_BLOCKS = "p div br hr li ul ol dl dt dd h1 h2 h3 h4 h5 h6 blockquote table tr td th "
_BLOCKS += "caption pre section article header footer figure figcaption nav aside main"
BLOCKS = set(_BLOCKS.split())
_UNSEEN = {"script", "style", "template", "title"}
_PROLOG = re.compile(r"\A\s*(?:<[?!][^>]*>\s*)*")  # declaration and document type
_BEGINS = re.compile(r"(?i)<(?:!doctype\s+html|html|head|body)\b")
_READER = ("warcio", "pip install warcio")
_EXTRACTOR = ("trafilatura", "pip install trafilatura lxml_html_clean")


class _Visible(HTMLParser):
    """Collects the text that a browser shows, a block a line."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.title, self._unseen = list[str](), "", ""

    def parse_html_declaration(self, i: int) -> int:
        """Passes over `<![...>`, a comment to browsers, for some of which the library raises an error."""
        is_section = self.rawdata.startswith("<![", i)
        return self.parse_bogus_comment(i) if is_section else super().parse_html_declaration(i)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._unseen = self._unseen or (tag if tag in _UNSEEN else "")
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._unseen = "" if tag == self._unseen else self._unseen
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._unseen:
            self.parts.append(" ".join(re.split(r"\s+", data)))
        elif self._unseen == "title":
            self.title += data


def visible_text(page: str) -> tuple[str, str]:
    """Returns the title and the text of a page as a browser shows it, a block a line."""
    parser = _Visible()
    parser.feed(page)
    parser.close()
    lines = (line.strip() for line in "".join(parser.parts).split("\n"))
    return " ".join(parser.title.split()), "\n".join(filter(None, lines))


def _page(
    file: SourceFile, record: object, title: str, page: str, settings: BuildOptions
) -> Record:
    """Returns the main text of a page as a document; the text around it is left out."""
    page = page.replace("\0", "")
    named, visible = visible_text(page)
    title = named or title
    if "main_text" not in settings.rules:
        return document(file, record, title, visible, layout="paragraphs")
    import trafilatura

    # It takes a page without <html> in its first 50 characters for another thing.
    page = "<html>" + _PROLOG.sub("", page)
    article: Any = trafilatura.bare_extraction(page, include_comments=False, with_metadata=True)
    text = (article.text or "") if article else ""
    around = Left("lines_outside_main_text", visible, max(size(visible) - size(text), 0))
    title = (article.title if article else "") or title
    out = (around,) if around.characters else ()
    return document(file, record, title, text, layout="paragraphs", left=out)


def _html(file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    """Yields the main text of a page of the Web."""
    yield _page(file, 0, base.stem(file), base.whole(file).decode("utf-8-sig", "replace"), settings)


def _warc(file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    """Yields the pages of a Web archive: HTML of `response`, text of `conversion` (WET)."""
    from warcio.archiveiterator import ArchiveIterator

    with base.open_bytes(file) as stream:
        records = ArchiveIterator(base.ByteStream(_until_damage(stream)))
        for number, record in enumerate(records):
            if record.rec_type not in ("response", "resource", "conversion"):
                continue  # requests, and what the crawler notes on itself
            headers = record.http_headers or record.rec_headers
            kind = (headers.get_header("Content-Type") or "").lower()
            name = record.rec_headers.get_header("WARC-Target-URI") or number
            data = record.content_stream().read()
            text = data.decode(declared_encoding(data[:4096], kind) or "utf-8", "replace")
            if "html" in kind:
                page = partial(_page, file, name, "", text, settings)
                yield base.attempt(file, name, data, page)
            elif kind.startswith("text/plain"):
                yield document(file, name, "", text, layout="paragraphs")
            else:
                lost = size(text) if kind.startswith("text/") else 0
                yield bad(file, name, "pages_not_text", kind or "no Content-Type", lost)
            record.raw_stream.read()
            if getattr(record.raw_stream, "limit", 0):  # bytes that should follow, by its header
                raise EOFError("it ends inside a record")


def _until_damage(stream: IO[bytes]) -> Iterator[bytes]:
    """Yields the bytes of a stream; warcio would take an EOFError for the end of the file."""
    try:
        yield from base.chunks(stream)
    except EOFError as error:
        raise zlib.error(str(error)) from error


base.register(
    Format("html", _html, (".html", ".htm", ".xhtml"), _BEGINS, needs=_EXTRACTOR),
    Format(
        "warc",
        _warc,
        (".warc", ".wet"),
        re.compile(r"WARC/\d"),
        re.compile(rb"WARC/\d"),
        needs=_READER,
    ),
)
