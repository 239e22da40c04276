"""What preparing a corpus will take, estimated from a sample of the input before anything is written."""

from __future__ import annotations

import shutil
import time
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from data_prep.readers import RawDocument, Reading, ReadOptions
from data_prep.sources import DAMAGED, SourceFile, open_bytes
from data_prep.worker import Worker
from multicls.errors import UserError

_FILES = 5  # looked at, evenly spaced over the input
_CHARACTERS = 200_000  # of each
_SECONDS = 2.0
_MARGIN = 1.1  # what is free must hold the estimate and this much more


class Plan(NamedTuple):
    """An estimate.

    Attributes:
        text_bytes: of the input, decompressed; 0 if not known.
        pieces: ids that the corpus will hold.
        disk_bytes: what it takes on disk.
        seconds: of one process.
    """

    text_bytes: float
    pieces: float
    disk_bytes: float
    seconds: float


def estimate(files: list[SourceFile], options: ReadOptions, worker: Worker) -> Plan:
    """Prepares a sample of the input and extrapolates."""
    text_bytes = _text_bytes(files)
    step = max(1, len(files) // _FILES)
    read = pieces = sentences = rows = 0
    spent = 0.0
    for file in files[::step][:_FILES]:
        if spent > _SECONDS:
            break
        started = time.monotonic()
        sample = _head(file, options)
        read += sum(len(raw.text.encode("utf-8", "replace")) for raw in sample)
        kept = list(chain.from_iterable(text.rows for text in worker.prepare(sample).texts))
        rows += len(kept)
        pieces += sum(len(row.tokens) for row in kept)
        sentences += sum(len(row.offsets) for row in kept)
        spent += time.monotonic() - started
    factor = text_bytes / max(read, 1)
    disk = pieces * (worker.encoder.dtype.itemsize + 2) + sentences * 4 + rows * 120
    return Plan(text_bytes, pieces * factor, disk * factor, spent * factor)


def _head(file: SourceFile, options: ReadOptions) -> list[RawDocument]:
    sample: list[RawDocument] = []
    size = 0
    for raw in Reading(file, options):
        sample.append(raw._replace(text=raw.text[:_CHARACTERS]))
        size += len(sample[-1].text)
        if size >= _CHARACTERS:
            break
    return sample


def _text_bytes(files: list[SourceFile]) -> float:
    """Decompressed bytes of all files; files with one suffix are taken to shrink alike."""
    kinds: dict[str, list[SourceFile]] = {}
    for file in files:
        kinds.setdefault(file.path.suffix, []).append(file)
    total = 0.0
    for alike in kinds.values():
        sample = alike[:: max(1, len(alike) // _FILES)][:_FILES]
        total += sum(file.size for file in alike) * sum(map(_expansion, sample)) / len(sample)
    return total


def _expansion(file: SourceFile) -> float:
    """Decompressed bytes a byte of a file, from its first megabytes.

    Raises:
        UserError: the file is damaged.
    """
    if file.format == "parquet":
        import pyarrow.parquet as pq

        data = pq.read_metadata(file.path)
        return sum(data.row_group(i).total_byte_size for i in range(data.num_row_groups)) / file.size
    if file.format == "dataset" or file.path.suffix not in (".gz", ".bz2", ".xz", ".zst"):
        return 1.0
    stream, raw = open_bytes(file.path)
    try:
        with raw, stream:
            return len(stream.read(1 << 22)) / max(raw.tell(), 1)
    except DAMAGED as error:
        raise UserError(f"{file}: cannot be read: {error}.") from None


def check_disk(plan: Plan, folder: Path, share_left: float) -> int:
    """Free bytes where `folder` is or will be.

    Raises:
        UserError: fewer than the rest of the plan needs.
    """
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    needed = plan.disk_bytes * share_left * _MARGIN
    if free < needed:
        raise UserError(
            f"--output {folder}: the corpus needs about {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free there; "
            "free some or choose another --output."
        )
    return free
