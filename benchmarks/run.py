"""Runs one benchmark by its name: `python benchmarks/run.py NAME [options]`; without a name, lists them.

Results go to runs/benchmarks/NAME.json and NAME.md; `python benchmarks/run.py page` makes docs/performance.md of them.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.compare import PAGE, page
from multicls.command_line import CommandLine
from multicls.errors import UserError, did_you_mean, run_command
from multicls.files import atomic_write

NAMES = ("step", "cost", "loader", "data_prep", "reading", "finetune_trainer", "finetune_inference",
         "finetune_statistics", "embeddings", "sentence_order")  # fmt: skip
POSITIONAL = {"loader": ["corpus"], "data_prep": ["inputs"]}  # options that are given by their place


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark that the first argument names, with the others.

    Raises:
        UserError: There is no such benchmark.
    """
    name, *options = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__)
        for name in NAMES:
            source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
            print(f"  {name:20}{(ast.get_docstring(ast.parse(source)) or '').splitlines()[0]}")
        print(f"  {'page':20}Writes docs/performance.md from the results.")
    elif name == "page":
        text = page()
        with atomic_write(PAGE) as file:
            file.write(text)
        print(f"written: {PAGE}")
    elif name in NAMES:
        module = importlib.import_module(f"benchmarks.{name}")
        prog, positional = f"benchmarks/run.py {name}", POSITIONAL.get(name, ())
        args = CommandLine(prog, module.__doc__, module.Options, positional=positional).parse(options)
        module.main(args, options)
    else:
        raise UserError(f"no benchmark is called {name}.{did_you_mean(name, [*NAMES, 'page'])}")
    return 0


if __name__ == "__main__":
    run_command(main)
