"""Parameter groups and precision of pretraining, and the dropout seeds of both stages."""

import hashlib
from typing import Any, Literal

import torch
from torch import nn

from multicls.deepspeed_config import Precision
from multicls.errors import UserError


def parameter_groups(
    model: nn.Module, weight_decay: float, head_lr_factor: float = 1.0
) -> list[dict[str, Any]]:
    """Splits the trainable parameters into those with weight decay, and biases and LayerNorms without, if any.

    `head_lr_factor` is the "lr_factor" of the weights that `multicls.build.build` has named as new, in the model's
    attribute `new_weights`: it multiplies their learning rate. A model without the attribute has none.
    """
    new: frozenset[str] = getattr(model, "new_weights", frozenset())
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim >= 2 and "bias" not in name and "norm" not in name.lower()
            factor = head_lr_factor if name in new else 1.0
            groups.setdefault((weight_decay if decays else 0.0, factor), []).append(parameter)
    return [
        {"params": groups[decay, factor], "weight_decay": decay, "lr_factor": factor}
        for decay, factor in sorted(groups, reverse=True)
    ]


def dropout_seed(seed: int, number: int) -> int:
    """Returns torch's seed for the dropout of micro-batch `number`, whichever rank computes it."""
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def choose_precision(requested: Precision | Literal["auto"], device: torch.device) -> Precision:
    """Returns the precision to train in; fp16 on a CPU is a `UserError`.

    "auto" means bf16 on a GPU with native bf16, fp16 on any other GPU (which would emulate bf16), fp32 on a CPU.
    """
    on_gpu = device.type == "cuda"
    if requested == "fp16" and not on_gpu:
        raise UserError("train.precision = fp16: this needs a GPU; set fp32, bf16 or auto.")
    if requested != "auto":
        return requested
    native = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if native else "fp16" if on_gpu else "fp32"
