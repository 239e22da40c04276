"""The report: numbers in its tables, what it warns of, its commands and its files."""

from pathlib import Path

import numpy as np
import pytest
from scipy.special import softmax

from finetune.report import main
from finetune.report_tables import build_report
from finetune.results import load_predictions
from finetune.tasks import TASKS
from multicls.errors import UserError
from multicls.files import read_json, write_json
from tests.finetune.runs import fake_error, fake_run


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two systems on RTE, three subsets of two seeds each."""
    for subset in (1, 2, 3):
        for seed in (1, 2):
            fake_run(tmp_path, "a", skill=1.0, subset=subset, seed=seed)
            fake_run(tmp_path, "b", skill=0.2, subset=subset, seed=seed)
    return tmp_path


def test_tables_hold_the_numbers(results: Path) -> None:
    report = build_report(results)
    subsets = 100 * report.groups["runs"][0].groupby("subset")["score"].mean()
    expected = f"{subsets.mean():.2f} ± {subsets.std() / np.sqrt(3):.2f}"
    scores = report.tables["Scores"].set_index("system")["rte (acc, 60 dev rows)"]
    assert list(scores.index) == ["a", "b", "majority-class baseline"], "best first"
    assert list(scores[::2]) == [expected, "50.00"]
    row = report.tables["All results"].set_index("system").loc["a"]
    assert row["median"] == f"{100 * report.groups['runs'][0]['score'].median():.2f}"
    found = row[["replicates", "runs", "scores", "training rows"]]
    assert list(found) == ["3 training subsets", 6, f"acc {expected}", "100"]
    (line,) = report.tables["Comparisons"].to_dict("records")
    assert line["system"] == "a - b" and line["test"] == "paired, training subsets"
    assert float(line["difference"]) > 5 and float(line["detectable"]) > 1
    winner = "rte, 100 rows: a is first with "
    assert report.verdicts[0].startswith(winner) and "acc on 60 dev rows, " in report.verdicts[0]
    assert report.verdicts[0].endswith("points above b; that is more than chance.")


def test_the_baseline_of_a_group_is_the_mean_of_its_runs(results: Path) -> None:
    """The majority class of a subset may be another one."""
    for number, path in enumerate(sorted(results.glob("a/*/*/record.json"))):
        record = read_json(path)
        record["tasks"][0]["splits"]["dev"]["baselines"]["acc"] = 0.47 + 0.02 * number
        write_json(path, record)
    assert build_report(results).groups["baseline"][0] == pytest.approx(0.52)


def test_test_rows_give_the_numbers_where_there_are_some(tmp_path: Path) -> None:
    """Test decides where there is one, although `b` is ahead on the few dev rows; --split dev goes back."""
    for subset in (1, 2, 3):
        for system in "ab":
            fake_run(tmp_path, system, subset=subset, test=True, rows=20)
    for path in tmp_path.glob("*/*/*/record.json"):
        record, is_a = read_json(path), path.parts[-4] == "a"
        (entry,) = record["tasks"]
        entry["splits"]["dev"]["scores"]["acc"] = 0.2 if is_a else 0.9
        write_json(path, record)
    for split, order in ((None, "80 test rows"), ("dev", "20 dev rows")):
        report = build_report(tmp_path, split=split)
        assert f"rte (acc, {order})" in report.tables["Scores"]
        assert set(report.groups["evaluated"]) == {int(order.split()[0])}
    dev, test = build_report(tmp_path, split="dev"), build_report(tmp_path)
    assert dev.groups["system"][0] == "b" and dev.verdicts[0].startswith(
        "rte, 100 rows: b is first"
    )
    tests = [splits["test"]["scores"]["acc"] for splits in test.groups["runs"][0]["splits"]]
    assert test.groups["mean"][0] == pytest.approx(np.mean(tests))
    fake_run(tmp_path, "c")
    with pytest.raises(UserError, match="--split test: not all runs of rte have test rows"):
        build_report(tmp_path, split="test")


def test_errors_and_confusions_of_the_best_system(results: Path) -> None:
    report = build_report(results, errors=3)
    (errors,) = (table for name, table in report.tables.items() if name.startswith("Errors of a"))
    run = load_predictions(Path(report.groups["path"][0]), "rte")["dev"]
    probabilities = softmax(run["logits"].astype(float), axis=1)
    wrong = probabilities.argmax(axis=1) != run["labels"]
    most = np.sort(probabilities.max(axis=1)[wrong])[::-1][:3]
    np.testing.assert_allclose(errors["probability"], most, atol=1e-3)
    assert set(errors["label"]) <= set(TASKS["rte"].labels) and (errors["text"] == "a").all()
    assert errors["row"].str.startswith("train:").all() and len(errors) == 3
    (confusions,) = (table for name, table in report.tables.items() if name.startswith("Confu"))
    assert confusions["errors"].sum() == wrong.sum()
    (matrix,) = (table for name, table in report.tables.items() if name.startswith("Matrix"))
    counts = matrix.set_index(matrix.columns[0])
    assert list(counts.index) == list(counts.columns) == list(TASKS["rte"].labels)
    assert counts.to_numpy().sum() == len(wrong) and np.trace(counts) == (~wrong).sum()


def test_of_scores_the_farthest_are_listed(tmp_path: Path) -> None:
    fake_run(tmp_path, "a", task="stsb")
    report = build_report(tmp_path, errors=3)
    run = load_predictions(Path(report.groups["path"][0]), "stsb")["dev"]
    distances = np.abs(5 * run["logits"][:, 0].astype(float) - run["labels"])
    (errors,) = (table for name, table in report.tables.items() if name.startswith("Errors of a"))
    np.testing.assert_allclose(errors["off by"], np.sort(distances)[::-1][:3], atol=1e-3)
    assert not any(name.startswith(("Confu", "Matrix")) for name in report.tables)


def test_sizes_are_in_their_order(tmp_path: Path) -> None:
    for size in ("full", "20", "100", "5"):
        fake_run(tmp_path, "a", train_size=size if size == "full" else int(size))
    report = build_report(tmp_path)
    assert list(dict.fromkeys(report.tables["Scores"]["train size"])) == ["5", "20", "100", "full"]
    assert [line.split()[1] for line in report.verdicts] == ["5", "20", "100", "full"]


def test_runs_of_several_devices_and_versions_are_named(results: Path) -> None:
    path = next(results.glob("b/*/*/record.json"))
    record = read_json(path)
    versions = record["versions"] | {"torch": "2.4.0"}
    write_json(path, record | {"ranks": 2, "versions": versions})
    other = next(results.glob("a/*/*/record.json"))
    write_json(other, read_json(other) | {"ranks": 1})
    (warning,) = (line for line in build_report(results).warnings if "the runs differ in" in line)
    assert "ranks (1, 2), torch (" in warning.replace("1.0, 2.0", "1, 2") and "2.4.0" in warning
    assert any("optimistic" in line for line in build_report(results).warnings)


def test_averages_are_of_all_tasks_shown(tmp_path: Path) -> None:
    for system, task, skill in (("a", "rte", 0.5), ("a", "sst2", 0.8), ("b", "rte", 0.7)):
        fake_run(tmp_path, system, task=task, skill=skill)
    report = build_report(tmp_path)
    mean = report.groups.groupby("system")["score"].mean()["a"]
    scores = report.tables["Scores"].set_index("system")["average"]
    expected = {"majority-class baseline": "-", "a": f"{100 * mean:.2f}", "b": "-"}
    found = {name: text.partition(" ±")[0] for name, text in scores.items()}
    assert found == expected
    assert "average" not in build_report(tmp_path, ["sst2"]).tables["Scores"]


def test_holm_is_over_all_tests_shown(results: Path) -> None:
    (alone,) = build_report(results).tables["Comparisons"]["p, corrected"]
    for subset in (1, 2, 3):
        fake_run(results, "c", skill=0.9, subset=subset, selection="holdout")
    more = build_report(results)
    (chosen,) = build_report(results, systems=["a", "b"]).tables["Comparisons"]["p, corrected"]
    assert chosen == alone != more.tables["Comparisons"]["p, corrected"][0]
    rows = more.tables["All results"].set_index("system")["training rows"]
    assert rows["c"] == "80 + 20", "of a holdout"


def test_warnings(results: Path) -> None:
    fake_run(results, "a", subset=9, rows=50, train__epochs=3, selection="holdout")
    for kind in ("failed", "incompatible"):
        fake_error(results, kind, kind)
    different, optimistic, settings_differ, unfinished = build_report(results).warnings
    assert different.startswith("rte: the runs read different data")
    assert optimistic.startswith("rte: dev picked the checkpoint")
    assert settings_differ == "a on rte, 100 rows: its runs differ in selection, train.epochs."
    assert unfinished.startswith("runs not finished: 1,") and unfinished.endswith("broken")


def test_a_test_that_is_left_out_is_no_doubt(results: Path) -> None:
    for subset in (1, 2, 3):
        fake_run(results, "best", skill=3.0, subset=subset)
    (verdict,) = build_report(results, [], ["a", "b"]).verdicts
    assert verdict.endswith("above a; --compare left out their test.")


def test_mistakes_are_named(results: Path) -> None:
    fake_error(results / "f", "c", "failed")
    lost = results / "a" / "rte-100" / "p1-d2-s1" / "predictions.parquet"
    mistakes: dict[tuple[object, ...], str] = {
        ("nowhere",): "no such folder",
        (results, "--task", "cola"): "--task cola: no run of it",
        (results, "--compare", "a", "bb"): "--compare bb: no run of it",
        (results / "f",): "no finished run(.|\n)*not finished: 1.*broken",
    }
    for arguments, message in mistakes.items():
        with pytest.raises(UserError, match=message):
            main([*map(str, arguments)])
    lost.unlink()
    with pytest.raises(UserError, match=f"{lost} is missing"):
        build_report(results)


def test_files(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_run(results, "a", task="sst2")
    for record in results.glob("b/*/*/record.json"):
        record.write_text(record.read_text().replace('"system": "b"', '"system": "<b>x|y"'))
    assert main([str(results)]) == 0
    assert "paired, training subsets" in capsys.readouterr().out
    markdown = (results / "report.md").read_text()
    page = (results / "report.html").read_text()
    for text in ("Scores", "majority-class baseline", "Holm"):
        assert text in markdown and text in page
    assert "max-width: 700px" in page and 'data-label="difference"' in page, "a narrow screen"
    assert (results / "errors.csv").read_text().startswith("text,label,predicted,probability,row")
    assert page.count("data:image/svg+xml") == 1 and "<script" not in page and "http" not in page
    assert "<b>x" not in page and "\\<b\\>x\\|y" in markdown, "names from outside are text"
