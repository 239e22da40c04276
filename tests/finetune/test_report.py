"""The report: numbers in its tables, what it warns of, its commands, its files; calibration and ensembles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import expit, softmax

from finetune.report import Report, ReportOptions, build_report, main, render
from finetune.report_tables import BENCHMARKS, average, calibration_error, reliability
from finetune.results import load_predictions, write_error
from multicls.errors import UserError
from tests.finetune.runs import fake_run


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two systems on RTE, three subsets of two seeds each."""
    for subset in (1, 2, 3):
        for seed in (1, 2):
            fake_run(tmp_path, "a", skill=1.0, subset=subset, seed=seed)
            fake_run(tmp_path, "b", skill=0.2, subset=subset, seed=seed)
    return tmp_path


def report_of(folder: Path, **options: object) -> Report:
    return build_report(ReportOptions(results=str(folder), **options))


def test_tables_hold_the_numbers(results: Path) -> None:
    report = report_of(results)
    subsets = 100 * report.groups[0].runs.groupby("subset")["score"].mean()
    expected = f"{subsets.mean():.2f} ± {subsets.std() / np.sqrt(3):.2f}"
    scores = report.tables["Scores"].set_index("system")["rte (acc)"]
    assert list(scores.index) == ["majority-class baseline", "a", "b"]
    assert list(scores[:2]) == ["50.00", expected]
    row = report.tables["All results"].set_index("system").loc["a"]
    found = row[["replicates", "runs", "scores", "training rows"]]
    assert list(found) == ["3 training subsets", "6", f"acc {expected}", "100"]
    (line,) = report.tables["Comparisons"].to_dict("records")
    assert line["system"] == "a - b" and line["test"] == "paired, training subsets"
    assert float(line["difference"]) > 5 and int(line["needed"]) >= 2


def test_benchmark_averages_are_of_all_tasks(tmp_path: Path) -> None:
    tasks = sorted(BENCHMARKS["GLUE, paper's 8"])
    for number, task in enumerate([*tasks, "wnli"]):
        fake_run(tmp_path, "a", task=task, score=0.1 * number)
    scores = report_of(tmp_path).tables["Scores"].set_index("system")
    assert scores.loc["a", "GLUE, paper's 8"] == "35.00"
    assert "GLUE, paper's 8" not in report_of(tmp_path, task=tasks[1:]).tables["Scores"]


def test_holm_is_over_all_tests_shown(results: Path) -> None:
    (alone,) = report_of(results).tables["Comparisons"]["p, corrected"]
    for subset in (1, 2, 3):
        fake_run(results, "c", skill=0.9, subset=subset, train_rows=80, validation_rows=20)
    more = report_of(results)
    (chosen,) = report_of(results, compare=["a", "b"]).tables["Comparisons"]["p, corrected"]
    assert chosen == alone != more.tables["Comparisons"]["p, corrected"][0]
    assert more.tables["All results"]["training rows"].iloc[-1] == "80 + 20", "of a holdout"


def test_ensembles_have_their_own_scores_on_test_rows_too(tmp_path: Path) -> None:
    """Not those of their first member."""
    for seed in (1, 2, 3):
        fake_run(tmp_path, "a", skill=0.6, seed=seed, tests={"test": {"acc": 0.123}})
    single, ensemble = report_of(tmp_path, ensembles=3).groups
    folders = sorted((tmp_path / "a" / "rte-100").iterdir())
    dev = [load_predictions(folder, "rte")["dev"] for folder in folders]
    mean = np.mean([softmax(run["logits"], axis=1) for run in dev], axis=0)
    accuracy = (mean.argmax(axis=1) == dev[0]["labels"]).mean()
    assert (single["system"], ensemble["system"]) == ("a", "a x3")
    assert ensemble["score"] == ensemble["tests"]["test"]["acc"] == accuracy != 0.123
    table = report_of(tmp_path, ensembles=3).tables["All results"]
    assert list(table["test rows"]) == ["test acc 12.30 ± 0.00", f"test acc {100 * accuracy:.2f}"]


def test_warnings(results: Path) -> None:
    settings = {"train.epochs": 3, "subset": 9}
    fake_run(results, "a", subset=9, data_sha256="x", settings=settings)
    for kind in ("failed", "incompatible"):
        write_error(results / kind / "rte-100" / "p1-d8-s1", kind, ValueError("broken"))
    different, optimistic, settings_differ, unfinished = report_of(results).warnings
    assert different.startswith("rte: the runs read different data")
    assert optimistic.startswith("rte: dev picked the checkpoint")
    assert settings_differ == "a on rte, 100 rows: its runs differ in train.epochs."
    assert unfinished.startswith("1 run not finished") and unfinished.endswith("broken")


