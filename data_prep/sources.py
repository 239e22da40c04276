"""Lists what `--input` names: files and folders, also by their fsspec URL, and data sets of the Hugging Face Hub."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from multicls.errors import UserError, did_you_mean, first_line

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_HEAD = 1 << 16
_MANY_FILES = 64  # a Hub data set of as many files is not cut further, so nobody needs their row groups
_SUFFIXES = (".txt", ".json", ".jsonl", ".xml", ".html", ".parquet", ".csv", ".md", *COMPRESSIONS)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[^:]*){0,2}")
_NAMED = re.compile(r"([^/=]+)=(.+)", re.DOTALL)
_PROLOG = re.compile(r"(\s*<(\?.*?\?>|!--.*?-->|!DOCTYPE(\[.*?\]|[^\[>])*>))*\s*", re.DOTALL | re.IGNORECASE)
_ROOT = re.compile(r"<([A-Za-z_][\w.:-]*)([^<>]*)")


class Hub(NamedTuple):
    """A data set of the Hub."""

    dataset: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    documents: str = "row"  # "row" if a row is a document, "sentences" if it is a sentence
    layout: str = "blocks"  # of its documents, see `read.RawDocument`
    kind: str = ""  # module of `datasets.packaged_modules` that reads its files; empty for a data set in the cache

    def __str__(self) -> str:
        return ":".join(filter(None, (self.dataset, self.config, self.split)))


PRESETS = {
    "wikipedia": Hub("wikimedia/wikipedia", "20231101.en", layout="lines"),
    # `datasets` no longer runs its loading script; this branch is the Hub's own conversion.
    "bookcorpus": Hub("bookcorpus/bookcorpus", "plain_text", revision="refs/convert/parquet", documents="sentences"),
    "bookcorpusopen": Hub("lucadiliello/bookcorpusopen"),
}


@dataclass(frozen=True)
class SourceFile:
    """An input file, or a data set on this disk."""

    source: str  # name of the input it belongs to
    name: str  # path below that input; with `source` it names the file wherever the input lies
    format: str  # one of `settings.FileFormat`
    size: int  # bytes on disk, 0 if not known
    path: str  # local path or fsspec URL
    version: str  # changes with the content: modification time, entity tag, or commit on the Hub
    rows: int = 0  # row groups (Parquet) or rows (data sets) that pieces count in; 0 for files that pieces cut by bytes
    hub: Hub | None = None  # the data set of the Hub that it is part of

    def __str__(self) -> str:
        return f"{self.hub}/{self.name}" if self.hub else printable(self.path)


class Skipped(NamedTuple):
    """A path that is not read, and the reason."""

    path: str
    reason: str


class Listing(NamedTuple):
    """The input files in a fixed order, and the paths left out."""

    files: list[SourceFile]
    skipped: list[Skipped]


class _Unreadable(Exception):
    """The reason to skip a file."""


def find_files(
    inputs: Iterable[str], file_format: str = "auto", include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Listing:
    """Returns all input files in a fixed order, each checked by a look at its head, and what was left out.

    Args:
        inputs: `[NAME=]WHAT`. WHAT is a file, a folder, their fsspec URL (`s3://...`), `wikipedia[:DATE.LANGUAGE]`,
            `bookcorpus`, `bookcorpusopen` or `OWNER/DATASET[:CONFIG[:SPLIT]]`.
        file_format: one of `settings.FileFormat`, or "auto".
        include: patterns such as `*.txt`; a file is read if its name below the input matches one of them.
        exclude: patterns of files to leave out.

    Raises:
        UserError: every input that is missing or of which nothing can be read.
    """

    def selected(name: str) -> bool:
        return any(fnmatchcase(name, p) for p in include or "*") and not any(fnmatchcase(name, p) for p in exclude)

    files: list[SourceFile] = []
    skipped: list[Skipped] = []
    problems: list[str] = []
    for given in inputs:
        match = None if os.path.exists(given) else _NAMED.fullmatch(given)
        name, what = match.groups() if match else ("", given)
        try:
            found, left_out = _list_input(printable(name), what, file_format, selected)
        except UserError as error:
            problems += error.problems
            continue
        files += found
        skipped += left_out
        if not found:
            problems.append(_nothing_read(what, left_out))
    if problems:
        raise UserError(*problems[:20], *([f"... and {len(problems) - 20} more."] if len(problems) > 20 else []))
    return Listing(files, skipped)


def _nothing_read(what: str, skipped: list[Skipped]) -> str:
    if not skipped:
        return f"--input {printable(what)}: no file in this folder."
    if len(skipped) == 1:
        return f"--input {skipped[0].path}: {skipped[0].reason}."
    counts = Counter(reason for _, reason in skipped).most_common(8)
    first = {reason: path for path, reason in reversed(skipped)}
    told = "; ".join(f"{count} x {reason} ({first[reason]})" for reason, count in counts)
    return f"--input {printable(what)}: none of its {len(skipped)} paths can be read: {told}."


def _list_input(
    name: str, what: str, file_format: str, selected: Callable[[str], bool]
) -> tuple[list[SourceFile], list[Skipped]]:
    remote = "://" in what
    if not remote and not os.path.exists(what):
        return _list_hub(name, _parse_hub(what), selected)
    if any(os.path.isfile(os.path.join(what, marker)) for marker in ("state.json", "dataset_dict.json")):
        return [_saved_dataset(name, what)], []
    source = name or printable(os.path.basename(what.rstrip("/") if remote else os.path.realpath(what)).split(".")[0])
    inspect = partial(_inspect, file_format, selected)
    with ThreadPoolExecutor(32) as pool:  # for remote files, which answer slowly
        found = list(pool.map(inspect, _walk_remote(source, what)) if remote else map(inspect, _walk(source, what)))
    return [one for one in found if isinstance(one, SourceFile)], [one for one in found if isinstance(one, Skipped)]


def _walk(source: str, top: str) -> Iterator[SourceFile | Skipped]:
    if not os.path.isdir(top):
        yield _local_file(source, os.path.basename(top), top)
        return
    length = len(os.path.join(top, ""))
    failed: list[OSError] = []
    for parent, folders, names in os.walk(top, onerror=failed.append):
        for name in sorted(names):
            path = os.path.join(parent, name)
            yield (
                Skipped(printable(path), "hidden") if name.startswith(".") else _local_file(source, path[length:], path)
            )
        for name in sorted(folders):
            path = os.path.join(parent, name)
            if name.startswith(".") or os.path.islink(path):
                yield Skipped(printable(path), "hidden" if name.startswith(".") else "link to a folder")
        folders[:] = sorted(name for name in folders if not name.startswith("."))  # it follows no links by itself
    yield from (Skipped(printable(error.filename), f"unreadable: {error.strerror}") for error in failed)


def _local_file(source: str, name: str, path: str) -> SourceFile | Skipped:
    try:
        status = os.stat(path)
    except OSError as error:
        return Skipped(printable(path), f"unreadable: {error.strerror}")
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
        return Skipped(printable(path), "no file (a pipe, socket or device)")
    return SourceFile(source, printable(name), "", status.st_size, path, str(status.st_mtime_ns))


def _walk_remote(source: str, url: str) -> Iterator[SourceFile | Skipped]:
    try:
        import fsspec

        system, root = fsspec.core.url_to_fs(url)
        found = system.find(root, detail=True)
    except Exception as error:  # whatever its transports raise; ImportError names the package to install
        raise UserError(f"--input {url}: {first_line(error)}.") from None
    if not found:
        raise UserError(f"--input {url}: no such file or folder.")
    for path, details in sorted(found.items()):
        name = path[len(root) :].lstrip("/") or os.path.basename(path)
        whole = system.unstrip_protocol(path)
        if any(part.startswith(".") for part in name.split("/")):
            yield Skipped(whole, "hidden")
            continue
        tags = filter(None, (details.get(key) for key in ("ETag", "etag", "blob_id", "md5Hash")))
        yield SourceFile(source, name, "", details.get("size") or 0, whole, str(next(tags, None) or system.ukey(path)))


def _inspect(file_format: str, selected: Callable[[str], bool], file: SourceFile | Skipped) -> SourceFile | Skipped:
    if isinstance(file, Skipped):
        return file
    path = file.path
    try:
        if not selected(file.name):
            raise _Unreadable("excluded")
        kind = _format(_head(path), file.name, file_format)
        return replace(file, format=kind, rows=_row_groups(path) if kind == "parquet" else 0)
    except _Unreadable as reason:
        return Skipped(printable(path), str(reason))
    except Exception as error:
        if isinstance(error, OSError) and error.strerror and "://" not in path:
            return Skipped(printable(path), f"unreadable: {error.strerror}")
        return Skipped(printable(path), damage(path, error))


def damage(path: str, error: Exception) -> str:
    """Returns how a file is damaged, from the error that reading it raised.

    Raises:
        UserError: the file could not be reached; the next try may go better, so it must not be left out.
        Exception: the error itself, if it has nothing to do with reading.
    """
    import pyarrow as pa

    remote = "://" in path
    torn = isinstance(error, (EOFError, zlib.error, lzma.LZMAError, pa.ArrowException))
    if torn or (isinstance(error, OSError) and error.errno is None and not remote):  # as bz2, gzip and zstd raise it
        return f"damaged: {first_line(error)}"
    if remote or isinstance(error, OSError):
        told = f"{printable(path)}: cannot be read: {first_line(error)}; give the same command again."
        raise UserError(told) from error
    raise error


def open_bytes(path: str, buffer: int = 1 << 20) -> tuple[IO[bytes], IO[bytes]]:
    """Opens a local path or an fsspec URL; returns its decompressed stream and the raw one."""
    raw = open_raw(path)
    suffix = extension(path)
    if suffix == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw)), raw
    if suffix == ".bz2":
        return bz2.BZ2File(raw), raw
    if suffix == ".xz":
        return lzma.LZMAFile(raw), raw
    if suffix == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(raw, "zstd")), raw
    return io.BufferedReader(raw, buffer) if "://" not in path else raw, raw


def open_raw(path: str) -> Any:
    """Opens a local path or an fsspec URL as it stands."""
    if "://" not in path:
        return io.FileIO(path)
    import fsspec

    return fsspec.open(path, "rb").open()


def _head(path: str) -> bytes:
    stream, raw = open_bytes(path, _HEAD)
    with raw, stream:
        return stream.read(_HEAD)


def _format(head: bytes, name: str, file_format: str) -> str:
    """Returns the format of a file, or raises `_Unreadable`."""
    if not head:
        raise _Unreadable("empty")
    if file_format == "dataset":
        raise _Unreadable("no data set (a folder that `save_to_disk` has written, or a name on the Hub)")
    if head.startswith(b"PAR1") and file_format in ("auto", "parquet"):
        return "parquet"
    if file_format == "parquet":
        raise _Unreadable("no Parquet file")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _Unreadable("UTF-16; convert it (iconv -f utf-16 -t utf-8)")
    if b"\0" in head or head.startswith(b"%PDF-"):
        raise _Unreadable("binary")
    text = head.decode("utf-8-sig", "replace").lstrip()
    kind = file_format if file_format != "auto" else _guess(text, name)
    try:
        codecs.getincrementaldecoder("utf-8-sig")().decode(head, len(head) < _HEAD)
    except UnicodeDecodeError as error:
        lines = text.split("\n")
        if kind in ("text", "html") or sum("\ufffd" in line for line in lines) > len(lines) / 10:  # else bad records
            raise _Unreadable(f"not UTF-8 at byte {error.start}; convert it (iconv -t utf-8)") from None
    if kind == "html" and not _can_extract_html():
        raise _Unreadable("HTML; `pip install trafilatura` to extract its text, or --format text")
    return kind


@cache
def _can_extract_html() -> bool:
    return find_spec("trafilatura") is not None


def _guess(text: str, name: str) -> str:
    name = name.lower()
    suffix = extension(name.removesuffix(extension(name)) if extension(name) in COMPRESSIONS else name)
    if suffix in (".csv", ".tsv"):
        raise _Unreadable(
            f"a table ({suffix[1:].upper()}); write an object a line "
            "(pandas.read_csv(...).to_json('x.jsonl', orient='records', lines=True)), or --format text"
        )
    if suffix in (".html", ".htm", ".xhtml"):
        return "html"
    if text.startswith("<"):
        return _guess_markup(text, suffix)
    if suffix in (".json", ".jsonl", ".ndjson"):
        if text.startswith("[") or text.split("\n", 1)[0].strip() == "{":
            form, how = ("one JSON array", ".[]") if text.startswith("[") else ("JSON over several lines", ".")
            raise _Unreadable(f"{form}; write an object a line (jq -c '{how}')")
        return "jsonl"
    return "jsonl" if text.startswith("{") and _has_json_object(text) else "text"


def _guess_markup(text: str, suffix: str) -> str:
    prolog = _PROLOG.match(text)
    root = _ROOT.match(text, prolog.end() if prolog else 0)
    tag, attributes = root.groups() if root else ("", "")
    if tag == "mediawiki":
        return "mediawiki"
    if tag == "doc" and " id=" in attributes and not text.startswith("<?xml"):
        return "wikiextractor"
    if tag.lower() in ("html", "head", "body") or re.match(r"<!doctype\s+html", text, re.IGNORECASE):
        return "html"
    if text.startswith("<?xml") or suffix == ".xml" or "xmlns" in attributes or tag in ("rss", "feed", "TEI", "TEI.2"):
        raise _Unreadable(f"XML that is not MediaWiki (root element {tag or 'not found'})")
    return "text"


def _has_json_object(text: str) -> bool:
    lines = text.split("\n")
    for line in lines[:20]:
        try:
            if isinstance(json.loads(line), dict):
                return True
        except (ValueError, RecursionError):
            continue
    return len(lines) == 1 and re.match(r'\{\s*"[^"]*"\s*:', text) is not None  # longer than the head


def _row_groups(path: str) -> int:
    """Returns the number of row groups of a Parquet file, 0 if its end is damaged."""
    import pyarrow.parquet as pq

    try:
        with open_raw(path) as raw:
            return int(pq.read_metadata(raw).num_row_groups)
    except Exception as error:
        damage(path, error)
        return 0


def _parse_hub(what: str) -> Hub:
    """Returns the data set of the Hub that `what` names; raises a `UserError` if it names none."""
    name, _, rest = what.partition(":")
    config, _, split = rest.partition(":")
    if name in PRESETS:
        preset = PRESETS[name]
        return preset._replace(config=config or preset.config, split=split or preset.split)
    if _HUB_NAME.fullmatch(what) and not what.startswith(".") and Path(name).suffix not in _SUFFIXES:
        return Hub(name, config or None, split or "train")
    known = did_you_mean(name, PRESETS) if "/" not in what else ""
    raise UserError(f"--input {printable(what)}: no such file or folder.{known}")


def _list_hub(source: str, hub: Hub, selected: Callable[[str], bool]) -> tuple[list[SourceFile], list[Skipped]]:
    """Lists the files of a data set at the commit that its revision means now, so that a later start reads the same."""
    from huggingface_hub import HfApi, constants

    source = source or next((name for name, preset in PRESETS.items() if preset.dataset == hub.dataset), "")
    source = source or hub.dataset.rpartition("/")[2]
    if constants.HF_HUB_OFFLINE:
        return [_cached_dataset(source, hub)], []
    try:
        import datasets

        info = HfApi().dataset_info(hub.dataset, revision=hub.revision, files_metadata=True)
        hub = hub._replace(revision=info.sha)
        builder = datasets.load_dataset_builder(hub.dataset, hub.config, revision=hub.revision)
        splits: dict[str, list[str]] = builder.config.data_files or {}
    except Exception as error:  # whatever its transports raise
        raise UserError(
            f"--input {hub}: not to be had from the Hub ({first_line(error)}); with HF_HUB_OFFLINE=1 its cache is used."
        ) from None
    if hub.split not in splits:
        raise UserError(f"--input {hub}: no split {hub.split!r}.{did_you_mean(hub.split, splits)}")
    hub = hub._replace(kind=builder.name)
    kind = "parquet" if hub.kind == "parquet" else "dataset"
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
    paths = [(path, path.partition(f"@{info.sha}/")[2] or path) for path in splits[hub.split]]
    skipped = [Skipped(path, "excluded") for path, name in paths if not selected(name)]
    paths = [(path, name) for path, name in paths if selected(name)]
    few = kind == "parquet" and len(paths) < _MANY_FILES
    return [
        SourceFile(source, name, kind, sizes.get(name, 0), path, str(info.sha), _row_groups(path) if few else 0, hub)
        for path, name in paths
    ], skipped


def _cached_dataset(source: str, hub: Hub) -> SourceFile:
    data = load_rows(str(hub), hub)
    cached = sorted(part["filename"] for part in data.cache_files)
    commit = Path(cached[0]).parent.name if cached else ""
    size = sum(os.path.getsize(path) for path in cached)
    return SourceFile(source, str(hub), "dataset", size, str(hub), commit, len(data), hub)


def _saved_dataset(source: str, path: str) -> SourceFile:
    parts = [part.stat() for part in Path(path).rglob("*.arrow")]
    name = printable(os.path.basename(os.path.realpath(path)))
    version = str(max((part.st_mtime_ns for part in parts), default=0))
    size = sum(part.st_size for part in parts)
    return SourceFile(source or name, name, "dataset", size, path, version, len(load_rows(path, None)))


def load_rows(path: str, hub: Hub | None) -> Any:
    """Returns the `datasets.Dataset` that lies in a folder (all its splits), or in the local cache of the Hub.

    Raises:
        UserError: it is not to be had, with the reason.
    """
    import datasets

    try:
        if hub is not None:
            return datasets.load_dataset(hub.dataset, hub.config, split=hub.split, revision=hub.revision)
        data = datasets.load_from_disk(path)
        if isinstance(data, datasets.DatasetDict):
            data = datasets.concatenate_datasets([data[split] for split in sorted(data)])
        return data
    except Exception as error:  # the library lets through whatever its transports raise
        raise UserError(
            f"--input {path}: not to be had ({first_line(error)}). Without a network, load it once where there is one "
            "(`datasets.load_dataset`, not streamed), copy the cache and set HF_HUB_OFFLINE=1; or give a local folder."
        ) from None


def printable(path: str) -> str:
    """Returns a path as text that can be encoded; bytes that are not UTF-8 become `\\xff`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def extension(path: str) -> str:
    """Returns the last suffix of a path, with its dot."""
    return os.path.splitext(path)[1]
