"""What all formats share: the types that readers yield, the table of formats, and how a file is opened.

A format registers itself: `register(Format(name, read, suffixes=...))` in any module of this folder.
"""

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import IO, Any, Literal, NamedTuple

import pyarrow as pa

from data_prep.ledger import Left, size, skip_text
from data_prep.settings import BuildOptions, known_encoding
from multicls.errors import UserError, first_line

LONGEST_RECORD = 1 << 26  # bytes of a line, a page or an object; a longer line is cut
LONGEST_DOCUMENT = 1 << 22  # characters of a plain text, after which the next blank line ends it
TOO_LONG = "a page or an object of more than 64 MB"
CHUNK = 1 << 20  # bytes
ZIP_MAGIC = re.compile(rb"PK\x03\x04")  # of archives, and of documents that are some
UTF8 = "utf-8"

# What the lines of a text are. plain: text with blank lines between paragraphs; pages: such text, typeset; markdown:
# such text with markup; lines: a message each; wikipedia: paragraphs of an article; sentences: a sentence each;
# paragraphs; wikitext: its markup.
Layout = Literal[
    "plain", "pages", "markdown", "lines", "wikipedia", "sentences", "paragraphs", "wikitext"
]


class RawDocument(NamedTuple):
    """A document as it stands in the input; `left` is what its reader left out of it."""

    source: str
    id: str
    title: str
    text: str
    layout: Layout
    titles: int = 0  # number of first lines that are fields of their own, and so no headings
    left: tuple[Left, ...] = ()


class BadRecord(NamedTuple):
    """A record that is no document: the reason, what is shown of it, and the characters that it holds."""

    source: str
    id: str
    reason: str
    text: str
    characters: int


Record = RawDocument | BadRecord


class SourceFile(NamedTuple):
    """An input file, or a share of a file that is built as if it were a file.

    All fields but the path identify it: it may lie elsewhere the next time.
    """

    path: str  # absolute
    source: str  # name of the input that it belongs to
    name: str  # of the file below its input
    format: str  # name of a `Format`
    size: int  # bytes on disk, 0 if not known
    version: str  # changes with the content: modification time or entity tag
    layout: Layout = "plain"
    start: int = 0  # first byte of a share
    stop: int = 0  # end of the share; 0 for the whole file
    hub: str = ""  # OWNER/DATASET, if it comes from the Hub
    packed: str = ""  # its compression, a key of `OPENERS`
    encoding: str = UTF8
    stream: Any = None  # of a member of an archive, its bytes

    def __str__(self) -> str:
        return printable(self.path)

    def skipped(self, reason: str, detail: str = "") -> "Skipped":
        """Returns the entry of this file if it is not read."""
        return Skipped(str(self), reason, self.size, detail)


class Skipped(NamedTuple):
    """A path that is not read: a reason of `ledger.REASONS`, the bytes that it holds, and a detail."""

    path: str
    reason: str
    bytes: int = 0
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {skip_text(self.reason, self.detail)}"


Entry = SourceFile | Skipped
Read = Callable[[SourceFile, BuildOptions], Iterator[Record]]


class Format(NamedTuple):
    """A file format: how it is recognised and read."""

    name: str
    read: Read
    suffixes: tuple[str, ...] = ()
    begins: re.Pattern[str] | None = None  # the first characters, without blanks before them
    magic: re.Pattern[bytes] | None = None  # the first bytes of a binary format
    can_cut: bool = False  # shares of a large file can be read apart
    fields: Callable[[SourceFile], Iterable[str]] | None = None  # of its first records
    needs: tuple[str, str] = ("", "")  # a module, and the command that installs it


FORMATS: dict[str, Format] = {}


def register(*formats: Format) -> None:
    """Adds formats; of two that fit a file, the first takes it."""
    FORMATS.update((entry.name, entry) for entry in formats)


# Records.


