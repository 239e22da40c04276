"""Merges parts into a corpus: finds duplicates and repeated lines across parts, then writes the shards.

Tables of hashes are sorted in each part. A task of the first stage takes one range of hashes from all parts, so its
memory is bounded; a task of the second stage writes the shard of one part. Nothing depends on the order of tasks.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.clean import Drops
from data_prep.encode import encoder_for
from data_prep.engine import Step
from data_prep.parts import COUNTED, row_frequency, rows_of, shard_entry
from data_prep.plan import WorkPlan
from data_prep.read import RawDocument
from multicls.corpus import Shard, ShardRow, write_shard
from multicls.files import atomic_write, read_json, write_json

REPEATS = 10  # a line is boilerplate after it has occurred in this number of documents
UNITS_PER_TASK = 8  # of the stage that writes shards, because each takes only a moment
REASONS = ("documents_duplicate", "documents_near_duplicate")


class FindDuplicates(Step):
    """Finds duplicates among the hashes of all parts; a task compares the hashes of one range."""

    name = "duplicates"

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[None]:
        """Writes the documents and lines to drop that range `rank` of the hashes shows."""
        plan = WorkPlan.load(self.work)
        parts = [plan.part(unit) for unit in range(len(plan.units))]
        exact = "duplicate_documents" not in plan.settings.without
        documents = duplicate_documents(_slices(parts, "hashes.npy", rank, world_size, 2), exact)
        lines = repeated_lines(_slices(parts, "lines.npy", rank, world_size, REPEATS + 1))
        for name, found in (("documents", documents), ("lines", lines)):
            ordered = np.ascontiguousarray(found[np.argsort(found[:, 0], kind="stable")].T)  # by part, for `_of_part`
            with atomic_write(plan.folder / "duplicates" / f"{name}-{rank:05d}.npy", "wb") as file:
                np.save(file, ordered)
        yield from ()


def _slices(parts: list[Path], name: str, rank: int, world_size: int, least: int = 1) -> np.ndarray:
    """Returns the columns of all tables whose hash is in range `rank` and occurs at least `least` times.

    A further row has the number of their part. Most hashes occur once, and of these only the hash is held in memory.
    """
    hashes = np.sort(np.concatenate([_slice(part / name, rank, world_size)[0] for part in parts]))
    frequent = np.unique(hashes[least - 1 :][hashes[least - 1 :] == hashes[: max(len(hashes) - least + 1, 0)]])
    frequent = np.append(frequent, np.uint64(0))  # for the search below, whose result may be the end
    found = []
    for number, part in enumerate(parts):
        own = _slice(part / name, rank, world_size)
        own = own[:, frequent[np.searchsorted(frequent[:-1], own[0])] == own[0]]
        found.append(np.concatenate([own, np.full((1, own.shape[1]), number, np.uint64)]))
    return np.concatenate(found, axis=1)


def _slice(path: Path, rank: int, world_size: int) -> np.ndarray:
    """Returns the columns of a table whose hash is in range `rank`, mapped from the file."""
    low, high = ((1 << 64) * i // world_size for i in (rank, rank + 1))
    table: np.ndarray = np.load(path, mmap_mode="r")
    first = int(np.searchsorted(table[0], np.uint64(low)))
    end = table.shape[1] if high > np.iinfo(np.uint64).max else int(np.searchsorted(table[0], np.uint64(high)))
    return table[:, first:end]


def duplicate_documents(table: np.ndarray, exact: bool) -> np.ndarray:
    """Returns part, document and reason (an index of `REASONS`) of the documents to drop, (D, 3) int64.

    A document goes if an earlier one has the same hash (exact copy) or shares a MinHash band (near copy).

    Args:
        table: (4, H) uint64: hash, kind, document, part.
        exact: Whether exact copies are dropped.
    """
    hashes, kinds, documents, parts = table[:, np.lexsort((table[2], table[3], table[1], table[0]))]
    seen = np.zeros(len(hashes), bool)
    seen[1:] = (hashes[1:] == hashes[:-1]) & (kinds[1:] == kinds[:-1])
    if not exact:
        seen &= kinds > 0
    return np.stack([parts[seen], documents[seen], kinds[seen] > 0], axis=1).astype(np.int64)


def repeated_lines(table: np.ndarray) -> np.ndarray:
    """Returns part, document, first sentence and end of the lines to drop, (L, 4) int64.

    A line goes if it stood in `REPEATS` different documents before; exact copies of a document count once.

    Args:
        table: (6, M) uint64: hash, hash of the document, document, first sentence, end, part.
    """
    lines, copies, documents, firsts, ends, parts = table[:, np.lexsort((table[3], table[2], table[5], table[0]))]
    by_copy = np.lexsort((copies, lines))  # stable, so the first of each (line, document) is its first in the corpus
    new = np.append(True, (np.diff(lines[by_copy]) != 0) | (np.diff(copies[by_copy]) != 0))[: len(lines)]
    first_of_copy = np.empty(len(lines), np.int64)
    first_of_copy[by_copy] = by_copy[new][np.cumsum(new) - 1]
    different = np.cumsum(first_of_copy == np.arange(len(lines)))  # documents with a line, over all lines so far
    first_of_line = np.searchsorted(lines, lines)
    dropped = different[first_of_copy] - different[first_of_line] >= REPEATS
    return np.stack([parts, documents, firsts, ends], axis=1)[dropped].astype(np.int64)


class WriteShards(Step):
    """Writes the shards of some parts, without the duplicates."""

    name = "shards"

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[None]:
        """Writes the shards of the task's parts and, for each part, a record for `gather`."""
        plan = WorkPlan.load(self.work)
        for unit in range(len(plan.units))[rank * UNITS_PER_TASK : (rank + 1) * UNITS_PER_TASK]:
            write_json(plan.folder / "shards" / f"{unit:05d}.json", write_part(plan, unit))
        yield from ()


