"""The benchmark of a card, tried on a CPU: what it measures is tested where it is used."""

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from multicls.errors import UserError
from multicls.files import REPOSITORY, read_json
from tests.processes import children, sessions, until


def cpu_seconds() -> float:
    """Returns the processor time of the processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
def test_small_takes_little_and_a_part_that_is_cut_loses_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {part: 10 * limit for part, limit in gpu.LIMITS.items()}  # of a busy machine
    assert sum(gpu.LIMITS.values()) == 690
    monkeypatch.setattr(gpu, "LIMITS", limits | {"loader": 0.01})
    before = cpu_seconds()
    assert gpu.main(["--output", str(tmp_path), "--small"]) == 0
    assert cpu_seconds() - before < 50
    parts, text = read_json(tmp_path / "report.json")["parts"], (tmp_path / "report.md").read_text()
    states = {part: result["state"] for part, result in parts.items()}
    assert states == dict.fromkeys(limits, "done") | {"loader": "cut after 0.01 s"}
    plain, ours = parts["steps"]["rows"]
    assert (plain["what"], ours["what"]) == ("plain", "graph") and "no GPU" in ours["notes"]
    assert ours["x plain"] == pytest.approx(ours["ms"] / plain["ms"])
    rows = parts["tests"]["rows"]
    assert {"test_steps_are_those_of_pytorch_on_cpu[1-bf16]"} < {row["test"] for row in rows}
    assert {row["outcome"] for row in rows} <= {"skipped", "passed"}
    assert "loader (cut after 0.01 s" in text and "steps (done" in text


@pytest.mark.slow
def test_rows_are_there_before_a_part_ends_and_an_interrupt_ends_it(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--output", str(tmp_path), "--small"]
    report = tmp_path / "report.json"
    with subprocess.Popen(command, cwd=REPOSITORY) as process:
        until(lambda: report.exists() and "steps" in read_json(report)["parts"])
        (part,) = children(process.pid)
        process.send_signal(signal.SIGTERM)
    steps = read_json(report)["parts"]["steps"]
    assert steps["state"] == "not ended" and steps["rows"]
    until(lambda: part not in sessions().values())


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--part tets: there are steps, tests"):
        gpu.main(["--output", str(tmp_path), "--part", "tets"])
