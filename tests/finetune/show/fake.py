"""Results as `finetune.stats.systems` gives them, of invented scores and predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from finetune.data.tasks import find_task
from finetune.stats.estimates import Estimate, estimate

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class System:
    name: str
    model_name: str = "k5"
    label: str = "cls"
    selection: str = "dev"
    mode: str = ""


@dataclass(frozen=True)
class Candidate:
    values: dict[str, Any]
    finished: int
    planned: int
    score: float
    chosen: bool

    @property
    def text(self) -> str:
        return ", ".join(f"{name.split('.')[-1]} {value}" for name, value in self.values.items())


@dataclass
class SystemResult:
    system: System
    task: str
    train_size: str
    metric: str
    records: list[dict[str, Any]]
    candidates: list[Candidate]
    planned: int
    estimate: Estimate
    constant: float | None
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    arrays: list[Mapping[str, Array]] = field(default_factory=list)

    @property
    def frame(self) -> pd.DataFrame:
        return frame_of(self.records)

    def predictions(self) -> list[Mapping[str, Array]]:
        return self.arrays


@dataclass
class Results:
    rows: list[SystemResult]
    never_run: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)


class Temperature(NamedTuple):
    value: float
    at_bound: bool


def pooled_temperature(pairs: Sequence[tuple[Array, Array]]) -> Temperature:
    from finetune.stats.calibration import fit_temperature

    logits, labels = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    value = fit_temperature(logits, labels)
    return Temperature(value, not 0.02 < value < 50)


def frame_of(records: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    columns = [(r["fingerprint"], r["data_seed"], r["seed"], 100 * r["score"]) for r in records]
    return pd.DataFrame(columns, columns=["pretraining", "draw", "seed", "score"])


def fake_predictions(task: str, skill: float, seed: int, rows: int = 60, holdout: bool = False) -> dict[str, Array]:
    """Outputs that are `skill` times the truth plus noise of the seed."""
    found, draw = find_task(task), np.random.default_rng([seed, int(100 * skill)])
    classes = max(2, len(found.labels))
    labels = np.random.default_rng(0).integers(0, classes, rows).astype(float)
    arrays: dict[str, Array] = {"ids": np.arange(rows).astype(str), "labels": labels, "groups": np.array([""] * rows)}
    if found.is_regression:
        return arrays | {"scores": skill * labels + draw.normal(size=rows)}
    arrays["logits"] = 2 * skill * np.eye(classes)[labels.astype(int)] + draw.normal(size=(rows, classes))
    if holdout:
        arrays |= {"holdout_logits": arrays["logits"][:30], "holdout_labels": labels[:30]}
    return arrays


def fake_row(
    task: str = "rte",
    name: str = "k5 cls",
    scores: Sequence[float] = (0.5, 0.6, 0.7),
    *,
    pretrainings: int = 1,
    draws: int = 1,
    size: str = "100",
    skill: float = 1.0,
    holdout: bool = False,
    constant: float | None = 52.7,
    planned: int | None = None,
    candidates: Sequence[Candidate] = (),
    notes: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
) -> SystemResult:
    """A row whose scores go over seeds fastest, then draws, then pretrainings."""
    found, seeds = find_task(task), len(scores) // (pretrainings * draws)
    arrays = [fake_predictions(task, skill, index, holdout=holdout) for index in range(len(scores))]
    records: list[dict[str, Any]] = []
    for index, score in enumerate(scores):
        place = {"fingerprint": f"{name.split()[0]}-{index // (seeds * draws)}", "data_seed": index // seeds % draws + 1,
                 "seed": index % seeds + 1}  # fmt: skip
        others = dict.fromkeys(found.metrics, score)
        records.append({
            "run_id": f"{task}{name}{index}", "task": task, "identity": {"task": task}, "benchmark": found.benchmark,
            "score": score, "scores": others, "constant": dict.fromkeys(others, (constant or 0) / 100),
            "score_error": 0.02, "history": [[100 * step, 1 / step, score * step / 8] for step in range(1, 9)],
        } | place | dict(more or {}))  # fmt: skip
    return SystemResult(
        System(name, selection="holdout" if holdout else "dev"), task, size, found.metrics[0], records,
        list(candidates), planned or len(scores), estimate(frame_of(records)), constant, list(notes), [], arrays,
    )  # fmt: skip
