"""Rows: JSON lines and arrays, CSV and TSV, Parquet, and the Arrow files of data sets."""

import codecs
import csv
import html
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import islice, takewhile
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.formats import base
from data_prep.formats.base import Format, Record, SourceFile, bad, document, open_bytes, strings_of
from data_prep.ledger import Left, left, size
from data_prep.settings import BuildOptions
from multicls.tables import separator_of

ROWS = 256  # of a table, read at a time
OTHERS = ("id", "title", "url")  # columns that are read beside the text
CONTENTS = ("content", "value", "text")  # of a chat message, the field with its text
_WIKIPEDIA = re.compile(r"https?://[\w.-]*\bwikipedia\.org/")

Rows = Callable[[SourceFile, Sequence[str]], Iterable[tuple[int, Any]]]


def _table(read: Rows, file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    """Yields the rows of a table as documents; several text fields are joined."""
    for number, row in read(file, settings.text_field):
        if isinstance(row, base.BadRecord):
            yield row
            continue
        row = {settings.text_field[0]: row} if isinstance(row, str) else row
        record = row if isinstance(row, dict) else {}
        name = number if record.get("id") is None else record["id"]
        texts, out = list[str](), list[Left]()
        for field in settings.text_field:
            value = value_at(record, field)
            text = text_of(value)
            if text is not None:
                texts.append(base.valid(text))
            elif value is not None:
                kind = "an object" if isinstance(value, dict) else type(value).__name__
                kind = "a list of objects or numbers" if isinstance(value, list) else kind
                out.append(Left("fields_not_text", f"{field!r} is {kind}", size(strings_of(value))))
        if texts or out:
            yield _row(file, name, record, texts, out, settings)
        else:
            has_field = any(field.partition(".")[0] in record for field in settings.text_field)
            lost = 0 if has_field else size(strings_of(row))
            yield bad(file, name, "records_without_text", strings_of(row), lost)


def _row(
    file: SourceFile,
    name: object,
    record: dict[str, Any],
    texts: list[str],
    out: list[Left],
    settings: BuildOptions,
) -> Record:
    """Returns the document of a row with the `texts` of its fields; `out` is what they have lost already."""
    title, layout, titles = str(record.get("title") or ""), file.layout, 0
    if layout == "plain" and _WIKIPEDIA.match(str(record.get("url"))):
        layout = "wikipedia"
    if layout in ("plain", "markdown", "lines") and "html" in settings.rules:
        for i, text in enumerate(texts):
            texts[i] = without_tags(text)
            if texts[i] != text:
                out.append(Left("characters_of_html", text, size(text) - size(texts[i])))
    if len(settings.text_field) > 1:
        texts = list(filter(str.strip, texts))
        titles = len(list(takewhile(lambda text: "\n" not in text.strip(), texts)))
    elif layout == "wikipedia" and texts:
        texts[0], repeated = without_title(texts[0], title)
        out += repeated
    text = "\n\n".join(texts)
    return document(file, name, title, text, layout=layout, titles=titles, left=tuple(out))


def value_at(record: Any, path: str) -> Any:
    """Returns the value of a field, or of a field of a field, such as `body.text`; of a list, its items' values."""
    if isinstance(record, list):
        return [value_at(item, path) for item in record]
    if not isinstance(record, dict):
        return None
    if path in record:
        return record[path]
    first, _, rest = path.partition(".")
    return value_at(record.get(first), rest) if rest else None


def text_of(value: Any) -> str | None:
    """Returns the text of a field: a string, a list of them, or chat messages; None if it is none."""
    if isinstance(value, (bytes, bytearray)):
        return value.decode("utf-8", "replace")
    if not isinstance(value, list):
        return value if isinstance(value, str) else None
    contents = [
        next((item[key] for key in CONTENTS if key in item), item)
        if isinstance(item, dict)
        else item
        for item in value
        if item is not None
    ]
    texts = list(map(text_of, contents))
    parts = [text for text in texts if text is not None]
    if len(parts) < len(texts) or not parts:
        return None
    return ("\n\n" if any(" " in part for part in parts) else " ").join(parts)


def without_title(text: str, title: str) -> tuple[str, list[Left]]:
    """Returns the text of an article without a first line that repeats the title, and that line."""
    first, _, rest = text.partition("\n")
    if not title.strip() or first.strip() != title.strip():
        return text, []
    return rest, [left("lines_heading", first)]


# HTML in fields.

_BLOCKS = (
    "p|div|br|hr|li|ul|ol|dl|dt|dd|h[1-6]|blockquote|table|tr|td|th|thead|tbody|caption|pre|section|article|header|footer"
    "|figure|figcaption|center|details|summary|iframe|video|audio"
)
_INLINE = "em|strong|span|code|img|sup|sub|font|small|big|tt|kbd|del|ins|mark|abbr|cite|var|samp|wbr|a|b|i|q|s|u"
# A text is HTML if it has a block's tag, an attribute, or an element that is closed; `Vec<u>` has none of these.
_IS_HTML = re.compile(
    rf"(?is)<(?:{_BLOCKS})\s*/?>|</(?:{_BLOCKS}|{_INLINE})>|<[a-z][a-z1-6]*\s+[a-z-]+\s*=|<!--|</(?:script|style)>"
)
_TAG = re.compile(  # `<b and c>` is none
    r"(?is)<(?P<unseen>script|style)\b[^<>]*>(?:(?!<(?P=unseen)).)*?</(?P=unseen)>|<!--(?:(?!<!--).)*?-->"
    rf"|</?(?:(?P<block>{_BLOCKS})|{_INLINE})(?:\s[^<>=]*=[^<>]*|\s*/?)>"
    r"|<(?:form|label|input|button)\s[^<>=]*=[^<>]*>|</(?:form|label|button)>"
)
_ENTITY = re.compile(r"&(?:#\d+|#x[\da-fA-F]+|[a-zA-Z]{2,8});")


def without_tags(text: str) -> str:
    """Returns the text of a fragment of HTML; other text stays as it is but for entities such as `&amp;`."""
    if "<" in text and _IS_HTML.search(text):
        text = _TAG.sub(lambda match: "\n\n" if match["block"] else "", text)
    return unescape(text)


def unescape(text: str) -> str:
    """Returns the text with the characters of HTML's entities, such as `&amp;`; `&copy=1` of an address is none."""
    return _ENTITY.sub(lambda match: html.unescape(match[0]), text) if "&" in text else text


# JSON.


def _json_rows(file: SourceFile, fields: Sequence[str]) -> Iterator[tuple[int, Any]]:
    for offset, text in base.lines_of(file):
        if text.strip():
            try:
                yield offset, json.loads(text)
            except (ValueError, RecursionError):
                yield offset, bad(file, offset, "records_not_json", text)


_VALUE = re.compile(r"[^\s,\[\]]")  # where one begins


def _array_rows(file: SourceFile, fields: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yields the objects of a JSON array, or those of a file that stand one after another."""
    decode, rest, number = json.JSONDecoder().raw_decode, "", 0
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    with open_bytes(file) as stream:
        for chunk in base.chunks(stream):
            rest, at = rest + decoder.decode(chunk), 0
            with suppress(json.JSONDecodeError):  # the last one goes on in the next chunk
                while found := _VALUE.search(rest, at):
                    value, at = decode(rest, found.start())
                    yield number, value
                    number += 1
            rest = rest[at:]
            if len(rest) > base.LONGEST_RECORD:
                raise EOFError(base.TOO_LONG)
    if _VALUE.search(rest):
        raise EOFError("it ends inside an object, or is no JSON")


def _first_fields(read: Rows, file: SourceFile) -> Iterator[str]:
    """Yields the paths of all fields of the first rows of a file."""
    with suppress(Exception):  # of a damaged file, those before the damage
        for _, row in islice(read(file, ()), ROWS):
            yield from _paths(row)


def _paths(value: Any, prefix: str = "") -> list[str]:
    """Returns the paths of the fields of an object, also of those inside others."""
    if isinstance(value, list):
        return _paths(value[0], prefix) if value else []
    if not isinstance(value, dict):
        return []
    names = list[str]()
    for name, inner in value.items():
        names += [f"{prefix}{name}", *_paths(inner, f"{prefix}{name}.")]
    return names


# CSV.


def _reader(text: Iterable[str], file: SourceFile, header: str) -> Iterator[list[str]]:
    """Yields the cells of each row; in a .tsv, quotation marks are text."""
    csv.field_size_limit(base.LONGEST_RECORD)
    if re.search(r"(?i)\.tsv(\.\w+)?$", file.name):
        return csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
    return csv.reader(text, delimiter=separator_of(header))


def _csv_rows(file: SourceFile, fields: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yields the rows of a table; a quoted cell may have line breaks."""
    with open_bytes(file) as stream:
        text = io.TextIOWrapper(stream, "utf-8-sig", "replace", newline="")
        header = text.readline()
        cells = next(_reader([header], file, header))
        # A second column of a name is "name.1", as in pandas.
        names = [f"{n}.{cells[:i].count(n)}" if n in cells[:i] else n for i, n in enumerate(cells)]
        for number, cells in enumerate(_reader(text, file, header)):
            if len(cells) == len(names):
                yield number, dict(zip(names, cells, strict=True))
            elif cells:
                yield number, bad(file, number, "records_not_a_row", "\t".join(cells))


# Parquet and Arrow.


def _wanted(names: Iterable[str], fields: Sequence[str]) -> list[str]:
    """Returns the columns to read: a field may lie inside one."""
    roots = {field.partition(".")[0] for field in fields}
    return [name for name in names if name in (*fields, *OTHERS) or name in roots]


def _parquet_rows(file: SourceFile, fields: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yields the rows of a file; a share has the row groups whose first byte lies in it."""
    with open_bytes(file) as raw, closing(pq.ParquetFile(raw)) as table:
        columns, first = _wanted(table.schema_arrow.names, fields), 0
        for number in range(table.num_row_groups):
            group = table.metadata.row_group(number)
            offset = group.column(0).dictionary_page_offset or group.column(0).data_page_offset
            if file.start <= offset < (file.stop or math.inf):
                batches = table.iter_batches(ROWS, [number], columns)
                yield from enumerate((row for batch in batches for row in batch.to_pylist()), first)
            first += group.num_rows


def _parquet_fields(file: SourceFile) -> list[str]:
    with suppress(OSError, pa.ArrowException), open_bytes(file) as stream:
        return schema_paths(pq.read_schema(stream))
    return []


def schema_paths(fields: Iterable[Any], prefix: str = "") -> list[str]:
    """Returns the paths of all fields of a schema, also of those inside others."""
    names = list[str]()
    for field in fields:
        kind = field.type
        while pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind = kind.value_type
        inner = schema_paths(kind, f"{prefix}{field.name}.") if pa.types.is_struct(kind) else []
        names += [f"{prefix}{field.name}", *inner]
    return names


def _arrow_rows(file: SourceFile, fields: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yields the rows of a file of a data set; a share in bytes has its part of the rows."""
    if file.stream or file.packed:
        with open_bytes(file) as stream:
            data: Any = pa.BufferReader(stream.read())
    else:
        data = pa.memory_map(file.path)
    is_file = data.read(6) == b"ARROW1"
    data.seek(0)
    table = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(data).read_all()
    length = data.size()
    first, end = (len(table) * offset // length for offset in (file.start, file.stop or length))
    part = table.select(_wanted(table.column_names, fields))[first:end]
    rows = (row for batch in part.to_batches(ROWS) for row in batch.to_pylist())
    yield from enumerate(rows, first)


_ARRAY = re.compile(r'\[\s*\{\s*"[^"\n]*"\s*:')
_OBJECT = re.compile(r'\{[ \t]*"[^"\n]*"[ \t]*:')
base.register(
    Format("jsonl", partial(_table, _json_rows), (".jsonl", ".ndjson"), _OBJECT, can_cut=True,
           fields=partial(_first_fields, _json_rows)),
    Format("json", partial(_table, _array_rows), (".json",), _ARRAY, fields=partial(_first_fields, _array_rows)),
    Format("csv", partial(_table, _csv_rows), (".csv", ".tsv"), fields=partial(_first_fields, _csv_rows)),
    Format("parquet", partial(_table, _parquet_rows), (".parquet",), magic=re.compile(b"PAR1"), can_cut=True,
           fields=_parquet_fields),
    Format("arrow", partial(_table, _arrow_rows), (".arrow",), magic=re.compile(rb"ARROW1|\xff\xff\xff\xff"),
           can_cut=True),
)  # fmt: skip
