"""Loads typed settings from defaults, YAML recipes and flags, and reports all mistakes together.

Precedence: defaults < recipes in the order given < `--set` < flags. Imports no torch: a mistake is reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from types import UnionType
from typing import Any, TypeVar, Union, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from multicls.errors import UserError, did_you_mean
from multicls.files import REPOSITORY, find_shipped

ALIASES = {  # names in other tools and earlier versions -> ours, the first that a command has
    **dict.fromkeys(("lr", "peak_lr"), "learning_rate"),
    **dict.fromkeys(("batch_size", "train_batch_size", "micro_batches", "bs"), "batch_size global_batch_size"),
    **dict.fromkeys(("per_device_train_batch_size", "train_micro_batch_size_per_gpu"), "micro_batch_size batch_size"),
    "gradient_accumulation_steps": "micro_batch_size=...",
    **dict.fromkeys(("num_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("steps", "max_steps", "num_steps", "train_steps", "max_train_steps"), "max_steps steps"),
    **{name: f"precision={name}" for name in ("fp32", "bf16", "fp16")},
    **dict.fromkeys(("model_name_or_path", "model_name", "checkpoint", "pretrained_model", "bert_model"), "model"),
    **dict.fromkeys(("data", "data_path", "dataset_path", "train_data"), "corpus data_dir input"),
    **dict.fromkeys(("out", "output", "out_dir", "output_dir", "save_dir", "run_dir"), "output_dir output"),
    **dict.fromkeys(("ds_config", "deepspeed", "deepspeed_config"), "config"),
    **dict.fromkeys(("max_len", "max_length", "max_seq_len", "max_seq_length", "seq_len"), "max_length seq_length"),
    **dict.fromkeys(("warmup", "warmup_fraction", "warmup_steps"), "warmup_ratio=..."),
    **dict.fromkeys(("clip", "gradient_clipping", "max_norm"), "max_grad_norm"),
    **dict.fromkeys(("workers", "num_workers", "num_processes", "num_proc", "n_jobs"), "workers jobs num_workers"),
    "resume_from_checkpoint": "resume=auto",
    "save_steps": "save_every",
    "eval_steps": "eval_every",
    "logging_steps": "log_every",
}  # fmt: skip
PLAIN = {  # types of pydantic's errors in our words
    "int_parsing": "must be a whole number", "int_from_float": "must be a whole number",
    "float_parsing": "must be a number", "bool_parsing": "must be true or false",
    "model_type": "is a group of settings: give those in it",
}  # fmt: skip
WORDS = {"Input should be": "must be", "Field required": "too few values",
         "greater than or equal to": "at least", "less than or equal to": "at most"}  # fmt: skip


class Settings(BaseModel):
    """Base class of all settings groups: immutable, unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


AnySettings = TypeVar("AnySettings", bound=Settings)


def load_settings(
    kind: type[AnySettings],
    recipes: Iterable[str | Path] = (),
    assignments: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
) -> AnySettings:
    """Loads settings of type `kind`.

    Args:
        recipes: YAML files, found by `find_shipped`; a later one overrides an earlier one.
        assignments: texts `a.b=c` from `--set`; c is YAML.
        flags: values of command-line flags by dotted key; None means not given.
        names: how the command line spells settings, by dotted key; default: `--` and the last part of the key.

    Raises:
        UserError: a recipe cannot be read, or settings are wrong; lists all with source, key, value and nearest key.
    """
    names = names or {}
    values: dict[str, Any] = {name: {} for name, field in kind.model_fields.items()
                              if field.is_required() and is_group(field)}  # fmt: skip
    sources: dict[str, str] = {}
    problems: list[str] = []
    for recipe in recipes:
        for path, value in _flatten(kind, _read_recipe(recipe)):
            _assign(values, sources, path, value, source=str(recipe))
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            problems.append(f"--set {assignment}: write it as key=value, for instance --set train.steps=1000.")
            continue
        try:
            _assign(values, sources, key.strip().split("."), yaml.safe_load(text), source="--set")
        except yaml.YAMLError:
            problems.append(f"--set {assignment}: the value is not valid YAML.")
    for key, value in (flags or {}).items():
        if value is not None:
            _assign(values, sources, key.split("."), value, source=names.get(key) or f"--{key.rpartition('.')[2]}")
    found: dict[str, list[str]] = {}
    try:
        settings = kind.model_validate(values)
    except ValidationError as error:
        for detail in error.errors():
            where, message = _explain(kind, detail, sources, names)
            found.setdefault(where, []).append(message)
    for where, messages in found.items():
        text = where + " or ".join(dict.fromkeys(messages)).replace(" or must be ", " or ")
        problems.append(text if text[-1] in ".?" else f"{text}.")
    if problems:
        raise UserError(*problems)
    return settings


