"""Reads a user's table of rows: CSV, TSV, JSON lines, a JSON array or Parquet. Imports pyarrow only for Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from multicls.errors import UserError, did_you_mean, first_line

Row = Mapping[str, Any]
RawRows = list[tuple[str, Row]]  # where it stands ("FILE:LINE" or "FILE, row N"), and the row by column
SEPARATORS = (",", ";", "\t", "|")
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
SUFFIXES = (".csv", ".tsv", *JSON_SUFFIXES, ".parquet")


def read_table(path: Path, wanted: Sequence[Iterable[str]] = ()) -> RawRows:
    """Reads all rows of a file.

    Args:
        path: `.csv` (separated by `,`, `;`, tab or `|`; a quoted cell may hold line breaks), `.tsv` (tabs; quotes are
            text), `.jsonl` (an object a line), `.json` (also one array of objects) or `.parquet`.
        wanted: sets of columns, of which a CSV file has one: this decides its separator.

    Raises:
        UserError: The file or a row of it cannot be read; the message names the line or row.
    """
    check_table(path)
    try:
        if path.suffix == ".parquet":
            rows = _parquet_rows(path)
        elif path.suffix in JSON_SUFFIXES:
            rows = list(json_rows(path))
        else:
            rows = list(_csv_rows(path, wanted))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or first_line(error)}.") from None
    if not rows:
        raise UserError(f"{path}: no rows.")
    return rows


def check_table(path: Path) -> None:
    """Checks that a file is there and has the name of a table.

    Raises:
        UserError: It is missing, a folder, or has another ending.
    """
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give a file.")
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: the name must end in {', '.join(SUFFIXES)}.")
    if not path.exists():
        beside = [other.name for other in path.parent.glob("*") if other.suffix in SUFFIXES]
        raise UserError(f"{path}: no such file.{did_you_mean(path.name, beside, listed=False)}")


def json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields where it stands and the object, for each line of a file that is not blank, or each item of its array.

    Raises:
        UserError: A line is not JSON, or an item is not an object.
    """
    text = read_text(path)
    lines = ((f"{path}:{number}", line) for number, line in enumerate(text.split("\n"), start=1))
    if text.lstrip().startswith("["):
        values = _parsed(str(path), text)
        items = ((f"{path}, row {number}", value) for number, value in enumerate(values, start=1))
    else:  # only a line feed ends a line: texts hold other separators of Unicode
        items = ((where, _parsed(where, line)) for where, line in lines if line.strip())
    for where, row in items:
        if not isinstance(row, dict):
            raise UserError(f"{where}: not a JSON object.")
        yield where, row


def read_text(path: Path) -> str:
    """Returns the text of a UTF-8 file without its byte order mark.

    Raises:
        UserError: The file is not UTF-8; the message names the line.
    """
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 ({error.reason}). Save the file as UTF-8.") from None


def _parsed(where: str, text: str) -> Any:
    try:
        value = json.loads(text)
        if "\\u" in text:  # half a pair, such as "\\ud83d", is JSON but no text
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON: {error}.") from None
    return value


def _csv_rows(path: Path, wanted: Sequence[Iterable[str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    text, quoted = read_text(path), path.suffix == ".csv"
    options: dict[str, Any] = {"strict": True} if quoted else {"quoting": csv.QUOTE_NONE}
    csv.field_size_limit(1 << 30)  # characters of a cell; the default, 131,072, is too few for a document
    separator = _separator(text, wanted) if quoted else "\t"
    reader = csv.reader(io.StringIO(text, newline="" if quoted else "\n"), delimiter=separator, **options)
    try:
        columns = next(reader, [])
        if doubled := sorted({name for name in columns if columns.count(name) > 1}):
            raise UserError(f"{path}: column {doubled[0]!r} is there more than once.")
        for values in filter(None, reader):  # without blank lines
            where = f"{path}:{reader.line_num}"
            if len(values) != len(columns):
                hint = "" if quoted else " If cells are quoted, name the file .csv."
                raise UserError(f"{where}: {len(values)} columns instead of {len(columns)} (separator {separator!r}; "
                                f"columns {', '.join(columns)}).{hint}")  # fmt: skip
            yield where, dict(zip(columns, values, strict=True))
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: cannot be read: {error}.") from None


def _separator(text: str, wanted: Sequence[Iterable[str]]) -> str:
    """Returns the separator whose header holds a wanted set of columns, else the one with the most columns."""

    def rank(separator: str) -> tuple[bool, int]:
        try:
            columns = next(csv.reader(io.StringIO(text, newline=""), delimiter=separator), [])
        except csv.Error:
            columns = []
        return any(set(names) <= set(columns) for names in wanted), len(columns)

    return max(SEPARATORS, key=rank)


def _parquet_rows(path: Path) -> RawRows:
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.ParquetFile(path).read().to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: cannot be read: {first_line(error)}") from None
    return [(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1)]
