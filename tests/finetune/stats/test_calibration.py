"""Calibration errors, Brier score, likelihood and temperature against numbers worked by hand, and their properties."""

from __future__ import annotations

import numpy as np
import pytest

from finetune.stats.calibration import (
    Array,
    brier_score,
    calibration,
    confidences,
    log_probabilities,
    negative_log_likelihood,
    pooled_temperature,
    reliability,
)


def logits_of(*confidences: float) -> Array:
    """Two-class logits that predict class 0 with these probabilities."""
    p = np.array(confidences)
    return np.log(np.stack([p, 1 - p], axis=1))


def test_worked_numbers() -> None:
    logits, labels = logits_of(0.9, 0.9, 0.6, 0.6), np.array([0, 1, 0, 0])
    # Bin (0.8667, 0.9333]: |1/2 - 0.9| = 0.4; bin (0.5333, 0.6]: |1 - 0.6| = 0.4
    assert reliability(*confidences(logits, labels)).error == pytest.approx(0.4)
    # two bins of equal mass hold the same pairs; four bins hold one example each: (0.1 + 0.9 + 0.4 + 0.4) / 4
    assert reliability(*confidences(logits, labels), 2, equal_mass=True).error == pytest.approx(0.4)
    assert reliability(*confidences(logits, labels), 4, equal_mass=True).error == pytest.approx(0.45)
    # squared distances: 2 * 0.1^2, 2 * 0.9^2, 2 * 0.4^2 twice
    assert brier_score(logits, labels) == pytest.approx((0.02 + 1.62 + 0.32 + 0.32) / 4)
    assert negative_log_likelihood(logits, labels) == pytest.approx(-np.log([0.9, 0.1, 0.6, 0.6]).mean())


@pytest.mark.parametrize("equal_mass", [False, True])
def test_perfectly_calibrated_is_zero(equal_mass: bool) -> None:
    logits = np.concatenate([logits_of(*[0.8] * 10), logits_of(*[0.6] * 10)])
    labels = np.array([0] * 8 + [1] * 2 + [0] * 6 + [1] * 4)
    assert reliability(*confidences(logits, labels), 2, equal_mass).error == pytest.approx(0, abs=1e-12)
    assert reliability(*confidences(logits, 1 - labels), 2, equal_mass).error > 0.3


def test_bins_hold_every_example_once() -> None:
    draw = np.random.default_rng(0)
    logits, labels = 5 * draw.normal(size=(1000, 3)), draw.integers(0, 3, 1000)
    for equal_mass in (False, True):
        found = reliability(*confidences(logits, labels), equal_mass=equal_mass)
        accuracy = (logits.argmax(axis=1) == labels).mean()
        assert found.count.sum() == 1000 and np.nansum(found.accuracy * found.count) / 1000 == pytest.approx(accuracy)
    assert set(reliability(*confidences(logits, labels), equal_mass=True).count) == {66, 67}


def test_temperature_is_found_again_and_changes_no_prediction() -> None:
    draw = np.random.default_rng(0)
    true = draw.normal(size=(4000, 3)) * 2
    labels = np.array([draw.choice(3, p=p) for p in np.exp(log_probabilities(true))])
    overconfident = 3 * true
    found = pooled_temperature([(overconfident[:1000], labels[:1000]), (overconfident[1000:], labels[1000:])])
    temperature = found.value
    assert temperature == pytest.approx(3, rel=0.1) and not found.at_bound
    before, after = calibration(overconfident, labels), calibration(overconfident, labels, temperature)
    assert after["ece"] < 0.02 < 0.1 < before["ece"] and after["nll"] < before["nll"]
    for other in (0.01, 0.5, temperature, 100.0):
        np.testing.assert_array_equal((overconfident / other).argmax(axis=1), true.argmax(axis=1))


def test_extreme_logits_are_safe() -> None:
    logits, labels = np.array([[1e6, -1e6], [-1e6, 1e6]], np.float32), np.array([0, 0])
    assert negative_log_likelihood(logits, labels) == pytest.approx(1e6)
    assert all(np.isfinite(value) for value in calibration(logits, labels).values())


def test_a_temperature_of_rows_that_are_all_right_is_flagged() -> None:
    right, mixed = np.array([[4.0, 0.0], [0.0, 4.0]] * 10), logits_of(*[0.9] * 20)
    labels = np.array([0, 1] * 10)
    assert pooled_temperature([(right, labels)]).at_bound, "any smaller one would be better still"
    pooled = pooled_temperature([(right, labels), (mixed, np.array([0] * 14 + [1] * 6))])
    assert not pooled.at_bound and 0.5 < pooled.value < 3


def test_brier_score_of_three_classes() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]]))
    # (0.5^2 + 0.3^2 + 0.2^2 + 0.2^2 + 0.8^2 + 0.6^2) / 2
    assert brier_score(logits, np.array([0, 1])) == pytest.approx((0.38 + 1.04) / 2)
