"""Documents in, a corpus folder out: read, clean, split, tokenize in many processes, write in order.

    files -> documents -> chunks -> [processes: Worker.prepare] -> duplicates out -> rows -> shards -> manifest

The stream of documents has one order, that of the input, and everything that looks at more than one document
(duplicates, repeated lines, shards) happens in that order in this process. So the bytes depend neither on the number of
processes nor on where a run was stopped.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.cleaning import RULES, Drops, clean
from data_prep.duplicates import check_near_duplicates
from data_prep.encode import load_tokenizer_files
from data_prep.plan import check_disk, estimate
from data_prep.readers import RawDocument, Reading, ReadOptions
from data_prep.sentences import splitter_name
from data_prep.sources import SourceFile, find_files
from data_prep.worker import MIN_SENTENCES, Worker, WorkSettings, prepare_in_order
from data_prep.writer import LINES, PROGRESS, CorpusWriter, checksum, lock, unfinished
from multicls.corpus import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    tokenizer_fingerprint,
    write_manifest,
)
from multicls.errors import UserError
from multicls.files import append_jsonl, atomic_write, read_json, write_json

if TYPE_CHECKING:
    pass

DROPPED = "dropped.json"  # samples of what was dropped, by reason
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
    saved = unfinished(output, identity, listing)
    stream = _Stream(files, ReadOptions(settings.documents, settings.text_field), saved)
    if all(file.size for file in files):
        processes = min(processes, 1 + stream.bytes_total // BYTES_A_PROCESS)
    _log_plan(log, files, stream, worker, output, processes)
    if plan_only:
        return output
    with lock(output), _named_disk_errors(output):
        corpus = CorpusWriter(output, identity, listing, worker.encoder.tokenizer, saved)
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
    corpus: CorpusWriter,
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


def _identity(settings: BuildSettings, worker: Worker) -> dict[str, Any]:
    """What the bytes of a corpus depend on, besides the text."""
    return {
        "format_version": FORMAT_VERSION,
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
    corpus: CorpusWriter, worker: Worker, made_from: dict[str, Any], settings: BuildSettings, copied: list[str]
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
        **{key: sum(shard[key] for shard in corpus.shards) for key in ("documents", "rows", "sentences", "tokens")},
        "sources": corpus.sources,
        "dropped": dict(sorted(corpus.drops.counts.items())),
        "tokenizer": {
            "fingerprint": made_from["tokenizer_fingerprint"],
            "vocabulary_size": worker.encoder.vocabulary_size,
            "dtype": worker.encoder.dtype.name,
        },
        "command": _command(settings, made_from["sources"]),
        "made_from": made_from,
        "files": {name: checksum(output / name) for name in ("document_frequency.npy", DROPPED, *copied)},
        "shards": corpus.shards,
    }
    write_manifest(output, manifest)
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
