"""Sums and counts over micro-batches, steps and ranks, and the metrics that follow from them.

Each step adds its losses to sums on the device. Accuracies and facet statistics are computed in the steps that are
logged. Nothing is read back from the device before `MetricSums.totals`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pretrain.batches import MicroBatch

Terms = dict[str, tuple[Tensor | float, float]]  # name -> sum over terms (a scalar), and their number
INTERNAL = ("moment/", "pair/")  # terms that are not reported; reported metrics follow from them


class MetricSums:
    """Sums and counts by name. Sums of tensors stay on the device, in float64."""

    def __init__(self) -> None:
        self._vectors: dict[tuple[str, ...], Tensor] = {}  # names -> their sums on the device
        self._numbers: dict[str, float] = {}  # sums that are known on the host
        self._counts: dict[str, float] = {}

    def add(self, terms: Terms, counted: bool = True) -> None:
        """Adds the terms of one micro-batch; with `counted` false only their names become known."""
        for name, (value, count) in terms.items():
            self._counts[name] = self._counts.get(name, 0.0) + count * counted
            if not isinstance(value, Tensor):
                self._numbers[name] = self._numbers.get(name, 0.0) + (value if counted else 0.0)
        on_device = {name: value for name, (value, _) in terms.items() if isinstance(value, Tensor)}
        if on_device:
            vector = torch.stack([value.detach().float() for value in on_device.values()]).double()
            self._add_vector(tuple(on_device), vector if counted else torch.zeros_like(vector))

    def _add_vector(self, names: tuple[str, ...], vector: Tensor) -> None:
        self._vectors[names] = self._vectors[names] + vector if names in self._vectors else vector

    def totals(self, device: torch.device, *, own: bool = False) -> dict[str, tuple[float, float]]:
        """Returns sum and count by name over all ranks. All ranks call it, having added the same names.

        With `own` they are those of this rank alone, which calls it alone.
        """
        names = [name for group in self._vectors for name in group] + list(self._numbers)
        host = [*self._numbers.values(), *self._counts.values()]
        table = torch.cat([*self._vectors.values(), torch.tensor(host, dtype=torch.float64, device=device)])
        if not own:
            dist.all_reduce(table)
        values = table.tolist()
        sums: dict[str, float] = {}
        for name, value in zip(names, values, strict=False):
            sums[name] = sums.get(name, 0.0) + value
        counts = dict(zip(self._counts, values[len(names) :], strict=True))
        return {name: (sums[name], counts[name]) for name in counts}

    def state(self) -> dict[str, Any]:
        """Returns this rank's sums for JSON, exact to the bit."""
        vectors = [[names, vector.tolist()] for names, vector in self._vectors.items()]
        return {"vectors": vectors, "numbers": self._numbers, "counts": self._counts}

    def add_state(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Adds the sums of a `state`."""
        for names, values in state["vectors"]:
            self._add_vector(tuple(names), torch.tensor(values, dtype=torch.float64, device=device))
        for mine, theirs in ((self._numbers, state["numbers"]), (self._counts, state["counts"])):
            for name, value in theirs.items():
                mine[name] = mine.get(name, 0.0) + value


def means(totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Returns the reported metrics: means of all names with at least one term, and what follows from them."""
    values = {name: total / count for name, (total, count) in totals.items() if count > 0}
    shown = {name: value for name, value in values.items() if not name.startswith(INTERNAL)}
    if "moment/tfidf" in values:
        variance = values["moment/squared_tfidf"] - values["moment/tfidf"] ** 2
        if variance > 1e-9:  # constant targets cannot be explained
            shown["r2/tfidf"] = 1 - values["moment/tfidf_error"] / variance
    if shares := [value for name, value in values.items() if name.startswith("pair/")]:
        shown["facets/top_pair_share"] = max(shares)
        nats = 0.0 - sum(share * math.log(share) for share in shares if share > 0)
        shown["facets/pair_entropy"] = nats / math.log(len(shares))
    return shown


def loss_terms(losses: Mapping[str, Tensor], batch: MicroBatch, normalizers: Mapping[str, Tensor]) -> Terms:
    """Returns the losses and sizes of one micro-batch.

    Args:
        losses: Losses by name, divided by `normalizers` where these have the name, else means over the examples.
    """
    counts = batch.counts
    terms: Terms = {}
    for name, loss in losses.items():
        count = counts.get(name, counts["examples"])
        terms[f"loss/{name}"] = (loss * normalizers.get(name, count), count)
    terms["data/tokens_per_sequence"] = (counts["tokens"], counts["sequences"])
    terms["moment/squared_length"] = (counts["squared_lengths"], counts["sequences"])
    return terms


@torch.no_grad()
def measure(outputs: Any, batch: MicroBatch, normalizers: Mapping[str, Tensor], group_size: int | None = None) -> Terms:
    """Returns accuracies, moments of the TF-IDF targets and facet statistics of one micro-batch, on the device.

    `outputs` is a `MultiClsBertForPreTrainingOutput`; `group_size` is n, the examples that are each other's
    negatives; None: all of them.
    """
    inputs, counts = batch.inputs, batch.counts
    masked = inputs["labels"].flatten().index_select(0, inputs["masked_positions"])
    scores = torch.cat([direction for direction in outputs.mcqt_scores if direction is not None])
    answers = torch.arange(len(scores), device=scores.device) % (group_size or counts["examples"])
    facets = inputs["input_ids"].shape[1] - inputs["tfidf_labels"].shape[1]
    real = torch.cat([inputs["attention_mask"][:, :1], inputs["attention_mask"][:, 1 + facets :]], dim=1)
    targets = inputs["tfidf_labels"].float() * real
    return {
        "acc/mlm": ((outputs.mlm_logits.argmax(dim=-1) == masked).sum(), counts["mlm"]),
        # no prediction equals the label -100
        "acc/so": ((outputs.so_logits.argmax(dim=-1) == inputs["so_labels"]).sum(), counts["so"]),
        "acc/mcqt": ((scores.argmax(dim=-1) == answers).sum(), float(len(scores))),
        "moment/tfidf": (targets.sum(), counts["tfidf"]),
        "moment/squared_tfidf": (targets.square().sum(), counts["tfidf"]),
        "moment/tfidf_error": (outputs.losses["tfidf"] * normalizers["tfidf"], counts["tfidf"]),
    } | _facet_terms(outputs)


def _facet_terms(outputs: Any) -> Terms:
    """Returns similarity of the facets of a sequence, variance of a facet over sequences, and wins of facet pairs."""
    unit = F.normalize(outputs.facet_embeddings.float(), dim=-1)  # (B, S, D)
    sequences, facets = unit.shape[:2]
    # The variance is pooled within micro-batches. Summed over D it is the mean squared distance to the mean vector.
    spread = (unit - unit.mean(dim=0)).square().sum(dim=(0, 2))
    terms: Terms = {f"facets/variance_{k}": (term, sequences - 1.0) for k, term in enumerate(spread.unbind(), start=1)}
    if facets == 1:
        return terms
    hidden = F.normalize(outputs.last_hidden_state[:, 1 : 1 + facets].float(), dim=-1)
    terms["facets/mean_cosine"] = (_cosines(unit), float(sequences))
    terms["facets/mean_cosine_hidden"] = (_cosines(hidden), float(sequences))
    first, answers, *third = unit.chunk(2 if outputs.mcqt_scores[1] is None else 3)
    queries = torch.cat([first, *third])
    pairs = torch.einsum("nid,njd->nij", queries, answers.repeat(1 + len(third), 1, 1)).flatten(1)
    wins = (pairs.argmax(dim=1, keepdim=True) == torch.arange(facets**2, device=unit.device)).float().sum(dim=0)
    return terms | {f"pair/{number}": (term, float(len(queries))) for number, term in enumerate(wins.unbind())}


def _cosines(unit_BSD: Tensor) -> Tensor:
    """Returns the sum over sequences of the mean cosine of two facets: |sum of unit vectors|^2 counts all pairs."""
    facets = unit_BSD.shape[1]
    return (unit_BSD.sum(dim=1).square().sum() - unit_BSD.square().sum()) / (facets * (facets - 1))


def collapses(values: Mapping[str, float]) -> list[str]:
    """Returns warnings about the facets from their values on validation; none if they are healthy."""
    found = []
    if (cosine := values.get("facets/mean_cosine", 0.0)) > 0.95:
        found.append(f"the facets of a text are nearly the same (facets/mean_cosine {cosine:.3f})")
    variances = {name: value for name, value in values.items() if name.startswith("facets/variance_")}
    if still := {name: value for name, value in variances.items() if value < 0.01}:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in still.items())
        found.append(f"{len(still)} of {len(variances)} facets are nearly the same for every text ({shown})")
    return found
