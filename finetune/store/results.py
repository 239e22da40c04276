"""The results folder, which many processes may write at once. Imports no torch.

RESULTS/
    results.jsonl         a line (record) for each finished run and task; the last line of a run counts
    results.json          the protocol of the folder
    predictions/ID.npz    outputs of a run on dev, held-out and test rows
    plans/HASH.json       the runs of each grid that was started here
    rows/NAME.json        which rows were drawn, and a fingerprint of the data set
    models/ID/            saved models; tb/ID/ TensorBoard; snapshots/ID/ of unfinished runs; logs/ of `--jobs`
    claims/ID/            runs that a process is at
    errors.jsonl          runs that failed
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from multicls.errors import UserError
from multicls.files import FolderInUse, append_jsonl, atomic_write, locked, read_json, read_jsonl, write_json

Record = Mapping[str, Any]
Array = np.ndarray[Any, np.dtype[Any]]
RESULTS, ERRORS, MARKER = "results.jsonl", "errors.jsonl", "results.json"
PROTOCOL = 3  # goes up when a record changes or loses fields, or the same settings give other numbers
READABLE = (2, PROTOCOL)  # reports read folders of these; only those of PROTOCOL are written
LOCK_SECONDS = 60.0  # how long a process waits for another one to append its line


class Busy(UserError):
    """Another process is at this run."""


def short_hash(content: Any) -> str:
    """Returns 12 hexadecimal digits of the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


