"""The corpus folder while it is being written: whole shards, the open one, and how a stopped run goes on.

progress.json        what is written so far, and up to where the input is read; gone when the manifest is there
progress-00007.npz   the lines watched for boilerplate behind shard 7; gone as well
.lock                held by the run that writes
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.cleaning import Dropped, Drops
from data_prep.duplicates import Duplicates, RepeatedLines
from data_prep.readers import RawDocument
from data_prep.worker import Text, rows_of
from multicls.corpus import Shard, ShardRow, write_shard
from multicls.errors import UserError
from multicls.files import atomic_write, read_json, sha256_of, write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROGRESS = "progress.json"
LINES = "progress-{:05d}.npz"
LOCK = ".lock"
SHARD_PIECES = 1 << 24  # a shard is closed when it holds as many pieces: 67 MB of uint16 with their counts


@dataclass
class CorpusWriter:
    """Takes prepared chunks in the order of the input, leaves duplicates out, and writes shards.

    Attributes:
        folder: the corpus folder.
        identity: what the corpus is made from, besides the text.
        listing: [source, name, format, size, revision] of every input file.
        tokenizer: of the pieces.
        saved: what an interrupted run left, see `unfinished`.
        drops: what has been dropped so far.
        shards: what the manifest will say of each whole shard.
        sources: documents, sentences and pieces by source.
        position: number of the input file and documents of it that have been taken.
    """

    folder: Path
    identity: dict[str, Any]
    listing: list[Any]
    tokenizer: Tokenizer
    saved: dict[str, Any]
    drops: Drops = field(default_factory=Drops)
    shards: list[dict[str, Any]] = field(default_factory=list)
    sources: dict[str, dict[str, int]] = field(default_factory=dict)
    position: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.duplicates = Duplicates(self.identity["near_duplicates"] is not None)
        self.repeated = RepeatedLines()
        self.frequency = np.zeros(self.tokenizer.get_vocab_size(with_added_tokens=True), np.int64)
        self._open: list[ShardRow] = []
        self._open_documents = 0
        self._keys: list[np.ndarray] = []
        self._open_pieces = 0
        if self.saved:
            self._restore()
        else:
            self._save()

    def _restore(self) -> None:
        self.position = tuple(self.saved["position"])
        self.shards, self.sources = self.saved["shards"], self.saved["sources"]
        self.drops.counts = Counter(self.saved["dropped"])
        for reason, samples in self.saved["samples"].items():
            self.drops.samples[reason] = [(key, Dropped(*sample)) for key, sample in samples]
        for torn in self.folder.glob(".*"):  # files that a killed run was writing
            if torn.name != LOCK:
                torn.unlink()
        for entry in self.shards:
            shard = Shard(self.folder / entry["name"])
            self._count_rows(shard.tokens, shard.counts)
            self.duplicates.remember(shard.keys)
        if self.shards:
            with np.load(self.folder / LINES.format(len(self.shards)), allow_pickle=False) as state:
                self.repeated = RepeatedLines(state["hashes"], state["counts"])

    def add(self, texts: list[Text], drops: Drops, position: tuple[int, int]) -> None:
        """Takes the next chunk of the input, which ends at `position`."""
        self.drops.merge(drops)
        self.position = position
        reasons = self.duplicates.check([text.keys for text in texts])
        kept_keys = []
        for text, reason in zip(texts, reasons, strict=True):
            if reason == "documents_duplicate" and "duplicate_documents" not in self.identity["rules"]:
                reason = ""
            if reason:
                self._drop(reason, text)
            elif kept := self._without_repeated_lines(text):
                self._keep(kept)
                kept_keys.append(kept.keys)
        if kept_keys:
            self.duplicates.remember(np.stack(kept_keys))
        if self._open_pieces >= SHARD_PIECES:
            self.close_shard()

    def _keep(self, text: Text) -> None:
        self._open += text.rows
        self._keys += [text.keys] * len(text.rows)
        self._open_documents += 1
        counts = self.sources.setdefault(text.rows[0].source, {"documents": 0, "rows": 0, "sentences": 0, "tokens": 0})
        counts["documents"] += 1
        counts["rows"] += len(text.rows)
        for row in text.rows:
            self._open_pieces += len(row.tokens)
            counts["sentences"] += len(row.offsets) - 1
            counts["tokens"] += len(row.tokens)

    def _drop(self, reason: str, text: Text, shown: str = "") -> None:
        row = text.rows[0]
        self.drops.add(reason, RawDocument(row.source, row.id, row.title, "", ""), shown or row.title or row.id)

    def _without_repeated_lines(self, text: Text) -> Text | None:
        """The document without lines that are boilerplate by now; None if too little is left."""
        hashes = list(dict.fromkeys(text.lines[:, 0].tolist()))
        repeated = {line for line, found in zip(hashes, self.repeated.add(hashes), strict=True) if found}
        if not repeated:
            return text
        lengths = np.concatenate([np.diff(row.offsets) for row in text.rows])
        pieces = np.concatenate([row.tokens for row in text.rows])
        starts = np.concatenate([[0], np.cumsum(lengths)])
        kept = np.ones(len(lengths), bool)
        for line, first, end in text.lines.tolist():
            if line in repeated:
                kept[first:end] = False
                shown = pieces[starts[first] : starts[end]]
                self._drop("lines_repeated", text, self.tokenizer.decode(shown.tolist()))
        if kept.sum() < self.identity["min_sentences"]:
            self._drop("documents_too_short", text)
            return None
        row = text.rows[0]
        rows = rows_of(row.source, row.id, row.title, row.hash, pieces[np.repeat(kept, lengths)], lengths[kept])
        return text._replace(rows=rows)

    def close_shard(self) -> None:
        """Writes the open shard and then, atomically, that it is there."""
        if not self._open:
            return
        name = f"shard-{len(self.shards):05d}.arrow"
        write_shard(self.folder / name, self._open, np.stack(self._keys)[:, 1:])
        pieces = np.concatenate([row.tokens for row in self._open])
        self._count_rows(pieces, np.concatenate([row.counts for row in self._open]))
        sizes = {
            "documents": self._open_documents,
            "rows": len(self._open),
            "sentences": sum(len(row.offsets) - 1 for row in self._open),
            "tokens": len(pieces),
        }
        self.shards.append({"name": name, **sizes, **checksum(self.folder / name)})
        self._open, self._keys, self._open_pieces, self._open_documents = [], [], 0, 0
        self._save()

    def _count_rows(self, pieces: np.ndarray, counts: np.ndarray) -> None:
        """Adds a shard to the document frequencies: in a row, c occurrences of a piece weigh 1/c each, one together."""
        weights = np.bincount(pieces, weights=1.0 / counts, minlength=len(self.frequency))
        self.frequency += np.rint(weights).astype(np.int64)

    def _save(self) -> None:
        number = len(self.shards)
        if number:
            hashes, counts = self.repeated.state()
            with atomic_write(self.folder / LINES.format(number), "wb") as file:
                np.savez(file, hashes=hashes, counts=counts)
        state = {
            "made_from": self.identity,
            "position": self.position,
            "read": _read_part(self.listing, self.position),
            "shards": self.shards,
            "sources": self.sources,
            "dropped": self.drops.counts,
            "samples": self.drops.samples,
        }
        write_json(self.folder / PROGRESS, state)
        (self.folder / LINES.format(number - 1)).unlink(missing_ok=True)


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Keeps the folder to this process.

    Raises:
        UserError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--output {folder}: another run is writing this corpus; wait for it or stop it.") from None
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)


def unfinished(output: Path, identity: dict[str, Any], listing: list[Any]) -> dict[str, Any]:
    """What an interrupted run of the same settings left, else nothing.

    Raises:
        UserError: the folder holds other things, or an unfinished corpus of other settings or input.
    """
    if (output / PROGRESS).exists():
        saved: dict[str, Any] = read_json(output / PROGRESS)
        if saved["made_from"] == identity and saved["read"] == _read_part(listing, saved["position"]):
            return saved
        raise UserError(
            f"{output}: holds an unfinished corpus of other input or settings; remove it or give another --output."
        )
    if output.exists() and (not output.is_dir() or any(path.name != LOCK for path in output.iterdir())):
        raise UserError(f"{output}: exists and is no corpus; give an --output that is new or empty.")
    return {}


def _read_part(listing: list[Any], position: Sequence[int]) -> str:
    """Digest of the input up to a position; what comes behind may change: a damaged file be repaired or left out."""
    number, documents = position
    current = [entry[:3] for entry in listing[number : number + 1]] if documents else []
    return hashlib.sha256(json.dumps([listing[:number], current]).encode("utf-8")).hexdigest()


def checksum(path: Path) -> dict[str, Any]:
    """What the manifest says about a file: its size and SHA-256."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
