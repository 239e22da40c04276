"""Documents in, a corpus folder out: read, clean, split, tokenize in many processes, write in order.

    files -> documents -> chunks -> [processes: Worker.prepare] -> duplicates out -> rows -> shards -> manifest

The stream of documents has one order, that of the input, and everything that looks at more than one document
(duplicates, repeated lines, shards) happens in that order in this process. So the bytes depend neither on the number of
processes nor on where a run was stopped.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import shlex
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.cleaning import RULES, Dropped, Drops, clean
from data_prep.duplicates import Duplicates, RepeatedLines, check_near_duplicates
from data_prep.plan import check_disk, estimate
from data_prep.readers import RawDocument, Reading, ReadOptions
from data_prep.sentences import splitter_name
from data_prep.sources import SourceFile, find_files
from data_prep.worker import MIN_SENTENCES, Text, Worker, WorkSettings, prepare_in_order, rows_of
from multicls.errors import UserError
from multicls.files import append_jsonl, atomic_write, read_json, sha256_of, write_json
from multicls.shards import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    Document,
    Shard,
    tokenizer_fingerprint,
    write_shard,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROGRESS = "progress.json"  # what is written so far; gone when the manifest is there
LINES = "progress-{}.npz"  # the watched lines behind shard {}; gone as well
DROPPED = "dropped.json"  # samples of what was dropped, by reason
LOCK = ".lock"
SHARD_PIECES = 1 << 24  # a shard is closed when it holds as many pieces: 67 MB of uint16 with their counts
CHUNK_CHARACTERS = 1 << 19  # what a worker gets at a time
BYTES_A_PROCESS = 4_000_000  # of input; for less, starting a process takes longer than the work
SECONDS_A_LINE = 5.0
PACKAGES = ("mwparserfromhell", "numpy", "pyarrow", "sentencex", "tokenizers", "xxhash")


@dataclass(frozen=True)
class BuildSettings:
    """What decides the bytes of a corpus, together with the text itself.

    Attributes:
        input: see `sources.find_files`.
        tokenizer: folder with a tokenizer.json, such a file, or a hub id.
        format: see `sources.FORMATS`, or "auto".
        documents: see `readers.ReadOptions`.
        text_field: see `readers.ReadOptions`.
        language: of the sentence splitter, as ISO 639 code.
        without: cleaning rules that are left out, names out of `cleaning.RULES`.
        min_sentences: a document with fewer is dropped.
        near_duplicates: whether documents nearly the same as an earlier one are dropped.
    """

    input: tuple[str, ...]
    tokenizer: str
    format: str = "auto"
    documents: str = "file"
    text_field: str = "text"
    language: str = "en"
    without: tuple[str, ...] = ()
    min_sentences: int = MIN_SENTENCES
    near_duplicates: bool = False


def build(
    settings: BuildSettings,
    output: str | Path,
    processes: int = 1,
    log: Callable[[str], object] = print,
    plan_only: bool = False,
) -> Path:
    """Makes a corpus folder; a run that was stopped goes on behind its last whole shard.

    The bytes depend on the input, the settings and the package versions, never on `processes` or interruptions.

    Args:
        processes: worker processes; 1 works in this one.
        log: called with every line of progress.
        plan_only: only says what it would take.

    Returns:
        The folder.

    Raises:
        UserError: bad input or tokenizer (before anything is written, as far as a look at every file's head can tell),
            a folder that holds something else or that another run writes, or too little room on the disk.
    """
    output = Path(output)
    files = find_files(settings.input, settings.format)
    tokenizer_files = load_tokenizer_files(settings.tokenizer)
    worker = Worker(
        WorkSettings(
            tokenizer_json=tokenizer_files["tokenizer.json"].decode("utf-8"),
            rules=frozenset(RULES) - frozenset(settings.without),
            language=settings.language,
            min_sentences=settings.min_sentences,
            near_duplicates=settings.near_duplicates,
        )
    )
    listing = [[file.source, file.name, file.format, file.size, file.hub and file.hub.revision] for file in files]
    identity = _identity(settings, worker)
    if (output / MANIFEST).exists():
        _check_same(output, read_json(output / MANIFEST).get("made_from", {}), identity | _of_listing(listing))
        log(f"already finished: {output}")
        return output
    saved = _unfinished(output, identity, listing)
    stream = _Stream(files, ReadOptions(settings.documents, settings.text_field), saved)
    processes = min(processes, 1 + stream.bytes_total // BYTES_A_PROCESS) if stream.bytes_total else processes
    _log_plan(log, files, stream, worker, output, processes)
    if plan_only:
        return output
    with _lock(output), _named_disk_errors(output):
        corpus = _Corpus(output, identity, listing, worker.encoder.tokenizer, saved)
        try:
            _run(corpus, stream, worker, processes, tokenizer_files, log)
            _finish(corpus, worker, identity | _of_listing(listing), settings, [*tokenizer_files])
        except UserError:
            if not corpus.shards:
                shutil.rmtree(output)
            raise
    seconds = time.monotonic() - stream.started
    append_jsonl(output / "log.jsonl", {"seconds": round(seconds, 2), "processes": processes} | asdict(settings))
    log(f"{stream.line()}; done in {seconds:.1f} s: {output}")
    return output


def sentences_of(settings: BuildSettings, megabytes: float) -> Iterator[str]:
    """The cleaned sentences of the input, at most so many megabytes, with a like share from every file.

    Raises:
        UserError: bad input.
    """
    files = find_files(settings.input, settings.format)
    rules = frozenset(RULES) - frozenset(settings.without)
    drops = Drops()
    share = megabytes * 1e6 / max(sum(file.size for file in files), 1)
    for file in files:
        left = file.size * share or megabytes * 1e6 / len(files)
        for raw in Reading(file, ReadOptions(settings.documents, settings.text_field)):
            left -= len(raw.text)
            if not raw.dropped:
                yield from (sentence for line in clean(raw, rules, settings.language, drops) for sentence in line)
            if left < 0:
                break


def _log_plan(
    log: Callable[[str], object],
    files: list[SourceFile],
    stream: _Stream,
    worker: Worker,
    output: Path,
    processes: int,
) -> None:
    """Says what is to come.

    Raises:
        UserError: the disk cannot hold it.
    """
    plan = estimate(files, stream.options, worker)
    left = 1 - stream.bytes_done / max(stream.bytes_total, 1)
    free = check_disk(plan, output, left)
    if plan.text_bytes:
        minutes, seconds = divmod(int(plan.seconds * left / processes + 1), 60)
        log(
            f"plan: {len(files)} files, {plan.text_bytes / 1e6:,.1f} MB of text -> about {plan.pieces / 1e6:,.1f} M "
            f"pieces, {plan.disk_bytes / 1e6:,.1f} MB on disk ({free / 1e9:,.1f} GB free), "
            f"{minutes} min {seconds} s with {processes} processes"
        )
    else:
        log(f"plan: {len(files)} data sets of unknown size; {free / 1e9:,.1f} GB free on the disk")
    if stream.documents_before:
        log(f"resuming in {stream.files[stream.number]} behind document {stream.documents_before}")


class _Stream:
    """All documents of the input behind what an earlier run has written, and how far it is read.

    Attributes:
        number: the file being read.
        documents_before: documents that an earlier run has taken from it.
    """

    def __init__(self, files: list[SourceFile], options: ReadOptions, saved: dict[str, Any]) -> None:
        self.files = files
        self.options = options
        self.number, self.documents_before = saved.get("position", (0, 0))
        self.bytes_total = sum(file.size for file in files)
        self._finished = self.bytes_before = sum(file.size for file in files[: self.number])
        self.started = self._last = time.monotonic()
        self._reading: Reading | None = None

    @property
    def bytes_done(self) -> int:
        """Bytes of the input read so far."""
        return self._finished + (self._reading.position if self._reading else 0)

    def chunks(self) -> Iterator[tuple[tuple[int, int], list[RawDocument]]]:
        """Chunks of documents, each with the position (file, documents of it) behind it."""
        chunk: list[RawDocument] = []
        size = 0
        while self.number < len(self.files):
            taken = self.documents_before
            self._reading = Reading(self.files[self.number], self.options, skip=taken)
            for document in self._reading:
                taken += 1
                chunk.append(document)
                size += len(document.text) + 100
                if size >= CHUNK_CHARACTERS:
                    yield (self.number, taken), chunk
                    chunk, size = [], 0
            self._finished += self._reading.position
            self._reading, self.documents_before = None, 0
            self.number += 1
        if chunk:
            yield (self.number, 0), chunk

    def line(self) -> str:
        """A line of progress."""
        done, total = self.bytes_done / 1e6, self.bytes_total / 1e6
        speed = (done - self.bytes_before / 1e6) / max(time.monotonic() - self.started, 1e-9)
        left = f", eta {(total - done) / speed:.0f} s" if speed > 0 and done < total else ""
        return f"{done:.1f}{f' of {total:.1f}' if total else ''} MB, {speed:.2f} MB/s{left}"

    def due(self) -> bool:
        """Whether it is time for another line."""
        if time.monotonic() - self._last < SECONDS_A_LINE:
            return False
        self._last = time.monotonic()
        return True


def _run(
    corpus: _Corpus,
    stream: _Stream,
    worker: Worker,
    processes: int,
    tokenizer_files: dict[str, bytes],
    log: Callable[[str], object],
) -> None:
    """Reads what is left of the input into shards.

    Raises:
        UserError: nothing of the input can be kept.
    """
    for name, data in tokenizer_files.items():
        with atomic_write(corpus.folder / name, "wb") as file:
            file.write(data)
    positions: deque[tuple[int, int]] = deque()

    def chunks() -> Iterator[list[RawDocument]]:
        for position, chunk in stream.chunks():
            positions.append(position)
            yield chunk

    with _bar(stream) as show:
        for prepared in prepare_in_order(chunks(), worker, processes):
            corpus.add(prepared.texts, prepared.drops, positions.popleft())
            if show:
                show()
            elif stream.due():
                log(stream.line())
    corpus.close_shard()
    if not corpus.shards:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(corpus.drops.counts.items()))
        raise UserError(f"no document of enough sentences in the input (dropped: {reasons or 'none'}).")


@contextmanager
def _bar(stream: _Stream) -> Iterator[Callable[[], None] | None]:
    """A progress bar, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=stream.bytes_total or None, initial=stream.bytes_done, unit="B", unit_scale=True) as bar:
        yield lambda: bar.update(stream.bytes_done - bar.n) and None


