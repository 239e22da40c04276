"""Estimates and tests: coverage in simulated experiments, nested replicates, Holm, intervals of one run."""

import math
import os
from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from finetune.estimates import (
    Estimate,
    averages,
    choose_candidates,
    compare,
    example_interval,
    holm,
    row_effects,
    shared_variance,
    summarise,
)
from finetune.metrics import _record, score_predictions
from finetune.tasks import TASKS, Example, example_arrays


@cache
def design(p: int, d: int, s: int) -> pd.DataFrame:
    """The runs of an experiment: p checkpoints with d training subsets each, s seeds."""
    runs = pd.DataFrame(np.ndindex(p, d, s), columns=["pretraining", "subset", "seed"])
    runs["weights_sha256"] = runs["pretraining"] = runs["pretraining"] + 1
    runs["subset"] += d * runs["pretraining"]
    return runs


def experiment(
    draw: np.random.Generator, mean: float = 0.0, p: int = 4, d: int = 2, s: int = 3
) -> pd.DataFrame:
    """Invented runs: effects of checkpoints, of training subsets and of seeds, each with a spread of 1."""
    checkpoints, subsets = draw.normal(size=(p, 1, 1)), draw.normal(size=(p, d, 1))
    scores = mean + checkpoints + subsets + draw.normal(size=(p, d, s))
    return design(p, d, s).assign(score=scores.ravel())


def coverage(experiments: int, seeds_as_units: bool = False) -> pd.Series:
    """Returns shares of simulated experiments: the mean covered, the difference covered, a difference wrongly found."""
    draw, found = np.random.default_rng(0), []
    for _ in range(experiments):
        runs = [experiment(draw, mean) for mean in (1.0, 0.0, 0.0)]
        if seeds_as_units:  # the control: as if all runs were independent
            units = range(len(runs[0]))
            independent = {"pretraining": units, "subset": units, "weights_sha256": units}
            runs = [frame.assign(**independent) for frame in runs]
        a, b, same = map(summarise, runs)
        covered = [low <= 1.0 <= high for low, high in (a.interval(), compare(a, b).interval())]
        found.append((*covered, compare(b, same).p < 0.05))
    return pd.DataFrame(found, columns=["mean", "difference", "false"]).mean()


@pytest.mark.slow
def test_coverage_and_a_control_that_must_fail() -> None:
    shares = coverage(2000)
    assert shares[["mean", "difference"]].between(0.93, 0.975).all(), shares
    assert shares["false"] <= 0.06, shares
    wrong = coverage(200, seeds_as_units=True)
    assert (wrong[["mean", "difference"]] < 0.9).all() and wrong["false"] > 0.1, wrong


RTE = TASKS["rte"]
LEVELS = (0.7, 0.2, 0.2)  # of three systems, in standard deviations of the parts below


def drawn_rows(draw: np.random.Generator, rows: int, subsets: int = 4) -> list[pd.DataFrame]:
    """Invented runs of three systems on dev rows of their own: each row is right where a sum of effects is positive.

    The effects are of rows (shared by all, and by a system's runs), of subsets, of subsets for a system, and of a row
    in a run; their variances are 1, 1/4, 0.01, 0.01 and 1.
    """
    of_row, of_subset = draw.normal(size=rows), 0.1 * draw.normal(size=subsets)
    systems = []
    for level in LEVELS:
        base = level + of_row + 0.5 * draw.normal(size=rows)
        runs = []
        for subset in range(subsets):
            noise = 0.1 * draw.normal() + draw.normal(size=rows)
            right = base + of_subset[subset] + noise > 0
            arrays = {"labels": np.ones(rows), "logits": np.eye(2)[right.astype(int)]}
            arrays |= {"passages": np.full(rows, ""), "ids": np.arange(rows).astype(str)}
            runs.append((1, subset, 1, "a", right.mean(), row_effects(RTE, arrays)))
        columns = ["pretraining", "subset", "seed", "weights_sha256", "score", "effects"]
        systems.append(pd.DataFrame(runs, columns=columns))
    return systems


