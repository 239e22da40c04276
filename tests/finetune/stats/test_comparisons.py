"""Differences of systems: units, pairing, corrections, and the bootstrap over dev examples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from finetune.data.metrics import METRICS, score
from finetune.data.tasks import find_task
from finetune.stats.comparisons import (
    FROM_COUNTS,
    bootstrap_difference,
    bootstrap_score,
    compare,
    holm,
    scorer,
    sign_flip_p,
    units_of_rows,
)
from finetune.stats.estimates import Array
from multicls.errors import UserError


def runs(scores: Array, name: str = "m", first_seed: int = 0, first_draw: int = 0) -> pd.DataFrame:
    """Runs from scores (P, D, S)."""
    rows = [(f"{name}{p}", d + first_draw, s + first_seed, float(value)) for (p, d, s), value in np.ndenumerate(scores)]
    return pd.DataFrame(rows, columns=["pretraining", "draw", "seed", "score"])


def noise(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(60, 3, shape)


def test_same_pretrainings_are_paired_and_seeds_are_averaged() -> None:
    a, b = noise(4, 1, 4), noise(4, 1, 3, seed=1)
    found = compare(runs(a), runs(b))
    expected = stats.ttest_rel(a.mean(axis=(1, 2)), b.mean(axis=(1, 2)))
    interval = expected.confidence_interval()
    assert (found.p, found.low, found.high) == pytest.approx((expected.pvalue, interval.low, interval.high))
    assert found.difference == pytest.approx(a.mean() - b.mean())
    assert (found.units, found.df) == ("4 pretrainings at one draw, paired", 3)


def test_a_constant_difference_is_the_least_p_of_four_units() -> None:
    a = noise(4, 1, 4)
    found = compare(runs(a + 2), runs(a))
    assert (found.flip_p, found.flip_least) == (0.125, 0.125)
    assert found.low == pytest.approx(2) and found.high == pytest.approx(2)
    same = compare(runs(a), runs(a[..., ::-1]))
    assert (same.difference, same.p, same.flip_p) == (0, 1, 1)


def test_draws_and_seeds_of_one_pretraining() -> None:
    a, b = noise(1, 3, 2), noise(1, 3, 2, seed=1)
    found, expected = compare(runs(a), runs(b)), stats.ttest_rel(a.mean(axis=2)[0], b.mean(axis=2)[0])
    assert found.p == pytest.approx(expected.pvalue) and found.flip_least == 0.25
    assert found.units == "3 draws of one pretraining, paired"
    found, expected = compare(runs(a[:, :1]), runs(b[:, :1])), stats.ttest_rel(a[0, 0], b[0, 0])
    assert found.p == pytest.approx(expected.pvalue)
    assert found.units == "2 seeds of one pretraining and draw (seeds only), paired"


def test_seeds_that_differ_are_not_paired() -> None:
    a, b = noise(1, 1, 4), noise(1, 1, 3, seed=1)
    expected = stats.ttest_ind(a.ravel(), b.ravel(), equal_var=False)
    for other in (runs(b, first_seed=9), runs(b, name="other")):
        found = compare(runs(a), other)
        assert (found.p, found.df) == pytest.approx((expected.pvalue, expected.df))
        assert found.units == "4 and 3 seeds, one pretraining each, one draw (seeds only)"
        assert math.isnan(found.flip_p)


def test_unrelated_pretrainings_are_not_paired_by_number() -> None:
    a, b = noise(4, 1, 4), noise(3, 1, 4, seed=1)
    found = compare(runs(a, "a"), runs(b, "b"))
    expected = stats.ttest_ind(a.mean(axis=(1, 2)), b.mean(axis=(1, 2)), equal_var=False)
    interval = expected.confidence_interval()
    assert (found.p, found.df) == pytest.approx((expected.pvalue, expected.df))
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert math.isnan(found.flip_p) and math.isnan(found.flip_least)
    assert found.units == "4 and 3 pretrainings at one draw"


def test_draws_that_both_systems_share_cancel() -> None:
    a, b, draws = noise(4, 3, 1), noise(4, 3, 1, seed=1), 50 * noise(1, 3, 1, seed=2)
    with_draws, without = (compare(runs(a + d, "a"), runs(b + d, "b")) for d in (draws, 0 * draws))
    assert (with_draws.low, with_draws.high) == pytest.approx((without.low, without.high))
    assert with_draws.units == "4 and 4 pretrainings x 3 draws"
    one_each = compare(runs(a[:1] + draws, "a"), runs(b[:1] + draws, "b"))
    assert one_each.p == pytest.approx(stats.ttest_rel(a[0, :, 0], b[0, :, 0]).pvalue)
    assert one_each.flip_least == 0.25 and one_each.units == "3 draws, one pretraining each"


def test_unrelated_pretrainings_and_shared_draws_by_hand() -> None:
    models, draws = np.array([-2.0, 2])[:, None, None], np.array([-1.0, 0, 1])[None, :, None]
    interaction = np.array([[-1.0, 0, 1], [1, 0, -1]])[..., None]
    found = compare(runs(60 + 3 * models + interaction + draws, "a"), runs(50 + models + 0 * draws, "b"))
    # Parts of the variance: pretrainings 72 / 2 and 8 / 2, draws 1 / 3; interaction of A: 4 / 2 over 6 cells.
    variance = 36 + 4 + 1 / 3 - 2 / 6
    df = (36 + 4 + 1 / 3) ** 2 / (36**2 + 4**2 + (1 / 3) ** 2 / 2)
    half = stats.t.ppf(0.975, df) * math.sqrt(variance)
    assert (found.difference, found.df, found.low) == pytest.approx((10, df, 10 - half))


def test_a_draw_effect_on_one_system_widens_the_interval() -> None:
    a, b = noise(4, 3, 1), noise(4, 3, 1, seed=1)
    effect = np.array([-9.0, 0, 9])[None, :, None]
    plain, moved = compare(runs(a, "a"), runs(b, "b")), compare(runs(a + effect, "a"), runs(b, "b"))
    assert moved.high - moved.low > 2 * (plain.high - plain.low)


def test_one_unit_gives_no_test() -> None:
    found = compare(runs(noise(4, 2, 2), "a"), runs(noise(1, 2, 2), "b"))
    assert math.isnan(found.p) and math.isnan(found.low) and not math.isnan(found.difference)
    assert found.units.startswith("4 and 1 pretrainings x 2 draws; no test")
    for other in ("m", "n"):
        found = compare(runs(noise(1, 1, 1)), runs(noise(1, 1, 1, seed=1), other))
        assert math.isnan(found.p) and "no test" in found.units


def test_missing_cells_are_left_out_and_counted() -> None:
    a, b = runs(noise(4, 3, 2)), runs(noise(3, 3, 2, seed=1))
    found, whole = compare(a, b), compare(a[a["pretraining"] != "m3"], b)
    assert (found.difference, found.p) == pytest.approx((whole.difference, whole.p))
    assert math.isnan(found.flip_p), "flips of pretrainings would say nothing about other draws"
    assert found.units == "3 pretrainings x 3 draws, paired; 6 runs of incomplete pretrainings or draws left out"
    unrelated = compare(a, runs(noise(3, 2, 2), "b"))
    assert unrelated.units.startswith("4 and 3 pretrainings x 2 draws; 8 runs")


@pytest.mark.parametrize("name", ["m", "n"])
def test_nothing_shared(name: str) -> None:
    with pytest.raises(UserError, match=r"no draw of train rows \(A: 0, 1; B: 5, 6\).*data_seeds"):
        compare(runs(noise(2, 2, 1)), runs(noise(2, 2, 1), name, first_draw=5))


def test_sign_flips_are_exact() -> None:
    assert sign_flip_p(np.array([1.0, 1, 4, 1])) == pytest.approx(2 / 16)
    assert sign_flip_p(np.zeros(3)) == 1
    values = np.array([-1.0, -2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert sign_flip_p(values) == pytest.approx(stats.wilcoxon(values, method="exact").pvalue)  # ranks = values
    many = np.random.default_rng(0).normal(size=(3, 5))
    assert sign_flip_p(many) == pytest.approx([float(sign_flip_p(row)) for row in many])


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    corrected = holm([0.02, math.nan, 0.9, 0.01])
    assert corrected[0] == pytest.approx(0.04) and math.isnan(corrected[1]) and corrected[3] == pytest.approx(0.03)
    assert holm([0.9, 0.8]) == [1, 1] and holm([]) == []


def predictions(labels: Array, skill: float, seed: int = 0, **arrays: Any) -> dict[str, Array]:
    """Predictions of a classifier whose logits point to the label by `skill`."""
    logits = np.random.default_rng(seed).normal(size=(len(labels), 2)) + skill * np.eye(2)[labels]
    empty = np.full(len(labels), "")
    return {"ids": np.arange(len(labels)), "labels": labels, "logits": logits, "groups": empty} | arrays


LABELS = np.random.default_rng(0).integers(0, 2, 120)


def test_bootstrap_over_examples() -> None:
    task = find_task("rte")
    better, worse = ([predictions(LABELS, skill, seed) for seed in (1, 2)] for skill in (2.0, 0.5))
    found = bootstrap_difference(task, better, worse)
    means = [np.mean([(p["logits"].argmax(1) == LABELS).mean() for p in side]) for side in (better, worse)]
    assert 0 < found.low < 100 * (means[0] - means[1]) < found.high and found.p == pytest.approx(2 / 1001)
    same = bootstrap_difference(task, worse, worse)
    assert (same.low, same.high, same.p) == (0, 0, 1)
    short = predictions(LABELS[:50], 1.0)
    with pytest.raises(UserError, match="different examples"):
        bootstrap_difference(task, better, [short])
    with pytest.raises(UserError, match="two or more"):
        bootstrap_score(task, predictions(LABELS[:1], 1.0))


def test_error_of_one_run_is_that_of_a_share() -> None:
    found = predictions(LABELS, 0.7)
    share = (found["logits"].argmax(axis=1) == LABELS).mean()
    error = bootstrap_score(find_task("rte"), found)
    assert error == pytest.approx(100 * math.sqrt(share * (1 - share) / len(LABELS)), rel=0.1)


def test_rows_of_one_passage_are_drawn_together() -> None:
    """Ten copies of a row are one observation: the error must not shrink with the copies."""
    task, once = find_task("rte"), predictions(LABELS, 0.7)
    copies = {name: np.repeat(array, 10, axis=0) for name, array in once.items()}
    copies["ids"], passages = np.arange(1200), np.array([f"passage {row // 10}" for row in range(1200)])
    error = bootstrap_score(task, once)
    assert bootstrap_score(task, copies | {"passages": passages}) == pytest.approx(error)
    assert bootstrap_score(task, copies | {"groups": passages}) == pytest.approx(error)
    assert bootstrap_score(task, copies) < 0.5 * error


def test_units_of_rows() -> None:
    rows = predictions(LABELS[:5], 1.0, groups=np.array(["a", "b", "a", "", ""]))
    assert [unit.tolist() for unit in units_of_rows([rows], "t")] == [[0, 2], [1], [3], [4]]
    rows["passages"] = np.array(["x", "x", "x", "y", ""])
    assert [unit.tolist() for unit in units_of_rows([rows], "t")] == [[0, 1, 2], [3], [4]]


@pytest.mark.parametrize("name", ["rte", "cb", "cola", "mrpc", "stsb", "multirc", "record"])
def test_scores_of_rows_are_the_metrics(name: str) -> None:
    task, groups = find_task(name), np.array([f"{row // 4}" for row in range(120)])
    found = predictions(LABELS, 0.3, groups=groups)
    if name == "stsb":
        found |= {"labels": LABELS * 1.0, "scores": found.pop("logits")[:, 0]}
    outputs = found["logits"] if "logits" in found else found["scores"][:, None]
    expected = score(task, found["labels"], outputs, groups=groups.tolist())
    quick = scorer(task, found)
    assert quick(np.arange(120)) == pytest.approx(expected[task.metrics[0]])
    drawn = [np.flatnonzero(groups == group) for group in np.random.default_rng(5).integers(0, 30, 30).astype(str)]
    rows, copies = np.concatenate(drawn), [f"copy {number // 4}" for number in range(120)]
    expected = score(task, found["labels"][rows], outputs[rows], groups=copies, answers=[f"{row}" for row in rows])
    assert quick(rows) == pytest.approx(expected[task.metrics[0]]), "a question that is drawn twice counts twice"


@pytest.mark.parametrize("name", sorted(FROM_COUNTS))
def test_metrics_of_counts(name: str) -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        labels, guesses = draw.integers(0, 2, (2, draw.integers(2, 6)))
        labels[:2] = 0, 1
        counts = np.bincount(2 * labels + guesses, minlength=4).reshape(2, 2).astype(float)
        assert FROM_COUNTS[name](counts) == pytest.approx(METRICS[name](labels, guesses))
