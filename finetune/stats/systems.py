"""Statistics of a results folder: groups of seeds, the chosen learning rate, benchmark averages, paired tests."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.tasks import TASKS, task_of
from finetune.store.results import read_predictions
from multicls.errors import UserError

Record = Mapping[str, Any]
Seeds = tuple[Any, Any, Any]  # of pretraining, of the draw of train rows, of the run
Array = np.ndarray[Any, np.dtype[Any]]
PLACE = ("task", "train_size", "head", "model_name", "selection")  # of a planned cell
VARYING = ("seed", "data_seed", "model", "data", "ensemble")  # parts of an identity that an average may run over
# Keys with a column of their own.
COLUMNS = {"task", "train_size", "head", "pooling", "model_label", "selection", "joint", "learning_rate"}
MAIN: tuple[str, ...] = ()  # the score that chooses the best evaluation
_PAIR = ("acc", "f1")

# Metrics averaged for a task's number, by benchmark. Paper: Multi-CLS BERT, section 3.1, whose two averages leave WNLI
# and ReCoRD out. Official: those of the leaderboards (Wang et al., 2019a, b).
BENCHMARKS: dict[str, dict[str, tuple[str, ...]]] = {
    "GLUE, paper's 8": dict.fromkeys(("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"), MAIN),
    "GLUE, official 9": {
        "cola": MAIN, "sst2": MAIN, "mrpc": _PAIR, "stsb": ("pearson", "spearman"), "qqp": _PAIR,
        "mnli": ("acc_m", "acc_mm"), "qnli": MAIN, "rte": MAIN, "wnli": MAIN,
    },
    "SuperGLUE, paper's 7": dict.fromkeys(("boolq", "cb", "copa", "multirc", "rte_superglue", "wic", "wsc"), MAIN),
    "SuperGLUE, official 8": dict.fromkeys(
        ("boolq", "cb", "copa", "multirc", "record", "rte_superglue", "wic", "wsc"), MAIN
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Finished runs that differ in nothing but their seeds.

    Attributes:
        key: what they share, flat: task, train_size, head, model_label, selection, learning_rate and every setting.
        runs: their lines of results.
    """

    key: dict[str, Any]
    runs: list[Record]

    @property
    def seeds(self) -> list[Seeds]:
        """Seeds of pretraining, of the draw of train rows and of the run, for every run."""
        return [
            (run.get("pretraining_seed"), run["identity"].get("data_seed"), run["identity"]["seed"])
            for run in self.runs
        ]

    @property
    def scores(self) -> Array:
        """(runs,) main scores on dev in percent."""
        return 100 * np.array([run["score"] for run in self.runs], dtype=float)

    @property
    def choosing_scores(self) -> Array:
        """(runs,) main scores in percent on the rows that chose the best evaluations: dev, or held out of train."""
        chose = [run["holdout_scores"][run["metric"]] if "holdout_scores" in run else run["score"] for run in self.runs]
        return 100 * np.array(chose, dtype=float)


def learning_rate(group: Group) -> float:
    """Its learning rate, 0 where there is none (`probe`)."""
    return float(group.key.get("learning_rate") or 0.0)


@dataclass(frozen=True)
class SelectedSystem:
    """A system on a task at a train size: the learning rate with the best mean, and those it was chosen from.

    Attributes:
        system: what is compared: head, model, selection, and the settings in which systems differ.
        chosen: the runs at the chosen learning rate.
        candidates: learning rate -> number of runs and the mean of their `choosing_scores`; a planned one without runs
            has (0, nan).
        expected: number of runs that every learning rate should have.
    """

    system: tuple[str, ...]
    chosen: Group
    candidates: dict[float, tuple[int, float]]
    expected: int

    @property
    def place(self) -> tuple[str, str]:
        """Task and train size."""
        return self.chosen.key["task"], str(self.chosen.key["train_size"])

    @property
    def problems(self) -> list[str]:
        """What is incomplete, in words; empty if nothing is."""
        short = {rate: count for rate, (count, _) in self.candidates.items() if count < self.expected}
        return [f"lr {rate:g} incomplete: {count} of {self.expected} runs" for rate, count in short.items()]


def summary(values: Sequence[float] | Array) -> tuple[float, float, float]:
    """Mean, standard error of the mean (nan for one value), median."""
    error = float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return float(np.mean(values)), error, float(np.median(values))