@pytest.mark.slow
def test_coverage_where_each_experiment_draws_its_dev_rows() -> None:
    """Intervals of the replicates alone fail: they hold for these rows only."""
    spread = math.sqrt(1 + 0.25 + 0.01 + 0.01 + 1)
    truth = [float(stats.norm.cdf(level / spread)) for level in LEVELS]
    experiments = int(os.environ.get("MULTICLS_EXPERIMENTS", "300"))  # 2,000 on the page
    draw, found = np.random.default_rng(0), []
    for _ in range(experiments):
        runs = drawn_rows(draw, 100)
        a, b, same = map(summarise, runs)
        alone = summarise(runs[0].drop(columns="effects"))
        checks: dict[str, Any] = {"mean": (a, truth[0]), "control": (alone, truth[0])}
        checks["difference"] = compare(a, b), truth[0] - truth[1]
        covered = {n: u.interval()[0] <= true <= u.interval()[1] for n, (u, true) in checks.items()}
        found.append(covered | {"false": compare(b, same).p < 0.05})
    shares = pd.DataFrame(found).mean()
    print(shares)
    assert shares[["mean", "difference"]].between(0.925, 0.98).all(), shares
    assert shares["false"] <= 0.065 and shares["control"] < 0.9, shares


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((4, 2, 3), "pretraining"), ((1, 3, 2), "subset"), ((1, 1, 5), "seed"), ((1, 1, 1), "seed")],
)
def test_replicates_are_the_outermost_repetitions(shape: tuple[int, int, int], kind: str) -> None:
    runs = experiment(np.random.default_rng(1), 0.0, *shape)
    estimate = summarise(runs)
    means = runs.groupby(kind)["score"].mean()
    assert (estimate.kind, list(estimate.units)) == (kind, list(means))
    assert estimate.mean == pytest.approx(means.mean())
    interval = estimate.interval()
    if len(means) > 1:
        assert interval == pytest.approx(stats.ttest_1samp(means, 0).confidence_interval())
    else:
        assert np.isnan([estimate.error, *interval]).all()


def units(runs: pd.DataFrame, **columns: Any) -> Estimate:
    return summarise(runs.assign(**columns))


def test_systems_are_paired_by_replicates_with_their_own_subsets() -> None:
    draw = np.random.default_rng(2)
    a = experiment(draw)
    b = a.assign(score=a["score"] + 1 + 0.1 * draw.normal(size=len(a)))
    paired = compare(units(b), units(a))
    assert paired.paired and paired.p < 0.001 and paired.detectable < 0.5
    shared = compare(units(b, subset=1, weights_sha256="b"), units(a, subset=1))
    assert not shared.paired and shared.p > 0.05 and shared.detectable > 1
    heads = compare(units(b, subset=1), units(a, subset=1))
    assert heads.paired and heads.p < 0.001, "two heads on the same checkpoints, with one subset"
    numbered = a.assign(weights_sha256="same")  # one checkpoint beside several
    assert summarise(numbered).kind == "subset" and compare(units(numbered), units(b)).paired
    first = a[a["pretraining"] == 1]
    other = units(first, subset=first["subset"] % 2 + 1, weights_sha256="b")
    assert not compare(other, units(b)).paired
    alone = units(first, subset=1, seed=1)
    for other in (units(b), alone):  # one replicate, or no spread: no test
        assert np.isnan([compare(alone, other).p, compare(alone, other).detectable]).all()
    one, other = summarise(a.assign(score=1.0)), units(a, score=0.9)  # not 100 to 100
    assert one.error == 0 and np.isnan([*one.interval(), compare(one, other).p]).all()
    assert compare(one, other).mean == pytest.approx(0.1)


def test_the_smallest_detectable_difference_is_found_in_80_percent_of_cases() -> None:
    """By the noncentral t distribution; corrected intervals are wider, and p is where an interval ends at 0."""
    scores = stats.zscore(np.random.default_rng(0).normal(size=10), ddof=1)
    runs = pd.DataFrame({"score": scores, "subset": range(10)})
    runs = runs.assign(pretraining=1, seed=1, weights_sha256="a")
    test = compare(units(runs, score=runs["score"] + 0.5), units(runs, score=0.0))
    power = stats.nct.sf(stats.t.ppf(0.975, 9), 9, test.detectable * np.sqrt(10))
    assert power == pytest.approx(0.8, abs=0.01)
    assert test.p == pytest.approx(stats.ttest_1samp(scores + 0.5, 0).pvalue)
    assert test.interval() == pytest.approx(
        stats.ttest_1samp(scores + 0.5, 0).confidence_interval()
    )
    assert np.ptp(test.interval(10)) > 1.3 * np.ptp(test.interval())