def write_part(plan: WorkPlan, unit: int) -> dict[str, Any]:
    """Writes the shards of a unit's part and their document frequencies; returns what `gather` collects."""
    part, output = plan.part(unit), plan.folder.parent
    record = read_json(part / "part.json")
    documents, lines = found_duplicates(plan.folder, unit)
    drops = Drops.from_json(record["drops"])
    shards: list[dict[str, Any]] = []
    unchanged = not documents and not lines
    frequency: Any = np.load(part / "frequency.npy") if unchanged and record["shards"] else 0
    first = 0
    for number, (counts, entry) in enumerate(zip(record["rows"], record["shards"], strict=True)):
        source = part / f"rows-{number}.arrow"
        name = f"shard-{unit:05d}.arrow" if not number else f"shard-{unit:05d}-{number:03d}.arrow"
        if unchanged:
            _link(source, output / name)
            shards.append({"name": name} | entry)
            continue
        kept = list(_kept(Shard(source), counts, first, documents, lines, plan, drops))
        first += len(counts)
        if rows := [row for document in kept for row in document]:
            write_shard(output / name, rows)
            shards.append({"name": name} | shard_entry(output / name, rows, [len(document) for document in kept]))
            frequency += row_frequency(rows, encoder_for(plan.tokenizer_json).vocabulary_size)
    if shards:
        with atomic_write(plan.folder / "shards" / f"{unit:05d}.npy", "wb") as file:
            np.save(file, frequency)
    return {"drops": drops.to_json(), "hashes": record["hashes"], "shards": shards}


def found_duplicates(work: Path, part: int) -> tuple[dict[int, str], dict[int, list[tuple[int, int]]]]:
    """Returns the reason to drop each document of a part, and the sentences [first, end) to drop by document."""
    documents: dict[int, str] = {}
    lines: dict[int, list[tuple[int, int]]] = {}
    for _, document, near in _of_part(work, "documents", part):
        documents[document] = min(documents.get(document, REASONS[1]), REASONS[near])  # "duplicate" comes first
    for _, document, first, end in _of_part(work, "lines", part):
        lines.setdefault(document, []).append((first, end))
    return documents, lines


