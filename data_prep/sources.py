"""Lists what `--input` names: files and folders, also by fsspec URL, and data sets of the Hub."""

import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa

from data_prep.formats import FORMATS
from data_prep.formats.base import Entry, Layout, Skipped, SourceFile, printable, stem
from data_prep.formats.recognise import layout_of, missing_fields, recognise
from data_prep.formats.tables import schema_paths
from data_prep.ledger import skip_text
from data_prep.settings import BuildOptions
from multicls.console import progress_bar
from multicls.errors import UserError, did_you_mean, first_line
from multicls.files import missing_folder

LOCAL = fsspec.filesystem("file")
LAYOUTS: dict[str, Layout] = {
    "wikimedia/wikipedia": "wikipedia",
    "bookcorpus/bookcorpus": "sentences",
}
PRESETS = {  # name: data set of the Hub, configuration, revision
    "wikipedia": ("wikimedia/wikipedia", "20231101.en", None),
    # `datasets` does not run its loading script; this branch is the Hub's own conversion.
    "bookcorpus": ("bookcorpus/bookcorpus", "plain_text", "refs/convert/parquet"),
}
_NAMED = re.compile(r"([^/=]+)=(.+)", re.DOTALL)


def list_inputs(settings: BuildOptions) -> tuple[list[SourceFile], list[Skipped]]:
    """Returns all input files in a fixed order, each checked by its first bytes, and what is skipped.

    Raises a UserError that names all inputs that are missing or of which nothing can be read.
    """
    files, skipped, problems = list[SourceFile](), list[Skipped](), list[str]()
    if settings.format not in ("auto", "wikipedia", *FORMATS):
        raise UserError(f"--format {settings.format}: no such format. Known: {', '.join(FORMATS)}.")
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
            counts = Counter(skip_text(entry.reason, entry.detail) for entry in reasons)
            listed = (f"{number} x {reason}" for reason, number in counts.most_common(5))
            why = ", ".join(listed) or "no file in this folder"
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
    whole = SourceFile(what, "", base, "", 0, "")
    source = source or printable(base if os.path.isdir(what) else stem(whole))
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
            yield Skipped(printable(folder), "unreadable", detail=reason)
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
        return Skipped(printable(path), "unreadable", detail=error.strerror or "")
    if details["type"] == "directory":
        return Skipped(printable(path), "link")
    if details["type"] != "file":
        return Skipped(printable(path), "no_file")
    version = _version(system, path, details)
    path = path if system is LOCAL else system.unstrip_protocol(path)
    return SourceFile(path, source, printable(name), "", details.get("size") or 0, version)


def _version(system: Any, path: str, details: dict[str, Any]) -> str:
    """Returns what changes with the content of a file: an entity tag or the time of its last change."""
    tags = (details.get(key) for key in ("ETag", "etag", "blob_id", "md5Hash", "mtime"))
    return str(next(filter(None, tags), None) or system.ukey(path))


def has_changed(file: SourceFile) -> bool:
    """Returns whether a file is no longer the one that was listed."""
    try:
        if "://" not in file.path:
            return str(os.stat(file.path).st_mtime) != file.version
        system, path = fsspec.core.url_to_fs(file.path, use_listings_cache=False)
        return _version(system, path, system.info(path)) != file.version
    except OSError:
        return True


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
    if not is_folder and name not in PRESETS and (missing := _missing(name)):
        raise UserError(f"--input {printable(what)}: {missing}")
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
    if reason := missing_fields(settings, schema_paths(splits[0].features.arrow_schema)):
        yield Skipped(printable(what), "missing_field", detail=reason)
        return
    for path in [entry["filename"] for part in splits for entry in part.cache_files]:
        name = "/".join([base, *Path(path).parts[-2:]])  # in the cache, the folder is the commit
        size, version = os.path.getsize(path), str(os.path.getmtime(path))
        place = os.path.abspath(path), source or base, name
        layout = layout_of(settings, LAYOUTS.get(hub, "plain"))
        yield SourceFile(*place, "arrow", size, version, layout, hub="" if is_folder else hub)


def _missing(name: str) -> str:
    """Returns why `OWNER/DATASET` is no data set of the Hub but a mistyped path; "" if it may be one."""
    if missing := missing_folder(name):
        return missing
    folder = Path(name).parent
    near = did_you_mean(Path(name).name, [p.name for p in folder.glob("*")], listed=False)
    is_folder = folder.is_dir() or os.path.splitext(name)[1][1:] in ("txt", "gz", "jsonl", "csv")
    return f"no such file or folder.{near}" if near or is_folder else ""


def _inspect(settings: BuildOptions, file: Entry) -> Entry:
    """Returns the file with its format, from its first bytes, or the reason to skip it."""
    if isinstance(file, Skipped):
        return file
    name, path = file.name, printable(file.path)
    if "/." in f"/{name}":
        return Skipped(path, "hidden", file.size)
    is_excluded = any(fnmatchcase(name, pattern) for pattern in settings.exclude)
    if is_excluded or not any(fnmatchcase(name, pattern) for pattern in settings.include or ["*"]):
        return Skipped(path, "excluded", file.size)
    try:
        return recognise(file, settings)
    except Exception as error:
        reason = "" if "://" in file.path else getattr(error, "strerror", "")
        if reason:
            return Skipped(path, "unreadable", file.size, reason)
        return Skipped(path, "damaged", file.size, damage(file, error))


def damage(file: SourceFile, error: Exception) -> str:
    """Returns how a file is damaged, from the error that reading it raised.

    A file that could not be reached is a `UserError`: it must not be left out, the next try may succeed.
    """
    is_torn = isinstance(error, (EOFError, zlib.error, lzma.LZMAError, pa.ArrowException))
    if not is_torn and ("://" in file.path or getattr(error, "errno", None) is not None):
        raise UserError(f"{file}: cannot be read: {first_line(error)}; try again.") from error
    return first_line(error)
