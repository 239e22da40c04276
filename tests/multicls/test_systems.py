"""Linear systems: exact predictions for unseen rows, what fit chooses, pairs, scores and rare classes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import Ridge as SklearnRidge
from sklearn.preprocessing import StandardScaler

from multicls.evaluation import Rows, evaluate, folds, random_draws
from multicls.measures import Array, score
from multicls.systems import (
    Cosine,
    Linear,
    Majority,
    Scale,
    Words,
    class_weights,
    ridge_path,
    standardisation,
)


@pytest.mark.parametrize("shape", [(30, 8), (20, 60)])
@pytest.mark.parametrize("grouped", [False, True])
def test_unseen_predictions_are_those_of_a_model_without_the_unit(
    shape: tuple[int, int], grouped: bool
) -> None:
    """They equal refits of scikit-learn's ridge regression, for more and for fewer rows than features."""
    generator = np.random.default_rng(0)
    features, weights = generator.normal(size=shape), generator.random(shape[0]) + 0.5
    targets = features[:, :2] + generator.normal(size=(shape[0], 2))
    units = np.arange(shape[0]) // (3 if grouped else 1)
    models = ridge_path(features, targets, weights, units, np.array([0.3, 30.0]))
    for penalty, model in zip((0.3, 30.0), models, strict=True):
        whole = SklearnRidge(penalty).fit(features, targets, weights)
        np.testing.assert_allclose(features @ model.weight + model.bias, whole.predict(features))
        for unit in np.unique(units)[:4]:
            rest = units != unit
            ridge = SklearnRidge(penalty).fit(features[rest], targets[rest], weights[rest])
            np.testing.assert_allclose(model.unseen[~rest], ridge.predict(features[~rest]))


def classes(number: int, shares: Any = None, size: int = 12, seed: int = 0) -> Rows:
    """Rows of three classes by default, with an embedding whose first columns tell them."""
    generator = np.random.default_rng(seed)
    labels = generator.choice(3 if shares is None else len(shares), size=number, p=shares)
    features = generator.normal(size=(number, size))
    features[:, :3] += 1.5 * np.eye(3)[labels]
    return Rows("class", labels, features={"mean": features})


def test_a_part_weighs_as_much_as_another() -> None:
    """Whatever its scale and number of columns; columns of topics keep their spread among each other."""
    rows = classes(200)
    few, many = rows.features["mean"], np.random.default_rng(1).normal(size=(200, 300)) * 50
    system = Linear.of("mean+topics").fit(
        Rows("class", rows.targets, features={"mean": few, "topics": many})
    )
    blocks = np.split(
        system.features(Rows("class", rows.targets, features={"mean": few, "topics": many})),
        [12],
        1,
    )
    for block in blocks:
        assert block.var(axis=0).sum() == pytest.approx(1)
    _, scale = standardisation(np.hstack([few, few[:, :1] * 1e-9]))
    assert np.isinf(scale[-1]), "a column that hardly varies is left out"
    spread = np.array([1.0, 0.01])
    _, together = standardisation(np.random.default_rng(0).normal(size=(500, 2)) * spread, True)
    assert together[0] == together[1]


def test_a_linear_system_is_a_ridge_classifier() -> None:
    rows = classes(150)
    outputs = Linear.of("mean").fit(rows).predict(rows)
    scaled = StandardScaler().fit_transform(rows.features["mean"])
    ridge = SklearnRidge(10.0).fit(scaled, np.eye(3)[rows.targets])
    assert (outputs.argmax(axis=1) == ridge.predict(scaled).argmax(axis=1)).mean() > 0.95
    probabilities = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    confidence = probabilities.max(axis=1).mean()
    unseen = evaluate({"": Linear.of("mean")}, rows, folds(rows))[""].mean
    assert confidence == pytest.approx(unseen, abs=0.06), "calibrated by unseen rows"


def test_rare_classes_are_found_if_the_metric_asks() -> None:
    """8 rows of 400 are of the rare class."""
    generator, found = np.random.default_rng(0), dict[str, list[float]](f1=[], acc=[])
    for _ in range(6):
        labels = np.repeat([0, 1], [392, 8])
        features = generator.normal(size=(400, 40)) + labels[:, None] * 1.1 * (np.arange(40) < 8)
        test_labels = np.repeat([0, 1], [1960, 40])
        unseen = generator.normal(size=(2000, 40)) + test_labels[:, None] * 1.1 * (
            np.arange(40) < 8
        )
        for metric, values in found.items():
            rows = Rows("class", labels, features={"mean": features}, metric=metric)
            test = Rows("class", test_labels, features={"mean": unseen}, metric=metric)
            predicted = Linear.of("mean").fit(rows).predict(test).argmax(axis=1)
            values.append(score("f1", test_labels, predicted))
    assert np.mean(found["f1"]) > np.mean(found["acc"]) + 0.1
    assert class_weights(np.array([0, 0, 0, 1])).tolist() == pytest.approx([2 / 3] * 3 + [2])


def scored(number: int, seed: int) -> tuple[Array, Array]:
    generator = np.random.default_rng(seed)
    features = generator.normal(size=(number, 20))
    return features, features[:, 0] + 0.5 * generator.normal(size=number)


