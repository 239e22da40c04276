"""Documents and books: Word (.docx), EPUB and PDF."""

import posixpath
import re
import zipfile
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import unquote
from xml.etree import ElementTree

from data_prep.formats import base
from data_prep.formats.base import Format, Record, SourceFile, document, open_bytes, register, stem
from data_prep.formats.web import visible_text
from data_prep.ledger import left
from data_prep.settings import BuildOptions

_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_PDF_READER = ("pypdfium2", "pip install pypdfium2")
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"
_READ_PARTS = [re.compile(rf"word/{n}\d*\.xml") for n in ("document", "footnotes", "endnotes")]


def _member(book: zipfile.ZipFile, name: str) -> bytes:
    """Returns the bytes of a member; EOFError if they are too many."""
    if book.getinfo(name).file_size > base.LONGEST_RECORD:
        raise EOFError(base.TOO_LONG)
    return book.read(name)


def _docx(file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    """Yields the paragraphs of a Word document; headers, footers and comments are left out."""
    with open_bytes(file) as stream, zipfile.ZipFile(stream) as book:
        texts = dict[str, str]()
        for name in book.namelist():
            if name.startswith("word/") and name.endswith(".xml") and "/_" not in name:
                paragraphs = _paragraphs(ElementTree.fromstring(_member(book, name)))
                texts[name] = "\n\n".join(filter(None, paragraphs))
    read = [name for part in _READ_PARTS for name in texts if part.fullmatch(name)]
    if not read:
        raise EOFError("it has no word/document.xml")
    text = "\n\n".join(map(texts.pop, read))
    out = tuple(left("parts_not_read", part) for part in texts.values() if part.strip())
    yield document(file, 0, stem(file), text, layout="paragraphs", left=out)


def _paragraphs(element: ElementTree.Element) -> list[str]:
    """Returns the text of an element outside the paragraphs in it, with a blank for tabs and breaks, and then these.

    A text box lies inside a paragraph and holds others; its second form, for old programs, is passed over.
    """
    text, paragraphs = "", list[str]()
    for child in element:
        if child.tag == f"{_WORD}t":
            text += child.text or ""
        elif child.tag in (f"{_WORD}tab", f"{_WORD}br", f"{_WORD}cr"):
            text += " "
        elif child.tag != _FALLBACK:
            own, *inner = _paragraphs(child)
            if child.tag == f"{_WORD}p":
                paragraphs += [own, *inner]
            else:
                text += own
                paragraphs += inner
    return [text, *paragraphs]


def _epub(file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    """Yields the chapters of a book in their order, as one document."""
    with open_bytes(file) as stream, zipfile.ZipFile(stream) as book:
        container = ElementTree.fromstring(_member(book, "META-INF/container.xml"))
        (path, *_) = (e.get("full-path") or "" for e in container.iter() if e.get("full-path"))
        package = ElementTree.fromstring(_member(book, path))
        title = package.findtext(".//{*}title") or stem(file)
        places = {e.get("id"): e.get("href") or "" for e in package.findall(".//{*}item")}
        chapters = [places.get(e.get("idref"), "") for e in package.findall(".//{*}itemref")]
        folder, texts = posixpath.dirname(path), list[str]()
        for name in dict.fromkeys(filter(None, chapters)):
            page = _member(book, posixpath.normpath(posixpath.join(folder, unquote(name))))
            texts.append(visible_text(page.decode("utf-8-sig", "replace"))[1])
    yield document(file, 0, title, "\n".join(texts), layout="paragraphs")


def _pdf(file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    """Yields the text of a PDF, page by page."""
    import pypdfium2

    with closing(pypdfium2.PdfDocument(base.whole(file))) as pdf:
        pages = [page.get_textpage().get_text_range() for page in pdf]
        title = pdf.get_metadata_dict().get("Title") or stem(file)
    # A hyphen at a line's end is U+FFFE there.
    text = "\n".join(pages).replace("\r\n", "\n").replace("\ufffe\n", "-\n").replace("\ufffe", "-")
    yield document(file, 0, title, text, layout="pages")


register(
    Format("docx", _docx, (".docx",), magic=base.ZIP_MAGIC),
    Format("epub", _epub, (".epub",), magic=base.ZIP_MAGIC),
    Format("pdf", _pdf, (".pdf",), magic=re.compile(b"%PDF-"), needs=_PDF_READER),
)
