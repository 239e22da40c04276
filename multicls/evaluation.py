"""The evaluation of systems on labelled rows, and the one interval of the project.

A system has `fit(rows)` and `predict(rows)`. All systems learn from the same training sets: repeated folds over all
rows, stratified and with groups on one side, and halves of the rows. `evaluate` returns one value per system, training
set and row; `compare` the difference of two systems with its interval for new training rows and new rows.
"""

import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import numpy as np

from multicls.errors import UserError, did_you_mean
from multicls.labels import LabelledRows, LabelType
from multicls.measures import (
    LOWER_IS_BETTER,
    METRICS,
    Array,
    in_words,
    predictions_of,
    range_of,
    row_values,
)

REPEATS = 2  # of the folds
FOLDS = 5
HALVES = 20  # training sets of half of the rows, which show what other training rows would change
FEWEST_ROWS = 20
FEW_HALVES = 6  # of a system that takes minutes to fit


@dataclass(frozen=True)
class Rows:
    """Rows rows with what systems read of them.

    Attributes:
        kind: What a label is.
        targets: (N,) class indices or scores, or (N, C) of 0 and 1.
        texts: (N,) texts, or pairs of texts.
        features: Embeddings by part, such as `mean` or `topics`: (N, F), or (N, 2, F) of pairs.
        units: (N,) which rows belong together, such as those of a customer.
        classes: Names of the classes; () for scores.
        metric: The main metric, of `measures.METRICS`.
        places: (N,) where each row stands, for people.
    """

    kind: LabelType
    targets: Array
    texts: Sequence[tuple[str, ...]] = ()
    features: Mapping[str, Array] = field(default_factory=dict)
    units: Array = field(default_factory=lambda: np.zeros(0, dtype=int))
    classes: tuple[str, ...] = ()
    metric: str = ""
    places: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not len(self.units):
            object.__setattr__(self, "units", np.arange(len(self.targets)))
        if not self.metric:
            object.__setattr__(self, "metric", METRICS[self.kind][0])

    def take(self, rows: Array) -> Self:
        """Returns some of the rows, by their indices."""
        return replace(
            self,
            targets=self.targets[rows],
            texts=[self.texts[row] for row in rows] if len(self.texts) else (),
            features={name: values[rows] for name, values in self.features.items()},
            units=self.units[rows],
            places=[self.places[row] for row in rows] if len(self.places) else (),
        )

    def content(self) -> str:
        """Returns a hash (16 hex digits) of texts, labels, units and metric."""
        values = [self.texts, self.targets.tolist(), self.units.tolist(), self.classes, self.metric]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]

    @property
    def num_classes(self) -> int:
        """Columns of the outputs."""
        if self.kind == "score":
            return 1
        if self.kind == "multi_label":
            return int(self.targets.shape[1])
        return max(len(self.classes), int(self.targets.max()) + 1)


def rows_of(table: LabelledRows, source: str) -> Rows:
    """Returns the rows of a file as systems read them; rows of equal texts are a unit.

    Raises:
        UserError: There are fewer than 20 rows or two rows per class, or all labels are alike.
    """
    targets = targets_of(table.kind, table.classes, table.labels)
    total, least = len(targets), max(FEWEST_ROWS, 2 * len(table.classes))
    if total < least:
        what = f"{len(table.classes)} classes need" if least > FEWEST_ROWS else "a probe needs"
        raise UserError(
            f"{source}: {total} labelled rows: {what} {least} or more, better hundreds."
        )
    if len(np.unique(targets, axis=0)) < 2:
        raise UserError(f"{source}: {total} labelled rows: all labels are alike.")
    _, units = np.unique(["\0".join(texts) for texts in table.texts], return_inverse=True)
    return Rows(table.kind, targets, table.texts, units=units, classes=table.classes)


