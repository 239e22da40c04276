"""Reads tables of rows: CSV, TSV, JSON lines or Parquet. A row that could be misread is refused."""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from multicls.errors import UserError, first_line

Row = Mapping[str, Any]
RawRows = list[tuple[str, Row]]  # place ("FILE:LINE" or "FILE, row N") and cells by column
csv.field_size_limit(1 << 30)  # characters of a cell; the default is too few for a document


def read_table(path: Path, header: Sequence[str] = (), allow_short: bool = False) -> RawRows:
    """Reads all rows of a file.

    `.csv` is separated by `,`, `;`, tab or `|`, whichever gives the header the most columns; a quoted cell may hold
    line breaks. `.tsv` is separated by tabs, and quotes are text. `.jsonl` holds an object a line.

    Args:
        header: names of the columns of a CSV or TSV file without a header.
        allow_short: fill the missing cells of short CSV or TSV rows with None; otherwise they are refused.

    Raises:
        UserError: The file or a row of it cannot be read; the message names the line or row.
    """
    try:
        if path.suffix == ".parquet":
            rows = _parquet_rows(path)
        elif path.suffix == ".jsonl":
            rows = list(_json_rows(path))
        elif path.suffix in (".csv", ".tsv"):
            rows = list(_csv_rows(path, header, allow_short))
        else:
            raise UserError(f"{path}: the name must end in .csv, .tsv, .jsonl or .parquet.")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or first_line(error)}.") from None
    if not rows:
        raise UserError(f"{path}: no rows.")
    return rows


def separator_of(header: str) -> str:
    """Returns the one of comma, semicolon, tab and bar that divides a table's first line into the most columns."""
    return max(",;\t|", key=lambda mark: len(next(csv.reader([header], delimiter=mark), [])))


def _csv_rows(path: Path, header: Sequence[str], allow_short: bool) -> Iterator[tuple[str, Row]]:
    lines = io.StringIO(_read_text(path), newline="")
    if path.suffix == ".tsv":
        separator, quoting, hint = "\t", csv.QUOTE_NONE, " If cells are quoted, name the file .csv."
    else:
        first = lines.getvalue().partition("\n")[0].partition("\r")[0]
        separator = separator_of(first)
        quoting, hint = csv.QUOTE_MINIMAL, ""
    options: Any = {"delimiter": separator, "quoting": quoting, "strict": True}
    reader, begin = csv.reader(lines, **options), 1  # line on which the next row begins
    try:
        names = list(header) or next(reader, [])
        begin = reader.line_num + 1
        if doubled := sorted({name for name in names if name and names.count(name) > 1}):
            raise UserError(f"{path}: column {doubled[0]!r} is there more than once.")
        for cells in reader:
            where, more = f"{path}:{reader.line_num}", len(cells) - len(names)
            begin = reader.line_num + 1
            if not cells and len(names) > 1:  # an empty line; of one column it is an empty cell
                continue
            if more > 0 or (more < 0 and cells and not allow_short):
                raise UserError(
                    f"{where}: {'more' if more > 0 else 'fewer'} cells than the {len(names)} columns "
                    f"{', '.join(names)} (separator {separator!r}).{hint}"
                )
            yield where, dict(zip_longest(names, cells))
    except csv.Error as error:
        raise UserError(f"{path}:{begin}: cannot be read: {error}.") from None


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    # Only a line feed ends a line: texts hold other separators of Unicode.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_object)
            if "\\u" in line:  # half a surrogate pair is JSON but no text
                json.dumps(row, ensure_ascii=False).encode()
        except ValueError as error:
            raise UserError(f"{path}:{number}: not valid JSON: {error}.") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: not a JSON object.")
        yield f"{path}:{number}", row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a key occurs twice")
    return row


def _parquet_rows(path: Path) -> RawRows:
    import pyarrow
    from pyarrow import parquet

    try:
        with path.open("rb") as file:
            rows = parquet.ParquetFile(file).read().to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: cannot be read: {first_line(error)}") from None
    return [(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1)]


def _read_text(path: Path) -> str:
    """Returns the text of a UTF-8 file without its byte order mark."""
    text = path.read_bytes().decode("utf-8-sig", "surrogateescape")  # not UTF-8: surrogates
    if broken := re.search("[\0\ud800-\udfff]", text):
        line = text.count("\n", 0, broken.start()) + 1
        raise UserError(f"{path}:{line}: not UTF-8, or NUL bytes. Save it as UTF-8.")
    return text


def load_hub(repository: str, hint: str = "", **options: Any) -> Any:
    """Returns a data set of the Hub; where it cannot be loaded the `UserError` ends with the hint."""
    try:
        import datasets

        return datasets.load_dataset(repository, **options)
    except Exception as error:  # datasets, the Hub's client and sockets raise kinds of their own
        reason = first_line(error).rstrip(".")
        raise UserError(f"dataset {repository}: cannot be loaded: {reason}.{hint}") from None
