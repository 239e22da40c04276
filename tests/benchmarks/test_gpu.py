"""The benchmark of a card, tried on a CPU: what it measures is tested where it is used."""

from pathlib import Path

import pytest

from benchmarks import gpu
from multicls.errors import UserError
from multicls.files import read_json


@pytest.mark.slow
def test_a_part_that_is_cut_loses_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LIMITS", {"tests": 0.01, "shapes": 100})
    assert gpu.main(["--output", str(tmp_path), "--small"]) == 0
    parts, text = read_json(tmp_path / "report.json")["parts"], (tmp_path / "report.md").read_text()
    assert parts["tests"]["state"] == "cut after 0.01 s" and parts["shapes"]["state"] == "done"
    assert [row["model"] for row in parts["shapes"]["rows"]] == ["BERT-base", "ModernBERT-base"]
    assert all(row["plain MLM, ms"] > 0 < row["ours, ms"] for row in parts["shapes"]["rows"])
    assert "tests (cut after 0.01 s" in text and "shapes (done" in text


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--part tets: there are tests, shapes"):
        gpu.main(["--output", str(tmp_path), "--part", "tets"])
