"""The DeepSpeed engine: how it is built, saved and loaded, and everything private of DeepSpeed that pretraining uses.

Checked with deepspeed 0.19.8. Code that a newer version may break is here and nowhere else.
"""

import argparse
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask

from multicls.deepspeed_config import Precision
from multicls.distributed import safe_unpickling, uses_cuda
from multicls.errors import UserError
from multicls.modeling_multicls import UNPADDING, encoder_layers
from multicls.optim import parameter_groups
from pretrain.settings import TrainSettings

# Encoders whose step compiling halves on a GPU; BERT's takes 9 % to 17 % longer (docs/results.md).
GAIN_FROM_COMPILING = {"modernbert"}


def build_engine(
    deepspeed: Any,
    model: Any,
    ds_config: dict[str, Any],
    train: TrainSettings,
    objectives: Collection[str],
    universal: bool = False,
) -> Any:
    """Returns DeepSpeed's engine around a pretraining model, which is changed in place.

    Args:
        ds_config: The completed JSON.
        universal: True if the checkpoint to load was converted to another number of ranks.
    """
    model.freeze_unused(objectives)  # or weight decay would change them
    checkpoint = ds_config.get("checkpoint", {}) | {"load_universal": universal}
    config = ds_config | {"checkpoint": checkpoint}
    groups = parameter_groups(model, train.weight_decay, train.head_lr_factor)
    options: Any = {"betas": (train.adam_beta1, train.adam_beta2), "eps": train.adam_epsilon}
    optimizer = torch.optim.AdamW(groups, lr=train.learning_rate, fused=True, **options)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def prepare_layers(model: Any, train: TrainSettings, precision: Precision) -> list[str]:
    """Applies the settings that change how layers compute; returns lines for the log.

    Raises:
        UserError: A setting does not work with this encoder, device or precision.
    """
    kind, encoder, notes = model.config.encoder.model_type, model.multicls.encoder, list[str]()
    fast = uses_cuda() and precision != "fp32"
    if train.activation_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise UserError(f"train.activation_checkpointing: {kind} has none; leave it out.")
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if train.unpad:
        if kind not in UNPADDING or not fast:
            known = ", ".join(UNPADDING)
            raise UserError(
                f"train.unpad: needs a GPU, bf16 or fp16, and one of {known}; this is {kind} in {precision}."
            )
        attention = "flash_attention_2" if find_spec("flash_attn") else "varlen"
        model.set_attn_implementation(attention)
        rates = ("attention_probs_dropout_prob", "attention_dropout")
        rate = max(getattr(encoder.config, name, 0.0) or 0.0 for name in rates)
        if rate and attention == "varlen":
            notes.append(
                f"warning: train.unpad: torch's attention of packed sequences has no dropout, so the encoder's rate "
                f"of {rate:g} there is not applied. The package flash-attn has it."
            )
    if uses_cuda():
        keep_mask_on_device()
    worth_it = fast and not train.unpad and kind in GAIN_FROM_COMPILING
    if train.compile is True or (train.compile == "auto" and worth_it):
        for layer in encoder_layers(encoder):  # the names of the weights stay
            layer.compile(dynamic=False)
        notes.append("the encoder's layers are compiled; the first steps take a minute or more")
    return notes


def keep_mask_on_device() -> None:
    """Makes transformers pass the padding mask to attention without reading it on the host in each forward pass.

    It leaves the mask out if a batch has no padding. To find out, the host would wait for the device.
    """

    for name, function in {"sdpa": sdpa_mask, "eager": eager_mask}.items():  # MPNet's is eager

        def mask(*args: Any, function: Any = function, **kwargs: Any) -> Any:
            return function(*args, **(kwargs | {"allow_is_bidirectional_skip": False}))

        AttentionMaskInterface.register(name, mask)


def save_engine(engine: Any, folder: Path, tag: str) -> None:
    """Saves the engine's state to `folder/tag`, each file flushed to the disk. All ranks must call it."""

    def save(state_dict: Any, path: str) -> None:
        with open(path, "wb") as file:  # given a path, torch would not report why it cannot write
            torch.save(state_dict, file)
            file.flush()
            os.fsync(file.fileno())

    engine.checkpoint_engine.save = save
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    try:
        engine.save_checkpoint(str(folder), tag=tag, save_latest=False, client_state=info)
    finally:
        del engine.checkpoint_engine.save


def load_engine(engine: Any, folder: Path, tag: str) -> None:
    """Loads the state in `folder/tag` into the engine. All ranks must call it."""
    ours = [
        {name: value for name, value in group.items() if name != "params"}
        for group in engine.optimizer.param_groups
    ]
    with safe_unpickling(folder / tag):
        path, _ = engine.load_checkpoint(str(folder), tag=tag)
    assert path is not None, f"DeepSpeed found no checkpoint {tag} in {folder}"
    if engine.load_universal_checkpoint():
        # In stage 3 DeepSpeed gives all groups the weight decay of the first, and one shared counter of steps.
        for group, values in zip(engine.optimizer.param_groups, ours, strict=True):
            group.update(values)
        # It also leaves the steps on the CPU, where the fused AdamW of a GPU cannot read them.
        for parameter, moments in engine.optimizer.optimizer.state.items():
            moments["step"] = moments["step"].to(parameter.device, copy=True)


def convert_to_universal(source: Path, target: Path) -> None:
    """Converts a checkpoint to DeepSpeed's universal form, in this process."""
    from deepspeed.checkpoint.ds_to_universal import main

    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    options |= {"strict": True, "inject_missing_state": True}
    with _reading(source):
        main(argparse.Namespace(input_folder=str(source), output_folder=str(target), **options))
    (target.parent / "latest_universal").unlink(missing_ok=True)


def fp32_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Loads the weights of a checkpoint in fp32, from the master weights where the precision has them."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with _reading(checkpoint):
        weights = get_fp32_state_dict_from_zero_checkpoint(
            str(checkpoint.parent), tag=checkpoint.name
        )
        whole = checkpoint / "mp_rank_00_model_states.pt"  # stage 1: frozen weights are only there
        if whole.exists():
            weights = torch.load(whole, weights_only=True, map_location="cpu")["module"] | weights
    return {name: tensor.float() for name, tensor in weights.items()}


@contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    """Lets DeepSpeed read a checkpoint without running code in it and without printing."""
    with safe_unpickling(checkpoint), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        yield
