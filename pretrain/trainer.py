"""The loop of a run on one rank: steps, records, validations and checkpoints. Observers follow it.

One step is `train_step` here and `Engine.run_pass`; one save is `Trainer.save` here and `RunFolder.commit`.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor

from data_prep.examples import ExampleStream
from multicls.distributed import on_rank_0
from multicls.environment import flops_per_token, peak_flops, peak_memory_gb
from multicls.errors import print_stderr
from multicls.files import write_json
from multicls.optim import dropout_seed
from pretrain.anchor import Anchor
from pretrain.batches import MicroBatch, load_steps
from pretrain.engine import Engine
from pretrain.export import write_model
from pretrain.metrics import NORMALIZED, MetricSums, Terms, collapses, means
from pretrain.observe import Observer
from pretrain.settings import PretrainSettings, lr_at
from pretrain.setup import Setup
from pretrain.stopping import StopRequest


def train_step(
    engine: Engine,
    settings: PretrainSettings,
    batches: Sequence[MicroBatch],
    step: int,
    *,
    stop: StopRequest | None = None,
    measured: bool = False,
) -> list[Terms]:
    """Makes optimizer step `step` (from 0) over this rank's micro-batches; returns the terms of metrics of each.

    MLM, TF-IDF and SO losses are divided by their number of terms in the whole step over all ranks. DeepSpeed
    averages over ranks and accumulated micro-batches, so each micro-batch gets 1 / their number of it.

    Args:
        settings: Settings of the run, with micro-batch size and steps as numbers.
        stop: Its votes are exchanged with those of the other ranks.
        measured: Adds accuracies and facet statistics.
    """
    train = settings.train
    engine.set_learning_rate(lr_at(step, train))
    batches = [batch.to(engine.device) for batch in batches]
    normalizers = exchange_counts_and_votes(batches, stop or StopRequest(), engine.device)
    return [
        engine.run_pass(batch, normalizers, dropout_seed(train.seed, batch.number), measured)
        for batch in batches
    ]


def exchange_counts_and_votes(
    batches: Sequence[MicroBatch], stop: StopRequest, device: torch.device
) -> Tensor:
    """Returns the divisors of a micro-batch's losses, (3,); one all-reduce sums the ranks' counts and stop votes."""
    counts = [sum(batch.counts[name] for batch in batches) for name in NORMALIZED]
    table = torch.tensor([*counts, *stop.votes()], dtype=torch.float64)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    dist.all_reduce(table)
    stop.take_result(table[len(counts) :])
    micro_batches = len(batches) * dist.get_world_size()
    return (table[: len(counts)] / micro_batches).clamp(min=1e-9).float()


def evaluate(engine: Engine, settings: PretrainSettings, stream: ExampleStream) -> dict[str, float]:
    """Returns metrics over the first examples of the validation stream, the same for all steps and numbers of ranks."""
    ranks = dist.get_world_size()
    size = min(settings.train.negatives_group, stream.examples_per_epoch)  # none twice
    examples = min(settings.run.eval_examples, stream.examples_per_epoch)
    count = max(1, examples // size)  # one group a pass: independent of micro-batches
    (batches,) = load_steps(
        stream,
        range(1),
        size=size,
        per_step=math.ceil(count / ranks) * ranks,  # all ranks pass as often
        workers=0,
        rank=dist.get_rank(),
        ranks=ranks,
        unpad=settings.train.unpad is True,
    )
    sums = MetricSums()
    for batch in batches:
        batch = batch.to(engine.device)
        counts = [max(batch.counts[name], 1.0) for name in NORMALIZED]
        terms = engine.evaluate(batch, torch.tensor(counts, device=engine.device), size)
        sums.add(terms, batch.counts, counted=batch.number < count)
    return with_total(means(sums.totals(engine.device)), settings.objective.in_use)


def with_total(values: dict[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics with "loss/total", the weighted sum of the losses in them, first."""
    losses = {name: values[f"loss/{name}"] for name in weights if f"loss/{name}" in values}
    if not losses:
        return values
    return {"loss/total": sum(weights[name] * losses[name] for name in losses)} | values


