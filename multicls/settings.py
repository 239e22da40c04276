"""Loads typed settings from defaults, YAML recipes and flags, and reports all mistakes together.

Precedence: defaults < recipes in the order given < `--set` < flags. Imports no torch: a mistake is reported at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from multicls.errors import UserError, did_you_mean
from multicls.files import find_shipped


class Settings(BaseModel):
    """Base class of all settings groups: immutable, unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


AnySettings = TypeVar("AnySettings", bound=Settings)


def load_settings(
    kind: type[AnySettings],
    recipes: Iterable[str | Path] = (),
    assignments: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> AnySettings:
    """Loads settings of type `kind`.

    Args:
        kind: class of the settings.
        recipes: YAML files; a later one overrides an earlier one. A path that does not exist in the working directory
            is looked up in the repository.
        assignments: texts `a.b=c` from `--set`; c is YAML.
        flags: values of command-line flags by dotted key; None means not given.

    Raises:
        UserError: a recipe cannot be read, or settings are wrong. The error lists all wrong settings, each with its
            source, key, value and the nearest known key.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    problems: list[str] = []
    for recipe in recipes:
        path = find_shipped(recipe)
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"{recipe}: not valid YAML: {error}.") from None
        if not isinstance(loaded, dict):
            raise UserError(f"{recipe}: a recipe is a mapping of settings, not {type(loaded).__name__}.")
        for key, value in _flatten(loaded):
            _assign(values, sources, key, value, source=str(recipe))
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            problems.append(f"--set {assignment}: write it as key=value, for instance --set train.steps=1000.")
            continue
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            problems.append(f"--set {assignment}: the value is not valid YAML.")
            continue
        _assign(values, sources, key.strip(), value, source="--set")
    for key, value in (flags or {}).items():
        if value is not None:
            _assign(values, sources, key, value, source="--" + key.split(".")[-1])
    settings = None
    try:
        settings = kind.model_validate(values)
    except ValidationError as error:
        problems += [_explain(kind, detail, sources) for detail in error.errors()]
    if problems or settings is None:
        raise UserError(*problems)
    return settings


def to_yaml(settings: Settings) -> str:
    """Returns the settings as a YAML recipe that states each field."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def known_keys(kind: type[Settings], prefix: str = "") -> list[str]:
    """Returns all dotted keys of `kind`, including its groups."""
    keys = []
    for name, field in kind.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            keys += known_keys(field.annotation, f"{prefix}{name}.")
    return keys


def _flatten(tree: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Returns the leaves of nested mappings as (dotted key, value)."""
    flat: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat += _flatten(value, f"{prefix}{key}.")
        else:
            flat.append((f"{prefix}{key}", value))
    return flat


def _assign(values: dict[str, Any], sources: dict[str, str], key: str, value: Any, source: str) -> None:
    """Sets the dotted `key` in the nested `values` and notes its source."""
    *groups, leaf = key.split(".")
    for group in groups:
        inner = values.setdefault(group, {})
        if not isinstance(inner, dict):
            inner = values[group] = {}
        values = inner
    values[leaf] = value
    sources[key] = source


def _explain(kind: type[Settings], detail: Any, sources: Mapping[str, str]) -> str:
    """Words one of pydantic's errors, with the source of the value."""
    key = ".".join(str(part) for part in detail["loc"])
    source = next((sources[known] for known in sources if known == key or known.startswith(f"{key}.")), None)
    source = source or next((sources[known] for known in sources if key.startswith(f"{known}.")), kind.__name__)
    if detail["type"] == "extra_forbidden":
        siblings = [k for k in known_keys(kind) if k.rpartition(".")[0] == key.rpartition(".")[0]]
        leaves = {known.rpartition(".")[2]: known for known in known_keys(kind)}
        elsewhere = leaves.get(key.rpartition(".")[2])
        hint = f" Did you mean '{elsewhere}'?" if elsewhere else did_you_mean(key, siblings)
        return f"{source}: {key}: no such setting.{hint}"
    if detail["type"] == "missing":
        return f"{source}: {key}: this setting is required; give it in a recipe or with --set {key}=..."
    message = str(detail["msg"]).removeprefix("Value error, ")
    where = f"{key} = {detail['input']!r}" if key else ""
    return f"{source}: {where}: {message}." if where else f"{source}: {message}."
