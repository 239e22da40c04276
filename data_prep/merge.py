"""Merges built units into a corpus: finds copies of documents, and joins the units' files to shards without them."""

import hashlib
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import numpy as np

from data_prep import build
from data_prep.build import DOCUMENTS_FILE, DROPPED_TEXT, open_dropped
from data_prep.ledger import Ledger
from data_prep.overlap import BANDS
from data_prep.pool import Pool, run_all
from multicls.corpus import Shard, filter_shard, join_shards
from multicls.files import atomic_write, read_json, sha256_of, write_json

FREQUENCY = "document_frequency.npy"
PART = 1 << 24  # documents whose hashes a process sorts at a time, in 0.7 GB
SHARD_BYTES = 1 << 30  # a shard takes files of units until it has as many; memory holds it once
SIMILAR, NEAR, SAME = 1, 2, 3  # kinds of copies: the first ones are kept and reported
COPIES = {
    SIMILAR: "documents_similar",
    NEAR: "documents_near_duplicate",
    SAME: "documents_duplicate",
}
PASSAGE = 1000  # tokens: document frequencies count passages, as most tokens occur in every book


class RowsFile(NamedTuple):
    """A file of rows of a unit, and of which kind of copy each of its D documents is, (D,) uint8, or 0."""

    folder: Path
    number: int
    kinds: np.ndarray

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / f"rows-{self.number}.arrow"

    @property
    def kept(self) -> np.ndarray:
        """(D,) bool: the documents that stay."""
        return self.kinds <= SIMILAR

    def documents(self) -> np.ndarray:
        """Returns the documents' entries of `build.DOCUMENT`, (D,)."""
        table = np.load(self.folder / DOCUMENTS_FILE)
        return table[table["file"] == self.number]


class Merged(NamedTuple):
    """Content of the merged corpus."""

    shards: list[dict[str, Any]]  # the manifest's entries, with their counts by source
    frequency: np.ndarray  # (V,) number of passages that contain each token
    ledger: Ledger
    dropped: list[Path]  # files of all text that is left out, if it is to be kept


def merge(
    folders: list[Path],
    copies: list[np.ndarray],
    output: Path,
    vocabulary_size: int,
    shard_bytes: int,
    pool: Pool,
) -> Merged:
    """Writes the shards of all units into `output`, without `copies`, which `find_copies` returns."""
    groups, size, ledger = list[list[RowsFile]](), float(shard_bytes), Ledger()
    for folder, kinds in zip(folders, copies, strict=True):
        ledger.merge(read_json(folder / "drops.json"))
        table = np.load(folder / DOCUMENTS_FILE)
        numbers = table["file"]
        for number in np.unique(numbers).tolist():
            inside = slice(*numbers.searchsorted([number, number + 1]))  # a view takes no memory
            file = RowsFile(folder, number, kinds[inside])
            characters = table["characters"][inside]
            if size >= shard_bytes and file.kept.any():
                groups.append([])
                size = 0
            groups[-1].append(file)
            share = characters[file.kept].sum() / max(1, characters.sum())
            size += file.path.stat().st_size * share
    targets = [output / f"shard-{number:05d}.arrow" for number in range(len(groups))]
    calls = [(*both, vocabulary_size) for both in zip(targets, groups, strict=True)]
    records = dict(run_all(write_group, calls, pool))
    for path in set(output.glob(f"shard-{5 * '[0-9]'}*.arrow")) - set(targets):
        path.unlink()  # of a run with other input that was stopped
    shards, frequency = list[dict[str, Any]](), np.zeros(vocabulary_size, np.int64)
    dropped = [folder / DROPPED_TEXT for folder in folders]
    for _, record in sorted(records.items()):
        written = read_json(record)
        shards.append(written["shard"])
        ledger.merge(written["copies"])
        frequency += np.load(record.with_suffix(".npy"))
        dropped.append(record.with_suffix(".jsonl"))
    ledger.close("the corpus")
    return Merged(shards, frequency, ledger, dropped)


def write_group(target: Path, files: list[RowsFile], vocabulary_size: int) -> Path:
    """Writes the documents of several files that stay as a shard, and beside the units a record of it.

    Returns the record's path: the manifest's entry, and the ledger of the copies that go. Files of the same name hold
    the document frequencies and, with `keep_dropped`, the copies. A merge that was stopped goes on after the last one.
    """
    digest = hashlib.blake2b(target.name.encode(), digest_size=12)
    for file in files:
        digest.update(f"{file.folder.name}/{file.number}".encode() + file.kinds.tobytes())
    record = files[0].folder.with_name(f"{digest.hexdigest()}.json")
    if record.exists() and target.exists():
        state = target.stat()
        if read_json(record)["state"] == [state.st_size, state.st_mtime_ns]:
            return record
    keeps_text = (files[0].folder / DROPPED_TEXT).exists()
    with open_dropped(record.with_suffix(".jsonl"), keeps_text) as text:
        copies = Ledger(file=text)
        for file in files:
            _count_copies(file, copies)
    with TemporaryDirectory(prefix=f".{record.stem}.", dir=record.parent) as scratch:
        fresh = Path(scratch, target.name)  # which a later run removes if this one is killed
        join_shards(fresh, _without_copies(files, Path(scratch)))
        fresh.replace(target)
    frequency = np.zeros(vocabulary_size, np.int32)
    counts = _describe(target, [file.documents()["rows"][file.kept] for file in files], frequency)
    with atomic_write(record.with_suffix(".npy"), "wb") as array:
        np.save(array, frequency)
    state = target.stat()
    entry = {"name": target.name, **counts, **file_entry(target)}
    done = {"shard": entry, "copies": copies.to_json(), "state": [state.st_size, state.st_mtime_ns]}
    write_json(record, done)
    return record


