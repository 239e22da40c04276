"""Archives: the members of tar and zip files, each read by its own format."""

import re
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from tempfile import SpooledTemporaryFile
from typing import IO, Any

from data_prep.formats import base
from data_prep.formats.base import (
    CHUNK,
    FORMATS,
    ZIP_MAGIC,
    Format,
    Record,
    Skipped,
    SourceFile,
    bad,
    open_bytes,
)
from data_prep.formats.recognise import recognise
from data_prep.ledger import REASONS
from data_prep.settings import BuildOptions

IN_MEMORY = 1 << 26  # bytes of a member; a larger one goes to the disk


class _Tail:
    """A stream that remembers its last bytes; tarfile passes over an archive that is cut off."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.last = stream, b""

    def read(self, number: int) -> bytes:
        data = self._stream.read(number)
        self.last = (self.last + data)[-1024:]
        return data


def _tar(file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    with open_bytes(file) as stream:
        tail: Any = _Tail(stream)
        with tarfile.open(fileobj=tail, mode="r|") as archive:
            for entry in archive:
                if entry.isfile():
                    data = archive.extractfile(entry)
                    assert data is not None
                    yield from _member(file, entry.name, entry.size, data, settings)
        while tail.read(CHUNK):
            pass
    if tail.last.strip(b"\0"):
        raise EOFError("it ends inside a member")


def _zip(file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    with open_bytes(file) as stream, zipfile.ZipFile(stream) as archive:
        for entry in archive.infolist():
            if not entry.is_dir():
                with archive.open(entry) as data:
                    yield from _member(file, entry.filename, entry.file_size, data, settings)


def _member(
    file: SourceFile, name: str, length: int, data: IO[bytes], settings: BuildOptions
) -> Iterator[Record]:
    """Yields the documents of a member, or why it is not read."""
    with SpooledTemporaryFile(IN_MEMORY) as copy:
        shutil.copyfileobj(data, copy)
        stream: Any = copy
        member = file._replace(
            name=f"{file.name}/{name}", size=length, packed="", format="", stream=stream
        )
        found = recognise(member, settings)
        if isinstance(found, SourceFile) and found.format in NAMES:
            found = Skipped(name, "archive")
        if isinstance(found, Skipped):
            lost = length if REASONS[found.reason].is_loss else 0
            yield bad(file, name, "records_not_read", str(found._replace(path=name)), lost)
        else:
            yield from FORMATS[found.format].read(found, settings)


NAMES = ("tar", "zip")
base.register(
    Format("tar", _tar, (".tar", ".tgz"), magic=re.compile(rb"(?s).{257}ustar")),
    Format("zip", _zip, (".zip",), magic=ZIP_MAGIC),
)
