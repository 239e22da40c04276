"""Reads the documents of an input file, by its format, one at a time."""

from collections.abc import Iterator
from contextlib import suppress

from data_prep.formats import FORMATS
from data_prep.formats.base import OPENERS, BadRecord, Record, SourceFile, bad
from data_prep.formats.text import join_rows
from data_prep.ledger import size
from data_prep.settings import BuildOptions
from data_prep.sources import describe_damage
from multicls.errors import UserError


def read_documents(file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    """Yields the documents of a file, and bad records; UserError if it is out of reach."""
    documents = _to_the_damage(file, settings)
    yield from join_rows(documents) if file.layout == "sentences" else documents


def _to_the_damage(file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    """Yields the documents of a file; what cannot be read of it is the last one."""
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
