"""Rows of results with invented scores and predictions, without a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.tasks import find_task
from finetune.stats.systems import Candidate, System, SystemResult
from finetune.store.results import Array, Record, Store
from multicls.errors import UserError


class FakeStore(Store):
    """Predictions in memory."""

    def __init__(self, arrays: Mapping[str, dict[str, Array]]) -> None:
        super().__init__(Path("results"))
        self.arrays = arrays

    def predictions(self, run_id: str) -> dict[str, Array]:
        if run_id not in self.arrays:
            raise UserError(f"{run_id}.npz: no such file.")
        return self.arrays[run_id]


def fake_predictions(task: str, skill: float, seed: int, rows: int = 60, holdout: bool = False) -> dict[str, Array]:
    """Outputs that are `skill` times the truth plus noise of the seed."""
    found, draw = find_task(task), np.random.default_rng([seed, int(100 * skill)])
    classes = max(2, len(found.labels))
    labels = np.random.default_rng(0).integers(0, classes, rows).astype(float)
    arrays: dict[str, Array] = {"ids": np.arange(rows).astype(str), "labels": labels, "groups": np.array([""] * rows)}
    if found.is_regression:
        return arrays | {"scores": skill * labels + draw.normal(size=rows)}
    arrays["logits"] = 2 * skill * np.eye(classes)[labels.astype(int)] + draw.normal(size=(rows, classes))
    return arrays | ({"holdout_logits": arrays["logits"][:30], "holdout_labels": labels[:30]} if holdout else {})


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
    constant: float = 0.527,
    candidates: Sequence[Candidate] = (),
    planned: int = 0,
    predicted: bool = True,
    **more: Any,
) -> SystemResult:
    """A row whose scores go over seeds fastest, then draws, then pretrainings; `more` are fields of the records."""
    found, seeds = find_task(task), len(scores) // (pretrainings * draws)
    model, _, label = name.partition(" ")
    system = System(name, label, "holdout" if holdout else "dev")
    records: list[Record] = []
    for index, score in enumerate(scores):
        records.append({
            "run_id": f"{index}", "task": task, "benchmark": found.benchmark, "notes": [],
            "fingerprint": f"{model}{index // (seeds * draws)}", "data_seed": index // seeds % draws + 1,
            "seed": index % seeds + 1, "metric": found.metrics[0], "score": score,
            "scores": dict.fromkeys(found.metrics, score), "constant": dict.fromkeys(found.metrics, constant),
            "score_error": 0.02, "test_scores": {},
            "history": [[100 * step, 1 / step, score * (1 - 0.5**step)] for step in range(1, 9)],
        } | more)  # fmt: skip
    arrays = {f"{index}": fake_predictions(task, skill, index, holdout=holdout) for index in range(len(scores))}
    return SystemResult(system, task, size, records, list(candidates), planned or len(scores),
                        FakeStore(arrays if predicted else {}))  # fmt: skip
