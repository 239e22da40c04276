"""Reads tables of rows: CSV, TSV, JSON or Parquet. A row that could be misread is refused."""

import csv
import gzip
import io
import json
import lzma
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from multicls.errors import UserError, first_line

Row = Mapping[str, Any]
RawRows = list[tuple[str, Row]]  # place ("FILE:LINE" or "FILE, row N") and cells by column
ENDINGS = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
LFS = b"version https://git-lfs.github.com/spec/"
COMPRESSED = {".gz": gzip.open, ".xz": lzma.open}
QUOTED = re.compile(r'"(?:[^"]|"")*"')  # a whole cell
csv.field_size_limit(1 << 30)  # characters of a cell; the default is too few for a document


def read_table(
    path: Path, header: Sequence[str] = (), allow_short: bool = False, raw: bool = False
) -> RawRows:
    """Reads all rows of a file, which may be compressed (`.gz`, `.xz`); case does not matter in its name.

    `.csv` is separated by `,`, `;`, tab or `|`, whichever gives the header the most columns, or by what Excel's line
    `sep=;` says; a quoted cell may hold line breaks. `.tsv` is separated by tabs; quotes are text unless each cell that
    begins with one is quoted as a whole, as pandas does. `.jsonl` holds an object a line, `.json` a list of objects.

    Args:
        header: names of the columns of a CSV or TSV file without a header.
        allow_short: fill the missing cells of short CSV or TSV rows with None; otherwise they are refused.
        raw: quotes of a TSV file are always text.

    Raises:
        UserError: The file or a row of it cannot be read; the message names the line or row.
    """
    ending = ending_of(path)
    try:
        with path.open("rb") as file:
            if file.read(len(LFS)) == LFS:
                raise UserError(
                    f"{path}: a Git LFS pointer, not the file; fetch it by git lfs pull."
                )
        if ending == ".parquet":
            rows = _parquet_rows(path)
        elif ending in (".jsonl", ".ndjson"):
            rows = list(_json_rows(path, _read_text(path)))
        elif ending == ".json":
            rows = _json_list(path)
        elif ending in (".csv", ".tsv"):
            rows = list(_csv_rows(path, header, allow_short, raw))
        elif ending in (".xlsx", ".xls", ".ods"):
            raise UserError(f"{path}: a spreadsheet; save it as CSV (UTF-8).")
        else:
            raise UserError(f"{path}: the name must end in {', '.join(ENDINGS)}.")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or first_line(error)}.") from None
    if not rows:
        raise UserError(f"{path}: no rows.")
    return rows


def ending_of(path: Path) -> str:
    """Returns what a file's name says of its format, in lower case, without compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def separator_of(header: str) -> str:
    """Returns the one of comma, semicolon, tab and bar that divides a table's first line into the most columns."""
    return max(",;\t|", key=lambda mark: len(next(csv.reader([header], delimiter=mark), [])))


def _csv_rows(
    path: Path, header: Sequence[str], allow_short: bool, raw: bool
) -> Iterator[tuple[str, Row]]:
    text, skipped = _read_text(path), 0
    first = text.partition("\n")[0].strip("\r")
    if declared := re.fullmatch(r'"?sep=(.)"?', first):
        text, skipped = text.partition("\n")[2], 1
    quoting, hint = csv.QUOTE_MINIMAL, ""
    if ending_of(path) == ".tsv":
        separator = "\t"
        if raw or not _is_quoted(text):
            quoting, hint = csv.QUOTE_NONE, " If cells are quoted, name the file .csv."
    else:
        separator = declared[1] if declared else separator_of(first.partition("\r")[0])
    lines = io.StringIO(text, newline="")
    options: Any = {"delimiter": separator, "quoting": quoting, "strict": True}
    reader, begin = csv.reader(lines, **options), 1  # line on which the next row begins
    try:
        names = list(header) or next(reader, [])
        begin = reader.line_num + 1 + skipped
        if doubled := sorted({name for name in names if name and names.count(name) > 1}):
            raise UserError(f"{path}: column {doubled[0]!r} is there more than once.")
        for cells in reader:
            where, more = f"{path}:{reader.line_num + skipped}", len(cells) - len(names)
            begin = reader.line_num + 1 + skipped
            if not cells and len(names) > 1:  # an empty line; of one column it is an empty cell
                continue
            if more > 0 or (more < 0 and cells and not allow_short):
                raise UserError(
                    f"{where}: {'more' if more > 0 else 'fewer'} cells than the {len(names)} columns "
                    f"{', '.join(names)} (separator {separator!r}).{hint}"
                )
            yield where, dict(zip_longest(names, cells))
    except csv.Error as error:
        raise UserError(
            f'{path}:{begin}: cannot be read: {error}. A quote inside a quoted cell is written twice, "".'
        ) from None


def _is_quoted(text: str) -> bool:
    """True if some cells of a TSV file are quoted as a whole, and no other cell begins with a quote."""
    begin = re.compile(r'(?:^|\t)"', re.MULTILINE)
    position, found = 0, False
    while match := begin.search(text, position):
        cell = QUOTED.match(text, match.end() - 1)
        if cell is None or text[cell.end() : cell.end() + 1] not in ("", "\t", "\n", "\r"):
            return False
        position, found = cell.end(), True
    return found


def _json_list(path: Path) -> RawRows:
    """Returns the objects of a JSON list; a file of an object a line is read as such."""
    text = _read_text(path)
    try:
        rows = json.loads(text, object_pairs_hook=_object)
    except ValueError:
        return list(_json_rows(path, text))
    rows = [rows] if isinstance(rows, dict) else rows
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: not a list of JSON objects.")
    return [(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1)]


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, Row]]:
    # Only a line feed ends a line: texts hold other separators of Unicode.
    for number, line in enumerate(text.split("\n"), start=1):
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
    opened: Any = COMPRESSED.get(path.suffix.lower(), open)
    try:
        with opened(path, "rb") as file:
            data: bytes = file.read()
    except (gzip.BadGzipFile, lzma.LZMAError, EOFError) as error:
        raise UserError(f"{path}: cannot be decompressed: {first_line(error)}.") from None
    text = data.decode("utf-8-sig", "surrogateescape")  # not UTF-8: surrogates
    if broken := re.search("[\0\ud800-\udfff]", text):
        line = text.count("\n", 0, broken.start()) + 1
        encoding = "utf16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin1"
        raise UserError(
            f"{path}:{line}: not UTF-8, or NUL bytes. Save it as UTF-8, such as by "
            f"iconv -f {encoding} -t utf8 {path.name} > utf8.{path.name}"
        )
    return text


def load_hub(repository: str, hint: str = "", **options: Any) -> Any:
    """Returns a data set of the Hub; where it cannot be loaded the `UserError` ends with the hint."""
    try:
        import datasets

        return datasets.load_dataset(repository, **options)
    except Exception as error:  # datasets, the Hub's client and sockets raise kinds of their own
        reason = first_line(error).rstrip(".")
        raise UserError(f"dataset {repository}: cannot be loaded: {reason}.{hint}") from None
