"""Lists what `--input` names: files and folders, also by fsspec URL, and data sets of the Hub."""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.settings import BuildOptions
from multicls.console import progress_bar
from multicls.errors import UserError, did_you_mean, first_line
from multicls.tables import separator_of

OPENERS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda raw: io.BufferedReader(pa.CompressedInputStream(raw, "zstd")),
}
HEAD_BYTES = 1 << 16
LOCAL = fsspec.filesystem("file")

_NAMED = re.compile(r"([^/=]+)=(.+)", re.DOTALL)
_SUFFIXES = {".csv": "csv", ".tsv": "csv", ".ipynb": "ipynb", ".srt": "srt", ".json": "json"}
_SUFFIXES |= {".html": "html", ".htm": "html", ".xhtml": "html"}
_MARKDOWN = (".md", ".markdown")
_PROSE = ("", ".txt", ".text", ".asc", *_MARKDOWN)  # suffixes of text; others are code or markup
_BEGINNINGS = {  # of texts: format, and the reason to skip the file
    r"(?s)(?=<).{0,2000}<mediawiki": ("mediawiki", ""),
    r"<doc id=": ("wikiextractor", ""),
    r"(?i)<(?:!doctype\s+html|html|head|body)\b": ("html", ""),
    r"<\?xml|<(?:rss|feed|TEI)\b": ("", "XML that is not MediaWiki"),
    r'\{[ \t]*"[^"\n]*"[ \t]*:': ("jsonl", ""),
    r'\[\s*\{\s*"[^"\n]*"\s*:': ("json", ""),
}

