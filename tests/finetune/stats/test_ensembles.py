"""Ensembles average saved predictions, of disjoint sets of runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit, softmax

from finetune.data.metrics import METRICS
from finetune.stats.ensembles import average_predictions, ensemble, member_sets
from finetune.store.results import Store
from multicls.errors import UserError
from tests.finetune.fake_results import fake_run


def test_probabilities_are_averaged(tmp_path: Path) -> None:
    store, runs = Store(tmp_path), [fake_run(tmp_path, seed=seed, skill=0.5, holdout=True) for seed in (1, 2, 3)]
    record, members = ensemble(store, runs, 1), [store.predictions(run["run_id"]) for run in runs]
    averaged = average_predictions(members)
    for name in ("logits", "holdout_logits"):
        mean = np.mean([softmax(member[name], axis=1) for member in members], axis=0)
        np.testing.assert_allclose(softmax(averaged[name], axis=1), mean)
    assert record["score"] == (averaged["logits"].argmax(axis=1) == averaged["labels"]).mean()
    held = (averaged["holdout_logits"].argmax(axis=1) == averaged["holdout_labels"]).mean()
    assert record["holdout_scores"]["acc"] == held and record["members"] == [run["run_id"] for run in runs]
    assert len(store.records()) == 3, "nothing is written"


def test_scores_of_a_regression_and_sigmoids_are_averaged(tmp_path: Path) -> None:
    store, runs = Store(tmp_path), [fake_run(tmp_path, "stsb", seed=seed) for seed in (1, 2)]
    members = [store.predictions(run["run_id"]) for run in runs]
    scores = np.mean([member["scores"] for member in members], axis=0)
    np.testing.assert_allclose(average_predictions(members)["scores"], scores)
    assert ensemble(store, runs, 1)["score"] == pytest.approx(METRICS["spearman"](members[0]["labels"], scores))
    several = [{"ids": np.arange(1), "labels": np.ones((1, 2)), "logits": np.array([[x, -x]])} for x in (1.0, 3.0)]
    expected = np.mean([expit(one["logits"]) for one in several], axis=0)
    np.testing.assert_allclose(expit(average_predictions(several)["logits"]), expected)


def test_rows_that_differ_are_left_out_or_refused(tmp_path: Path) -> None:
    store, first = Store(tmp_path), fake_run(tmp_path, holdout=True)
    one = store.predictions(first["run_id"])
    other = one | {"holdout_ids": one["holdout_ids"][::-1]}
    assert not any(name.startswith("holdout_") for name in average_predictions([one, other]))
    with pytest.raises(UserError, match="different examples"):
        ensemble(store, [first, fake_run(tmp_path, seed=2, rows=40)], 1)


def test_members_are_of_one_model_and_draw_and_in_one_set_only(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path, seed=seed) for seed in (3, 1, 2, 5, 4)]
    runs += [fake_run(tmp_path, seed=6, data_seed=2), fake_run(tmp_path, seed=7, fingerprint="f" * 16)]
    assert [[run["seed"] for run in members] for members in member_sets(runs, 2)] == [[1, 2], [3, 4]]