def _read_recipe(recipe: str | Path) -> dict[Any, Any]:
    """Returns the settings in a YAML file."""
    try:
        loaded = yaml.safe_load(find_shipped(recipe).read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UserError(f"{recipe}: cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{recipe}: not valid YAML: {error}.") from None
    if not isinstance(loaded, dict):
        raise UserError(f"{recipe}: a recipe is a mapping of settings, not {type(loaded).__name__}.")
    return loaded


def find_field(kind: type[Settings], key: str) -> FieldInfo | None:
    """Returns the field of a dotted key, None if there is no such setting."""
    group, _, rest = key.partition(".")
    field = kind.model_fields.get(group)
    if not rest or field is None:
        return field
    return find_field(field.annotation, rest) if is_group(field) else None  # type: ignore[arg-type]


def shipped_recipes(folder: str, kind: type[Settings]) -> dict[str, str]:
    """Returns the recipes in a folder of this repository that have settings of `kind`: name -> first sentence in it."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / folder).glob("*.yaml"))}
    return {name: shorten(text.partition("\n")[0].lstrip("# ").split(". ")[0].rstrip("."), 98)
            for name, text in texts.items() if _has_only(kind, text)}  # fmt: skip


def find_recipe(name: str, folder: str, kind: type[Settings], sibling: str = "") -> str:
    """Returns the path of a recipe, given as a path or by the name of a shipped one in `folder` of this repository.

    `sibling` is the command that takes the shipped recipes of other settings than `kind`.

    Raises:
        UserError: there is none; the message lists the shipped ones.
    """
    path = Path(name)
    if path.suffix == ".json":
        raise UserError(f"--recipe {name}: a recipe is a YAML file; give the JSON of DeepSpeed with --config.")
    for found in (name, *([f"{folder}/{path.stem}.yaml"] if path.name == name else [])):
        file = next((file for file in (Path(found), REPOSITORY / found) if file.is_file()), None)
        if file and sibling and folder in str(file) and not _has_only(kind, file.read_text(encoding="utf-8")):
            raise UserError(f"--recipe {name}: this recipe is for {sibling}.")
        if file:
            return found
    shipped = shipped_recipes(folder, kind)
    hint = did_you_mean(path.stem, shipped, listed=False)
    lines = "".join(f"\n  {one:18}{about}" for one, about in shipped.items())
    raise UserError(f"--recipe {name}: no such recipe.{hint} Recipes by name:{lines}")


def _has_only(kind: type[Settings], text: str) -> bool:
    """Returns True if a recipe has settings of `kind` only."""
    return set(re.findall(r"^(\w+):", text, re.MULTILINE)) <= kind.model_fields.keys()


def to_yaml(settings: Settings) -> str:
    """Returns the settings as a YAML recipe that states each field."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def known_keys(kind: type[Settings], prefix: str = "") -> list[str]:
    """Returns all dotted keys of `kind`, including its groups."""
    keys = []
    for name, field in kind.model_fields.items():
        keys.append(prefix + name)
        if is_group(field):
            keys += known_keys(field.annotation, f"{prefix}{name}.")  # type: ignore[arg-type]
    return keys


def keys_by_name(kind: type[Settings]) -> dict[str, str]:
    """Returns the settings that are no groups: last part of the key -> dotted key, the first of several."""
    keys = [key for key in known_keys(kind) if not is_group(find_field(kind, key))]
    return {key.rpartition(".")[2]: key for key in reversed(keys)}


def is_group(field: FieldInfo | None) -> bool:
    """Returns True if the field is a group of settings."""
    return field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, Settings)


