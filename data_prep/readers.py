"""Readers: from files and data sets to documents, one at a time, so that memory stays constant for any input."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from data_prep.sources import DAMAGED, Hub, SourceFile, open_bytes
from multicls.errors import UserError, did_you_mean

DOCUMENTS = ("file", "blank_line", "sentences")
LONGEST_DOCUMENT = 1 << 22  # characters; a longer plain text is cut into several documents at a blank line
LONGEST_LINE = 1 << 26  # bytes; a document with a longer line is left out
RUN = 512  # sentences that make a document where each line or row is one and nothing says where documents end
_ROWS = 256  # of a data set, read at a time
_DOC = re.compile(r'<doc id="([^"]*)"[^>]*?title="(.*)"[^>]*>')


class RawDocument(NamedTuple):
    """A document as it stands in the input.

    `layout` says what a line is: "blocks" (blank lines between paragraphs), "lines" or "dotted_lines" (a line is a
    paragraph; in the second, headings end with a full stop), "wikitext". `dropped`: the reason why it is left out.
    """

    source: str
    id: str
    title: str
    text: str
    layout: str
    dropped: str = ""


@dataclass(frozen=True)
class ReadOptions:
    """How input is divided into documents.

    Attributes:
        documents: for plain text, "file" (one a file), "blank_line" (blank lines lie between documents) or
            "sentences" (a line is a sentence; `RUN` of them, or fewer up to a blank line, are a document; rows of
            JSON lines, Parquet and data sets, too).
        text_field: of JSON lines, Parquet and data sets, the field that holds the text.
    """

    documents: str = "file"
    text_field: str = "text"


class Reading:
    """The documents of one file, in order; `position` tells how many of its bytes have been read.

    Args:
        skip: documents to leave out at the beginning.

    Raises:
        UserError: while iterating; the file is damaged or not of its format. The message names the place.
    """

    def __init__(self, file: SourceFile, options: ReadOptions, skip: int = 0) -> None:
        self.file = file
        self.options = options
        self.skip = skip
        self._raw: io.FileIO | None = None
        self._share = 0.0
        self._characters = 0

    @property
    def position(self) -> int:
        """Bytes of the file read so far; where its size is not known, characters of text."""
        if self._raw is not None and not self._raw.closed:
            return self._raw.tell()
        return int(self._share * self.file.size) or self._characters

    def __iter__(self) -> Iterator[RawDocument]:
        readers = {
            "mediawiki": self._mediawiki,
            "wikiextractor": self._wikiextractor,
            "jsonl": self._jsonl,
            "parquet": self._parquet,
            "dataset": self._dataset,
            "text": self._text,
        }
        try:
            yield from islice(readers[self.file.format](), self.skip, None)
        except DAMAGED as error:
            raise UserError(f"{self.file}: cannot be read to its end: {error}.") from None
        finally:
            if self._raw is not None:
                self._raw.close()
        self._raw, self._share = None, 1.0

    def _document(self, name: object, title: str, text: str, layout: str, dropped: str = "") -> RawDocument:
        self._characters += len(text)
        return RawDocument(
            self.file.source, f"{self.file.name}#{name}", title, "" if dropped else text, layout, dropped
        )

    def _lines(self) -> Iterator[tuple[str, str]]:
        """Lines without their ends, each with the reason why its document cannot be kept, mostly empty."""
        stream, self._raw = open_bytes(self.file.path)
        encoding = "utf-8-sig"
        with stream:
            while raw := stream.readline(LONGEST_LINE):
                problem = "" if len(raw) < LONGEST_LINE else "documents_line_too_long"
                if problem:
                    while len(raw) == LONGEST_LINE and not raw.endswith(b"\n"):
                        raw = stream.readline(LONGEST_LINE)
                    raw = b""
                try:
                    line = raw.decode(encoding)
                except UnicodeDecodeError:
                    line, problem = "", "documents_not_utf8"
                encoding = "utf-8"
                yield line.rstrip("\r\n"), problem

    def _text(self) -> Iterator[RawDocument]:
        if self.options.documents == "sentences":
            yield from self._runs(self._lines(), stem(self.file.path))
            return
        title, lines = stem(self.file.path), []
        size = count = 0
        dropped = ""
        for line, problem in self._lines():
            lines.append(line)
            size += len(line)
            dropped = dropped or problem
            ends = self.options.documents == "blank_line" or size > LONGEST_DOCUMENT
            if (ends and not line.strip() and (size or dropped)) or size > 2 * LONGEST_DOCUMENT:
                yield self._document(count, title, "\n".join(lines), "blocks", dropped)
                lines, size, count, dropped = [], 0, count + 1, ""
        if size or dropped or not count:
            yield self._document(count, title, "\n".join(lines), "blocks", dropped)

    def _runs(self, rows: Iterable[tuple[str, str]], title: str) -> Iterator[RawDocument]:
        """Documents of consecutive sentences, one a row; a row with a problem takes its run along."""
        run: list[str] = []
        dropped, count = "", 0
        for row, problem in rows:
            if row.strip() or problem:
                run.append(" ".join(row.split()))
                dropped = dropped or problem
            if run and (len(run) == RUN or not (row.strip() or problem)):
                yield self._document(count, title, "\n".join(run), "lines", dropped)
                run, dropped, count = [], "", count + 1
        if run:
            yield self._document(count, title, "\n".join(run), "lines", dropped)

    def _wikiextractor(self) -> Iterator[RawDocument]:
        lines: list[str] = []
        identity: tuple[str, str] | None = None
        dropped = ""
        for number, (line, problem) in enumerate(self._lines(), 1):
            if match := _DOC.match(line):
                identity = match[1], html.unescape(match[2])
                lines, dropped = [], problem
            elif line.startswith("</doc>") and identity is not None:
                yield self._document(*identity, _without_title(lines, identity[1]), "dotted_lines", dropped)
                identity = None
            elif identity is not None:
                lines.append(line)
                dropped = dropped or problem
            elif line.strip():
                raise UserError(
                    f"{self.file}:{number}: text outside <doc ...> ... </doc>; is this WikiExtractor output?"
                )
        if identity is not None:
            raise UserError(f"{self.file}: ends inside document {identity[0]!r}: cut short?")

    def _jsonl(self) -> Iterator[RawDocument]:
        lines = ((line, number, problem) for number, (line, problem) in enumerate(self._lines(), 1))
        if self.options.documents == "sentences":
            field = self.options.text_field
            texts = ((self._record(line, number)[field] if line else "", problem) for line, number, problem in lines)
            yield from self._runs(texts, stem(self.file.path))
            return
        for line, number, problem in lines:
            if problem:
                yield self._document(number, "", "", "blocks", problem)
            elif line.strip():
                yield self._row(self._record(line, number), number)

    def _record(self, line: str, number: int) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{self.file}:{number}: not JSON: {error}.") from None
        if not isinstance(record, dict) or not isinstance(record.get(self.options.text_field), str):
            fields = f" (fields: {', '.join(record)})" if isinstance(record, dict) else ""
            name = self.options.text_field
            raise UserError(f"{self.file}:{number}: no text in {name!r}{fields}; set --text_field.")
        return record

    def _row(self, record: dict[str, Any], number: int, layout: str = "blocks") -> RawDocument:
        text = record[self.options.text_field] or ""
        name, title = record.get("id", number), str(record.get("title") or "")
        if not _encodable(text) or not _encodable(title):
            return self._document(name, "", "", layout, "documents_half_a_surrogate_pair")
        if {"id", "url", "title", "text"} <= record.keys() and self.file.format == "jsonl":  # WikiExtractor's JSON
            text, layout = _without_title(text.split("\n"), title), "dotted_lines"
        return self._document(name, title, text, layout)

    def _parquet(self) -> Iterator[RawDocument]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with closing(pq.ParquetFile(self.file.path)) as table:
                columns = self._columns(table.schema_arrow.names)
                total = max(table.metadata.num_rows, 1)
                batches = (batch.to_pylist() for batch in table.iter_batches(_ROWS, columns=columns))
                yield from self._records(batches, total, "blocks", self.options.documents == "sentences")
        except pa.ArrowException as error:
            raise UserError(f"{self.file}: not a whole Parquet file: {error}.") from None

    def _columns(self, names: list[str]) -> list[str]:
        field = self.options.text_field
        if field not in names:
            raise UserError(f"{self.file}: no column {field!r}; set --text_field.{did_you_mean(field, names)}")
        return [name for name in dict.fromkeys((field, "id", "title")) if name in names]

    def _records(
        self, batches: Iterable[list[dict[str, Any]]], total: int, layout: str, sentences: bool
    ) -> Iterator[RawDocument]:
        def counted() -> Iterator[tuple[int, dict[str, Any]]]:
            number = 0
            for batch in batches:
                for record in batch:
                    yield number, record
                    number += 1
                self._share = min(number / total, 1.0) if total else 0.0

        if sentences:
            field = self.options.text_field
            yield from self._runs(((str(record[field] or ""), "") for _, record in counted()), "")
        else:
            yield from (self._row(record, number, layout) for number, record in counted())

    def _dataset(self) -> Iterator[RawDocument]:
        hub = self.file.hub or Hub(str(self.file.path), documents=self.options.documents)
        data, total = load_dataset(self.file)
        if data.features is not None:
            data = data.select_columns(self._columns(list(data.features)))
        batches = (
            [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
            for batch in data.iter(_ROWS)
        )
        yield from self._records(batches, total, hub.layout, "sentences" in (hub.documents, self.options.documents))

    def _mediawiki(self) -> Iterator[RawDocument]:
        stream, self._raw = open_bytes(self.file.path)
        with stream:
            try:
                events = ElementTree.iterparse(stream, events=("start", "end"))
                _, root = next(events)
                for event, element in events:
                    if event == "end" and element.tag.rpartition("}")[2] == "page":
                        yield self._page(element)
                        root.clear()
            except ElementTree.ParseError as error:
                raise UserError(f"{self.file}: not well-formed MediaWiki XML: {error}.") from None

    def _page(self, page: ElementTree.Element) -> RawDocument:
        dropped = ""
        if page.findtext("{*}ns", "0") != "0":
            dropped = "documents_not_articles"
        elif page.find("{*}redirect") is not None:
            dropped = "documents_redirects"
        text = page.findtext("{*}revision/{*}text") or ""
        return self._document(page.findtext("{*}id"), page.findtext("{*}title") or "", text, "wikitext", dropped)


def load_dataset(file: SourceFile) -> tuple[Any, int]:
    """The `datasets` data set behind a source, streamed if it is the hub's, and its number of rows (0 if unknown).

    With HF_HUB_OFFLINE=1 it is what the hub's cache holds.

    Raises:
        UserError: it is not to be had, with the reason.
    """
    import datasets

    try:
        if file.hub is None:
            data = datasets.load_from_disk(str(file.path))
            if isinstance(data, datasets.DatasetDict):
                data = datasets.concatenate_datasets([data[split] for split in sorted(data)])
            return data, len(data)
        hub = file.hub
        offline = datasets.config.HF_HUB_OFFLINE
        data = datasets.load_dataset(
            hub.dataset, hub.config, split=hub.split, revision=hub.revision, streaming=not offline
        )
        split = (data.info.splits or {}).get(hub.split)
        return data, len(data) if offline else getattr(split, "num_examples", 0) or 0
    except Exception as error:  # the library lets through whatever its transports raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--input {file}: not to be had ({reason}). Without a network, load it once where there is one "
            "(`datasets.load_dataset`, not streamed), copy the cache and set HF_HUB_OFFLINE=1; or give a local folder."
        ) from None


def _without_title(lines: list[str], title: str) -> str:
    """WikiExtractor repeats the title as the first line."""
    return "\n".join(lines[1:] if lines and lines[0].strip() == title else lines)


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def stem(path: Path) -> str:
    """The name of a file without any suffix."""
    return path.name.split(".")[0]
