"""The fine-tuning loop: AdamW with bias correction, linear warm-up and decay; the best evaluation counts.

A step's rows are cut into chunks, one for each rank and each of its micro-batches. Every chunk's loss counts by its
share of the step's rows, and its dropout is seeded by step and chunk. So ranks and micro-batches change no number:
`2 ranks x 1 micro-batch` and `1 rank x 2 micro-batches` differ only by the order of floating-point sums.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from finetune.data.encoding import Encoded
from finetune.heads.modeling_heads import TaskModel
from finetune.settings import TrainSettings
from finetune.train.snapshots import Snapshots
from multicls.console import Progress
from multicls.distributed import rank_and_world
from multicls.ds_config import OWNED, check_with_deepspeed, resolve_ds_config
from multicls.errors import UserError
from multicls.optim import choose_precision, dropout_seed, linear_lr, parameter_groups
from multicls.safe_unpickling import safe_unpickling
from multicls.words import counted, duration

log = logging.getLogger("finetune")
Scores = dict[str, float]
Array = np.ndarray[Any, np.dtype[np.float32]]
Weights = dict[str, Tensor]
DeepSpeedFile = tuple[str, Mapping[str, Any]]  # name of a DeepSpeed JSON, and its content
OWNERS = {**OWNED, "train_batch_size": "train.batch_size", "gradient_clipping": "train.max_grad_norm",
          "gradient_accumulation_steps": "train.micro_batch_size"}  # fmt: skip
NO_NUMBERS = {"eval_batch_size", "gradient_checkpointing", "snapshot_minutes"}  # train settings that change no number
CHECK_EVERY = 50  # steps between looks at the loss on the device: each look waits for the device


@dataclass(frozen=True)
class TaskSplit:
    """The rows of one task of a run."""

    train: Encoded  # to learn from
    dev: Encoded  # these choose the best evaluation
    score: Callable[[Array], Scores]  # the metrics of outputs (N, C) on `dev`, the main one first
    curve: str = "dev"  # name of the dev rows' scores in TensorBoard; "dev/TASK" of several tasks
    class_weights: Tensor | None = None  # (C,) weights of the rows' losses by class; `fine_tune` fills them in


@dataclass
class FinetuneResult:
    """The result of a run; lists have one entry for each task."""

    scores: list[Scores] = field(default_factory=list)  # all metrics of the best evaluation, the main one first
    outputs: list[Array] = field(default_factory=list)  # (N, C) outputs of the best evaluation, in the dev rows' order
    best_step: int = 0  # the step of that evaluation: the one with the highest mean of the tasks' main metrics
    steps: int = 0  # steps taken
    # (step, mean train loss since the last evaluation, main score of each task) of every evaluation
    history: list[tuple[int, float, list[float]]] = field(default_factory=list)
    seconds: float = 0.0  # wall time of training and evaluation
    weights: Weights | None = None  # those of the best evaluation, on the CPU; None if they were not asked for


def find_device() -> tuple[torch.device, Literal["fp32", "bf16"]]:
    """Returns the GPU or else the CPU, and what "auto" precision means there: native bf16, else fp32.

    fp16 would need a loss scale, which the loop without DeepSpeed does not have.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers may import DeepSpeed, which warns of its guess
    return device, "bf16" if choose_precision("auto", device) == "bf16" else "fp32"


def seed_everything(seed: int, device: torch.device) -> None:
    """Seeds the new weights, and makes a GPU use deterministic kernels if they exist."""
    torch.manual_seed(seed)
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)


def learning_rate_at(step: int, settings: TrainSettings) -> float:
    """Returns the learning rate of a step, counted from 0; `settings` are resolved: `max_steps` is the run's length."""
    steps = settings.max_steps or 1
    return linear_lr(step, steps, round(settings.warmup_ratio * steps), settings.learning_rate)


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """Returns AdamW for the weights that are not frozen; biases and LayerNorms do not decay."""
    groups, betas = parameter_groups(model, settings.weight_decay), (0.9, settings.adam_beta2)
    return torch.optim.AdamW(groups, settings.learning_rate, betas, settings.adam_epsilon, fused=True)


