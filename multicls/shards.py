"""The corpus folder that data preparation writes and pretraining reads. Imports neither torch nor transformers.

    corpus/
      manifest.json            written last: without it the folder is no corpus
      shard-00000.arrow ...    Arrow IPC files of one record batch each, memory-mapped
      document_frequency.npy   (V,) int64: documents that hold a piece
      tokenizer.json, tokenizer_config.json

A row of a shard is a document, or one of several consecutive runs of a long one: `source` (dictionary-encoded), `id`,
`title` (strings), `hash` (uint64 of the document's text, the same for all its runs), `num_pieces` (uint32), `pieces`
(list<list<uint16 or uint32>>: sentences of piece ids) and `counts` (list<uint16>: for every piece, how often it occurs
in the row).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from multicls.errors import UserError
from multicls.files import atomic_write, read_json, sha256_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MANIFEST = "manifest.json"
FORMAT = "multicls-corpus"
FORMAT_VERSION = 2
MAX_PIECES = (1 << 16) - 1  # of a row, so that `counts` hold them; a longer document takes several rows


class Document(NamedTuple):
    """A row of a shard: N pieces in S sentences.

    `pieces` (N,) and `counts` (N,) are read-only views of the memory-mapped shard; sentence s is
    `pieces[offsets[s]:offsets[s + 1]]`, `offsets` being (S + 1,) int32.
    """

    source: str
    id: str
    title: str
    hash: int
    pieces: np.ndarray
    offsets: np.ndarray
    counts: np.ndarray


class Shard:
    """One memory-mapped shard: flat views, no copies.

    Attributes:
        num_pieces: (documents,) uint32.
        hashes: (documents,) uint64.
        documents: (documents + 1,) int32, where a document's sentences begin in `sentences`.
        sentences: (sentences + 1,) int32, where a sentence's pieces begin in `pieces`.
        pieces: (pieces,) uint16 or uint32.
        counts: (pieces,) uint16, how often the piece at the same place occurs in its row.
        source_names: names of the sources in this shard.
        source_codes: (documents,) int32, each row's place in `source_names`.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
            outer = self.batch.column("pieces")
            self.num_pieces: np.ndarray = self.batch.column("num_pieces").to_numpy()
            self.hashes: np.ndarray = self.batch.column("hash").to_numpy()
            self.counts: np.ndarray = self.batch.column("counts").values.to_numpy()
            self.source_names: list[str] = self.batch.column("source").dictionary.to_pylist()
            self.source_codes: np.ndarray = self.batch.column("source").indices.to_numpy()
        except (pa.ArrowException, OSError, KeyError) as error:
            raise UserError(f"{path}: not a readable shard ({error}); prepare the corpus again.") from None
        self.documents: np.ndarray = outer.offsets.to_numpy()
        self.sentences: np.ndarray = outer.values.offsets.to_numpy()
        self.pieces: np.ndarray = outer.values.values.to_numpy()

    def document(self, row: int) -> Document:
        """The document in row `row`."""
        first, last = self.documents[row], self.documents[row + 1]
        offsets = self.sentences[first : last + 1]
        pieces = self.pieces[offsets[0] : offsets[-1]]
        source, name, title = (str(self.batch.column(column)[row]) for column in ("source", "id", "title"))
        counts = self.counts[offsets[0] : offsets[-1]]
        return Document(source, name, title, int(self.hashes[row]), pieces, offsets - offsets[0], counts)

    @property
    def keys(self) -> np.ndarray:
        """(documents, 1 or more) uint64: `hashes` and, where near-duplicates were looked for, the MinHash bands."""
        columns = [self.hashes]
        if "minhash" in self.batch.schema.names:
            columns += list(self.batch.column("minhash").values.to_numpy().reshape(len(self.hashes), -1).T)
        return np.stack(columns, axis=1)


def occurrences(pieces: np.ndarray) -> np.ndarray:
    """(N,) uint16: for every piece of a row of at most `MAX_PIECES`, how often it occurs there."""
    counts: np.ndarray = np.bincount(pieces)[pieces].astype(np.uint16)
    return counts


