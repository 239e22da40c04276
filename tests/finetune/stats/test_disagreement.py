"""Disagreement of facets and of runs, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from finetune.data.examples import LabeledExample
from finetune.stats.disagreement import (
    compare_disagreement,
    compare_with_runs,
    disagreement,
    facet_logits,
    most_uncertain,
)
from finetune.store.results import Store
from multicls.errors import UserError
from tests.finetune.fake_results import fake_run


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
    store, facet_run = Store(tmp_path), fake_run(tmp_path, task, "multicls", seed=9, train_from_dev=True)
    for seed in (1, 2, 3):
        fake_run(tmp_path, task, seed=seed, data_seed=2, train_from_dev=True)
        fake_run(tmp_path, task, seed=seed)
    chosen = [fake_run(tmp_path, task, seed=seed, train_from_dev=True) for seed in (1, 2, 3)]
    predictions = [store.predictions(run["run_id"]) for run in chosen]
    members = np.stack([saved["logits"] if task == "rte" else saved["scores"][:, None] for saved in predictions])
    labels = predictions[0]["labels"]
    # Ten more rows than the runs have, in another order: the runs' own outputs as facets are then found to agree.
    rows = np.random.default_rng(0).permutation(70)
    examples = [LabeledExample(f"row{row}", ("a", "b"), labels[row] if row < 60 else 0.0) for row in rows]
    facets = np.concatenate([members, np.ones((3, 10, members.shape[2]))], axis=1)[:, rows]
    (found,) = compare_with_runs(store, facet_run, task, "cls", examples, facets).values()
    assert found == {"members": 3, "rows": 60, "overlap": 1.0, "chance": 0.2, "spearman": pytest.approx(1.0)}
    with pytest.raises(UserError, match="--ensemble clss: .*'cls'"):
        compare_with_runs(store, facet_run, task, "clss", examples, facets)
    with pytest.raises(UserError, match="no two runs"):
        compare_with_runs(store, facet_run, task, "multicls", examples, facets)
    other = [replace(example, label=example.label + 1) for example in examples]
    with pytest.raises(UserError, match="other rows"):
        compare_with_runs(store, facet_run, task, "cls", other, facets)
