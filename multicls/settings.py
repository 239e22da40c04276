"""Command lines and settings of all commands: defaults < recipes < flags.

A command has one class derived from `Settings`. Its fields are the flags: `--name`, and `--group.name` in groups. The
parsing is done by pydantic-settings; this module adds recipes by name, several words after the flag of a list, the
nearest name for a wrong one, and the source of each wrong value. It imports no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import CliSettingsSource

from multicls.errors import UserError, did_you_mean
from multicls.files import REPOSITORY


class Settings(BaseModel):
    """Base class of all settings: immutable, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    alternatives: ClassVar[tuple[str, ...]] = ()  # dotted keys; one in a later source replaces all


class RecipeOptions(Settings):
    """Options of a command that reads recipes. `exclude` keeps a field out of the settings that are saved."""

    recipe: list[str] = Field(
        [], exclude=True, description="YAML files or shipped recipes; later ones win"
    )
    print_config: bool = Field(
        False, exclude=True, description="print all settings as a recipe and stop"
    )


AnySettings = TypeVar("AnySettings", bound=Settings)
Source = tuple[str, Mapping[str, Any]]  # the name of a recipe, or "" for flags, and its values


def parse(
    kind: type[AnySettings],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    doc: str | None = None,
    shortcuts: Mapping[str, str] | None = None,
    recipes: str = "",
) -> AnySettings:
    """Returns the settings of a command from its flags and recipes; prints --help and --print_config and exits.

    Args:
        kind: the class of the settings; the description of a field is its help, `CliPositionalArg` takes its dashes.
        argv: the words after the command; default: `sys.argv`.
        prog: the command, for messages.
        doc: the command's docstring, for the help.
        shortcuts: dotted key -> short flag without dashes.
        recipes: folder of the shipped recipes, in this repository.

    Raises:
        UserError: lists the unknown flags; or each unknown key of a recipe, missing and wrong value.
    """
    names = ", ".join(_shipped_recipes(recipes))
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [options]",
        description=doc,
        epilog=names and f"recipes: {names}",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source: Any = CliSettingsSource(
        kind,  # type: ignore[arg-type]
        root_parser=parser,
        parse_args_method=_Parser.parse_flags,
        add_argument_method=partial(_add_flag, shortcuts or {}),
        cli_parse_none_str="null",
        cli_hide_none_type=True,
    )
    flags = source(args=_repeated(sys.argv[1:] if argv is None else argv, parser))()
    sources = [*_read_recipes(flags.get("recipe", []), recipes), ("", flags)]
    settings = _validate(kind, sources, shortcuts or {})
    if getattr(settings, "print_config", False):
        print(to_yaml(settings), end="")
        raise SystemExit(0)
    return settings


def load_settings(
    kind: type[AnySettings],
    recipes: Iterable[str | Path] = (),
    values: Mapping[str, Any] | None = None,
) -> AnySettings:
    """Returns settings of recipes (paths) and of values by dotted key, which win.

    Raises:
        UserError: as `parse`.
    """
    return _validate(kind, [*_read_recipes(map(str, recipes), ""), ("", values or {})], {})


def to_yaml(settings: BaseModel) -> str:
    """Returns the settings as a YAML recipe that states each field but those excluded from it."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are `UserError`s; that of an unknown flag names the nearest one."""

    def parse_flags(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:
        """Parses the flags of a command; lists all unknown ones."""
        flags = dict.fromkeys(word.partition("=")[0] for word in args if word.startswith("--"))
        known = self._option_string_actions
        hints = {flag: _nearest(flag, known) for flag in flags if flag not in known}
        if hints:
            more = " --help lists all flags."
            raise UserError(
                *(f"{flag}: no such flag.{hint or more}" for flag, hint in hints.items())
            )
        return self.parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}. --help lists all flags.")


def _add_flag(shortcuts: Mapping[str, str], parser: Any, *names: str, **options: Any) -> None:
    """Adds a flag for pydantic-settings, and its short name. A boolean needs no value, and a group has no flag."""
    short = [f"--{shortcuts[options['dest']]}"] if options.get("dest") in shortcuts else []
    if options.get("metavar") == "bool":
        options |= {"nargs": "?", "const": "true", "metavar": "true|false"}
    if options.get("const") != "{}":
        parser.add_argument(*short, *names, **options)


def _repeated(argv: Sequence[str], parser: _Parser) -> list[str]:
    """Returns the words with the flag of a list before each of its words, as pydantic-settings wants them."""
    words: list[str] = []
    repeated = ""  # the flag of a list whose words follow
    for word in argv:
        flag, equals, value = word.partition("=")
        if word.startswith("--local_rank"):  # appended by the launcher of DeepSpeed
            continue
        if not word.startswith("--"):
            words.append(f"{repeated}={_quoted(word)}" if repeated else word)
            continue
        is_list = isinstance(parser._option_string_actions.get(flag), argparse._AppendAction)
        repeated = flag if is_list and not equals else ""
        if not repeated:
            words.append(flag + equals + (_quoted(value) if is_list else value))
    return words


