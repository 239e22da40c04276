"""Documents in, a corpus folder out: read, clean, split, tokenize in many processes, write in order."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.cleaning import sentences
from data_prep.readers import RawDocument, SourceFile, find_files, read_file
from data_prep.sentences import splitter_name
from data_prep.wikitext import plain_text
from multicls.errors import UserError
from multicls.files import append_jsonl, atomic_write, read_json, sha256_of, write_json
from multicls.shards import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    Document,
    Shard,
    occurrences,
    tokenizer_fingerprint,
    write_shard,
)

PROGRESS = "progress.json"  # what is written so far; gone when the manifest is there
SHARD_PIECES = 1 << 24  # a shard is closed when it holds as many pieces: 32 MB of uint16
MIN_SENTENCES = 6  # a document needs two sentences for each of three parts
CHUNK_CHARACTERS = 1 << 19  # what a worker gets at a time
SECONDS_A_LINE = 5.0
PACKAGES = ("mwparserfromhell", "numpy", "pyarrow", "sentencex", "tokenizers")


@dataclass(frozen=True)
class BuildSettings:
    """What decides the bytes of a corpus, together with the text itself.

    Attributes:
        input: paths, or NAME=PATH.
        tokenizer: folder with a tokenizer.json, such a file, or a hub id.
        format: see `readers.FORMATS`, or "auto".
        documents: "file" or "blank_line", for plain text.
        text_field: for JSON lines.
        language: of the sentence splitter, as ISO 639 code.
    """

    input: tuple[str, ...]
    tokenizer: str
    format: str = "auto"
    documents: str = "file"
    text_field: str = "text"
    language: str = "en"


class Prepared(NamedTuple):
    """A document after cleaning and tokenizing, or the reason why it is dropped; `dropped` counts parts of it, too."""

    document: Document | None
    dropped: dict[str, int]


class Worker:
    """Cleans and tokenizes documents; every process has one."""

    def __init__(self, tokenizer_json: str, language: str) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes, not threads, share the work
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_str(tokenizer_json)
        self.tokenizer.encode_special_tokens = True  # "[SEP]" in a text is text
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.vocabulary_size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        self.dtype = np.uint16 if self.vocabulary_size <= 1 << 16 else np.uint32
        self.language = language

    def prepare(self, chunk: list[RawDocument]) -> tuple[list[Prepared], np.ndarray, np.ndarray]:
        """The documents of a chunk in order, and their document frequencies as (piece ids, counts)."""
        prepared = [self._prepare(raw) for raw in chunk]
        seen = [np.unique(item.document.pieces) for item in prepared if item.document is not None]
        ids, counts = np.unique(np.concatenate([np.zeros(0, self.dtype), *seen]), return_counts=True)
        return prepared, ids, counts

    def _prepare(self, raw: RawDocument) -> Prepared:
        if raw.dropped:
            return Prepared(None, {raw.dropped: 1})
        dropped: Counter[str] = Counter()
        text, layout = (plain_text(raw.text), "lines") if raw.layout == "wikitext" else (raw.text, raw.layout)
        kept = sentences(text, layout, self.language, dropped)
        encoded = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(kept, add_special_tokens=False)]
        filled = [ids for ids in encoded if ids]
        dropped["sentences_without_pieces"] += len(encoded) - len(filled)
        if len(filled) < MIN_SENTENCES:
            dropped["documents_too_short" if text.strip() else "documents_empty"] += 1
            return Prepared(None, dict(+dropped))
        offsets = np.cumsum([0, *map(len, filled)], dtype=np.int32)
        pieces = np.fromiter(chain.from_iterable(filled), self.dtype, count=int(offsets[-1]))
        digest = hashlib.blake2b("\n".join(kept).encode("utf-8"), digest_size=8).digest()
        document = Document(
            raw.source, raw.id, raw.title, int.from_bytes(digest, "little"), pieces, offsets, occurrences(pieces)
        )
        return Prepared(document, dict(+dropped))


_worker: Worker | None = None


def _start_worker(tokenizer_json: str, language: str) -> None:
    global _worker
    _worker = Worker(tokenizer_json, language)


def _work(chunk: list[RawDocument]) -> tuple[list[Prepared], np.ndarray, np.ndarray]:
    assert _worker is not None
    return _worker.prepare(chunk)


def _in_order(
    chunks: Iterable[list[RawDocument]], worker: Worker, tokenizer_json: str, processes: int
) -> Iterator[tuple[list[Prepared], np.ndarray, np.ndarray]]:
    """Results in the order of the chunks; never more than a few chunks a process under way, so memory is bounded."""
    if processes == 1:
        yield from map(worker.prepare, chunks)
        return
    pool = ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=_start_worker, initargs=(tokenizer_json, worker.language)
    )
    try:
        waiting: deque[Future[tuple[list[Prepared], np.ndarray, np.ndarray]]] = deque()
        for chunk in chunks:
            waiting.append(pool.submit(_work, chunk))
            if len(waiting) > 3 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _chunks(documents: Iterable[RawDocument]) -> Iterator[list[RawDocument]]:
    chunk: list[RawDocument] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.text) + 100
        if size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class _Reading:
    """The stream of documents over all files, and how far it is."""

    def __init__(self, files: list[SourceFile], settings: BuildSettings) -> None:
        self.files = files
        self.settings = settings
        self.bytes_total = sum(file.path.stat().st_size for file in files)
        self.bytes_done = 0

    def documents(self) -> Iterator[RawDocument]:
        """All documents; `bytes_done` grows with every file that ends."""
        for file in self.files:
            yield from read_file(file, self.settings.documents, self.settings.text_field)
            self.bytes_done += file.path.stat().st_size


def build(
    settings: BuildSettings, output: str | Path, processes: int = 1, log: Callable[[str], object] = print
) -> Path:
    """Makes a corpus folder; a run that was stopped goes on behind its last whole shard.

    The bytes depend on the input, the settings and the package versions, never on `processes` or interruptions.

    Args:
        processes: worker processes; 1 works in this one.
        log: called with every line of progress.

    Returns:
        The folder.

    Raises:
        UserError: bad input or tokenizer (before anything is written, as far as a look at every file's head can tell),
            or a folder that holds something else.
    """
    output = Path(output)
    files = find_files(settings.input, settings.format)
    tokenizer_files = load_tokenizer_files(settings.tokenizer)
    worker = Worker(tokenizer_files["tokenizer.json"].decode("utf-8"), settings.language)
    identity = _identity(settings, files, worker)
    if (output / MANIFEST).exists():
        if _without_packages(read_json(output / MANIFEST).get("made_from", {})) != _without_packages(identity):
            raise UserError(f"{output}: holds a corpus made from other input or settings; give another --output.")
        log(f"already finished: {output}")
        return output
    progress = _Progress.resume(output, identity)
    for name, data in tokenizer_files.items():
        with atomic_write(output / name, "wb") as file:
            file.write(data)
    log(f"resuming behind shard {len(progress.shards)}" if progress.shards else f"fresh: {len(files)} files")
    started = time.monotonic()
    reading = _Reading(files, settings)
    try:
        frequency = _write_shards(output, reading, progress, worker, tokenizer_files, processes, log)
    except UserError:
        if not progress.shards:
            shutil.rmtree(output)
        raise
    seconds = time.monotonic() - started
    _finish(output, progress, frequency, worker, identity, settings, [*tokenizer_files])
    record = {"seconds": round(seconds, 2), "processes": processes, "settings": asdict(settings)}
    append_jsonl(output / "log.jsonl", record)
    log(f"{_progress_line(reading, seconds)}; done in {seconds:.1f} s: {output}")
    return output


def _write_shards(
    output: Path,
    reading: _Reading,
    progress: _Progress,
    worker: Worker,
    tokenizer_files: dict[str, bytes],
    processes: int,
    log: Callable[[str], object],
) -> np.ndarray:
    """Reads what is left of the input into shards; returns the document frequencies (V,)."""
    documents = islice(reading.documents(), progress.documents_read, None)
    frequency = progress.document_frequency(output, worker.vocabulary_size)
    started = last_line = time.monotonic()
    tokenizer_json = tokenizer_files["tokenizer.json"].decode("utf-8")
    for prepared, ids, counts in _in_order(_chunks(documents), worker, tokenizer_json, processes):
        frequency[ids] += counts
        for item in prepared:
            progress.add(output, item)
        if time.monotonic() - last_line > SECONDS_A_LINE:
            last_line = time.monotonic()
            log(_progress_line(reading, last_line - started))
    progress.close_shard(output)
    if not progress.shards:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(progress.dropped.items()))
        raise UserError(
            f"no document of {MIN_SENTENCES} sentences or more in the input (dropped: {reasons or 'none'})."
        )
    return frequency


def _progress_line(reading: _Reading, seconds: float) -> str:
    done, total = reading.bytes_done / 1e6, reading.bytes_total / 1e6
    speed = done / max(seconds, 1e-9)
    left = f", eta {(total - done) / speed:.0f} s" if 0 < done < total else ""
    return f"{done:.1f} of {total:.1f} MB, {speed:.2f} MB/s{left}"


class _Progress:
    """Whole shards so far, and the open one. `documents_read` counts documents of the input behind the last shard."""

    def __init__(self, identity: dict[str, Any], saved: dict[str, Any] | None = None) -> None:
        saved = saved or {}
        self.identity = identity
        self.documents_read: int = saved.get("documents_read", 0)
        self.shards: list[dict[str, Any]] = saved.get("shards", [])
        self.dropped: Counter[str] = Counter(saved.get("dropped", {}))
        self.sources: dict[str, dict[str, int]] = saved.get("sources", {})
        self._open: list[Document] = []
        self._open_pieces = 0

    @classmethod
    def resume(cls, output: Path, identity: dict[str, Any]) -> _Progress:
        """What an interrupted run of the same settings left, else an empty start.

        Raises:
            UserError: the folder holds other things, or an unfinished corpus of other settings.
        """
        if (output / PROGRESS).exists():
            saved = read_json(output / PROGRESS)
            if saved.get("made_from") != identity:
                raise UserError(
                    f"{output}: holds an unfinished corpus of other input or settings; "
                    "remove it or give another --output."
                )
            for torn in output.glob(".*"):  # files that a killed run was writing
                torn.unlink()
            return cls(identity, saved)
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise UserError(f"{output}: exists and is no corpus; give an --output that is new or empty.")
        progress = cls(identity)
        progress._save(output)
        return progress

    def add(self, output: Path, item: Prepared) -> None:
        """Takes the next document of the input."""
        self.documents_read += 1
        self.dropped.update(item.dropped)
        if item.document is None:
            return
        self._open.append(item.document)
        self._open_pieces += len(item.document.pieces)
        counts = self.sources.setdefault(item.document.source, {"documents": 0, "sentences": 0, "pieces": 0})
        counts["documents"] += 1
        counts["sentences"] += len(item.document.offsets) - 1
        counts["pieces"] += len(item.document.pieces)
        if self._open_pieces >= SHARD_PIECES:
            self.close_shard(output)

    def close_shard(self, output: Path) -> None:
        """Writes the open shard and then, atomically, that it is there."""
        if not self._open:
            return
        name = f"shard-{len(self.shards):05d}.arrow"
        write_shard(output / name, self._open)
        self.shards.append(
            {
                "name": name,
                "documents": len(self._open),
                "sentences": sum(len(document.offsets) - 1 for document in self._open),
                "pieces": self._open_pieces,
                **_checksum(output / name),
            }
        )
        self._open, self._open_pieces = [], 0
        self._save(output)

    def _save(self, output: Path) -> None:
        names = ("documents_read", "shards", "dropped", "sources")
        write_json(output / PROGRESS, {"made_from": self.identity} | {name: getattr(self, name) for name in names})

    def document_frequency(self, output: Path, size: int) -> np.ndarray:
        """(V,) documents that hold a piece, over the shards written by an earlier run."""
        frequency = np.zeros(size, np.int64)
        for entry in self.shards:
            shard = Shard(output / entry["name"])
            for row in range(entry["documents"]):
                frequency[np.unique(shard.document(row).pieces)] += 1
        return frequency


def _checksum(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _identity(settings: BuildSettings, files: list[SourceFile], worker: Worker) -> dict[str, Any]:
    """What the bytes of a corpus depend on; no absolute paths: the same text gives the same manifest anywhere."""
    listing = [(file.source, file.name, file.format, file.path.stat().st_size) for file in files]
    sources = list(dict.fromkeys(file.source for file in files))
    return {
        "sources": sources,
        "files": len(files),
        "bytes": sum(size for *_, size in listing),
        "listing_sha256": hashlib.sha256(json.dumps(listing).encode("utf-8")).hexdigest(),
        "tokenizer_fingerprint": tokenizer_fingerprint(worker.tokenizer),
        "splitter": splitter_name(settings.language),
        "min_sentences": MIN_SENTENCES,
        "documents": settings.documents,
        "text_field": settings.text_field,
        "packages": {name: metadata.version(name) for name in PACKAGES},
    }


def _finish(
    output: Path,
    progress: _Progress,
    frequency: np.ndarray,
    worker: Worker,
    identity: dict[str, Any],
    settings: BuildSettings,
    copied: list[str],
) -> None:
    """Writes the document frequencies and, last, the manifest."""
    with atomic_write(output / "document_frequency.npy", "wb") as file:
        np.save(file, frequency)
    command = ["data_prep/run.py", "--input", *identity["sources"], "--tokenizer", Path(settings.tokenizer).name]
    for name in ("format", "documents", "text_field", "language"):
        if getattr(settings, name) != getattr(BuildSettings, name):
            command += [f"--{name}", getattr(settings, name)]
    totals = {key: sum(shard[key] for shard in progress.shards) for key in ("documents", "sentences", "pieces")}
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **totals,
        "sources": progress.sources,
        "dropped": dict(sorted(progress.dropped.items())),
        "tokenizer": {
            "fingerprint": identity["tokenizer_fingerprint"],
            "vocabulary_size": worker.vocabulary_size,
            "dtype": np.dtype(worker.dtype).name,
        },
        "command": shlex.join(command),
        "made_from": identity,
        "files": {name: _checksum(output / name) for name in ("document_frequency.npy", *copied)},
        "shards": progress.shards,
    }
    write_json(output / MANIFEST, manifest)
    (output / PROGRESS).unlink()


def _without_packages(identity: dict[str, Any]) -> dict[str, Any]:
    """What must agree for a finished corpus to be the one asked for; newer packages do not make it another."""
    kept = {key: value for key, value in identity.items() if key not in ("packages", "splitter")}
    return kept | {"language": identity.get("splitter", {}).get("language")}


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
