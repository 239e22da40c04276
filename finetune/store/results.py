"""What runs leave in a results folder, which many processes may write at once. Imports no torch."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from multicls.errors import UserError
from multicls.files import append_jsonl, atomic_write, read_json, read_jsonl, write_json

RESULTS, ERRORS, MARKER = "results.jsonl", "errors.jsonl", "results.json"
PROTOCOL = 2  # goes up when a record gets other fields, or the same settings give other numbers


class Busy(UserError):
    """Another process is at this run."""


def run_id_of(identity: Mapping[str, Any]) -> str:
    """12 hex digits that stand for everything that decides a run's numbers."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def check_folder(output_dir: str | Path) -> None:
    """Makes sure that a results folder is new or of this protocol; changes nothing in it.

    Raises:
        UserError: it holds results of another protocol, which may not be mixed with these.
    """
    folder = Path(output_dir)
    if (folder / MARKER).exists():
        marker = read_json(folder / MARKER)
        found = marker.get("protocol") if isinstance(marker, dict) else None
    else:
        found = 1 if (folder / RESULTS).exists() else PROTOCOL  # protocol 1 left no marker
    if found != PROTOCOL:
        raise UserError(
            f"{folder}: results of protocol {found!r}, this is protocol {PROTOCOL}: they may not be mixed. The folder "
            "stays as it is; give another --output_dir, or read it with the version that wrote it."
        )


def read_results(output_dir: str | Path) -> list[dict[str, Any]]:
    """The finished runs of a results folder, by first appearance; of several lines of one run the last.

    Raises:
        UserError: the folder is of another protocol.
    """
    check_folder(output_dir)
    path = Path(output_dir) / RESULTS
    if not path.exists():
        return []
    state = path.stat()
    return list(_parsed(path, state.st_ino, state.st_size, state.st_mtime_ns))


@lru_cache(maxsize=1)
def _parsed(path: Path, *state: int) -> list[dict[str, Any]]:
    """Parsed once for each `state` of the file: a grid asks for every one of its cells."""
    records = [record for record in read_jsonl(path) if "run_id" in record]
    return list({record["run_id"]: record for record in records}.values())


def predictions_path(output_dir: str | Path, run_id: str) -> Path:
    """Where the predictions of a run are."""
    return Path(output_dir) / "predictions" / f"{run_id}.npz"


def read_predictions(output_dir: str | Path, run_id: str) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays that a run left: ids, parts, groups, labels, logits (N, C) or scores (N,), train_rows, ...

    Raises:
        UserError: the file is missing.
    """
    path = predictions_path(output_dir, run_id)
    if not path.exists():
        raise UserError(f"{path}: no such file; without its line in {RESULTS} the run would be repeated.")
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def model_path(output_dir: str | Path, run_id: str) -> Path:
    """Where the model of a run is, if it was saved."""
    return Path(output_dir) / "models" / run_id


def submission_path(output_dir: str | Path, run_id: str) -> Path:
    """Where the files for the benchmark's site are, if they were asked for."""
    return Path(output_dir) / "submissions" / run_id


def write_result(output_dir: str | Path, record: Mapping[str, Any], predictions: Mapping[str, Any]) -> None:
    """Writes the predictions, then the line: a run that was killed in between counts as not finished.

    Args:
        record: the line; `run_id` names the predictions' file.
        predictions: arrays; none of them holds Python objects, so that they load without pickle.
    """
    arrays = {name: np.asarray(values) for name, values in predictions.items()}
    assert not any(array.dtype.hasobject for array in arrays.values()), "objects would be pickled"
    with atomic_write(predictions_path(output_dir, record["run_id"]), "wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # no array is named allow_pickle
    _append(Path(output_dir) / RESULTS, dict(record))


def write_error(
    output_dir: str | Path,
    error: BaseException,
    title: str,
    run_id: str = "",
    identity: Mapping[str, Any] | None = None,
) -> None:
    """Adds a crashed run to errors.jsonl: what it was, its error, the end of the traceback."""
    last = "".join(traceback.format_exception(error))[-4000:]
    record = {"run_id": run_id, "identity": dict(identity or {}), "title": title}
    record |= {"error": f"{type(error).__name__}: {error}", "traceback": last}
    _append(Path(output_dir) / ERRORS, record | {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z")})


@contextmanager
def claim(output_dir: str | Path, run_id: str) -> Iterator[None]:
    """Holds a run for this process; the kernel lets go of it when the process ends, however it ends.

    Raises:
        Busy: another process holds it.
        UserError: the folder is of another protocol.
    """
    check_folder(output_dir)
    path = Path(output_dir) / "cells" / f"{run_id}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with open(path, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(f"run {run_id} in {output_dir}: another process is at it.") from None
            if not _still_there(path, file.fileno()):
                continue  # its holder has removed it since we opened it
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _still_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _append(path: Path, record: dict[str, Any]) -> None:
    """Adds a line while no other process does; the first one of a folder marks it with the protocol."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / ".lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        check_folder(path.parent)
        if not (path.parent / MARKER).exists():
            write_json(path.parent / MARKER, {"protocol": PROTOCOL})
        append_jsonl(path, record)