@dataclass
class _Corpus:
    """The folder being written: whole shards, the open one, and what decides about the documents to come."""

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
        self._open: list[Document] = []
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
            self._count_rows(shard.pieces, shard.counts)
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
        for row in text.rows:
            self._open_pieces += len(row.pieces)
            counts = self.sources.setdefault(row.source, {"documents": 0, "sentences": 0, "pieces": 0})
            counts["documents"] += 1
            counts["sentences"] += len(row.offsets) - 1
            counts["pieces"] += len(row.pieces)

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
        pieces = np.concatenate([row.pieces for row in text.rows])
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
        pieces = np.concatenate([row.pieces for row in self._open])
        self._count_rows(pieces, np.concatenate([row.counts for row in self._open]))
        sizes = {
            "documents": len(self._open),
            "sentences": sum(len(row.offsets) - 1 for row in self._open),
            "pieces": len(pieces),
        }
        self.shards.append({"name": name, **sizes, **_checksum(self.folder / name)})
        self._open, self._keys, self._open_pieces = [], [], 0
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
def _lock(folder: Path) -> Iterator[None]:
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


@contextmanager
def _named_disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"--output {folder}: the disk is full; the shards written are safe: free some room and give the same "
            "command again."
        ) from None


def _unfinished(output: Path, identity: dict[str, Any], listing: list[Any]) -> dict[str, Any]:
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


