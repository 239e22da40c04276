"""The draw of boundaries and dropped paragraphs for reading."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import reading, run
from tests.data_prep.conftest import story


def test_the_same_seed_draws_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "RESULTS", tmp_path / "results")
    (tmp_path / "a.txt").write_text("\n\n".join(f"Title {i}\n\n{story(10, i)}" for i in range(40)))
    command = ["--genre", "tales", "--input", str(tmp_path / "a.txt"), "--number", "20"]
    texts = []
    for seed in ("0", "0", "1"):
        run.main(["reading", *command, "--seed", seed])
        texts.append((tmp_path / "results" / "reading_tales.txt").read_text())
    assert texts[0] == texts[1] != texts[2]
    assert "BOUNDARIES (20 of 360)" in texts[0] and "DROPPED (20 of 40)" in texts[0]
    assert texts[0].count("¦") == 20 and texts[0].count("lines_heading (a.txt#0): Title") == 20
