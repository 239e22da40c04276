"""Evaluation: folds, values of rows, and the coverage of the interval in simulated experiments."""

import os
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef

from multicls.errors import UserError
from multicls.evaluation import (
    Difference,
    Rows,
    Scores,
    Splits,
    compare,
    evaluate,
    folds,
    learning_curve,
    partition,
    random_draws,
    strata_of,
)
from multicls.measures import Array, row_values, score
from multicls.systems import Majority


@dataclass
class PlainRidge:
    """A ridge regression on one-hot labels with a fixed penalty: a real linear model, and a fast one."""

    part: str
    classes: int

    def fit(self, rows: Rows) -> Self:
        x, y = rows.features[self.part], np.eye(self.classes)[rows.targets]
        self.mean, self.bias = x.mean(axis=0), y.mean(axis=0)
        x = x - self.mean
        gram = x.T @ x + x.shape[1] * np.eye(x.shape[1])
        self.weight = np.linalg.solve(gram, x.T @ (y - self.bias))
        return self

    def predict(self, rows: Rows) -> Array:
        return np.asarray((rows.features[self.part] - self.mean) @ self.weight + self.bias)


class World:
    """Labelled rows of unequal classes with two embeddings of them; `a` is better than `b` by `noise`."""

    def __init__(self, classes: int, group: int, noise: float) -> None:
        generator = np.random.default_rng(classes)
        self.classes, self.group, self.noise = classes, group, noise
        self.size = 8 if classes == 2 else 16 if classes < 20 else 40
        self.centres = generator.normal(size=(classes, self.size)) * {2: 0.45, 5: 0.5}.get(
            classes, 0.7
        )
        self.shares = generator.dirichlet(np.full(classes, 5.0))
        self.systems = {name: PlainRidge(name, classes) for name in "ab"}

    def rows(self, generator: np.random.Generator, number: int) -> Rows:
        """Returns rows of groups, whose rows share their label and half of the variance."""
        groups = -(-number // self.group)
        units = np.repeat(np.arange(groups), self.group)[:number]
        labels = generator.choice(self.classes, size=groups, p=self.shares)[units]
        shared = generator.normal(size=(groups, self.size))[units] * (0.7 if self.group > 1 else 0)
        own = generator.normal(size=(number, self.size)) * (0.7 if self.group > 1 else 1)
        base = self.centres[labels] + shared + own
        noises = (
            generator.normal(size=(2, number, self.size))
            * np.array([0.5, 0.5 + self.noise])[:, None, None]
        )
        features = {"a": base + noises[0], "b": base[:, ::-1] + noises[1]}
        return Rows("class", labels, features=features, units=units)

    def truth(self, train_rows: int) -> float:
        """Returns the true difference a - b of systems that learn from so many rows."""
        if not self.noise:
            return 0.0  # by symmetry of the noise; the labels' centres are as far apart reversed
        generator, found = np.random.default_rng(1), []
        train, scored = np.arange(train_rows), np.arange(train_rows, train_rows + 4000)
        for _ in range(100):
            rows = self.rows(generator, train_rows + 4000)
            splits = Splits(np.zeros((0, len(rows.targets)), int), ((train, scored),))
            scores = evaluate(self.systems, rows, splits)
            found.append(scores["a"].mean - scores["b"].mean)
        return float(np.mean(found))


def coverage(world: World, number: int, experiments: int) -> tuple[float, float, float]:
    """Returns how often the interval holds the truth, how often it leaves out 0, and the truth."""
    truth, generator, found = world.truth(round(0.8 * number)), np.random.default_rng(2), []
    for _ in range(experiments):
        rows = world.rows(generator, number)
        seed = int(generator.integers(1 << 30))
        scores = evaluate(world.systems, rows, folds(rows, seed=seed))
        change = compare(scores["a"], scores["b"])
        found.append((change.low <= truth <= change.high, change.is_shown))
    return sum(c for c, _ in found) / experiments, sum(s for _, s in found) / experiments, truth


EXPERIMENTS = int(os.environ.get("MULTICLS_EXPERIMENTS", "0"))
# Classes, rows of a group, noise of the second embedding, rows; with the number of experiments all are simulated.
QUICK = [(2, 1, 0.0, 100), (20, 1, 0.12, 300), (5, 4, 0.22, 100)]
ALL = [(2, 1, 0.0, 300), (2, 1, 0.25, 100), (2, 1, 0.25, 1000), (5, 1, 0.0, 300), (5, 4, 0.0, 300)]
ALL += [
    (5, 4, 0.22, 1000),
    (20, 1, 0.0, 100),
    (20, 1, 0.12, 1000),
    (70, 1, 0.0, 300),
    (70, 1, 0.1, 1000),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", QUICK + (ALL if EXPERIMENTS else []))
def test_intervals_of_folds_cover_the_truth(case: tuple[int, int, float, int]) -> None:
    """MULTICLS_EXPERIMENTS=1000 simulates all cases as docs/intervals.md reports them."""
    classes, group, noise, number = case
    experiments = EXPERIMENTS or 60
    covered, shown, truth = coverage(World(classes, group, noise), number, experiments)
    print(f"{case}: difference {100 * truth:+.1f}, covered {covered:.1%}, 0 left out {shown:.1%}")
    error = 3 * (0.05 * 0.95 / experiments) ** 0.5
    assert 0.93 - error <= covered <= 0.975 + error
    if not noise:
        assert shown <= 0.05 + error


def test_the_spread_over_folds_alone_is_too_small() -> None:
    """The control: an interval from the means of folds, as if they were independent, covers too rarely."""
    world, generator, wrong = World(5, 4, 0.0), np.random.default_rng(0), 0
    for _ in range(60):
        rows = world.rows(generator, 100)
        scores = evaluate(world.systems, rows, folds(rows, halves=0))
        change = scores["a"].folds - scores["b"].folds
        half = 1.96 * change.std() / change.size**0.5
        wrong += abs(change.mean()) > half
    assert wrong / 60 > 0.1


def test_folds_keep_groups_together_and_classes_in_proportion() -> None:
    generator = np.random.default_rng(0)
    units = np.concatenate([np.repeat(np.arange(10), 6), np.arange(10, 150)])
    targets = (units % 4).astype(int)
    rows = Rows("class", targets, units=units)
    splits = folds(rows)
    assert splits.folds.shape == (2, 200) and len(splits.draws) == 20 and splits.train_rows == 160
    assert not np.array_equal(splits.folds[0], splits.folds[1])
    for fold in splits.folds:
        assert all(len(set(fold[units == unit])) == 1 for unit in range(150))
        assert np.ptp(np.bincount(fold)) <= 6
        counts = np.array([np.bincount(fold[targets == label], minlength=5) for label in range(4)])
        assert (np.ptp(counts, axis=1) <= 6).all()
    for train, scored in splits.draws:
        assert sorted([*train, *scored]) == list(range(200))
        assert not set(units[train]) & set(units[scored])
    again = folds(rows)
    assert np.array_equal(splits.folds, again.folds)
    single = partition([0] * 50, np.arange(50), 5, (1,))
    assert np.bincount(single).tolist() == [10] * 5
    marks = np.array([[1, 0, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert strata_of("multi_label", marks) == [2, 1, 0, -1]
    of_scores = strata_of("score", generator.normal(size=10))
    assert [of_scores.count(fifth) for fifth in range(5)] == [2] * 5


def test_each_row_is_scored_by_a_system_that_has_not_seen_it() -> None:
    """A system that remembers its training rows is right on them alone."""

    class Memory:
        def fit(self, rows: Rows) -> Self:
            self.seen = set(rows.features["id"][:, 0])
            return self

        def predict(self, rows: Rows) -> Array:
            known = [identity in self.seen for identity in rows.features["id"][:, 0]]
            return np.eye(2)[np.where(known, rows.targets, 1 - rows.targets)]

    targets = np.arange(40) % 2
    rows = Rows("class", targets, features={"id": np.arange(40)[:, None]})
    scores = evaluate({"memory": Memory()}, rows, folds(rows))["memory"]
    assert scores.mean == 0 and np.nanmax(scores.draws) == 0
    assert scores.outputs is not None
    assert np.array_equal(scores.outputs.argmax(axis=2), np.tile(1 - targets, (2, 1)))


@pytest.mark.filterwarnings("error")
def test_values_of_rows_have_the_metric_as_their_mean() -> None:
    generator = np.random.default_rng(0)
    labels, predicted = generator.integers(4, size=(2, 60))
    predicted = np.where(generator.random(60) < 0.5, labels, predicted)
    marks = generator.integers(2, size=(2, 60, 3))
    scores = generator.normal(size=(2, 60))
    found = {
        "macro_f1": (
            score("macro_f1", labels, predicted),
            f1_score(labels, predicted, average="macro"),
        ),
        "matthews": (score("matthews", labels, predicted), matthews_corrcoef(labels, predicted)),
        "f1": (score("f1", labels > 1, predicted > 1), f1_score(labels > 1, predicted > 1)),
        "micro": (score("micro_f1", *marks), f1_score(*marks, average="micro")),
        "macro": (score("macro_f1", *marks), f1_score(*marks, average="macro")),
        "pearson": (score("pearson", *scores), pearsonr(*scores).statistic),
        "spearman": (score("spearman", *scores), spearmanr(*scores).statistic),
        "acc": (score("acc", labels, predicted), (labels == predicted).mean()),
    }
    for name, (ours, theirs) in found.items():
        assert ours == pytest.approx(float(theirs)), name
    for name in ("matthews", "pearson", "spearman", "f1"):
        assert score(name, np.array([0, 1, 1]), np.zeros(3)) == 0, "constant predictions"
    assert score("r2", scores[0], np.full(60, scores[0].mean())) == pytest.approx(0)


@pytest.mark.parametrize("metric", ["macro_f1", "pearson", "spearman", "matthews", "r2"])
def test_the_variance_of_row_values_is_that_of_the_metric(metric: str) -> None:
    """Over new rows; for values that are no mean it rests on the influence of a row."""
    generator, means, errors = np.random.default_rng(0), [], []
    for _ in range(400):
        x = generator.normal(size=200)
        y = x + generator.normal(size=200)
        if metric in ("macro_f1", "matthews"):
            x, y = (np.digitize(z, [-1, 1]).astype(float) for z in (x, y))
        values = row_values(metric, x, y)
        means.append(values.mean())
        errors.append(values.std() / 200**0.5)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.12)


def test_one_training_set_has_an_interval_over_rows() -> None:
    """Six of 100 test rows are right by the first system alone: more than chance, also without other training sets."""
    right = np.ones((1, 100))
    worse = right.copy()
    worse[0, :6] = 0
    scores = [Scores(np.zeros((0, 100)), values, np.arange(100)) for values in (right, worse)]
    change = compare(*scores)
    assert change.mean == pytest.approx(0.06) and 0 < change.low < change.high < 0.12
    assert change.covers == "new rows" and change.is_shown
    same = compare(scores[0], scores[0])
    assert same.low == -same.high == pytest.approx(-0.03, rel=0.02), "three in a hundred"
    groups = [Scores(s.folds, s.draws, np.arange(100) // 10) for s in scores]
    assert not compare(*groups).is_shown, "all six are of one group"


def test_seeds_count() -> None:
    generator = np.random.default_rng(0)
    rows = (generator.random((3, 20, 400)) < 0.6).astype(float)
    steady = [Scores(np.zeros((0, 400)), values, np.arange(400), 40) for values in rows]
    shifted = [
        Scores(s.folds, s.draws + shift, s.units, 40)
        for s, shift in zip(steady, (-0.05, 0.0, 0.05), strict=True)
    ]
    widths = [np.ptp([c.low, c.high]) for c in (compare(steady), compare(shifted))]
    assert widths[1] > 1.5 * widths[0]


def test_differences_are_shown_in_points_and_words() -> None:
    change = Difference(0.031, 0.010, 0.052)
    assert str(change) == "+3.1 (+1.0 to +5.2)"
    assert change.verdict("a", "b") == "a against b: better, +3.1 (+1.0 to +5.2)"
    worse = Difference(-0.031, -0.052, -0.010)
    assert worse.verdict("a", "b") == "a against b: worse, -3.1 (-5.2 to -1.0)"
    unclear = Difference(0.0123, -0.001, 0.02)
    assert unclear.verdict("a", "b") == "a against b: no clear change, +1.2 (-0.1 to +2.0)"
    assert Difference(0.712, 0.689, 0.734).score() == "71.2 (68.9 to 73.4)"
    assert Difference(0.02, -0.03, 1.07).score() == "2.0 (0.0 to 100.0)", "an accuracy is a share"
    assert Difference(0.02, -0.03, 0.07, metric="spearman").score() == "2.0 (-3.0 to 7.0)"
    assert Difference(0.02, -0.03, 0.07, metric="mean(f1a,em)").score() == "2.0 (0.0 to 7.0)"
    assert Difference(-0.02, -0.03, 0.07, metric="mean of 2 tasks").score() == "-2.0 (-3.0 to 7.0)"
    assert str(Difference(0.5, -19.0, 19.0)) == "+50.0 (-100.0 to +100.0)"
    small = Difference(0.0312, -0.001, 0.0634, metric="mae")
    assert small.score() == "0.0312 (0 to 0.0634)" and str(small).startswith("+0.0312 (-0.001 ")
    assert Difference(12345.6, 9e3, 2e4, metric="mae").score() == "12,346 (9,000 to 20,000)"
    assert str(Difference(0.0123, -np.inf, np.inf)).startswith("+1.2 (no interval: ")


def test_rows_of_one_group_cannot_be_divided() -> None:
    with pytest.raises(UserError, match="all 20 rows are of one group or text"):
        folds(Rows("class", np.arange(20) % 2, units=np.zeros(20, dtype=int)))


def test_draws_and_the_learning_curve() -> None:
    world = World(5, 1, 0.0)
    rows = world.rows(np.random.default_rng(0), 400)
    splits = random_draws(rows, 100, 6)
    assert splits.train_rows == 100 and len(splits.draws) == 6
    assert random_draws(rows, 900, 1).train_rows == 200, "half of the rows"
    curve = learning_curve(world.systems["a"], rows, folds(rows), (25, 50, 100, 200, 400))
    assert list(curve) == [25, 50, 100, 200], "no draw has 400"
    assert curve[25] + 0.05 < curve[200] < 1
    flat: Any = learning_curve(Majority(), rows, folds(rows), (50, 200))
    assert abs(flat[50] - flat[200]) < 0.05
