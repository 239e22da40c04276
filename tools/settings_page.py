"""Writes docs/settings.md, the reference of all settings and flags, from the code.

python tools/settings_page.py
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)

import yaml

from finetune.grid import GridSettings
from finetune.settings import FinetuneSettings
from multicls.command_line import CommandLine
from multicls.ds_config import DEFAULTS, OWNED, REFUSED
from multicls.files import atomic_write
from multicls.settings import Settings
from pretrain.settings import PretrainSettings

Row = tuple[str, ...]
PAGE = REPOSITORY / "docs" / "settings.md"
SETTINGS: dict[str, type[Settings]] = {"pretrain/run.py": PretrainSettings, "finetune/run.py": FinetuneSettings,
                                       "finetune/grid.py": GridSettings}  # fmt: skip
COMMANDS = [
    *(f"data_prep/run.py {command}" for command in ("build", "show", "stats", "verify", "vocabulary")),
    *(f"pretrain/{name}.py" for name in ("run", "export", "report")),
    *(f"finetune/{name}.py" for name in ("run", "grid", "report", "predict", "submit", "analyze")),
    "multicls/convert.py",
]
INTRODUCTION = """# Settings and commands

`python tools/settings_page.py` writes this page from the code.

Every setting has a default. A recipe (`--recipe FILE`, YAML) overrides defaults, and a later recipe overrides an
earlier one. `--set a.b=c` overrides recipes, and a flag overrides all of them. `--print_config` prints the result.

Exit codes of all commands: 0 means done; the work may have been done before, or a signal may have stopped the command
after a save. 2 means that settings or data are wrong; each problem is printed on its own line. 1 means a crash.
130 or 143 means that Ctrl-C or SIGTERM ended a command that had nothing to save. `pretrain/run.py --status` gives 3 for
an unfinished run.
"""


def parser_of(command: str) -> argparse.ArgumentParser:
    """Returns the parser that a command parses its flags with."""
    file, _, word = command.partition(" ")
    module: Any = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    line: CommandLine[Any] = module.COMMANDS[word][0] if word else module.COMMAND
    return line.parser()


def flag_rows(command: str) -> list[Row]:
    """Returns a row for each flag: its names with the values it takes, and its help."""
    parser, rows = parser_of(command), list[Row]()
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        value = "" if action.nargs == 0 else str(action.metavar)
        shown = " ".join(filter(None, [", ".join(action.option_strings), value]))
        rows.append((f"`{shown}`", formatter._expand_help(action)))
    return rows


def setting_rows(kind: type[Settings], prefix: str = "", defaults: Settings | None = None) -> Iterator[Row]:
    """Yields a row for each setting: its dotted key, its default (from `defaults`, if given), and what it is."""
    for name, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Settings):
            if prefix + name != "settings":  # of a grid: those of finetune/run.py
                group = field.default if isinstance(field.default, Settings) else None
                yield from setting_rows(inner, f"{prefix}{name}.", group)
            continue
        value = getattr(defaults, name) if defaults else field.default
        default = "required" if field.is_required() else f"`{_plain(value)}`"
        values = [str(value) for value in get_args(inner) if isinstance(value, str)]
        choices = f"{', '.join(values)}. " if values and f"{values[0]}:" not in (field.description or "") else ""
        yield f"`{prefix}{name}`", default, choices + (field.description or "")


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return text.removesuffix("...\n").strip()


def table(header: Row, rows: Iterable[Row]) -> str:
    """Returns a Markdown table."""
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", " or ")
    return text if text.startswith("`") else text.replace("<", "&lt;").replace("*", "\\*")


def page() -> str:
    """Returns the page."""
    parts = [INTRODUCTION]
    for command, kind in SETTINGS.items():
        parts += [f"## Settings of {command}\n", table(("setting", "default", "meaning"), setting_rows(kind))]
    parts.append("## DeepSpeed's JSON\n\nThe first table lists the keys that a setting owns: leave them out, or give "
                 'them `"auto"`.\n')  # fmt: skip
    parts.append(table(("key", "owned by"), [(f"`{key}`", f"`{owner}`") for key, owner in OWNED.items()]))
    defaults = [(f"`{key}`", f"`{_plain(value)}`") for key, value in DEFAULTS.items()]
    parts += ["These keys get another default than DeepSpeed's.\n", table(("key", "default"), defaults)]
    refused = [(f"`{key}`", what) for key, what in sorted(REFUSED.items())]
    parts += ["These keys are refused.\n", table(("key", "what to do"), refused)]
    for command in COMMANDS:
        parts += [f"## {command}\n", table(("flag", "meaning"), flag_rows(command))]
    return "\n".join(parts)


if __name__ == "__main__":
    with atomic_write(PAGE) as file:
        file.write(page())
