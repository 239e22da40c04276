"""Builds one unit of work: reads its files, cleans and encodes the text, and writes a folder of rows.

A unit's folder is written whole or not at all. It depends on the bytes of its files and on the
settings, and on nothing else:

    rows-0.arrow ...  the documents that are kept, in the format of a shard
    documents.npy     (D,) of `DOCUMENT`: one entry for each document
    hashes.bin        (C, D) uint64: the documents' hashes and, with `near_duplicates`, keys of MinHash: C columns, each
                      ascending
    order.bin         (C, D) uint32: the documents with these hashes; of equal hashes, in their order
    ranges.npy        (C, RANGES + 1) uint32: where each range of hashes begins in a column
    dropped.jsonl     with `keep_dropped`: all that was dropped
    drops.json        the ledger: what was taken, kept and left out, with samples
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, compress, groupby, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from data_prep.clean import clean
from data_prep.encode import TextEncoder
from data_prep.formats import read_documents
from data_prep.formats.base import BadRecord, RawDocument, Record, SourceFile
from data_prep.ledger import REASONS, Ledger, Left, left, size
from data_prep.overlap import BANDS, EvaluationRows, band_keys, load_evaluation_rows
from data_prep.settings import BuildOptions
from data_prep.sources import has_changed
from multicls.corpus import MAX_TOKENS, ShardRow, occurrences, table_of, write_tables
from multicls.files import atomic_write, write_json

DOCUMENTS_FILE, DROPPED_TEXT = "documents.npy", "dropped.jsonl"
HASHES_FILE, ORDER_FILE, RANGES_FILE = "hashes.bin", "order.bin", "ranges.npy"
RANGES = 256  # of equal length, of all hashes
BATCH_SENTENCES = 1 << 15  # encoded at a time
SHARD_TOKENS = 1 << 24  # of a file of rows
GROUP_TOKENS = 1 << 20  # of documents that become columns together; until then each takes 2 KB more
DOCUMENT_TOKENS = 128  # whose memory a document takes besides
MOST_TOKENS = MAX_TOKENS // 8  # tokens; each row of a long document then has enough sentences
JOINED_TOKENS = 3 * 128  # of short documents joined: three parts at the default length
RECENT = 1 << 18  # hashes of short documents
DOCUMENT = np.dtype([("file", "u4"), ("rows", "u4"), ("characters", "u8"), ("members", "u4")])

# A panic of a Rust library is a BaseException, too, and must cost its document only.
FATAL = (KeyboardInterrupt, SystemExit, MemoryError, GeneratorExit)

Item = TypeVar("Item")


class Unit(NamedTuple):
    """Files that are built together; `key` changes with their names, sizes, dates and the settings."""

    key: str
    files: list[SourceFile]

    def __str__(self) -> str:
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        start = self.files[0].start
        return f"{self.files[0]}{f' from {start:,} on' if start else ''}{more}"


class Document(NamedTuple):
    """A document after cleaning and encoding: N tokens in S sentences."""

    raw: RawDocument  # without its text, but for a short document
    hash: int  # of its sentences
    characters: int  # that the ledger counts
    tokens: np.ndarray  # (N,)
    lengths: np.ndarray  # (S,) tokens of each sentence
    members: int = 1  # number of documents of the input that were joined to it


def build_unit(
    unit: Unit,
    settings: BuildOptions,
    work: Path,
    tokenizer: Path,
    shard_tokens: int,
    evaluation: Path | None = None,
) -> str:
    """Builds a unit's folder `work / unit.key`, unless it exists; a UserError if a file cannot be reached.

    Returns the path of a file that has changed since it was listed, and then builds nothing; else "".
    `tokenizer` is a tokenizer.json, `evaluation` the file of the evaluation rows; another content has another name.
    """
    target = work / unit.key
    if target.exists():
        return ""
    # A scheduler may take a worker for dead that still runs, and build its unit again elsewhere. So
    # each has its own folder; the first to finish gives the unit.
    with TemporaryDirectory(prefix=f".{unit.key}.", dir=work) as scratch:
        folder = Path(scratch, unit.key)
        folder.mkdir()
        with open_dropped(folder / DROPPED_TEXT, settings.keep_dropped) as file:
            rows = load_evaluation_rows(evaluation) if evaluation else None
            builder = _Builder(settings, load_encoder(tokenizer), Ledger(file=file), rows)
            documents = builder.encode(builder.clean(unit))
            try:
                documents = builder.keep(builder.join_short(documents))
                _write(folder, documents, shard_tokens, settings.near_duplicates != "keep")
            except Exception as error:
                error.add_note(f"in {unit}")
                raise
        if changed := [file.path for file in unit.files if has_changed(file)]:
            return changed[0]
        builder.ledger.close(unit)
        write_json(folder / "drops.json", builder.ledger.to_json())
        try:
            folder.rename(target)
        except OSError:
            if not target.exists():
                raise
    return ""


def open_dropped(path: Path, is_wanted: bool) -> AbstractContextManager[IO[str] | None]:
    """Opens the file for all that is dropped, if it is wanted."""
    return atomic_write(path) if is_wanted else nullcontext()


@lru_cache(1)
def load_encoder(path: Path) -> TextEncoder:
    """Returns this process's encoder of a tokenizer.json; it remembers the words that it met."""
    return TextEncoder(path.read_text(encoding="utf-8"))


