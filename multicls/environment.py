"""The software and the memory that a run used. Imports torch only on a GPU."""

from __future__ import annotations

import platform
import resource
import subprocess
from importlib.metadata import version
from typing import Any

from multicls.files import REPOSITORY

PACKAGES = ("torch", "transformers", "deepspeed", "tokenizers", "numpy", "scipy", "scikit-learn", "pyarrow")


def environment_record() -> dict[str, Any]:
    """Returns `versions` (Python and the packages that affect results) and `git_commit` of this repository.

    The commit ends in "-dirty" if files have changed since; it is None outside a git repository.
    """
    versions = {"python": platform.python_version()} | {package: version(package) for package in PACKAGES}
    return {"versions": versions, "git_commit": _git_commit()}


def peak_memory_gb(device: str) -> float:
    """Returns the peak memory in GB: allocations of the GPU, or the resident set of the process on "cpu"."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def reset_peak_memory(device: str) -> None:
    """Measures the peak of a GPU's memory anew; that of a process stays what it was."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()


def _git_commit() -> str | None:
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None
