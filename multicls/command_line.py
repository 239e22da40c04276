"""Command lines of all stages: flags from settings classes, all mistakes told at once, a summary at the end."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import indent
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, Literal, NoReturn, TextIO, TypeVar, Union, cast, get_args, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo

from multicls import settings as config
from multicls.errors import UserError
from multicls.settings import Settings, find_field, is_group, keys_by_name, load_settings

OptionsT = TypeVar("OptionsT", bound=Settings)
ReadT = TypeVar("ReadT")
NEGATIVE = re.compile(r"-(\.?\d|inf|nan)")
LAUNCHER = ("num_gpus", "num_nodes", "hostfile", "include", "exclude", "master_port")  # options of deepspeed
EXAMPLE = re.compile(r"\s*(\w+=\S+ )*(python|deepspeed) ")


class RecipeOptions(Settings):
    """Options of commands whose settings come from recipes."""

    recipe: list[str] = Field([], description="YAML settings: a file, or the name of a shipped one; later wins")
    set: list[str] = Field([], title="KEY=VALUE", description="any setting; --print_config shows all")
    print_config: bool = Field(False, description="print all settings as a recipe and stop")
    local_rank: int | None = None  # appended by the deepspeed launcher


class CommandLine(Generic[OptionsT]):
    """The flags of a command, made from the fields of settings classes.

    A field's type, default and description become those of its flag: a list takes several values and may be repeated, a
    boolean is a switch, `title` names the value in the help. A field without description is hidden.

    Args:
        prog: the command, for the help.
        doc: the command's docstring. Its paragraphs of commands become the examples at the end of the help.
        positional: options that are given by their place.
        groups: heading -> flags, as keys of options or settings, or as flag -> key. Options in no group are "common".
        settings: class of the settings that `groups` may name.
        recipes: folder of the shipped recipes.
        sibling: command that takes those recipes of the folder that this one does not.
    """

    def __init__(
        self,
        prog: str,
        doc: str | None,
        options: type[OptionsT],
        *,
        positional: Sequence[str] = (),
        groups: Mapping[str, Iterable[str] | Mapping[str, str]] | None = None,
        settings: type[Settings] | None = None,
        recipes: str = "",
        sibling: str = "",
    ) -> None:
        self.options, self.settings, self.recipes, self.positional = options, settings or Settings, recipes, positional
        named = {title: keys if isinstance(keys, Mapping) else {key.rpartition(".")[2]: key for key in keys}
                 for title, keys in (groups or {}).items()}  # fmt: skip
        taken = {key for flags in named.values() for key in flags.values()}
        common = [key for key, field in options.model_fields.items() if key not in taken and not is_group(field)]
        self.groups: dict[str, Mapping[str, str]] = {"common": {key: key for key in common}, **named}
        self.flags = {flag: key for flags in self.groups.values() for flag, key in flags.items()}
        self.names = {key: flag.upper() if flag in positional else f"--{flag}" for flag, key in self.flags.items()}
        self._prog, self._doc, self._sibling = prog, doc or "", sibling

    def parse(self, argv: Sequence[str] | None = None) -> OptionsT:
        """Returns the options; `argv` is `sys.argv` by default.

        Raises:
            UserError: flags are unknown, missing or wrong; all are told.
        """
        return self.parse_with(argv, lambda options, flags: None)[0]

    def parse_with(
        self, argv: Sequence[str] | None, read: Callable[[OptionsT, dict[str, Any]], ReadT]
    ) -> tuple[OptionsT, ReadT]:
        """Returns the options, and what `read` makes of them and of the settings given by flags, by dotted key.

        Raises:
            UserError: as `parse`, with the problems that `read` finds.
        """
        argv = sys.argv[1:] if argv is None else argv
        given, rest = self.parser().parse_known_args(self._spelled(argv))
        values = vars(given)
        problems = self._unknown(rest)
        if self.recipes and "recipe" in values:
            try:
                values["recipe"] = [
                    config.find_recipe(name, self.recipes, self.settings, self._sibling) for name in values["recipe"]
                ]
            except UserError as error:
                raise UserError(*problems, *error.problems) from None
        mine = {key: value for key, value in values.items() if find_field(self.options, key)}
        flags = {key: value for key, value in values.items() if key not in mine}
        try:
            options = load_settings(self.options, flags=mine, names=self.names)
        except UserError as error:
            problems += error.problems
            options = cast(OptionsT, self.options.model_construct(None, **mine))  # unchecked: what else is wrong?
        try:
            if vars(options).keys() >= self.options.model_fields.keys():
                result = read(options, flags)
        except UserError as error:
            problems += error.problems
        if problems:
            raise UserError(*dict.fromkeys(problems))
        return options, result

    def parser(self) -> argparse.ArgumentParser:
        """Returns the parser of the flags; its values are text by dotted key."""
        paragraphs = [text for text in self._doc.split("\n\n") if text.strip()]
        examples = indent("\n".join(text.strip("\n") for text in paragraphs if EXAMPLE.match(text)), "  ")
        about = "\n\n".join(text.strip() for text in paragraphs if not EXAMPLE.match(text))
        if self.recipes:
            shipped = config.shipped_recipes(self.recipes, self.settings).items()
            about += "".join(["\n\nrecipes:", *(f"\n  {name:18}{text}" for name, text in shipped)])
        width = min(120, shutil.get_terminal_size((100, 24)).columns)
        parser = _Parser(
            prog=self._prog, description=about, add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS,
            usage=" ".join([self._prog, *map(str.upper, self.positional), "[options]"]),
            epilog=f"examples:\n{examples}" if examples else None,
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=32, width=width),
        )  # fmt: skip
        for title, flags in self.groups.items():
            group = parser.add_argument_group(title)
            if title == "common":
                group.add_argument("-h", "--help", action="help", help="print this help and stop")
            for flag, key in flags.items():
                option, setting = find_field(self.options, key), find_field(self.settings, key)
                field, positional = option or setting, flag in self.positional
                assert field is not None, f"{key} is no setting"
                required = "(required)" if option else "(required, here or in a recipe)"
                arguments = _arguments(flag, field, positional, required) | ({} if positional else {"dest": key})
                group.add_argument(key if positional else f"--{flag}", **arguments)
        return parser

    def _spelled(self, argv: Sequence[str]) -> list[str]:
        """Returns the words with underscores in flags; a negative number is joined to its flag, so that it is none."""
        words: list[str] = []
        for word in argv:
            flag, equals, value = word.partition("=")
            known = flag.removeprefix("--").replace("-", "_")
            if flag.startswith("--") and known in self.flags:
                words.append(f"--{known}{equals}{value}")
            elif NEGATIVE.match(word) and words and words[-1][:2] == "--" and words[-1][2:] in self.flags:
                words[-1] += f"={word}"
            else:
                words.append(word)
        return words

    def _unknown(self, rest: Sequence[str]) -> list[str]:
        """Returns the messages on words that no flag takes."""
        problems = []
        for word, after in zip(rest, [*rest[1:], "-"], strict=False):
            flag, equals, value = word.partition("=")
            if flag.startswith("-"):
                given = value if equals else "" if after.startswith("-") else after
                problems.append(f"{flag}: no such flag.{self._nearest(flag.lstrip('-').replace('-', '_'), given)}")
        strays = [f"{word}: not expected here; flags begin with --, and --help lists them." for word in rest]
        return problems or strays

    def _nearest(self, name: str, value: str) -> str:
        """Returns the flag or setting that was meant, with its value."""
        keys = keys_by_name(self.settings)
        if name in LAUNCHER and "local_rank" in self.flags:
            return f" It is an option of the launcher: deepspeed --{name} {value} {self._prog} ..."
        aliases = [*config.ALIASES.get(name, "").split(), name.rpartition(".")[2]]
        for alias in [*aliases, *difflib.get_close_matches(name, [*self.flags, *keys], n=1, cutoff=0.6)]:
            meant, _, fixed = alias.partition("=")
            given = fixed or value
            if meant in self.flags and meant not in self.positional:
                return f" Did you mean '--{meant}{f' {given}' if given else ''}'?"
            if meant in keys:
                return f" Did you mean '--set {keys[meant]}={given or '...'}'?"
        return " --help lists all flags."


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raises a `UserError`, which the command prints without the usage."""
        message = re.sub(r"expected (at least )?one argument", "give a value after it", message)
        message = re.sub(r"expected (\d+) arguments", r"give \1 values after it", message)
        message = re.sub(r"ignored explicit argument .*", "takes no value", message.removeprefix("argument "))
        raise UserError(f"{message}. --help lists all flags.")


