"""Systems without training of an encoder: linear models on embeddings or words, and what needs no labels.

Each has `fit(rows)` and `predict(rows)`, as `multicls.evaluation` reads them. A linear model is a ridge regression on
one-hot labels (or scores) whose penalty, class weights, temperature and thresholds are chosen inside `fit`, by the
predictions for each training row of a model that has not seen it or its unit.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from multicls.embeddings import available
from multicls.evaluation import Difference, Rows, Scores, Splits, compare, evaluate
from multicls.files import read_json, write_json
from multicls.labels import LabelType
from multicls.measures import Array, larger_is_better, predictions_of, score

PENALTIES = np.logspace(-3, 3, 13)  # in variances of all features together
DEAD = 1e-4  # a feature whose spread is a smaller part of the largest one is none
OUTLIER = 3.0  # interquartile ranges outside the quartiles; scores beyond are taken as that far
FREE = 30.0  # factor of the cosines of a pair: the penalty hardly touches them
UNSEEN = 30.0  # outputs of a class that no training row has are lower by this
FEWEST_MARKS = 5  # training rows with a label for a threshold of its own
WORDS = 30_000  # most words and pairs of words of TF-IDF


@dataclass(frozen=True)
class Ridge:
    """A fitted ridge regression: outputs = features @ weight + bias."""

    weight: Array  # (F, C)
    bias: Array  # (C,)
    unseen: Array  # (N, C), the output for each training row of the model without its unit


def ridge_path(
    features: Any, targets: Array, weights: Array, units: Array, penalties: Array
) -> list[Ridge]:
    """Returns the ridge regression of each penalty, with an intercept, and its outputs for unseen training rows.

    Leaving out a unit has a closed form: with the hat matrix H, the residuals of its rows become
    (I - H_uu)^-1 residuals (Allen's PRESS for rows alone). One eigenvalue decomposition serves all penalties.

    Args:
        features: (N, F), dense or sparse.
        targets: (N, C).
        weights: (N,), of the rows.
        units: (N,); rows of a unit are left out together.
    """
    total, root = weights.sum(), np.sqrt(weights)
    center, shift = np.asarray(weights @ features).ravel() / total, weights @ targets / total
    wanted = root[:, None] * (targets - shift)
    if features.shape[0] <= features.shape[1]:
        gram = features @ features.T
        gram = np.asarray(gram.toarray() if hasattr(gram, "toarray") else gram, dtype=np.float64)
        to_center = np.asarray(features @ center)
        gram += center @ center - to_center[:, None] - to_center
        values, vectors = np.linalg.eigh(root[:, None] * gram * root)
    else:
        dense = features.toarray() if hasattr(features, "toarray") else features
        scaled = root[:, None] * (dense - center)
        values, axes = np.linalg.eigh(scaled.T @ scaled)
        kept = values > values.max() * 1e-12
        values, vectors = values[kept], scaled @ axes[:, kept] / np.sqrt(values[kept])
    values = np.maximum(values, 0.0)
    projected, found = vectors.T @ wanted, list[Ridge]()
    for penalty in penalties:
        share = values / (values + penalty)
        residuals = wanted - vectors @ (share[:, None] * projected)
        dual = root[:, None] * residuals / penalty
        weight = features.T @ dual - np.outer(center, dual.sum(axis=0))
        left_out = _left_out(residuals, vectors, share, root / np.sqrt(total), units)
        unseen = targets - left_out / root[:, None]
        found.append(Ridge(weight, shift - center @ weight, unseen))
    return found


def _left_out(
    residuals: Array, vectors: Array, share: Array, constant: Array, units: Array
) -> Array:
    """Returns the residuals (N, C) of each row by the model without the row's unit."""
    leverage = np.square(vectors) @ share + np.square(constant)
    left = residuals / np.maximum(1 - leverage, 1e-6)[:, None]
    order = np.argsort(units, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(units[order])) + 1):
        if len(rows) > 1:
            hat = (vectors[rows] * share) @ vectors[rows].T
            hat += np.outer(constant[rows], constant[rows])
            left[rows] = np.linalg.lstsq(np.eye(len(rows)) - hat, residuals[rows], rcond=1e-6)[0]
    return left


def class_weights(targets: Array) -> Array:
    """Returns a weight per row, (N,), which gives each class the same sum; N over all rows."""
    _, number, counts = np.unique(targets, return_inverse=True, return_counts=True)
    return np.asarray(len(targets) / (len(counts) * counts[number]))