def group_runs(records: Iterable[Record]) -> list[Group]:
    """Groups of runs by everything but the seeds, ordered by task, size, head and model.

    Models of one name that differ by their pretraining seed, and draws of train rows, belong together; where one such
    seed stands for two different models or data sets, they are kept apart by their fingerprint.
    """
    records = list(records)
    labels: dict[str, str] = {}
    keys = [_key(record, labels) for record in records]
    for part, seed in (("data", "data_seed"), ("model", "pretraining_seed")):
        prints: dict[str, dict[Any, set[str]]] = {}
        for key, record in zip(keys, records, strict=True):
            number = record.get(seed, record["identity"].get(seed))
            prints.setdefault(_text(key), {}).setdefault(number, set()).add(record["identity"].get(part, ""))
        for key, record, text in zip(keys, records, [_text(key) for key in keys], strict=True):
            if any(len(found) > 1 for found in prints[text].values()):
                key[part] = record["identity"].get(part, "")
    groups: dict[str, Group] = {}
    for key, record in zip(keys, records, strict=True):
        groups.setdefault(_text(key), Group(key, [])).runs.append(record)
    return sorted(groups.values(), key=_order)


def _key(record: Record, labels: dict[str, str]) -> dict[str, Any]:
    identity = dict(record["identity"])
    train, options, fingerprint = identity.pop("train"), identity.pop("options", None) or {}, identity["model"]
    key = {name: value for name, value in identity.items() if name not in VARYING} | dict(train)
    key |= {f"{identity['head']}.{name}": value for name, value in options.items()}
    pooling, ensemble = identity.get("pooling", "cls"), identity.get("ensemble")
    key["joint"] = ",".join(sorted([identity["task"], *identity["joint"]])) if identity.get("joint") else ""
    key["head"] += f"/{pooling}" if pooling != "cls" else ""
    key["head"] += f" of {key['joint']}" if key["joint"] else ""
    key["head"] += f" x{len(ensemble)}" if ensemble else ""
    unnamed = labels.setdefault(fingerprint, f"{record['model']} ({fingerprint[:6]})")
    return key | {"model_label": record.get("model_name") or unnamed}


def differing(groups: Sequence[Group]) -> list[str]:
    """Settings in which comparable groups differ, but for those with a column of their own.

    Comparable: of one task, train size and selection, trained alone or with the same tasks; elsewhere the number of
    steps differs by itself.
    """
    found: set[str] = set()
    first: dict[str, dict[str, Any]] = {}
    for group in groups:
        comparable = [group.key[name] for name in ("task", "train_size", "selection", "joint")]
        other = first.setdefault(json.dumps(comparable), group.key)
        found |= {name for name in group.key.keys() | other.keys() if group.key.get(name) != other.get(name)}
    # A head's options say nothing about another head: they count where runs of that head differ.
    options = {name for name in found if "." in name}
    values = {name: {str(group.key[name]) for group in groups if name in group.key} for name in options}
    return sorted(found - COLUMNS - {name for name in options if len(values[name]) == 1})


def choose_learning_rates(groups: Sequence[Group], planned: Iterable[Record] = ()) -> list[SelectedSystem]:
    """For each task, size and system the learning rate with the best mean (Multi-CLS BERT, section 3.1).

    The rows that chose each run's best evaluation choose here, too: dev, or with `selection` holdout those held out. A
    learning rate with fewer runs than another is chosen only if no complete one is there; `problems` tells.

    Args:
        planned: cells of grids (`finetune.grid`), so that runs which nobody has finished yet are missed, too.
    """
    names = differing(groups)
    choices: dict[tuple[Any, ...], list[Group]] = {}
    for group in groups:
        system = (group.key["head"], group.key["model_label"], group.key["selection"])
        system += tuple(f"{name} {group.key[name]}" for name in names if name in group.key)
        choices.setdefault((group.key["task"], str(group.key["train_size"]), system), []).append(group)
    return [_choose(system, found, planned) for (_, _, system), found in choices.items()]


def never_run(choices: Iterable[SelectedSystem], planned: Iterable[Record]) -> list[str]:
    """Planned tasks, sizes and systems of which no run has finished."""
    there = {", ".join((*choice.place, *choice.system[:3])) for choice in choices}
    wanted = dict.fromkeys(", ".join(str(cell[name]) for name in PLACE) for cell in planned)
    return [place for place in wanted if place not in there]


def _choose(system: tuple[str, ...], groups: list[Group], planned: Iterable[Record]) -> SelectedSystem:
    key = groups[0].key
    place = (key["task"], str(key["train_size"]), *system[:3])
    cells = [cell for cell in planned if tuple(str(cell[name]) for name in PLACE) == place]
    seeds = {seed for group in groups for seed in group.seeds}
    seeds |= {(cell["pretraining_seed"], cell["data_seed"], cell["seed"]) for cell in cells}
    candidates = {float(cell["learning_rate"]): (0, math.nan) for cell in cells}
    candidates |= {learning_rate(g): (len(set(g.seeds)), float(g.choosing_scores.mean())) for g in groups}
    best = max(groups, key=lambda group: (len(set(group.seeds)) == len(seeds), group.choosing_scores.mean()))
    return SelectedSystem(system, best, dict(sorted(candidates.items())), len(seeds))


