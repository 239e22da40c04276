"""The benchmark of a card, tried on a CPU: what it measures is tested where it is used."""

from pathlib import Path

import pytest

from benchmarks import gpu
from multicls.files import read_json


@pytest.mark.slow
def test_small_measures_a_step_beside_the_plain_loop(tmp_path: Path) -> None:
    assert gpu.main(["--output", str(tmp_path), "--small", "true"]) == 0
    plain, ours = read_json(tmp_path / "report.json")["rows"]
    assert (plain["what"], ours["what"]) == ("plain", "graph") and "no GPU" in ours["notes"]
    assert ours["x plain"] == pytest.approx(ours["ms"] / plain["ms"])
    assert "| tiny BERT | 32 | 6 | graph |" in (tmp_path / "report.md").read_text()


def test_no_row_begins_after_the_time(tmp_path: Path) -> None:
    assert gpu.main(["--output", str(tmp_path), "--small", "true", "--minutes", "1e-9"]) == 0
    assert not list(tmp_path.iterdir())
