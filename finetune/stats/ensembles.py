"""Ensembles of finished runs, from their saved predictions."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from finetune.data.tasks import Task, task_of
from finetune.store.results import Array, Record, Store
from multicls.errors import UserError


def member_sets(runs: Sequence[Record], size: int) -> list[list[Record]]:
    """Returns disjoint sets of `size` runs that differ in `seed` only, by ascending seed; the rest is not used."""
    alike: dict[Hashable, list[Record]] = {}
    for run in sorted(runs, key=lambda run: int(run["seed"])):
        alike.setdefault((run["data_seed"], run["fingerprint"]), []).append(run)
    return [found[i : i + size] for found in alike.values() for i in range(0, len(found) - size + 1, size)]


def ensemble(store: Store, members: Sequence[Record], number: int) -> dict[str, Any]:
    """Returns the record of an ensemble that averages its members' probabilities (or scores).

    The members are finished runs of one task, on the same rows; `number` takes the place of the seed.

    Raises:
        UserError: Predictions are missing, or are of different examples.
    """
    task = task_of(members[0])
    predictions = average_predictions([store.predictions(run["run_id"]) for run in members])
    record = {name: value for name, value in members[0].items() if not name.startswith("holdout_")}
    scores = score_of(task, predictions)
    if "holdout_labels" in predictions:
        held = {name.removeprefix("holdout_"): array for name, array in predictions.items() if "holdout_" in name}
        record["holdout_scores"] = score_of(task, held)
    return record | {
        "run_id": "", "members": [run["run_id"] for run in members], "seed": number, "score": scores[task.metrics[0]],
        "scores": scores, "score_error": None, "history": [], "seconds": sum(run["seconds"] for run in members),
    }  # fmt: skip


def average_predictions(members: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Returns the members' arrays with averaged outputs; averaged probabilities are written as their logarithms.

    Outputs on dev, held-out and test rows are averaged where all members have the same rows; held-out and test rows
    are left out elsewhere.

    Raises:
        UserError: The members saw different dev rows.
    """
    if any(not np.array_equal(members[0]["ids"], member["ids"]) for member in members):
        raise UserError("the members of an ensemble were evaluated on different examples.")
    averaged = dict(members[0])
    for name in members[0]:
        prefix, kind = name[: -len(name.rpartition("_")[2])], name.rpartition("_")[2]
        if kind not in ("logits", "scores"):
            continue
        ids = [member.get(f"{prefix}ids", member.get(f"{prefix}labels", np.zeros(0))) for member in members]
        if all(name in member and np.array_equal(ids[0], other) for member, other in zip(members, ids, strict=True)):
            several = averaged[f"{prefix}labels"].ndim > 1
            averaged[name] = _average([member[name] for member in members], "sigmoid" if several else kind)
        else:
            averaged = {key: array for key, array in averaged.items() if not key.startswith(prefix)}
    return averaged


def _average(outputs: Sequence[Array], kind: str) -> Array:
    """Returns the mean of scores, or logits of the mean of the probabilities."""
    from scipy.special import expit, log_softmax, logit, logsumexp

    stacked = np.stack(outputs).astype(np.float64)
    if kind == "scores":
        return np.asarray(stacked.mean(axis=0))
    if kind == "sigmoid":
        return np.asarray(logit(expit(stacked).mean(axis=0)))
    return np.asarray(logsumexp(log_softmax(stacked, axis=-1), axis=0) - np.log(len(stacked)))


def score_of(task: Task, predictions: Mapping[str, Array]) -> dict[str, float]:
    """Returns all metrics of saved predictions."""
    from finetune.data import metrics

    outputs = predictions["logits"] if "logits" in predictions else predictions["scores"][:, None] / task.label_scale
    parts, groups, answers = (np.asarray(predictions.get(name, ())).tolist() for name in ("parts", "groups", "answers"))
    return metrics.score(task, predictions["labels"], outputs, parts, groups, answers)
