"""The software and the memory that a run used. Imports torch only on a GPU."""

import platform
import re
import resource
import subprocess
from collections.abc import Collection
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from multicls.files import REPOSITORY

PACKAGES = ("torch", "transformers", "deepspeed", "tokenizers", "numpy", "scipy", "scikit-learn")

PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}
PEAKS |= {"L40S": 362e12, "L4": 121e12, "A10": 125e12, "V100": 125e12, "T4": 65e12}
PEAKS |= {"B200": 2250e12, "GB200": 2500e12, "MI300X": 1307.4e12}


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


def flops_per_token(
    config: Any,
    objectives: Collection[str],
    *,
    length: int,
    group_size: int,
    mlm_probability: float,
) -> float:
    """Returns the FLOPs of a training step for each token: those of the matrix products of this model and objectives.

    torch's `FlopCounterMode` counts them in a forward and a backward pass on torch's "meta" device, which computes
    nothing. So embedding look-ups and frozen heads have none, the facets' layers work at the facets alone, and the MLM
    head at the masked tokens. Recomputation (`train.activation_checkpointing`) does not count.

    Args:
        config: The `MultiClsConfig` of the model, which is neither used nor changed.
        length: L; the sequences have no padding.
        group_size: Examples that are each other's negatives.
        mlm_probability: Share of the tokens that the MLM head predicts.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from multicls.modeling_multicls import MultiClsConfig, MultiClsForPreTraining

    fields = config.to_dict() | {"num_topics": 0}
    sequences, facets = config.num_parts * group_size, config.num_facets
    with torch.device("meta"), torch.enable_grad():
        model = MultiClsForPreTraining(MultiClsConfig.from_dict(fields))
        model.set_attn_implementation("eager")  # products that the counter sees on every device
        model.freeze_unused(objectives)
        ids = torch.zeros(sequences, length, dtype=torch.long)
        masked = torch.zeros(round(mlm_probability * ids.numel()), dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(
                input_ids=ids,
                labels=ids,
                masked_positions=masked,
                tfidf_labels=torch.zeros(sequences, length - facets),
                so_labels=torch.zeros(sequences, dtype=torch.long),
                group_size=group_size,
                objectives=tuple(objectives),
            ).loss.backward()
    return counter.get_total_flops() / ids.numel()


def peak_flops(device: str) -> float | None:
    """Returns a GPU's peak FLOPs a second, dense and in 16 bits, as its vendor states it; None if it is not known."""
    if "NVL" in device:  # of another peak than the card of the same name
        return None
    return next((peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", device)), None)