def _check_same(output: Path, made_from: dict[str, Any], identity: dict[str, Any]) -> None:
    """Compares what a finished corpus was made from; newer packages do not make it another.

    Raises:
        UserError: something differs; the message names it.
    """
    packages = ("packages", "splitter")
    differing = [key for key in identity if key not in packages and made_from.get(key) != identity[key]]
    if made_from.get("splitter", {}).get("language") != identity["splitter"]["language"]:
        differing.append("language")
    if differing:
        raise UserError(
            f"{output}: holds a corpus made from other input or settings ({', '.join(differing)}); "
            "give another --output."
        )


def _checksum(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _identity(settings: BuildSettings, worker: Worker) -> dict[str, Any]:
    """What the bytes of a corpus depend on, besides the text."""
    return {
        "tokenizer_fingerprint": tokenizer_fingerprint(worker.encoder.tokenizer),
        "splitter": splitter_name(settings.language),
        "rules": sorted(worker.settings.rules),
        "min_sentences": settings.min_sentences,
        "near_duplicates": {"rensa": check_near_duplicates()} if settings.near_duplicates else None,
        "documents": settings.documents,
        "text_field": settings.text_field,
        "packages": {name: metadata.version(name) for name in PACKAGES},
    }


def _of_listing(listing: list[Any]) -> dict[str, Any]:
    """What the manifest says of the input; no absolute paths: the same text gives the same manifest anywhere."""
    return {
        "sources": list(dict.fromkeys(source for source, *_ in listing)),
        "files": len(listing),
        "bytes": sum(size for *_, size, _ in listing),
        "listing_sha256": hashlib.sha256(json.dumps(listing).encode("utf-8")).hexdigest(),
    }


def _finish(
    corpus: _Corpus, worker: Worker, made_from: dict[str, Any], settings: BuildSettings, copied: list[str]
) -> None:
    """Writes the document frequencies, the samples of what was dropped and, last, the manifest."""
    output = corpus.folder
    with atomic_write(output / "document_frequency.npy", "wb") as file:
        np.save(file, corpus.frequency)
    samples = {
        reason: [dropped._asdict() for _, dropped in kept] for reason, kept in sorted(corpus.drops.samples.items())
    }
    write_json(output / DROPPED, samples)
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **{key: sum(shard[key] for shard in corpus.shards) for key in ("documents", "sentences", "pieces")},
        "sources": corpus.sources,
        "dropped": dict(sorted(corpus.drops.counts.items())),
        "tokenizer": {
            "fingerprint": made_from["tokenizer_fingerprint"],
            "vocabulary_size": worker.encoder.vocabulary_size,
            "dtype": worker.encoder.dtype.name,
        },
        "command": _command(settings, made_from["sources"]),
        "made_from": made_from,
        "files": {name: _checksum(output / name) for name in ("document_frequency.npy", DROPPED, *copied)},
        "shards": corpus.shards,
    }
    write_json(output / MANIFEST, manifest)
    (output / PROGRESS).unlink()
    (output / LINES.format(len(corpus.shards))).unlink()


