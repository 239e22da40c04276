"""Checks a DeepSpeed JSON and completes it with the values that our settings own.

Our settings own batch sizes, accumulation, clipping and precision: the JSON holds "auto", nothing, or the same value.
DeepSpeed ignores an unknown top-level key and accepts "auto" in place of a number, so `resolve_ds_config` checks what
DeepSpeed does not. It imports neither torch nor deepspeed. `check_with_deepspeed` leaves the rest to DeepSpeed itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from multicls.errors import UserError, did_you_mean
from multicls.files import find_shipped

if TYPE_CHECKING:
    from pydantic import BaseModel

Precision = Literal["fp32", "bf16", "fp16"]
Schema = Mapping[str, Any]  # key -> Schema of a group, tuple of allowed values, or kind of value

REST = "..."  # DeepSpeed's pydantic models check the other keys of the group
DTYPES = ("fp32", "bf16", "fp16")
KINDS = {bool: "true or false", int: "a whole number, 0 or more", float: "a number", str: "a text", list: "a list"}


def _each(kind: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


SCHEMA: Schema = {
    **_each(int, "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print"),
    **_each(float, "gradient_clipping gradient_predivide_factor"),
    **_each(bool, "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer prescale_gradients disable_allgather"),
    **_each(bool, "disable_python_gc dump_state wall_clock_breakdown memory_breakdown"),
    "log_level": ("debug", "info", "warning", "error", "critical"),
    "communication_data_type": DTYPES,
    "zero_optimization": {"stage": (0, 1, 2, 3), REST: None},
    "bf16": {"enabled": bool, REST: None},
    "fp16": {"enabled": bool, REST: None},
    "comms_logger": {REST: None},
    "timers": {"throughput": {REST: None}},
    "data_types": {**_each(DTYPES, "grad_accum_dtype param_dtype buffer_dtype"), "keep_in_fp32_modules": list},
    "activation_checkpointing": {
        **_each(bool, "partition_activations contiguous_memory_optimization cpu_checkpointing profile"),
        **_each(bool, "synchronize_checkpoint_boundary"),
        "number_checkpoints": int,
    },
    "aio": {
        **_each(int, "block_size queue_depth intra_op_parallelism"),
        **_each(bool, "single_submit overlap_events use_gds"),
    },
    "checkpoint": {
        "tag_validation": ("Ignore", "Warn", "Fail"),
        **_each(bool, "load_universal use_node_local_storage"),
        "parallel_write": {"pipeline_stage": bool},
    },
    "flops_profiler": {
        **_each(bool, "enabled detailed"),
        **_each(int, "profile_step top_modules"),
        **_each(float, "recompute_fwd_factor module_depth"),
        "output_file": str,
    },
}

REFUSED: Mapping[str, str] = {  # keys that DeepSpeed reads and this project does not use -> what to do instead
    "optimizer": "take it out and set train.learning_rate and train.weight_decay",
    "scheduler": "take it out and set train.learning_rate and train.warmup_ratio",
    "torch_autocast": "take it out and set train.precision",
    "compile": "take it out and set train.compile",
    "bfloat16": 'write "bf16" instead',
    **_each("a run writes its own logs; take it out", "tensorboard wandb csv_monitor comet"),
    **_each(
        "the training loop decides this; take it out",
        "managed_gradient_accumulation gradient_allreduce_op data_efficiency dataloader_drop_last autotuning "
        "datastates_ckpt checkpoint.writer checkpoint.checkpoint_serialization",
    ),
    **_each(
        "training is data-parallel only; take it out",
        "pipeline tensor_parallel expert_parallel sequence_parallel_size use_data_before_expert_parallelism "
        "seq_parallel_communication_data_type zero_optimization.leaf_module",
    ),
    **_each(
        "this project does not use it; take it out",
        "vocabulary_size hybrid_engine weight_quantization zero_optimization.zenflow "
        "zero_optimization.save_muon_momentum_buffer_in_memory",
    ),
    **_each(
        "a step that is not finite is found by it; take it out",
        "zero_optimization.compute_grad_norm bf16.check_grad_overflow",
    ),
}

OWNED: Mapping[str, str] = {  # key of the JSON -> setting that owns its value
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size or train.micro_batch_size",
    "gradient_clipping": "train.max_grad_norm",
    "bf16.enabled": "train.precision",
    "fp16.enabled": "train.precision",
}

DEFAULTS: Mapping[str, Any] = {  # our values for keys that the JSON leaves out
    "zero_force_ds_cpu_optimizer": False,  # offloading then works with torch's fused AdamW; no op is compiled
    "steps_per_print": 1_000_000_000,  # the training loop reports
    "wall_clock_breakdown": False,
    "timers.throughput.enabled": False,  # DeepSpeed's timer synchronises the device in every step
}


def load_ds_config(path: str | Path) -> dict[str, Any]:
    """Loads a DeepSpeed JSON, found by `find_shipped`, and drops its comments: texts or lists of them under "//".

    Raises:
        UserError: the file is a YAML recipe, does not exist, is not JSON, holds no JSON object, or gives a key twice.
    """
    if Path(path).suffix in (".yaml", ".yml"):
        raise UserError(f"--config {path}: takes the JSON of DeepSpeed; give a YAML file of settings with --recipe.")
    file = find_shipped(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_read_group)
    except IsADirectoryError:
        raise UserError(f"{path}: this is a folder; give the DeepSpeed JSON file in it.") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, or from _read_group
        raise UserError(f"{path}: not valid JSON: {error}.") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: a DeepSpeed JSON is an object, {{...}}, not {json.dumps(config)}.")
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
    owners: Mapping[str, str] = OWNED,
) -> dict[str, Any]:
    """Checks a DeepSpeed JSON and replaces "auto" by the values of our settings, except in `keep_in_fp32_modules`.

    Args:
        config: result of `load_ds_config`; a null counts as left out. It is not changed.
        where: name of the JSON in messages.
        micro_batch_size: examples in one micro-batch of one rank.
        accumulation: micro-batches that one rank accumulates in an optimizer step.
        gradient_clipping: largest global gradient norm; 0 means no clipping.
        precision: precision of the forward and backward pass; None (not known yet) skips its check.
        owners: name of the setting that owns each key of `OWNED`, for messages.

    Raises:
        UserError: keys are unknown or refused, values have the wrong type or conflict with our settings; lists all.
    """
    resolved = _without_nulls(config)
    problems = _check_group(resolved, SCHEMA) or _check_offloading(resolved)
    ours = {
        "train_batch_size": micro_batch_size * accumulation * world_size,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": gradient_clipping,
        "bf16.enabled": precision == "bf16",
        "fp16.enabled": precision == "fp16",
    }
    for name, value in ours.items():
        _fill(resolved, name, value)
        theirs = _find(resolved, name)
        unknown = name.endswith(".enabled") and precision is None
        if theirs in (None, value) or unknown or not _allowed(theirs, _find(SCHEMA, name)):  # the last is reported
            continue
        product = f" ({micro_batch_size} examples x {accumulation} accumulation x {world_size} ranks)"
        problems.append(
            f"{name} = {json.dumps(theirs)}: conflicts with our settings, which make it {json.dumps(value)}"
            f'{product * (name == "train_batch_size")}. Write "auto", or change {owners[name]}.'
        )
    if problems:
        raise UserError(*(f"{where}: {problem}" for problem in problems))
    for name, value in DEFAULTS.items():
        _fill(resolved, name, value)
    return resolved


def check_with_deepspeed(config: Mapping[str, Any], where: str) -> None:
    """Lets DeepSpeed check a resolved configuration. Call it after `prepare_deepspeed` and before anything is written.

    Raises:
        UserError: DeepSpeed refuses the configuration; lists all keys that its pydantic models refuse.
    """
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
    from pydantic import ValidationError

    models: dict[str, type[BaseModel]] = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comms_logger": CommsLoggerConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
    }
    problems = []
    for name, model in models.items():
        try:
            model(**(_find(config, name) or {}))
        except ValidationError as error:
            problems += [_explain(name, model, detail) for detail in error.errors()]
    if not problems:  # each group is right by itself; do they fit together?
        try:
            DeepSpeedConfig(dict(config))
        except (AssertionError, ValueError, DeepSpeedConfigError) as error:
            problems.append(f"DeepSpeed refuses it: {' '.join(str(error).split())}")
    if problems:
        raise UserError(*(f"{where}: {problem}" for problem in problems))


def _check_group(group: Mapping[str, Any], schema: Schema, prefix: str = "") -> list[str]:
    problems = []
    for key, value in group.items():
        name, kind = prefix + key, schema.get(key)
        if name in REFUSED:
            problems.append(f"{name}: {REFUSED[name]}.")
        elif kind is None and REST not in schema:
            problems.append(f"{name}: no such key.{_nearest(key, schema, prefix)}")
        elif isinstance(value, dict) and (kind is None or isinstance(kind, Mapping)):
            problems += _check_group(value, kind or {REST: None}, f"{name}.")
        elif value == "auto":
            if name not in OWNED and kind is not list:  # keep_in_fp32_modules
                problems.append(f'{name} = "auto": no setting fills this in; take it out for DeepSpeed\'s default.')
        elif isinstance(kind, Mapping):
            problems.append(f"{name} = {json.dumps(value)}: this is a group, {{...}}.")
        elif kind is not None and not _allowed(value, kind):
            expected = " or ".join(map(json.dumps, kind)) if isinstance(kind, tuple) else KINDS[kind]
            problems.append(f"{name} = {json.dumps(value)}: give {expected}.")
    return problems


def _check_offloading(config: Mapping[str, Any]) -> list[str]:
    """Returns a message for each offloading whose stage is too low, about which DeepSpeed does not complain."""
    problems, stage = [], _find(config, "zero_optimization.stage") or 0
    for group, lowest in (("offload_param", 3), ("offload_optimizer", 1)):
        name = f"zero_optimization.{group}.device"
        device = _find(config, name) or "none"
        if device != "none" and stage < lowest:
            problems.append(
                f"{name} = {json.dumps(device)}: DeepSpeed offloads this from stage {lowest} up; "
                f"raise zero_optimization.stage = {stage}, or take the offloading out."
            )
    return problems


def _explain(name: str, model: type[BaseModel], detail: Any) -> str:
    """Words one error of a pydantic model; `name` is the model's key in the JSON."""
    *groups, key = detail["loc"] or ("",)
    for group in groups:  # find the inner model that refuses the key
        annotation = model.model_fields[group].annotation
        model = next((kind for kind in (annotation, *get_args(annotation)) if hasattr(kind, "model_fields")), model)
    name = ".".join(map(str, (name, *detail["loc"])))
    if detail["type"] == "extra_forbidden":
        return f"{name}: no such key.{_nearest(key, [f.alias or k for k, f in model.model_fields.items()], name)}"
    message = str(detail["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ").removesuffix(".")
    return f"{name} = {json.dumps(detail['input'])}: {message}." if key else f"{name}: {message}."


def _nearest(key: str, known: Collection[str], prefix: str) -> str:
    hint = did_you_mean(key, known)
    if hint.startswith(" Did") or len(known) < 10:
        return hint
    group = next((name for name, group in SCHEMA.items() if isinstance(group, Mapping) and key in group), None)
    if group and not prefix:  # the key belongs into a group
        return f" Did you mean '{group}.{key}'?"
    return " See https://www.deepspeed.ai/docs/config-json/ for the keys."


def _fill(config: dict[str, Any], name: str, value: Any) -> None:
    """Sets the dotted `name` if it is missing or "auto"."""
    *groups, key = name.split(".")
    for group in groups:
        config = config.setdefault(group, {})
        if not isinstance(config, dict):  # _check_group reports it
            return
    if config.get(key, "auto") == "auto":
        config[key] = value


def _find(tree: Any, name: str) -> Any:
    """Returns the value at the dotted `name`, or None if there is none."""
    for key in name.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _allowed(value: Any, kind: Any) -> bool:
    if isinstance(kind, tuple):
        return not isinstance(value, bool) and value in kind
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind not in (int, float):
        return isinstance(value, kind)
    number = isinstance(value, (int, float)) and math.isfinite(value)
    return number and (kind is float or (value >= 0 and value % 1 == 0))  # JSON's 5e8 is a whole number


def _without_nulls(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _without_nulls(v) if isinstance(v, dict) else v for k, v in tree.items() if v is not None}


def _read_group(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a dict of a JSON object, without its comments."""
    group: dict[str, Any] = {}
    for key, value in pairs:
        if key == "//":
            if not all(isinstance(line, str) for line in (value if isinstance(value, list) else [value])):
                raise ValueError('"//" holds a comment: a text or a list of texts')
        elif key in group:
            raise ValueError(f"the key '{key}' is given twice")
        else:
            group[key] = value
    return group
