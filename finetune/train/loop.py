"""The fine-tuning loop: AdamW with bias correction, linear warm-up and decay, the best evaluation wins.

A step's rows are cut into chunks, one for each rank and each of its micro-batches. Every chunk's loss counts by its
share of the step's rows and its dropout is seeded by step and chunk, so the numbers do not depend on which rank does
what: `2 ranks x 1 micro-batch` gives what `1 rank x 2 micro-batches` gives, up to the order of floating-point sums.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from finetune.data.encoding import Encoded
from finetune.settings import TrainSettings
from multicls.distributed import rank_and_world
from multicls.ds_config import OWNED, check_with_deepspeed, resolve_ds_config
from multicls.errors import UserError
from multicls.optim import choose_precision, dropout_seed, linear_lr, parameter_groups

log = logging.getLogger("finetune")
Scores = dict[str, float]
Array = np.ndarray[Any, np.dtype[np.float32]]
Weights = dict[str, Tensor]
OWNERS = {**OWNED, "train_batch_size": "train.batch_size", "gradient_clipping": "train.max_grad_norm",
          "gradient_accumulation_steps": "train.micro_batch_size"}  # fmt: skip
CHECK_EVERY = 50  # steps between looks at the loss on the device: each look waits for the device


@dataclass(frozen=True)
class TaskSplit:
    """One task of a run.

    Attributes:
        train: the rows to learn from.
        dev: the rows that choose the best evaluation.
        score: the metrics of outputs (N, C) on `dev`, the main one first.
    """

    train: Encoded
    dev: Encoded
    score: Callable[[Array], Scores]


@dataclass
class FinetuneResult:
    """What a run gives; lists have one entry a task.

    Attributes:
        scores: all metrics of the best evaluation, the main one first.
        outputs: (N, C) float32 outputs of the best evaluation, in the order of the dev rows.
        best_step: the step of that evaluation: the one with the highest mean of the tasks' main metrics.
        steps: steps taken.
        history: (step, mean train loss since the last evaluation, main score of each task) of every evaluation.
        seconds: wall time of training and evaluation.
        weights: those of the best evaluation, on the CPU, where they were asked for.
    """

    scores: list[Scores] = field(default_factory=list)
    outputs: list[Array] = field(default_factory=list)
    best_step: int = 0
    steps: int = 0
    history: list[tuple[int, float, list[float]]] = field(default_factory=list)
    seconds: float = 0.0
    weights: Weights | None = None


def find_device() -> tuple[torch.device, Literal["fp32", "bf16"]]:
    """Returns the GPU if there is one, else the CPU, and what "auto" precision means there: native bf16, else fp32.

    fp16 would need a loss scale, which the loop without DeepSpeed does not have.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return device, "bf16" if choose_precision("auto", device) == "bf16" else "fp32"


def seed_everything(seed: int, device: torch.device) -> None:
    """Same seed, same numbers: new weights and, on a GPU, deterministic kernels where they exist."""
    torch.manual_seed(seed)
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)


