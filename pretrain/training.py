"""The training loop: optimizer steps, records, checkpoints and validations of one run on one rank."""

import math
import time
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import profile, schedule, tensorboard_trace_handler
from tqdm import tqdm

from data_prep.examples import ExampleStream
from multicls.console import progress_bar
from multicls.corpus import Corpus
from multicls.distributed import on_rank_0
from multicls.environment import flops_per_token, peak_flops, peak_memory_gb
from multicls.errors import UserError
from multicls.files import write_json
from multicls.optim import dropout_seed
from pretrain.batches import MicroBatch, load_steps, prefetch_to
from pretrain.checkpoints import Checkpoints
from pretrain.export import write_model
from pretrain.log import Log
from pretrain.metrics import MetricSums, collapses, loss_terms, means, measure
from pretrain.nonfinite import NonFiniteGuard, mask_nonfinite
from pretrain.probing import TrainingProbe
from pretrain.run_folder import DONE, STOPPED, best_step, saved_steps
from pretrain.settings import PretrainSettings, lr_at
from pretrain.stopping import StopRequest

NORMALIZED = ("mlm", "tfidf", "so")  # losses that are sums over terms; their number varies


def build_profiler(folder: Path, steps: int | None) -> profile | None:
    """Returns a profiler that writes a trace of `steps` steps, from the second on; None: no trace on this rank.

    Raises:
        UserError: The folder cannot be made.
    """
    if steps is None or dist.get_rank() > 0:
        return None
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"run.profile: {folder}: cannot be written: {error.strerror}.") from None
    once = schedule(wait=0, warmup=1, active=steps, repeat=1)
    return profile(schedule=once, on_trace_ready=tensorboard_trace_handler(str(folder)))


def train_step(
    engine: Any,
    settings: PretrainSettings,
    batches: list[MicroBatch],
    step: int,
    *,
    sums: MetricSums | None = None,
    guard: NonFiniteGuard | None = None,
    stop: StopRequest | None = None,
    measured: bool = False,
) -> MetricSums:
    """Makes optimizer step `step` (from 0) over this rank's micro-batches; returns the sums of its metrics.

    MLM, TF-IDF and SO losses are divided by their number of terms in the whole step over all ranks. DeepSpeed
    averages over ranks and accumulated micro-batches, so each micro-batch gets 1 / their number of it.

    Args:
        settings: Settings of the run, with micro-batch size and steps as numbers.
        sums: Receives the metrics; None: new sums. A step without update adds no losses.
        guard: Counts the steps without update; None: a new one.
        stop: Its votes are exchanged with those of the other ranks.
        measured: Adds accuracies and facet statistics.

    Raises:
        FloatingPointError: More steps than `train.skip_nonfinite` had losses or gradients that are not finite; the
            weights are those before the step.
    """
    train, weights = settings.train, settings.objective.in_use
    sums = MetricSums() if sums is None else sums
    guard = guard or NonFiniteGuard(engine, train.skip_nonfinite)
    for group in engine.optimizer.param_groups:
        group["lr"] = lr_at(step, train) * group.get("lr_factor", 1.0)
    device = torch.device(engine.device)
    batches = [batch.to(device) for batch in batches]
    normalizers = exchange_counts_and_votes(batches, stop or StopRequest(), device)
    arguments: Any = {"normalizers": normalizers, "group_size": train.negatives_group}
    arguments |= {"objectives": tuple(weights), "unpad": train.unpad}
    losses, terms = [], []
    for batch in batches:
        torch.manual_seed(dropout_seed(train.seed, batch.number))
        outputs = engine(**batch.inputs, **arguments)
        weighted = [weights[name] * loss for name, loss in outputs.losses.items()]
        engine.backward(mask_nonfinite(torch.stack(weighted).sum()))
        losses.append({name: loss.detach() for name, loss in outputs.losses.items()})
        terms.append(loss_terms(losses[-1], batch, normalizers))
        if measured:
            terms[-1] |= measure(outputs, batch, normalizers, train.negatives_group)
        engine.step()  # updates the weights at the last micro-batch, before that it only counts
    updated = guard.check_step(step, batches, losses)
    for batch, values in zip(batches, terms, strict=True):
        sums.add(values, counted=updated)
        sizes = batch.counts["tokens"], batch.counts["sequences"]
        sums.add({"data/tokens_per_sequence": sizes})
    return sums


def exchange_counts_and_votes(
    batches: list[MicroBatch], stop: StopRequest, device: torch.device
) -> dict[str, Tensor]:
    """Returns the divisors of the losses of a micro-batch; one all-reduce sums the ranks' counts and stop votes."""
    counts = [sum(batch.counts[name] for batch in batches) for name in NORMALIZED]
    table = torch.tensor([*counts, *stop.votes()], dtype=torch.float64)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    dist.all_reduce(table)
    stop.take_result(table[len(counts) :])
    micro_batches = len(batches) * dist.get_world_size()
    shares = (table[: len(counts)] / micro_batches).clamp(min=1e-9).float()
    return dict(zip(NORMALIZED, shares.unbind(), strict=True))


