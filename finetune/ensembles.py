"""Ensembles of finished runs from their saved predictions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import expit, logit, softmax

from finetune.metrics import score_predictions
from finetune.results import load_predictions
from finetune.tasks import Task, task_of
from multicls.errors import UserError

Array = np.ndarray[Any, np.dtype[Any]]
Predictions = Mapping[str, Mapping[str, Array]]  # by split and name


def record_task(row: Any) -> Task:
    """Returns the task of a row of `load_results`, with the run's own order of metrics."""
    return dataclasses.replace(task_of(row["description"]), metrics=tuple(row["metrics"]))


def ensembles(runs: pd.DataFrame, size: int) -> pd.DataFrame:
    """Returns the rows of ensembles of `size` runs that differ in `seed` only; the rest of the runs is not used.

    `runs` are of one system and task.
    """
    rows = []
    for _, group in runs.sort_values("seed").groupby(["pretraining", "subset"], sort=False):
        for start in range(0, len(group) - size + 1, size):
            members = group.iloc[start : start + size]
            first = members.iloc[0]
            averaged = average([load_predictions(Path(p), first["task"]) for p in members["path"]])
            scores = {
                split: score_predictions(record_task(first), averaged[split])
                for split in ("dev", "validation", *first["tests"])
                if split in averaged
            }
            row = first.to_dict() | {
                "system": f"{first['system']} x{size}",
                "path": "",
                "score": scores["dev"][first["metric"]],
                "scores": scores["dev"],
                "selection_score": scores.get("validation", scores["dev"])[first["metric"]],
                "tests": {split: scores[split] for split in first["tests"] if split in scores},
                "seconds": members["seconds"].sum(),
            }
            rows.append(row)
    return pd.DataFrame(rows)


def average(members: Sequence[Predictions]) -> dict[str, dict[str, Array]]:
    """Returns averaged predictions of the splits that all members share.

    Scores are averaged, probabilities too; the latter are returned as logits.

    Raises:
        UserError: The members were evaluated on different rows.
    """
    averaged = {}
    for split in set.intersection(*map(set, members)):
        first = members[0][split]
        if not all(np.array_equal(first["ids"], other[split]["ids"]) for other in members):
            raise UserError("the members of an ensemble were evaluated on different examples.")
        outputs = np.stack([member[split]["logits"] for member in members]).astype(np.float64)
        if first["labels"].ndim > 1:
            mean = logit(expit(outputs).mean(axis=0))
        elif outputs.shape[-1] == 1:
            mean = outputs.mean(axis=0)
        else:
            mean = np.log(softmax(outputs, axis=-1).mean(axis=0))
        averaged[split] = dict(first) | {"logits": np.asarray(mean)}
    return averaged
