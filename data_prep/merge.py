"""Merges built units into a corpus: drops copies of documents and joins the units' files to shards."""

import hashlib
import json
import os
import shutil
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from data_prep.build import BANDS_FILE, COPIES_TEXT, DROPPED_TEXT, HASHES_FILE, keeper
from data_prep.ledger import Ledger
from data_prep.overlap import BANDS
from data_prep.pool import Pool, run_all
from multicls.corpus import Shard, join_shards, write_shard
from multicls.files import atomic_write, read_json, sha256_of, write_json

FREQUENCY, MERGED = "document_frequency.npy", "merged.json"
PART = 1 << 24  # documents whose hashes a process sorts at a time, in 0.7 GB
SHARD_BYTES = 1 << 30  # a shard takes files of units until it has as many; memory holds it once
COUNTS = ("documents", "rows", "sentences", "tokens", "passages")
SIMILAR, NEAR, SAME = 1, 2, 3  # kinds of copies: the first ones are kept and reported
COPIES = {
    SIMILAR: "documents_similar",
    NEAR: "documents_near_duplicate",
    SAME: "documents_duplicate",
}
PASSAGE = 1000  # tokens: document frequencies count passages, as most tokens occur in every book


class Merged(NamedTuple):
    """The shards, counts and drops that a unit, or all units together, add to the corpus."""

    shards: list[dict[str, Any]]  # the manifest's entries, with their counts by source
    frequency: np.ndarray  # (V,) number of passages that contain each token
    drops: Ledger


def merge(
    folders: list[Path],
    copies: list[np.ndarray],
    output: Path,
    vocabulary_size: int,
    shard_bytes: int,
    pool: Pool,
) -> Merged:
    """Writes the shards of all units into `output`, without `copies`, which `find_all_copies` returns."""
    calls = [(*both, vocabulary_size) for both in zip(folders, copies, strict=True)]
    drops, frequency = Ledger(), np.zeros(vocabulary_size, np.int64)
    entries: dict[int, list[dict[str, Any]]] = {}
    for number, unit in run_all(merge_unit, calls, pool):
        drops.merge(unit.drops.to_json())
        frequency += unit.frequency
        entries[number] = unit.shards
    files = [entry for number in range(len(folders)) for entry in entries[number]]
    groups, size = list[list[dict[str, Any]]](), shard_bytes
    for entry in files:
        if size >= shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry["bytes"]
    targets = [output / f"shard-{number:05d}.arrow" for number in range(len(groups))]
    paths = [[Path(entry["path"]) for entry in group] for group in groups]
    shards: dict[int, dict[str, Any]] = {}
    for number, described in run_all(write_joined, list(zip(targets, paths, strict=True)), pool):
        shards[number] = _total(groups[number]) | described
    for path in set(output.glob(f"shard-{5 * '[0-9]'}*.arrow")) - set(targets):
        path.unlink()  # of a run with other input that was stopped
    return Merged([shards[number] for number in range(len(groups))], frequency, drops)


