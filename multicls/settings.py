"""Command lines and settings of all commands: defaults < recipes < flags.

A command has one class derived from `Settings`. Its fields are the flags: `--name`, and `--group.name` in groups. The
parsing is done by pydantic-settings; this module adds recipes by name, several words after the flag of a list, the
nearest name for a wrong one, and the source of each wrong value. It imports no torch.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
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
LIST = " --help_all lists all flags."
SETTINGS_PAGE = "docs/settings.md has all settings of all commands."
METAVARS = {
    "int": "N",
    "float": "X",
    "str": "TEXT",
    "Path": "PATH",
    "bool": "true|false",
    "Any": "VALUE",
}
LONG = 9  # values to choose from that are not listed in place of a flag's value
PATHS = re.compile("(file|dir|corpus|checkpoint|model|config|input|output|recipe|tokenizer|base)$")
Source = tuple[str, Mapping[str, Any]]  # the name of a recipe, or "" for flags, and its values


def parse(
    kind: type[AnySettings],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    doc: str | None = None,
    shortcuts: Mapping[str, str] | None = None,
    recipes: str = "",
    common: Mapping[str, str] | None = None,
) -> AnySettings:
    """Returns the settings of a command from its flags and recipes; prints --help and --print_config and exits.

    Args:
        kind: the class of the settings; the description of a field is its help; a `CliPositionalArg` is no flag.
        shortcuts: dotted key -> short flag without dashes.
        recipes: folder of the shipped recipes, in this repository.
        common: title -> dotted keys of the flags that --help shows, with blanks; by default it shows all.

    Raises:
        UserError: lists each unknown flag, each unknown key of a recipe, each missing and each wrong value.
    """
    parser = _Parser(prog, doc, common or {}, _descriptions(recipes, kind) if recipes else {})
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


def _descriptions(folder: str, kind: type[Settings]) -> dict[str, str]:
    """Returns the first sentence of each shipped recipe that a command reads, by the recipe's name."""
    found: dict[str, str] = {}
    for path in sorted((REPOSITORY / folder).glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        if yaml.safe_load(text).keys() <= kind.model_fields.keys():
            found[path.stem] = re.split(r"(?<=[.?]) ", text.splitlines()[0].lstrip("# "))[0]
    return found


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help with one line for the name of a flag and one for each value that its description lists."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        shapes: dict[Any, str] = {None: " {}", "?": " [{}]", "+": " {} ..."}
        shape = shapes.get(action.nargs, "")
        return ", ".join(action.option_strings) + shape.format(action.metavar)

    def _split_lines(self, text: str, width: int) -> list[str]:
        lines = text.split("; ") if _listed(text) else [text]
        return [part for line in lines for part in super(_Help, self)._split_lines(line, width)]


def _listed(text: str) -> list[str]:
    """Returns the names that a description lists as `name: what; name: what; ...`, or []."""
    names = re.findall(r"(?:^|; )(\w+): ", text)
    return names if len(names) > 2 and len(names) == text.count("; ") + 1 else []


def _in_short(action: argparse.Action) -> argparse.Action:
    """Returns a flag for the short help: one name, and the first part of its description."""
    short, text = copy(action), str(action.help)
    default = re.search(r" \((default: (?!False|null|0\)).*|required)\)$", text)
    text = re.sub(r" \((default: .*|required)\)$", "", text)
    text = ", ".join(_listed(text)) or text.split("; ")[0]
    short.option_strings = action.option_strings[:1]
    if action.nargs == "?":  # true or false
        short.nargs = 0
    short.help = text + (default[0] if default else "")
    return short


class _HelpAll(argparse.Action):
    """The flag --help_all."""

    def __call__(self, parser: Any, *_: Any) -> NoReturn:
        parser.common = {}
        parser.print_help()
        raise SystemExit(0)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are `UserError`s; `unknown` lists the flags that it does not know, with the nearest.

    Its help shows the flags of `common`, by title, and the `recipes` with what they do.
    """

    def __init__(
        self, prog: str, doc: str | None, common: Mapping[str, str], recipes: Mapping[str, str]
    ) -> None:
        super().__init__(prog, f"{prog} [options]", doc, formatter_class=_Help, allow_abbrev=False)
        self.add_argument("--help_all", nargs=0, action=_HelpAll, help="show all flags and exit")
        self.common, self.recipes = common, recipes

    def format_help(self) -> str:
        """Returns the help of the common flags, or of all flags if none is."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, [])
        formatter.add_text(self.description)
        flags = {action.dest: action for action in self._actions}
        sections = {
            title: [_in_short(flags[key]) for key in keys.split()]
            for title, keys in self.common.items()
        }
        if not sections:
            sections = {str(group.title): group._group_actions for group in self._action_groups}
        for title, actions in sections.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        return formatter.format_help() + self._list_of_recipes()

    def _list_of_recipes(self) -> str:
        """Returns the recipes with their descriptions; the short help only names ablations and baselines."""
        others = ("Ablation", "Baseline")
        ablations = [n for n, text in self.recipes.items() if text.startswith(others)]
        named = ablations if self.common else []
        lines = [f"  {n:20}{text}" for n, text in self.recipes.items() if n not in named]
        lines += [f"  ablations and baselines: {', '.join(named)}"] * bool(named)
        more = "--help_all lists all flags; " * bool(self.common) + SETTINGS_PAGE
        return "\n".join([*(["", "recipes:", *lines] if lines else []), "", more, ""])

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
        options |= {"nargs": "?", "const": "true"}
    elif options.get("action") == "append":
        options |= {"action": "extend", "nargs": "+", "type": _quoted}
    if names[0].startswith("-"):
        options["metavar"] = _metavar(str(options["dest"]), str(options["metavar"]))
    text = re.sub(r" \(default: (\[\]|\{\})?\)", "", str(options.get("help", "")))
    is_explained = "null:" in text or "default:" in text.replace("(default:", "")
    options["help"] = text.replace(" (default: None)", " (default: null)" * is_explained)
    if options.get("const") != "{}":
        parser.add_argument(*short, *names, **options)


def _metavar(key: str, kind: str) -> str:
    """Returns what a flag takes, in words: PATH, N, NAME=VALUE, or the values to choose from."""
    if kind.startswith("dict["):
        return "NAME=VALUE"
    if kind.startswith("{dict["):
        return "NAME"
    words = kind.removeprefix("list[").removesuffix("]").strip("{}").split(",")
    names = METAVARS | ({"str": "PATH"} if PATHS.search(key) else {})
    return "|".join(names.get(word, word) for word in words) if len(words) < LONG else "NAME"


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
