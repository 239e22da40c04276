"""Builds one part of a corpus (see `parts`) from one work unit: read, clean, encode, write. Each is a datatrove step.

Chunks of documents pass from step to step. The last step writes a file whenever it holds `SHARD_TOKENS` tokens, so
memory is bounded even for a compressed file, which is one unit whatever its size.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from data_prep.clean import Drops, clean
from data_prep.encode import encoder_for
from data_prep.engine import Step
from data_prep.parts import LINE_LENGTH, minhash_bands, row_frequency, rows_of, shard_entry
from data_prep.plan import WorkPlan
from data_prep.read import RawDocument, read_piece
from data_prep.settings import PrepareSettings
from data_prep.units import piece_hash
from multicls.corpus import MAX_TOKENS, ShardRow, write_shard
from multicls.files import write_json

CHUNK_CHARACTERS = 1 << 19  # that pass from step to step at a time
SHARD_TOKENS = 1 << 24  # of a file of rows; a unit has fewer, unless its file cannot be cut
LONGEST_SENTENCE = MAX_TOKENS // 8  # tokens; every row of a long document then holds enough sentences


class CleanDocument(NamedTuple):
    """A document after cleaning: the kept sentences of each line."""

    raw: RawDocument
    lines: list[list[str]]


class BuiltDocument(NamedTuple):
    """A document after encoding."""

    rows: list[ShardRow]  # several if it has more than `MAX_TOKENS` tokens
    hash: int  # of its text
    bands: np.ndarray  # (BANDS,) uint64 MinHash bands, or (0,)
    lines: np.ndarray  # (M, 3) uint64: hash, first sentence and end of each line that could be boilerplate


class ReadUnit(Step):
    """Reads the documents of a work unit, in chunks."""

    name = "read"

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[list[RawDocument]]:
        """Yields chunks of documents of unit `rank`."""
        plan = WorkPlan.load(self.work)
        chunk: list[RawDocument] = []
        size = 0
        for piece in plan.units[rank]:
            for document in read_piece(plan.files[piece.file], piece, plan.settings):
                chunk.append(document)
                size += len(document.text) + 100
                if size >= CHUNK_CHARACTERS:
                    yield chunk
                    chunk, size = [], 0
        if chunk:
            yield chunk


class CleanText(Step):
    """Cleans documents and splits them into sentences."""

    name = "clean"

    def run(
        self, data: Iterable[list[RawDocument]], rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[list[CleanDocument], Drops]]:
        """Yields the kept documents of each chunk and what was dropped."""
        settings = WorkPlan.load(self.work).settings
        rules = settings.rules
        for chunk in data:
            drops = Drops()
            kept: list[CleanDocument] = []
            for raw in chunk:
                if raw.dropped:
                    drops.add(raw.dropped, raw, raw.title)
                    continue
                lines = clean(raw, rules, settings.language, drops)
                if sum(map(len, lines)) >= settings.min_sentences:
                    kept.append(CleanDocument(raw, lines))
                else:
                    reason = "documents_too_short" if raw.text.strip() else "documents_empty"
                    drops.add(reason, raw, _shown(raw, lines))
            yield kept, drops


class EncodeText(Step):
    """Encodes sentences as tokens, and hashes documents and lines for the merge."""

    name = "encode"

    def run(
        self, data: Iterable[tuple[list[CleanDocument], Drops]], rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[list[BuiltDocument], Drops]]:
        """Yields the encoded documents of each chunk and what was dropped."""
        plan = WorkPlan.load(self.work)
        encoder = encoder_for(plan.tokenizer_json)
        for documents, drops in data:
            sentences = [sentence for document in documents for line in document.lines for sentence in line]
            tokens, lengths = encoder.encode(sentences)
            ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            built, first = [], 0
            for document in documents:
                end = first + sum(map(len, document.lines))
                own = tokens[ends[first] : ends[end]], lengths[first:end]
                if found := _build_document(document, *own, plan.settings, drops):
                    built.append(found)
                first = end
            yield built, drops


class WritePart(Step):
    """Writes the part of a unit."""

    name = "write"

    def run(
        self, data: Iterable[tuple[list[BuiltDocument], Drops]], rank: int = 0, world_size: int = 1
    ) -> Iterator[None]:
        """Writes the documents that the other steps yield. If the part exists, its unit is not read."""
        plan = WorkPlan.load(self.work)
        if plan.part(rank).exists():
            return
        drops = Drops()
        with _new_folder(plan.part(rank)) as folder:
            part = _PartWriter(folder, plan.tokenizer_json)
            for documents, dropped in data:
                drops.merge(dropped)
                part.add(documents)
            hashes = [piece_hash(plan.files[piece.file], piece) for piece in plan.units[rank]]
            part.finish({"drops": drops.to_json(), "hashes": hashes})
        yield from ()


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Creates a temporary folder beside `path` and renames it to `path` when the block succeeds.

    SLURM may start a task again while its first process still runs on a node that was taken for dead. Therefore each
    process has a folder of its own; the first one to finish gives the part, and the others' folders are removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield fresh
        try:
            fresh.rename(path)
        except OSError:
            if not path.exists():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


class _PartWriter:
    """Writes the files of a part into `folder`; holds the rows of at most `SHARD_TOKENS` tokens and one chunk."""

    def __init__(self, folder: Path, tokenizer_json: str) -> None:
        self.folder, self.tokenizer_json = folder, tokenizer_json
        self._documents: list[BuiltDocument] = []  # not written yet
        self._tokens = 0  # of these
        self._written = 0  # documents
        self._rows: list[list[int]] = []
        self._entries: list[dict[str, Any]] = []
        self._frequency: Any = 0
        self._hashes = [np.zeros((3, 0), np.uint64)]
        self._lines = [np.zeros((5, 0), np.uint64)]

    def add(self, documents: list[BuiltDocument]) -> None:
        """Takes documents, and writes a file if they are many."""
        self._documents += documents
        self._tokens += sum(len(row.tokens) for document in documents for row in document.rows)
        if self._tokens >= SHARD_TOKENS:
            self._flush()

    def finish(self, record: dict[str, Any]) -> None:
        """Writes the last rows, the tables of hashes and part.json, which holds `record` as well."""
        self._flush()
        hashes, lines = np.concatenate(self._hashes, axis=1), np.concatenate(self._lines, axis=1)
        np.save(self.folder / "hashes.npy", hashes[:, np.lexsort((hashes[2], hashes[1], hashes[0]))])
        np.save(self.folder / "lines.npy", lines[:, np.argsort(lines[0], kind="stable")])
        if self._entries:
            np.save(self.folder / "frequency.npy", self._frequency)
        write_json(self.folder / "part.json", {"rows": self._rows, "shards": self._entries} | record)

    def _flush(self) -> None:
        rows = [row for document in self._documents for row in document.rows]
        if not rows:
            return
        path = self.folder / f"rows-{len(self._entries)}.arrow"
        write_shard(path, rows)
        self._rows.append([len(document.rows) for document in self._documents])
        self._entries.append(shard_entry(path, rows, self._rows[-1]))
        self._frequency += row_frequency(rows, encoder_for(self.tokenizer_json).vocabulary_size)
        self._hashes.append(_hash_table(self._documents, self._written))
        self._lines.append(_line_table(self._documents, self._written))
        self._written += len(self._documents)
        self._documents, self._tokens = [], 0


def _build_document(
    document: CleanDocument, tokens: np.ndarray, lengths: np.ndarray, settings: PrepareSettings, drops: Drops
) -> BuiltDocument | None:
    """Returns an encoded document; None if it is dropped."""
    raw, lines = document
    table = _line_hashes([] if "repeated_lines" in settings.without else lines)
    if not lengths.all():
        drops.add("sentences_without_tokens", raw, _shown(raw, lines), int((lengths == 0).sum()))
        kept = np.cumsum([0, *(lengths > 0)]).astype(np.uint64)
        table[:, 1:] = kept[table[:, 1:].astype(np.int64)]  # the remaining sentences are numbered anew
        lengths = lengths[lengths > 0]
    if len(lengths) < settings.min_sentences:
        drops.add("documents_too_short", raw, _shown(raw, lines))
        return None
    if lengths.max() > LONGEST_SENTENCE:
        drops.add("documents_with_endless_sentence", raw, _shown(raw, lines))
        return None
    text = "\n".join(sentence for line in lines for sentence in line)
    hashed = int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")
    bands = minhash_bands(text) if settings.near_duplicates else np.zeros(0, np.uint64)
    return BuiltDocument(rows_of(raw.source, raw.id, raw.title, hashed, tokens, lengths), hashed, bands, table)


def _line_hashes(lines: list[list[str]]) -> np.ndarray:
    """Returns hash, first sentence and end of each line of at least `LINE_LENGTH` characters, (M, 3) uint64."""
    table = []
    first = 0
    for line in lines:
        text = " ".join(line)
        if len(text) >= LINE_LENGTH:
            table.append((xxhash.xxh3_64_intdigest(text.encode("utf-8")), first, first + len(line)))
        first += len(line)
    return np.array(table, np.uint64).reshape(-1, 3)


def _hash_table(documents: list[BuiltDocument], first: int) -> np.ndarray:
    """Returns hash, kind and number of all documents and their bands, (3, H) uint64; numbers begin with `first`."""
    numbers = np.arange(first, first + len(documents), dtype=np.uint64)
    columns = [np.array([document.hash for document in documents], np.uint64)]
    columns += [np.array(band, np.uint64) for band in zip(*(document.bands for document in documents), strict=True)]
    kinds = [np.full(len(documents), i, np.uint64) for i in range(len(columns))]
    return np.stack([np.concatenate(columns), np.concatenate(kinds), np.tile(numbers, len(columns))])


def _line_table(documents: list[BuiltDocument], first: int) -> np.ndarray:
    """Returns line hash, document hash, document number, first sentence and end of all lines, (5, M) uint64."""
    counts = [len(document.lines) for document in documents]
    lines = np.concatenate([document.lines for document in documents]).T
    hashes = np.repeat(np.array([document.hash for document in documents], np.uint64), counts)
    numbers = np.repeat(np.arange(first, first + len(documents), dtype=np.uint64), counts)
    return np.stack([lines[0], hashes, numbers, lines[1], lines[2]])


def _shown(raw: RawDocument, lines: list[list[str]]) -> str:
    return " ".join(sentence for line in lines for sentence in line) or raw.text.strip() or raw.title
