"""Reads and writes corpus folders: data preparation writes them, pretraining reads them. Imports no torch.

A folder holds manifest.json, written last, shards (Arrow IPC files of one record batch), document_frequency.npy and a
tokenizer; docs/data.md describes the columns. A shard row holds one document; a document of more than `MAX_TOKENS`
tokens takes several consecutive rows. Code counts rows, people count documents.
"""

import errno
import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from multicls.errors import UserError, first_line
from multicls.files import atomic_write, read_json, sha256_of
from multicls.tokenization import FACET

MANIFEST = "manifest.json"
FORMAT_VERSION = 6
MAX_TOKENS = (1 << 16) - 1  # tokens in a row; a count then fits into uint16


class ShardRow(NamedTuple):
    """One row of a shard: N tokens in S sentences; the arrays are read-only views when read from a shard."""

    source: str
    id: str  # name of the document in its source
    title: str
    hash: int  # of the document's text, equal in all its rows
    tokens: np.ndarray  # (N,) uint16 or uint32
    offsets: np.ndarray  # (S + 1,) int32; sentence s is tokens[offsets[s] : offsets[s + 1]]
    counts: np.ndarray  # (N,) uint16, how often each token occurs in the row


class Shard:
    """One memory-mapped shard of R rows, S sentences and N tokens: flat views, no copies.

    Attributes:
        num_tokens, hashes: (R,) uint32 and uint64, tokens in each row and hash of its document.
        row_starts: (R + 1,) int32; row r has the sentences `row_starts[r]` to `row_starts[r + 1] - 1`.
        sentence_starts: (S + 1,) int32; sentence s is `tokens[sentence_starts[s]:sentence_starts[s + 1]]`.
        tokens, counts: (N,), the tokens and how often each occurs in its row.
        source_names, source_codes: names of the sources, and (R,) int32, each row's index among them.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
            outer = self.batch.column("tokens")
            self.num_tokens: np.ndarray = self.batch.column("num_tokens").to_numpy()
            self.hashes: np.ndarray = self.batch.column("hash").to_numpy()
            self.counts: np.ndarray = self.batch.column("counts").values.to_numpy()
            self.source_names: list[str] = self.batch.column("source").dictionary.to_pylist()
            self.source_codes: np.ndarray = self.batch.column("source").indices.to_numpy()
        except (pa.ArrowException, FileNotFoundError, KeyError) as error:
            raise UserError(f"{path}: not a readable shard ({error}); prepare it again.") from None
        except OSError as error:
            # Arrow drops the error number of mmap. Others may pass, as those of a shared disk do.
            if error.errno != errno.EMFILE and "Memory mapping" not in str(error):
                raise
            raise UserError(
                f"{path}: a process maps each shard into memory, but the system allows no more ({first_line(error)}); "
                "raise the limit of maps (sysctl vm.max_map_count), open files (ulimit -n) or memory (ulimit -v)."
            ) from None
        self.row_starts: np.ndarray = outer.offsets.to_numpy()
        self.sentence_starts: np.ndarray = outer.values.offsets.to_numpy()
        self.tokens: np.ndarray = outer.values.values.to_numpy()

    @property
    def begins(self) -> np.ndarray:
        """(R,) bool: the rows that begin a document; a shard has all rows of a document."""
        begins, ids = np.append(True, np.diff(self.hashes) != 0), self.batch["id"]
        for row in np.flatnonzero(~begins).tolist():  # a part of a long document, or a copy
            begins[row] = ids[row] != ids[row - 1]
        return begins

    def row(self, number: int) -> ShardRow:
        """Returns row `number`."""
        first, last = self.row_starts[number], self.row_starts[number + 1]
        offsets = self.sentence_starts[first : last + 1]
        span = slice(offsets[0], offsets[-1])
        source, name, title = (str(self.batch[key][number]) for key in ("source", "id", "title"))
        arrays = self.tokens[span], offsets - offsets[0], self.counts[span]
        return ShardRow(source, name, title, int(self.hashes[number]), *arrays)


def occurrences(tokens: np.ndarray) -> np.ndarray:
    """Returns how often each token of a row occurs in it, (N,) uint16; the row has at most `MAX_TOKENS` tokens."""
    return np.bincount(tokens)[tokens].astype(np.uint16)


def write_shard(path: str | Path, rows: Sequence[ShardRow]) -> None:
    """Writes rows, at least one, as one shard, atomically; the same rows give the same bytes."""
    write_tables(path, [table_of(rows)])


def table_of(rows: Sequence[ShardRow]) -> pa.Table:
    """Returns rows, at least one, as the columns of a shard, which take a tenth of the memory of short rows."""
    sentences = np.array([len(row.offsets) - 1 for row in rows])
    lengths = np.concatenate([np.diff(row.offsets) for row in rows])
    tokens = pa.array(np.concatenate([row.tokens for row in rows]))
    num_tokens = np.array([len(row.tokens) for row in rows], np.uint32)
    columns = {
        "source": pa.array([row.source for row in rows], pa.string()).dictionary_encode(),
        "id": pa.array([row.id for row in rows], pa.string()),
        "title": pa.array([row.title for row in rows], pa.string()),
        "hash": pa.array([row.hash for row in rows], pa.uint64()),
        "num_tokens": pa.array(num_tokens),
        "tokens": _lists(sentences, _lists(lengths, tokens)),
        "counts": _lists(num_tokens, pa.array(np.concatenate([row.counts for row in rows]))),
    }
    return pa.table(columns)


def join_shards(path: str | Path, parts: Sequence[Path]) -> None:
    """Writes the rows of several shards as one, atomically. It takes as much memory as that one."""
    write_tables(path, list(map(_mapped, parts)))


def filter_shard(path: str | Path, part: Path, kept: np.ndarray) -> None:
    """Writes the rows of a shard that `kept`, (R,) bool, marks as another shard, atomically."""
    table = _mapped(part).filter(pa.array(kept))
    source = table["source"].cast(pa.string()).dictionary_encode()  # of the sources that stay
    write_tables(path, [table.set_column(0, "source", source)])


def _mapped(path: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def write_tables(path: str | Path, tables: Sequence[pa.Table]) -> None:
    """Writes the rows of tables as one shard, atomically. It takes as much memory as that one."""
    table = pa.concat_tables(tables).unify_dictionaries().combine_chunks()
    (batch,) = table.to_batches()
    with atomic_write(path, "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def _lists(lengths: np.ndarray, values: pa.Array) -> pa.ListArray:
    """Returns the values as lists of these lengths."""
    starts = np.cumsum(np.pad(lengths, (1, 0)), dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(starts), values)


class Corpus:
    """A finished corpus folder of `num_rows` rows in shards, which `shard(number)` returns. Opening it is cheap.

    Raises:
        UserError: the manifest does not exist or is of another format, or a file is missing or has another size.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        if not (path / MANIFEST).is_file():
            raise UserError(
                f"{path}: not a finished corpus (no {MANIFEST}); make it with `python data_prep/run.py`, or run that "
                "again if it was interrupted."
            )
        self.manifest = manifest = read_json(path / MANIFEST)
        version = manifest.get("format_version") if isinstance(manifest, dict) else None
        if version != FORMAT_VERSION:
            reason = ""
            if isinstance(version, int) and version < FORMAT_VERSION:
                reason = (
                    " (before it, each sentence was tokenized alone, without the space before it)"
                )
            raise UserError(
                f"{path}: corpus format {version}, but this program reads format {FORMAT_VERSION}{reason}; "
                "remove the folder and prepare it again."
            )
        shards: list[dict[str, Any]] = manifest["shards"]
        named = {shard["name"]: shard for shard in shards}
        self.files: dict[str, dict[str, Any]] = named | manifest["files"]  # all but the manifest
        for name in manifest["files"]:  # few; a shard is looked at when it is mapped
            self._check_size(name)
        self.num_shards = len(shards)
        self.num_documents: int = manifest["documents"]  # one that takes several rows counts once
        self.vocabulary_size: int = manifest["tokenizer"]["vocabulary_size"]  # V, with added tokens
        self.tokenizer_fingerprint: str = manifest["tokenizer"]["fingerprint"]
        made_from = manifest.get("made_from", {}).get("input", {})
        self.validation_sources = frozenset(made_from.get("validation_sources", ()))
        self.first_rows = [0, *accumulate(shard["rows"] for shard in shards)]  # (shards + 1,)
        self.num_rows = self.first_rows[-1]
        # N of the inverse document frequency; older corpora count rows.
        self.num_passages: int = manifest.get("passages", self.num_rows)
        self._names = [shard["name"] for shard in shards]
        self._shards: dict[int, Shard] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Corpus, (self.path,)  # each worker process maps the files itself

    def _check_size(self, name: str) -> None:
        """Raises a UserError if a file of the manifest is missing or has another size."""
        path, size = self.path / name, self.files[name]["bytes"]
        if not path.is_file() or path.stat().st_size != size:
            raise UserError(
                f"{path}: missing, or not of {size} bytes as {MANIFEST} says; prepare the corpus again."
            )

    def shard(self, number: int) -> Shard:
        """Returns shard `number`, mapped on first use. Raises UserError if it is missing or has another size."""
        if number not in self._shards:
            self._check_size(self._names[number])
            self._shards[number] = Shard(self.path / self._names[number])
        return self._shards[number]

    def verify(self) -> None:
        """Reads each file and compares its SHA-256 with the manifest; a `UserError` names all that differ."""
        if problems := [
            f"{self.path / name}: the bytes have changed since the file was written."
            for name, entry in self.files.items()
            if sha256_of(self.path / name) != entry["sha256"]
        ]:
            raise UserError(*problems)

    def locate(self, number: int) -> tuple[int, int]:
        """Returns the number of the shard that holds row `number`, and the row's index in it. Raises UserError."""
        if not 0 <= number < self.num_rows:
            raise UserError(f"{self.path}: no row {number}; the last row is {self.num_rows - 1}.")
        shard = bisect_right(self.first_rows, number) - 1
        return shard, number - self.first_rows[shard]

    def row(self, number: int) -> ShardRow:
        """Returns row `number` of the corpus, counted from 0. Raises UserError."""
        shard, row = self.locate(number)
        return self.shard(shard).row(row)

    def validation_limit(self, fraction: float) -> float:
        """Returns the limit of `held_out_share` below which a document belongs to the validation split.

        The limit is `fraction`. If no document falls below a fraction above 0, as happens in small corpora, the limit
        is raised to hold out the document with the smallest hash, unless the corpus has no other document.
        """
        hashes = [self.shard(number).hashes for number in range(self.num_shards)]
        ends = np.array([min(map(np.min, hashes)), max(map(np.max, hashes))])
        smallest, largest = map(float, held_out_share(ends))
        if fraction <= 0 or smallest < fraction or smallest == largest:
            return fraction
        return math.nextafter(smallest, 1.0)

    def held_out(self, number: int, limit: float, rows: slice = slice(None)) -> np.ndarray:
        """Returns which rows of shard `number`, all or a slice of them, belong to the validation split, (R,) bool.

        They are those of `validation_sources`, if there are any; else `limit`, from `validation_limit`, decides.
        """
        shard = self.shard(number)
        if self.validation_sources:
            chosen = [name in self.validation_sources for name in shard.source_names]
            return np.array(chosen)[shard.source_codes[rows]]
        return held_out_share(shard.hashes[rows]) < limit

    @cached_property
    def document_frequency(self) -> np.ndarray:
        """(V,) int64: number of passages (`num_passages` in all) that contain each token."""
        return np.load(self.path / "document_frequency.npy", allow_pickle=False)


def held_out_share(hashes: np.ndarray) -> np.ndarray:
    """Maps hashes of documents to uniform numbers in [0, 1).

    A document is held out for validation if its number is below `Corpus.validation_limit`. A larger fraction therefore
    holds out the same documents and more.
    """
    return (hashes >> np.uint64(11)) * 2.0**-53


def tokenizer_fingerprint(tokenizer_json: str) -> str:
    """Returns the SHA-256 of the parts that decide the token ids of a text.

    These are normalizer, pre-tokenizer, model and the added tokens that are words. Special tokens and the
    post-processor do not affect corpus text. A tokenizer therefore keeps its fingerprint when facet tokens are added.
    """
    parts = json.loads(tokenizer_json)
    deciding = {name: parts[name] for name in ("normalizer", "pre_tokenizer", "model")}
    if words := [
        [token["content"], token["id"]]
        for token in parts.get("added_tokens") or []
        if not token["special"] and not FACET.fullmatch(token["content"])
    ]:
        deciding["words"] = sorted(words)
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode("utf-8")).hexdigest()
