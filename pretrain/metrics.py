"""What a run reports: sums and counts over micro-batches and ranks, the console line, metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
import resource
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from multicls.files import append_jsonl, atomic_write, read_jsonl

if TYPE_CHECKING:
    from multicls.modeling_multicls import MultiClsBertForPreTrainingOutput

OBJECTIVES = ("mlm", "tfidf", "so", "mcqt")
Terms = dict[str, tuple[Tensor, Tensor]]


def term_counts(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """How many terms each loss of a micro-batch sums: masked tokens, real non-facet tokens, parts of two runs."""
    length, text_length = batch["input_ids"].shape[1], batch["tfidf_labels"].shape[1]
    facets = length - text_length
    return {
        "mlm": (batch["labels"] != -100).sum(),
        "tfidf": batch["attention_mask"].sum() - facets * batch["input_ids"].shape[0],
        "so": (batch["so_labels"] != -100).sum(),
    }


@torch.no_grad()
def measure(
    outputs: MultiClsBertForPreTrainingOutput, batch: Mapping[str, Tensor], normalizers: Mapping[str, Tensor]
) -> Terms:
    """Sums and counts of one micro-batch: every loss, the accuracies, and how alike a sequence's facets are."""
    assert outputs.losses is not None and outputs.facet_embeddings is not None
    assert outputs.mcqt_scores is not None and outputs.so_logits is not None
    counts: dict[str, Tensor] = term_counts(batch)
    terms: Terms = {}
    for name in OBJECTIVES:
        loss = outputs.losses[name].detach().float()
        one = torch.ones_like(loss)
        terms[f"loss/{name}"] = (loss * normalizers[name], counts[name]) if name in normalizers else (loss, one)
    masked = batch["labels"][batch["labels"] != -100]
    terms["acc/mlm"] = _hits(outputs.mlm_logits, masked)
    two_runs = batch["so_labels"] != -100
    terms["acc/so"] = _hits(outputs.so_logits[two_runs], batch["so_labels"][two_runs])
    scores = torch.cat([direction for direction in outputs.mcqt_scores if direction is not None])
    targets = torch.arange(outputs.mcqt_scores[0].shape[0], device=scores.device)
    terms["acc/mcqt"] = _hits(scores, targets.repeat(len(scores) // len(targets)))
    facets = outputs.facet_embeddings.shape[1]
    if facets > 1:
        unit = F.normalize(outputs.facet_embeddings.float(), dim=-1)
        cosines = (unit @ unit.transpose(1, 2)).sum(dim=(1, 2)) - facets
        terms["facets/mean_cosine"] = (cosines.sum() / (facets * (facets - 1)), torch.tensor(float(len(cosines))))
    return terms


def _hits(logits: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor]:
    assert logits is not None
    return (logits.argmax(dim=-1) == targets).sum(), torch.tensor(float(len(targets)))


class Totals:
    """Sums and counts over the micro-batches of one or several steps."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
        self._counts: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))

    def add(self, terms: Terms) -> None:
        """Adds one micro-batch."""
        for name, (total, count) in terms.items():
            self._sums[name] = self._sums[name] + total.double().cpu()
            self._counts[name] = self._counts[name] + count.double().cpu()

    def include(self, other: Totals) -> None:
        """Adds what `other` has gathered."""
        self.add({name: (other._sums[name], other._counts[name]) for name in other._sums})

    def reduce(self, device: torch.device) -> Totals:
        """The totals over all ranks; every rank must call it, with the same names."""
        names = sorted(self._sums)
        table = torch.stack([torch.stack([self._sums[n], self._counts[n]]) for n in names]).to(device)
        dist.all_reduce(table)
        reduced = Totals()
        reduced.add({name: (row[0], row[1]) for name, row in zip(names, table, strict=True)})
        return reduced

    def means(self) -> dict[str, float]:
        """Mean by name, for all that has been counted at least once."""
        return {name: float(self._sums[name] / self._counts[name]) for name in self._sums if self._counts[name] > 0}


def console_line(step: int, steps: int, values: Mapping[str, float], eta: float | None) -> str:
    """One line on a step: `step 1200/40000  loss 2.184 (mlm 0.87 ...)  lr 1.9e-05  gnorm 0.84  812 seq/s  eta 3h12`."""
    losses = " ".join(f"{name} {values[f'loss/{name}']:.3f}" for name in OBJECTIVES if f"loss/{name}" in values)
    parts = [f"step {step}/{steps}", f"loss {values['loss/total']:.3f} ({losses})"]
    shown = (
        ("optim/lr", "lr {:.2e}"),
        ("optim/grad_norm", "gnorm {:.2f}"),
        ("acc/mcqt", "mcqt acc {:.2f}"),
        ("acc/so", "so acc {:.2f}"),
        ("facets/mean_cosine", "facet cos {:.2f}"),
        ("speed/sequences_per_second", "{:.0f} seq/s"),
        ("speed/data_wait", "data {:.0%}"),
        ("memory/peak_gb", "mem {:.1f}G"),
    )
    parts += [form.format(values[key]) for key, form in shown if key in values]
    if eta is not None:
        parts.append(f"eta {duration(eta)}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """`3h12`, `4m05s` or `12s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory in GB: the GPU's allocations, or the process's resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


class Log:
    """What rank 0 writes of a run: the console and log.txt, metrics.jsonl and TensorBoard. Other ranks write nothing.

    Args:
        folder: the run folder.
        writes: whether this rank is the one that writes.
        resumed_step: what an earlier process has reported after this step is dropped, since it is done again; 0: all.
    """

    def __init__(self, folder: Path, writes: bool, resumed_step: int) -> None:
        self._folder = folder
        self._writes = writes
        if not writes:
            return
        from torch.utils.tensorboard import SummaryWriter

        metrics = folder / "metrics.jsonl"
        kept = [record for record in read_jsonl(metrics) if resumed_step and record["step"] <= resumed_step]
        with atomic_write(metrics) as file:
            file.writelines(json.dumps(record) + "\n" for record in kept)
        self._board = SummaryWriter(str(folder / "tb"), purge_step=resumed_step + 1)

    def say(self, text: str) -> None:
        """Prints a line, and keeps it in log.txt."""
        if self._writes:
            print(text, flush=True)
            with open(self._folder / "log.txt", "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def record(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Writes values under the same keys to metrics.jsonl and TensorBoard (there under `split/`)."""
        if self._writes:
            append_jsonl(self._folder / "metrics.jsonl", {"step": step, "split": split, **values})
            for name, value in values.items():
                self._board.add_scalar(f"{split}/{name}", value, step)

    def close(self) -> None:
        """Flushes TensorBoard."""
        if self._writes:
            self._board.close()
