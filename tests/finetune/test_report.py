"""The report: its numbers, what it says in words, its warnings and its files."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest

from finetune.report import averages, build_report, choose_candidates, difference, main, make_groups
from finetune.results import load_results, read_predictions
from multicls.errors import UserError
from multicls.evaluation import Scores, compare
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


def test_the_numbers_are_those_of_the_projects_interval(results: Path) -> None:
    """The report compares each row's values, averaged over the seeds of a subset; pairs share subsets."""
    report = build_report(results)
    draws = dict[str, list[np.ndarray]]()
    for system in "ab":
        for subset in (1, 2, 3):
            runs = [results / system / "rte-100" / f"p1-d{subset}-s{seed}" for seed in (1, 2)]
            found = [read_predictions(run, "rte")["value"] for run in runs]
            draws.setdefault(system, []).append(np.mean(found, axis=0))
    none, units = np.zeros((0, 60)), np.arange(60)
    a, b = (Scores(none, np.array(draws[name]), units) for name in "ab")
    header, *rows = report.table
    name = "rte (acc, 60 dev rows)"
    assert header[2:] == ["system", "score (95 % interval)", "against first", "replicates"]
    assert rows[0] == [name, "100", "a", compare(a).score(), "", "3 training subsets"]
    assert rows[1][2:5] == ["b", compare(b).score(), str(compare(b, a))]
    assert rows[2][2] == "majority class" and rows[2][3].startswith("50.0 (")
    verdict = report.lines[0]
    assert verdict.startswith(
        f"rte, 100 rows: a {compare(a).score()} (acc, 60 dev rows). a against b: better, "
    )
    reference, other = build_report(results, systems=["b", "a"]).table[1:3]
    assert reference[2] == "b" and other[4] == str(compare(a, b)), "--compare sets the first"


def test_a_lone_system_like_the_majority_class_is_not_distinguishable(tmp_path: Path) -> None:
    fake_run(tmp_path, "guesses", skill=0.0)
    fake_run(tmp_path / "good", "good", skill=2.0)
    verdict = build_report(tmp_path).lines[0]
    assert verdict.endswith("Not distinguishable from guessing the majority class: guesses.")
    assert "guessing" not in build_report(tmp_path / "good").lines[0]


@pytest.mark.slow
def test_intervals_over_replicates_cover_the_truth() -> None:
    """Four training sets on 100 rows of their own experiment; equal systems are rarely told apart.

    A row is right where a sum of effects is positive: of the row, of row and system, of the training set, and a rest.
    """
    generator, covered, wrong = np.random.default_rng(0), [], []
    none, units = np.zeros((0, 100)), np.arange(100)
    truth = 0.553  # P(N(0.2, 1 + 0.25 + 0.01 + 0.01 + 1) > 0)
    for _ in range(400):
        row, training_set = generator.normal(size=100), 0.1 * generator.normal(size=(4, 1))
        systems = []
        for _ in "ab":
            base = 0.2 + row + 0.5 * generator.normal(size=100) + training_set
            rest = 0.1 * generator.normal(size=(4, 1)) + generator.normal(size=(4, 100))
            systems.append(Scores(none, (base + rest > 0).astype(float), units))
        one, change = compare(systems[0]), compare(*systems)
        covered.append(one.low <= truth <= one.high)
        wrong.append(change.is_shown)
        alone = [[Scores(none, of.draws[n : n + 1], units) for n in range(4)] for of in systems]
        wrong.append(compare(*alone).is_shown)
    assert np.mean(covered) > 0.92 and np.mean(wrong) < 0.07


def test_replicates_are_the_outermost_repetitions_and_pair(tmp_path: Path) -> None:
    for checkpoint in (1, 2, 3):
        for seed in (1, 2):
            for name, subset in (("own", checkpoint), ("shared", 1)):
                fake_run(tmp_path, name, pretraining=checkpoint, subset=subset, seed=seed)
    fake_run(tmp_path, "one", subset=7)
    runs = build_report(tmp_path).groups
    groups = {group.system: group for group in runs}
    assert groups["own"].replicates == "3 pretrained checkpoints"
    assert groups["one"].replicates == "1 seed"
    own, shared = groups["own"], groups["shared"]
    assert len(own.scores.draws) == 3 and own.keys[1] == ("2", (2,))
    change = difference(own, shared)  # neither subsets in common nor one subset per checkpoint
    assert change.mean == pytest.approx(own.scores.mean - shared.scores.mean)
    assert change.covers == "new training rows and new rows"
    assert compare(groups["one"].scores).covers == "new rows"


