"""The DeepSpeed engine: how it is built, and everything private of DeepSpeed that this project touches.

Checked with deepspeed 0.19.8. What a newer version may break is here and nowhere else.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from multicls.modeling_multicls import VARLEN
from multicls.optim import parameter_groups
from multicls.safe_unpickling import safe_unpickling
from pretrain.settings import ObjectiveSettings, PretrainSettings

VOCABULARY_MULTIPLE = 64  # rows of the decoder, so that 16-bit matrix products are aligned
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # options of glibc's mallopt
PADDING_BIAS = -1e4  # of a padded row: its probability is exactly 0, and so are its gradients


def build_engine(
    deepspeed: Any, model: Any, settings: PretrainSettings, ds_config: dict[str, Any], *, universal: bool = False
) -> Any:
    """Returns DeepSpeed's engine around a `MultiClsBertForPreTraining`, which is changed in place.

    Parameters that no loss reaches are frozen, and the vocabulary is padded inside the engine. `ds_config` is the
    resolved JSON. `universal`: the checkpoint to load was converted to another number of ranks.
    """
    train = settings.train
    if not torch.cuda.is_available():
        keep_freed_memory()
    freeze_unused(model, settings.objective)
    pad_vocabulary(model)
    if train.activation_checkpointing:
        # transformers 5.23 has renamed it
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    if train.unpad:
        model.set_attn_implementation(VARLEN)
    if train.compile:
        compile_layers(model)
    config = ds_config | {"checkpoint": ds_config.get("checkpoint", {}) | {"load_universal": universal}}
    optimizer: torch.optim.AdamW
    arguments: dict[str, Any] = {"params": parameter_groups(model, train.weight_decay), "lr": train.learning_rate}
    if _has_no_check(ds_config):
        optimizer = CheckedAdamW(**arguments, max_norm=train.max_grad_norm)
        config["gradient_clipping"] = 0.0
    else:
        optimizer = torch.optim.AdamW(**arguments, fused=True)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    _leave_out_overflow_scan(engine)
    scaler: Any = getattr(engine.optimizer, "loss_scaler", None)
    if hasattr(scaler, "raise_error_at_min_scale"):
        scaler.raise_error_at_min_scale = False  # DeepSpeed's error names neither step nor examples
    return engine


def keep_freed_memory() -> None:
    """Makes glibc keep the memory of freed tensors, for training on CPU.

    Otherwise each large tensor is mapped anew, and a forward pass of many examples may take twice the time
    (`python benchmarks/run.py step --only groups`). Does nothing with other C libraries.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1)):
            mallopt(option, value)


class CheckedAdamW(torch.optim.AdamW):
    """AdamW for fp32 without ZeRO, the one case in which DeepSpeed checks no gradient.

    A step whose gradients are not finite changes nothing and sets `overflow`, as DeepSpeed's own optimizers do.
    `max_norm` is the largest global gradient norm.
    """

    def __init__(self, max_norm: float, **kwargs: Any) -> None:
        super().__init__(fused=True, **kwargs)
        self.max_norm = max_norm
        self.overflow = False
        self._global_grad_norm = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clips the gradients and updates the weights, if the gradients are finite."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        self._global_grad_norm = float(norm)
        self.overflow = not math.isfinite(self._global_grad_norm)
        if not self.overflow:
            nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm)
            super().step(closure)


def freeze_unused(model: Any, objective: ObjectiveSettings) -> None:
    """Freezes the parameters that no objective in use reaches, so that weight decay does not change them."""
    unused = [] if model.bert.pooler is None else [model.bert.pooler]
    if not objective.mlm:
        unused.append(model.cls.predictions.transform)
        model.cls.predictions.bias.requires_grad_(False)
    if not objective.tfidf:
        unused.append(model.cls.tfidf)
    if not objective.so:
        unused += [model.cls.order_transform, model.cls.seq_relationship]
    if not objective.mcqt:
        unused.append(model.bert.facet_head)
    for module in unused:
        module.requires_grad_(False)


def compile_layers(model: Any) -> None:
    """Compiles each layer of the encoder in place; the names of the weights stay."""
    for layer in model.bert.encoder.layer:
        layer.compile(dynamic=False)


def pad_vocabulary(model: Any, multiple: int = VOCABULARY_MULTIPLE) -> None:
    """Pads word embeddings and decoder to a multiple of `multiple` rows; `model.config` keeps the real size.

    The padded rows are zero and their bias is so low that they have no probability and no gradient: losses and updates
    of all other weights stay the same. `pretrain.export.without_padding` removes them.
    """
    embeddings, head = model.bert.embeddings.word_embeddings, model.cls.predictions
    rows = -embeddings.num_embeddings % multiple
    weight, bias = embeddings.weight, head.bias
    padded = nn.Parameter(torch.cat([weight, weight.new_zeros(rows, weight.shape[1])]), weight.requires_grad)
    embeddings.weight = head.decoder.weight = padded
    head.bias = head.decoder.bias = nn.Parameter(
        torch.cat([bias, bias.new_full((rows,), PADDING_BIAS)]), bias.requires_grad
    )
    embeddings.num_embeddings = head.decoder.out_features = len(padded)


