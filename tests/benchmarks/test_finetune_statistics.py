"""Simulated worlds: the tests keep their level, counting runs as units does not, and both are what `estimate` does."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom

from benchmarks import run
from benchmarks.finetune_statistics import (
    DIFFERENCE,
    FLIP,
    MEAN,
    NAIVE_MEAN,
    NAIVE_TEST,
    T_TEST,
    World,
    all_worlds,
    draw_scores,
    measure,
)
from finetune.stats.comparisons import compare, difference_of_cells
from finetune.stats.estimates import Array, estimate, mean_of_cells
from multicls.errors import UserError

WORLDS = 2000
SURE = 1e-9  # the seed is fixed; this is how unlikely the bounds below are to be crossed by chance


def at_most(percent: float) -> float:
    """Largest share of the worlds, in percent, that an event of this probability is sure not to exceed."""
    return float(100 * binom.isf(SURE, WORLDS, percent / 100) / WORLDS)


def runs_of(system: str, scores: Array) -> pd.DataFrame:
    """Runs of one world, from scores (P, D, S)."""
    rows = [(f"{system}{p}", d, s, float(score)) for (p, d, s), score in np.ndenumerate(scores)]
    return pd.DataFrame(rows, columns=["pretraining", "draw", "seed", "score"])


@pytest.mark.parametrize("world", all_worlds([1, 2, 4], [1, 3], 4, 2.0), ids=str)
def test_levels_and_coverage(world: World) -> None:
    found = measure(world, WORLDS)
    assert 100 - found[MEAN] <= at_most(7) and found[MEAN] <= 99
    assert 100 - found[DIFFERENCE] <= at_most(6) and found[DIFFERENCE] <= 99
    assert found[T_TEST] == pytest.approx(100 - found[DIFFERENCE])
    assert not found[FLIP] > at_most(5)
    power = [found[f"power at {points}, %"] for points in (1, 2, 4)]
    assert power == sorted(power) and power[0] >= found[T_TEST] - 0.5


@pytest.mark.parametrize("variance", [0.5, 1.0, 2.0])
def test_runs_are_not_units(variance: float) -> None:
    found = measure(World(False, 4, 1, variance, 0.25), WORLDS)
    assert found[NAIVE_TEST] > 2 * at_most(5) and found[NAIVE_MEAN] < 85


@pytest.mark.parametrize("shape", [(4, 1), (1, 3), (2, 3), (4, 3)])
@pytest.mark.parametrize("paired", [True, False])
def test_what_is_simulated_is_what_runs(shape: tuple[int, int], paired: bool) -> None:
    models, draws = shape
    scores = draw_scores(World(paired, models, draws, 1.0, 0.25), 5)
    a, b = scores.a.mean(axis=-1), scores.b.mean(axis=-1)
    means = mean_of_cells(a)
    differences = mean_of_cells(a - b) if paired or models == 1 else difference_of_cells(a, b)
    for world in range(5):
        first, second = runs_of("m", scores.a[world]), runs_of("m" if paired else "n", scores.b[world])
        one, two = estimate(first), compare(first, second)
        low, high = (end[world] for end in means.interval)
        assert (one.mean, one.low, one.high) == pytest.approx((means.mean[world], low, high))
        assert one.df == pytest.approx(means.df[world])
        low, high = (end[world] for end in differences.interval)
        assert (two.difference, two.low, two.high) == pytest.approx((differences.mean[world], low, high))
        assert two.p == pytest.approx(differences.p_value()[world])


def test_targets_are_what_the_worlds_share() -> None:
    """The true mean holds the effect of the draw if there is one, and of the pretraining if there is one."""
    one_draw, one_model, both = (draw_scores(World(True, p, d, 1.0, 0.25), 500) for p, d in ((4, 1), (1, 3), (4, 3)))
    assert one_draw.mean.std() > 1 and one_model.mean.std() > 1
    assert not both.mean.any() and not both.difference.any()
    assert all(abs((one.a.mean(axis=(1, 2, 3)) - one.mean).mean()) < 0.5 for one in (one_draw, one_model, both))


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("benchmarks.compare.Report.write", lambda self: None)
    run.main(["finetune_statistics", "--worlds", "50", "--pretrainings", "2", "--draws", "1"])
    told = capsys.readouterr().out
    assert "| 2 | 1 | 0.5 |" in told and "naive" in told and "Beyond the bars" in told
    with pytest.raises(UserError, match="nothing to simulate"):
        run.main(["finetune_statistics", "--worlds", "50", "--pretrainings", "1", "--draws", "1"])
