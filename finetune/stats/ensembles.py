"""Ensembles of finished runs, from their saved predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.tasks import Task, task_of
from finetune.stats.systems import Array, Record, choose_learning_rates, group_runs
from finetune.store.results import read_predictions, read_results, run_id_of, write_result
from multicls.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from finetune.data.examples import LabeledExample

SHARE = 0.2  # the most uncertain fifth (Multi-CLS BERT)
SAME_ROWS = ("task", "train_size", "data_seed", "sampling", "label_noise", "selection", "train_from_dev")


def member_sets(runs: Sequence[Record], size: int) -> list[list[Record]]:
    """Disjoint sets of `size` runs that differ in `seed` only, by ascending seed; what is left over is not used."""
    same: dict[tuple[Any, Any], list[Record]] = {}
    for run in sorted(runs, key=lambda run: int(run["identity"]["seed"])):
        same.setdefault((run["identity"].get("data_seed"), run["identity"]["model"]), []).append(run)
    return [found[i : i + size] for found in same.values() for i in range(0, len(found) - size + 1, size)]


def ensemble(folder: str | Path, members: Sequence[Record], number: int = 1) -> dict[str, Any]:
    """Averages the members' probabilities (or scores), writes the row unless it is there, and returns it.

    Args:
        members: finished runs of one task, on the same examples.
        number: takes the place of the seed, so that several ensembles count as several seeds.

    Raises:
        UserError: predictions are missing, or are of different examples.
    """
    identity = dict(members[0]["identity"]) | {"seed": number, "ensemble": [run["run_id"] for run in members]}
    run_id = run_id_of(identity)
    for done in read_results(folder):
        if done["run_id"] == run_id:
            return done
    task = task_of(members[0])
    predictions = average_predictions([read_predictions(folder, run["run_id"]) for run in members])
    scores = score_of(task, predictions)
    record = {name: value for name, value in members[0].items() if not name.startswith("holdout_")}
    record |= {"run_id": run_id, "identity": identity, "score": scores[task.metrics[0]]}
    record |= {"scores": scores, "best_step": 0, "steps": 0, "history": []}
    record["seconds"] = round(sum(run.get("seconds", 0.0) for run in members), 2)
    write_result(folder, record, predictions)
    return record


def average_predictions(members: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The members' arrays with averaged outputs; averaged probabilities are written as their logarithms.

    Outputs on held-out rows are averaged where all members held out the same rows, and left out elsewhere.

    Raises:
        UserError: the members saw different dev rows.
    """
    from scipy.special import log_softmax, logsumexp

    if any(not np.array_equal(members[0]["ids"], member["ids"]) for member in members):
        raise UserError("the members of an ensemble were evaluated on different examples.")
    averaged = {name: array for name, array in members[0].items() if not name.startswith("holdout_")}
    for prefix in ("", "holdout_"):
        labels = [member.get(f"{prefix}labels", np.zeros(0)) for member in members]
        if not len(labels[0]) or any(not np.array_equal(labels[0], other, equal_nan=True) for other in labels):
            continue
        averaged[f"{prefix}labels"] = labels[0]
        if f"{prefix}scores" in members[0]:
            averaged[f"{prefix}scores"] = np.mean([member[f"{prefix}scores"] for member in members], axis=0)
        else:
            logits = np.stack([member[f"{prefix}logits"] for member in members]).astype(np.float64)
            averaged[f"{prefix}logits"] = logsumexp(log_softmax(logits, axis=-1), axis=0) - np.log(len(members))
    return averaged


def score_of(task: Task, predictions: Mapping[str, Array]) -> dict[str, float]:
    """All metrics of saved predictions."""
    from finetune.data import metrics

    outputs = predictions["logits"] if "logits" in predictions else predictions["scores"][:, None] / task.label_scale
    parts, groups, answers = (np.asarray(predictions.get(name, ())).tolist() for name in ("parts", "groups", "answers"))
    return metrics.score(task, predictions["labels"], outputs, parts, groups, answers)


def disagreement(logits: Array) -> Array:
    """How far the members of an ensemble, or the facets of one model, disagree on each example.

    Args:
        logits: (members, N, C), or scores with C = 1.

    Returns:
        (N,) variance of the probabilities (scores) over the members, summed over the classes.
    """
    from scipy.special import softmax

    outputs = np.asarray(logits, dtype=np.float64)
    return np.asarray((softmax(outputs, axis=-1) if outputs.shape[-1] > 1 else outputs).var(axis=0).sum(axis=-1))