@dataclass(frozen=True)
class Scale:
    """The standardisation of scores by their training rows; classes have none.

    Scores farther than three interquartile ranges from the quartiles are taken as that far away.
    """

    mean: float = 0.0
    spread: float = 1.0
    low: float = -np.inf
    high: float = np.inf

    @classmethod
    def of(cls, scores: Array) -> Self:
        """Returns the scale of training scores (N,)."""
        first, third = np.quantile(scores, (0.25, 0.75))
        reach = OUTLIER * (third - first)
        low, high = float(first - reach), float(third + reach)
        if not reach or (low <= scores.min() and scores.max() <= high):
            low, high = -np.inf, np.inf
        inside = np.clip(scores, low, high)
        return cls(float(inside.mean()), float(inside.std()) or 1.0, low, high)

    def apply(self, scores: Array) -> Array:
        """Returns standardised scores."""
        return np.asarray((np.clip(scores, self.low, self.high) - self.mean) / self.spread)


@dataclass
class RidgeSystem:
    """A ridge regression on features, which a subclass makes of the rows.

    After `fit`: `fitted`, `temperature` (outputs of labels are divided by it), `thresholds` of several labels, their
    `shift` (`predict` subtracts it from the logit of each label), and `scale` of scores.
    """

    fitted: Ridge | None = field(default=None, init=False, repr=False)
    temperature: float = field(default=1.0, init=False, repr=False)
    thresholds: Array = field(default_factory=lambda: np.zeros(1), init=False, repr=False)
    shift: Array = field(default_factory=lambda: np.zeros(1), init=False, repr=False)
    scale: Scale = field(default_factory=Scale, init=False, repr=False)
    missing: Array = field(default_factory=lambda: np.zeros(0, int), init=False, repr=False)

    def learn_features(self, rows: Rows) -> Any:
        """Returns the features (N, F) of training rows, and keeps what `features` needs for others."""
        raise NotImplementedError

    def features(self, rows: Rows) -> Any:
        """Returns the features (N, F) of rows."""
        raise NotImplementedError

    def fit(self, rows: Rows) -> Self:
        """Fits the model; the main metric of unseen training rows chooses, of equal ones the squared error."""
        features = self.learn_features(rows)
        squares = features.multiply(features) if hasattr(features, "multiply") else features**2
        penalties = PENALTIES * max(1e-9, float(squares.sum(axis=1).mean()))
        targets, plain = rows.targets, np.ones(len(rows.targets))
        if rows.kind == "score":
            self.scale = Scale.of(targets)
            targets = self.scale.apply(targets)[:, None]
        elif rows.kind == "class":
            targets = np.eye(rows.num_classes)[targets.astype(int)]
            self.missing = np.flatnonzero(targets.sum(axis=0) == 0)
        balanced = class_weights(rows.targets) if rows.kind == "class" else plain
        weightings = [plain, balanced] if np.ptp(balanced) > 0.5 else [plain]
        best: tuple[float, float] = (-np.inf, -np.inf)
        for weights in weightings:
            for model in ridge_path(features, targets, weights, rows.units, penalties):
                quality = _quality(rows, targets, model.unseen, weights)
                if quality > best:
                    best, self.fitted = quality, model
        self._calibrate(rows)
        return self

    def _calibrate(self, rows: Rows) -> None:
        """Sets threshold and temperature by the outputs for unseen training rows."""
        assert self.fitted is not None
        unseen = self.fitted.unseen
        shift = _shift(rows, unseen)
        if rows.kind == "class":
            self.fitted = replace(self.fitted, bias=self.fitted.bias + shift)
            self.temperature = fit_temperature("class", unseen + shift, rows.targets)
        elif rows.kind == "multi_label":
            slope, intercept = _logits(unseen, rows.targets)
            self.temperature, self.thresholds = 1 / slope, -shift
            self.shift = self.thresholds * slope + intercept

    def predict(self, rows: Rows) -> Array:
        """Returns outputs (N, C): logits of classes, distances from the threshold of several labels, or scores."""
        assert self.fitted is not None, "fit it first"
        return self.to_outputs(rows.kind, self.fitted.weight, self.features(rows))

    def to_outputs(self, kind: LabelType, weight: Array, features: Any) -> Array:
        """Returns the outputs for features (N, F)."""
        assert self.fitted is not None
        outputs = np.asarray(features @ weight) + self.fitted.bias
        if kind == "score":
            return outputs * self.scale.spread + self.scale.mean
        if kind == "multi_label":
            return (outputs - self.thresholds) / self.temperature
        outputs = outputs / self.temperature
        outputs[:, self.missing] = outputs.min() - UNSEEN
        return np.asarray(outputs)

    def write(self, folder: Path, arrays: Mapping[str, Array], more: Mapping[str, Any]) -> None:
        """Writes the fitted model, and the arrays and settings of a subclass."""
        from safetensors.numpy import save_file

        assert self.fitted is not None, "fit it first"
        arrays = {**arrays, "weight": self.fitted.weight, "bias": self.fitted.bias}
        arrays |= {"thresholds": self.thresholds, "shift": self.shift, "missing": self.missing}
        tensors = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
        save_file(tensors, folder / "ridge.safetensors")
        unit = {"mean": self.scale.mean, "spread": self.scale.spread}
        settings = {"temperature": self.temperature, "scale": unit}
        write_json(folder / "ridge.json", settings | dict(more))

    def restore(self, settings: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Takes what `read_ridge` returns."""
        self.fitted = Ridge(arrays["weight"], arrays["bias"], np.zeros((0, 0)))
        self.temperature, self.scale = settings["temperature"], Scale(**settings["scale"])
        self.thresholds, self.shift = arrays["thresholds"], arrays["shift"]
        self.missing = arrays["missing"]


def read_ridge(folder: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Returns settings and arrays that `RidgeSystem.write` has written."""
    from safetensors.numpy import load_file

    return read_json(folder / "ridge.json"), load_file(folder / "ridge.safetensors")


def _quality(rows: Rows, targets: Array, unseen: Array, weights: Array) -> tuple[float, float]:
    """Returns the main metric of unseen training rows, the larger the better, and minus the squared error."""
    wanted = targets[:, 0] if rows.kind == "score" else rows.targets
    predicted = predictions_of(rows.kind, unseen + _shift(rows, unseen))
    quality = score(rows.metric, wanted, predicted)
    error = float(weights @ np.square(targets - unseen).mean(axis=1)) / len(targets)
    return larger_is_better(rows.metric, quality), -error


def _shift(rows: Rows, unseen: Array) -> Array:
    """Returns what is added to outputs, (C,), so that those of unseen training rows have the best F1.

    It is 0 for scores, and for classes unless F1 of two is the main metric. 8 rare rows of 400 had F1 of 83 and 73 on
    two domains with it, 76 and 68 where accuracy chose.
    """
    if rows.kind == "multi_label":
        return -best_thresholds(unseen, rows.targets)
    shift = np.zeros(unseen.shape[1])
    if rows.kind == "class" and rows.metric in ("f1", "macro_f1") and rows.num_classes == 2:
        rare = int(np.bincount(rows.targets.astype(int), minlength=2).argmin())
        margin = (unseen[:, rare] - unseen[:, 1 - rare])[:, None]
        is_rare = rows.targets[:, None] == rare
        shift[rare] = -best_thresholds(margin, is_rare, default=0.0)[0]
    return shift


def fit_temperature(
    kind: LabelType,
    outputs: Array,
    labels: Array,
    bounds: tuple[float, float] = (-6, 2),
    spread: float = np.inf,
) -> float:
    """Returns the T that makes the labels, class indices (N,) or marks (N, C), most likely by outputs / T.

    `bounds` are those of log T, `spread` the standard deviation of its prior, whose mean is 0.
    """
    from scipy.optimize import minimize_scalar
    from scipy.special import log_expit, log_softmax

    def cost(log_t: float) -> float:
        scaled = outputs / np.exp(log_t)
        if kind == "multi_label":
            likelihood = log_expit(np.where(labels == 1, scaled, -scaled)).sum()
        else:
            rows = np.arange(len(labels))
            likelihood = log_softmax(scaled, axis=1)[rows, labels.astype(int)].sum()
        return float(0.5 * (log_t / spread) ** 2 - likelihood)

    return float(np.exp(minimize_scalar(cost, bounds=bounds, method="bounded").x))


def _logits(outputs: Array, marks: Array) -> tuple[float, float]:
    """Returns slope and intercept of the logits of labels by their outputs, (N, C), that make the marks most likely."""
    from sklearn.linear_model import LogisticRegression

    if marks.all():
        return 1.0, 0.0
    fitted = LogisticRegression(C=1e6).fit(outputs.reshape(-1, 1), marks.ravel())
    return max(float(fitted.coef_[0, 0]), 1e-3), float(fitted.intercept_[0])


def best_thresholds(outputs: Array, marks: Array, default: float = 0.5) -> Array:
    """Returns the output above which each label is given, (C,): that of the best F1, the default for a rare label."""
    found = np.full(marks.shape[1], default)
    for column in np.flatnonzero(marks.sum(axis=0) >= FEWEST_MARKS):
        order = np.argsort(-outputs[:, column], kind="stable")
        values, right = outputs[order, column], marks[order, column].cumsum()
        f1 = 2 * right / (np.arange(1, len(order) + 1) + marks[:, column].sum())
        best = int(f1.argmax())
        below = values[best + 1] if best + 1 < len(values) else values[best] - 1
        found[column] = (values[best] + below) / 2
    return found


@dataclass
class Linear(RidgeSystem):
    """A linear model on embeddings.

    Args:
        parts: Names of `Rows.features`. Each part is standardised so that it weighs the same: each column of an
            embedding has the same variance, and the columns of topics keep theirs among each other, since the rare
            ones would add noise. The two texts u, v of a pair are read as |u - v|, u * v and their cosine.
    """

    parts: tuple[str, ...]
    scales: list[tuple[Array, Array]] = field(default_factory=list, init=False, repr=False)

    @classmethod
    def of(cls, embedding: str, model: str = "") -> Self:
        """Returns the system of parts such as `mean+facets+topics`, of a model whose features have its name."""
        prefix = f"{model}/" if model else ""
        return cls(tuple(prefix + part for part in embedding.split("+")))

    def learn_features(self, rows: Rows) -> Array:
        """Returns the standardised features (N, F) of training rows."""
        self.scales = []
        for name, block in self._blocks(rows):
            shift, scale = standardisation(block, together=name.endswith("topics"))
            if name.endswith("cosine"):
                scale = scale / FREE
            self.scales.append((shift, scale))
        return self.features(rows)

    def features(self, rows: Rows) -> Array:
        """Returns the standardised features (N, F)."""
        blocks = zip(self._blocks(rows), self.scales, strict=True)
        return np.hstack([(block - shift) / scale for (_, block), (shift, scale) in blocks])

    def _blocks(self, rows: Rows) -> list[tuple[str, Array]]:
        """Returns each block of columns, (N, F), that is standardised by itself, and its name."""
        blocks = list[tuple[str, Array]]()
        for part in self.parts:
            values = rows.features[part].astype(np.float64)
            if values.ndim == 2:
                blocks.append((part, values))
                continue
            first, second = values[:, 0], values[:, 1]
            blocks.append((part, np.hstack([np.abs(first - second), first * second])))
            blocks.append((f"{part} cosine", cosine(first, second)[:, None]))
        return blocks

    def save(self, folder: Path) -> None:
        """Writes the fitted model: ridge.json and ridge.safetensors."""
        arrays = dict[str, Array]()
        for number, (shift, scale) in enumerate(self.scales):
            arrays |= {f"shift{number}": shift, f"scale{number}": scale}
        self.write(folder, arrays, {"parts": list(self.parts)})

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Returns a model that `save` has written."""

        settings, arrays = read_ridge(folder)
        system = cls(tuple(settings["parts"]))
        system.restore(settings, arrays)
        number = sum(name.startswith("scale") for name in arrays)
        system.scales = [(arrays[f"shift{n}"], arrays[f"scale{n}"]) for n in range(number)]
        return system


def standardisation(features: Array, together: bool = False) -> tuple[Array, Array]:
    """Returns the shift (F,) and scale (F,) that give features (N, F) a total variance of 1.

    Each column gets the same variance, or all are divided by one number if they are to be scaled `together`. Columns
    that hardly vary become 0: MiniLM has some of about 1e-30, whose weights would be 1e30.
    """
    mean, spread = features.mean(axis=0), features.std(axis=0)
    if together:
        total = float(np.sqrt(np.square(spread).sum()))
        return mean, np.full(len(spread), total if total > 0 else np.inf)
    alive = spread > DEAD * spread.max()
    scale = np.where(alive, spread * np.sqrt(max(1, int(alive.sum()))), np.inf)
    return mean, scale


def cosine(first: Array, second: Array) -> Array:
    """Returns the cosine of each pair of rows, (N,)."""
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return np.asarray((first * second).sum(axis=1) / np.maximum(lengths, 1e-9))


@dataclass
class Words(RidgeSystem):
    """A linear model on TF-IDF of words and pairs of words, which needs no encoder."""

    vectorizers: list[Any] = field(default_factory=list, init=False, repr=False)

    def learn_features(self, rows: Rows) -> Any:
        """Returns TF-IDF of each text of the training rows, (N, V) sparse."""
        columns = zip(*rows.texts, strict=True)
        self.vectorizers = []
        for column in columns:
            has_words = any(re.search(r"\w", text) for text in column)
            options = {"max_features": WORDS} if has_words else {"vocabulary": [""]}
            self.vectorizers.append(_vectorizer(**options).fit(column))
        return self.features(rows)

    def features(self, rows: Rows) -> Any:
        """Returns TF-IDF of each text of the rows, (N, V) sparse."""
        from scipy.sparse import csr_matrix, hstack

        columns = zip(*rows.texts, strict=True)
        blocks = [
            vectorizer.transform(column)
            for vectorizer, column in zip(self.vectorizers, columns, strict=True)
        ]
        return csr_matrix(hstack(blocks))

    def save(self, folder: Path) -> None:
        """Writes the fitted model with its words."""
        vocabularies = [list(words.get_feature_names_out()) for words in self.vectorizers]
        idfs = {f"idf{n}": words.idf_ for n, words in enumerate(self.vectorizers)}
        self.write(folder, idfs, {"words": vocabularies})

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Returns a model that `save` has written."""
        settings, arrays = read_ridge(folder)
        system = cls()
        system.restore(settings, arrays)
        for number, words in enumerate(settings["words"]):
            vectorizer = _vectorizer(vocabulary=words)
            vectorizer.idf_ = arrays[f"idf{number}"]
            system.vectorizers.append(vectorizer)
        return system


def _vectorizer(**options: Any) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    pattern = r"(?u)\b\w+\b"
    return TfidfVectorizer(token_pattern=pattern, ngram_range=(1, 2), sublinear_tf=True, **options)


@dataclass
class Majority:
    """The most frequent class, the labels of most rows, or the mean score: what one has without reading."""

    outputs: Array = field(default_factory=lambda: np.zeros(1), init=False)

    def fit(self, rows: Rows) -> Self:
        """Counts the labels."""
        if rows.kind == "class":
            counts = np.bincount(rows.targets.astype(int), minlength=rows.num_classes)
            self.outputs = np.log(np.maximum(counts, 1e-9) / counts.sum())
        else:
            mean = np.atleast_1d(rows.targets.mean(axis=0))
            self.outputs = mean - 0.5 if rows.kind == "multi_label" else mean
        return self

    def predict(self, rows: Rows) -> Array:
        """Returns the same outputs for each row."""
        return np.tile(self.outputs, (len(rows.targets), 1))


@dataclass
class Cosine:
    """The cosine of a pair's embeddings as its score, which no label has changed."""

    part: str

    def fit(self, rows: Rows) -> Self:
        """Learns nothing."""
        return self

    def predict(self, rows: Rows) -> Array:
        """Returns the cosines (N, 1)."""
        values = rows.features[self.part]
        return cosine(values[:, 0], values[:, 1])[:, None]


@dataclass
class Given:
    """Predictions that were made elsewhere, such as by a large language model: outputs (N, C) in `Rows.features`."""

    part: str

    def fit(self, rows: Rows) -> Self:
        """Learns nothing."""
        return self

    def predict(self, rows: Rows) -> Array:
        """Returns the outputs of the rows."""
        return rows.features[self.part]


@dataclass(frozen=True)
class Probe:
    """Linear models on labelled rows, each embedding's on the same draws of training rows."""

    rows: Rows
    splits: Splits

    @property
    def name(self) -> str:
        """The measure, for people."""
        return f"probe ({self.rows.metric} with {self.splits.train_rows} rows)"

    def scores(self, features: Mapping[str, Array]) -> dict[str, Scores]:
        """Returns the scores of each embedding that the parts make."""
        systems = {name: Linear.of(name) for name in available(features)}
        return evaluate(systems, replace(self.rows, features=features), self.splits)

    def difference(self, scores: Scores, reference: Scores) -> Difference:
        """Returns the difference of two embeddings' scores."""
        return compare(scores, reference)
