"""DeepSpeed JSON, checked key by key and completed with what our settings own.

DeepSpeed ignores an unknown top-level key, lets "auto" through where a number belongs, and stops at the first mistake
it sees. Here every mistake is reported, before anything is imported or written. A value that our settings own (batch
sizes, accumulation, clipping, precision) is "auto" in the JSON, or left out, or equal to ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from multicls.errors import UserError, did_you_mean
from multicls.files import find_shipped

Precision = Literal["fp32", "bf16", "fp16"]
Schema = Mapping[str, Any]  # key -> Schema of a group, a tuple of the values allowed, or a kind of value

BOOL, INT, NUMBER, TEXT = "true or false", "a whole number, 0 or more", "a number", "a text"
LIST, NAMES_OR_AUTO = "a list", 'a list of names, or "auto"'
KINDS: Mapping[str, Callable[[Any], bool]] = {
    BOOL: lambda value: isinstance(value, bool),
    INT: lambda value: _is_number(value) and value >= 0 and value == int(value),  # 5e8 is a whole number in JSON too
    NUMBER: lambda value: _is_number(value),
    TEXT: lambda value: isinstance(value, str),
    LIST: lambda value: isinstance(value, list),
    NAMES_OR_AUTO: lambda value: value == "auto" or isinstance(value, list),
}
DTYPE = ("fp32", "bf16", "fp16")
DEVICE = ("none", "cpu", "nvme")

SCHEMA: Schema = {
    "train_batch_size": INT,
    "train_micro_batch_size_per_gpu": INT,
    "gradient_accumulation_steps": INT,
    "gradient_clipping": NUMBER,
    "bf16": {
        "enabled": BOOL,
        "immediate_grad_update": BOOL,
        "bf16_master_weights_and_grads": BOOL,
        "bf16_optimizer_states": BOOL,
    },
    "fp16": {
        "enabled": BOOL,
        "auto_cast": BOOL,
        "loss_scale": NUMBER,
        "initial_scale_power": INT,
        "loss_scale_window": INT,
        "hysteresis": INT,
        "consecutive_hysteresis": BOOL,
        "min_loss_scale": INT,
        "fp16_master_weights_and_grads": BOOL,
    },
    "zero_optimization": {
        "stage": (0, 1, 2, 3),
        "contiguous_gradients": BOOL,
        "reduce_scatter": BOOL,
        "reduce_bucket_size": INT,
        "use_multi_rank_bucket_allreduce": BOOL,
        "allgather_partitions": BOOL,
        "allgather_bucket_size": INT,
        "overlap_comm": BOOL,
        "load_from_fp32_weights": BOOL,
        "elastic_checkpoint": BOOL,
        "offload_param": {
            "device": DEVICE,
            "nvme_path": TEXT,
            "buffer_count": INT,
            "buffer_size": INT,
            "max_in_cpu": INT,
            "pin_memory": BOOL,
        },
        "offload_optimizer": {
            "device": DEVICE,
            "nvme_path": TEXT,
            "buffer_count": INT,
            "pin_memory": BOOL,
            "pipeline_read": BOOL,
            "pipeline_write": BOOL,
            "fast_init": BOOL,
            "ratio": NUMBER,
            "super_offload": BOOL,
            "cpuadam_cores_perc": NUMBER,
        },
        "sub_group_size": INT,
        "stage3_prefetch_bucket_size": INT,
        "stage3_param_persistence_threshold": INT,
        "stage3_model_persistence_threshold": INT,
        "stage3_max_live_parameters": INT,
        "stage3_max_reuse_distance": INT,
        "stage3_gather_16bit_weights_on_model_save": BOOL,
        "stage3_module_granularity_threshold": INT,
        "stage3_use_all_reduce_for_fetch_params": BOOL,
        "stage3_allgather_sequential": BOOL,
        "ignore_unused_parameters": BOOL,
        "legacy_stage1": BOOL,
        "round_robin_gradients": BOOL,
        "parameter_alignment": BOOL,
        "zero_hpz_partition_size": INT,
        "zero_quantized_weights": BOOL,
        "zero_quantized_nontrainable_weights": BOOL,
        "zero_quantized_gradients": BOOL,
        "memory_efficient_linear": BOOL,
        "pipeline_loading_checkpoint": BOOL,
        "override_module_apply": BOOL,
        "log_trace_cache_warnings": BOOL,
        "enable_sanity_checks": BOOL,
    },
    "zero_allow_untested_optimizer": BOOL,
    "zero_force_ds_cpu_optimizer": BOOL,
    "activation_checkpointing": {
        "partition_activations": BOOL,
        "contiguous_memory_optimization": BOOL,
        "cpu_checkpointing": BOOL,
        "number_checkpoints": INT,
        "synchronize_checkpoint_boundary": BOOL,
        "profile": BOOL,
    },
    "communication_data_type": DTYPE,
    "data_types": {
        "grad_accum_dtype": DTYPE,
        "param_dtype": DTYPE,
        "buffer_dtype": DTYPE,
        "keep_in_fp32_modules": NAMES_OR_AUTO,
    },
    "prescale_gradients": BOOL,
    "gradient_predivide_factor": NUMBER,
    "disable_allgather": BOOL,
    "disable_python_gc": BOOL,
    "aio": {
        "block_size": INT,
        "queue_depth": INT,
        "intra_op_parallelism": INT,
        "single_submit": BOOL,
        "overlap_events": BOOL,
        "use_gds": BOOL,
    },
    "checkpoint": {
        "tag_validation": ("Ignore", "Warn", "Fail"),
        "load_universal": BOOL,
        "use_node_local_storage": BOOL,
        "parallel_write": {"pipeline_stage": BOOL},
    },
    "steps_per_print": INT,
    "wall_clock_breakdown": BOOL,
    "memory_breakdown": BOOL,
    "dump_state": BOOL,
    "log_level": ("debug", "info", "warning", "error", "critical"),
    "timers": {"throughput": {"enabled": BOOL, "synchronized": BOOL}},
    "comms_logger": {"enabled": BOOL, "prof_all": BOOL, "prof_ops": LIST, "verbose": BOOL, "debug": BOOL},
    "flops_profiler": {
        "enabled": BOOL,
        "recompute_fwd_factor": NUMBER,
        "profile_step": INT,
        "module_depth": NUMBER,
        "top_modules": INT,
        "detailed": BOOL,
        "output_file": TEXT,
    },
}

_OTHER_PARALLELISM = "the model is trained data-parallel only; take it out."
_OWN_LOGS = "the run folder gets its own TensorBoard files and metrics.jsonl; take it out."
_REPLACED = "DeepSpeed has replaced it; write {} instead."
REFUSED: Mapping[str, str] = {  # what DeepSpeed knows and this project does not use, and what to do instead
    "optimizer": "our settings own the optimizer; take it out and set train.learning_rate, train.weight_decay.",
    "scheduler": "our settings own the schedule; take it out and set train.learning_rate, train.warmup_fraction.",
    "torch_autocast": "our settings own the precision; take it out and set train.precision.",
    "bfloat16": _REPLACED.format('"bf16"'),
    "managed_gradient_accumulation": "the training loop leaves accumulation to DeepSpeed; take it out.",
    "gradient_allreduce_op": "the losses are scaled for the mean over ranks, DeepSpeed's default; take it out.",
    "compile": "the training loop does not compile; take it out.",
    "data_efficiency": "batches come from data_prep; take it out.",
    "dataloader_drop_last": "batches come from data_prep; take it out.",
    "vocabulary_size": "the model's configuration has it; take it out.",
    "hybrid_engine": "it is for generation; take it out.",
    "weight_quantization": "it is for inference; take it out.",
    "autotuning": "our settings own the batch size; take it out.",
    "datastates_ckpt": "checkpoints are written by the training loop; take it out.",
    "checkpoint.writer": "checkpoints are written by the training loop; take it out.",
    "checkpoint.checkpoint_serialization": "checkpoints are written by the training loop; take it out.",
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), _OWN_LOGS),
    **dict.fromkeys(("pipeline", "tensor_parallel", "expert_parallel", "sequence_parallel_size"), _OTHER_PARALLELISM),
    **dict.fromkeys(("use_data_before_expert_parallelism", "seq_parallel_communication_data_type"), _OTHER_PARALLELISM),
    "zero_optimization.leaf_module": "it is for mixtures of experts; take it out.",
    "zero_optimization.zenflow": "it needs DeepSpeed's own optimizer; take it out.",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "it needs DeepSpeed's Muon; take it out.",
    "zero_optimization.compute_grad_norm": "the gradient norm is needed for clipping and the log; take it out.",
    "bf16.check_grad_overflow": "gradients that are not finite must not reach the weights; take it out.",
    "zero_optimization.cpu_offload": _REPLACED.format('"offload_optimizer"'),
    "zero_optimization.cpu_offload_param": _REPLACED.format('"offload_param"'),
    "zero_optimization.cpu_offload_use_pin_memory": _REPLACED.format('"pin_memory" in the offload group'),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _REPLACED.format(
        '"stage3_gather_16bit_weights_on_model_save"'
    ),
}

OWNED: Mapping[str, str] = {  # what our settings own, and the settings that own it
    "train_batch_size": "train.micro_batches and train.triples",
    "train_micro_batch_size_per_gpu": "train.triples",
    "gradient_accumulation_steps": "train.micro_batches",
    "gradient_clipping": "train.gradient_clipping",
    "bf16.enabled": "train.precision",
    "fp16.enabled": "train.precision",
}

DEFAULTS: Mapping[str, Any] = {  # ours where the JSON is silent
    "zero_force_ds_cpu_optimizer": False,  # offloading goes with torch's fused AdamW, which needs no op compiled
    "steps_per_print": 1_000_000_000,  # the training loop prints
    "wall_clock_breakdown": False,
}


def load_ds_config(path: str | Path) -> dict[str, Any]:
    """Reads a DeepSpeed JSON; a path that does not exist here is looked up in the repository.

    Raises:
        UserError: no such file, not JSON, not a JSON object, or a key given twice.
    """
    file = find_shipped(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except IsADirectoryError:
        raise UserError(f"{path}: this is a folder; give the DeepSpeed JSON file in it.") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, or a duplicate
        raise UserError(f"{path}: not valid JSON: {error}.") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: a DeepSpeed JSON is an object, {{...}}, not {_shown(config)}.")
    return config


def resolve_ds_config(
    config: Mapping[str, Any],
    *,
    where: str,
    micro_batch_size: int,
    accumulation: int,
    world_size: int,
    gradient_clipping: float,
    precision: Precision | None,
) -> dict[str, Any]:
    """Checks a DeepSpeed JSON and puts our settings' values for "auto".

    Args:
        config: as `load_ds_config` gives it; a null counts as left out.
        where: name of the JSON, for messages.
        micro_batch_size: items of a micro-batch on one rank.
        accumulation: micro-batches that one rank adds up for an optimizer step.
        world_size: number of ranks.
        gradient_clipping: largest global gradient norm; 0 for no clipping.
        precision: of the forward and backward pass; None if not known yet, which leaves out the check of it.

    Returns:
        What `deepspeed.initialize(config=...)` takes: no "auto" that DeepSpeed would have to guess.

    Raises:
        UserError: all problems found: unknown or refused keys, wrong types, conflicts with our settings.
    """
    resolved = _without_nulls(config)
    problems = _check_group(resolved, SCHEMA, "") or _check_together(resolved)
    ours = {
        "train_batch_size": micro_batch_size * accumulation * world_size,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": gradient_clipping,
        "bf16.enabled": precision == "bf16",
        "fp16.enabled": precision == "fp16",
    }
    for name, value in ours.items():
        known = precision is not None or not name.endswith(".enabled")
        if not _settle(resolved, name, value) and known:
            batch = f" ({micro_batch_size} x {accumulation} accumulated x {world_size} ranks)" * ("train_b" in name)
            problems.append(
                f"{name} = {_shown(_find(resolved, name))}: conflicts with our settings, which make it "
                f'{_shown(value)}{batch}. Write "auto", or change {OWNED[name]}.'
            )
    if problems:
        raise UserError(*(f"{where}: {problem}" for problem in problems))
    return {**DEFAULTS, **resolved}


def _check_group(group: Mapping[str, Any], schema: Schema, prefix: str) -> list[str]:
    problems = []
    for key, value in group.items():
        name = prefix + key
        if name in REFUSED:
            problems.append(f"{name}: {REFUSED[name]}")
        elif key not in schema:
            problems.append(f"{name}: no such key.{_nearest(key, schema, prefix)}")
        elif isinstance(schema[key], Mapping):
            if isinstance(value, dict):
                problems += _check_group(value, schema[key], f"{name}.")
            else:
                problems.append(f"{name} = {_shown(value)}: this is a group, {{...}}.")
        elif value == "auto" and (name in OWNED or schema[key] == NAMES_OR_AUTO):
            continue
        elif value == "auto":
            problems.append(f'{name} = "auto": nothing sets it here; take it out for DeepSpeed\'s default.')
        elif not _allowed(value, schema[key]):
            problems.append(f"{name} = {_shown(value)}: give {_expected(schema[key])}.")
    return problems


def _settle(config: dict[str, Any], name: str, ours: Any) -> bool:
    """Puts our value at the dotted `name`; false if another value of the right type is there."""
    theirs = _find(config, name)
    if theirs not in (None, "auto", ours):
        return not _allowed(theirs, _find(SCHEMA, name))  # a wrong type is reported as such
    group, _, key = name.rpartition(".")
    target = config.setdefault(group, {}) if group else config
    if isinstance(target, dict):
        target[key] = ours
    return True


def _find(tree: Any, name: str) -> Any:
    """The value at the dotted `name`, None where there is none."""
    for key in name.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _check_together(config: Mapping[str, Any]) -> list[str]:
    """Problems of keys that are right one by one."""
    problems = []
    if _find(config, "bf16.enabled") is True and _find(config, "fp16.enabled") is True:
        problems.append('bf16.enabled = true, fp16.enabled = true: only one can be; write "auto" for both.')
    stage = _find(config, "zero_optimization.stage") or 0
    for group, lowest in (("offload_param", 3), ("offload_optimizer", 1)):
        name = f"zero_optimization.{group}.device"
        if _find(config, name) not in (None, "none") and stage < lowest:
            problems.append(
                f"{name} = {_shown(_find(config, name))}: DeepSpeed offloads this from stage {lowest} up; "
                f"raise zero_optimization.stage = {stage}, or take the offloading out."
            )
    return problems


def _nearest(key: str, schema: Schema, prefix: str) -> str:
    hint = did_you_mean(key, schema)
    if hint.startswith(" Did"):
        return hint
    for name in _names(SCHEMA):  # the right key in the wrong group
        if name.rpartition(".")[2] == key:
            return f" Did you mean '{name}'?"
    return hint if prefix else " See https://www.deepspeed.ai/docs/config-json/ for the keys."


def _names(schema: Schema, prefix: str = "") -> list[str]:
    names = []
    for key, kind in schema.items():
        names += [prefix + key] + (_names(kind, f"{prefix}{key}.") if isinstance(kind, Mapping) else [])
    return names


def _allowed(value: Any, kind: Any) -> bool:
    if isinstance(kind, tuple):
        return not isinstance(value, bool) and value in kind
    return KINDS[kind](value)


def _expected(kind: Any) -> str:
    return " or ".join(_shown(option) for option in kind) if isinstance(kind, tuple) else str(kind)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")


def _shown(value: Any) -> str:
    return json.dumps(value)


def _without_nulls(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_nulls(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if value is not None
    }


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    group: dict[str, Any] = {}
    for key, value in pairs:
        if key in group:
            raise ValueError(f"the key '{key}' is given twice")
        group[key] = value
    return group