def updated(engine: Any) -> bool:
    """Returns whether the last optimizer step changed the weights, the same on all ranks."""
    return not engine.optimizer.overflow


def loss_scale(engine: Any) -> float:
    """Returns the present loss scale of fp16, 0 in other precisions."""
    if not engine.fp16_enabled():
        return 0.0
    optimizer = engine.optimizer
    state = optimizer.loss_scale_config if hasattr(optimizer, "loss_scale_config") else optimizer.loss_scaler
    return float(state.cur_scale)


def grad_norm(engine: Any) -> float:
    """Returns the global gradient norm of the last step before clipping; infinite after a step without update."""
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    norm = float(engine.get_global_grad_norm() or 0.0)
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):  # stage 0 with fp16: it is of the scaled gradients
        norm /= float(engine.optimizer.loss_scale_config.cur_scale)
    return norm


def at_smallest_loss_scale(engine: Any) -> bool:
    """Returns whether the loss scale cannot be halved any more; true where it does not change."""
    if not (engine.fp16_enabled() and engine.dynamic_loss_scale()):
        return True
    return loss_scale(engine) <= float(engine.dynamic_loss_scale_args()["min_scale"])


def save_engine(engine: Any, folder: Path, tag: str, add: Callable[[Path, Callable[[], None]], None]) -> None:
    """Saves the engine's state to `folder/tag`; all ranks must call it.

    `add` receives the path of each file and the function that writes it, instead of DeepSpeed writing it.
    """

    def save(state_dict: Any, path: str) -> None:
        def write() -> None:
            with open(path, "wb") as file:  # of a path torch would not tell why it cannot be written
                torch.save(state_dict, file)

        add(Path(path), write)

    engine.checkpoint_engine.save = save
    engine._copy_recovery_script = lambda path: None  # model.safetensors makes the script needless
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    try:
        engine.save_checkpoint(str(folder), tag=tag, save_latest=False, client_state=info)
    finally:
        del engine.checkpoint_engine.save, engine._copy_recovery_script


def load_engine(engine: Any, folder: Path, tag: str) -> None:
    """Loads the state in `folder/tag` into the engine; all ranks must call it."""
    groups = engine.optimizer.param_groups
    ours = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    with safe_unpickling(folder / tag):
        path, _ = engine.load_checkpoint(str(folder), tag=tag)
    assert path is not None, f"DeepSpeed found no checkpoint {tag} in {folder}"
    if engine.load_universal_checkpoint():
        # In stage 3 DeepSpeed gives all groups the weight decay of the first, and one shared counter of steps.
        for group, values in zip(engine.optimizer.param_groups, ours, strict=True):
            group.update(values)
        for moments in engine.optimizer.optimizer.state.values():
            moments["step"] = moments["step"].clone()


def convert_to_universal(source: Path, target: Path) -> None:
    """Converts a checkpoint to DeepSpeed's universal form, in this process and without DeepSpeed's messages."""
    from deepspeed.checkpoint.ds_to_universal import main

    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    options |= {"strict": True, "inject_missing_state": True}
    with safe_unpickling(source), open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        main(argparse.Namespace(input_folder=str(source), output_folder=str(target), **options))
    (target.parent / "latest_universal").unlink(missing_ok=True)


def full_weights(engine: Any) -> dict[str, Tensor]:
    """Returns copies of all parameters in fp32 on the CPU on rank 0, {} on other ranks; all ranks must call it.

    They come from the fp32 master weights if the precision has them.
    """
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.utils import safe_get_full_fp32_param

    masters: dict[int, Tensor] = {}
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):  # stage 0 with fp16, unknown to safe_get_full_fp32_param
        for halves, fulls in zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True):
            masters |= {id(half): full for half, full in zip(halves, fulls, strict=True)}
    weights: dict[str, Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        full = masters.get(id(parameter))
        if full is None and parameter.requires_grad:
            full = safe_get_full_fp32_param(parameter)
        if full is None:
            full = _gathered(parameter)
        if dist.get_rank() == 0:
            weights[name] = full.detach().float().cpu().clone()
    return weights


def _gathered(parameter: torch.nn.Parameter) -> Tensor:
    if not hasattr(parameter, "ds_id"):  # not partitioned (ZeRO stages 0 to 2)
        return parameter
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter]):
        return parameter.detach().clone()


def _has_no_check(ds_config: dict[str, Any]) -> bool:
    """Returns whether DeepSpeed would update with gradients that are not finite: fp32 without ZeRO."""
    reduced = any(ds_config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
    return not reduced and not ds_config.get("zero_optimization", {}).get("stage")


def _leave_out_overflow_scan(engine: Any) -> None:
    """Leaves out DeepSpeed's scan of each gradient for overflow, over a third of all operator calls of a step.

    ZeRO's optimizers check the global gradient norm next, which is not finite where a gradient is not.
    """
    if engine.zero_optimization():
        engine.optimizer.check_overflow = lambda *args, **kwargs: None