# What the lines of a text are. plain: text with blank lines between paragraphs; markdown: such text with markup; lines:
# a message each; wikipedia: paragraphs of an article; sentences: a sentence each; paragraphs; wikitext: its markup.
Layout = Literal["plain", "markdown", "lines", "wikipedia", "sentences", "paragraphs", "wikitext"]
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
    format: str  # of `settings.Format`, or arrow
    size: int  # bytes on disk, 0 if not known
    version: str  # changes with the content: modification time or entity tag
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

    Raises a UserError that names all inputs that are missing or of which nothing can be read.
    """
    files, skipped, problems = list[SourceFile](), list[Skipped](), list[str]()
    for word in settings.input:
        named = None if os.path.exists(word) else _NAMED.fullmatch(word)
        source, what = named.groups() if named else ("", word)
        try:
            entries = list(_list_input(source, what, settings))
        except UserError as error:
            problems += error.problems
            continue
        reasons = [entry for entry in entries if isinstance(entry, Skipped)]
        skipped += reasons
        files += [entry for entry in entries if isinstance(entry, SourceFile)]
        if len(reasons) == len(entries):
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
    entries = list[Entry]()
    bar = progress_bar(0, "file", "list", delay=5.0)
    with ThreadPoolExecutor(32) as pool, bar:  # remote files answer slowly
        try:
            each = (pool.map if is_url else map)(partial(_inspect, settings), _walk(source, what))
            for entry in each:
                entries.append(entry)
                bar.update()
        except UserError:
            raise
        except Exception as error:  # whatever the transports raise; ImportError names the package
            raise UserError(f"--input {printable(what)}: {first_line(error)}.") from None
    return sorted(entries, key=lambda entry: entry.path)


def _walk(source: str, what: str) -> Iterator[Entry]:
    """Yields the files of a folder or URL, or the file itself, and what is skipped."""
    system, root = fsspec.core.url_to_fs(what) if "://" in what else (LOCAL, os.path.abspath(what))
    folders = [root]
    while folders:
        folder = folders.pop()
        try:  # not by fsspec's walk(), which passes over folders that cannot be read
            listing = system.ls(folder, detail=True)
        except OSError as error:
            reason = error.strerror or "no such file or folder"
            yield Skipped(printable(folder), f"unreadable: {reason}")
            continue
        for details in listing:
            path = details["name"].rstrip("/")
            name = path.removeprefix(root).lstrip("/") or os.path.basename(root)
            if details["type"] != "directory":
                yield _file(system, source, name, details)
            elif os.path.basename(path).startswith("."):
                yield Skipped(printable(path), "hidden")
            elif path != folder:
                folders.append(path)


def _file(system: Any, source: str, name: str, details: dict[str, Any]) -> Entry:
    """Returns a file, or why it cannot be one: opening a pipe would wait for its writer."""
    path = details["name"]
    try:
        details = system.info(path) if details.get("islink") else details
    except OSError as error:
        return Skipped(printable(path), f"unreadable: {error.strerror}")
    if details["type"] == "directory":
        return Skipped(printable(path), "link to a folder")
    if details["type"] != "file":
        return Skipped(printable(path), "no file (a pipe, socket or device)")
    tags = (details.get(key) for key in ("ETag", "etag", "blob_id", "md5Hash", "mtime"))
    version = str(next(filter(None, tags), None) or system.ukey(path))
    path = path if system is LOCAL else system.unstrip_protocol(path)
    return SourceFile(path, source, printable(name), "", details.get("size") or 0, version)


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
    if reason := missing_fields(settings, splits[0].column_names):
        yield Skipped(printable(what), reason)
        return
    for path in [entry["filename"] for part in splits for entry in part.cache_files]:
        name = "/".join([base, *Path(path).parts[-2:]])  # in the cache, the folder is the commit
        size, version = os.path.getsize(path), str(os.path.getmtime(path))
        place = os.path.abspath(path), source or base, name
        layout = _layout(settings, LAYOUTS.get(hub, "plain"))
        yield SourceFile(*place, "arrow", size, version, layout, hub="" if is_folder else hub)


def _inspect(settings: BuildOptions, file: Entry) -> Entry:
    """Returns the file with its format, from its first bytes, or the reason to skip it."""
    if isinstance(file, Skipped):
        return file
    name, path = file.name, printable(file.path)
    if "/." in f"/{name}":
        return Skipped(path, "hidden")
    is_excluded = any(fnmatchcase(name, pattern) for pattern in settings.exclude)
    if is_excluded or not any(fnmatchcase(name, pattern) for pattern in settings.include or ["*"]):
        return Skipped(path, "excluded")
    try:
        with open_bytes(file.path) as stream:
            head = _head(stream)
            file_format, reason = _format(head, name, settings.format)
            names = [] if reason else _field_names(stream, head, file_format)
    except Exception as error:
        reason = "" if "://" in file.path else getattr(error, "strerror", "")
        return Skipped(path, f"unreadable: {reason}" if reason else damage(file, error))
    if reason or (reason := missing_fields(settings, names)):
        return Skipped(path, reason)
    is_markdown = file_format == "ipynb" or _suffix(name) in _MARKDOWN
    known: Layout = "markdown" if is_markdown and settings.format == "auto" else "plain"
    return file._replace(format=file_format, layout=_layout(settings, known))


def _head(stream: Any) -> bytes:
    """Returns the first bytes of a file; of a damaged one, those that can be read, if there are any."""
    head = b""
    try:
        while len(head) < HEAD_BYTES and (chunk := stream.read(min(512, HEAD_BYTES - len(head)))):
            head += chunk
    except Exception:
        if not head:
            raise
    return head


def _field_names(stream: Any, head: bytes, file_format: str) -> list[str]:
    """Returns the fields of the first records of a file; none if it has no fields, or none can be read.

    All complete records of the first 64 KB count: a header or a bad record costs itself only.
    """
    if file_format == "parquet":
        stream.seek(0)
        with suppress(OSError, pa.ArrowException):
            return list(pq.read_schema(stream).names)
    text = head.decode("utf-8-sig", "replace")
    if file_format == "csv":
        mark = separator_of(text.partition("\n")[0])
        return next(csv.reader(io.StringIO(text), delimiter=mark), [])
    if file_format not in ("json", "jsonl"):
        return []
    names, decode = list[str](), json.JSONDecoder().raw_decode
    for rest in text.split("\n") if file_format == "jsonl" else [text.strip().removeprefix("[")]:
        with suppress(ValueError, RecursionError):  # a bad record, or the last one, which is cut
            while rest := rest.lstrip(", \t\r\n"):
                record, end = decode(rest)
                names += record if isinstance(record, dict) else []
                rest = rest[end:]
    return names


def missing_fields(settings: BuildOptions, names: list[str]) -> str:
    """Returns the reason to skip a file whose records have `names`; "" if these have all text fields."""
    missing = [field for field in settings.text_field if field not in names]
    if not names or not missing:
        return ""
    hint = did_you_mean(missing[0], dict.fromkeys(names))
    return f"no field {' and '.join(map(repr, missing))}; set --text_field.{hint}".rstrip(".")


def _layout(settings: BuildOptions, known: Layout = "plain") -> Layout:
    """Returns the layout that the settings name, or else the known one."""
    if settings.documents == "sentences":
        return "sentences"
    if settings.layout == "lines":
        return "lines"
    return "wikipedia" if settings.format == "wikipedia" else known


def damage(file: SourceFile, error: Exception) -> str:
    """Returns how a file is damaged, from the error that reading it raised.

    A file that could not be reached is a `UserError`: it must not be left out, the next try may succeed.
    """
    is_torn = isinstance(error, (EOFError, zlib.error, lzma.LZMAError, pa.ArrowException))
    if not is_torn and ("://" in file.path or getattr(error, "errno", None) is not None):
        raise UserError(f"{file}: cannot be read: {first_line(error)}; try again.") from error
    return f"damaged: {first_line(error)}"


@contextmanager
def open_bytes(path: str) -> Iterator[IO[bytes]]:
    """Opens a local path or an fsspec URL; decompresses by its suffix."""
    decompress = OPENERS.get(os.path.splitext(path)[1], nullcontext)
    with open_raw(path) as raw, decompress(raw) as stream:
        yield stream


def open_raw(path: str) -> Any:
    """Opens a local path or an fsspec URL, and decompresses nothing."""
    return fsspec.open(path, "rb") if "://" in path else open(path, "rb", 1 << 18)


def unread(file: SourceFile, seen: int) -> int:
    """Estimates the characters of a damaged file after the `seen` ones; compressed, it has as many a byte as before."""
    suffix = os.path.splitext(file.path)[1]
    if suffix not in OPENERS or not seen:
        return max(file.size - seen, 0)
    with open_raw(file.path) as raw:
        with suppress(Exception), OPENERS[suffix](raw) as stream:
            while stream.read(1 << 20):
                pass
        return round(seen * max(file.size / max(raw.tell(), 1) - 1, 0))


def _format(head: bytes, name: str, wanted: str) -> tuple[str, str]:
    """Returns the format of a file from its first bytes, and the reason to skip it, or ""."""
    is_free = wanted in ("auto", "wikipedia")
    if not head:
        return "", "empty"
    if wanted == "parquet" or (is_free and head.startswith(b"PAR1")):
        return "parquet", ""
    if head.startswith(b"%PDF-"):
        return "", "PDF; convert it (pdftotext -layout FILE.pdf, of poppler-utils)"
    if b"\0" in head:
        return "", "binary, or UTF-16 (iconv -f utf-16 -t utf-8 converts it)"
    text = head.decode("utf-8-sig", "replace").lstrip()
    try:
        codecs.getincrementaldecoder("utf-8-sig")().decode(head, len(head) < HEAD_BYTES)
    except UnicodeDecodeError as error:
        if text.count("\ufffd") > len(text) / 200:  # else single bad bytes
            remedy = "(iconv -f cp1252 -t utf-8 FILE > NEW, if it is Western European)"
            return "", f"not UTF-8 at byte {error.start}; convert it {remedy}"
    file_format, reason = _guess(text, name) if is_free else (wanted, "")
    if file_format == "html":
        try:
            import trafilatura  # noqa: F401
        except ImportError:
            reason = "HTML; `pip install trafilatura lxml_html_clean` extracts it, or --format text"
    return file_format, reason


def _guess(text: str, name: str) -> tuple[str, str]:
    """Returns the format by the suffix, or else by the first characters of a text, and the reason to skip it."""
    suffix = _suffix(name)
    if suffix in (".json", ".jsonl", ".ndjson"):
        ends_inside = r"[^\n]*[^}\s]" if suffix == ".json" else ""  # an object, of its first line
        return ("json" if re.match(rf"\[|\{{({ends_inside})?\s*\n", text) else "jsonl"), ""
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix], ""
    for beginning, (file_format, reason) in _BEGINNINGS.items():
        if re.match(beginning, text):
            return file_format, reason
    if suffix in _PROSE or not re.fullmatch(r"\.[a-z]\w{0,9}", suffix):
        return "text", ""
    return "", f"{suffix}: not known as prose (code or markup); --format text reads it as text"


def _suffix(name: str) -> str:
    """Returns the suffix of a file, in small letters, without that of compression."""
    base, suffix = os.path.splitext(name.lower())
    return os.path.splitext(base)[1] if suffix in OPENERS else suffix


def stem(name: str) -> str:
    """Returns the name of a file without folder, suffix and suffix of compression."""
    base, suffix = os.path.splitext(os.path.basename(name))
    return os.path.splitext(base)[0] if suffix in OPENERS else base


def printable(path: str) -> str:
    """Returns a path as text that can be encoded; bytes that are not UTF-8 become `\\xff`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
