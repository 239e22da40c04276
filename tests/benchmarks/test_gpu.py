"""The benchmark of a card, tried on a CPU: what it measures is tested where it is used."""

import os
import resource
from pathlib import Path

import pytest

from benchmarks import gpu
from multicls.errors import UserError
from multicls.files import read_json
from tests.processes import children


def cpu_seconds() -> float:
    """Returns the processor time of the processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
def test_small_takes_little_and_a_part_that_is_cut_loses_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {part: 10 * limit for part, limit in gpu.LIMITS.items()}  # of a busy machine
    assert sum(gpu.LIMITS.values()) == 600
    for part in ("elastic", "switches"):  # two GPUs, and what `shapes` shows, too
        del limits[part]
    monkeypatch.setattr(gpu, "LIMITS", limits | {"tests": 0.01})
    before = cpu_seconds()
    assert gpu.main(["--output", str(tmp_path), "--small"]) == 0
    assert cpu_seconds() - before < 50
    parts, text = read_json(tmp_path / "report.json")["parts"], (tmp_path / "report.md").read_text()
    states = {part: result["state"] for part, result in parts.items()}
    assert states == dict.fromkeys(limits, "done") | {"tests": "cut after 0.01 s"}
    assert [row["model"] for row in parts["shapes"]["rows"]] == ["BERT-base", "ModernBERT-base"]
    assert all(row["plain MLM, ms"] > 0 < row["ours, ms"] for row in parts["shapes"]["rows"])
    assert [row["ZeRO"] for row in parts["losses"]["rows"]] == [1, 2, 3]
    assert all(row["largest difference"] < 1e-5 for row in parts["losses"]["rows"])
    assert "tests (cut after 0.01 s" in text and "shapes (done" in text


@pytest.mark.slow
def test_rows_are_there_before_a_part_ends(tmp_path: Path) -> None:
    before = set(children(os.getpid()))  # of other tests in this process
    results = gpu.run_part("losses", gpu.Options(output=tmp_path, small=True), 1000)
    first = next(results)
    assert first["state"] == "not ended" and len(first["rows"]) == 1
    results.close()  # as an interrupt does
    assert set(children(os.getpid())) <= before


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--part tets: there are tests, losses"):
        gpu.main(["--output", str(tmp_path), "--part", "tets"])