def _quoted(word: str) -> str:
    """Returns a word of a list in quotes if it holds a comma, which would divide it."""
    return f'"{word}"' if "," in word and word[0] not in '"[{' else word


def _shipped_recipes(folder: str) -> list[str]:
    return sorted(path.stem for path in (REPOSITORY / folder).glob("*.yaml")) if folder else []


def _read_recipes(names: Iterable[str], folder: str) -> Iterator[Source]:
    """Yields the settings of each recipe: a path, a path in this repository, or a name in `folder`."""
    for name in names:
        paths = (Path(name), REPOSITORY / name, REPOSITORY / folder / f"{name}.yaml")
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            hint = did_you_mean(Path(name).stem, _shipped_recipes(folder))
            raise UserError(f"--recipe {name}: no such recipe.{hint}")
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"--recipe {name}: not readable as YAML: {error}.") from None
        if not isinstance(values, dict):
            raise UserError(f"--recipe {name}: a recipe is a mapping, not {type(values).__name__}.")
        yield name, values


def _validate(
    kind: type[AnySettings], sources: Sequence[Source], shortcuts: Mapping[str, str]
) -> AnySettings:
    """Returns the merged settings of all sources, the last of which wins."""
    known = _known(kind)
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source, values in sources:
        flat = _flat(values, known)
        if not flat.keys().isdisjoint(kind.alternatives):
            merged = {key: value for key, value in merged.items() if key not in kind.alternatives}
        for key, value in flat.items():
            if isinstance(value, dict) and isinstance(merged.get(key), dict):
                value = merged[key] | value
            merged[key] = None if value == [None] else value  # `--list null` comes as [None]
            origins[key] = source
    groups: dict[str, dict[str, Any]] = {"": {}}
    for key in (key for key, is_group in known.items() if is_group):
        parent, _, name = key.rpartition(".")
        groups[key] = groups[parent][name] = {}
    for key, value in merged.items():
        group, _, name = key.rpartition(".")
        groups.get(group, groups[""])[name if group in groups else key] = value
    try:
        return kind.model_validate(groups[""])
    except ValidationError as error:
        problems: dict[str, list[str]] = {}  # place -> reasons: one for each member of a union
        for detail in error.errors():
            where, why = _explain(detail, known, origins, shortcuts)
            problems.setdefault(where, []).append(why.rstrip("."))
        lines = [where + " or ".join(dict.fromkeys(why)) for where, why in problems.items()]
        raise UserError(*(line + "." * (line[-1] != "?") for line in lines)) from None


def _known(kind: Any, prefix: str = "") -> dict[str, bool]:
    """Returns the dotted keys of all settings, and of their groups, which are True."""
    keys: dict[str, bool] = {}
    for name, field in kind.model_fields.items():
        inner = field.annotation
        keys[prefix + name] = isinstance(inner, type) and issubclass(inner, BaseModel)
        if keys[prefix + name]:
            keys |= _known(inner, f"{prefix}{name}.")
    return keys


def _flat(values: Mapping[str, Any], known: Mapping[str, bool], prefix: str = "") -> dict[str, Any]:
    """Returns settings by dotted key. A wrong value in place of a group stays whole; an empty group is left out."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if known.get(key) and isinstance(value, dict):
            flat |= _flat(value, known, f"{key}.")
        elif not (known.get(key) and value is None):
            flat[key] = value
    return flat


def _explain(
    detail: Any, known: Mapping[str, bool], origins: Mapping[str, str], shortcuts: Mapping[str, str]
) -> tuple[str, str]:
    """Returns where a wrong value stands and why it is wrong, from one of pydantic's errors."""
    place = [str(part) for part in detail["loc"]]  # ends with members of unions and lists
    keys = [".".join(place[:n]) for n in range(1, len(place) + 1)]
    key = next((key for key in keys if known.get(key) is False), ".".join(place))
    flag, source = f"--{shortcuts.get(key, key)}", origins.get(key, "")
    if detail["type"] == "missing":
        return f"{key}: ", f"required, as {flag}" + " or in a recipe" * ("recipe" in known)
    if detail["type"] == "extra_forbidden":
        return f"{source or 'settings'}: {key}: ", f"no such setting.{_nearest(key, known)}"
    message, value = str(detail["msg"]).removeprefix("Value error, "), detail["input"]
    if not key or isinstance(value, Mapping):  # several settings together
        return "".join(f"{part}: " for part in (source, key) if part), message
    text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return (f"{source}: {key} = {text}: " if source else f"{flag} {text}: "), message


def _nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint to the setting of the same name in another group, or to the nearest one; "" if none is near.

    The bound is strict: a hint to a flag that does something else is worse than none.
    """
    leaf = name.rpartition(".")[2].lstrip("-")
    same = [key for key in known if key.rpartition(".")[2].lstrip("-") == leaf]
    return did_you_mean(name, same or known, listed=False, cutoff=0.0 if same else 0.75)