def most_uncertain(uncertainty: Array, share: float = SHARE) -> Array:
    """Indices of the `share` of examples with the highest uncertainty, ties in their order."""
    count = max(1, round(share * len(uncertainty)))
    return np.argsort(-uncertainty, kind="stable")[:count]


def compare_disagreement(facets: Array, members: Array, share: float = SHARE) -> dict[str, float]:
    """Are the facets of one model unsure where the members of an ensemble are?

    Args:
        facets: (K, N, C) logits of each facet, by `facet_logits`.
        members: (M, N, C) logits of each run.
        share: part of the examples that counts as most uncertain.

    Returns:
        `overlap`: share of the most uncertain examples by facets that are among those by members (`chance` expected of
        unrelated ones), and `spearman` of the two disagreements over all examples.
    """
    from finetune.data.metrics import spearman

    by_facets, by_members = disagreement(facets), disagreement(members)
    first, second = most_uncertain(by_facets, share), most_uncertain(by_members, share)
    return {
        "overlap": len(np.intersect1d(first, second)) / len(first),
        "chance": len(second) / len(by_members),
        "spearman": spearman(by_facets, by_members),
    }


def facet_logits(contributions: Array, weight: Array, logits: Array) -> Array:
    """Logits of each facet by itself, as if all facets said what it says; their mean is the model's.

    W (K c_k) + b where the model has W sum_k c_k + b, b standing for all that does not come from facets.

    Args:
        contributions: (K, N, D) c_k, which add up to the embedding: (W_O,k - mean W_O) h_k + b_k of Multi-CLS BERT.
        weight: (C, D) of the classifier.
        logits: (N, C) of the model.

    Returns:
        (K, N, C).
    """
    return np.asarray(len(contributions) * (contributions - contributions.mean(axis=0)) @ weight.T + logits)


def compare_with_runs(
    folder: str | Path, run: Record, task: str, head: str, examples: Sequence[LabeledExample], facets: Array
) -> dict[str, dict[str, float]]:
    """`compare_disagreement` of a run's facets with finished runs of a head that learnt from the same rows.

    Args:
        folder: the results.
        run: the line of the facets' run.
        task: of that run, the only one but for `cln`.
        head: as tables name it (`cls`, `isobn/multicls`); runs are those at its chosen learning rate.
        examples: N dev rows; those that the runs did not evaluate on are left out.
        facets: (K, N, C).

    Returns:
        By system; with `members` and `rows`, the number of runs and examples compared.

    Raises:
        UserError: there are no two such runs, or they saw other rows.
    """
    records = [record for record in read_results(folder) if not record["identity"].get("ensemble")]
    like, found, heads = run["identity"] | {"task": task}, {}, set()
    for choice in choose_learning_rates(group_runs(records)):
        runs = [other["run_id"] for other in choice.chosen.runs if other["run_id"] != run["run_id"]
                and all(other["identity"].get(name) == like.get(name) for name in SAME_ROWS)]  # fmt: skip
        heads |= {choice.chosen.key["head"]} if len(runs) > 1 else set()
        if len(runs) < 2 or choice.chosen.key["head"] != head:
            continue
        members = [read_predictions(folder, run_id) for run_id in runs]
        keys = [f"{example.part}/{example.id}" for example in examples]
        theirs = [f"{part}/{name}" for part, name in zip(members[0]["parts"], members[0]["ids"], strict=True)]
        _, own, their = np.intersect1d(keys, theirs, return_indices=True)
        labels = [example.label for example in examples]
        if not len(own) or not np.allclose(np.take(labels, own), members[0]["labels"][their]):
            raise UserError(f"{folder}: the runs of {head} were evaluated on other rows than are read here.")
        outputs = np.stack(
            [member["logits"] if "logits" in member else member["scores"][:, None] for member in members]
        )
        about = {"members": len(runs), "rows": len(own)}
        found[" ".join(choice.system)] = about | compare_disagreement(facets[:, own], outputs[:, their])
    if not found:
        raise UserError(f"--ensemble {head}: {folder} has no two runs of it on {task} that learnt from the same rows."
                        f"{did_you_mean(head, heads)}")  # fmt: skip
    return found