def learning_rate_at(step: int, settings: TrainSettings) -> float:
    """Returns the learning rate of a step, counted from 0; `settings` are resolved: `max_steps` is the run's length."""
    steps = settings.max_steps or 1
    return linear_lr(step, steps, round(settings.warmup_ratio * steps), settings.learning_rate)


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW on what is not frozen; biases and LayerNorms do not decay."""
    return torch.optim.AdamW(
        parameter_groups(model, settings.weight_decay),
        lr=settings.learning_rate,
        betas=(0.9, settings.adam_beta2),
        eps=settings.adam_epsilon,
        fused=True,
    )


def row_batches(num_rows: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Endless batches of row indices; every epoch is a new permutation, its last batch may be smaller."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(num_rows, generator=generator).tolist()
        yield from (order[start : start + batch_size] for start in range(0, num_rows, batch_size))


def task_batches(sizes: Sequence[int], batch_size: int, seed: int, sampling: str) -> Iterator[tuple[int, list[int]]]:
    """Endless batches (task, rows), each of one task.

    Args:
        sizes: train rows of each task.
        sampling: "round_robin": the tasks take turns. "size_balanced": an epoch holds every batch of every task once,
            in an order drawn by `seed`, so a task comes in proportion to its rows.
    """
    streams = [row_batches(size, batch_size, seed + task) for task, size in enumerate(sizes)]
    tasks = [task for task, size in enumerate(sizes) for _ in range(math.ceil(size / batch_size))]
    generator = torch.Generator().manual_seed(seed)
    for epoch in count():
        if sampling == "round_robin":
            order = [task % len(sizes) for task in range(epoch * len(tasks), (epoch + 1) * len(tasks))]
        else:
            order = [tasks[place] for place in torch.randperm(len(tasks), generator=generator).tolist()]
        yield from ((task, next(streams[task])) for task in order)


def chunks_of(rows: Sequence[int], num_chunks: int) -> list[tuple[list[int], float]]:
    """Cuts a step's rows into chunks of as equal size as can be, each with its share of the rows.

    Where there are more chunks than rows, rows come again with a share of 0: every rank must run the model as often as
    the others do.
    """
    cuts = [len(rows) * chunk // num_chunks for chunk in range(num_chunks + 1)]
    tokens = [list(rows[start:end]) for start, end in zip(cuts, cuts[1:], strict=False)]
    return [(token or [rows[chunk % len(rows)]], len(token) / len(rows)) for chunk, token in enumerate(tokens)]


class Stepper:
    """Gradients and updates by torch alone, on one rank.

    Attributes:
        model: what to call in training.
        chunks: in which a step's rows are cut; this rank computes those of `mine`.
    """

    def __init__(self, model: nn.Module, settings: TrainSettings) -> None:
        assert settings.batch_size
        self.rank, self.world_size = rank_and_world()
        per_rank = math.ceil(settings.batch_size / self.world_size)
        self.accumulation = math.ceil(per_rank / min(settings.micro_batch_size or per_rank, per_rank))
        self.chunks = self.world_size * self.accumulation
        self.mine = range(self.rank, self.chunks, self.world_size)
        self.model: Any = model
        self.optimizer: Any = make_optimizer(model, settings)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._clip = settings.max_grad_norm

    def backward(self, loss: Tensor) -> None:
        """Adds a chunk's gradients."""
        loss.backward()

    def update(self) -> None:
        """Ends a step: clips the sum of the gradients and updates the weights."""
        for parameter in self._parameters:
            if parameter.grad is None:  # of another task's classifier, which Adam's momentum moves on as ZeRO does
                parameter.grad = torch.zeros_like(parameter)
        nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class DeepSpeedStepper(Stepper):
    """The same by a DeepSpeed engine, on any number of ranks. `prepare_deepspeed` comes before it."""

    def __init__(self, model: nn.Module, settings: TrainSettings, ds_config: Mapping[str, Any], where: str) -> None:
        super().__init__(model, settings)
        import deepspeed

        resolved = resolve_ds_config(ds_config, where=where, owners=OWNERS, **self.arithmetic(settings))
        check_with_deepspeed(resolved, where)
        self.model = deepspeed.initialize(model=model, optimizer=self.optimizer, config=resolved)[0]
        self.optimizer = self.model.optimizer

    def arithmetic(self, settings: TrainSettings) -> dict[str, Any]:
        """What of a DeepSpeed JSON our settings own."""
        assert settings.batch_size and settings.precision != "auto"
        return {
            "micro_batch_size": math.ceil(settings.batch_size / self.chunks),
            "accumulation": self.accumulation,
            "world_size": self.world_size,
            "gradient_clipping": settings.max_grad_norm,
            "precision": settings.precision,
        }

    def backward(self, loss: Tensor) -> None:
        """Adds a chunk's gradients; DeepSpeed takes means over chunks, where the loss is a share of their sum."""
        self.model.backward(loss * self.chunks)
        self.model.step()  # updates with the last chunk of a step

    def update(self) -> None:
        """Done by the last `backward`."""