def targets_of(
    kind: LabelType, classes: Sequence[str], labels: Sequence[Any], places: Sequence[str] = ()
) -> Array:
    """Returns scores (N,), class indices (N,), or 0 and 1 (N, C) of labels by `labels.read_label`.

    Raises:
        UserError: A label is none of the classes; the message names its place.
    """
    if kind == "score":
        return np.array(labels, dtype=float)
    marks = np.zeros((len(labels), len(classes)))
    for row, names in enumerate(labels):
        for name in names:
            if name not in classes:
                hint = did_you_mean(name, classes)
                raise UserError(f"{places[row]}: label {name!r} is not in the training rows.{hint}")
            marks[row, classes.index(name)] = 1.0
    return marks if kind == "multi_label" else marks.argmax(axis=1)


class System(Protocol):
    """A way to predict labels, with its settings."""

    def fit(self, rows: Rows) -> Any:
        """Learns from the rows. What it needs for choosing, such as validation rows, it takes from them."""
        ...

    def predict(self, rows: Rows) -> Array:
        """Returns outputs (N, C): of classes the larger the likelier, of several labels above 0, or scores."""
        ...


Learner = Callable[[System, Rows, Array, Array], Array]  # `fit_predict`, or what keeps its outputs


@dataclass(frozen=True)
class Splits:
    """Training sets, the same for all systems.

    Attributes:
        folds: (R, N), the fold of each row in each repeat. A row is scored by the system that learned from all others.
        draws: Pairs of training rows and scored rows, by their indices. Their values show what other training rows
            would change, and without folds are the estimate.
    """

    folds: Array
    draws: tuple[tuple[Array, Array], ...]

    @property
    def training_sets(self) -> list[tuple[Array, Array]]:
        """Training rows and scored rows of each fold of each repeat, then of each draw."""
        every = np.arange(self.folds.shape[1])
        of_folds = [
            (every[fold != part], every[fold == part])
            for fold in self.folds
            for part in range(fold.max() + 1)
        ]
        return [*of_folds, *self.draws]

    @property
    def train_rows(self) -> int:
        """Rows that a system learns from, on average."""
        if len(self.folds):
            return round(self.folds.shape[1] * (1 - 1 / (self.folds.max() + 1)))
        return len(self.draws[0][0])


def fewer(splits: Splits) -> Splits:
    """Returns the first repeat of the folds and the first halves, for systems that take minutes to fit."""
    return Splits(splits.folds[:1], splits.draws[:FEW_HALVES])


def partition(strata: Sequence[Hashable], units: Array, parts: int, seed: Sequence[int]) -> Array:
    """Returns the part of each row, (N,): rows of a unit are together, strata and sizes as even as that allows."""
    members = dict[Any, list[int]]()
    for row in np.random.default_rng(seed).permutation(len(units)).tolist():
        members.setdefault(units[row], []).append(row)
    sizes, of_stratum = [0] * parts, dict[Hashable, list[int]]()
    part_of = np.empty(len(units), dtype=int)
    for rows in sorted(members.values(), key=len, reverse=True):
        own = of_stratum.setdefault(strata[rows[0]], [0] * parts)
        part = min(range(parts), key=lambda part: (own[part], sizes[part]))
        own[part] += len(rows)
        sizes[part] += len(rows)
        part_of[rows] = part
    return part_of


def strata_of(kind: LabelType, targets: Array) -> list[Hashable]:
    """Returns what folds keep in proportion: the class; of several labels the rarest one; a fifth of the scores."""
    if kind == "class":
        return list(targets.tolist())
    if kind == "score":
        return list(np.searchsorted(np.quantile(targets, (0.2, 0.4, 0.6, 0.8)), targets).tolist())
    rarest_first = np.argsort(targets.sum(axis=0), kind="stable")
    return [next((n for n in rarest_first.tolist() if marks[n]), -1) for marks in targets]


