"""Ensembles from saved predictions are rows like any other; disagreement by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import softmax

from finetune.data.examples import LabeledExample
from finetune.data.metrics import spearman
from finetune.ensemble import main
from finetune.stats.ensembles import (
    compare_disagreement,
    compare_with_runs,
    disagreement,
    ensemble,
    facet_logits,
    most_uncertain,
)
from finetune.stats.systems import choose_learning_rates, group_runs
from finetune.store.results import read_predictions, read_results
from multicls.errors import UserError
from tests.finetune.fake_results import fake_run


def test_probabilities_are_averaged(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path, seed=seed, skill=0.5, holdout=True) for seed in (1, 2, 3)]
    record = ensemble(tmp_path, runs)
    members = [read_predictions(tmp_path, run["run_id"]) for run in runs]
    averaged = read_predictions(tmp_path, record["run_id"])
    for name in ("logits", "holdout_logits"):
        mean = np.mean([softmax(member[name], axis=1) for member in members], axis=0)
        np.testing.assert_allclose(softmax(averaged[name], axis=1), mean)
    assert record["score"] == (averaged["logits"].argmax(axis=1) == averaged["labels"]).mean()
    assert record["identity"]["ensemble"] == [run["run_id"] for run in runs]
    assert ensemble(tmp_path, runs) == record and len(read_results(tmp_path)) == 4, "the second time nothing is written"


def test_scores_of_a_regression_are_averaged(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path, "stsb", seed=seed) for seed in (1, 2)]
    record = ensemble(tmp_path, runs)
    scores = np.mean([read_predictions(tmp_path, run["run_id"])["scores"] for run in runs], axis=0)
    averaged = read_predictions(tmp_path, record["run_id"])
    np.testing.assert_allclose(averaged["scores"], scores)
    assert record["score"] == pytest.approx(spearman(averaged["labels"], scores))


def test_members_share_rows_and_learning_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(1, 6):
        fake_run(tmp_path, seed=seed, learning_rate=2e-5, score=0.5)
        fake_run(tmp_path, seed=seed, learning_rate=5e-5, score=0.7)
    fake_run(tmp_path, seed=6, data_seed=2, learning_rate=5e-5, score=0.7)
    fake_run(tmp_path, seed=6, data_seed=2, learning_rate=2e-5, score=0.5)
    assert main([str(tmp_path), "--size", "2"]) == 0
    made = [record for record in read_results(tmp_path) if record["identity"].get("ensemble")]
    assert len(made) == 2 and {record["identity"]["train"]["learning_rate"] for record in made} == {5e-5}
    members = [member for record in made for member in record["identity"]["ensemble"]]
    seeds = {record["run_id"]: record["identity"]["seed"] for record in read_results(tmp_path)}
    assert sorted(seeds[member] for member in members) == [1, 2, 3, 4], "no run is in two ensembles, none of draw 2"
    assert main([str(tmp_path), "--size", "2"]) == 0 and len(read_results(tmp_path)) == 14
    groups = choose_learning_rates(group_runs(read_results(tmp_path)))
    assert [choice.chosen.key["head"] for choice in groups] == ["cls", "cls x2"], "never averaged with single runs"


def test_mistakes_are_told(tmp_path: Path) -> None:
    first = fake_run(tmp_path)
    with pytest.raises(UserError, match="--task rt: no finished runs.*'rte'"):
        main([str(tmp_path), "--task", "rt"])
    with pytest.raises(UserError, match="has 5 seeds"):
        main([str(tmp_path)])
    with pytest.raises(UserError, match="at least 2"):
        main([str(tmp_path), "--size", "1"])
    with pytest.raises(UserError, match="different examples"):
        ensemble(tmp_path, [first, fake_run(tmp_path, seed=2, rows=40)])


def test_disagreement_by_hand() -> None:
    sure, torn = np.log([0.9, 0.1]), np.log([0.1, 0.9])
    logits = np.array([[sure, sure], [sure, torn]])  # two members, two examples
    # second example: each class is 0.9 and 0.1, so its variance is 0.4^2, for two classes
    np.testing.assert_allclose(disagreement(logits), [0, 0.32], atol=1e-12)
    assert most_uncertain(np.array([0.1, 0.5, 0.3, 0.5, 0.0])).tolist() == [1]


def test_facets_against_members() -> None:
    draw = np.random.default_rng(0)
    members = draw.normal(size=(4, 200, 2))
    assert compare_disagreement(members, members) == {"overlap": 1.0, "chance": 0.2, "spearman": pytest.approx(1.0)}
    unrelated = compare_disagreement(draw.normal(size=(5, 200, 2)), members)
    assert unrelated["overlap"] < 0.45 and abs(unrelated["spearman"]) < 0.3


def test_disagreement_of_scores() -> None:
    np.testing.assert_allclose(disagreement(np.array([[[1.0], [2.0]], [[1.0], [4.0]]])), [0, 1])


def test_facet_logits_average_to_the_models() -> None:
    draw = np.random.default_rng(0)
    contributions, weight, bias = draw.normal(size=(5, 7, 4)), draw.normal(size=(3, 4)), draw.normal(size=3)
    logits = contributions.sum(axis=0) @ weight.T + bias
    facets = facet_logits(contributions, weight, logits)
    np.testing.assert_allclose(facets.mean(axis=0), logits)
    np.testing.assert_allclose(facets[2], 5 * contributions[2] @ weight.T + bias)


@pytest.mark.parametrize("task", ["rte", "stsb"])
def test_facets_are_compared_with_runs_on_the_same_rows(task: str, tmp_path: Path) -> None:
    facet_run = fake_run(tmp_path, task, "multicls", seed=9, train_from_dev=True)
    for seed in (1, 2, 3):
        fake_run(tmp_path, task, seed=seed, learning_rate=2e-5, score=0.5, train_from_dev=True)
        fake_run(tmp_path, task, seed=seed, learning_rate=5e-5, score=0.7, train_from_dev=True)
        fake_run(tmp_path, task, seed=seed, data_seed=2, learning_rate=5e-5, score=0.7, train_from_dev=True)
    chosen = [run for run in read_results(tmp_path) if run["score"] == 0.7 and run["identity"]["data_seed"] == 1]
    predictions = [read_predictions(tmp_path, run["run_id"]) for run in chosen]
    members = np.stack([saved["logits"] if task == "rte" else saved["scores"][:, None] for saved in predictions])
    labels = predictions[0]["labels"]
    # Ten more rows than the runs have, in another order: the runs' own outputs as facets are then found to agree.
    rows = np.random.default_rng(0).permutation(70)
    examples = [LabeledExample(f"row{row}", ("a", "b"), labels[row] if row < 60 else 0.0) for row in rows]
    facets = np.concatenate([members, np.ones((3, 10, members.shape[2]))], axis=1)[:, rows]
    (found,) = compare_with_runs(tmp_path, facet_run, task, "cls", examples, facets).values()
    assert found == {"members": 3, "rows": 60, "overlap": 1.0, "chance": 0.2, "spearman": pytest.approx(1.0)}
    with pytest.raises(UserError, match="--ensemble clss: .*'cls'"):
        compare_with_runs(tmp_path, facet_run, task, "clss", examples, facets)
    with pytest.raises(UserError, match="no two runs"):
        compare_with_runs(tmp_path, facet_run, task, "multicls", examples, facets)
    other = [replace(example, label=example.label + 1) for example in examples]
    with pytest.raises(UserError, match="other rows"):
        compare_with_runs(tmp_path, facet_run, task, "cls", other, facets)