def write_shard(path: str | Path, documents: Sequence[Document], minhash: np.ndarray | None = None) -> None:
    """Writes documents as one shard, atomically; the same documents give the same bytes.

    Args:
        minhash: (documents, bands) uint64, kept so that a stopped search for near-duplicates can go on.
    """
    sentences = [len(document.offsets) - 1 for document in documents]
    lengths = np.concatenate([np.diff(document.offsets) for document in documents])
    values = np.concatenate([document.pieces for document in documents])
    inner = pa.ListArray.from_arrays(pa.array(_starts(lengths)), pa.array(values))
    counts = pa.array(np.concatenate([document.counts for document in documents]))
    num_pieces = np.array([len(document.pieces) for document in documents], np.uint32)
    columns = {
        "source": pa.array([document.source for document in documents], pa.string()).dictionary_encode(),
        "id": pa.array([document.id for document in documents], pa.string()),
        "title": pa.array([document.title for document in documents], pa.string()),
        "hash": pa.array(np.array([document.hash for document in documents], np.uint64)),
        "num_pieces": pa.array(num_pieces),
        "pieces": pa.ListArray.from_arrays(pa.array(_starts(np.array(sentences))), inner),
        "counts": pa.ListArray.from_arrays(pa.array(_starts(num_pieces)), counts),
    }
    if minhash is not None and minhash.shape[1]:
        columns["minhash"] = pa.FixedSizeListArray.from_arrays(pa.array(minhash.ravel()), minhash.shape[1])
    batch = pa.record_batch(columns)
    with atomic_write(path, "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def _starts(lengths: np.ndarray) -> np.ndarray:
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts


class Corpus:
    """A finished corpus folder. Cheap to open; shards are mapped when first used.

    Attributes:
        path: the folder.
        manifest: its manifest.json.
        num_documents: documents in all shards.
        starts: (shards + 1,) number of the first document of each shard.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self.starts = np.cumsum([0] + [shard["documents"] for shard in manifest["shards"]])
        self.num_documents = int(self.starts[-1])
        self._shards: list[Shard | None] = [None] * self.num_shards

    @classmethod
    def open(cls, path: str | Path) -> Corpus:
        """Opens a corpus folder, checking the manifest and that every file is there in its size.

        Raises:
            UserError: no such folder, no manifest (not a corpus, or an unfinished one), another format version, or
                files that are missing or of another size.
        """
        path = Path(path)
        if not path.is_dir():
            raise UserError(f"{path}: no such corpus folder; make one with `python data_prep/run.py`.")
        if not (path / MANIFEST).is_file():
            raise UserError(
                f"{path}: not a finished corpus (no {MANIFEST}); "
                "run data_prep/run.py with this --output, again if it was stopped."
            )
        manifest = read_json(path / MANIFEST)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise UserError(f"{path / MANIFEST}: not the manifest of a {FORMAT} folder.")
        if manifest.get("format_version") != FORMAT_VERSION:
            version = manifest.get("format_version")
            raise UserError(f"{path}: corpus format {version}, this program reads {FORMAT_VERSION}; prepare it again.")
        problems = [_size_problem(path / name, entry["bytes"]) for name, entry in _files(manifest).items()]
        if any(problems):
            raise UserError(*filter(None, problems))
        return cls(path, manifest)

    def __reduce__(self) -> tuple[Any, ...]:
        return Corpus.open, (self.path,)  # worker processes map the files themselves

    def verify(self) -> None:
        """Reads every file and compares its SHA-256 with the manifest's.

        Raises:
            UserError: all files that differ.
        """
        checksums = {self.path / name: entry["sha256"] for name, entry in _files(self.manifest).items()}
        differing = [path for path, checksum in checksums.items() if sha256_of(path) != checksum]
        if differing:
            raise UserError(*(f"{path}: its bytes have changed since it was written." for path in differing))

    @property
    def num_shards(self) -> int:
        """Shards in the folder."""
        return len(self.manifest["shards"])

    def shard(self, number: int) -> Shard:
        """Shard `number`, mapped on first use."""
        shard = self._shards[number]
        if shard is None:
            shard = self._shards[number] = Shard(self.path / self.manifest["shards"][number]["name"])
        return shard

    def locate(self, number: int) -> tuple[Shard, int]:
        """The shard of document `number`, and its row there.

        Raises:
            UserError: there is no such document.
        """
        if not 0 <= number < self.num_documents:
            raise UserError(f"{self.path}: no document {number}; there are 0 to {self.num_documents - 1}.")
        shard = int(np.searchsorted(self.starts, number, side="right")) - 1
        return self.shard(shard), number - int(self.starts[shard])

    def document(self, number: int) -> Document:
        """Document `number` of the corpus (0-based)."""
        shard, row = self.locate(number)
        return shard.document(row)

    @cached_property
    def document_frequency(self) -> np.ndarray:
        """(V,) int64: in how many documents a piece occurs."""
        frequency: np.ndarray = np.load(self.path / "document_frequency.npy", allow_pickle=False)
        return frequency

    @property
    def vocabulary_size(self) -> int:
        """V, added tokens included."""
        return int(self.manifest["tokenizer"]["vocabulary_size"])

    @property
    def tokenizer_fingerprint(self) -> str:
        """`tokenizer_fingerprint` of the tokenizer that made the pieces."""
        return str(self.manifest["tokenizer"]["fingerprint"])


def held_out_share(hashes: np.ndarray) -> np.ndarray:
    """Where documents stand in [0, 1), uniformly, by the hash of their text.

    Those below a validation fraction are that split's, so a larger fraction holds out the same documents and more.
    """
    share: np.ndarray = (hashes >> np.uint64(11)) * 2.0**-53
    return share


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """SHA-256 over what decides the pieces of a text: normalizer, pre-tokenizer, model and vocabulary.

    Added special tokens and the post-processor are left out: they do not touch corpus text, so a tokenizer with facet
    tokens on top has the fingerprint of the one below.
    """
    parts = json.loads(tokenizer.to_str())
    deciding = {name: parts[name] for name in ("normalizer", "pre_tokenizer", "model")}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode("utf-8")).hexdigest()


def _files(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {shard["name"]: shard for shard in manifest["shards"]} | manifest["files"]


def _size_problem(path: Path, size: int) -> str | None:
    if not path.is_file():
        return f"{path}: missing, though {MANIFEST} names it; prepare the corpus again."
    if path.stat().st_size != size:
        return f"{path}: {path.stat().st_size} bytes, but {MANIFEST} says {size}; prepare the corpus again."
    return None