def folds(
    rows: Rows, repeats: int = REPEATS, parts: int = FOLDS, halves: int = HALVES, seed: int = 0
) -> Splits:
    """Returns repeated folds over all rows and `halves` training sets of half of the rows, always the same ones.

    Raises:
        UserError: All rows are of one unit.
    """
    strata = strata_of(rows.kind, rows.targets)
    parts = min(parts, len(np.unique(rows.units)))
    if parts < 2:
        raise UserError(
            f"all {len(strata)} rows are of one group or text: nothing is left to score."
        )
    whole = [partition(strata, rows.units, parts, (seed, 5, n)) for n in range(repeats)]
    draws = list[tuple[Array, Array]]()
    for number in range(halves // 2):
        half = partition(strata, rows.units, 2, (seed, 2, number))
        first, second = np.flatnonzero(half == 0), np.flatnonzero(half == 1)
        draws += [(first, second), (second, first)]
    return Splits(np.array(whole, dtype=int).reshape(repeats, len(strata)), tuple(draws))


def random_draws(rows: Rows, train_rows: int, number: int) -> Splits:
    """Returns random training sets of `train_rows` rows, at most half of all; all other rows are scored.

    Those of few rows are no part of those of more rows. A set of one class alone is drawn again.
    """
    total, seed = len(rows.targets), 0
    draws = list[tuple[Array, Array]]()
    while len(draws) < number:
        order, seed = np.random.default_rng([seed, 7]).permutation(total), seed + 1
        train, scored = np.split(order, [min(train_rows, total // 2)])
        if len(np.unique(rows.targets[train], axis=0)) > 1:
            draws.append((np.sort(train), np.sort(scored)))
    return Splits(np.zeros((0, total), dtype=int), tuple(draws))


@dataclass(frozen=True)
class Scores:
    """How well a system does, one value per training set and row.

    Attributes:
        folds: (R, N), or (0, N) if there are no folds.
        draws: (J, N), NaN on the rows of the training set and on rows that it does not score.
        units: (N,), rows of a unit are no independent evidence.
        train_rows: Training rows of a draw that could have been scored; 0 if the training rows are others.
        outputs: (R, N, C), the outputs of the folds.
        metric: The metric, of `measures.METRICS`; "" for another share of 1.
    """

    folds: Array
    draws: Array
    units: Array
    train_rows: float = 0.0
    outputs: Array | None = None
    metric: str = ""

    @property
    def mean(self) -> float:
        """The estimate: the mean over folds, or over draws if there are none."""
        return float(
            self.folds.mean() if len(self.folds) else np.nanmean(self.draws, axis=1).mean()
        )


def fit_predict(system: System, rows: Rows, train: Array, scored: Array) -> Array:
    """Returns the outputs (n, C) of a copy of the system for the scored rows, after it has learned from `train`."""
    outputs = deepcopy(system).fit(rows.take(train)).predict(rows.take(scored))
    return np.asarray(outputs, dtype=np.float64)


def evaluate(
    systems: Mapping[str, System],
    rows: Rows,
    splits: Splits,
    learn: Learner = fit_predict,
) -> dict[str, Scores]:
    """Returns the scores of each system, by its name, in the rows' main metric.

    A row's value (`measures.row_values`) is for the metric over all rows of a repeat, or over a draw's scored rows.

    Args:
        learn: Called for each training set; `fit_predict`, or what reads the outputs of one that is finished.
    """
    found, sets, total = dict[str, Scores](), splits.training_sets, len(rows.targets)
    number = len(sets) - len(splits.draws)  # of folds in all repeats

    def values(outputs: Array, scored: Array) -> Array:
        predicted = predictions_of(rows.kind, outputs)
        return row_values(rows.metric, rows.targets[scored], predicted)

    for name, system in systems.items():
        learned = [learn(system, rows, train, scored) for train, scored in sets]
        outputs = np.empty((len(splits.folds), total, learned[0].shape[1]))
        for n, (_, scored) in enumerate(sets[:number]):
            outputs[n * len(splits.folds) // number, scored] = learned[n]
        draws = np.full((len(splits.draws), total), np.nan)
        for n, (_, scored) in enumerate(splits.draws):
            draws[n, scored] = values(learned[number + n], scored)
        folded = np.array([values(of, np.arange(total)) for of in outputs]).reshape(-1, total)
        size = float(np.mean([len(train) for train, _ in splits.draws] or [0]))
        found[name] = Scores(folded, draws, rows.units, size, outputs, rows.metric)
    return found


@dataclass(frozen=True)
class Difference:
    """The difference of two systems, positive if the first is better, or one system's score, with its 95 % interval."""

    mean: float
    low: float
    high: float
    covers: str = "new training rows and new rows"
    metric: str = ""

    def __str__(self) -> str:
        """Returns it in points: the mean, and the interval if there is one."""
        mean = in_words(self.metric, self.mean, "+")
        if not np.isfinite(self.high):
            return f"{mean} (no interval: fewer than ten documents)"
        lowest, highest = range_of(self.metric)
        ends = np.clip((self.low, self.high), lowest - highest, highest - lowest)
        low, high = (in_words(self.metric, end, "+") for end in ends)
        return f"{mean} ({low} to {high})"

    def score(self) -> str:
        """Returns a score with its interval, without signs."""
        low, high = (in_words(self.metric, end) for end in self.interval)
        return f"{in_words(self.metric, self.mean)} ({low} to {high})"

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of a score's interval, which are values that the metric can have."""
        low, high = np.clip((self.low, self.high), *range_of(self.metric))
        return float(low), float(high)

    @property
    def is_shown(self) -> bool:
        """True if the interval leaves out 0."""
        return self.low > 0 or self.high < 0

    def verdict(self, first: str, second: str) -> str:
        """Returns the difference of two systems in words."""
        return f"{first} against {second}: {verdict(self)}, {self}"


def verdict(change: Difference) -> str:
    """Returns "better" or "worse" if the interval leaves out 0, else "no clear change"."""
    if not change.is_shown:
        return "no clear change"
    return "better" if change.low > 0 else "worse"


def compare(
    first: Scores | Sequence[Scores], second: Scores | Sequence[Scores] | None = None
) -> Difference:
    """Returns the difference of two systems' scores, positive if the first is better, with its 95 % interval.

    Both are of the same training sets and rows. Several scores are those of seeds, or of training sets that the systems
    do not share; their variance counts. Without a second system the result is the first one's score. The variance has
    three parts:

    - what other rows to score would change: that of the units' means;
    - what other training rows would change: that of the draws beyond their rows and rest, times n / (N - n) since draws
      of n rows out of N overlap (Nadeau and Bengio, 2003), and 1 / J if the J draws are the estimate. Folds take the
      estimate of the halves: what training rows change falls about as fast with n as n / N grows;
    - that of several scores.

    The interval is the root of the squares of the three intervals (as in Zou's MOVER).

    With a single training set the interval is for new rows alone. tests/multicls/test_evaluation.py simulates folds,
    tests/finetune/test_report.py training sets that are scored on the same other rows.
    """
    from scipy import stats

    sides = [_as_list(first), _as_list(second) if second is not None else []]
    folded, draws = _change(sides, "folds"), _change(sides, "draws")
    one = sides[0][0]
    of_rows = folded.mean(axis=0) if len(folded) else _mean_of_rows(draws)
    scored = np.isfinite(of_rows)
    mean = float(folded.mean() if len(folded) else np.nanmean(draws, axis=1).mean())
    sums = _unit_sums(of_rows[scored] - of_rows[scored].mean(), one.units[scored])
    number, covers = len(sums), "new rows"
    of_new_rows = float(sums @ sums) * number / max(1, number - 1) / scored.sum() ** 2
    parts = list[tuple[float, int]]()  # variances with their degrees of freedom
    if len(draws) > 1 and np.isfinite(draws).sum(axis=0).max() > 1:
        covers = Difference.covers
        of_draws, noise = _variances_of_draws(draws, one.units)
        if len(folded) or one.train_rows:
            share = one.train_rows / max(1.0, draws.shape[1] - one.train_rows)
            share += 0 if len(folded) else 1 / len(draws)
            parts.append((max(0.0, of_draws - noise) * share, len(draws) - 1))
        else:  # the rest, which is in both, counts here
            of_new_rows = max(0.0, of_new_rows - noise / len(draws))
            of_means = float(np.nanmean(draws, axis=1).var(ddof=1))
            parts.append((of_means / len(draws), len(draws) - 1))
    means = [np.array([scores.mean for scores in side]) for side in sides if len(side) > 1]
    if means:
        covers = Difference.covers
        shares = [float(of_side.var(ddof=1)) / len(of_side) for of_side in means]
        squares = sum(v**2 / (len(of) - 1) for v, of in zip(shares, means, strict=True))
        parts.append((sum(shares), int(sum(shares) ** 2 / squares) if squares else 1))
    parts.append((of_new_rows, number - 1))
    if sum(variance for variance, _ in parts) <= 0:
        # No row differs: at most about three in N do (Hanley and Lippman-Hand, 1983).
        parts = [(2.25 / number**2, number - 1)]
    widths = [np.sqrt(v) * stats.t.ppf(0.975, max(1, freedom)) for v, freedom in parts]
    half = float(np.linalg.norm(widths))
    sign = -1 if second is not None and one.metric in LOWER_IS_BETTER else 1
    return Difference(sign * mean, sign * mean - half, sign * mean + half, covers, one.metric)


def average(changes: Sequence[Difference]) -> Difference:
    """Returns the mean of independent differences, with its interval."""
    mean = float(np.mean([change.mean for change in changes]))
    half = float(np.linalg.norm([change.high - change.mean for change in changes])) / len(changes)
    return Difference(mean, mean - half, mean + half)


def _as_list(scores: Scores | Sequence[Scores]) -> list[Scores]:
    return [scores] if isinstance(scores, Scores) else list(scores)


def _change(sides: Sequence[Sequence[Scores]], name: str) -> Array:
    """Returns the difference of both sides' values, each the mean of its seeds, (J, N).

    If one side has fewer training sets, they are the first ones of the other's.
    """
    means = [np.mean([getattr(of, name) for of in side], axis=0) for side in sides if side]
    if len(means) == 1:
        return np.asarray(means[0])
    shared = min(map(len, means))
    return np.asarray(means[0][:shared] - means[1][:shared])


def _mean_of_rows(draws: Array) -> Array:
    """Returns the mean of each row over the draws that score it, (N,); NaN if none does."""
    number = np.isfinite(draws).sum(axis=0)
    return np.where(number > 0, np.nansum(draws, axis=0) / np.maximum(number, 1), np.nan)


def _unit_sums(values: Array, units: Array) -> Array:
    _, unit_of = np.unique(units, return_inverse=True)
    return np.bincount(unit_of, values)


def _variances_of_draws(draws: Array, units: Array) -> tuple[float, float]:
    """Returns the variance of the draws' means without the parts of their rows, and how much of it is their rest.

    A value is taken as the sum of a part of its draw, a part of its row and a rest, estimated by units.
    """
    scored = np.isfinite(draws)
    rest = np.where(scored, draws - _mean_of_rows(draws), 0.0)
    sizes = scored.sum(axis=1)
    of_draws = rest.sum(axis=1) / sizes
    noise = 0.0
    for row, is_scored, mean, size in zip(rest, scored, of_draws, sizes, strict=True):
        sums = _unit_sums(np.where(is_scored, row - mean, 0.0), units)
        noise += float(sums @ sums) / size**2 / len(draws)
    times = scored.sum(axis=0)
    lost = 1 - 1 / max(1.5, float(times[times > 0].mean()))  # of each row's own mean
    return float(of_draws.var(ddof=1)) / lost, noise / lost


def learning_curve(
    system: System,
    rows: Rows,
    splits: Splits,
    sizes: Iterable[int],
    learn: Learner = fit_predict,
) -> dict[int, float]:
    """Returns a system's mean score by the number of training rows, on the rows that each draw scores.

    The training rows of a size are a part of each draw's, and those of a smaller size a part of these.
    """
    curve = dict[int, float]()
    for size in sizes:
        parts = []
        for number, (train, scored) in enumerate(splits.draws):
            order = np.random.default_rng([number, 11]).permutation(train)[:size]
            if len(order) == size and len(np.unique(rows.targets[order], axis=0)) > 1:
                parts.append((np.sort(order), scored))
        if parts:
            only = Splits(splits.folds[:0], tuple(parts))
            curve[size] = evaluate({"": system}, rows, only, learn)[""].mean
    return curve