@torch.no_grad()
def evaluate(engine: Any, settings: PretrainSettings, stream: ExampleStream) -> dict[str, float]:
    """Returns metrics over the first examples of the validation stream, the same for all steps and numbers of ranks."""
    ranks, device = dist.get_world_size(), torch.device(engine.device)
    size = min(settings.train.negatives_group, stream.examples_per_epoch)  # none twice
    examples = min(settings.run.eval_examples, stream.examples_per_epoch)
    count = max(1, examples // size)  # one group a pass: independent of micro-batches
    padded = math.ceil(count / ranks) * ranks  # all ranks pass as often
    sizes = {"size": size, "per_step": padded, "workers": 0, "ranks": ranks}
    options: dict[str, Any] = sizes | {"rank": dist.get_rank(), "unpad": settings.train.unpad}
    (batches,) = load_steps(stream, range(1), **options)
    engine.eval()
    sums, weights, unpad = MetricSums(), settings.objective.in_use, settings.train.unpad
    arguments: Any = {"group_size": size, "objectives": tuple(weights), "unpad": unpad}
    for batch in batches:
        batch = batch.to(device)
        normalizers = {name: torch.tensor(max(batch.counts[name], 1.0)) for name in NORMALIZED}
        outputs = engine(**batch.inputs, normalizers=normalizers, **arguments)
        terms = loss_terms(outputs.losses, batch, normalizers)
        terms |= measure(outputs, batch, normalizers, size)
        sums.add(terms, counted=batch.number < count)
    engine.train()
    return with_total(means(sums.totals(device)), weights)


def with_total(values: dict[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics with "loss/total", the weighted sum of the losses in them, first."""
    losses = {name: values[f"loss/{name}"] for name in weights if f"loss/{name}" in values}
    if not losses:
        return values
    return {"loss/total": sum(weights[name] * losses[name] for name in losses)} | values


@dataclass(frozen=True)
class Job:
    """A pretraining run that is ready to start on this rank.

    Attributes:
        settings: With micro-batch size, steps and intervals as numbers.
        completed: The DeepSpeed JSON with the values of the settings.
        streams: Streams of examples by split, "train" and "validation".
        start_step: Step of the checkpoint to resume from; 0: a new run.
        stop: Its time limit counts from the preparation on.
    """

    settings: PretrainSettings
    completed: dict[str, Any]
    corpus: Corpus
    model: Any
    tokenizer: Any
    streams: dict[str, ExampleStream]
    checkpoints: Checkpoints
    start_step: int
    notes: list[str]
    probe: TrainingProbe | None
    stop: StopRequest

    @property
    def run_folder(self) -> Path:
        """The folder of the run."""
        return Path(self.settings.run.output_dir)


class Trainer:
    """The loop of one run on one rank: steps, records, validations and checkpoints."""

    def __init__(self, engine: Any, job: Job, log: Log) -> None:
        self.engine, self.job, self.log = engine, job, log
        self.settings, self.probe, self.checkpoints = job.settings, job.probe, job.checkpoints
        self.begun = time.perf_counter()

    def run(self) -> None:
        """Trains to the end and exports, or until a stop request; marks the run folder."""
        start, stop = self.job.start_step, self.job.stop
        run, train, steps = self.settings.run, self.settings.train, self.settings.train.steps
        batches = self._batches(range(start, steps))
        on_device = prefetch_to(torch.device(self.engine.device), batches)
        hidden = dist.get_rank() > 0
        progress = progress_bar(steps, "steps", "pretraining", initial=start, disable=hidden)
        guard, sums = NonFiniteGuard(self.engine, train.skip_nonfinite), MetricSums()
        make_step = partial(train_step, self.engine, self.settings, guard=guard, stop=stop)
        profiler = build_profiler(self.job.run_folder / "profile", run.profile)
        with stop.listening(), progress, closing(batches), profiler or nullcontext():
            if start in (0, steps) or _is_due(start, run.eval_every):  # it follows the checkpoint
                self._validate(start)
            elif self.engine.zero_optimization_stage() == 3:
                # Before DeepSpeed's trace is complete: in DeBERTa, layers return weights here.
                evaluate(self.engine, self.settings, self.job.streams["validation"])
            progress.unpause()  # the estimate begins with the steps
            for step in range(start, steps):
                done, is_last = step + 1, step + 1 == steps
                is_milestone = not is_last and _is_due(done, run.milestone_every)
                save_due = (
                    is_last or self.checkpoints.is_permanent(done) or _is_due(done, run.save_every)
                )
                validation_due = is_last or _is_due(done, run.eval_every)
                record_due = save_due or validation_due or _is_due(done, run.log_every)
                begun = time.perf_counter()
                loaded = next(on_device)
                waited = time.perf_counter() - begun
                make_step(loaded, step, sums=sums, measured=record_due)
                if profiler:
                    profiler.step()
                seconds = time.perf_counter() - begun
                sums.add({"speed/data_wait": (waited, seconds)})
                sums.add({"speed/seconds_per_step": (seconds, 1.0)})
                progress.update(1)
                reason = "" if is_last else stop.reason()
                if record_due or reason:
                    self._record(done, sums)
                    sums = MetricSums()
                if save_due or reason:
                    self.log.info(self.checkpoints.save(self.engine, done))
                if reason:
                    self._leave(done, reason)
                    return
                if validation_due:
                    self._validate(done)
                if is_milestone:
                    self._export(done)
        self._leave(steps)

    def _batches(self, steps: range) -> Any:
        """Returns this rank's loaded batches of some steps, in order; the caller closes them."""
        train, workers = self.settings.train, self.settings.data.num_workers
        size = int(train.micro_batch_size)
        sizes: Any = {"size": size, "per_step": train.global_batch_size // size, "workers": workers}
        ranks = {"rank": dist.get_rank(), "ranks": dist.get_world_size()}
        return load_steps(self.job.streams["train"], steps, **sizes, **ranks, unpad=train.unpad)

    def _export(self, step: int) -> None:
        folder, run = self.job.run_folder, self.settings.run
        steps = [step]
        if run.keep_best and (best := best_step(folder)):
            steps = [best]
            self.log.info(f"the best step by the probe, {best}, is exported")
        elif run.keep_best and self.probe and not self.settings.model.random_weights:
            steps = []
            self.log.info(
                "no step was better than step 0: the model before training is exported, without new facets"
            )
        on_rank_0(lambda: write_model(folder, steps, folder / "hf"))

    def _leave(self, step: int, reason: str = "") -> None:
        """Marks the run as stopped for a reason, or exports its last checkpoint and marks it as done."""
        folder, ending, marker = self.job.run_folder, "done", DONE
        state: dict[str, Any] = {"step": step}
        if reason:  # a stop has little time, and pretrain/export.py makes the same at any time
            ending, marker = f"stopped by {reason}, the same command resumes", STOPPED
            state["reason"] = reason
        else:
            if self.probe and self.probe.scores:
                for line in self.probe.summary(time.perf_counter() - self.begun):
                    self.log.info(line)
                state["view"] = self.probe.recommended
            self._export(step)
        on_rank_0(lambda: write_json(folder / marker, state))
        self.log.info(f"{ending}: checkpoint at step {step}")

    def _validate(self, done: int) -> None:
        values = evaluate(self.engine, self.settings, self.job.streams["validation"])
        problems, is_best = collapses(values), False
        if self.probe:
            metrics, is_best = self.probe.validate(self.engine, done)
            values |= metrics
            problems += self.probe.warnings()
        self.log.record(done, "validation", values)
        if done and self.probe and self.probe.last:
            self.log.info(self.probe.changes())
        for problem in problems:
            self.log.info(f"warning: {problem}")
        if self.probe and is_best and self.settings.run.keep_best:
            if on_rank_0(lambda: done not in saved_steps(self.checkpoints.folder)):
                self.log.info(self.checkpoints.save(self.engine, done))
            on_rank_0(self.probe.write_best)

    def _record(self, done: int, sums: MetricSums) -> None:
        device, train = torch.device(self.engine.device), self.settings.train
        totals = sums.totals(device)
        tokens, sequences = totals["data/tokens_per_sequence"]
        seconds = totals["speed/seconds_per_step"][0] / dist.get_world_size()
        values = with_total(means(totals), self.settings.objective.in_use) | {
            "optim/lr": lr_at(done - 1, train),
            "optim/grad_norm": float(self.engine.get_global_grad_norm() or 0.0),  # before clipping
            "data/tokens": tokens,
            "speed/sequences_per_second": sequences / seconds,
            "speed/tokens_per_second": tokens / seconds,
            "memory/peak_gb": peak_memory_gb(device.type),
        }
        if self.engine.fp16_enabled():
            values["optim/loss_scale"] = float(self.engine.optimizer.loss_scaler.cur_scale)
        if device.type == "cuda":
            name, config = torch.cuda.get_device_name(), self.engine.module.config
            values["memory/reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
            weights = [getattr(p, "ds_numel", p.numel()) for p in self.engine.module.parameters()]
            sizes = config.encoder.num_hidden_layers, config.hidden_size
            work = flops_per_token(sum(weights), *sizes, self.settings.data.seq_length)
            if peak := peak_flops(name):
                values["speed/mfu"] = tokens / seconds / dist.get_world_size() * work / peak
        left = tqdm.format_interval(values["speed/seconds_per_step"] * (train.steps - done))
        self.log.record(done, "train", values, note=f"  eta {left}")


def _is_due(done: int, every: float | None) -> bool:
    return every is not None and done % every == 0
