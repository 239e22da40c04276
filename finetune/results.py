"""What a run leaves: one line in results.jsonl, and its predictions. Imports no torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from multicls.files import REPOSITORY, append_jsonl, atomic_write, read_jsonl

RESULTS = "results.jsonl"
PACKAGES = ("torch", "transformers", "tokenizers", "scikit-learn", "scipy", "numpy")


def run_id_of(identity: Mapping[str, Any]) -> str:
    """12 hex digits that stand for everything that decides a run's numbers."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def read_results(output_dir: str | Path) -> list[dict[str, Any]]:
    """The finished runs of a results folder, by first appearance; of several lines of one run the last."""
    records = [record for record in read_jsonl(Path(output_dir) / RESULTS) if "run_id" in record]
    return list({record["run_id"]: record for record in records}.values())


def find_result(output_dir: str | Path, run_id: str) -> dict[str, Any] | None:
    """The line of a finished run, None if there is none."""
    return next((record for record in read_results(output_dir) if record["run_id"] == run_id), None)


def predictions_path(output_dir: str | Path, run_id: str) -> Path:
    """Where the predictions of a run are."""
    return Path(output_dir) / "predictions" / f"{run_id}.npz"


def model_path(output_dir: str | Path, run_id: str) -> Path:
    """Where the model of a run is, if it was saved."""
    return Path(output_dir) / "models" / run_id


def write_result(output_dir: str | Path, record: Mapping[str, Any], predictions: Mapping[str, Any]) -> None:
    """Writes the predictions, then the line: a run that was killed in between counts as not finished.

    Args:
        record: the line; `run_id` names the predictions' file.
        predictions: arrays; none of them holds Python objects, so that they load without pickle.
    """
    with atomic_write(predictions_path(output_dir, record["run_id"]), "wb") as file:
        np.savez_compressed(file, **predictions)
    append_jsonl(Path(output_dir) / RESULTS, dict(record))


def environment() -> dict[str, Any]:
    """Versions of Python and the packages that decide numbers, and the project's git commit where there is one."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        versions[package] = importlib.metadata.version(package)
    return {"versions": versions, "git_commit": _git_commit()}


def _git_commit() -> str | None:
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None