@dataclass(frozen=True)
class Average:
    """A benchmark's average of one system at one train size, in percent.

    Attributes:
        value: nan if a task is missing.
        error: standard error over seeds, of the averages of each seed; nan where the tasks have different seeds.
        missing: tasks without a number.
        partial: tasks whose runs are incomplete.
        tasks: how many tasks the average is over.
    """

    value: float
    error: float
    missing: list[str]
    partial: list[str]
    tasks: int

    def __str__(self) -> str:
        if self.missing:
            return f"incomplete: {self.tasks - len(self.missing)} of {self.tasks} tasks"
        error = "" if math.isnan(self.error) else f" ± {self.error:.2f}"
        return f"{self.value:.2f}{error}" + (f" (runs missing: {', '.join(self.partial)})" if self.partial else "")


def benchmark_average(choices: Iterable[SelectedSystem], benchmark: str) -> Average:
    """The average over the tasks of `BENCHMARKS[benchmark]` of choices of one system and train size."""
    here = {choice.chosen.key["task"]: choice for choice in choices}
    tasks = BENCHMARKS[benchmark]
    numbers: dict[str, dict[Seeds, float]] = {}
    for task, names in tasks.items():
        if task in here:
            runs = here[task].chosen
            values = [_number(run, names) for run in runs.runs]
            if not any(math.isnan(value) for value in values):
                numbers[task] = dict(zip(runs.seeds, values, strict=True))
    missing = [task for task in tasks if task not in numbers]
    if missing:
        return Average(math.nan, math.nan, missing, [], len(tasks))
    partial = [task for task in tasks if len(numbers[task]) < here[task].expected]
    seeds = set.intersection(*(set(values) for values in numbers.values()))
    complete = all(set(values) == seeds for values in numbers.values())
    error = (
        summary([float(np.mean([v[seed] for v in numbers.values()])) for seed in seeds])[1] if complete else math.nan
    )
    return Average(float(np.mean([np.mean([*v.values()]) for v in numbers.values()])), error, [], partial, len(tasks))


def _number(run: Record, names: tuple[str, ...]) -> float:
    if not names:
        return 100 * float(run["score"])
    return 100 * float(np.mean([run["scores"].get(name, math.nan) for name in names]))


@dataclass(frozen=True)
class PairedTest:
    """A paired test of two systems.

    Attributes:
        difference: mean of A minus B in points.
        low: lower end of the 95 % confidence interval, nan where there is none.
        high: upper end.
        p: two-sided p-value.
        pairs: number of pairs: examples, or seeds.
    """

    difference: float
    low: float
    high: float
    p: float
    pairs: int


def pair_up(a: Group, b: Group) -> list[tuple[list[Record], list[Record]]]:
    """Runs of the two groups with the same seeds; where their pretraining seeds differ, those of each other seed.

    Raises:
        UserError: they share no seed.
    """
    start = 0 if set(a.seeds) & set(b.seeds) else 1  # 1: the pretraining seed is that of different pretrainings
    sides: list[dict[Any, list[Record]]] = [{}, {}]
    for side, group in zip(sides, (a, b), strict=True):
        for seeds, run in zip(group.seeds, group.runs, strict=True):
            side.setdefault(seeds[start:], []).append(run)
    shared = [seeds for seeds in sides[0] if seeds in sides[1]]
    if not shared:
        raise UserError(f"{a.key['task']}: the two systems share no seed, so their runs cannot be paired.")
    return [(sides[0][seeds], sides[1][seeds]) for seeds in shared]


def sign_flip_test(a: Sequence[float], b: Sequence[float]) -> PairedTest:
    """Permutation test of paired scores (seeds, or tasks): each pair may be exchanged; exact up to 13 pairs.

    With n pairs no p-value is below 2 / 2^n: four seeds alone never show less than 0.125.
    """
    from scipy.stats import permutation_test

    if len(a) < 2:
        return PairedTest(float(np.mean(a) - np.mean(b)), math.nan, math.nan, 1.0, len(a))

    def mean_difference(x: Array, y: Array, axis: int) -> Array:
        return np.asarray(np.mean(x - y, axis=axis))

    result = permutation_test(
        (np.asarray(a, float), np.asarray(b, float)), mean_difference, permutation_type="samples", rng=0
    )
    return PairedTest(float(result.statistic), math.nan, math.nan, float(result.pvalue), len(a))


