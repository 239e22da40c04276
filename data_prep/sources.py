"""Lists what `--input` names: files and folders, also by fsspec URL, and data sets of the Hub."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, get_args

import fsspec
import pyarrow as pa

from data_prep.settings import BuildOptions, Format
from multicls.errors import UserError, did_you_mean, first_line

OPENERS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda raw: io.BufferedReader(pa.CompressedInputStream(raw, "zstd")),
}
FORMATS = set(get_args(Format))
HEAD_BYTES = 1 << 16
_NAMED = re.compile(r"([^/=]+)=(.+)", re.DOTALL)
_TABLE = "a table; write JSON lines (pandas.DataFrame.to_json), or --format text"
_SUFFIXES = {".csv": _TABLE, ".tsv": _TABLE, ".html": "html", ".htm": "html", ".xhtml": "html"}
_BEGINNINGS = {  # of texts: format, or the reason to skip the file
    r"(?s)(?=<).{0,2000}<mediawiki": "mediawiki",
    r"<doc id=": "wikiextractor",
    r"(?i)<(?:!doctype\s+html|html|head|body)\b": "html",
    r"<\?xml|<(?:rss|feed|TEI)\b": "XML that is not MediaWiki",
    r'\{[ \t]*"[^"\n]*"[ \t]*:': "jsonl",
}

# What the lines or rows of a file are. plain: text with blank lines between paragraphs; wikipedia:
# an article with a paragraph a line; sentences: a sentence each.
Layout = Literal["plain", "wikipedia", "sentences"]
LAYOUTS: dict[str, Layout] = {
    "wikimedia/wikipedia": "wikipedia",
    "bookcorpus/bookcorpus": "sentences",
}
PRESETS = {  # name: data set of the Hub, configuration, revision
    "wikipedia": ("wikimedia/wikipedia", "20231101.en", None),
    # `datasets` does not run its loading script; this branch is the Hub's own conversion.
    "bookcorpus": ("bookcorpus/bookcorpus", "plain_text", "refs/convert/parquet"),
    "bookcorpusopen": ("lucadiliello/bookcorpusopen", None, None),
}


class SourceFile(NamedTuple):
    """An input file, or a share of a file that is built as if it were a file.

    All fields but the path identify it: it may lie elsewhere the next time.
    """

    path: str  # absolute local path or URL
    source: str  # name of the input that it belongs to
    name: str  # of the file below its input
    format: str  # text, jsonl, parquet, wikiextractor, mediawiki, html or arrow
    size: int  # bytes on disk, 0 if not known
    version: str | int  # changes with the content: modification time or entity tag
    layout: Layout = "plain"
    start: int = 0  # first byte of a share
    stop: int = 0  # end of the share; 0 for the whole file
    hub: str = ""  # OWNER/DATASET, if it comes from the Hub

    def __str__(self) -> str:
        return printable(self.path)


class Skipped(NamedTuple):
    """A path that is not read, and the reason."""

    path: str
    reason: str


Entry = SourceFile | Skipped


def list_inputs(settings: BuildOptions) -> tuple[list[SourceFile], list[Skipped]]:
    """Returns all input files in a fixed order, each checked by its first bytes, and what is skipped.

    Raises:
        UserError: An input is missing or nothing of it can be read; the message names all of them.
    """
    files: list[SourceFile] = []
    skipped: list[Skipped] = []
    problems: list[str] = []
    for word in settings.input:
        named = None if os.path.exists(word) else _NAMED.fullmatch(word)
        source, what = named.groups() if named else ("", word)
        try:
            found = list(_list_input(source, what, settings))
        except UserError as error:
            problems += error.problems
            continue
        reasons = [entry for entry in found if isinstance(entry, Skipped)]
        skipped += reasons
        files += [entry for entry in found if isinstance(entry, SourceFile)]
        if len(reasons) == len(found):
            counts = Counter(reason for _, reason in reasons) or {"no file in this folder": 1}
            why = ", ".join(f"{number} x {reason}" for reason, number in counts.items())
            problems.append(f"--input {printable(what)}: nothing can be read: {why}.")
    if problems:
        raise UserError(*problems)
    return files, skipped


def _list_input(source: str, what: str, settings: BuildOptions) -> Iterable[Entry]:
    is_url = "://" in what
    is_data_set = any(os.path.isfile(f"{what}/{n}") for n in ("state.json", "dataset_dict.json"))
    if is_data_set or not (is_url or os.path.lexists(what)):
        return _list_data_set(source, what, is_data_set, settings)
    base = os.path.basename(what.rstrip("/") if is_url else os.path.realpath(what))
    source = source or printable(base if os.path.isdir(what) else stem(base))
    if not is_url:
        return (_inspect(settings, entry) for entry in _walk(source, what))
    with ThreadPoolExecutor(32) as pool:  # remote files answer slowly
        return list(pool.map(partial(_inspect, settings), _walk_url(source, what)))


def _walk(source: str, top: str) -> Iterator[Entry]:
    """Yields the files of a folder, or the file itself, and what is skipped."""
    if not os.path.isdir(top):
        yield _local_file(source, os.path.basename(top), top)
        return
    failed: list[OSError] = []
    for parent, folders, names in os.walk(top, onerror=failed.append):
        hidden = [name for name in folders if name.startswith(".")]
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in (*sorted(names), *sorted({*hidden, *links})):
            path = os.path.join(parent, name)
            yield _local_file(source, os.path.relpath(path, top), path)
        folders[:] = sorted(set(folders) - set(hidden))
    for error in failed:
        yield Skipped(printable(error.filename), f"unreadable: {error.strerror}")


def _local_file(source: str, name: str, path: str) -> Entry:
    """Returns a local file, or why it cannot be one: opening a pipe would wait for its writer."""
    try:
        status = os.stat(path)
    except OSError as error:
        return Skipped(printable(path), f"unreadable: {error.strerror}")
    if os.path.isdir(path):
        reason = "hidden" if os.path.basename(path).startswith(".") else "link to a folder"
        return Skipped(printable(path), reason)
    if not os.path.isfile(path):
        return Skipped(printable(path), "no file (a pipe, socket or device)")
    path = os.path.abspath(path)  # workers may run in another folder
    return SourceFile(path, source, printable(name), "", status.st_size, status.st_mtime_ns)


def _walk_url(source: str, url: str) -> Iterator[SourceFile]:
    try:
        system, root = fsspec.core.url_to_fs(url)
        found = system.find(root, detail=True)
    except Exception as error:  # whatever its transports raise; ImportError names the package
        raise UserError(f"--input {url}: {first_line(error)}.") from None
    if not found:
        raise UserError(f"--input {url}: no such file or folder.")
    for path, details in sorted(found.items()):
        name = path[len(root) :].lstrip("/") or os.path.basename(path)
        tags = filter(None, (details.get(key) for key in ("ETag", "etag", "blob_id", "md5Hash")))
        version = str(next(tags, None) or system.ukey(path))
        size = details.get("size") or 0
        yield SourceFile(system.unstrip_protocol(path), source, name, "", size, version)


def _list_data_set(
    source: str, what: str, is_folder: bool, settings: BuildOptions
) -> Iterator[Entry]:
    """Yields the Arrow files of a data set: a folder, or files in the cache, filled from the Hub."""
    import datasets

    name, _, rest = what.partition(":")
    config, _, split = rest.partition(":")
    hub, preset_config, revision = PRESETS.get(name, (name, None, None))
    if not is_folder and (hub.count("/") != 1 or hub.startswith(".") or ":" in split):
        known = did_you_mean(name, PRESETS) if "/" not in what else ""
        raise UserError(f"--input {printable(what)}: no such file or folder.{known}")
    datasets.disable_progress_bars()
    try:
        if is_folder:
            data = datasets.load_from_disk(what)
        else:
            chosen = {"split": split or "train", "revision": revision}
            data = datasets.load_dataset(hub, config or preset_config, **chosen)
    except Exception as error:  # the libraries let through whatever their parts raise
        raise UserError(
            f"--input {what}: no such file or folder, and no data set that can be loaded "
            f"({first_line(error)}). Without a network, load it once where there is one "
            "(`datasets.load_dataset`), copy the cache and set HF_HUB_OFFLINE=1."
        ) from None
    base = os.path.basename(os.path.realpath(what) if is_folder else hub)
    splits = [data[key] for key in sorted(data)] if isinstance(data, dict) else [data]
    for path in [entry["filename"] for part in splits for entry in part.cache_files]:
        name = "/".join([base, *Path(path).parts[-2:]])  # in the cache, the folder is the commit
        file = _local_file(source or base, name, path)
        if isinstance(file, SourceFile):
            layout = _layout(settings, LAYOUTS.get(hub, "plain"))
            file = file._replace(format="arrow", layout=layout, hub="" if is_folder else hub)
        yield file


def _inspect(settings: BuildOptions, file: Entry) -> Entry:
    """Returns the file with its format, from its first bytes, or the reason to skip it."""
    if isinstance(file, Skipped):
        return file
    name, path = file.name, printable(file.path)
    if any(part.startswith(".") for part in name.split("/")):
        return Skipped(path, "hidden")
    is_excluded = any(fnmatchcase(name, pattern) for pattern in settings.exclude)
    if is_excluded or not any(fnmatchcase(name, pattern) for pattern in settings.include or ["*"]):
        return Skipped(path, "excluded")
    try:
        with open_bytes(file.path) as stream:
            found = _format(stream.read(HEAD_BYTES), name, settings.format)
    except Exception as error:
        reason = "" if "://" in file.path else getattr(error, "strerror", "")
        found = f"unreadable: {reason}" if reason else damage(file, error)
    if found not in FORMATS:
        return Skipped(path, found)
    return file._replace(format=found, layout=_layout(settings))


def _layout(settings: BuildOptions, known: Layout = "plain") -> Layout:
    """Returns what the settings say about the text, or else what is known of it."""
    if settings.documents == "sentences":
        return "sentences"
    return "wikipedia" if settings.format == "wikipedia" else known


def damage(file: SourceFile, error: Exception) -> str:
    """Returns how a file is damaged, from the error that reading it raised.

    A file that could not be reached is a `UserError`: it must not be left out, the next try may succeed.
    """
    is_torn = isinstance(error, (EOFError, zlib.error, lzma.LZMAError, pa.ArrowException))
    if not is_torn and ("://" in file.path or getattr(error, "errno", None) is not None):
        text = f"{file}: cannot be read: {first_line(error)}; run the same command again."
        raise UserError(text) from error
    return f"damaged: {first_line(error)}"


@contextmanager
def open_bytes(path: str) -> Iterator[IO[bytes]]:
    """Opens a local path or an fsspec URL; decompresses by its suffix."""
    decompress = OPENERS.get(os.path.splitext(path)[1], nullcontext)
    with (
        fsspec.open(path, "rb") if "://" in path else open(path, "rb", 1 << 18) as raw,
        decompress(raw) as stream,
    ):
        yield stream


def _format(head: bytes, name: str, wanted: str) -> str:
    """Returns the format of a file from its first bytes, or the reason to skip it."""
    is_free = wanted in ("auto", "wikipedia")
    if not head:
        return "empty"
    if wanted == "parquet" or (is_free and head.startswith(b"PAR1")):
        return "parquet"
    if b"\0" in head or head.startswith(b"%PDF-"):
        return "binary, or UTF-16 (iconv -f utf-16 -t utf-8 converts it)"
    text = head.decode("utf-8-sig", "replace").lstrip()
    try:
        codecs.getincrementaldecoder("utf-8-sig")().decode(head, len(head) < HEAD_BYTES)
    except UnicodeDecodeError as error:
        lines = text.split("\n")
        if sum("\ufffd" in line for line in lines) > len(lines) / 10:  # else single bad bytes
            return f"not UTF-8 at byte {error.start}; convert it (iconv -t utf-8)"
    found = _guess(text, name) if is_free else wanted
    if found == "html" and not find_spec("trafilatura"):
        return "HTML; `pip install trafilatura` extracts its text, or --format text"
    return found


def _guess(text: str, name: str) -> str:
    """Returns the format that the suffix, or else the first characters of a text, say."""
    base, suffix = os.path.splitext(name.lower())
    suffix = os.path.splitext(base)[1] if suffix in OPENERS else suffix
    if suffix in (".json", ".jsonl", ".ndjson"):
        is_one = re.match(r"\[|\{\s*\n", text)
        return (
            "JSON over several lines; write an object a line (jq -c '.[]')" if is_one else "jsonl"
        )
    found = (what for beginning, what in _BEGINNINGS.items() if re.match(beginning, text))
    return _SUFFIXES.get(suffix) or next(found, "text")


def stem(name: str) -> str:
    """Returns the name of a file without folder, suffix and suffix of compression."""
    base, suffix = os.path.splitext(os.path.basename(name))
    return os.path.splitext(base)[0] if suffix in OPENERS else base


def printable(path: str) -> str:
    """Returns a path as text that can be encoded; bytes that are not UTF-8 become `\\xff`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
