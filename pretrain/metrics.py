"""What a run reports: sums and counts over micro-batches and ranks, the console line, metrics.jsonl and TensorBoard."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from multicls.errors import UserError
from multicls.files import atomic_write, read_jsonl

if TYPE_CHECKING:
    from multicls.modeling_multicls import MultiClsBertForPreTrainingOutput

OBJECTIVES = ("mlm", "tfidf", "so", "mcqt")
Terms = dict[str, tuple[Tensor, Tensor]]  # by name: a sum, and over how many it goes; scalars
HIDDEN = ("moment/", "pair/")  # terms that are not reported themselves, but what follows from them


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
    """Sums and counts of one micro-batch: losses, accuracies, moments of the TF-IDF targets, facets, lengths.

    `normalizers` are those that the losses were divided by. Nothing here waits for the device but the choice of the
    masked labels, as the model's own does.
    """
    assert outputs.losses is not None
    counts = term_counts(batch)
    terms: Terms = {}
    for name in OBJECTIVES:
        loss = outputs.losses[name].detach().float()
        one = torch.ones_like(loss)
        terms[f"loss/{name}"] = (loss * normalizers[name], counts[name]) if name in normalizers else (loss, one)
    terms |= _accuracies(outputs, batch, counts) | _facets(outputs, batch)
    lengths = batch["attention_mask"].sum(dim=1)
    sequences = _count(len(lengths), lengths)
    terms["data/tokens_per_sequence"] = (lengths.sum(), sequences)
    terms["moment/squared_length"] = (lengths.square().sum(), sequences)
    facets = batch["input_ids"].shape[1] - batch["tfidf_labels"].shape[1]
    real = torch.cat([batch["attention_mask"][:, :1], batch["attention_mask"][:, 1 + facets :]], dim=1)
    targets = batch["tfidf_labels"].float() * real
    terms["moment/tfidf"] = (targets.sum(), counts["tfidf"])
    terms["moment/squared_tfidf"] = (targets.square().sum(), counts["tfidf"])
    return terms


def _accuracies(
    outputs: MultiClsBertForPreTrainingOutput, batch: Mapping[str, Tensor], counts: Mapping[str, Tensor]
) -> Terms:
    """Top-1: of masked tokens, of the order of two runs, of the right answer among all candidates."""
    assert outputs.mlm_logits is not None and outputs.so_logits is not None and outputs.mcqt_scores is not None
    masked = batch["labels"][batch["labels"] != -100]
    scores = torch.cat([direction for direction in outputs.mcqt_scores if direction is not None])
    answers = torch.arange(outputs.mcqt_scores[0].shape[0], device=scores.device)
    hits = scores.argmax(dim=-1) == answers.repeat(len(scores) // len(answers))
    return {
        "acc/mlm": ((outputs.mlm_logits.argmax(dim=-1) == masked).sum(), counts["mlm"]),
        "acc/so": ((outputs.so_logits.argmax(dim=-1) == batch["so_labels"]).sum(), counts["so"]),  # never -100
        "acc/mcqt": (hits.sum(), _count(len(hits), hits)),
    }


def _facets(outputs: MultiClsBertForPreTrainingOutput, batch: Mapping[str, Tensor]) -> Terms:
    """How alike the facets of a sequence are, how much a facet varies over sequences, and which pairs win the max."""
    assert outputs.facet_embeddings is not None and outputs.last_hidden_state is not None
    assert outputs.mcqt_scores is not None
    unit = F.normalize(outputs.facet_embeddings.float(), dim=-1)  # (B, S, D)
    sequences, facets = unit.shape[:2]
    # Pooled variance within micro-batches, of unit vectors: its sum over d is their mean distance to their mean.
    spread = (unit - unit.mean(dim=0)).square().sum(dim=(0, 2))
    freedom = _count(sequences - 1, unit)
    terms = {f"facets/variance_{k}": (term, freedom) for k, term in enumerate(spread.unbind(), start=1)}
    if facets == 1:
        return terms
    count = _count(sequences, unit)
    hidden = F.normalize(outputs.last_hidden_state[:, 1 : 1 + facets].float(), dim=-1)
    terms["facets/mean_cosine"] = (_cosines(unit), count)
    terms["facets/mean_cosine_hidden"] = (_cosines(hidden), count)
    first, answers, *third = unit.chunk(2 if outputs.mcqt_scores[1] is None else 3)
    queries = torch.cat([first, *third])
    pairs = torch.einsum("nid,njd->nij", queries, answers.repeat(1 + len(third), 1, 1)).flatten(1)
    wins = (pairs.argmax(dim=1, keepdim=True) == torch.arange(facets**2, device=unit.device)).float().sum(dim=0)
    count = _count(len(queries), unit)
    return terms | {f"pair/{number}": (term, count) for number, term in enumerate(wins.unbind())}


def _cosines(unit_BSD: Tensor) -> Tensor:
    """Sum over sequences of the mean cosine of two different facets: |sum of unit vectors|^2 counts all pairs."""
    facets = unit_BSD.shape[1]
    return (unit_BSD.sum(dim=1).square().sum() - unit_BSD.square().sum()) / (facets * (facets - 1))


def _count(number: int, like: Tensor) -> Tensor:
    return torch.full((), float(number), device=like.device)


class Totals:
    """Sums and counts over the micro-batches of one or several steps; they stay on the device until they are read."""

    def __init__(self) -> None:
        self._tables: dict[tuple[str, ...], Tensor] = {}  # by names: (2, names), sums and counts in float64

    def add(self, terms: Terms, counted: bool = True) -> None:
        """Adds one micro-batch; one that is not `counted` only has its names known."""
        sums, counts = zip(*terms.values(), strict=True)
        table = torch.stack([term.float() for term in (*sums, *counts)]).double().view(2, -1)
        self._include(tuple(terms), table if counted else torch.zeros_like(table))

    def include(self, other: Totals) -> None:
        """Adds what `other` has gathered."""
        for names, table in other._tables.items():
            self._include(names, table)

    def _include(self, names: tuple[str, ...], table: Tensor) -> None:
        self._tables[names] = self._tables[names] + table if names in self._tables else table

    def reduce(self, device: torch.device) -> Totals:
        """The totals over all ranks; every rank must call it, with the same names."""
        reduced = Totals()
        for names, table in self._tables.items():
            table = table.to(device, copy=True)
            dist.all_reduce(table)
            reduced._include(names, table)
        return reduced

    def state(self) -> list[Any]:
        """For JSON, to the bit; `load_state` takes it."""
        return [[names, table.tolist()] for names, table in self._tables.items()]

    def load_state(self, state: list[Any], device: torch.device) -> None:
        """Takes the place of what has been gathered."""
        self._tables = {tuple(names): torch.tensor(t, dtype=torch.float64, device=device) for names, t in state}

    def sums(self) -> dict[str, tuple[float, float]]:
        """Sum and count by name."""
        found: dict[str, tuple[float, float]] = {}
        for names, table in self._tables.items():
            for name, total, count in zip(names, *table.tolist(), strict=True):
                before = found.get(name, (0.0, 0.0))
                found[name] = (before[0] + total, before[1] + count)
        return found

    def means(self) -> dict[str, float]:
        """What is reported: the mean by name, of all that has been counted at least once, and what follows from it."""
        means = {name: total / count for name, (total, count) in self.sums().items() if count > 0}
        shown = {name: value for name, value in means.items() if not name.startswith(HIDDEN)}
        if "moment/tfidf" in means:
            variance = means["moment/squared_tfidf"] - means["moment/tfidf"] ** 2
            if variance > 1e-9:  # targets that are all the same explain nothing
                shown["r2/tfidf"] = 1 - means["loss/tfidf"] / variance
        if shares := [value for name, value in means.items() if name.startswith("pair/")]:
            shown["facets/top_pair_share"] = max(shares)
            nats = 0.0 - sum(share * math.log(share) for share in shares if share > 0)
            shown["facets/pair_entropy"] = nats / math.log(len(shares))
        return shown


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
        ("speed/mfu", "mfu {:.0%}"),
        ("speed/data_wait", "data {:.0%}"),
        ("memory/peak_gb", "mem {:.1f}G"),
    )
    parts += [form.format(values[key]) for key, form in shown if key in values]
    if eta is not None:
        parts.append(f"eta {duration(eta)}")
    return "  ".join(parts)


def collapses(values: Mapping[str, float]) -> list[str]:
    """What is wrong with the facets in words, by their values on validation; nothing for healthy ones."""
    found = []
    if (cosine := values.get("facets/mean_cosine", 0.0)) > 0.95:
        found.append(f"the facets of a text are nearly the same (facets/mean_cosine {cosine:.3f})")
    variances = {name: value for name, value in values.items() if name.startswith("facets/variance_")}
    if still := {name: value for name, value in variances.items() if value < 0.01}:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in still.items())
        found.append(f"{len(still)} of {len(variances)} facets are nearly the same for every text ({shown})")
    return found


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
    """What rank 0 writes of a run: the console and log.txt, metrics.jsonl, TensorBoard, Weights & Biases if asked for.

    Other ranks write nothing.

    Args:
        folder: the run folder.
        writes: whether this rank is the one that writes.
        resumed_step: what an earlier process has reported after this step is dropped, since it is done again; 0: all.
        wandb_project: where to report to Weights & Biases as well (`WANDB_MODE=offline` keeps it on disk).
        config: settings that Weights & Biases shows with the run.
    """

    def __init__(
        self,
        folder: Path,
        writes: bool,
        resumed_step: int,
        wandb_project: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder = folder
        self._writes = writes
        self._unwritten: dict[str, str] = {}
        if not writes:
            return
        from torch.utils.tensorboard import SummaryWriter

        metrics = folder / "metrics.jsonl"
        kept = [record for record in read_jsonl(metrics) if resumed_step and record["step"] <= resumed_step]
        with atomic_write(metrics) as file:
            file.writelines(json.dumps(record) + "\n" for record in kept)
        self._board = SummaryWriter(str(folder / "tb"), purge_step=resumed_step + 1)
        self._wandb = _open_wandb(folder, wandb_project, dict(config or {}), resumed_step) if wandb_project else None

    def say(self, text: str) -> None:
        """Prints a line, and keeps it in log.txt."""
        if self._writes:
            print(text, flush=True)
            self._append("log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def record(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Writes values under the same keys to metrics.jsonl and, there under `split/`, TensorBoard and W&B."""
        if self._writes:
            self._append("metrics.jsonl", json.dumps({"step": step, "split": split, **values}) + "\n")
            with contextlib.suppress(OSError):
                for name, value in values.items():
                    self._board.add_scalar(f"{split}/{name}", value, step)
            if self._wandb is not None:
                self._wandb.log({f"{split}/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        """Flushes TensorBoard and ends the W&B run."""
        if self._writes:
            with contextlib.suppress(OSError):
                self._board.close()
            if self._wandb is not None:
                self._wandb.finish()

    def _append(self, name: str, line: str) -> None:
        """Appends to a file of the run folder; what finds the disk full is kept for the next time."""
        text = self._unwritten.pop(name, "") + line
        try:
            with open(self._folder / name, "ab", buffering=0) as file:
                size = file.tell()
                if file.write(text.encode("utf-8")) < len(text.encode("utf-8")):
                    file.truncate(size)
                    raise OSError
        except OSError:
            self._unwritten[name] = text


def _open_wandb(folder: Path, project: str, config: dict[str, Any], resumed_step: int) -> Any:
    """The W&B run of a run folder: its id lies there, so that a resumed run goes on in the same curves."""
    import wandb

    kept = folder / "wandb_id.txt"
    if not (resumed_step and kept.exists()):
        with atomic_write(kept) as file:
            file.write(uuid.uuid4().hex[:12])
    names = {"project": project, "name": folder.name, "id": kept.read_text(), "dir": str(folder)}
    try:
        return wandb.init(**names, resume="allow", config=config)
    except Exception as error:  # of many kinds: no login, no network, no such project ...
        raise UserError(
            f"run.wandb_project = {project}: {error}. Log in (wandb login), set WANDB_MODE=offline, or leave it null."
        ) from error