class Store:
    """A results folder: what runs have left there, and what is planned. The first write makes it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def check(self, write: bool = False) -> None:
        """Checks the protocol of the folder; changes nothing in it.

        Raises:
            UserError: The folder holds results of a protocol that cannot be read (or with `write` be added to).
        """
        found: Any = 1 if (self.folder / RESULTS).exists() else PROTOCOL  # protocol 1 left no marker
        if (self.folder / MARKER).exists():
            marker = read_json(self.folder / MARKER)
            found = marker.get("protocol") if isinstance(marker, dict) else None
        if found not in READABLE or (write and found != PROTOCOL):
            reads = "a report can read it, but new runs may not be mixed in" if found in READABLE else "too old to read"
            raise UserError(
                f"{self.folder}: results of protocol {found!r}, this is protocol {PROTOCOL}: {reads}. The folder stays "
                "as it is; give another --output_dir."
            )

    def records(self) -> list[Record]:
        """Returns the finished runs, by first appearance.

        Raises:
            UserError: The folder is of another protocol.
        """
        self.check()
        path = self.folder / RESULTS
        if not path.exists():
            return []
        state = path.stat()
        return list(_parse_results(path, state.st_ino, state.st_size, state.st_mtime_ns))

    def predictions(self, run_id: str) -> dict[str, Array]:
        """Returns the arrays that a run left: ids, labels, logits (N, C) or scores (N,), train_rows, ...

        Raises:
            UserError: The file is missing.
        """
        path = self._predictions_path(run_id)
        if not path.exists():
            raise UserError(f"{path}: no such file; without its line in {RESULTS} the run would be repeated.")
        with np.load(path, allow_pickle=False) as file:
            return dict(file)

    def write(self, record: Record, predictions: Mapping[str, Any]) -> None:
        """Writes the predictions, then the line: a run that was killed in between counts as not finished.

        Args:
            record: the line; its `run_id` names the predictions' file.
            predictions: arrays without Python objects, so that they load without pickle.
        """
        arrays = {name: np.asarray(values) for name, values in predictions.items()}
        assert not any(array.dtype.hasobject for array in arrays.values()), "objects would be pickled"
        with atomic_write(self._predictions_path(record["run_id"]), "wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # no array is named allow_pickle
        self._append(RESULTS, record)

    def write_error(self, error: BaseException, title: str, run_id: str = "", request_ids: Sequence[str] = ()) -> None:
        """Adds a run that failed to errors.jsonl: what it was, its error, the end of the traceback."""
        self._append(ERRORS, {
            "run_id": run_id, "request_ids": list(request_ids), "title": title,
            "error": f"{type(error).__name__}: {error}",
            "traceback": "".join(traceback.format_exception(error))[-4000:],
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        })  # fmt: skip

    def errors(self) -> list[Record]:
        """Returns the lines of errors.jsonl."""
        return list(read_jsonl(self.folder / ERRORS))

    def add_plan(self, plan: Mapping[str, Any]) -> None:
        """Writes the runs of a grid; a plan of other content is another file, so that plans accumulate."""
        path = self.folder / "plans" / f"{short_hash(plan)}.json"
        if not path.exists():
            self._mark()
            write_json(path, plan)

    def plans(self) -> list[dict[str, Any]]:
        """Returns the plans of all grids that were started here, by name."""
        return [read_json(path) for path in sorted((self.folder / "plans").glob("*.json"))]

    def rows_path(self, name: str) -> Path:
        """Returns where the rows drawn under `name` are published."""
        return self.folder / "rows" / f"{name}.json"

    def model_path(self, run_id: str) -> Path:
        """Returns where the model of a run is, if it was saved."""
        return self.folder / "models" / run_id

    def snapshot_path(self, run_id: str) -> Path:
        """Returns where an unfinished run keeps what it needs to go on."""
        return self.folder / "snapshots" / run_id

    def remove_snapshots(self, run_id: str) -> None:
        """Removes the snapshots of a run that has finished."""
        shutil.rmtree(self.snapshot_path(run_id), ignore_errors=True)

    def tensorboard_path(self, run_id: str) -> Path:
        """Returns the folder of a run's TensorBoard events."""
        return self.folder / "tb" / run_id

    @contextmanager
    def claim(self, run_id: str) -> Iterator[None]:
        """Holds a run for this process; the kernel lets go of it when the process ends, however it ends.

        Raises:
            Busy: Another process holds it.
            UserError: The folder is of another protocol, or cannot be written to.
        """
        self.check(write=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.folder / "claims" / run_id, patience=0))
            except FolderInUse:
                text = f"run {run_id} in {self.folder}: another process works on it; wait for it, or stop it first."
                raise Busy(text) from None
            yield

    def _predictions_path(self, run_id: str) -> Path:
        return self.folder / "predictions" / f"{run_id}.npz"

    def _mark(self) -> None:
        self.check(write=True)
        if not (self.folder / MARKER).exists():
            write_json(self.folder / MARKER, {"protocol": PROTOCOL})

    def _append(self, name: str, record: Record) -> None:
        """Adds a line while no other process does; the first one of a folder marks it with the protocol."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder, LOCK_SECONDS):
            self._mark()
            append_jsonl(self.folder / name, dict(record))


@lru_cache(maxsize=1)
def _parse_results(path: Path, *state: int) -> list[Record]:
    """Returns the records; parsed once for each `state` of the file, since a grid asks for each of its runs."""
    lines = [record for record in read_jsonl(path) if "run_id" in record]
    # Protocol 2 wrote ensembles as runs; reports make them now.
    records = [_from_protocol_2(line) for line in lines if not line.get("identity", {}).get("ensemble")]
    return list({record["run_id"]: record for record in records}.values())


def _from_protocol_2(record: dict[str, Any]) -> Record:
    """Returns a record with the fields of this protocol.

    Protocol 2 kept resolved settings only, so that these count as what was requested, and no new run equals an old one.
    """
    identity = record.get("identity")
    if identity is None:
        return record
    pooling = identity.get("pooling", "cls")
    label = identity["head"] + (f"/{pooling}" if pooling != "cls" else "")
    if joint := identity.get("joint"):
        label += f" of {','.join(sorted([identity['task'], *joint]))}"
    requested = {name: value for name, value in identity.items() if name not in ("model", "data", "joint")}
    requested["train"] = {name: identity["train"].get(name) for name in ("learning_rate", "epochs")}
    changed = {"train.learning_rate": identity["train"].get("learning_rate")}
    changed |= {f"{identity['head']}.{name}": value for name, value in (identity.get("options") or {}).items()}
    return record | {
        "request_id": short_hash(identity), "task": identity["task"], "train_size": str(identity["train_size"]),
        "data_seed": identity["data_seed"], "seed": identity["seed"], "fingerprint": identity["model"], "label": label,
        "selection": identity["selection"], "requested": requested, "changed": changed, "tested": [],
        "numeric": {"device": record["device"], "precision": identity["train"].get("precision"), "deepspeed": None},
        "resolved": {"max_length": identity["max_length"], "train": identity["train"]},
        "constant": {}, "score_error": None, "test_scores": {}, "gpu": None,
    }  # fmt: skip
