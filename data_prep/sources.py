"""What `--input` names: files, folders, and data sets of the Hugging Face hub, each checked before anything is read."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, cast

from multicls.errors import UserError, did_you_mean

FORMATS = ("text", "wikiextractor", "jsonl", "mediawiki", "parquet", "dataset")
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)  # what reading a broken compressed file raises
_HEAD = 1 << 16
_SUFFIXES = (".txt", ".json", ".jsonl", ".xml", ".parquet", ".gz", ".bz2", ".xz", ".zst", ".csv", ".md")


class Hub(NamedTuple):
    """A data set of the hub, and how its rows are read: see `readers.Reading`."""

    dataset: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    documents: str = "row"
    layout: str = "blocks"


PRESETS = {
    "wikipedia": Hub("wikimedia/wikipedia", "20231101.en", layout="lines"),
    # Its loading script is no longer run by `datasets`; this branch is the hub's own conversion of it.
    "bookcorpus": Hub(
        "bookcorpus/bookcorpus", "plain_text", revision="refs/convert/parquet", documents="sentences", layout="lines"
    ),
    "bookcorpusopen": Hub("lucadiliello/bookcorpusopen"),
}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[^:]*){0,2}")


@dataclass(frozen=True)
class SourceFile:
    """An input file or data set.

    Attributes:
        source: name of the input it belongs to.
        name: its path below that input; with `source` it names the file wherever the input lies.
        format: one of `FORMATS`.
        size: bytes on disk, 0 if not known.
        path: where it lies.
        hub: or which data set of the hub it is.
    """

    source: str
    name: str
    format: str
    size: int
    path: Path = Path()
    hub: Hub | None = None

    def __str__(self) -> str:
        return self.name if self.hub else str(self.path)


def find_files(inputs: Iterable[str], file_format: str = "auto") -> list[SourceFile]:
    """All input files in a fixed order, each checked by a look at its head.

    Args:
        inputs: `[NAME=]WHAT`, WHAT being a file, a folder (walked in sorted order, hidden files and links to folders
            left out), `wikipedia[:DATE.LANGUAGE]`, `bookcorpus`, `bookcorpusopen` or `OWNER/DATASET[:CONFIG[:SPLIT]]`.
        file_format: one of `FORMATS`, or "auto".

    Raises:
        UserError: every path that is missing, empty, not readable, binary or not UTF-8.
    """
    files: list[SourceFile] = []
    problems: list[str] = []
    for given in inputs:
        name, equals, what = given.partition("=")
        if not equals or Path(given).exists():
            name, what = "", given
        try:
            files += _files_of(name, what, file_format)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems[:20], *([f"... and {len(problems) - 20} more."] if len(problems) > 20 else []))
    return files


def _files_of(name: str, what: str, file_format: str) -> list[SourceFile]:
    path = Path(what)
    if not path.exists():
        hub, size = _pinned(_hub(what))
        label = ":".join(filter(None, (hub.dataset, hub.config, hub.split)))
        return [SourceFile(name or what.partition(":")[0].rpartition("/")[2], label, "dataset", size, hub=hub)]
    source = name or path.resolve().name.split(".")[0]
    if path.is_dir() and any((path / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
        size = sum(part.stat().st_size for part in path.rglob("*.arrow"))
        return [SourceFile(source, path.name, "dataset", size, path)]
    found = [file for file in (_walk(path) if path.is_dir() else [path]) if file.stat().st_size]
    if not found:
        raise UserError(f"--input {what}: {'no text in this folder' if path.is_dir() else 'the file is empty'}.")
    files: list[SourceFile] = []
    problems: list[str] = []
    for file in found:
        relative = file.relative_to(path).as_posix() if path.is_dir() else file.name
        try:
            kind = _sniff(file) if file_format == "auto" else _checked(file, file_format)
        except UserError as error:
            problems += error.problems
            continue
        files.append(SourceFile(source, relative, kind, file.stat().st_size, file))
    if problems:
        raise UserError(*problems)
    return files


def _hub(what: str) -> Hub:
    """The hub data set that `what` names.

    Raises:
        UserError: it names none.
    """
    name, _, rest = what.partition(":")
    if name in PRESETS:
        config, _, split = rest.partition(":")
        preset = PRESETS[name]
        return preset._replace(config=config or preset.config, split=split or preset.split)
    if _HUB_NAME.fullmatch(what) and not what.startswith(".") and Path(name).suffix not in _SUFFIXES:
        config, _, split = rest.partition(":")
        return Hub(name, config or None, split or "train")
    raise UserError(f"--input {what}: no such file or folder.{did_you_mean(name, PRESETS) if '/' not in what else ''}")


def _pinned(hub: Hub) -> tuple[Hub, int]:
    """The same at the commit that its revision means now, so that a run that goes on reads what it read before.

    Returns:
        Also the bytes of text that its card states, 0 if it does not.

    Raises:
        UserError: the hub does not know it or cannot be reached.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return hub, 0
    try:
        card = HfApi().dataset_info(hub.dataset).card_data
        commit = HfApi().dataset_info(hub.dataset, revision=hub.revision).sha
    except Exception as error:  # whatever its transports raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--input {hub.dataset}: not to be had from the hub ({reason}); with HF_HUB_OFFLINE=1 its cache is used."
        ) from None
    stated = (card.to_dict() if card else {}).get("dataset_info") or []
    configs = [info for info in (stated if isinstance(stated, list) else [stated]) if isinstance(info, dict)]
    splits = [split for info in configs if info.get("config_name") == hub.config for split in info.get("splits", [])]
    return hub._replace(revision=commit), sum(int(split["num_bytes"]) for split in splits if split["name"] == hub.split)


