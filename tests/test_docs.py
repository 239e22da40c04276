"""Pages whose commands form one story are run from top to bottom, in a fresh copy of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_readme import NOT_COPIED, REPOSITORY, runnable_blocks


@pytest.mark.slow
def test_own_labels_from_a_table_to_predictions(tmp_path: Path) -> None:
    copy = tmp_path / "repository"
    shutil.copytree(REPOSITORY, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    output = ""
    for block in runnable_blocks((REPOSITORY / "docs" / "own_labels.md").read_text(encoding="utf-8")):
        shell = ["bash", "-euo", "pipefail"] if block.language == "bash" else [sys.executable]
        done = subprocess.run(
            [*shell, "-c", block.commands], cwd=copy, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"line {block.line}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        output += done.stdout
    for said in ("acc 100.00", "minilm cls", "page with figures: runs/own/results/report.html", "20 rows: 9 billing",
                 "'label': 'defect'"):  # fmt: skip
        assert said in output, said
    assert len((copy / "runs/own/labelled.csv").read_text(encoding="utf-8").splitlines()) == 21