class NonFiniteGuard:
    """Counts the optimizer steps without update; all ranks come to the same result.

    DeepSpeed makes no update if the gradients of any rank are not finite; weights and moments stay unchanged. With
    fp16 it also skips a step whose gradients overflow, and halves the loss scale; such a step does not count.

    The process may make `allowed` steps without update; `skipped` counts them.
    """

    def __init__(self, engine: Engine, allowed: int) -> None:
        self._engine, self._allowed = engine, allowed
        self.skipped = 0

    def check_step(self, step: int, batches: Sequence[MicroBatch], terms: Sequence[Terms]) -> bool:
        """Returns True if optimizer step `step` changed the weights.

        Args:
            terms: Terms of metrics of each of the rank's micro-batches.

        Raises:
            FloatingPointError: It did not, and no more steps may be skipped. The weights are those before the step.
        """
        if self._engine.was_updated:
            return True
        wrong = [
            {
                name: float(value)
                for name, (value, _) in found.items()
                if name.startswith("loss/") and not math.isfinite(value)
            }
            for found in terms
        ]
        ranks = torch.tensor(float(any(wrong)), device=self._engine.device)
        dist.all_reduce(ranks)
        if not ranks and self._engine.is_fp16:
            return False
        for batch, named in zip(batches, wrong, strict=True):
            if named or not ranks:  # if all losses are finite, any example may be the cause
                values = ", ".join(f"{name} = {value}" for name, value in named.items())
                examples = " ".join("{}:{}:{}".format(*window) for window in batch.windows.tolist())
                where = f"step {step}, rank {dist.get_rank()}: {values or 'the losses are finite'}"
                print_stderr(f"{where}; examples (row:window:epoch) {examples}")
        what = "gradients are not finite"
        if ranks:
            what = f"a loss is not finite on {int(ranks)} rank(s)"
        self.skipped += 1
        if self.skipped > self._allowed:
            raise FloatingPointError(
                f"step {step}: {what}; the weights are as before the step. train.skip_nonfinite = {self._allowed} "
                "step(s) may go without update, so the run stops. Look at the examples named above, try a lower "
                "train.learning_rate or train.precision = fp32, or allow more steps."
            )
        if dist.get_rank() == 0:
            left = self._allowed - self.skipped
            print_stderr(f"step {step}: {what}; no update, {left} more may follow")
        return False


