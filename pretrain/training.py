"""The training loop: optimizer steps, evaluations and checkpoints of one run on one rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from data_prep.examples import ExampleStream
from multicls.console import Progress, Pulse
from multicls.environment import peak_memory_gb
from multicls.errors import UserError
from multicls.optim import dropout_seed, linear_lr
from pretrain.batches import MicroBatch, RankSampler, load_steps
from pretrain.engine import grad_norm, loss_scale
from pretrain.flops import known_peak_tflops, throughput
from pretrain.gather import gather_rows
from pretrain.log import Log, console_line, validation_line
from pretrain.metrics import MetricSums, collapses, loss_terms, means, measure
from pretrain.nonfinite import NonFiniteGuard
from pretrain.settings import ObjectiveSettings, PretrainSettings, TrainSettings
from pretrain.stopping import Stopped, StopRequest, naming_a_lost_rank

if TYPE_CHECKING:
    from pretrain.checkpoints import Checkpoints

NORMALIZED = ("mlm", "tfidf", "so")  # losses that are sums over terms, whose number differs between micro-batches


def lr_at(step: int, train: TrainSettings) -> float:
    """Returns the learning rate of optimizer step `step` (from 0): linear warm-up to the peak, linear decay to 0."""
    return linear_lr(step, train.steps, round(train.warmup_ratio * train.steps), train.learning_rate)


def weighted_sum(losses: Mapping[str, Tensor], objective: ObjectiveSettings) -> Tensor:
    """Returns the loss to minimise: the sum of the losses in use, each with its weight."""
    weights = objective.model_dump()
    return torch.stack([weights[name] * loss for name, loss in losses.items() if weights[name]]).sum()


@dataclass(eq=False)
class Trainer:
    """The steps, evaluations and checkpoints of one run on one rank.

    Attributes:
        settings: Settings of the run, with micro-batch size and steps as numbers.
        validation_stream: Always read from its beginning.
        export: Writes the model after `step` steps to RUN/hf; all ranks call it.
    """

    engine: Any
    settings: PretrainSettings
    train_stream: ExampleStream
    validation_stream: ExampleStream
    checkpoints: Checkpoints
    log: Log
    stop: StopRequest
    export: Callable[[int], None] = lambda step: None

    def __post_init__(self) -> None:
        self.device = torch.device(self.engine.device)
        self.guard = NonFiniteGuard(self.engine, self.settings.train.skip_nonfinite)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.validated: dict[str, float] = {}
        self._validation_batches: list[MicroBatch] = []
        self._peak_tflops = self._all_peak_tflops()

    def run(self, start_step: int, state: dict[str, Any]) -> dict[str, float]:
        """Trains from `start_step`, where `state` was saved, to the end; returns the last validation metrics.

        Raises:
            Stopped: Asked to leave before the end; everything is saved.
        """
        train = self.settings.train
        size = int(train.micro_batch_size)
        sampler = RankSampler(train.global_batch_size // size, self.rank, self.world_size)
        steps, workers = range(start_step, train.steps), self.settings.data.num_workers
        loaded = load_steps(self.train_stream, sampler, steps, size=size, workers=workers, unpad=train.unpad)
        with closing(Progress("pretraining", train.steps, done=start_step, unit="steps", shown=self.rank == 0)) as bar:
            self._bar = bar
            if start_step == 0:
                self._report_validation(0)
            self._train(steps, loaded, *self._restore(state))
        return self.validated or self.evaluate()

    def _train(self, steps: range, loaded: Iterator[list[MicroBatch]], window: MetricSums, timer: StepTimer) -> None:
        """Makes the steps, with what each of them asks for: a record, a validation, a checkpoint, an export."""
        run, bar, pulse = self.settings.run, self._bar, Pulse()
        for step in steps:
            done = step + 1
            last = done == steps.stop
            logged = last or done % run.log_every == 0
            with naming_a_lost_rank(done):
                with timer.waiting():
                    batches = next(loaded)
                self.train_step(batches, step, window, measured=logged)
                timer.steps += 1
                bar.update(done)
                if logged:
                    self._report(done, window, timer)
                    window, timer = MetricSums(), StepTimer()
                    pulse.reset()
                elif self.rank == 0 and not bar.on_terminal and (step == steps.start or pulse.due()):
                    self._say_progress(done, window, timer)
                if last or done % run.eval_every == 0:
                    with timer.paused():
                        self._report_validation(done)
                asked = "" if last else self.stop.agreed()
                milestone = bool(run.milestone_every) and done % (run.milestone_every or 1) == 0
                if asked or last or milestone or done % run.save_every == 0:
                    with timer.paused():
                        self._save(done, window, timer)
                        if (asked or milestone) and not last:
                            self._export(done)
                if asked:
                    raise Stopped(self.checkpoints.newest_step(), asked)

    def train_step(
        self, batches: list[MicroBatch], step: int, window: MetricSums | None = None, *, measured: bool = False
    ) -> MetricSums:
        """Makes optimizer step `step` (from 0) over this rank's micro-batches.

        Returns `window`, or a new sum, with the losses of the step.

        MLM, TF-IDF and SO losses are divided by their number of terms in the whole step over all ranks. DeepSpeed
        averages over ranks and accumulated micro-batches, so each micro-batch is given 1 / their number of it. If
        `measured`, accuracies and facet statistics are added, too.

        Raises:
            FloatingPointError: More steps than `train.skip_nonfinite` had losses or gradients that are not finite; the
                weights are those before the step.
        """
        train, window = self.settings.train, MetricSums() if window is None else window
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr_at(step, train)
        batches = [batch.to(self.device) for batch in batches]
        normalizers = self._normalizers(batches)
        for batch in batches:
            torch.manual_seed(dropout_seed(train.seed, batch.number))
            outputs = self._forward(batch, normalizers, gather=gather_rows if train.gather_negatives else None)
            loss = weighted_sum(outputs.losses, self.settings.objective)
            self.engine.backward(self.guard.watch(batch, outputs.losses, loss))
            window.add(loss_terms(outputs.losses, batch, normalizers))
            if measured:
                window.add(measure(outputs, batch, normalizers, train.negatives_group))
            self.engine.step()  # updates the weights at the last micro-batch, before that it only counts
        self.guard.judge(step)
        return window

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Returns metrics over the first validation examples, the same for all steps and numbers of ranks."""
        size = self.settings.train.negatives_group  # one group a pass: metrics do not depend on the micro-batch size
        available = self.validation_stream.examples_per_epoch
        count = max(1, min(self.settings.run.eval_examples, available) // size)
        padded = math.ceil(count / self.world_size) * self.world_size  # all ranks take part in each forward pass
        if not self._validation_batches:
            sampler = RankSampler(padded, self.rank, self.world_size)
            unpad = self.settings.train.unpad
            loaded = load_steps(self.validation_stream, sampler, range(1), size=size, workers=0, unpad=unpad)
            self._validation_batches = next(loaded)
        self.engine.eval()
        sums, examples, shown = MetricSums(), len(self._validation_batches) * size, self.rank == 0
        with closing(Progress("validation", examples, unit="examples", say=self.log.say, shown=shown)) as progress:
            for batch in self._validation_batches:
                batch = batch.to(self.device)
                normalizers = {name: torch.tensor(max(batch.counts[name], 1.0)) for name in NORMALIZED}
                outputs = self._forward(batch, normalizers)
                terms = loss_terms(outputs.losses, batch, normalizers) | measure(outputs, batch, normalizers)
                sums.add(terms, counted=batch.number < count)
                progress.update(progress.done + size)
        self.engine.train()
        return self._with_total(means(sums.totals(self.device)))

    def _forward(
        self, batch: MicroBatch, normalizers: dict[str, Tensor], gather: Callable[[Tensor], Tensor] | None = None
    ) -> Any:
        group = self.settings.train.negatives_group
        return self.engine(**batch.inputs, normalizers=normalizers, group_size=group, gather=gather)

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

    def _all_peak_tflops(self) -> float | None:
        """Returns the peak of all devices; without a setting that of known GPUs in 16-bit arithmetic."""
        peak = self.settings.run.peak_tflops
        if peak is None and self.device.type == "cuda" and self.engine.get_data_types()[0] != torch.float32:
            peak = known_peak_tflops(torch.cuda.get_device_name(self.device))
        return peak and peak * self.world_size

    def _with_total(self, values: dict[str, float]) -> dict[str, float]:
        weights = self.settings.objective.model_dump()
        return {"loss/total": sum(weights[name] * values.get(f"loss/{name}", 0.0) for name in weights)} | values

    def _report_validation(self, step: int) -> None:
        with self._bar.hidden():
            self.validated = values = self.evaluate()
        self.log.record(step, "validation", values)
        self.log.say(validation_line(step, values))
        for problem in collapses(values) if self.settings.objective.mcqt else []:
            self.log.say(f"warning: {problem}")

    def _restore(self, state: dict[str, Any]) -> tuple[MetricSums, StepTimer]:
        """Returns the sums and the timer of the window that a checkpoint was saved in."""
        window, timer = MetricSums(), StepTimer(**state.get("timer", {}))
        for saved in state.get("windows", [])[self.rank :: self.world_size]:  # with other ranks, several or none
            window.add_state(saved, self.device)
        self.guard.skipped = state.get("skipped", 0)
        return window, timer

    def _save(self, done: int, window: MetricSums, timer: StepTimer) -> None:
        windows: list[Any] = [None] * self.world_size
        dist.all_gather_object(windows, window.state())
        state = {"windows": windows, "timer": timer.state(), "skipped": self.guard.skipped}
        self.checkpoints.save(self.engine, done, state | {"micro_batch_size": self.settings.train.micro_batch_size})
        for note in self.checkpoints.new_notes():
            self.log.say(note)

    def _export(self, done: int) -> None:
        try:
            self.export(done)
        except UserError as error:  # a full disk; the run goes on
            self.log.say(f"WARNING: {error}")

    def _say_progress(self, done: int, window: MetricSums, timer: StepTimer) -> None:
        """Says, between two records, the losses since the last one on this rank alone: no other rank waits."""
        values = self._with_total(means(window.totals(self.device, own=True)))
        values["optim/lr"] = lr_at(done - 1, self.settings.train)
        eta = timer.seconds() / timer.steps * (self.settings.train.steps - done)
        self.log.say(console_line(done, self.settings.train.steps, values, eta))

    def _report(self, done: int, window: MetricSums, timer: StepTimer) -> None:
        totals = window.totals(self.device)
        values = self._with_total(means(totals)) | {"optim/lr": lr_at(done - 1, self.settings.train)}
        if math.isfinite(norm := grad_norm(self.engine)):  # infinite after a step without update
            values["optim/grad_norm"] = norm
        if scale := loss_scale(self.engine):
            values["optim/loss_scale"] = scale
        seconds = timer.seconds()
        values |= throughput(self.engine.module.config, totals, seconds, self._peak_tflops)
        values |= timer.metrics(seconds) | {"memory/peak_gb": peak_memory_gb(self.device.type)}
        self.log.record(done, "train", values)
        eta = values["speed/seconds_per_step"] * (self.settings.train.steps - done)
        self.log.say(console_line(done, self.settings.train.steps, values, eta))
        if self.checkpoints.warning:
            self.log.say(self.checkpoints.warning)  # on each line until a save succeeds


class StepTimer:
    """Times a window of steps without the evaluations and checkpoints in it."""

    def __init__(self, seconds: float = 0.0, waited: float = 0.0, steps: int = 0) -> None:
        self._started = time.perf_counter() - seconds
        self._waited = waited
        self.steps = steps

    def state(self) -> dict[str, float]:
        """Returns the arguments of a timer that goes on from here."""
        return {"seconds": self.seconds(), "waited": self._waited, "steps": self.steps}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside as waiting for data."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out the time inside."""
        start = time.perf_counter()
        yield
        self._started += time.perf_counter() - start

    def seconds(self) -> float:
        """Returns the seconds of the window so far."""
        return time.perf_counter() - self._started

    def metrics(self, seconds: float) -> dict[str, float]:
        """Returns seconds per step, and the share of `seconds` spent waiting for data."""
        return {"speed/seconds_per_step": seconds / max(self.steps, 1), "speed/data_wait": self._waited / seconds}