def test_runs_that_cannot_be_reported_are_named(results: Path) -> None:
    """A run without predictions, a folder of failed runs, a size of ensembles that no system has seeds for."""
    assert report_of(results, ensembles=2).warnings == report_of(results).warnings
    *_, first, second = report_of(results, ensembles=3).warnings
    assert first == "--ensembles 3: a on rte, 100 rows has fewer seeds of each subset."
    assert second.startswith("--ensembles 3: b on rte")
    lost = results / "a" / "rte-100" / "p1-d2-s1"
    (lost / "predictions.npz").unlink()
    with pytest.raises(UserError, match=f"{lost}: predictions.npz is missing"):
        report_of(results)
    write_error(results / "f" / "c" / "rte-100" / "p1-d8-s1", "failed", ValueError("broken"))
    with pytest.raises(UserError, match="no finished run(.|\n)*1 run not finished.*broken"):
        report_of(results / "f")


def test_the_command_is_that_of_the_best_run_of_each_task(results: Path) -> None:
    """Never that of another task whose scores are larger numbers."""
    fake_run(results, "b", task="sst2", skill=9.0)
    report = report_of(results)
    best = {}
    for group in report.groups:
        best[group["system"]] = group.runs.sort_values("selection_score").iloc[-1]["path"]
    save = "python finetune/run.py --recipe {}/settings.yaml --save_model"
    assert report.commands == {
        "rte, the best model (a)": save.format(best["a"]),
        "sst2, the best model (b)": save.format(best["b"]),
    }
    Path(best["a"], "model").mkdir()
    command = f"python finetune/predict.py {best['a']}/model ROWS.csv"
    assert report_of(results).commands["rte, the best model (a)"] == command


def test_files(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(results)]) == 0
    out = capsys.readouterr().out
    assert "paired, training subsets" in out and "next:" in out
    markdown = (results / "report.md").read_text()
    page = (results / "report.html").read_text()
    for text in ("Scores", "majority-class baseline", "Holm"):
        assert text in markdown and text in page
    assert "min-width: 640px" in page, "on a narrow screen figures scroll"
    assert page.count("data:image/svg+xml") == 2 and "<script" not in page and "http" not in page


def test_names_from_outside_are_text(tmp_path: Path) -> None:
    fake_run(tmp_path, "<b>x|y")
    page, text = (render(report_of(tmp_path), name) for name in ("report.html", "report.md"))
    assert "<b>x" not in page and "\\<b\\>x\\|y" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no such folder"),
        (["EMPTY"], "no finished run"),
        (["RESULTS", "--task", "cola"], "--task cola: no run of it"),
        (["RESULTS", "--compare", "a", "bb"], "--compare bb: no run of it"),
    ],
)
def test_mistakes(arguments: list[str], message: str, results: Path) -> None:
    (results / "empty").mkdir()
    folders = {"RESULTS": str(results), "EMPTY": str(results / "empty")}
    with pytest.raises(UserError, match=message):
        main([folders.get(argument, argument) for argument in arguments])


def test_calibration_error_by_hand() -> None:
    """Two bins: 3 of 4 right at 0.75 and 0 of 2 right at 0.9."""
    confidence = np.array([0.75] * 4 + [0.9] * 2)
    logits = np.log(np.stack([confidence, 1 - confidence], axis=1))
    bins = reliability(logits, np.array([0, 0, 0, 1, 1, 1]))
    assert calibration_error(bins) == pytest.approx((4 * 0.0 + 2 * 0.9) / 6)
    assert list(bins["accuracy"]) == [0.75, 0.0] and list(bins["share"]) == [4 / 6, 2 / 6]


@pytest.mark.parametrize(
    ("labels", "probability"),
    [(np.zeros(1), softmax), (np.zeros((1, 3)), lambda x, axis: expit(x))],
)
def test_averages_are_those_of_probabilities(labels: np.ndarray, probability: Any) -> None:
    outputs = np.array([[[0.0, 3.0, 1.0]], [[5.0, 0.0, 1.0]]])
    runs = [{"dev": {"ids": np.array(["a"]), "labels": labels, "logits": run}} for run in outputs]
    mean = average(runs)["dev"]["logits"]
    expected = probability(outputs, axis=-1).mean(axis=0)
    np.testing.assert_allclose(probability(mean, axis=-1), expected)
    scores = [{"dev": run["dev"] | {"logits": run["dev"]["logits"][:, :1]}} for run in runs]
    assert labels.ndim > 1 or average(scores)["dev"]["logits"] == 2.5
    runs[0]["dev"]["ids"] = np.array(["b"])
    with pytest.raises(UserError, match="different examples"):
        average(runs)
