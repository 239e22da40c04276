"""Merges built units into a corpus: drops copies of documents, links or rewrites the shards."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from data_prep.build import Unit, write_rows
from data_prep.drops import DropLog
from data_prep.pool import run_all
from multicls.corpus import Shard
from multicls.files import read_json

SHARES = 16  # of all hashes, searched for duplicates one after the other


class Merged(NamedTuple):
    """The shards, counts and drops that a unit, or all units together, add to the corpus."""

    shards: list[dict[str, Any]]  # the manifest's entries, with their counts by source
    frequency: np.ndarray  # (V,)
    drops: DropLog


def merge(units: list[Unit], output: Path, drop_copies: bool, pool: Executor | None) -> Merged:
    """Writes the shards of all units, built in `output / "work"`, into `output`.

    With `drop_copies` a document goes that has the sentences of an earlier one.
    """
    folders = [output / "work" / unit.key for unit in units]
    copies = find_copies(folders)
    calls = [
        (folder, output / f"shard-{number:05d}", copied & drop_copies)
        for number, (folder, copied) in enumerate(zip(folders, copies, strict=True))
    ]
    drops, frequency = DropLog(), np.zeros(1, np.int64)
    entries: dict[int, list[dict[str, Any]]] = {}
    for number, unit in run_all(merge_unit, calls, pool):
        drops.merge(unit.drops.to_json())
        frequency = frequency + unit.frequency
        entries[number] = unit.shards
    shards = [entry for number in range(len(units)) for entry in entries[number]]
    names = {shard["name"] for shard in shards}
    for path in output.glob("shard-*.arrow"):  # of a run with other input that was stopped
        if path.name not in names:
            path.unlink()
    return Merged(shards, frequency, drops)


def find_copies(folders: list[Path]) -> list[np.ndarray]:
    """Returns for each unit, (D,) bool, which documents have the text of an earlier document.

    It holds at most 17 bytes a document: all hashes, one more copy of them, and the answer.
    """
    columns = [np.load(folder / "documents.npy")["hash"].copy() for folder in folders]
    ends, hashes = np.cumsum(list(map(len, columns))), np.concatenate(columns)
    del columns
    copied = np.zeros(len(hashes), bool)
    for share in range(SHARES):
        places = np.flatnonzero(hashes % SHARES == share)
        copied[places] = pd.Series(hashes[places]).duplicated()
    return np.split(copied, ends[:-1])


def merge_unit(folder: Path, name: Path, copied: np.ndarray) -> Merged:
    """Writes the shards of a unit, `name` being the path of the first one without its suffix.

    The files of rows are linked, or written without the copied documents, (D,) bool.
    """
    record, frequency = read_json(folder / "unit.json"), np.load(folder / "frequency.npy")
    drops, documents, shards = DropLog(record["drops"]), np.load(folder / "documents.npy"), []
    if is_changed := bool(copied.any()):
        frequency[:] = 0
    end = 0
    for number, entry in enumerate(record["files"]):
        source, first, end = folder / f"rows-{number}.arrow", end, end + entry["documents"]
        if is_changed:
            kept = _kept_rows(source, documents[first:end], copied[first:end], drops)
            source = source.with_name(f"kept-{source.name}")
            entry = write_rows(source, kept, frequency) if kept else None
        if entry:
            target = name.with_name(f"{name.name}{f'-{number:03d}' if number else ''}.arrow")
            _link(source, target)
            shards.append({"name": target.name} | entry)
    return Merged(shards, frequency, drops)


def _kept_rows(path: Path, documents: np.ndarray, copied: np.ndarray, drops: DropLog) -> list[Any]:
    """Returns the rows of each document that stays; counts the others."""
    shard, begin, kept = Shard(path), 0, []
    for (_, count, characters), goes in zip(documents.tolist(), copied, strict=True):
        rows = [shard.row(number) for number in range(begin, begin + count)]
        begin += count
        if goes:
            drops.add("documents_duplicate", rows[0], rows[0].title, characters)
        else:
            kept.append(rows)
    return kept


def _link(source: Path, target: Path) -> None:
    """Gives a file a second name, or copies it if there are no links; `target` is whole at any time."""
    fresh = source.with_name(f"{target.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    try:
        os.link(source, fresh)
    except OSError:
        shutil.copyfile(source, fresh)
    os.replace(fresh, target)
