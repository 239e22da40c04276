"""The README does what it says: its bash and Python blocks are run, in order, in a fresh copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[1]
NOT_COPIED = (".git", ".venv", "runs", "build", "*.egg-info", "__pycache__", ".*_cache")
BLOCK = re.compile(
    r"(?:<!-- *not run: *(?P<reason>.+?) *-->\s*)?^```(?P<language>bash|python)\n(?P<commands>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """One fenced block: its language, its commands, and why a test does not run them (empty: it does)."""

    language: str
    commands: str
    reason: str
    line: int


def runnable_blocks(text: str) -> list[Block]:
    """The bash and Python blocks of a Markdown text; `<!-- not run: reason -->` stands right before a block to skip."""
    return [
        Block(match["language"], match["commands"], match["reason"] or "", text.count("\n", 0, match.start("commands")))
        for match in BLOCK.finditer(text)
    ]


@pytest.fixture(scope="module")
def blocks() -> list[Block]:
    return runnable_blocks((REPOSITORY / "README.md").read_text(encoding="utf-8"))


def test_blocks_are_found_with_their_reasons() -> None:
    text = "# T\n```bash\nls\n```\n```\n{}\n```\n<!-- not run: needs a GPU -->\n```bash\na\nb\n```\n```python\n1\n```\n"
    assert runnable_blocks(text) == [
        Block("bash", "ls\n", "", 2),
        Block("bash", "a\nb\n", "needs a GPU", 9),
        Block("python", "1\n", "", 13),
    ]


def test_readme_has_commands_to_run(blocks: list[Block]) -> None:
    assert any(not block.reason for block in blocks)
    commands = {line.split("#")[0].strip() for block in blocks for line in block.commands.splitlines()}
    assert {"make demo", "make test"} <= commands


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_readme_commands_run(blocks: list[Block], tmp_path: Path) -> None:
    copy = tmp_path / "repository"
    shutil.copytree(REPOSITORY, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    skipped = 0
    for block in blocks:
        if block.reason:
            continue
        if "MULTICLS_DATA" in block.commands and "MULTICLS_DATA" not in environment:
            skipped += 1
            continue
        interpreter = ["bash", "-euxo", "pipefail"] if block.language == "bash" else [sys.executable]
        done = subprocess.run(
            [*interpreter, "-c", block.commands],
            cwd=copy,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        # bash -x prints each command with a plus before it runs, so the last one in the output is the culprit
        assert done.returncode == 0, f"README.md line {block.line}, exit code {done.returncode}:\n{done.stdout[-6000:]}"
    if skipped:
        pytest.skip(f"all ran but {skipped} blocks that need real data: set MULTICLS_DATA to its folder")