def _total(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the counts of several files of rows together, and those of each source."""
    total, sources = Counter[str](), defaultdict[str, Counter[str]](Counter)
    for entry in entries:
        total.update({key: entry[key] for key in COUNTS})
        for name, counts in entry["sources"].items():
            sources[name].update(counts)
    return {**total, "sources": sources}


def write_joined(target: Path, paths: list[Path]) -> dict[str, Any]:
    """Writes a shard of the rows of several files, links it if it is one file; returns its name, bytes and SHA-256.

    A record of it lies beside the units, so that a merge which was stopped goes on.
    """
    identity = [
        target.name,
        *((path.parent.name, path.name, path.stat().st_mtime_ns) for path in paths),
    ]
    digest = hashlib.blake2b(json.dumps(identity).encode(), digest_size=12).hexdigest()
    record = paths[0].parent.with_name(f"{digest}.json")
    if record.exists() and target.exists():
        done = read_json(record)
        if done["date"] == target.stat().st_mtime_ns and done["bytes"] == target.stat().st_size:
            return {key: done[key] for key in ("name", "bytes", "sha256")}
    if len(paths) == 1:
        link_shard(paths[0], target)
    else:
        join_shards(target, paths)
    entry = {"name": target.name, **file_entry(target)}
    write_json(record, entry | {"date": target.stat().st_mtime_ns})
    return entry


def find_copies(
    folders: list[Path], is_wanted: bool, pool: Pool, name: str = HASHES_FILE
) -> list[np.ndarray]:
    """Returns for each unit, (D,) bool, which documents have a hash of an earlier one; or none is to be found.

    A file of hashes, `name`, may hold several of each document. Each call finds those in a range of hashes, so that no
    process holds all of them.
    """
    sizes = [np.load(folder / HASHES_FILE, mmap_mode="r").shape[1] for folder in folders]
    repeated = np.zeros(sum(sizes), bool)
    if is_wanted:
        bands, parts = 1 if name == HASHES_FILE else BANDS, 1 + len(repeated) // PART
        paths = [folder / name for folder in folders]
        calls = [(part, parts, paths, band) for band in range(bands) for part in range(parts)]
        for _, found in run_all(copies_in_range, calls, pool):
            repeated[found] = True
    return np.split(repeated, np.cumsum(sizes)[:-1])


def copies_in_range(part: int, parts: int, paths: list[Path], band: int = 0) -> np.ndarray:
    """Returns the indices, over all units, of copies whose hashes lie in a part of the 64-bit numbers."""
    limits = [np.uint64((part + i) * (1 << 64) // parts - (part + i == parts)) for i in range(2)]
    hashes, indices, first = list[np.ndarray](), list[np.ndarray](), 0
    for path in paths:
        table = np.load(path, mmap_mode="r")
        table = table[band] if table.ndim == 3 else table
        begin = int(table[0].searchsorted(limits[0]))
        end = table.shape[1] if part + 1 == parts else int(table[0].searchsorted(limits[1]))
        hashes.append(np.array(table[0, begin:end]))
        indices.append(table[1, begin:end].astype(np.int64) + first)
        first += table.shape[1]
    joined = np.concatenate(hashes)
    order = np.argsort(joined, kind="stable")  # equal hashes stay in the order of the input
    is_copy = joined[order[1:]] == joined[order[:-1]]
    return np.concatenate(indices)[order[1:][is_copy]]


def find_all_copies(
    folders: list[Path], exact: bool, near: Literal["keep", "report", "drop"], pool: Pool
) -> list[np.ndarray]:
    """Returns for each unit, (D,) uint8, which documents are copies of earlier ones: a key of `COPIES`, or 0.

    A document of which an earlier one is a near copy is one itself, also if that one goes.
    """
    kind = NEAR if near == "drop" else SIMILAR
    same = find_copies(folders, exact, pool)
    alike = find_copies(folders, near != "keep", pool, BANDS_FILE)
    both = zip(same, alike, strict=True)
    return [np.where(one, SAME, np.where(other, kind, 0)).astype(np.uint8) for one, other in both]


def is_rewritten(folder: Path, copied: np.ndarray) -> bool:
    """Returns whether a unit was merged without other copies than `copied`, (D,), and so has lost rows."""
    record = folder / MERGED
    merged = read_json(record) if record.exists() else {"copied": []}
    return bool(merged["copied"]) and merged["copied"] != _listed(copied)


def _listed(copied: np.ndarray) -> list[list[int]]:
    """Returns index and kind of each copy."""
    return [[i, int(copied[i])] for i in np.flatnonzero(copied).tolist()]


def merge_unit(folder: Path, copied: np.ndarray, vocabulary_size: int) -> Merged:
    """Describes the files of rows of a unit, without the documents that are copies; `path` is in each entry.

    `copied` is an array of `find_all_copies`. The unit's folder remembers what was done, so that a merge which was
    stopped goes on.
    """
    record = folder / MERGED
    if not record.exists() or read_json(record)["copied"] != _listed(copied):
        _remove_copies(folder, copied, vocabulary_size)
    merged = read_json(record)
    shards = [{"path": str(folder / name), **entry} for name, entry in merged["shards"]]
    return Merged(shards, np.load(folder / FREQUENCY), Ledger(merged["drops"]))


def _remove_copies(folder: Path, copied: np.ndarray, vocabulary_size: int) -> None:
    """Rewrites the files of rows that have copied documents, (D,), without them, and describes all files."""
    table, frequency = np.load(folder / "documents.npy"), np.zeros(vocabulary_size, np.int32)
    shards, rewritten = list[tuple[str, dict[str, Any]]](), list[Path]()
    with keeper(folder / COPIES_TEXT, (folder / DROPPED_TEXT).exists()) as file:
        drops = Ledger(read_json(folder / "drops.json"), file)
        for number in np.unique(table["file"]).tolist():
            path, inside = folder / f"rows-{number}.arrow", table["file"] == number
            documents, kinds = table[inside], copied[inside]
            goes = kinds > SIMILAR
            shard, ends = Shard(path), np.cumsum(documents["rows"])
            for i in np.flatnonzero(kinds.astype(bool) | (documents["members"] > 1)).tolist():
                row, count = shard.row(int(ends[i]) - 1), int(documents["members"][i])
                lost = int(documents["characters"][i]) if goes[i] else 0
                if kinds[i]:
                    drops.add(COPIES[kinds[i]], row, row.title, lost, count)
                    drops.keep(row.source, -lost)
                if count > 1 and not goes[i]:
                    drops.add("joined_documents", row, row.title, 0, count)
            if goes.any():
                rewritten.append(path)
                path = path.with_name(f"kept-{path.name}")
                if rows := np.flatnonzero(np.repeat(~goes, documents["rows"])).tolist():
                    write_shard(path, list(map(shard.row, rows)))
            if not goes.all():
                entry = _describe_shard(path, documents["rows"][~goes], frequency)
                shards.append((path.name, entry))
    drops.close(folder)
    with atomic_write(folder / FREQUENCY, "wb") as file:
        np.save(file, frequency)
    done = {"copied": _listed(copied), "shards": shards, "drops": drops.to_json()}
    write_json(folder / MERGED, done)
    for path in rewritten:  # else a text of which all units have copies would take twice its disk
        path.unlink()


def _describe_shard(path: Path, rows: np.ndarray, frequency: np.ndarray) -> dict[str, Any]:
    """Returns counts and bytes of a file of rows whose documents have `rows`, (D,); adds these to `frequency`, (V,)."""
    shard = Shard(path)
    passages = _count_passages(shard, frequency)
    ends = np.isin(np.arange(len(shard.hashes)), np.cumsum(rows) - 1)
    columns = {"documents": ends, "rows": np.ones_like(ends)}
    columns |= {"sentences": np.diff(shard.row_starts), "tokens": shard.num_tokens}
    columns["passages"] = passages
    sources = {}
    for code, name in enumerate(shard.source_names):
        inside = shard.source_codes == code
        sources[name] = {key: int(column[inside].sum()) for key, column in columns.items()}
    counts = {key: int(column.sum()) for key, column in columns.items()}
    return {**counts, "bytes": path.stat().st_size, "sources": sources}


def file_entry(path: Path) -> dict[str, Any]:
    """Returns the entry of a file in the manifest."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _count_passages(shard: Shard, frequency: np.ndarray) -> np.ndarray:
    """Adds to `frequency`, (V,), the passages that contain each token; returns the passages of each row, (R,).

    A row of up to 1.5 x `PASSAGE` tokens is one passage; a longer one is divided into several of equal length.
    """
    numbers = np.maximum(np.rint(shard.num_tokens / PASSAGE), 1).astype(np.int64)
    starts = shard.sentence_starts[shard.row_starts].tolist()
    for (start, end), number in zip(pairwise(starts), numbers.tolist(), strict=True):
        cuts = (start + (end - start) * p // number for p in range(number + 1))
        for first, last in pairwise(cuts):
            tokens = shard.tokens[first:last].astype(np.intp)
            frequency[tokens] += 1  # numpy adds once for each distinct index
    return numbers


def link_shard(source: Path, target: Path) -> None:
    """Links a file as `target`, or copies it if there are no links; `target` is whole at any time."""
    fresh = source.with_name(f"{target.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    try:
        os.link(source, fresh)
    except OSError:
        shutil.copyfile(source, fresh)
    os.replace(fresh, target)