def train_step(
    stepper: Stepper, part: TaskSplit, task: int, rows: Sequence[int], device: torch.device, settings: TrainSettings,
    seed: int, step: int,
) -> Tensor:  # fmt: skip
    """One update (`step` counts from 0); returns this rank's share of the step's loss, detached."""
    for group in stepper.optimizer.param_groups:
        group["lr"] = learning_rate_at(step, settings)
    chunks = chunks_of(rows, stepper.chunks)
    total = torch.zeros((), device=device)
    for chunk in stepper.mine:
        chunk_rows, share = chunks[chunk]
        torch.manual_seed(dropout_seed(seed, step * stepper.chunks + chunk))
        with _autocast(stepper.model, device, settings):
            loss = stepper.model(**part.train.batch(chunk_rows, device), task=task).loss * share
        stepper.backward(loss)
        total += loss.detach()
    stepper.update()
    return total


@torch.no_grad()
def predict(
    model: nn.Module, rows: Encoded, device: torch.device, settings: TrainSettings, task: int = 0, batch_size: int = 64
) -> Array:
    """Outputs (N, C) of all rows, in their order, on all ranks, each of which computes a part of them.

    Rows of like length go together, for less padding.
    """
    was_training = model.training
    model.eval()
    rank, world_size = rank_and_world()
    by_length = sorted(range(len(rows)), key=rows.lengths.__getitem__)
    batches = [by_length[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    rounds = math.ceil(len(batches) / world_size)  # of all ranks: ZeRO-3 gathers weights in every one
    own = [batches[min(turn * world_size + rank, len(batches) - 1)] for turn in range(rounds)]
    outputs = []
    for batch_rows in own:
        batch = rows.batch(batch_rows, device)
        del batch["labels"]
        with _autocast(model, device, settings):
            outputs.append(model(**batch, task=task).logits.float())
    table = torch.full((len(rows), outputs[0].shape[1]), -math.inf, device=device)
    table[torch.tensor([row for batch_rows in own for row in batch_rows], device=device)] = torch.cat(outputs)
    if world_size > 1:
        dist.all_reduce(table, dist.ReduceOp.MAX)
    model.train(was_training)
    return np.asarray(table.cpu().numpy(), dtype=np.float32)


def fine_tune(
    model: nn.Module,
    parts: Sequence[TaskSplit],
    settings: TrainSettings,
    seed: int,
    device: torch.device,
    *,
    sampling: str = "size_balanced",
    keep_weights: bool = False,
    ds_config: tuple[str, Mapping[str, Any]] | None = None,
) -> FinetuneResult:
    """Trains and evaluates `model` on `device`, on all ranks together.

    Args:
        model: as `finetune.heads.building.build_head` gives it.
        parts: the model's tasks, in its order.
        settings: resolved by `finetune.settings.resolve`.
        seed: of the order of the rows and of dropout.
        device: where the model goes and stays.
        sampling: of several tasks, as `task_batches` takes it.
        keep_weights: keep a copy of the weights of the best evaluation.
        ds_config: name and content of the DeepSpeed JSON to train with; needed for several ranks.

    Raises:
        UserError: the loss is no longer a number, or the JSON does not fit the settings.
    """
    assert settings.max_steps and settings.batch_size and settings.eval_every, "settings are not resolved"
    model.to(device).train()
    stepper = DeepSpeedStepper(model, settings, ds_config[1], ds_config[0]) if ds_config else Stepper(model, settings)
    outcome, started, losses = FinetuneResult(), time.perf_counter(), []
    batches = task_batches([len(part.train) for part in parts], settings.batch_size, seed, sampling)
    with _progress(settings.max_steps) as show:
        for step in range(1, settings.max_steps + 1):
            task, rows = next(batches)
            losses.append(train_step(stepper, parts[task], task, rows, device, settings, seed, step - 1))
            outcome.steps = step
            evaluates = step % settings.eval_every == 0 or step == settings.max_steps
            if evaluates or step % CHECK_EVERY == 0:
                losses = [_finite_losses(losses, step, settings)]
            if evaluates:
                outputs = [predict(model, part.dev, device, settings, task) for task, part in enumerate(parts)]
                if _evaluate(outcome, outputs, parts, losses.pop()) and keep_weights:
                    outcome.weights = copy_weights(model)
                if step - outcome.best_step >= settings.patience:
                    log.info("no better score for %d steps: stopped", step - outcome.best_step)
                    break
            show(outcome, evaluates, time.perf_counter() - started)
    outcome.seconds = time.perf_counter() - started
    return outcome


def copy_weights(model: nn.Module) -> Weights:
    """All weights and buffers on the CPU, whole, on every rank; all must call it."""
    with gathered(model):
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}


def load_weights(model: nn.Module, weights: Weights) -> None:
    """Puts back what `copy_weights` gave; all ranks must call it."""
    with gathered(model, writing=True):
        model.load_state_dict(weights)


def gathered(model: nn.Module, writing: bool = False) -> AbstractContextManager[None]:
    """The model with whole parameters inside: ZeRO-3 keeps only a part of each on a rank."""
    parameters = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if not parameters:
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    context: AbstractContextManager[None] = GatheredParameters(parameters, modifier_rank=0 if writing else None)
    return context


def _evaluate(outcome: FinetuneResult, outputs: list[Array], parts: Sequence[TaskSplit], losses: Tensor) -> bool:
    """Adds an evaluation to `outcome`, and keeps it if it is strictly better than all before, which it returns."""
    scores = [part.score(own) for part, own in zip(parts, outputs, strict=True)]
    mains = [next(iter(own.values())) for own in scores]
    better = not outcome.history or sum(mains) > max(sum(before) for _, _, before in outcome.history)
    outcome.history.append((outcome.steps, round(float(losses.mean()), 6), mains))
    if better:
        outcome.scores, outcome.outputs, outcome.best_step = scores, outputs, outcome.steps
    return better


def _finite_losses(losses: list[Tensor], step: int, settings: TrainSettings) -> Tensor:
    """The losses of the steps since the last evaluation, (S,), over all ranks."""
    latest = torch.stack([loss for loss in losses if loss.ndim == 0])
    if rank_and_world()[1] > 1:
        dist.all_reduce(latest)
    if not torch.isfinite(latest).all():
        raise UserError(
            f"the loss is not a finite number any more (seen at step {step}): nothing is written. Lower "
            f"train.learning_rate (= {settings.learning_rate:g}), or check the checkpoint's weights."
        )
    return torch.cat([loss for loss in losses if loss.ndim == 1] + [latest])


def _autocast(model: Any, device: torch.device, settings: TrainSettings) -> torch.autocast:
    """bf16 arithmetic on float32 weights; DeepSpeed holds weights in bf16 instead, next to float32 ones of its own."""
    enabled = settings.precision == "bf16" and next(model.parameters()).dtype == torch.float32
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[FinetuneResult, bool, float], None]]:
    """A bar on a terminal; elsewhere one line an evaluation, with the time left. Only on rank 0."""
    bar = tqdm(total=steps, disable=not sys.stderr.isatty() or rank_and_world()[0] > 0, unit="step", leave=False)

    def show(outcome: FinetuneResult, evaluated: bool, seconds: float) -> None:
        bar.update()
        if not evaluated:
            return
        step, loss, mains = outcome.history[-1]
        main = sum(mains) / len(mains)
        bar.set_postfix(loss=f"{loss:.3f}", score=f"{main:.4f}")
        if bar.disable:
            left = seconds / step * (steps - step)
            log.info(
                "step %d/%d  loss %.4f  score %.4f  eta %d:%02d", step, steps, loss, main, *divmod(round(left), 60)
            )

    with bar:
        yield show
