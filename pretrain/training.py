"""The training loop: optimizer steps, records, checkpoints and validations of one run on one rank."""

import math
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from data_prep.examples import ExampleStream
from multicls.console import Progress
from multicls.distributed import on_rank_0
from multicls.environment import peak_memory_gb
from multicls.files import write_json
from multicls.optim import dropout_seed, linear_lr
from pretrain.batches import MicroBatch, load_steps
from pretrain.checkpoints import Checkpoints
from pretrain.export import write_model
from pretrain.log import Log
from pretrain.metrics import MetricSums, collapses, loss_terms, means, measure
from pretrain.nonfinite import NonFiniteGuard, mask_nonfinite
from pretrain.run_folder import DONE, STOPPED
from pretrain.settings import PretrainSettings, TrainSettings
from pretrain.stopping import StopRequest

NORMALIZED = ("mlm", "tfidf", "so")  # losses that are sums over terms; their number varies


def lr_at(step: int, train: TrainSettings) -> float:
    """Returns the learning rate of optimizer step `step` (from 0): linear warm-up to the peak, linear decay to 0."""
    warmup_steps = round(train.warmup_ratio * train.steps)
    return linear_lr(step, train.steps, warmup_steps, train.learning_rate)


def weighted_sum(losses: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Returns the loss to minimise: the sum of the losses, each with its weight."""
    return torch.stack([weights[name] * loss for name, loss in losses.items()]).sum()


@dataclass(eq=False)
class Trainer:
    """The steps, validations and checkpoints of one run on one rank. `train_step` needs engine and settings only.

    Attributes:
        settings: Settings of the run, with micro-batch size, steps and intervals as numbers.
        streams: Streams of examples by split, "train" and "validation".
    """

    engine: Any
    settings: PretrainSettings
    streams: Mapping[str, ExampleStream] = field(default_factory=dict)
    checkpoints: Checkpoints = field(default=None)  # type: ignore[assignment]
    log: Log = field(default=None)  # type: ignore[assignment]
    stop: StopRequest = field(default_factory=StopRequest)

    def __post_init__(self) -> None:
        self.device = torch.device(self.engine.device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.ranks = {"rank": self.rank, "ranks": self.world_size}
        self.guard = NonFiniteGuard(self.engine, self.settings.train.skip_nonfinite)
        self.weights = self.settings.objective.in_use

    def run(self, start: int) -> None:
        """Trains from step `start` to the end, or until a stop request; exports, and marks the run folder."""
        run, train, steps = self.settings.run, self.settings.train, self.settings.train.steps
        size, workers = int(train.micro_batch_size), self.settings.data.num_workers
        sizes = {"size": size, "per_step": train.global_batch_size // size, "workers": workers}
        batches = load_steps(self.streams["train"], range(start, steps), **sizes, **self.ranks)
        progress = Progress(steps, "steps", "pretraining", done=start, shown=self.rank == 0)
        window = MetricSums()
        with self.stop.listening(), progress, closing(batches):
            if start in (0, steps) or _is_due(start, run.eval_every):  # it follows the checkpoint
                self._validate(start)
            elif self.engine.zero_optimization_stage() == 3:
                self.evaluate()  # before DeepSpeed's trace is complete: in DeBERTa, layers return weights here
            progress.unpause()  # the estimate begins with the steps
            for step in range(start, steps):
                done, last = step + 1, step + 1 == steps
                milestone = not last and _is_due(done, run.milestone_every)
                saves = last or milestone or _is_due(done, run.save_every)
                validates = last or _is_due(done, run.eval_every)
                records = saves or validates or _is_due(done, run.log_every)
                begun = time.perf_counter()
                loaded = next(batches)
                waited = time.perf_counter() - begun
                self.train_step(loaded, step, window, measured=records)
                seconds = time.perf_counter() - begun
                window.add({"speed/data_wait": (waited, seconds)})
                window.add({"speed/seconds_per_step": (seconds, 1.0)})
                progress.update(1)
                reason = "" if last else self.stop.agreed()
                if records or reason:
                    self._record(done, window)
                    window = MetricSums()
                if saves or reason:
                    self.log.info(self.checkpoints.save(self.engine, done))
                if reason:
                    self._leave(STOPPED, {"step": done, "reason": reason})
                    return
                if validates:
                    self._validate(done)
                if milestone:
                    self._export(done)
        self._leave(DONE, {"step": steps})

    def train_step(
        self,
        batches: list[MicroBatch],
        step: int,
        window: MetricSums | None = None,
        *,
        measured: bool = False,
    ) -> MetricSums:
        """Makes optimizer step `step` (from 0) over this rank's micro-batches; returns the window.

        MLM, TF-IDF and SO losses are divided by their number of terms in the whole step over all ranks. DeepSpeed
        averages over ranks and accumulated micro-batches, so each micro-batch gets 1 / their number of it.

        Args:
            window: Receives the metrics of the step; None: a new sum. A step without update adds no losses.
            measured: Adds accuracies and facet statistics.

        Raises:
            FloatingPointError: More steps than `train.skip_nonfinite` had losses or gradients that are not finite; the
                weights are those before the step.
        """
        train, window = self.settings.train, MetricSums() if window is None else window
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr_at(step, train)
        batches = [batch.to(self.device) for batch in batches]
        normalizers = self._normalizers(batches)
        losses, terms = [], []
        for batch in batches:
            torch.manual_seed(dropout_seed(train.seed, batch.number))
            outputs = self._forward(batch, normalizers)
            self.engine.backward(mask_nonfinite(weighted_sum(outputs.losses, self.weights)))
            losses.append({name: loss.detach() for name, loss in outputs.losses.items()})
            terms.append(loss_terms(losses[-1], batch, normalizers))
            if measured:
                terms[-1] |= measure(outputs, batch, normalizers, train.negatives_group)
            self.engine.step()  # updates the weights at the last micro-batch, before that it only counts
        updated = self.guard.check_step(step, batches, losses)
        for batch, values in zip(batches, terms, strict=True):
            window.add(values, counted=updated)
            sizes = batch.counts["tokens"], batch.counts["sequences"]
            window.add({"data/tokens_per_sequence": sizes})
        return window

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Returns metrics over the first validation examples, the same for all steps and numbers of ranks."""
        stream, size = self.streams["validation"], self.settings.train.negatives_group
        examples = min(self.settings.run.eval_examples, stream.examples_per_epoch)
        count = max(1, examples // size)  # one group a pass: independent of micro-batches
        padded = math.ceil(count / self.world_size) * self.world_size  # all ranks pass as often
        sizes = {"size": size, "per_step": padded, "workers": 0}
        (batches,) = load_steps(stream, range(1), **sizes, **self.ranks)
        self.engine.eval()
        sums = MetricSums()
        for batch in batches:
            batch = batch.to(self.device)
            normalizers = {name: torch.tensor(max(batch.counts[name], 1.0)) for name in NORMALIZED}
            outputs = self._forward(batch, normalizers)
            terms = loss_terms(outputs.losses, batch, normalizers)
            terms |= measure(outputs, batch, normalizers, size)
            sums.add(terms, counted=batch.number < count)
        self.engine.train()
        return self._with_total(means(sums.totals(self.device)))

    def _export(self, step: int) -> None:
        folder = self.checkpoints.folder.parent
        on_rank_0(lambda: write_model(folder, step, folder / "hf"))

    def _leave(self, marker: str, state: dict[str, Any]) -> None:
        """Exports the newest checkpoint, and marks the run as stopped or done."""
        folder = self.checkpoints.folder.parent
        self._export(state["step"])
        on_rank_0(lambda: write_json(folder / marker, state))
        reason = state.get("reason")
        ending = f"stopped by {reason}, the same command resumes" if reason else "done"
        self.log.info(f"{ending}: checkpoint at step {state['step']}")

    def _forward(self, batch: MicroBatch, normalizers: dict[str, Tensor]) -> Any:
        return self.engine(
            **batch.inputs,
            normalizers=normalizers,
            group_size=self.settings.train.negatives_group,
            objectives=tuple(self.weights),
            unpad=self.settings.train.unpad,
        )

    def _normalizers(self, batches: list[MicroBatch]) -> dict[str, Tensor]:
        """Returns the divisors of the losses of a micro-batch; the requests to leave travel in the same all-reduce."""
        counts = [sum(batch.counts[name] for batch in batches) for name in NORMALIZED]
        table = torch.tensor([*counts, *self.stop.requests()], dtype=torch.float64)
        if self.device.type == "cuda":
            table = table.pin_memory().to(self.device, non_blocking=True)
        dist.all_reduce(table)
        self.stop.note(table[len(counts) :])
        micro_batches = len(batches) * self.world_size
        shares = (table[: len(counts)] / micro_batches).clamp(min=1e-9).float()
        return dict(zip(NORMALIZED, shares.unbind(), strict=True))

    def _with_total(self, values: dict[str, float]) -> dict[str, float]:
        losses = {name: values[f"loss/{name}"] for name in self.weights if f"loss/{name}" in values}
        if not losses:
            return values
        return {"loss/total": sum(self.weights[name] * losses[name] for name in losses)} | values

    def _validate(self, done: int) -> None:
        values = self.evaluate()
        self.log.record(done, "validation", values)
        for problem in collapses(values):
            self.log.info(f"warning: {problem}")

    def _record(self, done: int, window: MetricSums) -> None:
        totals, train = window.totals(self.device), self.settings.train
        tokens, sequences = totals["data/tokens_per_sequence"]
        seconds = totals["speed/seconds_per_step"][0] / self.world_size
        values = self._with_total(means(totals)) | {
            "optim/lr": lr_at(done - 1, train),
            "optim/grad_norm": float(self.engine.get_global_grad_norm() or 0.0),  # before clipping
            "data/tokens": tokens,
            "speed/sequences_per_second": sequences / seconds,
            "speed/tokens_per_second": tokens / seconds,
            "memory/peak_gb": peak_memory_gb(self.device.type),
        }
        if self.engine.fp16_enabled():
            values["optim/loss_scale"] = float(self.engine.optimizer.loss_scaler.cur_scale)
        left = Progress.format_interval(values["speed/seconds_per_step"] * (train.steps - done))
        self.log.record(done, "train", values, note=f"  eta {left}")


def _is_due(done: int, every: float | None) -> bool:
    return every is not None and done % every == 0