def _walk(folder: Path) -> list[Path]:
    found = []
    for parent, folders, names in os.walk(folder):  # does not follow links to folders, so no loops
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(parent, name) for name in sorted(names) if not name.startswith(".")]
    return [path for path in found if path.is_file()]


def open_bytes(path: Path) -> tuple[IO[bytes], io.FileIO]:
    """The decompressed stream of a file, and the file below it, whose `tell()` says how much of it has been read."""
    raw = io.FileIO(path)
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw)), raw
    if path.suffix == ".bz2":
        return bz2.BZ2File(raw), raw
    if path.suffix == ".xz":
        return lzma.LZMAFile(raw), raw
    if path.suffix == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(raw, "zstd")), raw
    return io.BufferedReader(raw, 1 << 20), raw


def _head(path: Path) -> str:
    """The first characters of a file, decompressed.

    Raises:
        UserError: it is not readable, binary or not UTF-8.
    """
    try:
        stream, raw = open_bytes(path)
        with raw, stream:
            head = stream.read(_HEAD)
    except DAMAGED as error:
        raise UserError(f"{path}: cannot be read: {error}.") from None
    if b"\0" in head:
        raise UserError(f"{path}: holds NUL bytes, so it is no UTF-8 text; convert it or leave it out.")
    try:
        return head.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.start >= len(head) - 3 and len(head) == _HEAD:  # a character cut by the end of the head
            return head[: error.start].decode("utf-8-sig")
        raise UserError(
            f"{path}: not UTF-8 at byte {error.start}; convert it (iconv -t utf-8) or leave it out."
        ) from None


def _checked(path: Path, file_format: str) -> str:
    if file_format not in ("parquet", "dataset"):
        _head(path)
    return file_format


def _sniff(path: Path) -> str:
    with open(path, "rb") as file:
        if file.read(4) == b"PAR1":
            return "parquet"
    head = _head(path).lstrip()
    if head.startswith(("<mediawiki", "<?xml")):
        return "mediawiki"
    if head.startswith("<doc "):
        return "wikiextractor"
    if head.startswith("{"):
        return "jsonl"
    if head.startswith(("[{", "[\n")) and ".json" in path.name:
        raise UserError(f"{path}: one JSON array; write an object a line instead (jq -c '.[]').")
    return "text"
