"""Lists what `--input` names: files and folders, and data sets of the Hub."""

import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from data_prep.formats import FORMATS, base
from data_prep.formats.base import Entry, Layout, Skipped, SourceFile, printable
from data_prep.formats.recognise import layout_of, missing_fields, recognise
from data_prep.formats.tables import schema_paths
from data_prep.ledger import skip_text
from data_prep.settings import BuildOptions
from multicls.console import progress_bar
from multicls.errors import UserError, did_you_mean, first_line
from multicls.files import missing_folder

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


def list_inputs(
    settings: BuildOptions, flag: str = "input"
) -> tuple[list[SourceFile], list[Skipped]]:
    """Returns all input files in a fixed order, each checked by its first bytes, and what is skipped.

    `flag` is the setting that names them. Raises a UserError that names all inputs that are missing or of which nothing
    can be read.
    """
    files, skipped, problems = list[SourceFile](), list[Skipped](), list[str]()
    if settings.format not in ("auto", "wikipedia", *FORMATS):
        raise UserError(f"--format {settings.format}: no such format. Known: {', '.join(FORMATS)}.")
    for word in getattr(settings, flag):
        named = None if os.path.exists(word) else _NAMED.fullmatch(word)
        source, what = named.groups() if named else ("", word)
        try:
            entries = _list_input(source, what, settings)
        except UserError as error:
            problems += [f"--{flag} {problem}" for problem in error.problems]
            continue
        reasons = [entry for entry in entries if isinstance(entry, Skipped)]
        skipped += reasons
        files += [entry for entry in entries if isinstance(entry, SourceFile)]
        if len(reasons) == len(entries):
            counts = Counter(skip_text(entry.reason, entry.detail) for entry in reasons)
            listed = (f"{number} x {reason}" for reason, number in counts.most_common(5))
            why = ", ".join(listed) or "no file in this folder"
            problems.append(f"--{flag} {printable(what)}: nothing can be read: {why}.")
    if problems:
        raise UserError(*problems)
    return files, skipped


def _list_input(source: str, what: str, settings: BuildOptions) -> list[Entry]:
    is_data_set = any(os.path.isfile(f"{what}/{n}") for n in ("state.json", "dataset_dict.json"))
    if is_data_set or not os.path.lexists(what):
        return list(_list_data_set(source, what, is_data_set, settings))
    last = os.path.basename(os.path.realpath(what))
    whole = SourceFile(what, "", last, "", 0, "")
    source = source or printable(last if os.path.isdir(what) else base.stem(whole))
    entries = list[Entry]()
    with progress_bar(0, "file", "list", delay=5.0) as bar:
        for entry in _walk(source, os.path.abspath(what), settings.output):
            entries.append(_inspect(settings, entry))
            bar.update()
    return sorted(entries, key=lambda entry: entry.path)


def _walk(source: str, root: str, output: str) -> Iterator[Entry]:
    """Yields the files of a folder without `output`, or the file itself, and what is skipped."""
    if not os.path.isdir(root):
        yield _file(source, root, os.path.basename(root))
        return
    folders, left_out = [root], os.path.realpath(output) if output else ""
    below = len(os.path.join(root, ""))  # where the name of a file begins in its path
    while folders:
        folder = folders.pop()
        try:  # not by walk(), which passes over folders that cannot be read
            items = list(os.scandir(folder))
        except OSError as error:
            yield Skipped(printable(folder), "unreadable", detail=error.strerror or "")
            continue
        for item in items:
            if not item.is_dir(follow_symlinks=False):
                yield _file(source, item.path, item.path[below:])
            elif item.name.startswith("."):
                yield Skipped(printable(item.path), "hidden")
            elif os.path.realpath(item.path) != left_out:
                folders.append(item.path)


def _file(source: str, path: str, name: str) -> Entry:
    """Returns a file, or why it cannot be one: opening a pipe would wait for its writer."""
    try:
        state = os.stat(path)
    except OSError as error:
        return Skipped(printable(path), "unreadable", detail=error.strerror or "")
    if stat.S_ISDIR(state.st_mode):
        return Skipped(printable(path), "link")
    if not stat.S_ISREG(state.st_mode):
        return Skipped(printable(path), "no_file")
    return SourceFile(path, source, printable(name), "", state.st_size, str(state.st_mtime))


def has_changed(file: SourceFile) -> bool:
    """Returns whether a file is no longer the one that was listed."""
    try:
        return str(os.stat(file.path).st_mtime) != file.version
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
        known = " URLs are not read; copy the files to a disk first." if "://" in what else known
        raise UserError(f"{printable(what)}: no such file or folder.{known}")
    if not is_folder and name not in PRESETS and (missing := _missing(name)):
        raise UserError(f"{printable(what)}: {missing}")
    datasets.disable_progress_bars()
    try:
        if is_folder:
            data = datasets.load_from_disk(what)
        else:
            chosen = {"split": split or "train", "revision": revision}
            data = datasets.load_dataset(hub, config or preset_config, **chosen)
    except Exception as error:  # the libraries let through whatever their parts raise
        raise UserError(
            f"{what}: no such file or folder, and no data set that can be loaded "
            f"({first_line(error)}). Without a network, load it once where there is one "
            "(`datasets.load_dataset`), copy the cache and set HF_HUB_OFFLINE=1."
        ) from None
    last = os.path.basename(os.path.realpath(what) if is_folder else hub)
    splits = [data[key] for key in sorted(data)] if isinstance(data, dict) else [data]
    if reason := missing_fields(settings, schema_paths(splits[0].features.arrow_schema)):
        yield Skipped(printable(what), "missing_field", detail=reason)
        return
    for path in [entry["filename"] for part in splits for entry in part.cache_files]:
        name = "/".join([last, *Path(path).parts[-2:]])  # in the cache, the folder is the commit
        size, version = os.path.getsize(path), str(os.path.getmtime(path))
        place = os.path.abspath(path), source or last, name
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
    if "/." in f"/{file.name}":
        return file.skipped("hidden")
    is_excluded = any(fnmatchcase(file.name, pattern) for pattern in settings.exclude)
    is_included = any(fnmatchcase(file.name, pattern) for pattern in settings.include)
    if is_excluded or (settings.include and not is_included):
        return file.skipped("excluded")
    try:
        return recognise(file, settings)
    except Exception as error:
        if reason := getattr(error, "strerror", ""):
            return file.skipped("unreadable", reason)
        return file.skipped("damaged", base.describe_damage(file, error))
