"""Merges built units into a corpus: drops copies of documents, links or rewrites the shards."""

import os
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.build import COPIES_TEXT, DROPPED_TEXT, keeper
from data_prep.ledger import Ledger
from data_prep.pool import Pool, run_all
from multicls.corpus import Shard, write_shard
from multicls.files import atomic_write, read_json, sha256_of, write_json

FREQUENCY, MERGED = "document_frequency.npy", "merged.json"
PART = 1 << 22  # documents whose hashes are sorted at a time
PASSAGE = 1000  # tokens: document frequencies count passages, as most tokens occur in every book


class Merged(NamedTuple):
    """The shards, counts and drops that a unit, or all units together, add to the corpus."""

    shards: list[dict[str, Any]]  # the manifest's entries, with their counts by source
    frequency: np.ndarray  # (V,) number of passages that contain each token
    drops: Ledger


def merge(
    folders: list[Path], copies: list[np.ndarray], output: Path, vocabulary_size: int, pool: Pool
) -> Merged:
    """Writes the shards of all units into `output`, without `copies`: of each unit, (D,) bool."""
    calls = [
        (folder, output / f"shard-{number:05d}", copied, vocabulary_size)
        for number, (folder, copied) in enumerate(zip(folders, copies, strict=True))
    ]
    drops, frequency = Ledger(), np.zeros(vocabulary_size, np.int64)
    entries: dict[int, list[dict[str, Any]]] = {}
    for number, unit in run_all(merge_unit, calls, pool):
        drops.merge(unit.drops.to_json())
        frequency += unit.frequency
        entries[number] = unit.shards
    shards = [entry for number in range(len(folders)) for entry in entries[number]]
    written = {output / shard["name"] for shard in shards}
    for path in set(output.glob(f"shard-{5 * '[0-9]'}*.arrow")) - written:
        path.unlink()  # of a run with other input that was stopped
    return Merged(shards, frequency, drops)


def find_copies(folders: list[Path], is_wanted: bool = True) -> list[np.ndarray]:
    """Returns for each unit, (D,) bool, which documents have the text of an earlier one; or none is to be found."""
    sizes = [len(np.load(folder / "documents.npy", mmap_mode="r")) for folder in folders]
    if not is_wanted:
        return [np.zeros(size, bool) for size in sizes]
    hashes, end = np.empty(sum(sizes), np.uint64), 0
    for folder, size in zip(folders, sizes, strict=True):  # one table in memory at a time
        hashes[end : end + size] = np.load(folder / "documents.npy")["hash"]
        end += size
    repeated, parts = np.zeros(len(hashes), bool), np.uint64(1 + len(hashes) // PART)
    for part in range(int(parts)):  # all at once would take 30 bytes a document
        inside = np.flatnonzero(hashes % parts == part)
        _, first = np.unique(hashes[inside], return_index=True)
        repeated[np.delete(inside, first)] = True
    return np.split(repeated, np.cumsum(sizes)[:-1])


def is_rewritten(folder: Path, copied: np.ndarray) -> bool:
    """Returns whether a unit was merged without other copies than `copied`, (D,) bool, and so has lost rows."""
    record = folder / MERGED
    merged = read_json(record) if record.exists() else {"copied": []}
    return bool(merged["copied"]) and merged["copied"] != np.flatnonzero(copied).tolist()


def merge_unit(folder: Path, name: Path, copied: np.ndarray, vocabulary_size: int) -> Merged:
    """Writes the shards of a unit, `name` being the path of the first one without its suffix.

    The unit's folder remembers what was done, so that a merge which was stopped goes on.
    """
    record = folder / MERGED
    if not record.exists() or read_json(record)["copied"] != np.flatnonzero(copied).tolist():
        _remove_copies(folder, copied, vocabulary_size)
    merged, shards = read_json(record), list[dict[str, Any]]()
    for number, source, entry in merged["shards"]:
        target = name.with_name(f"{name.name}{f'-{number:03d}' if number else ''}.arrow")
        link_shard(folder / source, target)
        shards.append({"name": target.name} | entry)
    return Merged(shards, np.load(folder / FREQUENCY), Ledger(merged["drops"]))


def _remove_copies(folder: Path, copied: np.ndarray, vocabulary_size: int) -> None:
    """Rewrites the files of rows that have copied documents, (D,) bool, without them, and describes all files."""
    table, frequency = np.load(folder / "documents.npy"), np.zeros(vocabulary_size, np.int32)
    shards, rewritten = list[tuple[int, str, dict[str, Any]]](), list[Path]()
    with keeper(folder / COPIES_TEXT, (folder / DROPPED_TEXT).exists()) as file:
        drops = Ledger(read_json(folder / "drops.json"), file)
        for number in np.unique(table["file"]).tolist():
            path, inside = folder / f"rows-{number}.arrow", table["file"] == number
            documents, goes = table[inside], copied[inside]
            shard, ends = Shard(path), np.cumsum(documents["rows"])
            for i in np.flatnonzero(goes | (documents["members"] > 1)).tolist():
                row, count = shard.row(int(ends[i]) - 1), int(documents["members"][i])
                reason = "documents_duplicate" if goes[i] else "joined_documents"
                lost = int(documents["characters"][i]) if goes[i] else 0
                drops.add(reason, row, row.title, lost, count)
                drops.keep(row.source, -lost)
            if goes.any():
                rewritten.append(path)
                path = path.with_name(f"kept-{path.name}")
                if rows := np.flatnonzero(np.repeat(~goes, documents["rows"])).tolist():
                    write_shard(path, list(map(shard.row, rows)))
            if not goes.all():
                entry = _describe_shard(path, documents["rows"][~goes], frequency)
                shards.append((number, path.name, entry))
    drops.close(folder)
    with atomic_write(folder / FREQUENCY, "wb") as file:
        np.save(file, frequency)
    done = {"copied": np.flatnonzero(copied).tolist(), "shards": shards, "drops": drops.to_json()}
    write_json(folder / MERGED, done)
    for path in rewritten:  # else a text of which all units have copies would take twice its disk
        path.unlink()


def _describe_shard(path: Path, rows: np.ndarray, frequency: np.ndarray) -> dict[str, Any]:
    """Returns the manifest's entry of a shard whose documents have `rows`, (D,); adds these to `frequency`, (V,)."""
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
    return {**counts, **file_entry(path), "sources": sources}


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