def test_an_average_is_of_all_tasks(tmp_path: Path) -> None:
    """Its variance is that of independent tasks: a quarter of the sum of theirs."""
    for system, task, skill in (("a", "rte", 0.5), ("a", "wnli", 0.8), ("b", "rte", 0.7)):
        fake_run(tmp_path, system, task=task, skill=skill)
    report = build_report(tmp_path)
    groups = {(group.task, group.system): group for group in report.groups}
    assert ("average", "b") not in groups
    parts = [compare(groups[task, "a"].scores) for task in ("rte", "wnli")]
    whole = compare(groups["average", "a"].scores)
    assert whole.mean == pytest.approx(np.mean([part.mean for part in parts]))
    widths = [part.high - part.mean for part in parts]
    assert whole.high - whole.mean == pytest.approx(np.linalg.norm(widths) / 2, rel=0.03)
    assert not any(g.task == "average" for g in build_report(tmp_path, ["wnli"]).groups)
    assert list(averages([])) == [] and make_groups([]) == []


def test_sizes_are_in_their_order(tmp_path: Path) -> None:
    for size in ("full", "20", "100", "5"):
        fake_run(tmp_path, "a", train_size=size if size == "full" else int(size))
    sizes = [group.size for group in build_report(tmp_path).groups]
    assert sizes == ["5", "20", "100", "full"]


def test_the_candidate_is_the_best_on_the_rows_that_pick() -> None:
    common = {"task": "rte", "train_size": "100"}
    scores = {("a", 1e-5): (0.5, 0.6), ("a", 2e-5): (0.6, 0.7), ("a", 3e-5): (0.99,)}  # unfinished
    scores |= {("b", 2e-5): (0.8, 0.1)}
    runs = [
        common | {"system": name, "search": {"train.learning_rate": rate}, "selection_score": score}
        for (name, rate), of_runs in scores.items()
        for score in of_runs
    ]
    assert {run["candidate"] for run in choose_candidates(runs)} == {"train.learning_rate 2e-05"}


def test_warnings(results: Path) -> None:
    fake_run(results, "a", subset=9, train__epochs=3, selection="holdout")
    for kind in ("failed", "incompatible"):
        fake_error(results, kind, kind)
    optimistic, settings_differ, unfinished = build_report(results).lines[1:4]
    assert optimistic.startswith("warning: rte: dev picked the checkpoint")
    assert settings_differ.endswith(
        "a on rte, 100 rows: its runs differ in selection, train.epochs."
    )
    assert unfinished.startswith("warning: runs not finished: 1,") and unfinished.endswith("broken")


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
    both = results / "both" / "rte+cb-100" / "p1-d1-s1"  # RTE beside CB, as head cln reads them
    shutil.copytree(results / "a" / "rte-100" / "p1-d1-s1", both)
    record = read_json(both / "record.json") | {"system": "both"}
    other = record["tasks"][0] | {"task": "cb"}
    hashes = record["data_sha256"] + "+0123"
    record |= {"tasks": [*record["tasks"], other], "data_sha256": hashes}
    write_json(both / "record.json", record)
    assert {group.system for group in build_report(results, ["rte"]).groups} >= {"a", "both"}
    lost.unlink()
    with pytest.raises(UserError, match=f"{lost} is missing"):
        build_report(results)
    fake_run(results, "other", rows=50)
    with pytest.raises(UserError, match="task rte: .* read different rows"):
        build_report(results)


def test_files(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in results.glob("b/*/*/record.json"):
        write_json(path, read_json(path) | {"system": "<b>x|y"})
    assert main([str(results)]) == 0
    assert "3 training subsets" in capsys.readouterr().out
    markdown = (results / "report.md").read_text()
    assert "majority class" in markdown
    assert "<b>x" not in markdown and "\\<b\\>x\\|y" in markdown, "names from outside are text"
    runs = list(csv.DictReader((results / "runs.csv").open()))
    assert len(runs) == 12 and {run["seed"] for run in runs} == {"1", "2"}
    stored = [entry["splits"]["dev"]["scores"]["acc"] for entry in load_results(results)]
    assert sorted(float(run["score"]) for run in runs) == sorted(stored)