def test_an_average_over_tasks_has_an_error_and_a_test() -> None:
    """The average of two tasks has a quarter of their summed variance; a system that lacks a task has no average."""
    draw = np.random.default_rng(3)
    a, b = (
        frame.assign(train_size="100", system=n)
        for n, frame in zip("ab", drawn_rows(draw, 99), strict=False)
    )
    both = [frame.assign(task=task) for frame in (a, b) for task in ("x", "y")]
    means = averages(pd.concat([*both, a.assign(task="x", system="lacks one", score=1.0)]))
    assert set(means["system"]) == {"a", "b"} and len(means) == 8
    one, average = summarise(a), summarise(means[means["system"] == "a"])
    assert average.mean == pytest.approx(one.mean) and average.error == pytest.approx(one.error)
    assert shared_variance(average.rows) == pytest.approx(shared_variance(one.rows) / 2)
    assert compare(average, summarise(means[means["system"] == "b"])).paired


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_monotone_and_never_below_the_single_test(p_values: list[float]) -> None:
    corrected = holm([*p_values, math.nan])
    assert math.isnan(corrected[-1])
    pairs = sorted(zip(p_values, corrected, strict=False))
    assert all(p <= c <= 1 for p, c in pairs)
    assert [c for _, c in pairs] == sorted(c for _, c in pairs)
    assert pairs[0][1] == pytest.approx(min(1.0, len(p_values) * pairs[0][0]))


def interval_of(task: str, right: Sequence[bool], passages: Sequence[str] | None = None) -> Any:
    """Returns the interval of a run whose answers are right or wrong as in `right`, on labels 0, 1, 0, ..."""
    labels = np.arange(len(right)) % 2
    outputs = np.eye(2)[np.where(right, labels, 1 - labels)]
    passages = passages or [""] * len(right)
    examples = [Example(f"{n}", ("a",), n % 2, passage=unit) for n, unit in enumerate(passages)]
    return example_interval(TASKS[task], example_arrays(examples, outputs))


def test_accuracy_of_one_run_has_wilsons_interval() -> None:
    """A perfect run on 60 rows is not certain: 94 to 100."""
    assert interval_of("rte", [True] * 60) == pytest.approx((0.93983, 1.0), abs=1e-5)
    assert interval_of("rte", [False] * 60) == pytest.approx((0.0, 0.06017), abs=1e-5)


@pytest.mark.parametrize("task", ["rte", "mrpc", "cb"])
def test_no_interval_has_no_width(task: str) -> None:
    """30 perfect rows: Wilson's interval, also of F1, and where a text stands twice; a constant has none."""
    twice = ["", *["same"] * 2, *[""] * 27]
    for passages in (None, twice):
        low, high = interval_of(task, [True] * 30, passages)
        assert 0.88 < low < 0.89 and high == 1.0
    constant = [row % 2 == 0 for row in range(30)]
    assert all(map(math.isnan, interval_of("cola", constant)))


def test_an_interval_of_record_is_quick_and_that_of_its_queries() -> None:
    """One jackknife of the queries' scores, instead of 1,000 times all rows."""
    draw = np.random.default_rng(0)
    rows = [
        Example(
            f"{n}",
            ("a",),
            float(n % 5 == 0),
            group=f"{n // 5}",
            answer=f"e{n}",
            passage=f"{n // 10}",
        )
        for n in range(2000)
    ]
    arrays = example_arrays(rows, draw.normal(size=(2000, 2)))
    with mock.patch("finetune.metrics._record", wraps=_record) as scored:
        low, high = example_interval(TASKS["record"], arrays)
    assert scored.call_count < 10
    score = score_predictions(TASKS["record"], arrays)["mean(record_f1,record_em)"]
    assert low < score < high and 0.05 < high - low < 0.2


def test_other_scores_have_a_jackknife_and_passages_stay_together() -> None:
    low, high = interval_of("cola", [row % 4 > 0 for row in range(200)])
    assert 0.3 < low < 0.5 < high < 0.7, "Matthews' correlation is 0.5"
    right = [row // 20 % 2 == 0 for row in range(200)]  # whole passages of 20 rows
    passages = [f"{row // 20}" for row in range(200)]
    rows, units = interval_of("qnli", right), interval_of("qnli", right, passages)
    assert units[1] - units[0] > 3 * (rows[1] - rows[0])
    assert all(map(math.isnan, interval_of("qnli", right, ["one"] * 200)))


def test_the_candidate_is_the_best_on_the_rows_that_pick() -> None:
    common = {"task": "rte", "train_size": "100", "head": "mean", "train_rows": 80}
    scores = {("a", 1e-5): (0.5, 0.6), ("a", 2e-5): (0.6, 0.7), ("a", 3e-5): (0.99,)}  # unfinished
    scores |= {("b", 2e-5): (0.8, 0.1)}
    rows = []
    for (system, rate), of_runs in scores.items():
        run = common | {"system": system, "search": {"train.learning_rate": rate}}
        rows += [run | {"selection_score": score, "score": 1 - score} for score in of_runs]
    runs = pd.DataFrame(rows)
    assert set(choose_candidates(runs)["candidate"]) == {"train.learning_rate 2e-05"}