def _command(settings: BuildSettings, sources: list[str]) -> str:
    """The command that makes the corpus, without paths."""
    words = ["data_prep/run.py", "--input", *sources, "--tokenizer", Path(settings.tokenizer).name]
    for name in ("format", "documents", "text_field", "language", "min_sentences"):
        if getattr(settings, name) != getattr(BuildSettings, name):
            words += [f"--{name}", str(getattr(settings, name))]
    words += ["--without", *settings.without] if settings.without else []
    words += ["--near_duplicates"] if settings.near_duplicates else []
    return shlex.join(words)


def load_tokenizer_files(name: str) -> dict[str, bytes]:
    """`tokenizer.json` and, where there is one, `tokenizer_config.json`, as bytes.

    Args:
        name: a folder, a tokenizer.json or a model id of the Hugging Face hub.

    Raises:
        UserError: none of them, or not a fast tokenizer.
    """
    path = Path(name)
    if not path.exists():
        path = _from_hub(name)
    folder = path if path.is_dir() else path.parent
    main = path / "tokenizer.json" if path.is_dir() else path
    if not main.is_file():
        raise UserError(f"{path}: no tokenizer.json here; save a fast tokenizer with save_pretrained.")
    files = {"tokenizer.json": main.read_bytes()}
    if (folder / "tokenizer_config.json").is_file():
        files["tokenizer_config.json"] = (folder / "tokenizer_config.json").read_bytes()
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(files["tokenizer.json"].decode("utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{main}: not a fast tokenizer: {error}.") from None
    return files


def _from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(hf_hub_download(name, "tokenizer.json"))
    except (HFValidationError, HfHubHTTPError, OSError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--tokenizer {name}: neither a path nor to be had from the hub ({reason}).") from None
    with suppress(EntryNotFoundError, OSError):
        hf_hub_download(name, "tokenizer_config.json")
    return path
