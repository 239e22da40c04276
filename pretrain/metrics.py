"""Sums and counts over micro-batches, steps and ranks, and the metrics that follow from them.

Each step adds its losses to sums on the device. Accuracies and facet statistics are computed in the steps that are
logged. Nothing is read back from the device before `MetricSums.totals`.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

NORMALIZED = ("mlm", "tfidf", "so")  # losses that are sums over terms; their number varies
# Name -> sum over terms, and their number or the name of that number in `MicroBatch.counts`.
Terms = dict[str, tuple[Tensor | float, float | str]]


class MetricSums:
    """Sums and counts by name. Sums of tensors stay on the device, in float64."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, float] = {}

    def add(
        self, terms: Terms, counts: Mapping[str, int] | None = None, counted: bool = True
    ) -> None:
        """Adds the terms of a micro-batch with these `counts`; with `counted` false only their names become known."""
        for name, (value, number) in terms.items():
            count = (counts or {})[number] if isinstance(number, str) else number
            value = value.detach().double() if isinstance(value, Tensor) else value
            self._sums[name] = self._sums.get(name, 0.0) + (value if counted else 0.0)
            self._counts[name] = self._counts.get(name, 0.0) + count * counted

    def totals(self, device: torch.device) -> dict[str, tuple[float, float]]:
        """Returns sum and count by name over all ranks. All ranks call it, having added the same names."""
        numbers = [*self._sums.values(), *self._counts.values()]
        table = torch.stack(
            [torch.as_tensor(n, dtype=torch.float64, device=device) for n in numbers]
        )
        dist.all_reduce(table)
        values = table.tolist()
        pairs = zip(values[: len(self._sums)], values[len(self._sums) :], strict=True)
        return dict(zip(self._sums, pairs, strict=True))


def means(totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Returns the reported metrics: means of all names with at least one term, and what follows from them."""
    values = {name: total / count for name, (total, count) in totals.items() if count > 0}
    shown = {name: value for name, value in values.items() if not name.startswith("moment/")}
    if "moment/tfidf" in values:
        variance = values["moment/squared_tfidf"] - values["moment/tfidf"] ** 2
        if variance > 1e-9:  # constant targets cannot be explained
            shown["r2/tfidf"] = 1 - values["moment/tfidf_error"] / variance
    return shown


@torch.no_grad()
def loss_terms(losses: Mapping[str, Tensor], normalizers: Mapping[str, Tensor]) -> Terms:
    """Returns the sums of losses that were divided by `normalizers`; other losses are means, of one number each."""
    return {
        f"loss/{name}": (loss * normalizers[name], name)
        if name in normalizers
        else (loss.detach(), 1.0)
        for name, loss in losses.items()
    }


@torch.no_grad()
def measure(
    outputs: Any,
    inputs: Mapping[str, Tensor],
    normalizers: Mapping[str, Tensor],
    group_size: int,
) -> Terms:
    """Returns accuracies, moments of the TF-IDF targets and facet statistics of a micro-batch, on the device.

    Args:
        outputs: Output of the pretraining model; objectives without a loss in it are left out.
        inputs: The micro-batch's. Masked positions without a label (-100) do not count.
        group_size: n, the examples that are each other's negatives.
    """
    terms: Terms = {}
    if "mlm" in outputs.losses:
        masked = inputs["labels"].flatten().index_select(0, inputs["masked_positions"])
        terms["acc/mlm"] = (outputs.logits.argmax(dim=-1) == masked).sum(), "mlm"
    if "so" in outputs.losses:  # no prediction equals the label -100
        right = outputs.so_logits.argmax(dim=-1) == inputs["so_labels"]
        terms["acc/so"] = right.sum(), "so"
    if "mcqt" in outputs.losses:
        terms["acc/mcqt"] = right_answers(outputs.mcqt_scores, group_size)
        terms |= facet_terms(outputs.facet_embeddings)
    if "tfidf" in outputs.losses:
        targets, error = inputs["tfidf_labels"].float(), outputs.losses["tfidf"]  # 0 on padding
        terms["moment/tfidf"] = targets.sum(), "tfidf"
        terms["moment/squared_tfidf"] = targets.square().sum(), "tfidf"
        terms["moment/tfidf_error"] = error * normalizers["tfidf"], "tfidf"
    return terms


def right_answers(scores: tuple[Tensor, Tensor | None], group_size: int) -> tuple[Tensor, float]:
    """Returns the number of queries of `part_scores` whose best candidate is the target, and that of all queries."""
    rows_QC = torch.cat([directed for directed in scores if directed is not None])
    targets = torch.arange(len(rows_QC), device=rows_QC.device) % group_size
    return (rows_QC.argmax(dim=-1) == targets).sum(), float(len(rows_QC))


def facet_terms(facets_BSD: Tensor) -> Terms:
    """Returns the similarity of the facets of a sequence, and the variance of each facet over sequences."""
    unit = F.normalize(facets_BSD.float(), dim=-1)
    sequences, facets = unit.shape[:2]
    # The variance is pooled within micro-batches. Summed over D it is the mean squared distance to the mean vector.
    spread = (unit - unit.mean(dim=0)).square().sum(dim=(0, 2))
    terms: Terms = {
        f"facets/variance_{k}": (term, sequences - 1.0)
        for k, term in enumerate(spread.unbind(), start=1)
    }
    # The squared length of a sum of unit vectors counts all pairs, and each with itself.
    if facets > 1:
        pairs = unit.sum(dim=1).square().sum() - sequences * facets
        terms["facets/mean_cosine"] = pairs / (facets * (facets - 1)), float(sequences)
    return terms


def collapses(values: Mapping[str, float]) -> list[str]:
    """Returns warnings about the facets from their values on validation; none if they are healthy."""
    warnings = []
    if (cosine := values.get("facets/mean_cosine", 0.0)) > 0.95:
        warnings.append(f"the facets of a text are nearly the same (mean cosine {cosine:.3f})")
    for name, variance in values.items():
        if name.startswith("facets/variance_") and variance < 0.01:
            warnings.append(f"a facet is nearly the same for every text ({name} {variance:.4f})")
    return warnings
