"""The probe: its scores, what it refuses, and the coverage of its intervals by simulation."""

import os

import numpy as np
import pytest
from scipy import stats
from sklearn.linear_model import RidgeClassifierCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from multicls.errors import UserError
from multicls.labels import LabelType
from multicls.probe import SCALES, Difference, draw_rows, standardisation, targets_of, values_of

ROWS, TRAIN, DRAWS = 300, 100, 10  # as in a run of `own_text`
CENTRES = np.random.default_rng(0).normal(size=(3, 8)) * 0.8


def sample(generator: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns labels and two noisy embeddings of rows, the second of which is worse."""
    labels = generator.integers(3, size=rows)
    hidden = CENTRES[labels] + generator.normal(size=(rows, 8))
    second = np.tanh(hidden[:, ::-1]) + 0.8 * generator.normal(size=(rows, 8))
    return labels, hidden + 0.3 * generator.normal(size=(rows, 8)), second


def test_scores_are_those_of_a_plain_ridge_classifier() -> None:
    labels, features, _ = sample(np.random.default_rng(1), 60)
    draws = draw_rows("class", labels, 20, 3)
    values = draws.values(features)
    for train, row in zip(draws.train, values, strict=True):
        rest = np.setdiff1d(np.arange(60), train)
        plain = make_pipeline(StandardScaler(), RidgeClassifierCV(SCALES * 8))
        plain.fit(features[train], labels[train])
        assert np.isnan(row[train]).all()
        assert row[rest].mean() == plain.score(features[rest], labels[rest])


def test_scores_and_several_labels() -> None:
    generator = np.random.default_rng(2)
    features, noise = generator.normal(size=(2, 200, 5))
    scores = draw_rows("score", features @ np.arange(5.0), 50, 3)
    assert np.nanmean(scores.values(features)) > 0.95 > 0.1 > np.nanmean(scores.values(noise))
    marks = (features[:, :3] > 0).astype(float)
    marks[~marks.any(axis=1), 0] = 1.0
    several = draw_rows("multi_label", marks, 50, 3)
    assert np.nanmean(several.values(features)) > 0.9 > np.nanmean(several.values(noise))
    assert targets_of("multi_label", [("b",), ("a", "b")], ("a", "b")).tolist() == [[0, 1], [1, 1]]


def test_a_feature_that_hardly_varies_is_left_out() -> None:
    labels, features, _ = sample(np.random.default_rng(1), 60)
    draws = draw_rows("class", labels, 20, 3)
    noise = 5 + 1e-6 * np.random.default_rng(2).normal(size=(60, 4))
    assert np.array_equal(
        draws.values(np.hstack([features, noise])), draws.values(features), equal_nan=True
    )


def test_topics_weigh_as_much_as_the_other_features_together() -> None:
    """A label that the two frequent topics decide is found beside 200 rare ones, which are noise if standardised."""
    draw = np.random.default_rng(0)
    spread = np.concatenate([[0.5, 0.5], np.full(200, 0.01)])
    topics, mean = draw.normal(size=(400, 202)) * spread, draw.normal(size=(400, 8))
    both, labels = np.hstack([mean, topics]), (topics[:, 0] > topics[:, 1]).astype(int)
    columns = slice(8, None)
    shift, scale = standardisation(both, columns)
    variances = ((both - shift) / scale).var(axis=0)
    np.testing.assert_allclose(variances[:8], 1)
    np.testing.assert_allclose(variances[8:].sum(), 8)
    draws = draw_rows("class", labels, 60, 5)
    values = draws.values(both, columns)
    views = {"mean": mean, "facets": mean, "sum": mean, "mean_topics": both, "facets_topics": both}
    found = values_of(draws, views)
    assert [*found] == ["mean", "facets", "mean_topics", "facets_topics"]
    for name in ("mean_topics", "facets_topics"):
        assert np.array_equal(found[name], values, equal_nan=True)
    assert np.nanmean(values) > np.nanmean(draws.values(both)) + 0.1
    assert np.nanmean(draws.values(mean)) < 0.6
    assert np.isinf(standardisation(np.ones((20, 3)), slice(1, None))[1]).all()


def test_draws() -> None:
    labels = np.repeat([0, 1, 2], [50, 8, 2])
    draws, again = (draw_rows("class", labels, 8, 4) for _ in range(2))
    assert draws.train_rows == 8 and all(len(set(labels[train])) > 1 for train in draws.train)
    assert all(np.array_equal(a, b) for a, b in zip(draws.train, again.train, strict=True))
    assert draw_rows("class", labels, 100).train_rows == 30  # half of the rows


@pytest.mark.parametrize(
    ("kind", "targets", "message"),
    [
        ("class", np.arange(12) % 2, "12 labelled rows: a probe needs 20 or more"),
        ("class", np.zeros(60), "60 labelled rows: all labels are alike"),
        ("class", np.arange(60) % 40, "60 labelled rows: 40 classes need 80 or more"),
        ("score", np.ones(60), "60 labelled rows: all labels are alike"),
    ],
)
def test_refused(kind: LabelType, targets: np.ndarray, message: str) -> None:
    with pytest.raises(UserError, match=message):
        draw_rows(kind, targets)


@pytest.mark.slow
def test_intervals_cover_the_truth_and_the_naive_one_does_not() -> None:
    """MULTICLS_PROBES=2000 simulates as many as docs/results.md reports; 50 show the order of it."""
    probes = int(os.environ.get("MULTICLS_PROBES", "50"))
    generator = np.random.default_rng(3)
    labels, first, second = sample(generator, 20_000)
    large = draw_rows("class", labels, TRAIN, 200)
    truth = large.difference(large.values(first), large.values(second)).mean
    covered, naively = 0, 0
    for _ in range(probes):
        labels, first, second = sample(generator, ROWS)
        draws = draw_rows("class", labels, TRAIN, DRAWS)
        values, reference = draws.values(first), draws.values(second)
        estimate = draws.difference(values, reference)
        covered += estimate.low <= truth <= estimate.high
        change = np.nanmean(values - reference, axis=1)
        half = stats.t.ppf(0.975, DRAWS - 1) * change.std(ddof=1) / DRAWS**0.5
        naively += abs(change.mean() - truth) <= half
    print(f"{probes} probes: covered by {covered / probes:.1%}, naively by {naively / probes:.1%}")
    noise = 3 * (0.05 / probes) ** 0.5  # three standard errors of a coverage of 95 %
    assert 0.93 - noise <= covered / probes <= 0.975 + noise
    assert naively / probes < 0.7


def test_differences_are_shown_in_points() -> None:
    assert str(Difference(0.0123, -0.001, 0.02)) == "+1.2 (-0.1 to +2.0)"
    assert str(Difference(0.0123, -np.inf, np.inf)).startswith("+1.2 (no interval: ")
