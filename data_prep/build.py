"""Builds one part of a corpus (see `parts`) from one work unit: read, clean, encode, write. Each is a datatrove step.

Chunks of documents pass from step to step. A unit is small, so what the last step collects is, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from datatrove.pipeline.base import PipelineStep

from data_prep.clean import Drops, clean
from data_prep.encode import encoder_for
from data_prep.parts import LINE_LENGTH, minhash_bands, row_frequency, rows_of, shard_entry
from data_prep.plan import WorkPlan, WorkSettings
from data_prep.read import RawDocument, read_piece
from data_prep.units import piece_hash
from multicls.corpus import MAX_TOKENS, ShardRow, write_shard
from multicls.files import atomic_folder, write_json

CHUNK_CHARACTERS = 1 << 19  # what the steps hand on at a time
LONGEST_SENTENCE = MAX_TOKENS // 8  # tokens; so that every row of a long document holds enough sentences


class CleanDocument(NamedTuple):
    """A document's kept sentences, by line."""

    raw: RawDocument
    lines: list[list[str]]


class BuiltDocument(NamedTuple):
    """A document as the corpus holds it.

    Attributes:
        rows: Its rows; several if it is longer than `MAX_TOKENS`.
        hash: Hash of its text.
        bands: (BANDS,) uint64 MinHash bands, or (0,).
        lines: (M, 3) uint64: hash, first sentence and end of each line that could be boilerplate.
    """

    rows: list[ShardRow]
    hash: int
    bands: np.ndarray
    lines: np.ndarray


class _Step(PipelineStep):
    """A step of the build; `work` is the work folder."""

    type = "data_prep"

    def __init__(self, work: str) -> None:
        super().__init__()
        self.work = work


class ReadUnit(_Step):
    """Reads the documents of a work unit, in chunks."""

    name = "read"

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[list[RawDocument]]:
        """Yields chunks of documents of unit `rank`."""
        plan = WorkPlan.load(self.work)
        chunk: list[RawDocument] = []
        size = 0
        for piece in plan.units[rank]:
            for document in read_piece(plan.files[piece.file], piece, plan.settings.read_options):
                chunk.append(document)
                size += len(document.text) + 100
                if size >= CHUNK_CHARACTERS:
                    yield chunk
                    chunk, size = [], 0
        if chunk:
            yield chunk


class CleanText(_Step):
    """Cleans documents and splits them into sentences."""

    name = "clean"

    def run(
        self, data: Iterable[list[RawDocument]], rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[list[CleanDocument], Drops]]:
        """Yields, for each chunk, the documents that are kept and what was dropped."""
        settings = WorkPlan.load(self.work).settings
        for chunk in data:
            with self.track_time("chunk"):
                drops = Drops()
                kept: list[CleanDocument] = []
                for raw in chunk:
                    if raw.dropped:
                        drops.add(raw.dropped, raw, raw.title)
                        continue
                    lines = clean(raw, settings.rules, settings.language, drops)
                    if sum(map(len, lines)) >= settings.min_sentences:
                        kept.append(CleanDocument(raw, lines))
                    else:
                        reason = "documents_too_short" if raw.text.strip() else "documents_empty"
                        drops.add(reason, raw, _shown(raw, lines))
            yield kept, drops


class EncodeText(_Step):
    """Turns sentences into tokens and hashes what the merge compares."""

    name = "encode"

    def run(
        self, data: Iterable[tuple[list[CleanDocument], Drops]], rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[list[BuiltDocument], Drops]]:
        """Yields, for each chunk, the encoded documents and what was dropped."""
        plan = WorkPlan.load(self.work)
        encoder = encoder_for(plan.tokenizer_json)
        for documents, drops in data:
            with self.track_time("chunk"):
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


class WritePart(_Step):
    """Writes the part of a unit."""

    name = "write"

    def run(
        self, data: Iterable[tuple[list[BuiltDocument], Drops]], rank: int = 0, world_size: int = 1
    ) -> Iterator[None]:
        """Writes what the other steps yield; a part that exists is left alone, and its unit is not read."""
        plan = WorkPlan.load(self.work)
        folder = plan.part(rank)
        if folder.exists():
            return
        documents: list[BuiltDocument] = []
        drops = Drops()
        for built, dropped in data:
            documents += built
            drops.merge(dropped)
        with self.track_time("part"), atomic_folder(folder) as fresh:
            pieces = plan.units[rank]
            part: dict[str, Any] = {
                "rows": [len(document.rows) for document in documents],
                "drops": drops.to_json(),
                "hashes": [piece_hash(plan.files[piece.file], piece) for piece in pieces],
            }
            np.save(fresh / "hashes.npy", _hash_table(documents))
            np.save(fresh / "lines.npy", _line_table(documents))
            rows = [row for document in documents for row in document.rows]
            if rows:
                write_shard(fresh / "rows.arrow", rows)
                part["shard"] = shard_entry(fresh / "rows.arrow", rows, part["rows"])
                np.save(fresh / "frequency.npy", row_frequency(rows, encoder_for(plan.tokenizer_json).vocabulary_size))
            write_json(fresh / "part.json", part)
        yield from ()


def _build_document(
    document: CleanDocument, tokens: np.ndarray, lengths: np.ndarray, settings: WorkSettings, drops: Drops
) -> BuiltDocument | None:
    """Returns a document as the corpus holds it; None if it is dropped."""
    raw, lines = document
    table = _line_hashes(lines) if "repeated_lines" in settings.rules else np.zeros((0, 3), np.uint64)
    if not lengths.all():
        drops.add("sentences_without_tokens", raw, _shown(raw, lines), int((lengths == 0).sum()))
        kept = np.cumsum([0, *(lengths > 0)]).astype(np.uint64)
        table[:, 1:] = kept[table[:, 1:].astype(np.int64)]  # number the sentences without those
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


def _hash_table(documents: list[BuiltDocument]) -> np.ndarray:
    """Returns hash, kind and document of all documents and bands, (3, H) uint64, ascending."""
    numbers = np.arange(len(documents), dtype=np.uint64)
    columns = [np.array([document.hash for document in documents], np.uint64)]
    columns += [np.array(band, np.uint64) for band in zip(*(document.bands for document in documents), strict=True)]
    kinds = [np.full(len(documents), i, np.uint64) for i in range(len(columns))]
    table = np.stack([np.concatenate(columns), np.concatenate(kinds), np.tile(numbers, len(columns))])
    return table[:, np.lexsort((table[2], table[1], table[0]))]


def _line_table(documents: list[BuiltDocument]) -> np.ndarray:
    """Returns line hash, document hash, document, first sentence and end of all lines, (5, M) uint64, ascending."""
    counts = [len(document.lines) for document in documents]
    lines = np.concatenate([document.lines for document in documents] or [np.zeros((0, 3), np.uint64)]).T
    hashes = np.repeat(np.array([document.hash for document in documents], np.uint64), counts)
    numbers = np.repeat(np.arange(len(documents), dtype=np.uint64), counts)
    table = np.stack([lines[0], hashes, numbers, lines[1], lines[2]])
    return table[:, np.argsort(table[0], kind="stable")]


def _shown(raw: RawDocument, lines: list[list[str]]) -> str:
    return " ".join(sentence for line in lines for sentence in line) or raw.text.strip() or raw.title


def build_stage(work: Path) -> list[PipelineStep]:
    """Returns the steps of the stage that builds a part from each work unit."""
    return [step(str(work)) for step in (ReadUnit, CleanText, EncodeText, WritePart)]
