"""Loads a DeepSpeed JSON and completes it with the values that our settings own. Imports neither torch nor deepspeed.

DeepSpeed ignores an unknown top-level key, so the names are checked here; it checks the rest itself.
"""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

from multicls.errors import UserError, did_you_mean
from multicls.files import REPOSITORY, read_json

Precision = Literal["fp32", "bf16", "fp16"]

OWNED: Mapping[str, str] = {  # key of the JSON -> setting that owns its value
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size and train.micro_batch_size",
    "gradient_clipping": "train.max_grad_norm",
    "bf16.enabled": "train.precision",
    "fp16.enabled": "train.precision",
    "optimizer": "train.learning_rate and train.weight_decay",
    "scheduler": "train.learning_rate and train.warmup_ratio",
    "torch_autocast": "train.precision",
    "compile": "train.compile",
}
SAFETIES = ("bf16.check_grad_overflow", "zero_optimization.compute_grad_norm")  # never false
KEYS = OWNED.keys() | set(
    """
    activation_checkpointing aio bf16 checkpoint comms_logger data_types disable_allgather disable_python_gc dump_state
    flops_profiler fp16 log_level memory_breakdown steps_per_print timers wall_clock_breakdown
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
    """.split()  # noqa: SIM905
)
OBJECTS = {"optimizer", "scheduler", "torch_autocast", "compile"}  # these are never "auto"
GROUPS = ("zero_optimization", "data_types", "checkpoint", "bf16", "fp16")  # read or completed here


def load_deepspeed_config(path: str | Path) -> dict[str, Any]:
    """Loads a DeepSpeed JSON without its comment, the key "//". The path may be relative to the repository.

    Raises:
        UserError: The file does not exist, is no JSON object, or sets keys that are unknown or belong to our settings.
    """
    file = next((p for p in (Path(path), REPOSITORY / path) if p.is_file()), path)
    config = read_json(file)
    if not isinstance(config, dict):
        raise UserError(f"{path}: a DeepSpeed JSON is an object, {{...}}.")
    config.pop("//", None)
    if wrong := [key for key in GROUPS if not isinstance(config.get(key, {}), dict)]:
        raise UserError(*(f"{path}: {key} = {config[key]}: must be an object." for key in wrong))
    enabled = {f"{name}.enabled": config.get(name, {}).get("enabled") for name in ("bf16", "fp16")}
    problems = [
        f"{path}: {key} = {value}: leave it out, and set {OWNED[key]}."
        for key, value in (config | enabled).items()
        if key in OWNED and (key in OBJECTS or value not in (None, "auto"))
    ]
    for name in SAFETIES:
        group, key = name.split(".")
        if config.get(group, {}).get(key) is False:
            problems.append(
                f"{path}: {name} = false: a loss that is not finite would ruin the weights; leave it out."
            )
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if not isinstance(stage, int) or isinstance(stage, bool):
        problems.append(
            f"{path}: zero_optimization.stage = {stage!r}: must be a number: 1, 2 or 3."
        )
    for key in config.keys() - KEYS:
        problems.append(
            f"{path}: {key}: no key that works here.{did_you_mean(key, KEYS, listed=False)}"
        )
    if problems:
        raise UserError(*sorted(problems))
    return config


def complete_deepspeed_config(
    config: Mapping[str, Any],
    *,
    micro_batch_size: int,
    accumulation: int,
    world_size: int,
    max_grad_norm: float,
    precision: Precision,
) -> dict[str, Any]:
    """Returns a copy of a DeepSpeed JSON with the values of our settings.

    DeepSpeed's throughput timer is off: it waits for the device twice in each micro-batch. A rank alone overlaps no
    communication, which would wait once more.

    With bf16 and ZeRO 2 or 3, gradients are accumulated in fp32 unless the JSON sets `data_types.grad_accum_dtype`.
    With ZeRO 1 DeepSpeed 0.19.8 cannot read the weights from such a checkpoint, so that `pretrain.engine` has fp32 sums
    of its own; with an offloaded optimizer DeepSpeed keeps the NaN of a skipped step in its fp32 sums. A rank has
    `micro_batch_size` examples in each of `accumulation` passes.
    """
    completed = {
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW offloads, too; nothing is compiled
        "steps_per_print": 1_000_000_000,  # the training loop reports
        "timers": {"throughput": {"enabled": False}},
        **deepcopy(dict(config)),
        "train_batch_size": micro_batch_size * accumulation * world_size,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": max_grad_norm,
    }
    for name in ("bf16", "fp16"):
        completed[name] = completed.get(name, {}) | {"enabled": precision == name}
    zero = completed.get("zero_optimization", {})
    if zero and world_size == 1:
        zero["overlap_comm"] = False
    offload = (zero.get("offload_optimizer") or {}).get("device", "none")
    if precision == "bf16" and zero.get("stage", 0) >= 2 and offload == "none":
        completed.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    return completed


def check_with_deepspeed(config: Mapping[str, Any], where: str) -> None:
    """Raises UserError if DeepSpeed refuses a completed configuration, or cannot read its checkpoints.

    Call it after `prepare_deepspeed`.
    """
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError, DtypeEnum

    try:
        checked = DeepSpeedConfig(deepcopy(dict(config)))
        DtypeEnum(checked.grad_accum_dtype or "fp32")
    except (AssertionError, ValueError, KeyError, TypeError, DeepSpeedConfigError) as error:
        raise UserError(f"{where}: DeepSpeed refuses it: {' '.join(str(error).split())}") from None
    sums = config.get("data_types", {}).get("grad_accum_dtype")
    if checked.zero_config.stage == 1 and checked.bfloat16_config.enabled and sums == "fp32":
        raise UserError(
            f"{where}: data_types.grad_accum_dtype = fp32: with ZeRO 1 and bf16 no checkpoint could be exported; "
            "leave it out, or set zero_optimization.stage to 2."
        )
