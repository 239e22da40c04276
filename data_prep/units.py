"""Cuts the listed input into units of work by size alone, so that every start and every executor cuts alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from data_prep.sources import COMPRESSIONS, SourceFile, extension, open_raw

UNITS = 64  # a smaller corpus is cut into about as many, so that as many workers share it
SMALLEST_UNIT = 1 << 20
LARGEST_UNIT = 32 << 20
LONGEST_DOCUMENT = 1 << 22  # characters; a plain text of fewer bytes is never cut
_EXPANSION = 4  # bytes of text that a compressed byte is taken to hold
_OPENING = 1 << 12  # bytes that take as long to read as a file takes to open
_OVERLAP = 1 << 20  # bytes after a piece that its last record may reach into


class Piece(NamedTuple):
    """A share of a file, read by one task. A record belongs to the piece in which it begins."""

    file: int  # index of the file in `Listing.files`
    start: int  # first byte; of Parquet and data sets on disk (`SourceFile.rows`), first row group or row
    stop: int  # end of the range


def cut_units(files: Sequence[SourceFile]) -> list[list[Piece]]:
    """Returns the pieces of every unit, in the order of the files. A file that cannot be cut is a single piece."""
    weights = [_weight(file) or LARGEST_UNIT for file in files]
    size = min(max(sum(weights) // UNITS, SMALLEST_UNIT), LARGEST_UNIT)
    units: list[list[Piece]] = []
    filled = size
    for number, (file, weight) in enumerate(zip(files, weights, strict=True)):
        length = file.rows or file.size
        smallest = max(size, LONGEST_DOCUMENT) if file.format == "text" else size
        count = max(min(-(-weight // smallest), length), 1) if _can_be_cut(file) else 1
        for i in range(count):
            if filled + weight // count > size:
                units.append([])
                filled = 0
            units[-1].append(Piece(number, length * i // count, length * (i + 1) // count))
            filled += weight // count
    return units


def text_bytes(file: SourceFile) -> int:
    """Returns the bytes of text that a file is taken to hold; 0 if its size is not known."""
    compressed = file.format == "parquet" or extension(file.path) in COMPRESSIONS
    return file.size * (_EXPANSION if compressed else 1)


def unit_bytes(files: Sequence[SourceFile], unit: Sequence[Piece]) -> int:
    """Returns the bytes of text that a unit is taken to hold; 0 if the size of its input is not known."""
    pieces = ((files[piece.file], piece.stop - piece.start) for piece in unit)
    return sum(text_bytes(file) * length // max(file.rows or file.size, 1) for file, length in pieces)


def _weight(file: SourceFile) -> int:
    return file.size and max(text_bytes(file), _OPENING)


def _can_be_cut(file: SourceFile) -> bool:
    if file.format in ("parquet", "dataset"):
        return file.rows > 0
    if file.format == "mediawiki" and extension(file.path) == ".bz2":
        return True  # at its streams; if there is one, the first piece has it
    return file.format != "html" and extension(file.path) not in COMPRESSIONS


def piece_hash(file: SourceFile, piece: Piece) -> str:
    """Returns the xxh3-128 of a piece's share of the raw bytes and of a megabyte after it, for its last record.

    It is "" for data sets and remote files, whose version decides.
    """
    if file.format == "dataset" or "://" in file.path:
        return ""
    start, stop = (edge * file.size // (file.rows or max(file.size, 1)) for edge in (piece.start, piece.stop))
    with open_raw(file.path) as raw:
        raw.seek(start)
        digest = xxhash.xxh3_128()
        left = stop + _OVERLAP - start
        while left > 0 and (data := raw.read(min(left, 1 << 20))):
            digest.update(data)
            left -= len(data)
    return digest.hexdigest()
