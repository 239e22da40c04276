"""Writes docs/settings.md, the reference of all commands, from their --help_all.

python tools/settings_page.py
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from multicls.deepspeed_config import OWNED
from multicls.files import REPOSITORY, atomic_write

PAGE = REPOSITORY / "docs" / "settings.md"
COMMANDS = (
    "data_prep/run.py",
    *(f"data_prep/run.py {command}" for command in ("show", "stats", "verify")),
    *(f"pretrain/{name}.py" for name in ("run", "export")),
    *(f"finetune/{name}.py" for name in ("compare", "predict", "run", "grid", "report")),
    "multicls/convert.py",
)
INTRODUCTION = """# Settings and commands

`python tools/settings_page.py` writes this page from the `--help_all` of all commands.

Every setting is a flag, `--group.name`, and the common ones have a short form beside it. A recipe (`--recipe`, YAML: a
file or the name of a shipped one) overrides defaults, a later recipe overrides an earlier one, and a flag overrides
all. `--print_config` prints the result as a recipe.

Exit codes: 0: done (now or before), or stopped by a signal after a save. 1: a crash, or work that failed. 2: wrong
settings or data (nothing was written), or a full disk; each problem is printed on a line of its own. 3: an unfinished
run, for `pretrain/run.py --status`. 130: interrupted.

## DeepSpeed's JSON

`--config` takes DeepSpeed's own JSON. These keys belong to settings: leave them out, or set the first six to `"auto"`.

"""


def help_of(command: str) -> str:
    """Returns the whole help of a command, 100 columns wide."""
    words = [sys.executable, *command.split(), "--help_all"]
    wide = os.environ | {"COLUMNS": "100"}
    return subprocess.check_output(words, cwd=REPOSITORY, env=wide, text=True).strip()


def page() -> str:
    """Returns the page."""
    owned = "".join(
        f"| `{key}` | `{owner.replace(' and ', '`, `')}` |\n" for key, owner in OWNED.items()
    )
    text = f"{INTRODUCTION}| key | setting |\n| --- | --- |\n{owned}"
    with ThreadPoolExecutor(2) as pool:
        for command, shown in zip(COMMANDS, pool.map(help_of, COMMANDS), strict=True):
            text += f"\n## {command}\n\n```text\n{shown}\n```\n"
    return text


if __name__ == "__main__":
    with atomic_write(PAGE) as file:
        file.write(page())