def test_an_offset_or_an_outlier_of_the_labels_changes_nothing() -> None:
    features, labels = scored(100, 0)
    unseen, truth = scored(1000, 1)
    found = {}
    outlier = labels.copy()
    outlier[0] = 1e6
    for name, targets in {"plain": labels, "years": 2000 + labels, "outlier": outlier}.items():
        rows = Rows("score", targets, features={"mean": features})
        outputs = (
            Linear.of("mean").fit(rows).predict(Rows("score", truth, features={"mean": unseen}))
        )
        found[name] = outputs[:, 0]
    np.testing.assert_allclose(found["years"] - 2000, found["plain"], atol=1e-6)
    spearman = {name: score("spearman", truth, outputs) for name, outputs in found.items()}
    assert spearman["plain"] > 0.8 and spearman["outlier"] == pytest.approx(
        spearman["plain"], abs=0.03
    )
    scale = Scale.of(outlier)
    assert scale.high < 10 and abs(scale.apply(outlier).std() - 1) < 0.01


def test_pairs_do_not_lose_against_the_cosine() -> None:
    """Whose labels are the cosine and noise; 60 labels cannot teach 2 x 64 weights."""
    generator = np.random.default_rng(0)
    first = generator.normal(size=(660, 64))
    second = first + generator.normal(size=(660, 64)) * generator.uniform(0, 3, size=(660, 1))
    pairs = np.stack([first, second], axis=1)
    cosines = Cosine("mean").predict(Rows("score", np.zeros(660), features={"mean": pairs}))[:, 0]
    labels = 5 * cosines + 0.5 * generator.normal(size=660)
    rows = Rows("score", labels, features={"mean": pairs})
    train, test = rows.take(np.arange(60)), rows.take(np.arange(60, 660))
    outputs = Linear.of("mean").fit(train).predict(test)[:, 0]
    cosine = score("spearman", test.targets, cosines[60:])
    assert score("spearman", test.targets, outputs) >= cosine - 0.01
    difference = (first[:, 0] - second[:, 0]) ** 2 > 1
    rows = Rows("class", difference.astype(int), features={"mean": pairs[:, :, :4]})
    assert evaluate({"": Linear.of("mean")}, rows, random_draws(rows, 200, 3))[""].mean > 0.75


def test_several_labels_and_missing_classes() -> None:
    generator = np.random.default_rng(0)
    features = generator.normal(size=(300, 10))
    marks = (features[:, :3] + 0.3 * generator.normal(size=(300, 3)) > 0.8).astype(float)
    rows = Rows("multi_label", marks, features={"mean": features})
    assert evaluate({"": Linear.of("mean")}, rows, folds(rows, 1, halves=0))[""].mean > 0.75
    unseen = generator.normal(size=(2000, 10))
    noise = 0.3 * generator.normal(size=(2000, 3))
    expected = (unseen[:, :3] + noise > 0.8).astype(float)
    system = Linear.of("mean").fit(rows)
    logits = system.predict(Rows("multi_label", expected, features={"mean": unseen})) + system.shift
    probabilities = 1 / (1 + np.exp(-logits))
    sure = probabilities > 0.9
    assert sure.sum() > 100 and expected[sure].mean() > 0.88, "calibrated by unseen rows"
    assert abs(probabilities.mean() - expected.mean()) < 0.03
    names = ("a", "b", "c", "d")
    some = classes(60)
    rows = Rows("class", some.targets, features=some.features, classes=names)
    outputs = Linear.of("mean").fit(rows).predict(rows)
    assert outputs.shape == (60, 4) and (outputs[:, 3] < outputs[:, :3].min(axis=1) - 10).all()


def test_texts_without_words_are_alike() -> None:
    texts = [(mark * 3, "one" if number % 2 else "two") for number, mark in enumerate("?!" * 15)]
    rows = Rows("class", np.arange(30) % 2, texts)
    assert (Words().fit(rows).predict(rows).argmax(axis=1) == rows.targets).all()


def test_saved_systems_predict_the_same(tmp_path: Path) -> None:
    rows = classes(60)
    texts = [(f"word{label} of {row}",) for row, label in enumerate(rows.targets)]
    rows = Rows("class", rows.targets, texts, rows.features)
    for system in (Linear.of("mean"), Words()):
        folder = tmp_path / type(system).__name__
        folder.mkdir()
        system.fit(rows).save(folder)
        np.testing.assert_array_equal(type(system).load(folder).predict(rows), system.predict(rows))
    assert evaluate({"": Words()}, rows, folds(rows, 1))[""].mean > 0.95


def test_majority() -> None:
    rows = Rows("class", np.array([0, 1, 1]))
    assert Majority().fit(rows).predict(rows).argmax(axis=1).tolist() == [1, 1, 1]
    marks = Rows("multi_label", np.array([[1, 0], [1, 1], [1, 0]]))
    assert (Majority().fit(marks).predict(marks) > 0).tolist() == [[True, False]] * 3
    scores = Rows("score", np.array([1.0, 3.0]))
    assert Majority().fit(scores).predict(scores).tolist() == [[2.0], [2.0]]
