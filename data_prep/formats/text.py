"""Plain text and Markdown, and rows that are sentences."""

from collections.abc import Iterable, Iterator
from itertools import chain

import xxhash

from data_prep.formats import base
from data_prep.formats.base import Format, RawDocument, Record, SourceFile, document, stem
from data_prep.settings import BuildOptions

MOST_LINES = 1 << 17  # of a document: cleaning needs half a KB a line
# Rows that are sentences: one whose hash is 0 modulo BOUNDARY begins a document.
BOUNDARY, FEWEST_ROWS, MOST_ROWS = 512, 256, 1024


def _text(file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    """Yields documents of a plain text: a line each, or up to a blank line, or the whole file."""
    title, lines, is_row = stem(file), list[str](), file.layout == "sentences"
    first = length = count = 0
    longest = base.LONGEST_DOCUMENT
    damaged: Exception | None = None
    try:
        for offset, text in base.lines_of(file):
            blank = not text.strip()
            ends = is_row or (blank and settings.documents == "blank_line")
            is_long = length > longest and (blank or length > 2 * longest)
            if lines and (ends or is_long or len(lines) == MOST_LINES):
                yield document(file, first, title, "\n".join(lines))
                lines, length, count = [], 0, count + 1
            if lines or not blank or is_row:
                first = first if lines else offset
                lines.append(text)
                length += len(text) + 1
    except Exception as error:  # what was read before the damage is a document
        damaged = error
    if lines or not (count or damaged):
        yield document(file, first, title, "\n".join(lines))
    if damaged:
        raise damaged


def join_rows(rows: Iterable[Record]) -> Iterator[Record]:
    """Joins consecutive rows, one sentence each, to documents; an empty row ends a document.

    Where documents begin depends on the rows themselves. The same book in another place of the
    stream therefore gives the same documents, but for its edges, and is found as a duplicate.
    """
    group = list[RawDocument]()
    for row in chain(rows, [RawDocument("", "", "", "", "sentences")]):
        if isinstance(row, base.BadRecord):
            yield row
            continue
        row = row._replace(text=" ".join(row.text.split()))
        begins = xxhash.xxh3_64_intdigest(row.text.encode()) % BOUNDARY == 0
        is_full = len(group) == MOST_ROWS or (begins and len(group) >= FEWEST_ROWS)
        if group and (is_full or not row.text):
            entries = tuple(entry for member in group for entry in member.left)
            yield group[0]._replace(text="\n".join(row.text for row in group), left=entries)
            group = []
        group += [row] if row.text or row.left else []


base.register(Format("text", _text, (".txt", ".text", ".asc", ".md", ".markdown"), can_cut=True))