def _arguments(flag: str, field: FieldInfo, positional: bool, required: str) -> dict[str, Any]:
    """Returns the arguments of `add_argument` for a field. Values stay text: the settings class reads them."""
    default, about = None if field.default_factory else field.default, field.description
    if about is not None:
        shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else default
        more = f" (default: {shown})" if shown not in (None, "") and shown is not False else ""
        about += f" {required}" if field.is_required() else more
    text = argparse.SUPPRESS if about is None else about.replace("%", "%%")
    if default is False:
        return {"action": "store_true", "help": text}
    kinds = list(_kinds(field.annotation))
    texts = [str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    number = "N" if int in kinds else "X" if float in kinds else ""
    metavar = "|".join(filter(None, [number, *texts])) or flag.rpartition("_")[2].upper()
    arguments: dict[str, Any] = {"help": text, "metavar": field.title or metavar}
    for kind in kinds:
        if get_origin(kind) is tuple and Ellipsis not in get_args(kind):
            return arguments | {"nargs": len(get_args(kind))}
        if get_origin(kind) in (list, tuple):
            return arguments | {"nargs": "*" if positional else "+", "action": "extend"}
    return arguments | ({"nargs": "?"} if positional else {})


def _kinds(annotation: Any) -> Iterable[Any]:
    """Yields the types that an annotation allows, without their constraints and None."""
    if get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _kinds(member)
    elif annotation is not NoneType:
        yield annotation


def fine_tuning_command(model: Path) -> str:
    """Returns the command that fine-tunes a model folder, as the next step after a command that made it."""
    return f"{shlex.join(['python', 'finetune/run.py', '--model', str(model)])} --head multicls --train_file ROWS.csv"


def curves_line(folder: Path) -> list[tuple[str, object]]:
    """Returns the line of a summary on the curves in `folder`/tb; none if there are no curves."""
    board = folder / "tb"
    return [("curves", shlex.join(["tensorboard", "--logdir", str(board)]))] if board.exists() else []


def print_summary(made: Iterable[tuple[str, object]], next_command: str = "", file: TextIO | None = None) -> None:
    """Prints the end of a command: what it made and where, one a line, and the command to go on with."""
    lines = [*made, *([("next", next_command)] if next_command else [])]
    width = max((len(name) for name, _ in lines), default=0) + 1
    for name, value in lines:
        print(f"{name + ':':{width}} {value}", file=file, flush=True)
