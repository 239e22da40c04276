"""Means, errors and units of a system's runs, against formulas computed by hand and by other libraries."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from finetune.stats.estimates import cell_means, complete, estimate, mean_of_cells
from multicls.errors import UserError


def frame(scores: dict[tuple[str, int, int], float]) -> pd.DataFrame:
    """Runs from {(pretraining, draw, seed): score}."""
    columns = ["pretraining", "draw", "seed", "score"]
    return pd.DataFrame([(*place, score) for place, score in scores.items()], columns=columns)


def table(values: np.ndarray) -> pd.DataFrame:
    """Runs from an array (P, D, S)."""
    return frame({(f"m{p}", d, s): float(score) for (p, d, s), score in np.ndenumerate(values)})


def assert_student(values: np.ndarray, runs: pd.DataFrame) -> None:
    """Asserts that the estimate is Student's t over the values."""
    found, expected = estimate(runs), stats.ttest_1samp(values, 0.0)
    interval = expected.confidence_interval()
    assert (found.mean, found.error) == pytest.approx((np.mean(values), stats.sem(values)))
    assert (found.low, found.high, found.df) == pytest.approx((interval.low, interval.high, len(values) - 1))


def test_seeds_are_averaged_within_pretrainings_and_draws() -> None:
    scores = np.random.default_rng(0).normal(60, 3, (4, 3, 4))
    assert_student(scores[:, 0].mean(axis=-1), table(scores[:, :1]))
    assert estimate(table(scores[:, :1])).units == "4 pretrainings at one draw"
    assert_student(scores[0].mean(axis=-1), table(scores[:1]))
    assert estimate(table(scores[:1])).units == "3 draws of one pretraining"
    assert_student(scores[0, 0], table(scores[:1, :1]))
    assert estimate(table(scores[:1, :1])).units == "4 seeds of one pretraining and draw (seeds only)"
    assert estimate(table(scores)).units == "4 pretrainings x 3 draws"
    assert estimate(table(scores)).median == pytest.approx(np.median(scores))


def test_copies_of_a_run_add_nothing() -> None:
    """Seeds without any noise change neither the error nor the degrees of freedom."""
    cells = np.random.default_rng(1).normal(60, 3, (4, 1, 1))
    one, many = estimate(table(cells)), estimate(table(np.repeat(cells, 8, axis=-1)))
    assert (many.error, many.df) == pytest.approx((one.error, one.df))


def test_one_run_has_no_error() -> None:
    found = estimate(frame({("m", 1, 1): 61.0}))
    assert (found.mean, found.median, found.units) == (61, 61, "one run (no error)")
    assert all(math.isnan(value) for value in (found.error, found.low, found.high, found.df))


def test_crossed_pretrainings_and_draws_by_hand() -> None:
    models, draws = np.array([-3.0, 0, 3])[:, None], np.array([-1.0, 1])[None, :]
    found = estimate(table((60 + models + draws + np.zeros((3, 2)))[..., None]))
    # Without interaction the mean squares are 18 (df 2) and 6 (df 1); the variance of the mean is (18 + 6) / 6.
    assert (found.mean, found.error) == pytest.approx((60, 2))
    assert found.df == pytest.approx(min(24**2 / (18**2 / 2 + 6**2 / 1), 2))


def test_interaction_is_subtracted_once_and_never_shrinks_the_variance_below_a_part() -> None:
    cells = np.random.default_rng(2).normal(size=(1000, 4, 3))
    models, draws = cells.mean(-1).var(-1, ddof=1) / 4, cells.mean(-2).var(-1, ddof=1) / 3
    found = mean_of_cells(cells)
    assert (found.variance >= np.maximum(models, draws) - 1e-12).all()
    assert (found.variance <= models + draws + 1e-12).all()
    assert found.variance.mean() < (models + draws).mean()
    assert (found.df <= 4 + 1e-12).all()


def test_incomplete_tables() -> None:
    scores = np.random.default_rng(3).normal(60, 3, (4, 3, 2))
    runs = table(scores)
    lost = (runs["pretraining"] == "m3") & (runs["draw"] == 2)
    found, whole = estimate(runs[~lost]), estimate(table(scores[:3]))
    assert (found.mean, found.error, found.df) == pytest.approx((whole.mean, whole.error, whole.df))
    assert found.units == "3 pretrainings x 3 draws; 4 runs of incomplete pretrainings or draws left out"
    assert (found.runs, found.left_out) == (18, 4)
    assert found.median == pytest.approx(runs[~lost]["score"].median()), "the median is that of all runs"


@pytest.mark.parametrize(
    ("there", "shape"),
    [
        ([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 1]], (3, 3)),
        ([[1, 1], [1, 0]], (2, 1)),  # a tie: the draw goes
        ([[1, 1], [1, 0], [1, 0], [1, 0]], (4, 1)),
        ([[1, 1, 1], [1, 0, 0]], (1, 3)),
    ],
)
def test_the_complete_part_of_a_table(there: list[list[int]], shape: tuple[int, int]) -> None:
    cells = pd.DataFrame(np.where(np.array(there) == 1, 50.0, np.nan))
    assert complete(cells).shape == shape
    assert not complete(cells).isna().any(axis=None)


def test_cells_with_fewer_seeds_weigh_as_much() -> None:
    runs = frame({("a", 1, 1): 50.0, ("a", 1, 2): 60.0, ("a", 1, 3): 70.0, ("b", 1, 1): 80.0})
    assert estimate(runs).mean == pytest.approx(70)
    assert cell_means(runs)[1].to_dict() == {"a": 60, "b": 80}


def test_bad_frames() -> None:
    with pytest.raises(UserError, match="no runs"):
        estimate(frame({}))
    with pytest.raises(UserError, match="pretraining b, draw 1, seed 2: the score is nan"):
        estimate(frame({("a", 1, 1): 50.0, ("b", 1, 2): math.nan}))