def bootstrap_test(
    folder: str | Path, pairs: Sequence[tuple[list[Record], list[Record]]], resamples: int = 1000
) -> PairedTest:
    """Paired bootstrap over the examples of dev of the main metric, averaged over the pairs of runs.

    The same examples are drawn for both systems and all runs. Rows that are judged together (the answers of a MultiRC
    question) are drawn together. p = 2 min(share of resamples with A <= B, with A >= B), at least 2 / (resamples + 1).

    Raises:
        UserError: predictions are missing, or are of different examples.
    """
    from scipy.stats import bootstrap

    sides = [[read_predictions(folder, run["run_id"]) for pair in pairs for run in pair[side]] for side in (0, 1)]
    units = _units(sides[0][0], sides[0] + sides[1], pairs[0][0][0]["identity"]["task"])
    scorers = [[scorer(pairs[0][0][0], predictions) for predictions in side] for side in sides]

    def difference(drawn: Array) -> float:
        rows = np.concatenate([units[unit] for unit in drawn.astype(int)])
        copies = np.repeat(np.arange(len(drawn)), [len(units[unit]) for unit in drawn.astype(int)])
        a, b = (float(np.mean([score(rows, copies) for score in side])) for side in scorers)
        return 100 * (a - b)

    everything = np.arange(len(units))
    result = bootstrap((everything,), difference, n_resamples=resamples, vectorized=False, method="percentile", rng=0)
    draws, (low, high) = result.bootstrap_distribution, result.confidence_interval
    p = 2 * (1 + min((draws <= 0).sum(), (draws >= 0).sum())) / (resamples + 1)
    return PairedTest(difference(everything), float(low), float(high), min(1.0, float(p)), len(units))


def scorer(run: Record, predictions: Mapping[str, Array]) -> Callable[[Array, Array], float]:
    """A function of rows, and of the number of the draw each belongs to, that gives the run's main metric on them."""
    from finetune.data import metrics

    task, labels = task_of(run), predictions["labels"]
    outputs = predictions["logits"] if "logits" in predictions else predictions["scores"][:, None]
    names = run["metric"].removeprefix("mean(").removesuffix(")").split(",")
    if set(names) <= set(FROM_COUNTS):  # a thousand times as quick as by scikit-learn
        classes = outputs.shape[1]
        cell = labels.astype(int) * classes + outputs.argmax(axis=1)

        def from_counts(rows: Array, copies: Array) -> float:
            counts = np.bincount(cell[rows], minlength=classes**2).reshape(classes, classes).astype(float)
            return float(np.mean([FROM_COUNTS[name](counts) for name in names]))

        return from_counts

    def score(rows: Array, copies: Array) -> float:
        groups, answers = predictions["groups"], predictions.get("answers")
        return metrics.score(
            task, labels[rows], outputs[rows],
            groups=[f"{copy} {groups[row]}" for copy, row in zip(copies, rows, strict=True)],
            answers=() if answers is None else answers[rows].tolist(),
        )[run["metric"]]  # fmt: skip

    return score


def _f1(counts: Array) -> Array:
    """(C,) F1 of each class, 0 where it is neither labelled nor predicted."""
    total = counts.sum(axis=0) + counts.sum(axis=1)
    return np.asarray(2 * counts.diagonal() / np.maximum(total, 1))


def _macro_f1(counts: Array) -> float:
    return float(_f1(counts)[counts.sum(axis=0) + counts.sum(axis=1) > 0].mean())


def _matthews(counts: Array) -> float:
    total, labelled, predicted = counts.sum(), counts.sum(axis=1), counts.sum(axis=0)
    scale = math.sqrt((total**2 - labelled @ labelled) * (total**2 - predicted @ predicted))
    return float((counts.trace() * total - labelled @ predicted) / scale) if scale else 0.0


# The metrics that are functions of the confusion matrix (label, prediction).
FROM_COUNTS: dict[str, Callable[[Array], float]] = {
    "acc": lambda counts: float(counts.trace() / counts.sum()),
    "f1": lambda counts: float(_f1(counts)[1]),
    "macro_f1": _macro_f1,
    "matthews": _matthews,
}


def _units(first: Mapping[str, Array], others: Sequence[Mapping[str, Array]], task: str) -> list[Array]:
    """Rows that are drawn together: those of one group, or every row by itself."""
    if any(not np.array_equal(first["ids"], other["ids"]) for other in others):
        raise UserError(f"{task}: the two systems were evaluated on different examples; they cannot be compared.")
    groups = first.get("groups")
    if groups is None or not any(groups.tolist()):
        return [np.array([row]) for row in range(len(first["ids"]))]
    _, members = np.unique(groups, return_inverse=True)
    return [np.flatnonzero(members == unit) for unit in range(members.max() + 1)]


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _order(group: Group) -> tuple[int, float, str, str, str]:
    """Tasks in the order of their table, then sizes ascending, then heads and selections."""
    task, size = group.key["task"], group.key["train_size"]
    place = list(TASKS).index(task) if task in TASKS else len(TASKS)
    return (
        place,
        math.inf if size == "full" else float(size),
        group.key["head"],
        group.key["selection"],
        _text(group.key),
    )