def _count_copies(file: RowsFile, ledger: Ledger) -> None:
    """Enters the copies of a file into the ledger, and the documents that are joined from several."""
    shard, documents = Shard(file.path), file.documents()
    last_rows, members = np.cumsum(documents["rows"]) - 1, documents["members"]
    for i in np.flatnonzero((file.kinds > 0) | (members > 1)).tolist():
        row, number = shard.row(int(last_rows[i])), int(members[i])
        lost = 0 if file.kept[i] else int(documents["characters"][i])
        if file.kinds[i]:
            ledger.add(COPIES[int(file.kinds[i])], row, row.title, lost, number)
            ledger.keep(row.source, -lost)
        if number > 1 and file.kept[i]:
            ledger.add("joined_documents", row, row.title, 0, number)


def _without_copies(files: list[RowsFile], scratch: Path) -> list[Path]:
    """Returns the files of rows; those with copies are written again without them, in `scratch`."""
    paths = list[Path]()
    for number, file in enumerate(files):
        if file.kept.all():
            paths.append(file.path)
        elif file.kept.any():
            paths.append(scratch / f"{number}.arrow")
            rows = np.repeat(file.kept, file.documents()["rows"])
            filter_shard(paths[-1], file.path, rows)
    return paths


def _describe(path: Path, rows: list[np.ndarray], frequency: np.ndarray) -> dict[str, Any]:
    """Returns the counts of a shard whose documents have `rows`, (D,), and adds its passages to `frequency`, (V,)."""
    shard = Shard(path)
    ends = np.zeros(len(shard.hashes), bool)
    ends[np.cumsum(np.concatenate(rows)) - 1] = True
    columns = {"documents": ends, "rows": np.ones_like(ends)}
    columns |= {"sentences": np.diff(shard.row_starts), "tokens": shard.num_tokens}
    columns["passages"] = _count_passages(shard, frequency)
    sources = {}
    for code, name in enumerate(shard.source_names):
        inside = shard.source_codes == code
        sources[name] = {key: int(column[inside].sum()) for key, column in columns.items()}
    return {**{key: int(column.sum()) for key, column in columns.items()}, "sources": sources}


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


def file_entry(path: Path) -> dict[str, Any]:
    """Returns the entry of a file in the manifest."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def find_copies(
    folders: list[Path], exact: bool, near: Literal["keep", "report", "drop"], pool: Pool
) -> list[np.ndarray]:
    """Returns for each unit, (D,) uint8, which documents are copies of earlier ones: a key of `COPIES`, or 0.

    They have a hash of an earlier one in a column of its unit. A document of which an earlier one is a near copy is one
    itself, also if that one goes. A call finds those of some ranges of hashes: so each hash is read once, and no
    process holds all of them.
    """
    starts = np.stack([np.load(folder / build.RANGES_FILE) for folder in folders])
    sizes = starts[:, 0, -1].tolist()  # of (U, C, RANGES + 1)
    kinds, parts = np.zeros(sum(sizes), np.uint8), min(build.RANGES, 1 + sum(sizes) // PART)
    columns = [0] if exact else []
    columns += range(1, 1 if near == "keep" else 1 + BANDS)
    cuts = [part * build.RANGES // parts for part in range(parts + 1)]
    calls = [
        (column, folders, sizes, starts[:, column, first], starts[:, column, last])
        for column in columns
        for first, last in pairwise(cuts)
    ]
    for number, found in run_all(copies_in_part, calls, pool):
        kind = (NEAR if near == "drop" else SIMILAR) if columns[number // parts] else SAME
        kinds[found] = np.maximum(kinds[found], kind)
    return np.split(kinds, np.cumsum(sizes)[:-1])


def copies_in_part(
    column: int, folders: list[Path], sizes: list[int], starts: np.ndarray, stops: np.ndarray
) -> np.ndarray:
    """Returns the indices, over all units, of documents of which an earlier one has the same hash in a column.

    Of a unit of `sizes` documents it takes the hashes from `starts` to `stops`, (U,), in the order of the hashes.
    """
    hashes, indices, before = list[np.ndarray](), list[np.ndarray](), 0
    for folder, size, start, stop in zip(
        folders, sizes, starts.tolist(), stops.tolist(), strict=True
    ):
        place, count = column * size + start, stop - start
        hashes.append(np.fromfile(folder / build.HASHES_FILE, np.uint64, count, offset=8 * place))
        documents = np.fromfile(folder / build.ORDER_FILE, np.uint32, count, offset=4 * place)
        indices.append(documents + np.int64(before))
        before += size
    joined = np.concatenate(hashes)
    order = np.argsort(joined, kind="stable")  # equal hashes stay in the order of the input
    is_copy = joined[order[1:]] == joined[order[:-1]]
    return np.concatenate(indices)[order[1:][is_copy]]