def row_batches(num_rows: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Yields batches of row indices for ever; each epoch is a new permutation, its last batch may be smaller."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(num_rows, generator=generator).tolist()
        yield from (order[start : start + batch_size] for start in range(0, num_rows, batch_size))


def task_batches(sizes: Sequence[int], batch_size: int, seed: int, sampling: str) -> Iterator[tuple[int, list[int]]]:
    """Yields batches (task, rows) for ever, each of one task.

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
    """Cuts a step's rows into chunks of about equal size; returns each with its share of the rows.

    If there are more chunks than rows, rows come again with a share of 0: all ranks must run the model equally often.
    """
    cuts = [len(rows) * chunk // num_chunks for chunk in range(num_chunks + 1)]
    parts = [list(rows[start:end]) for start, end in zip(cuts, cuts[1:], strict=False)]
    return [(part or [rows[chunk % len(rows)]], len(part) / len(rows)) for chunk, part in enumerate(parts)]


class Stepper:
    """Computes gradients and updates by torch alone, on one rank.

    Attributes:
        model: the module to call in training.
        chunks: number of chunks of a step's rows; this rank computes those in `mine`.
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

    def state(self, folder: Path, step: int) -> dict[str, Any]:
        """Returns what a snapshot needs to go on from `step`; may write files to `folder`."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Loads what `state` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class DeepSpeedStepper(Stepper):
    """Computes gradients and updates by a DeepSpeed engine on any number of ranks, after `prepare_deepspeed`."""

    def __init__(self, model: nn.Module, settings: TrainSettings, ds_config: DeepSpeedFile) -> None:
        super().__init__(model, settings)
        import deepspeed

        assert settings.batch_size and settings.precision != "auto"
        where, config = ds_config
        resolved = resolve_ds_config(
            config, where=where, owners=OWNERS, micro_batch_size=math.ceil(settings.batch_size / self.chunks),
            accumulation=self.accumulation, world_size=self.world_size, gradient_clipping=settings.max_grad_norm,
            precision=settings.precision,
        )  # fmt: skip
        check_with_deepspeed(resolved, where)
        self.model = deepspeed.initialize(model=model, optimizer=self.optimizer, config=resolved)[0]
        self.optimizer = self.model.optimizer

    def backward(self, loss: Tensor) -> None:
        """Adds a chunk's gradients. DeepSpeed takes the mean over chunks, we need the sum of their shares."""
        self.model.backward(loss * self.chunks)
        self.model.step()  # updates with the last chunk of a step

    def update(self) -> None:
        """Does nothing: the last `backward` has updated the weights."""

    def state(self, folder: Path, step: int) -> dict[str, Any]:
        """Writes the engine's state to `folder/step_N` on all ranks; returns that name."""
        self.model.save_checkpoint(str(folder), tag=f"step_{step}", save_latest=False)
        return {"tag": f"step_{step}"}

    def load_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Loads what `state` wrote."""
        with safe_unpickling(folder):
            path, _ = self.model.load_checkpoint(str(folder), tag=state["tag"])
        assert path is not None, f"DeepSpeed found no checkpoint {state['tag']} in {folder}"


def train_step(
    stepper: Stepper, part: TaskSplit, task: int, rows: Sequence[int], device: torch.device, settings: TrainSettings,
    seed: int, step: int,
) -> Tensor:  # fmt: skip
    """Updates the weights once (`step` counts from 0); returns this rank's share of the step's loss, detached.

    Each row's loss is multiplied by the weight of its class and divided by the rows of the step, however the step is
    cut into chunks.
    """
    weights = {} if part.class_weights is None else {"class_weights": part.class_weights}
    for group in stepper.optimizer.param_groups:
        group["lr"] = learning_rate_at(step, settings)
    chunks = chunks_of(rows, stepper.chunks)
    total = torch.zeros((), device=device)
    for chunk in stepper.mine:
        chunk_rows, share = chunks[chunk]
        torch.manual_seed(dropout_seed(seed, step * stepper.chunks + chunk))
        with _autocast(stepper.model, device, settings):
            loss = stepper.model(**part.train.batch(chunk_rows, device), task=task, **weights).loss * share
        stepper.backward(loss)
        total += loss.detach()
    stepper.update()
    return total


@torch.no_grad()
def predict(model: nn.Module, rows: Encoded, device: torch.device, settings: TrainSettings, task: int = 0) -> Array:
    """Returns the outputs (N, C) of all rows, in their order, on all ranks, each of which computes a part of them.

    A batch holds `eval_batch_size` rows of like length, for less padding.
    """
    was_training = model.training
    model.eval()
    rank, world_size = rank_and_world()
    by_length = sorted(range(len(rows)), key=rows.lengths.__getitem__)
    size = settings.eval_batch_size
    batches = [by_length[start : start + size] for start in range(0, len(rows), size)]
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


class RunProgress(Progress):
    """A bar on a terminal, lines in the log, and curves in the folder `tensorboard`, if given; rank 0 alone shows them.

    `done` of the run's `steps` are done already.
    """

    def __init__(self, steps: int, done: int, tensorboard: Path | None) -> None:
        first_rank = rank_and_world()[0] == 0
        super().__init__("fine-tuning", steps, done=done, unit="steps", shown=first_rank)
        self.board, self._newest = None, ""
        if tensorboard and first_rank:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(tensorboard), purge_step=done + 1)

    def close(self) -> None:
        """Ends the bar and the file of TensorBoard."""
        super().close()
        if self.board is not None:
            self.board.close()

    def step(self) -> None:
        """Counts a step."""
        self.update(self.done + 1, self._newest)

    def evaluation(self, result: FinetuneResult, curves: dict[str, float], seconds: float) -> None:
        """Shows the newest evaluation of `result`, after `seconds` of the run; `curves` are for TensorBoard."""
        step, loss, mains = result.history[-1]
        self._newest = f"loss {loss:.4f}  score {sum(mains) / len(mains):.4f}"
        eta = duration(seconds / step * (self.total - step))
        log.info("step %d/%d  %s  eta %s", step, self.total, self._newest, eta)
        if self.board is not None:
            for name, value in curves.items():
                self.board.add_scalar(name, value, step)


def fine_tune(
    model: TaskModel, parts: Sequence[TaskSplit], settings: TrainSettings, seed: int, device: torch.device, *,
    sampling: str = "size_balanced", keep_weights: bool = False, ds_config: DeepSpeedFile | None = None,
    snapshots: Path | None = None, tensorboard: Path | None = None,
) -> FinetuneResult:  # fmt: skip
    """Trains and evaluates `model` on `device`, on all ranks together.

    Args:
        model: made by `finetune.heads.building.build_head`.
        parts: the model's tasks, in its order.
        settings: resolved by `finetune.settings.resolve`.
        seed: seed of the order of the rows and of dropout.
        sampling: how `task_batches` samples several tasks.
        keep_weights: keep a copy of the weights of the best evaluation.
        ds_config: name and content of the DeepSpeed JSON to train with; needed for several ranks.
        snapshots: folder of this run's snapshot, from which a killed run goes on; the caller removes it.
        tensorboard: folder for TensorBoard.

    Raises:
        UserError: the loss is no longer a number, or the JSON, class weights or gradient checkpointing do not fit.
    """
    assert settings.max_steps and settings.batch_size and settings.eval_every, "settings are not resolved"
    stepper = prepare(model, settings, device, ds_config)
    parts = [replace(part, class_weights=class_weights(task, part.train, settings, device))
             for task, part in zip(model.config.tasks or [], parts, strict=True)]  # fmt: skip
    result, losses = FinetuneResult(), list[Tensor]()
    identity = _identity(model, parts, settings, seed, sampling, keep_weights, ds_config)
    keeper = Snapshots(snapshots, settings.snapshot_minutes, identity)
    keeper.load(stepper, result)
    started, done = time.perf_counter() - result.seconds, result.steps
    batches = islice(task_batches([len(part.train) for part in parts], settings.batch_size, seed, sampling), done, None)
    with closing(RunProgress(settings.max_steps, done, tensorboard)) as progress:
        for step in range(done + 1, settings.max_steps + 1):
            task, rows = next(batches)
            losses.append(train_step(stepper, parts[task], task, rows, device, settings, seed, step - 1))
            result.steps = step
            evaluates = step % settings.eval_every == 0 or step == settings.max_steps
            if evaluates or step % CHECK_EVERY == 0:
                loss = mean_loss(losses, step, settings)
            progress.step()
            if not evaluates:
                continue
            losses.clear()
            outputs = [predict(model, part.dev, device, settings, task) for task, part in enumerate(parts)]
            curves, better = _evaluate(result, outputs, parts, loss, learning_rate_at(step - 1, settings))
            if better and keep_weights:
                result.weights = copy_weights(model)
            progress.evaluation(result, curves, time.perf_counter() - started)
            if step - result.best_step >= settings.patience:
                log.info("no better score for %s: stopped", counted(step - result.best_step, "step"))
                break
            if step < settings.max_steps:
                keeper.save_if_due(stepper, result, time.perf_counter() - started)
    result.seconds = time.perf_counter() - started
    return result


def prepare(
    model: TaskModel, settings: TrainSettings, device: torch.device, ds_config: DeepSpeedFile | None
) -> Stepper:
    """Moves the model to `device`, in training mode; returns what updates it.

    Raises:
        UserError: the DeepSpeed JSON or gradient checkpointing does not fit.
    """
    model.train().to(device)
    if settings.gradient_checkpointing:
        encoder: Any = model.encoder
        # transformers 5.23 has renamed it
        enable = getattr(encoder, "activation_checkpointing_enable", encoder.gradient_checkpointing_enable)
        try:
            enable({"use_reentrant": False})
        except ValueError:
            raise UserError(
                f"--gradient_checkpointing: {encoder.config.model_type} does not support it; leave it out, and give "
                "a smaller --micro_batch_size to save memory."
            ) from None
    return DeepSpeedStepper(model, settings, ds_config) if ds_config else Stepper(model, settings)


def class_weights(
    task: Mapping[str, Any], rows: Encoded, settings: TrainSettings, device: torch.device
) -> Tensor | None:
    """Returns the weight of each class, (C,), by its share of the rows; None for `class_weights` "none".

    Balanced weights are n / (C n_c): the classes have equal total weights, and the mean over the rows is 1. A class
    without rows does not count.

    Raises:
        UserError: the task has no classes of which a row has one.
    """
    if settings.class_weights == "none":
        return None
    if task["is_regression"] or task["num_choices"] or task.get("multi_label"):
        raise UserError(
            f"--class_weights {settings.class_weights}: task {task['name']} gives no row one of several classes; "
            "leave it out."
        )
    counts = torch.bincount(rows.labels, minlength=task["num_labels"])
    return (len(rows) / ((counts > 0).sum() * counts.clamp(min=1))).to(device)


def copy_weights(model: nn.Module) -> Weights:
    """Returns all weights and buffers, whole and on the CPU, on every rank; all ranks must call it."""
    with gathered(model):
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}


def load_weights(model: nn.Module, weights: Weights) -> None:
    """Loads weights of `copy_weights`; all ranks must call it."""
    with gathered(model, writing=True):
        model.load_state_dict(weights)


def gathered(model: nn.Module, writing: bool = False) -> AbstractContextManager[None]:
    """Returns a context in which parameters are whole: ZeRO-3 keeps only a part of each on a rank."""
    parameters = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if not parameters:
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters(parameters, modifier_rank=0 if writing else None)


def _evaluate(
    result: FinetuneResult, outputs: list[Array], parts: Sequence[TaskSplit], loss: float, learning_rate: float
) -> tuple[Scores, bool]:
    """Adds an evaluation to `result`, and keeps it if it is strictly better than all before.

    Returns:
        The values for TensorBoard, and whether it is better.
    """
    scores = [part.score(own) for part, own in zip(parts, outputs, strict=True)]
    mains = [next(iter(own.values())) for own in scores]
    better = not result.history or sum(mains) > max(sum(before) for _, _, before in result.history)
    result.history.append((result.steps, round(loss, 6), mains))
    if better:
        result.scores, result.outputs, result.best_step = scores, outputs, result.steps
    curves = {"loss/train": loss, "optim/lr": learning_rate}
    for part, own in zip(parts, scores, strict=True):
        curves |= {f"{part.curve}/{name}": value for name, value in own.items()}
    return curves, better


def _identity(
    model: TaskModel, parts: Sequence[TaskSplit], settings: TrainSettings, seed: int, sampling: str,
    keep_weights: bool, ds_config: DeepSpeedFile | None,
) -> dict[str, Any]:  # fmt: skip
    """Returns what a snapshot and a run must agree on, as JSON values."""
    config = model.config
    return {
        "settings": settings.model_dump(mode="json", exclude=NO_NUMBERS),
        "seed": [seed, sampling, keep_weights],
        "rows": [[len(part.train), len(part.dev)] for part in parts],
        "model": [config.head, config.head_options, config.pooling, config.tasks, config.encoder],
        "weights": [[name, list(tensor.shape)] for name, tensor in model.state_dict().items()],
        "ranks": [rank_and_world()[1], ds_config and ds_config[1]],
    }


def mean_loss(losses: Sequence[Tensor], step: int, settings: TrainSettings) -> float:
    """Returns the mean over steps of this rank's losses, each summed over all ranks.

    Raises:
        UserError: one is not finite; on all ranks.
    """
    summed = torch.stack(list(losses))
    if rank_and_world()[1] > 1:
        dist.all_reduce(summed)
    if not torch.isfinite(summed).all():
        raise UserError(
            f"the loss is not a finite number any more (seen at step {step}): nothing is written. Lower "
            f"train.learning_rate (= {settings.learning_rate:g}), or check the checkpoint's weights."
        )
    return float(summed.mean())


def _autocast(model: Any, device: torch.device, settings: TrainSettings) -> torch.autocast:
    """Returns a context of bf16 arithmetic for float32 weights; under DeepSpeed the weights themselves are bf16."""
    enabled = settings.precision == "bf16" and next(model.parameters()).dtype == torch.float32
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)
