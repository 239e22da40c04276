"""Measures frozen embeddings on labelled rows: a linear model on few rows, over many draws of these rows.

It costs one forward pass over the rows, and linear algebra. Two embeddings are compared draw by draw and row by row, so
that it sees differences of one or two points where fine-tuning on a few subsets sees none below ten.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from multicls.errors import UserError
from multicls.labels import LabelledRows, LabelType

Array = np.ndarray[Any, np.dtype[Any]]
TRAIN_ROWS = 100
DRAWS = 20
MEASURES: dict[LabelType, str] = {
    "class": "accuracy",
    "score": "R2",
    "multi_label": "label ranking average precision",
}
# Embeddings that are probed; `sum` is for similarities.
VIEWS = ("mean", "cls", "facets", "mean_topics", "facets_topics")
BATCH = 32  # texts of a forward pass
SCALES = np.logspace(-2, 2, 9)  # of the ridge penalty, in variances of all features together
DEAD = 1e-4  # a feature whose spread is a smaller part of the largest one is none
NO_TOPICS = slice(0, 0)


def views_of(outputs: Any, attention_mask: Any, num_facets: int) -> dict[str, Any]:
    """Returns the embeddings of a batch by name, from a model's output.

    Returns:
        `mean`: (B, D), over the tokens of the text, [CLS] and [SEP], without facets; `cls`: (B, D), the last hidden
        state of [CLS]; with facets also `facets`: (B, K * D), all concatenated, and `sum`: (B, D); with topics
        also `mean_topics`: (B, D + T), and `facets_topics`: (B, K * D + T): the mean or the facets, divided by their
        length, and the topics.
    """
    import torch

    mask = attention_mask[..., None].clone()
    mask[:, 1 : 1 + num_facets] = 0
    hidden = outputs.last_hidden_state.float()
    views = {"mean": (hidden * mask).sum(1) / mask.sum(1), "cls": hidden[:, 0]}
    if num_facets:
        facets = outputs.facet_embeddings.float()
        views |= {"facets": facets.flatten(1), "sum": facets.sum(1)}
    if (topics := getattr(outputs, "topics", None)) is not None:
        for name in [name for name in ("mean", "facets") if name in views]:
            unit = torch.nn.functional.normalize(views[name], dim=1)
            views[f"{name}_topics"] = torch.cat([unit, topics.float()], dim=1)
    return views


def embed(
    encode: Callable[..., Any],
    tokenizer: Any,
    texts: Sequence[str | tuple[str, ...]],
    *,
    max_length: int,
    num_facets: int = 0,
    device: Any = "cpu",
    topics: Any = None,
    rank: int = 0,
    ranks: int = 1,
) -> dict[str, Array]:
    """Returns the embeddings of texts, or of pairs of texts, by name, (N, F), in evaluation mode. See `views_of`.

    A batch holds the same texts, and so gives the same numbers, for any number of ranks. All ranks must call it: each
    embeds every `ranks`-th batch, and all make the same number of passes, as ZeRO-3 needs.

    Args:
        encode: Called with the inputs of a batch: a model, or a DeepSpeed engine's forward.
        topics: The `TopicTable` of a model that has none itself.
    """
    import torch

    pairs = [text if isinstance(text, tuple) else (text,) for text in texts]
    order = sorted(range(len(pairs)), key=lambda row: -sum(map(len, pairs[row])))
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    found: dict[str, Any] = {}
    for first in range(0, len(batches), ranks):
        is_mine = first + rank < len(batches)
        rows = batches[first + rank if is_mine else first]
        columns = [list(column) for column in zip(*(pairs[row] for row in rows), strict=True)]
        options = {"max_length": max_length, "truncation": True, "padding": True}
        inputs = tokenizer(*columns, **options, return_tensors="pt").to(device)
        with torch.no_grad():
            outputs = encode(**inputs)
            if topics is not None:
                outputs.topics = topics(inputs["input_ids"], inputs["attention_mask"])
            views = views_of(outputs, inputs["attention_mask"], num_facets)
        for name, values in views.items():
            if name not in found:
                found[name] = torch.zeros(len(pairs), values.shape[1], device=device)
            if is_mine:
                found[name][rows] = values
    if ranks > 1:
        for table in found.values():
            torch.distributed.all_reduce(table)  # each row has one rank's values, and zeros
    return {name: table.cpu().numpy() for name, table in found.items()}


@dataclass(frozen=True)
class Difference:
    """A mean, or the difference of two, with its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        """Returns it in points: the mean, and the interval if there is one."""
        if not np.isfinite(self.high):
            return f"{100 * self.mean:+.1f} (no interval: fewer than ten documents)"
        return f"{100 * self.mean:+.1f} ({100 * self.low:+.1f} to {100 * self.high:+.1f})"