def _batched(
    items: Iterable[Item], size: Callable[[Item], int], limit: int
) -> Iterator[list[Item]]:
    """Yields lists of consecutive items whose sizes add up to `limit`; the last may have less."""
    batch, total = list[Item](), 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= limit:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


class HashSet:
    """A set of 64-bit hashes that takes 8 bytes for each, but about 100 for each of the last `RECENT` ones."""

    def __init__(self) -> None:
        self._sorted, self._recent = np.zeros(0, np.uint64), set[int]()

    def add(self, value: int) -> bool:
        """Adds a hash; returns whether it is new."""
        place = self._sorted.searchsorted(np.uint64(value))
        is_old = place < len(self._sorted) and int(self._sorted[place]) == value
        if is_old or value in self._recent:
            return False
        self._recent.add(value)
        if len(self._recent) == RECENT:
            recent = np.fromiter(self._recent, np.uint64, count=RECENT)
            self._sorted = np.sort(np.concatenate([self._sorted, recent]), kind="stable")
            self._recent.clear()
        return True


@dataclass
class _Builder:
    """The steps from files to documents; each enters into `ledger` what it leaves out."""

    settings: BuildOptions
    encoder: TextEncoder
    ledger: Ledger
    evaluation: EvaluationRows | None

    def clean(self, unit: Unit) -> Iterator[tuple[RawDocument, list[str]]]:
        """Yields each document with sentences, without its text, and the sentences."""
        settings, ledger = self.settings, self.ledger
        for raw in self._read(unit):
            if isinstance(raw, BadRecord):
                ledger.take(raw.source, raw.characters, REASONS[raw.reason].unit == "documents")
                ledger.add(raw.reason, raw, raw.text, raw.characters)
                continue
            ledger.take(raw.source, size(raw.text) + sum(entry.characters for entry in raw.left))
            self._leave(raw, raw.left)
            try:
                sentences, out = clean(raw, settings.rules, settings.language)
                if self.evaluation and sentences:
                    marks = self.evaluation.marks(sentences)
                    found = list(compress(sentences, marks))
                    out += [left("sentences_of_evaluation", text) for text in found]
                    sentences = list(compress(sentences, ~marks))
            except FATAL:
                raise
            except BaseException as error:  # of a library: costs this document only
                self._failed(error, raw, [raw.text])
                continue
            self._leave(raw, out)
            if sentences:
                yield raw._replace(text="", left=()), sentences
            else:
                reason = "documents_without_sentences" if raw.text.strip() else "documents_empty"
                ledger.add(reason, raw, raw.text.strip() or raw.title, 0)

    def _read(self, unit: Unit) -> Iterator[Record]:
        """Yields the documents of a unit, up to the limit of each source."""
        limit, read = self.settings.limit or math.inf, self.ledger.documents
        for file in unit.files:
            documents = read_documents(file, self.settings) if read[file.source] < limit else ()
            yield from takewhile(lambda raw: read[raw.source] < limit, documents)

    def _leave(self, raw: RawDocument, entries: Iterable[Left]) -> None:
        for entry in entries:
            self.ledger.add(entry.reason, raw, entry.text, entry.characters, entry.cases)

    def _failed(self, error: BaseException, raw: RawDocument, texts: list[str]) -> None:
        message = f"{type(error).__name__}: {error}: {chr(10).join(texts)}"
        self.ledger.add("documents_failed", raw, message, sum(map(size, texts)))

    def encode(self, documents: Iterable[tuple[RawDocument, list[str]]]) -> Iterator[Document]:
        """Yields the documents as tokens, encoding many sentences at a time."""
        for batch in _batched(documents, lambda document: len(document[1]), BATCH_SENTENCES):
            try:
                tokens, lengths = self.encoder.encode([texts for _, texts in batch])
            except FATAL:
                raise
            except BaseException as error:  # of the tokenizer: only the document with it is dropped
                if len(batch) == 1:
                    self._failed(error, *batch[0])
                for document in batch if len(batch) > 1 else ():
                    yield from self.encode([document])
                continue
            ends = np.cumsum([len(texts) for _, texts in batch])[:-1]
            spans = np.split(tokens, np.cumsum(lengths)[ends - 1])
            for document, *arrays in zip(batch, spans, np.split(lengths, ends), strict=True):
                yield from self._encoded(*document, *arrays)

    def _encoded(
        self, raw: RawDocument, sentences: list[str], tokens: np.ndarray, lengths: np.ndarray
    ) -> Iterator[Document]:
        """Yields a document without the sentences that have no token or too many, if any are left."""
        kept = (lengths > 0) & (lengths <= MOST_TOKENS)
        if not kept.all():
            for i in np.flatnonzero(~kept):
                reason = (
                    "sentences_of_too_many_tokens" if lengths[i] else "sentences_without_tokens"
                )
                self.ledger.add(reason, raw, sentences[i], size(sentences[i]))
            sentences = list(compress(sentences, kept))
            tokens, lengths = tokens[np.repeat(kept, lengths)], lengths[kept]
        if not sentences:
            self.ledger.add("documents_without_sentences", raw, raw.title, 0)
            return
        text = "\n".join(sentences)
        is_short = len(sentences) < self.settings.min_sentences  # and may be dropped with its text
        raw = raw._replace(text=text) if is_short else raw
        yield Document(raw, _hash(text.encode()), size(text), tokens, lengths)

    def join_short(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yields the documents; short ones are dropped, or joined with the next ones of their source."""
        settings, groups = self.settings, dict[str, list[Document]]()
        known = HashSet()  # of short documents, whose copies are dropped
        drops_copies = "duplicate_documents" in settings.rules
        for document in documents:
            if len(document.lengths) >= settings.min_sentences:
                yield document
            elif settings.short_documents == "drop":
                self._drop("documents_too_short", document)
            elif drops_copies and not known.add(document.hash):
                self._drop("documents_duplicate", document)
            else:
                group = groups.setdefault(document.raw.source, [])
                group.append(document)
                tokens = sum(len(member.tokens) for member in group)
                sentences = sum(len(member.lengths) for member in group)
                if tokens >= JOINED_TOKENS and sentences >= settings.min_sentences:
                    yield from self._join(groups.pop(document.raw.source))
        for group in groups.values():
            yield from self._join(group)

    def _join(self, group: list[Document]) -> Iterator[Document]:
        """Yields a group as one document; drops it if it is still short."""
        lengths = np.concatenate([document.lengths for document in group])
        if len(lengths) < self.settings.min_sentences:
            self._drop("documents_too_short", *group)
            return
        hashes = b"".join(document.hash.to_bytes(8, "little") for document in group)
        tokens = np.concatenate([document.tokens for document in group])
        characters = sum(document.characters for document in group)
        raw = group[0].raw._replace(text="")
        yield Document(raw, _hash(hashes), characters, tokens, lengths, len(group))

    def keep(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yields the documents and counts them as kept."""
        for document in documents:
            self.ledger.keep(document.raw.source, document.characters)
            yield document

    def _drop(self, reason: str, *documents: Document) -> None:
        for document in documents:
            self.ledger.add(reason, document.raw, document.raw.text, document.characters)


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _write(
    folder: Path, documents: Iterable[Document], shard_tokens: int, with_bands: bool
) -> None:
    """Writes the rows of a unit; keeps the columns of one file of rows in memory."""
    entries = [np.zeros(0, DOCUMENT)]
    hashes = [np.zeros((0, 1 + BANDS * with_bands), np.uint64)]
    numbered = _numbered(documents, shard_tokens)
    for number, group in groupby(numbered, key=lambda pair: pair[0]):
        tables = list[pa.Table]()
        of_file = (document for _, document in group)
        for batch in _batched(of_file, lambda d: DOCUMENT_TOKENS + len(d.tokens), GROUP_TOKENS):
            rows = [list(rows_of(document)) for document in batch]
            tables.append(table_of(list(chain.from_iterable(rows))))
            both = zip(batch, rows, strict=True)
            entry = [(number, len(parts), d.characters, d.members) for d, parts in both]
            entries.append(np.array(entry, DOCUMENT))
            keys = ([d.hash, *(band_keys(d.tokens) if with_bands else [])] for d in batch)
            hashes.append(np.array(list(keys), np.uint64))
        write_tables(folder / f"rows-{number}.arrow", tables)
    np.save(folder / DOCUMENTS_FILE, np.concatenate(entries))
    write_hashes(folder, np.ascontiguousarray(np.concatenate(hashes).T))


def write_hashes(folder: Path, hashes: np.ndarray) -> None:
    """Writes the columns of hashes of a unit, (C, D) uint64, which it sorts in place, their orders and ranges."""
    columns, documents = hashes.shape
    order = np.empty((columns, documents), np.uint32)
    ranges = np.full((columns, RANGES + 1), documents, np.uint32)
    begins = np.arange(RANGES, dtype=np.uint64) * np.uint64((1 << 64) // RANGES)
    for column in range(columns):
        order[column] = np.argsort(hashes[column], kind="stable")
        hashes[column] = hashes[column, order[column]]
        ranges[column, :-1] = hashes[column].searchsorted(begins)
    hashes.tofile(folder / HASHES_FILE)
    order.tofile(folder / ORDER_FILE)
    np.save(folder / RANGES_FILE, ranges)


def _numbered(documents: Iterable[Document], limit: int) -> Iterator[tuple[int, Document]]:
    """Yields each document with the number of its file; a file ends as soon as it has `limit` tokens."""
    number = tokens = 0
    for document in documents:
        yield number, document
        tokens += len(document.tokens)
        if tokens >= limit:
            number, tokens = number + 1, 0


def rows_of(document: Document) -> Iterator[ShardRow]:
    """Yields the rows of a document: several of about equal length if it exceeds `MAX_TOKENS`."""
    raw, tokens, lengths = document.raw, document.tokens, document.lengths
    offsets, cuts = np.zeros(len(lengths) + 1, np.int64), [0, len(lengths)]
    np.cumsum(lengths, out=offsets[1:])
    if len(tokens) > MAX_TOKENS:
        count = -(-len(tokens) // (MAX_TOKENS - int(lengths.max())))
        targets = len(tokens) * np.arange(1, count) / count
        cuts[1:1] = (np.searchsorted(offsets[1:], targets) + 1).tolist()
    for first, end in zip(cuts, cuts[1:], strict=False):
        bounds = offsets[first : end + 1]
        span = tokens[bounds[0] : bounds[-1]]
        bounds = (bounds - bounds[0]).astype(np.int32)
        counts = occurrences(span)
        yield ShardRow(raw.source, raw.id, raw.title, document.hash, span, bounds, counts)
