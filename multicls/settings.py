"""Command lines and settings of all commands: defaults < recipes < flags.

A command has one class derived from `Settings`. Its fields are the flags: `--name`, and `--group.name` in groups. The
parsing is done by pydantic-settings; this module adds recipes by name, several words after the flag of a list, the
nearest name for a wrong one, and the source of each wrong value. It imports no torch.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import CliSettingsSource, SettingsError

from multicls.errors import UserError, did_you_mean, first_line
from multicls.files import REPOSITORY


class Settings(BaseModel):
    """Base class of all settings: immutable, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    # Dotted keys, one of which is set. A later source that sets one of them sets the others to 0.
    alternatives: ClassVar[tuple[str, ...]] = ()
    # Mappings: names in a later source choose among the entries of an earlier one; a name that it lacks gets None.
    chosen_by_name: ClassVar[tuple[str, ...]] = ()


class RecipeOptions(Settings):
    """Options of a command that reads recipes. `exclude` keeps a field out of the settings that are saved."""

    recipe: list[str] = Field(
        [], exclude=True, description="YAML files or shipped recipes; later ones win"
    )
    print_config: bool = Field(
        False, exclude=True, description="print all settings as a recipe and stop"
    )


AnySettings = TypeVar("AnySettings", bound=Settings)
LIST = " --help lists all flags."
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
        kind: the class of the settings; the description of a field is its help; a `CliPositionalArg` is no flag.
        shortcuts: dotted key -> short flag without dashes.
        recipes: folder of the shipped recipes, in this repository.

    Raises:
        UserError: lists each unknown flag, each unknown key of a recipe, each missing and each wrong value.
    """
    shipped = sorted(path.stem for path in (REPOSITORY / recipes).glob("*.yaml")) if recipes else []
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [options]",
        description=doc,
        epilog=f"recipes: {', '.join(shipped)}" * bool(shipped),
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
    words = sys.argv[1:] if argv is None else argv  # the launcher of DeepSpeed adds --local_rank
    try:
        flags = source(args=[word for word in words if not word.startswith("--local_rank")])()
    except SettingsError as error:
        raise UserError(f"{first_line(error)}; a mapping takes NAME=VALUE.") from None
    sources = [*_read_recipes(flags.get("recipe", []), recipes), ("", flags)]
    settings = _validate(kind, sources, shortcuts or {}, parser.unknown)
    if getattr(settings, "print_config", False):
        print(to_yaml(settings), end="")
        raise SystemExit(0)
    return settings


def load_settings(
    kind: type[AnySettings],
    recipes: Iterable[str | Path] = (),
    values: Mapping[str, Any] | None = None,
) -> AnySettings:
    """Returns settings of recipes (paths) and of values by dotted key, which win. Errors are those of `parse`."""
    return _validate(kind, [*_read_recipes(map(str, recipes), ""), ("", _nested(values or {}))], {})


def to_yaml(settings: BaseModel) -> str:
    """Returns the settings as a YAML recipe that states each field but those excluded from it."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are `UserError`s; `unknown` lists the flags that it does not know, with the nearest."""

    def parse_flags(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:
        """Parses the flags of a command that it knows."""
        flags = dict.fromkeys(word.partition("=")[0] for word in args if word.startswith("--"))
        known = self._option_string_actions
        hints = {flag: _nearest(flag, known) for flag in flags if flag not in known}
        self.unknown = [f"{flag}: no such flag.{hint or LIST}" for flag, hint in hints.items()]
        if hints:  # their values are left over
            return self.parse_known_args(args, namespace)[0]
        return self.parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if "expected one argument" in message:
            message += "; a value that begins with - is written FLAG=VALUE"
        raise UserError(*self.unknown, f"{message.removeprefix('argument ')}.{LIST}")


def _add_flag(shortcuts: Mapping[str, str], parser: Any, *names: str, **options: Any) -> None:
    """Adds a flag and its short name. A boolean needs no value, a list takes several words, a group has no flag."""
    short = [f"--{shortcuts[options['dest']]}"] if options.get("dest") in shortcuts else []
    if options.get("metavar") == "bool":
        options |= {"nargs": "?", "const": "true", "metavar": "true|false"}
    elif options.get("action") == "append":
        options |= {"action": "extend", "nargs": "+", "type": _quoted}
    options["help"] = str(options.get("help", "")).replace("(default: None)", "(default: null)")
    if options.get("const") != "{}":
        parser.add_argument(*short, *names, **options)


def _quoted(word: str) -> str:
    """Returns a word of a list in quotes if it holds a comma, where pydantic-settings would divide it."""
    return f'"{word}"' if "," in word and word[0] not in '"[{' else word


def _read_recipes(names: Iterable[str], folder: str) -> Iterator[Source]:
    """Yields the settings of each recipe: a path, a path in this repository, or a name in `folder`."""
    for name in names:
        paths = (Path(name), REPOSITORY / name, REPOSITORY / folder / f"{name}.yaml")
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            shipped = [path.stem for path in (REPOSITORY / folder).glob("*.yaml")]
            hint = did_you_mean(Path(name).stem, shipped)
            raise UserError(f"--recipe {name}: no such recipe.{hint}")
        try:
            values = yaml.safe_load(path.read_bytes()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise UserError(f"--recipe {name}: not readable as YAML: {error}.") from None
        if not isinstance(values, dict):
            raise UserError(f"--recipe {name}: a recipe is a mapping, not {type(values).__name__}.")
        yield name, values


def _validate(
    kind: type[AnySettings],
    sources: Sequence[Source],
    shortcuts: Mapping[str, str],
    unknown: Iterable[str] = (),
) -> AnySettings:
    """Returns the merged settings of all sources, the last of which wins; `unknown` flags are mistakes, too."""
    known = _known(kind)
    merged = _nested({key: {} for key, field in known.items() if field is None})
    for _, values in sources:
        if any(_value(values, key) is not None for key in kind.alternatives):
            merged = _merge(merged, _nested(dict.fromkeys(kind.alternatives, 0)))
        for key in kind.chosen_by_name:
            if chosen := _chosen(merged.get(key), values.get(key)):
                merged, values = {**merged, key: None}, {**values, key: chosen}
        merged = _merge(merged, values)
    lines = list(unknown)
    try:
        settings = kind.model_validate(merged)
    except ValidationError as error:
        problems: dict[str, list[str]] = {}  # place -> reasons: one for each member of a union
        for detail in _deepest(error.errors(), known):
            if detail["type"] == "string_pattern_mismatch":  # patterns are for programmers
                expected = known[_setting_of(detail, known)].description
                detail = {**detail, "msg": f"it must be: {expected}"}
            where, why = _explain(detail, known, sources, shortcuts)
            problems.setdefault(where, []).append(why)
        lines += [where + " or ".join(dict.fromkeys(why)) for where, why in problems.items()]
    if lines:
        raise UserError(*lines)
    return settings


def _known(kind: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the field of each setting by its dotted key, and None by that of a group."""
    known: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        inner = field.annotation
        is_group = isinstance(inner, type) and issubclass(inner, Settings)
        known[prefix + name] = None if is_group else field
        if is_group:
            known |= _known(inner, f"{prefix}{name}.")
    return known


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values by dotted key as mappings in mappings."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        for name in reversed(key.split(".")):
            value = {name: value}
        nested = _merge(nested, value)
    return nested


def _merge(old: Any, new: Any) -> Any:
    """Returns the value of a later source; mappings are merged. A wrong value in place of one stays, to be reported."""
    if not isinstance(new, Mapping):
        is_empty_group = new is None and isinstance(old, Mapping)
        return old if is_empty_group else None if new == [None] else new  # from `--list null`
    if not isinstance(old, Mapping | None):
        return old
    before = old or {}
    return {**before, **{name: _merge(before.get(name), value) for name, value in new.items()}}


def _chosen(old: Any, new: Any) -> dict[str, Any] | None:
    """Returns the entries of a mapping that a later source names, or None if it names none."""
    names = new.replace(",", " ").split() if isinstance(new, str) else new
    is_choice = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return {n: old.get(n) for n in names} if is_choice and isinstance(old, Mapping) else None


def _value(values: Any, key: str) -> Any:
    """Returns the value of a dotted key in nested mappings, or None."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def _setting_of(detail: Any, known: Mapping[str, Any]) -> str:
    """Returns the dotted key of the setting that one of pydantic's errors is in, or its whole place."""
    path = [str(part) for part in detail["loc"]]  # ends with members of unions and lists
    keys = [".".join(path[:n]) for n in range(1, len(path) + 1)]
    return next((key for key in keys if known.get(key)), ".".join(path))


def _deepest(details: Sequence[Any], known: Mapping[str, Any]) -> list[Any]:
    """Returns the errors without those of a union's members that do not fit at all: of a setting, the innermost."""
    depths: dict[str, int] = {}
    for detail in details:
        key = _setting_of(detail, known)
        depths[key] = max(depths.get(key, 0), len(detail["loc"]))
    return [d for d in details if len(d["loc"]) == depths[_setting_of(d, known)]]


def _explain(
    detail: Any, known: Mapping[str, Any], sources: Sequence[Source], shortcuts: Mapping[str, str]
) -> tuple[str, str]:
    """Returns where a wrong value stands and why it is wrong, from one of pydantic's errors."""
    key, inside = _setting_of(detail, known), [str(part) for part in detail["loc"][1:]]
    is_group = key in known and known[key] is None
    absent = (Mapping, type(None)) if is_group else type(None)  # sources share a group
    given = [name for name, values in sources if not isinstance(_value(values, key), absent)]
    flag, source = f"--{shortcuts.get(key, key)}", given[-1] if given else ""
    if detail["type"] == "missing":
        return f"{key}: ", f"required, as {flag}" + " or in a recipe" * ("recipe" in known)
    if detail["type"] == "extra_forbidden":
        # What is inside a setting stands below the name of its union's member.
        name = ".".join([key, *inside[1:]]) if key in known else key
        return f"{source or 'settings'}: {name}: ", f"no such setting.{_nearest(name, known)}"
    message, value = str(detail["msg"]).removeprefix("Value error, "), detail["input"]
    if not known.get(key) and isinstance(value, Mapping):  # several settings together
        return f"{key}: " * bool(key), message
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    if detail["type"] == "literal_error":
        message += "." + did_you_mean(text, re.findall("'(.*?)'", message), listed=False)
    return (f"{source}: {key} = {text}: " if source else f"{flag} {text}: "), message


def _nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint to the setting of the same name in another group, or to the nearest one; "" if none is near."""
    leaf = name.rpartition(".")[2].lstrip("-")
    same = [key for key in known if key.rpartition(".")[2].lstrip("-") == leaf]
    # Strict, since a hint to a flag that does something else is worse than none.
    return did_you_mean(name, same or known, listed=False, cutoff=0.0 if same else 0.75)