def interval(values: Array, reference: Array) -> Difference:
    """Returns the mean difference of two embeddings' `Draws.values`, with its 95 % interval.

    The interval is for new training rows and new scored rows of the same kind. Draws of one set of N rows overlap, so
    their spread alone is far too small (Nadeau and Bengio, 2003). A value is taken as the sum of a part of its draw, a
    part of its row and a rest. The variance of the rows' means, divided by N, is what other rows to score would change;
    the variance of the draws' part, times 1 / J + n / (N - n), what other training rows would: J draws of n rows of N
    share rows. tests/multicls/test_probe.py measures the coverage.
    """
    from scipy import stats

    change = values - reference
    scored = ~np.isnan(change)
    draws, rows = change.shape
    train = float((~scored).sum(axis=1).mean())
    of_rows = np.nanmean(change[:, scored.any(axis=0)], axis=0)
    of_draws = np.nanmean(change, axis=1)
    rest = change[:, scored.any(axis=0)] - of_rows - of_draws[:, None] + of_draws.mean()
    noise = np.nanvar(rest) + of_rows.var() * train / rows  # of a draw's mean, times its rows
    variance = of_rows.var(ddof=1) / len(of_rows)
    variance += max(0.0, of_draws.var(ddof=1) - noise / (rows - train)) * (
        1 / draws + train / (rows - train)
    )
    mean = float(of_draws.mean())
    half = float(stats.t.ppf(0.975, draws - 1)) * float(np.sqrt(variance))
    return Difference(mean, mean - half, mean + half)


def values_of(
    measure: Any, views: Mapping[str, Array], names: Iterable[str] = VIEWS
) -> dict[str, Array]:
    """Returns the values of some of the embeddings that `embed` returns, by `Draws` or another measure."""
    values = dict[str, Array]()
    for name in [name for name in names if name in views]:
        without, _, topics = name.partition("_")
        columns = slice(views[without].shape[1], None) if topics else NO_TOPICS
        values[name] = measure.values(views[name], columns)
    return values


def standardisation(features: Array, topics: slice = NO_TOPICS) -> tuple[Array, Array]:
    """Returns the shift (F,) and scale (F,), in float64, of features (N, F) before a linear model reads them.

    Each feature gets a variance of 1. All columns of `topics` are divided by one number, so that they weigh as much as
    the other features together; each with a variance of 1, the rare ones would add noise. Features that hardly vary
    become 0: MiniLM has some of about 1e-30, whose weights would be 1e30.
    """
    mean, spread = features.mean(axis=0, dtype=np.float64), features.std(axis=0, dtype=np.float64)
    scale = np.where(spread > DEAD * spread.max(), spread, np.inf)
    others = len(spread) - len(spread[topics])
    together = np.sqrt(np.square(spread[topics]).sum() / max(1, others))
    scale[topics] = together if together > 0 else np.inf
    return mean, scale


