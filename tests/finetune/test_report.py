"""The report: numbers in its tables, what it warns of, its commands, its files; calibration and ensembles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import expit, softmax

from finetune.ensembles import average
from finetune.report import Report, ReportOptions, build_report, main, render
from finetune.report_tables import calibration_error, reliability
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
    scores = report.tables["Scores"].set_index("system")["rte (acc)"]
    runs = report.groups[0].runs
    subsets = 100 * runs.groupby("subset")["score"].mean()
    expected = f"{subsets.mean():.2f} ± {subsets.std() / np.sqrt(3):.2f}"
    assert scores.to_dict() == {
        "a": expected,
        "b": scores["b"],
        "majority-class baseline": "50.00",
    }
    row = report.tables["All results"].set_index("system").loc["a"]
    assert (row["replicates"], row["runs"], row["scores"]) == (
        "3 training subsets",
        "6",
        f"acc {expected}",
    )
    (line,) = report.tables["Comparisons"].to_dict("records")
    assert line["system"] == "a - b" and line["test"] == "paired, training subsets"
    assert float(line["difference"]) > 5 and int(line["needed"]) >= 2
    for subset in range(4, 11):
        fake_run(results, "a", skill=1.0, subset=subset)
        fake_run(results, "c", skill=-50.0, subset=subset)
    ps = report_of(results).tables["Comparisons"]["p, corrected"]
    assert "< 0.001 *" in ps.tolist()


def test_rows_that_pick_the_checkpoint_are_not_training_rows(tmp_path: Path) -> None:
    fake_run(tmp_path, "a", selection="holdout", train_rows=80, validation_rows=20)
    row = report_of(tmp_path).tables["All results"].iloc[0]
    assert row["training rows"] == "80 + 20"


def test_holm_is_over_all_tests_shown(results: Path) -> None:
    fewer = report_of(results).tables["Comparisons"]
    for subset in (1, 2, 3):
        fake_run(results, "c", skill=0.9, subset=subset)
    more = report_of(results).tables["Comparisons"]
    chosen = report_of(results, compare=["a", "b"]).tables["Comparisons"]
    assert (len(fewer), len(more), len(chosen)) == (1, 3, 1)
    assert chosen["p, corrected"][0] == fewer["p, corrected"][0] != more["p, corrected"][0]


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
    write_error(results / "a" / "rte-100" / "p1-d8-s1", "failed", ValueError("broken"))
    write_error(results / "m" / "rte-100" / "p1-d8-s1", "incompatible", ValueError("no facets"))
    text = "\n".join(report_of(results).warnings)
    for part in (
        "a on rte, 100 rows: its runs differ in train.epochs",
        "rte: the runs read different data",
        "1 run not finished",
        "broken",
    ):
        assert part in text
    assert "no facets" not in text


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
    assert page.count("data:image/svg+xml") == 2 and "<script" not in page and "http" not in page


def test_names_from_outside_are_text(tmp_path: Path) -> None:
    fake_run(tmp_path, "<b>x|y")
    report = report_of(tmp_path)
    assert "<b>x" not in render(report, "report.html") and "\\<b\\>x\\|y" in render(
        report, "report.md"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no such folder"),
        (["RESULTS", "--task", "cola"], "--task cola: no run of it"),
        (["RESULTS", "--compare", "a", "bb"], "--compare bb: no run of it"),
    ],
)
def test_mistakes(arguments: list[str], message: str, results: Path) -> None:
    with pytest.raises(UserError, match=message):
        main([argument.replace("RESULTS", str(results)) for argument in arguments])


def test_folders_of_other_versions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="version 0.2, which is not read"):
        main([str(tmp_path)])


def test_calibration_error_by_hand() -> None:
    """Two bins: 3 of 4 right at 0.75 and 0 of 2 right at 0.9."""
    confidence = np.array([0.75] * 4 + [0.9] * 2)
    logits = np.log(np.stack([confidence, 1 - confidence], axis=1))
    bins = reliability(logits, np.array([0, 0, 0, 1, 1, 1]))
    assert calibration_error(bins) == pytest.approx((4 * 0.0 + 2 * 0.9) / 6)
    assert list(bins["accuracy"]) == [0.75, 0.0] and list(bins["share"]) == [4 / 6, 2 / 6]


def members(outputs: np.ndarray, labels: np.ndarray, names: str = "ab") -> list[Any]:
    """The predictions of runs with these outputs (M, 1, C) on one row."""
    rows = [{"ids": np.array([name]), "labels": labels} for name in names]
    return [{"dev": row | {"logits": run}} for row, run in zip(rows, outputs, strict=True)]


def test_averages_are_those_of_probabilities_or_scores() -> None:
    outputs = np.array([[[0.0, 3.0, 1.0]], [[5.0, 0.0, 1.0]]])
    classes, several, scores = (
        average(members(runs, labels, "aa"))["dev"]["logits"]
        for runs, labels in (
            (outputs, np.zeros(1)),
            (outputs, np.zeros((1, 3))),
            (outputs[..., :1], np.zeros(1)),
        )
    )
    np.testing.assert_allclose(np.exp(classes), softmax(outputs, axis=-1).mean(axis=0))
    np.testing.assert_allclose(expit(several), expit(outputs).mean(axis=0))
    np.testing.assert_allclose(scores, [[2.5]])
    with pytest.raises(UserError, match="different examples"):
        average(members(outputs, np.zeros(1), "ab"))