def _flatten(kind: type[Settings], tree: Mapping[Any, Any], *groups: str) -> list[tuple[list[str], Any]]:
    """Returns the leaves of nested mappings as (keys, value).

    A dot in a key divides a group from a setting, but the keys of a mapping are names, for instance of models.
    """
    flat: list[tuple[list[str], Any]] = []
    named = get_origin(getattr(find_field(kind, ".".join(groups)), "annotation", None)) is dict
    for key, value in tree.items():
        path = [*groups, *([str(key)] if named else str(key).split("."))]
        flat += _flatten(kind, value, *path) if isinstance(value, dict) and value else [(path, value)]
    return flat


def _assign(values: dict[str, Any], sources: dict[str, str], path: Sequence[str], value: Any, source: str) -> None:
    """Sets the value at the keys `path` of the nested `values` and notes its source."""
    *groups, leaf = path
    for group in groups:
        if not isinstance(values.get(group), dict):
            values[group] = {}
        values = values[group]
    values[leaf] = value
    sources[".".join(path)] = source


def _explain(
    kind: type[Settings], detail: Any, sources: Mapping[str, str], names: Mapping[str, str]
) -> tuple[str, str]:
    """Words one of pydantic's errors; returns the setting with the source of its value, and what is wrong with it."""
    loc = detail["loc"]
    field = find_field(kind, ".".join(map(str, loc[:-1]))) if len(loc) > 1 and isinstance(loc[-1], str) else None
    if field is not None and get_origin(field.annotation) in (Union, UnionType):
        loc = loc[:-1]  # pydantic names the member of the union
    key = ".".join(map(str, loc))
    source = sources.get(key) or next((sources[known] for known in sources if known.startswith(f"{key}.")), None)
    source = source or next((sources[known] for known in sources if key.startswith(f"{known}.")), kind.__name__)
    if detail["type"] == "extra_forbidden":
        siblings = [k for k in known_keys(kind) if k.rpartition(".")[0] == key.rpartition(".")[0]]
        leaf, known = key.rpartition(".")[2], keys_by_name(kind)
        elsewhere = next((known[name] for name in [leaf, *ALIASES.get(leaf, "").split()] if name in known), None)
        hint = f" Did you mean '{elsewhere}'?" if elsewhere else did_you_mean(key, siblings)
        return f"{source}: {key}: ", f"no such setting.{hint}"
    if detail["type"] == "missing" and find_field(kind, key):
        about = getattr(find_field(kind, key), "description", None)
        where = names.get(key) or f"{key} (in a recipe or with --set {key}=...)"
        return f"{where}: missing; ", f"give {about.partition('; ')[0]}" if about else "this setting is required"
    message = PLAIN.get(detail["type"]) or str(detail["msg"]).removeprefix("Value error, ")
    for theirs, ours in WORDS.items():
        message = message.replace(theirs, ours)
    allowed = re.findall(r"'([^']*)'", detail["ctx"]["expected"]) if detail["type"] == "literal_error" else []
    hint = did_you_mean(str(detail["input"]), allowed, listed=False) if len(allowed) > 1 else ""
    message += f".{hint}" if hint else ""
    if source == names.get(key) and isinstance(detail["input"], (str, list)):
        value = detail["input"]
        return f"{source} {value if isinstance(value, str) else ' '.join(map(str, value))}: ", message
    if not key or isinstance(detail["input"], Mapping):  # of several settings together
        return f"{key}: " if key else "", message
    return f"{source}: {key} = {detail['input']!r}: ", message
