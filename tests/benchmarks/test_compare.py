"""The harness of the benchmarks on invented samples, its page, and the command line of every benchmark."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from benchmarks import compare, finetune_trainer, run
from benchmarks.compare import Bar, Report, Samples, page, ratio, take_turns, verdict, without_folders
from benchmarks.cost import Cluster, step_seconds
from benchmarks.step import CountOperators
from multicls.errors import UserError
from pretrain.nonfinite import _not_finite


def test_both_estimates_of_a_ratio() -> None:
    assert ratio([2.0, 3.0, 9.0], [4.0, 5.0, 6.0]) == pytest.approx((2 / 4, 3 / 5))
    with pytest.raises(ValueError):
        ratio([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("of_minima", "median", "bar", "expected"),
    [
        (0.30, 0.35, Bar("<=", 0.38), "met"),
        (0.38, 0.38, Bar("<=", 0.38), "met"),
        (0.35, 0.42, Bar("<=", 0.38), "not met"),  # one of both does not keep the bar
        (0.42, 0.35, Bar("<=", 0.38), "not met"),
        (0.20, 0.35, Bar("<=", 0.38), "INCONCLUSIVE"),  # though both keep it
        (0.90, 1.05, Bar("<=", 0.38), "INCONCLUSIVE"),  # though neither does
        (2.05, 2.10, Bar(">=", 2.0), "met"),
        (2.00, 1.95, Bar(">=", 2.0), "not met"),
        (0.50, 0.55, None, "stated only"),
        (0.50, 0.70, None, "INCONCLUSIVE"),
    ],
)
def test_verdicts(of_minima: float, median: float, bar: Bar | None, expected: str) -> None:
    assert verdict((of_minima, median), bar) == expected


def test_cases_take_turns_in_rotated_order_after_the_warm_up() -> None:
    calls: list[str] = []
    cases = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    samples = take_turns(cases, rounds=3, warmup=1)
    assert [sorted(calls[start : start + 3]) for start in range(0, 12, 3)] == [list("abc")] * 4
    assert calls[3:] == list("abc") + list("bca") + list("cab")
    assert all(len(one.wall) == len(one.cpu) == 3 for one in samples.values())


def test_time_ends_the_rounds_but_not_before_the_third() -> None:
    assert len(take_turns({"a": lambda: None}, rounds=10, seconds=0.0)["a"].wall) == 3


def test_report_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no results"):
        page(tmp_path)
    report = Report("invented", "An invented benchmark", ["--data", "/somewhere/else/file.txt"])
    samples = {"theirs": Samples([4.0, 4.0], [3.0, 3.0]), "ours": Samples([1.0, 1.2], [0.5, 0.6])}
    report.compare("Step", samples, "theirs", {"ours": Bar("<=", 0.38)})
    report.figure("reads", 4, Bar("<=", 3))
    report.table("Parts", ["part", "seconds"], [["write", 0.12345]])
    content = json.loads(report.write(tmp_path).read_text())
    assert content["results"][0]["cases"][1]["wall"] == [1.0, 1.2]
    beside = (tmp_path / "invented.md").read_text()
    assert "| ours | 1.0 |" not in beside and "| ours | 1 | 0.5 | 0.25 | 0.275 | <= 0.38 | met |" in beside
    assert "| reads | 4 | <= 3 | not met |" in beside and "| write | 0.1235 |" in beside
    assert "| ours | 1 | 0.5" in capsys.readouterr().out
    text = page(tmp_path)
    assert "`python benchmarks/run.py invented --data file.txt`" in text and "somewhere" not in text
    assert "| ours | 1 | 0.5 | 0.25 | 0.275 | <= 0.38 | met |" in text
    assert "## Not yet run on a GPU" in text
    Report("invented.cuda", "On a GPU", [], device="NVIDIA H200").write(tmp_path)
    assert "## Not yet run on a GPU" not in page(tmp_path) and "NVIDIA H200; " in page(tmp_path)


@pytest.mark.parametrize(
    ("word", "shown"), [("/a/b/c.txt", "c.txt"), ("wiki=/a/b/", "wiki=b"), ("0.5", "0.5"), ("a/b", "a/b")]
)
def test_no_absolute_path_is_shown(word: str, shown: str) -> None:
    assert without_folders(word) == shown


@pytest.mark.parametrize("name", run.NAMES)
def test_every_benchmark_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run.main([name, "--help"])
    assert left.value.code == 0
    told = capsys.readouterr().out
    documented = (importlib.import_module(f"benchmarks.{name}").__doc__ or "").splitlines()[0]
    assert f"benchmarks/run.py {name}" in told and documented in told


def test_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([]) == 0
    told = capsys.readouterr().out
    assert all(f"\n  {name} " in told for name in (*run.NAMES, "page"))
    folder = Path(compare.__file__).parent
    commands = {path.stem for path in folder.glob("*.py") if "\ndef main(" in path.read_text(encoding="utf-8")}
    assert {name for name in commands if not name.startswith("study")} == {"run", *run.NAMES}  # study.py has its own
    with pytest.raises(UserError, match="Did you mean 'step'"):
        run.main(["stepp"])


def test_reads_are_counted_by_who_asks() -> None:
    value = torch.tensor([[1.0, float("inf")]])
    with CountOperators() as counted:
        _not_finite({"mlm": value.sum()})  # of pretrain/nonfinite.py: asks, then reads
        value[0, 0].item()
    assert counted.reads == {"ours": 2, "others'": 1}
    assert counted.work["aten.sum.default"] == 1 and counted.views["aten.select.int"] == 2


def test_table_against_the_trainer() -> None:
    runs = [{"task": "rte", "seed": seed, "side": side, "score": score, "seconds": seconds, "wall_seconds": 2 * seconds,
             "steps": 2, "evaluations": 1} | ({"run_id": "r"} if side == "ours" else {})
            for seed, side, score, seconds in (
                (1, "ours", 0.52, 1.0), (1, "theirs", 0.51, 2.0), (2, "ours", 0.50, 3.0), (2, "theirs", 0.47, 4.0),
                (3, "ours", 0.90, 9.0),  # without its other side
            )]  # fmt: skip
    expected = ["rte", 2, "51.00 ± 1.00", "49.00 ± 2.00", "+0.89", "2, 1", pytest.approx(0.625), pytest.approx(0.625)]
    assert finetune_trainer.table(pd.DataFrame(runs)) == [expected]
    assert finetune_trainer.table(pd.DataFrame(runs[:2]))[0][1:5] == [1, "52.00", "51.00", "-"]


def test_gpu_pass_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="no CUDA device"):
        run.main(["step", "--device", "cuda"])


def test_step_on_paper_at_its_limits() -> None:
    flops, cluster = 1e13, Cluster(loader_rate=1e12, checkpoint_seconds=0)
    alone = step_seconds(1, flops, cluster)
    assert alone == {"compute": flops / (cluster.mfu * cluster.peak), "all-reduce": 0, "loader": 0, "checkpoint": 0}
    endless = Cluster(loader_rate=1e12, checkpoint_seconds=0, bandwidth=1e30)
    assert step_seconds(1024, flops, endless) == pytest.approx(alone)
    hidden = Cluster(loader_rate=1e12, checkpoint_seconds=0, overlap=1.0)
    assert step_seconds(1024, flops, hidden) == pytest.approx(alone)
    moved = cluster.parameters * cluster.bytes_per_parameter / cluster.bandwidth
    assert step_seconds(2, flops, cluster)["all-reduce"] == pytest.approx(moved)  # 2 (N - 1) / N = 1
    assert step_seconds(10**9, flops, cluster)["all-reduce"] == pytest.approx(2 * moved)


def test_step_on_paper_waits_for_a_slow_loader() -> None:
    slow = Cluster(loader_rate=100, sequences=240, checkpoint_seconds=10, save_every=100)
    step = step_seconds(8, 1e13, slow)
    assert step["compute"] + step["all-reduce"] + step["loader"] == pytest.approx(2.4)
    assert step["checkpoint"] == pytest.approx(0.1)