def read_records(file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    """Yields the documents and bad records of a file; what cannot be read of it is the last one.

    Raises a UserError if the file is out of reach.
    """
    seen = 0
    try:
        for record in FORMATS[file.format].read(file, settings):
            seen += record.characters if isinstance(record, BadRecord) else size(record.text)
            yield record
    except UserError:
        raise
    except Exception as error:
        text = describe_damage(file, error)
        yield bad(file, f"{file.start}-damaged", "records_file_damaged", text, unread(file, seen))


def attempt(file: SourceFile, record: object, data: bytes, make: Callable[[], Record]) -> Record:
    """Returns what `make` returns for the bytes of a record; its error costs this record and no other."""
    try:
        return make()
    except Exception as error:
        text = data.decode(UTF8, "replace")
        shown = f"{type(error).__name__}: {first_line(error)}: {text}"
        return bad(file, record, "documents_failed", shown, size(text))


def describe_damage(file: SourceFile, error: Exception) -> str:
    """Returns how a file is damaged, from the error that reading it raised.

    A file that could not be reached is a `UserError`: it must not be left out, the next try may succeed.
    """
    is_torn = isinstance(error, (EOFError, zlib.error, lzma.LZMAError, pa.ArrowException))
    if not is_torn and getattr(error, "errno", None) is not None:
        raise UserError(f"{file}: cannot be read: {first_line(error)}; try again.") from error
    return first_line(error)


def unread(file: SourceFile, seen: int) -> int:
    """Estimates the characters of a damaged file after the `seen` ones: one a byte, or compressed as many as before."""
    if not file.packed or file.stream is not None:
        return max(file.size - seen, 0)
    with open(file.path, "rb") as raw:
        stream = OPENERS[file.packed](raw)
        with suppress(Exception):
            while stream.read(1 << 20):
                pass
        return round(seen * max(file.size / max(raw.tell(), 1) - 1, 0))


def document(file: SourceFile, record: object, title: str, text: str, **more: Any) -> RawDocument:
    """Returns a document of a file; the layout is the file's, unless `layout` is set."""
    name = valid(f"{file.name}#{record}")
    layout = more.pop("layout", file.layout)
    return RawDocument(file.source, name, valid(title), valid(text), layout, **more)


def bad(
    file: SourceFile, record: object, reason: str, text: str, lost: int | None = None
) -> BadRecord:
    """Returns a bad record of a file; without `lost`, it holds the characters of `text`."""
    text, name = valid(text), valid(f"{file.name}#{record}")
    return BadRecord(file.source, name, reason, text, size(text) if lost is None else lost)


def valid(text: str) -> str:
    """Returns the text with U+FFFD for halves of surrogate pairs, which JSON can hold."""
    return text.encode(UTF8, "surrogatepass").decode(UTF8, "replace")


def declared_encoding(head: bytes, content_type: str = "") -> str:
    """Returns the encoding that a page or its HTTP header declares, or ""."""
    pattern = r"""charset=["']?([\w-]+)|<\?xml[^>]*encoding=["']([\w-]+)"""
    for text in (content_type, head[:4096].decode("latin-1")):
        if found := re.search(pattern, text, re.IGNORECASE):
            return known_encoding(found[1] or found[2])
    return ""


def stem(file: SourceFile) -> str:
    """Returns the name of a file without folder, suffix and suffix of compression."""
    root, suffix = os.path.splitext(os.path.basename(file.name))
    return os.path.splitext(root)[0] if suffix[1:].lower() in OPENERS else root


def printable(path: str) -> str:
    """Returns a path as text that can be encoded; bytes that are not UTF-8 become `\\xff`."""
    return os.fsencode(path).decode(UTF8, "backslashreplace")


# Bytes.


class ByteStream(io.RawIOBase):
    """An unbuffered stream of the bytes that an iterator yields."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts, self._rest = parts, memoryview(b"")

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer with bytes of one part; returns their number, 0 at the end."""
        while not self._rest and (part := next(self._parts, None)) is not None:
            self._rest = memoryview(part)
        number = min(len(buffer), len(self._rest))
        buffer[:number], self._rest = self._rest[:number], self._rest[number:]
        return number


def stream_of(parts: Iterator[bytes]) -> IO[bytes]:
    """Returns a buffered stream of the bytes that an iterator yields."""
    return io.BufferedReader(ByteStream(parts))


def _decompressed(raw: IO[bytes], new_decoder: Callable[[], Any]) -> Iterator[bytes]:
    """Yields the content of compressed streams that stand one after another, perhaps with zeros between them.

    Unlike `bz2.open` and `lzma.open`, it does not pass over all that follows a damaged stream.
    """
    decoder: Any = None
    while block := raw.read(1 << 13):
        while decoder or (block := block.lstrip(b"\0")):
            decoder = decoder or new_decoder()
            yield decoder.decompress(block, CHUNK)
            block = b""
            if decoder.eof:
                block, decoder = decoder.unused_data, None
            elif decoder.needs_input:
                break
    if decoder:
        raise EOFError("it ends inside a compressed stream")


def _recoded(stream: IO[bytes], encoding: str) -> Iterator[bytes]:
    """Yields text as UTF-8; what is not of its encoding becomes U+FFFD."""
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    while data := stream.read(CHUNK):
        yield decoder.decode(data).encode(UTF8, "replace")
    yield decoder.decode(b"", True).encode(UTF8, "replace")


OPENERS: dict[str, Callable[[Any], Any]] = {
    "gz": gzip.open,
    "bz2": lambda raw: stream_of(_decompressed(raw, bz2.BZ2Decompressor)),
    "xz": lambda raw: stream_of(_decompressed(raw, lzma.LZMADecompressor)),
    "zst": lambda raw: io.BufferedReader(pa.CompressedInputStream(raw, "zstd")),
    "lz4": lambda raw: io.BufferedReader(pa.CompressedInputStream(raw, "lz4")),
}
_PACKED = re.compile(
    rb"(?P<gz>\x1f\x8b\x08)|(?P<bz2>BZh[1-9]1AY&SY)|(?P<xz>\xfd7zXZ\0)|(?P<zst>\x28\xb5\x2f\xfd)"
    rb"|(?P<lz4>\x04\x22\x4d\x18)"
)


def packing(head: bytes, name: str) -> str:
    """Returns the compression of a file by its first bytes, or else by its suffix; "" if it has none."""
    if found := _PACKED.match(head):
        return str(found.lastgroup)
    suffix = os.path.splitext(name.lower())[1][1:]
    return {"tgz": "gz"}.get(suffix, suffix) if suffix in (*OPENERS, "tgz") else ""


@contextmanager
def open_bytes(file: SourceFile) -> Iterator[IO[bytes]]:
    """Opens a file, decompressed; text of another encoding comes as UTF-8."""
    if file.stream is not None:
        file.stream.seek(0)
    with (
        nullcontext(file.stream) if file.stream else open(file.path, "rb", 1 << 18) as raw,
        OPENERS.get(file.packed, nullcontext)(raw) as stream,
    ):
        if file.encoding == UTF8:
            yield stream
        else:
            yield stream_of(_recoded(stream, file.encoding))


def chunks(stream: Any) -> Iterator[bytes]:
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


def whole(file: SourceFile) -> bytes:
    """Returns the bytes of a file of one record; EOFError if they are too many."""
    with open_bytes(file) as stream:
        data = stream.read(LONGEST_RECORD + 1)
    if len(data) > LONGEST_RECORD:
        raise EOFError(TOO_LONG)
    return data


def lines_of(file: SourceFile) -> Iterator[tuple[int, str]]:
    """Yields offset and text of each line that begins in the share; bytes that are no UTF-8 become U+FFFD.

    A line of more than `LONGEST_RECORD` bytes is cut into several; all of them belong to the share of its first byte.
    """
    with open_bytes(file) as stream:
        offset, is_open = 0, False  # the last line was cut
        if file.start:  # a line belongs to the share in which its first byte lies
            stream.seek(file.start - 1)
            offset = file.start - 1 + len(stream.readline())
        while is_open or not file.stop or offset < file.stop:
            if not (line := stream.readline(LONGEST_RECORD)):
                break
            text = line if offset else line.removeprefix(codecs.BOM_UTF8)
            yield offset, text.decode(UTF8, "replace").rstrip("\r\n")
            offset, is_open = offset + len(line), not line.endswith(b"\n")


def strings_of(value: object) -> str:
    """Returns all strings and numbers inside a JSON value, a line each."""
    if isinstance(value, dict):
        return "\n".join(filter(None, map(strings_of, value.values())))
    if isinstance(value, (list, tuple)):
        return "\n".join(filter(None, map(strings_of, value)))
    if isinstance(value, (bytes, bytearray)):
        return value.decode(UTF8, "replace")
    return (
        "" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
    )