class Trainer:
    """The loop of one run on one rank."""

    def __init__(
        self,
        setup: Setup,
        engine: Engine,
        observers: Sequence[Observer],
        anchor: Anchor | None = None,
    ) -> None:
        self.setup, self.engine, self.observers, self.anchor = setup, engine, observers, anchor
        self.settings, self.folder = setup.settings, setup.folder
        self.guard = NonFiniteGuard(engine, self.settings.train.skip_nonfinite)
        self.sums = MetricSums()

    def run(self) -> None:
        """Trains to the end and exports, or until a stop request; marks the run folder."""
        start, stop, train = self.setup.start_step, self.setup.stop, self.settings.train
        size = int(train.micro_batch_size)
        batches = load_steps(
            self.setup.streams["train"],
            range(start, train.steps),
            size=size,
            per_step=train.global_batch_size // size,
            workers=self.settings.data.num_workers,
            rank=dist.get_rank(),
            ranks=dist.get_world_size(),
            unpad=train.unpad is True,
        )
        with_targets = self.anchor.add_to_steps(batches) if self.anchor else batches
        with stop.listening(), closing(batches):
            self._begin(start)
            for step in range(start, train.steps):
                done, begun = step + 1, time.perf_counter()
                loaded = next(with_targets)
                waited = time.perf_counter() - begun
                self._step(loaded, step)
                seconds = time.perf_counter() - begun
                self.sums.add({"speed/data_wait": (waited, seconds)})
                self.sums.add({"speed/seconds_per_step": (seconds, 1.0)})
                for observer in self.observers:
                    observer.on_step(done)
                reason = stop.reason() if done < train.steps else ""
                if reason or self._is_recorded(done):
                    self._record(done)
                if reason or self._is_saved(done):
                    self.save(done)
                if reason:
                    self._stop(done, reason)
                    return
                if self._is_validated(done):
                    self._validate(done)
        self._finish(train.steps)

    def _begin(self, start: int) -> None:
        """Validates a new run, or what a stop has left to validate: a validation follows the checkpoint."""
        if self._is_validated(start):
            self._validate(start)
        elif self.engine.deepspeed.zero_optimization_stage() == 3:
            # Before DeepSpeed's trace is complete: in DeBERTa, layers return weights here.
            evaluate(self.engine, self.settings, self.setup.streams["validation"])

    def _step(self, batches: Sequence[MicroBatch], step: int) -> None:
        """Makes one step and adds its terms to the sums."""
        measured = self._is_recorded(step + 1)
        terms = train_step(
            self.engine, self.settings, batches, step, stop=self.setup.stop, measured=measured
        )
        updated = self.guard.check_step(step, batches, terms)
        add_terms(self.sums, batches, terms, updated)

    def _is_due(self, done: int, every: float | None) -> bool:
        return done == self.settings.train.steps or (every is not None and done % every == 0)

    def _is_saved(self, done: int) -> bool:
        run = self.settings.run
        return self._is_due(done, run.save_every) or self._is_due(done, run.milestone_every)

    def _is_validated(self, done: int) -> bool:
        return self._is_due(done, self.settings.run.eval_every)

    def _is_recorded(self, done: int) -> bool:
        is_due = self._is_due(done, self.settings.run.log_every)
        return is_due or self._is_saved(done) or self._is_validated(done)

    def save(self, step: int) -> None:
        """Saves a checkpoint, marks it complete and deletes old ones. All ranks call it."""
        begun, folder, run = time.monotonic(), self.folder, self.settings.run
        on_rank_0(lambda: folder.begin_checkpoint(step))
        self.engine.save(folder.checkpoints, folder.checkpoint(step).name)
        dist.barrier()  # all files of all ranks are on the disk
        facts = self.setup.facts
        size = on_rank_0(
            lambda: folder.commit(step, facts, run.keep_checkpoints, run.milestone_every)
        )
        seconds = time.monotonic() - begun
        self._report(f"checkpoint of step {step}: {size / 1e6:.0f} MB in {seconds:.1f} s")

    def _validate(self, done: int) -> None:
        values = dict[str, float]()
        if self.settings.train.steps:  # a run without steps needs no examples
            values = evaluate(self.engine, self.settings, self.setup.streams["validation"])
        warnings = [f"warning: {problem}" for problem in collapses(values)]
        for observer in self.observers:
            values |= observer.measure(self.engine, done)
        if not values:  # of a run without steps and labels
            return
        for observer in self.observers:
            observer.on_record(done, "validation", values)
        self._report(*warnings)
        kept = on_rank_0(lambda: [observer.keeps(done) for observer in self.observers])
        if any(kept) and on_rank_0(lambda: done not in self.folder.saved_steps):
            self.save(done)
        for observer, keeps in zip(self.observers, kept, strict=True):
            if keeps:
                on_rank_0(partial(observer.on_kept, done))

    def _record(self, done: int) -> None:
        totals = self.sums.totals(self.engine.device)
        self.sums = MetricSums()
        tokens, sequences = totals["data/tokens_per_sequence"]
        ranks = dist.get_world_size()
        seconds = totals["speed/seconds_per_step"][0] / ranks
        values = with_total(means(totals), self.settings.objective.in_use)
        values["optim/lr"] = lr_at(done - 1, self.settings.train)
        values |= self.engine.state()
        values["data/tokens"] = tokens
        values["speed/sequences_per_second"] = sequences / seconds
        values["speed/tokens_per_second"] = tokens / seconds
        values["memory/peak_gb"] = peak_memory_gb(self.engine.device.type)
        if self.engine.device.type == "cuda":
            values["memory/reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
            if peak := peak_flops(torch.cuda.get_device_name()):
                values["speed/mfu"] = tokens / seconds / ranks * self._flops / peak
        for observer in self.observers:
            observer.on_record(done, "train", values)
        self._report(*self.engine.new_notes())

    @cached_property
    def _flops(self) -> float:
        """Operations of a token in a step."""
        return flops_per_token(
            self.engine.module.config,
            tuple(self.settings.objective.in_use),
            length=self.settings.data.seq_length,
            group_size=self.settings.train.negatives_group,
            mlm_probability=self.settings.data.mlm_probability,
        )

    def _stop(self, step: int, reason: str) -> None:
        """Marks the run as stopped. A stop has little time, and pretrain/export.py exports at any time."""
        on_rank_0(lambda: write_json(self.folder.stopped, {"step": step, "reason": reason}))
        self._report(f"stopped by {reason}, the same command resumes: checkpoint at step {step}")

    def _finish(self, step: int) -> None:
        """Exports the model that the observers choose, and marks the run as done."""

        def export() -> None:
            chosen = step
            for observer in self.observers:
                chosen = observer.exported(chosen)
            write_model(self.folder, chosen, self.folder.export)
            write_json(self.folder.done, {"step": step})

        for observer in self.observers:
            observer.on_end()
        on_rank_0(export)
        self._report(f"done: checkpoint at step {step}" if step else "done: nothing was trained")

    def _report(self, *lines: str) -> None:
        for line in lines:
            for observer in self.observers:
                observer.on_line(line)


def add_terms(
    sums: MetricSums, batches: Sequence[MicroBatch], terms: Sequence[Terms], updated: bool
) -> None:
    """Adds the terms of a step to the sums; a step without update adds no losses."""
    for batch, found in zip(batches, terms, strict=True):
        sums.add(found, batch.counts, counted=updated)
        sizes = float(batch.counts["tokens"]), float(batch.counts["sequences"])
        sums.add({"data/tokens_per_sequence": sizes})