@dataclass(frozen=True)
class Draws:
    """The rows that each draw fits and scores, the same for all embeddings that are compared.

    Attributes:
        kind: What a label is.
        targets: (N,) class indices or scores, or (N, C) of 0 and 1.
        train: A draw's training rows; all others are scored.
    """

    kind: LabelType
    targets: Array
    train: tuple[Array, ...]

    @property
    def train_rows(self) -> int:
        """Training rows of a draw."""
        return len(self.train[0])

    @property
    def name(self) -> str:
        """The measure, for people."""
        return f"probe ({MEASURES[self.kind]} with {self.train_rows} rows)"

    def values(self, features: Array, topics: slice = NO_TOPICS) -> Array:
        """Returns how well each draw's linear model does on each row, (J, N); NaN on the draw's training rows.

        A row's value is 1 or 0 for a class; 1 - squared error / variance for a score, whose mean is R2; and for several
        labels the row's label ranking average precision. The mean of a draw's values is its score. The model is a ridge
        regression after `standardisation`, with a penalty that leave-one-out picks.
        """
        from sklearn.linear_model import RidgeClassifierCV, RidgeCV
        from sklearn.metrics import label_ranking_average_precision_score

        ridge = RidgeClassifierCV if self.kind == "class" else RidgeCV
        values = np.full((len(self.train), len(features)), np.nan)
        targets = self.targets
        for number, train in enumerate(self.train):
            rest = np.setdiff1d(np.arange(len(features)), train)
            mean, scale = standardisation(features[train], topics)
            scaled = (features - mean) / scale
            penalties = SCALES * max(DEAD, scaled[train].var(axis=0).sum())
            predicted = ridge(penalties).fit(scaled[train], targets[train]).predict(scaled[rest])
            if self.kind == "class":
                values[number, rest] = predicted == targets[rest]
            elif self.kind == "score":
                error = np.square(predicted - targets[rest])
                values[number, rest] = 1 - error / targets.var()
            else:
                pairs = zip(targets[rest], predicted, strict=True)
                values[number, rest] = [
                    label_ranking_average_precision_score(t[None], p[None]) for t, p in pairs
                ]
        return values

    difference = staticmethod(interval)


def targets_of(kind: LabelType, labels: Sequence[Any], classes: Sequence[str]) -> Array:
    """Returns the labels of `multicls.labels.read_label` as the targets of `Draws`."""
    if kind == "score":
        return np.array(labels, dtype=float)
    if kind == "class":
        number = {name: index for index, name in enumerate(classes)}
        return np.array([number[name] for (name,) in labels])
    return np.array([[float(name in names) for name in classes] for names in labels])


def draws_of(rows: LabelledRows, source: str) -> Draws:
    """Returns the draws of a file's rows; those of `draw_rows` by default. Errors are its, with the file's name."""
    try:
        return draw_rows(rows.kind, targets_of(rows.kind, rows.labels, rows.classes))
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def draw_rows(
    kind: LabelType, targets: Array, train_rows: int = TRAIN_ROWS, draws: int = DRAWS
) -> Draws:
    """Draws training rows at random, the same ones each time.

    Args:
        train_rows: Rows of a draw. Half of the rows are drawn where there are fewer than twice as many.

    Raises:
        UserError: There are fewer than 20 rows or two rows a class, or all labels are alike.
    """
    total = len(targets)
    classes = targets.shape[1] if kind == "multi_label" else len(np.unique(targets))
    least = max(20, 2 * classes if kind != "score" else 0)
    if total < least:
        what = f"{classes} classes need" if least > 20 else "a probe needs"
        raise UserError(f"{total} labelled rows: {what} {least} or more, better some hundred.")
    if len(np.unique(targets, axis=0)) < 2:
        raise UserError(f"{total} labelled rows: all labels are alike.")
    chosen: list[Array] = []
    seed = 0
    while len(chosen) < draws:
        order, seed = np.random.default_rng([seed, 7]).permutation(total), seed + 1
        rows = order[: min(train_rows, total // 2)]
        if kind != "class" or len(np.unique(targets[rows])) > 1:
            chosen.append(np.sort(rows))
    return Draws(kind, targets, tuple(chosen))