def _of_part(work: Path, name: str, part: int) -> Iterator[list[int]]:
    """Yields what the tasks of the first stage found about a part; reads only that."""
    for path in sorted((work / "duplicates").glob(f"{name}-*.npy")):
        found = np.load(path, mmap_mode="r")
        first, end = np.searchsorted(found[0], np.array([part, part + 1])).tolist()
        yield from found[:, first:end].T.tolist()


def _kept(
    shard: Shard,
    rows: list[int],
    first: int,
    documents: dict[int, str],
    lines: dict[int, list[tuple[int, int]]],
    plan: WorkPlan,
    drops: Drops,
) -> Iterator[list[ShardRow]]:
    """Yields the rows of each document that is kept, without its repeated lines; `first` is the first one's number."""
    ends = np.cumsum(rows).tolist()
    for number, (count, end) in enumerate(zip(rows, ends, strict=True), first):
        own = [shard.row(row) for row in range(end - count, end)]
        row = own[0]
        raw = RawDocument(row.source, row.id, row.title, "", "")
        if number in documents:
            drops.add(documents[number], raw, row.title or row.id)
            continue
        if number in lines:
            tokens = np.concatenate([row.tokens for row in own])
            lengths = np.concatenate([np.diff(row.offsets) for row in own])
            starts = np.concatenate([[0], np.cumsum(lengths)])
            kept = np.ones(len(lengths), bool)
            decode = encoder_for(plan.tokenizer_json).tokenizer.decode
            for begin, stop in sorted(lines[number]):
                kept[begin:stop] = False
                drops.add("lines_repeated", raw, decode(tokens[starts[begin] : starts[stop]].tolist()))
            if kept.sum() < plan.settings.min_sentences:
                drops.add("documents_too_short", raw, row.title or row.id)
                continue
            own = rows_of(row.source, row.id, row.title, row.hash, tokens[np.repeat(kept, lengths)], lengths[kept])
        yield own


def _link(source: Path, target: Path) -> None:
    """Gives a file a second name, or copies it if the file system has no links. `target` is whole at any time."""
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    try:
        os.link(source, fresh)
        os.replace(fresh, target)  # which does nothing if both are the same file
        fresh.unlink(missing_ok=True)
    except OSError:
        with open(source, "rb") as content, atomic_write(target, "wb") as file:
            shutil.copyfileobj(content, file, 1 << 20)


def gather(plan: WorkPlan) -> tuple[list[dict[str, Any]], dict[str, dict[str, int]], Drops, np.ndarray, list[str]]:
    """Adds up the records of all parts.

    Returns:
        The manifest's entries of shards, the counts by source, the drops, the document frequencies (V,) and the hashes
        of all pieces of the input.
    """
    shards: list[dict[str, Any]] = []
    sources: dict[str, Counter[str]] = {}
    drops = Drops()
    frequency = np.zeros(encoder_for(plan.tokenizer_json).vocabulary_size, np.int64)
    hashes: list[str] = []
    for unit in range(len(plan.units)):
        record = read_json(plan.folder / "shards" / f"{unit:05d}.json")
        drops.merge(Drops.from_json(record["drops"]))
        hashes += record["hashes"]
        for entry in record["shards"]:
            for source, counts in entry.pop("sources").items():
                sources.setdefault(source, Counter()).update(counts)
        if record["shards"]:
            shards += record["shards"]
            frequency += np.load(plan.folder / "shards" / f"{unit:05d}.npy", allow_pickle=False)
    ordered = {source: {name: counts[name] for name in COUNTED} for source, counts in sources.items()}
    return shards, ordered, drops, frequency, hashes
