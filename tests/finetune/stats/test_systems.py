"""Groups, the chosen learning rate, averages that tell when they are incomplete, paired tests."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import wilcoxon

from finetune.data.metrics import METRICS
from finetune.stats.systems import (
    BENCHMARKS,
    FROM_COUNTS,
    SelectedSystem,
    benchmark_average,
    bootstrap_test,
    choose_learning_rates,
    group_runs,
    pair_up,
    scorer,
    sign_flip_test,
    summary,
)
from finetune.store.results import read_predictions, read_results
from multicls.errors import UserError
from tests.finetune.fake_results import fake_run


def choices(folder: Path, planned: Any = ()) -> list[SelectedSystem]:
    return choose_learning_rates(group_runs(read_results(folder)), planned)


def test_summary_by_hand() -> None:
    assert summary([50.0, 60.0, 100.0]) == pytest.approx((70.0, np.sqrt(700 / 3), 60.0))
    assert math.isnan(summary([50.0])[1])


def test_seeds_draws_and_pretrainings_are_averaged_and_nothing_else(tmp_path: Path) -> None:
    for pretraining in (1, 2):
        for draw in (1, 2):
            for seed in (1, 2):
                fake_run(tmp_path, seed=seed, data_seed=draw, data=f"data{draw}", model_name="k5",
                         pretraining_seed=pretraining, fingerprint=f"model{pretraining}")  # fmt: skip
    fake_run(tmp_path, seed=1, data_seed=1, data="data1", model_name="other", fingerprint="model3")
    fake_run(tmp_path, seed=1, data_seed=1, data="data1", model_name="k5", pretraining_seed=1, fingerprint="model1",
             label_noise=0.2)  # fmt: skip
    assert sorted(len(group.runs) for group in group_runs(read_results(tmp_path))) == [1, 1, 8]


def test_systems_differ_in_settings_not_in_what_follows_from_them(tmp_path: Path) -> None:
    fake_run(tmp_path)
    fake_run(tmp_path, head="isobn", options={"beta": 0.5}, pooling="multicls")
    fake_run(tmp_path, holdout=True, train={"learning_rate": 2e-5, "epochs": 20, "max_steps": 400})  # fewer rows
    for task, other in (("sst5", "quora"), ("quora", "sst5")):
        fake_run(tmp_path, task, "cln", joint=[other], train={"learning_rate": 2e-5, "epochs": 20, "max_steps": 900})
    fake_run(tmp_path, "sst5", "cln")
    systems = [choice.system[0] + " " + " ".join(choice.system[2:]) for choice in choices(tmp_path)]
    joint = "cln of quora,sst5 dev"
    assert systems == ["cls dev", "cls holdout", "isobn/multicls dev", "cln dev", joint, joint]
    fake_run(tmp_path, head="isobn", options={"beta": 1.0}, pooling="multicls")
    systems = [" ".join(choice.system[3:]) for choice in choices(tmp_path)]
    assert [text for text in systems if text] == ["isobn.beta 0.5", "isobn.beta 1.0"]


@pytest.mark.parametrize("part", ["fingerprint", "data"])
def test_one_seed_of_two_models_or_data_sets_is_kept_apart(tmp_path: Path, part: str) -> None:
    for print_ in ("a" * 16, "b" * 16):
        changes: dict[str, Any] = {part: print_}
        fake_run(tmp_path, model_name="k5", **changes)
    assert [len(group.runs) for group in group_runs(read_results(tmp_path))] == [1, 1]


def test_best_mean_chooses_the_learning_rate_and_incomplete_ones_are_told(tmp_path: Path) -> None:
    for rate, scores in ((1e-5, (0.5, 0.6)), (2e-5, (0.7, 0.6)), (3e-5, (0.9,))):
        for seed, score in enumerate(scores, start=1):
            fake_run(tmp_path, seed=seed, learning_rate=rate, score=score)
    (choice,) = choices(tmp_path)
    assert choice.chosen.key["learning_rate"] == 2e-5 and choice.expected == 2
    assert choice.problems == ["lr 3e-05 incomplete: 1 of 2 runs"]
    assert choice.candidates[1e-5] == (2, pytest.approx(55))


def test_held_out_rows_choose_the_learning_rate(tmp_path: Path) -> None:
    for rate, held_out, dev in ((1e-5, 0.8, 0.5), (2e-5, 0.6, 0.9)):
        fake_run(tmp_path, holdout=True, learning_rate=rate, score=dev, holdout_scores={"acc": held_out})
    (choice,) = choices(tmp_path)
    assert choice.chosen.key["learning_rate"] == 1e-5 and choice.chosen.scores.tolist() == [50]
    assert choice.candidates == {1e-5: (1, pytest.approx(80)), 2e-5: (1, pytest.approx(60))}


def test_planned_cells_are_missed(tmp_path: Path) -> None:
    fake_run(tmp_path, model_name="k5")
    place = {"task": "rte", "train_size": 100, "head": "cls", "model_name": "k5", "selection": "dev",
             "pretraining_seed": None, "data_seed": 1, "learning_rate": 2e-5}  # fmt: skip
    cells = [place | {"seed": seed} for seed in (1, 2)] + [place | {"seed": 1, "learning_rate": 5e-5}]
    (choice,) = choices(tmp_path, cells)
    assert choice.problems == ["lr 2e-05 incomplete: 1 of 2 runs", "lr 5e-05 incomplete: 0 of 2 runs"]
    (elsewhere,) = choices(tmp_path, [cell | {"task": "mrpc"} for cell in cells])
    assert not elsewhere.problems


def test_benchmark_averages(tmp_path: Path) -> None:
    tasks = BENCHMARKS["GLUE, paper's 8"]
    assert len(tasks) == 8 and "wnli" not in tasks and len(BENCHMARKS["GLUE, official 9"]) == 9
    assert len(BENCHMARKS["SuperGLUE, paper's 7"]) == 7 and len(BENCHMARKS["SuperGLUE, official 8"]) == 8
    for number, task in enumerate(list(tasks)[:-1]):
        for seed in (1, 2):
            fake_run(tmp_path, task, seed=seed, score=0.1 * number + 0.02 * seed)
    assert str(benchmark_average(choices(tmp_path), "GLUE, paper's 8")) == "incomplete: 7 of 8 tasks"
    fake_run(tmp_path, "rte", seed=1, score=0.72)
    average = benchmark_average(choices(tmp_path), "GLUE, paper's 8")
    assert math.isnan(average.error), "tasks with different seeds have no average of each seed"
    fake_run(tmp_path, "rte", seed=2, score=0.74)
    average = benchmark_average(choices(tmp_path), "GLUE, paper's 8")
    assert (average.value, average.error) == pytest.approx((38.0, 1.0))  # seeds: 37 and 39
    assert str(average) == "38.00 ± 1.00"


def test_official_average_takes_two_metrics(tmp_path: Path) -> None:
    for task in BENCHMARKS["GLUE, official 9"]:
        run = fake_run(tmp_path, task)
        if task == "mrpc":
            mrpc = 100 * (run["scores"]["acc"] + run["scores"]["f1"]) / 2
    official = benchmark_average(choices(tmp_path), "GLUE, official 9")
    assert official.missing == ["mnli"], "it has no matched and mismatched part here"
    assert mrpc != 100 * run["score"]


def test_sign_flips_are_exact(tmp_path: Path) -> None:
    assert sign_flip_test([3.0, 2, 5, 1], [2.0, 1, 1, 0]).p == pytest.approx(2 / 16)
    assert sign_flip_test([3.0], [2.0]).p == 1, "one pair shows nothing"
    assert sign_flip_test([1.0, 2, 3], [1.0, 2, 3]).p == 1
    a, b = np.arange(10.0), np.arange(10.0) - np.array([-1, -2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert sign_flip_test(list(a), list(b)).p == pytest.approx(wilcoxon(a, b, method="exact").pvalue)  # ranks = values


def test_bootstrap_over_examples(tmp_path: Path) -> None:
    better = [fake_run(tmp_path, head="multicls", seed=seed, skill=1.5, rows=100) for seed in (1, 2)]
    worse = [fake_run(tmp_path, head="cls", seed=seed, skill=0.5, rows=100) for seed in (1, 2)]
    test = bootstrap_test(tmp_path, [([a], [b]) for a, b in zip(better, worse, strict=True)])
    means = [np.mean([run["score"] for run in runs]) for runs in (better, worse)]
    assert test.difference == pytest.approx(100 * (means[0] - means[1])) and test.pairs == 100
    assert 0 < test.low < test.difference < test.high and test.p == pytest.approx(2 / 1001)
    same = bootstrap_test(tmp_path, [([run], [run]) for run in worse], resamples=99)
    assert (same.difference, same.low, same.high, same.p) == (0, 0, 0, 1)
    short = fake_run(tmp_path, head="cls", seed=3, rows=50)
    with pytest.raises(UserError, match="different examples"):
        bootstrap_test(tmp_path, [([better[0]], [short])])


@pytest.mark.parametrize("task", ["cb", "cola", "mrpc", "stsb", "multirc"])
def test_quick_scores_are_the_metrics(tmp_path: Path, task: str) -> None:
    run = fake_run(tmp_path, task, skill=0.3)
    rows = np.arange(run["dev_rows"])
    score = scorer(run, read_predictions(tmp_path, run["run_id"]))
    assert score(rows, rows // 3) == pytest.approx(run["score"])


@pytest.mark.parametrize("name", sorted(FROM_COUNTS))
def test_metrics_of_counts(name: str) -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        labels, predictions = draw.integers(0, 2, (2, draw.integers(2, 6)))
        labels[:2] = 0, 1
        counts = np.bincount(2 * labels + predictions, minlength=4).reshape(2, 2).astype(float)
        assert FROM_COUNTS[name](counts) == pytest.approx(METRICS[name](labels, predictions))


def test_pairs_have_the_same_seeds(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        fake_run(tmp_path, head="cls", seed=seed, model_name="bert")
        for pretraining in (1, 2):
            if seed < 3:
                fake_run(tmp_path, head="multicls", seed=seed, model_name="k5", pretraining_seed=pretraining,
                         fingerprint=f"model{pretraining}")  # fmt: skip
    a, b = group_runs(read_results(tmp_path))
    assert [(len(first), len(second)) for first, second in pair_up(a, b)] == [(1, 2), (1, 2)]
    fake_run(tmp_path, head="hire", seed=9)
    (other,) = [group for group in group_runs(read_results(tmp_path)) if group.key["head"] == "hire"]
    with pytest.raises(UserError, match="share no seed"):
        pair_up(a, other)
