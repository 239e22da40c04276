"""Archives: the members of tar and zip files, each read by its own format."""

import re
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from tempfile import SpooledTemporaryFile
from typing import IO, Any

from data_prep.formats import base
from data_prep.formats.base import Format, Record, Skipped, SourceFile, bad
from data_prep.formats.recognise import recognise
from data_prep.ledger import REASONS
from data_prep.settings import BuildOptions
from multicls.errors import first_line

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
    with base.open_bytes(file) as stream:
        tail: Any = _Tail(stream)
        with tarfile.open(fileobj=tail, mode="r|") as archive:
            for entry in archive:
                if entry.isfile():
                    data = archive.extractfile(entry)
                    assert data is not None
                    with SpooledTemporaryFile(IN_MEMORY) as copy:
                        shutil.copyfileobj(data, copy)
                        yield from _member(file, entry.name, entry.size, copy, settings)
        while tail.read(base.CHUNK):
            pass
    if tail.last.strip(b"\0"):
        raise EOFError("it ends inside a member")


def _zip(file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    with base.open_bytes(file) as stream, zipfile.ZipFile(stream) as archive:
        for entry in archive.infolist():
            if not entry.is_dir():
                with SpooledTemporaryFile(IN_MEMORY) as copy:
                    yield from _zip_member(file, archive, entry, copy, settings)


def _zip_member(
    file: SourceFile, archive: Any, entry: zipfile.ZipInfo, copy: Any, settings: BuildOptions
) -> Iterator[Record]:
    name, length = entry.filename, entry.file_size
    try:
        with archive.open(entry) as data:
            shutil.copyfileobj(data, copy)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        # Damaged, encrypted or of an unknown compression; the next ones can be read all the same.
        yield bad(file, name, "records_file_damaged", f"{name}: {first_line(error)}", length)
        return
    yield from _member(file, name, length, copy, settings)


def _member(
    file: SourceFile, name: str, length: int, stream: Any, settings: BuildOptions
) -> Iterator[Record]:
    """Yields the documents of a member, or why it is not read; its damage costs no other member."""
    member = file._replace(
        name=f"{file.name}/{name}", size=length, packed="", format="", stream=stream
    )
    try:
        found = recognise(member, settings)
    except Exception as error:
        found = member.skipped("damaged", base.describe_damage(member, error))
    if isinstance(found, SourceFile) and found.format in NAMES:
        found = Skipped(name, "archive")
    if isinstance(found, Skipped):
        lost = length if REASONS[found.reason].is_loss else 0
        yield bad(file, name, "records_not_read", str(found._replace(path=name)), lost)
    else:
        yield from base.read_records(found, settings)


NAMES = ("tar", "zip")
base.register(
    Format("tar", _tar, (".tar", ".tgz"), magic=re.compile(rb"(?s).{257}ustar")),
    Format("zip", _zip, (".zip",), magic=base.ZIP_MAGIC),
)
