"""The software and the memory that a run used. Imports torch only on a GPU."""

import platform
import re
import resource
import subprocess
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from multicls.files import REPOSITORY

PACKAGES = ("torch", "transformers", "deepspeed", "tokenizers", "numpy", "scipy", "scikit-learn")

PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}
PEAKS |= {"L40S": 362e12, "L4": 121e12, "A10": 125e12, "V100": 125e12, "T4": 65e12}


def environment_record() -> dict[str, Any]:
    """Returns `versions` (Python and the packages that affect results) and `git_commit` of this repository.

    The commit ends in "-dirty" if files have changed since; it is None outside a git repository.
    """
    versions = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    commit = None
    with suppress(OSError):  # git is not installed
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        commit = done.stdout.strip() or None
    return {"versions": versions, "git_commit": commit}


def peak_memory_gb(device: str) -> float:
    """Returns the peak memory in GB: allocations of the GPU, or the resident set of the process on "cpu"."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def flops_per_token(parameters: int, layers: int, hidden: int, length: int) -> float:
    """Returns the FLOPs of a training step for a token: 6 a weight, and those of attention over `length` tokens.

    As in PaLM (arXiv:2204.02311, appendix B). Recomputation does not count.
    """
    return 6.0 * parameters + 12.0 * layers * hidden * length


def peak_flops(device: str) -> float | None:
    """Returns a GPU's peak FLOPs a second, dense and in 16 bits, as its vendor states it; None if it is not known."""
    if "NVL" in device:  # of another peak than the card of the same name
        return None
    return next((peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", device)), None)
