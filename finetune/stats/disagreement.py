"""Compares the disagreement of one model's facets with that of several models, example by example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from finetune.stats.systems import load_results
from finetune.store.results import Array, Record, Store
from multicls.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from finetune.data.examples import LabeledExample

SHARE = 0.2  # of the examples counts as most uncertain (Multi-CLS BERT)
SAME_ROWS = ("sampling", "label_noise", "selection", "train_from_dev")  # what decides which rows a run learns from


def disagreement(logits: Array) -> Array:
    """Returns how far the members of an ensemble, or the facets of one model, disagree on each example, (N,).

    It is the variance over the members of the probabilities of `logits` (members, N, C), or of scores with C = 1,
    summed over the classes.
    """
    from scipy.special import softmax

    outputs = np.asarray(logits, dtype=np.float64)
    return np.asarray((softmax(outputs, axis=-1) if outputs.shape[-1] > 1 else outputs).var(axis=0).sum(axis=-1))


def most_uncertain(uncertainty: Array) -> Array:
    """Returns the indices of the `SHARE` of examples with the highest uncertainty, ties in their order."""
    return np.argsort(-uncertainty, kind="stable")[: max(1, round(SHARE * len(uncertainty)))]


def compare_disagreement(facets: Array, members: Array) -> dict[str, float]:
    """Returns how well the uncertainty of one model's facets matches that of an ensemble's members.

    Args:
        facets: (K, N, C) logits of each facet, by `facet_logits`.
        members: (M, N, C) logits of each run.

    Returns:
        `overlap`: share of the most uncertain examples by facets that are among those by members (`chance` expected of
        unrelated ones), and `spearman` of the two disagreements over all examples.
    """
    from finetune.data.metrics import METRICS

    by_facets, by_members = disagreement(facets), disagreement(members)
    first, second = most_uncertain(by_facets), most_uncertain(by_members)
    return {
        "overlap": len(np.intersect1d(first, second)) / len(first),
        "chance": len(second) / len(by_members),
        "spearman": METRICS["spearman"](by_facets, by_members),
    }


def facet_logits(contributions: Array, weight: Array, logits: Array) -> Array:
    """Returns the logits of each facet, as if all facets agreed with it; their mean is the model's.

    A facet's logits (K, N, C) are W (K c_k) + b; the model's are W sum_k c_k + b. b is all that does not come from
    facets.

    Args:
        contributions: (K, N, D) c_k, which add up to the embedding: (W_O,k - mean W_O) h_k + b_k of Multi-CLS BERT.
        weight: (C, D) of the classifier.
        logits: (N, C) of the model.
    """
    return np.asarray(len(contributions) * (contributions - contributions.mean(axis=0)) @ weight.T + logits)


def compare_with_runs(
    store: Store, run: Record, task: str, label: str, examples: Sequence[LabeledExample], facets: Array
) -> dict[str, dict[str, float]]:
    """Returns `compare_disagreement` of a run's facets with finished runs that learnt from the same rows, by system.

    `members` and `rows` are the number of runs and examples compared.

    Args:
        run: the line of the facets' run on `task`.
        label: head of the runs to compare with, as in tables (`cls`, `isobn/multicls`).
        examples: N dev rows; those that the runs did not evaluate on are left out.
        facets: (K, N, C).

    Raises:
        UserError: There are no two such runs, or they saw other rows.
    """
    found: dict[str, dict[str, float]] = {}
    labels: set[str] = set()
    for row in load_results(store).rows:
        runs = [other["run_id"] for other in row.records if other["run_id"] != run["run_id"]
                and (row.task, row.train_size, other["data_seed"]) == (task, run["train_size"], run["data_seed"])
                and all(other["requested"].get(name) == run["requested"].get(name) for name in SAME_ROWS)]  # fmt: skip
        labels |= {row.system.label} if len(runs) > 1 else set()
        if len(runs) < 2 or row.system.label != label:
            continue
        members = [store.predictions(run_id) for run_id in runs]
        keys = [f"{example.part}/{example.id}" for example in examples]
        theirs = [f"{part}/{name}" for part, name in zip(members[0]["parts"], members[0]["ids"], strict=True)]
        _, own, their = np.intersect1d(keys, theirs, return_indices=True)
        truth = [example.label for example in examples]
        if not len(own) or not np.allclose(np.take(truth, own), members[0]["labels"][their]):
            raise UserError(f"{store.folder}: the runs of {label} were evaluated on other rows than are read here.")
        outputs = np.stack([one["logits"] if "logits" in one else one["scores"][:, None] for one in members])
        about = {"members": len(runs), "rows": len(own)}
        found[row.system.title] = about | compare_disagreement(facets[:, own], outputs[:, their])
    if not found:
        raise UserError(f"--ensemble {label}: {store.folder} has no two runs of it on {task} that learnt from the same "
                        f"rows.{did_you_mean(label, labels)}")  # fmt: skip
    return found
