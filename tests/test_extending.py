"""docs/extending.md works: each of its sections is followed, in a fresh copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_readme import NOT_COPIED, REPOSITORY

FENCE = re.compile(r'^```(?P<language>\w+)(?: title="(?P<file>[^"]+)")?\n(?P<text>.*?)^```', re.MULTILINE | re.DOTALL)
LEFT = {  # section -> a file that its commands leave, and what stands in it
    "A head": ("runs/heads/results.jsonl", '"head": "largest"'),
    "A task": ("runs/tasks/results.jsonl", '"task": "questions"'),
    "An objective": ("runs/spread/metrics.jsonl", '"loss/spread": 0.'),
    "A source": ("runs/film_corpus/manifest.json", '"documents": 12'),
}


class Step(NamedTuple):
    """A fenced block: commands to run, a file to write, or a change to make."""

    language: str
    file: str | None
    text: str


def steps_of(section: str) -> list[Step]:
    page = (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")
    (text,) = [part for part in page.split("\n## ")[1:] if part.startswith(f"{section}\n")]
    return [Step(*match.group("language", "file", "text")) for match in FENCE.finditer(text)]


def changed(text: str, diff: str) -> str:
    """Returns `text` with the lines of a diff replaced, which must occur once."""
    lines = diff.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] or "\n" for line in lines if line[0] in " +")
    places = [match.start() for match in re.finditer(f"^(?={re.escape(old)})", text, re.MULTILINE)]
    assert len(places) == 1, f"the page changes these lines, which are not there once:\n{old}"
    return text[: places[0]] + new + text[places[0] + len(old) :]


def test_a_change_needs_its_lines() -> None:
    assert changed("a\nb\nc\n", " b\n+new\n") == "a\nb\nnew\nc\n"
    assert changed("a\nb\nc\n", "-b\n+new\n") == "a\nnew\nc\n"
    with pytest.raises(AssertionError, match="not there once"):
        changed("a\na\n", " a\n+b\n")


@pytest.mark.slow
@pytest.mark.parametrize("section", LEFT)
def test_each_section_works(section: str, tmp_path: Path) -> None:
    copy = tmp_path / "repository"
    shutil.copytree(REPOSITORY, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(copy)
    languages = []
    for step in steps_of(section):
        languages.append(step.language)
        if step.file is None:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", step.text], cwd=copy, env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout[-4000:]
        elif step.language == "diff":
            (copy / step.file).write_text(changed((copy / step.file).read_text("utf-8"), step.text), "utf-8")
        else:
            (copy / step.file).write_text(step.text, "utf-8")
    assert "diff" in languages and "bash" in languages
    file, content = LEFT[section]
    assert content in (copy / file).read_text("utf-8")
