"""Trains every head by one loop.

A step's rows are divided among the ranks. The sum of their losses is divided by the rows of the whole step, so the
number of ranks changes no number except by the order of floating-point sums, and by dropout, which is seeded by seed,
step and rank.
"""

import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator, DeepSpeedPlugin, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from finetune.encoding import Encoded
from finetune.heads.modeling_task import IGNORE_INDEX, TaskModel, loss_sum, problem_type_of
from finetune.metrics import score_predictions
from finetune.results import FORMAT, differences
from finetune.settings import RunSettings
from finetune.tasks import Array
from multicls.console import print_line, progress_bar
from multicls.deepspeed_config import (
    Precision,
    complete_deepspeed_config,
    load_deepspeed_config,
)
from multicls.distributed import on_rank_0, rank_and_world, safe_unpickling
from multicls.errors import UserError
from multicls.files import read_json, write_json
from multicls.measures import larger_is_better
from multicls.optim import choose_precision, dropout_seed, parameter_groups

STATE = "run.pt"  # in a checkpoint: the best evaluation, the history and the seconds of training
RUN = "run.json"  # in a checkpoint, written last: the identity of its run
EVALUATED = 64  # rows of a forward pass that trains nothing


class Share(NamedTuple):
    """Rows of a step on one rank."""

    number: int  # in the run, over all ranks
    task: int
    rows: Sequence[int]
    counted: bool  # False: the rows only keep the rank busy
    rows_of_step: int  # on all ranks


class StepPlan:
    """The steps of a run: iterating yields the share of this rank in each step.

    A step has `batch_size` rows. There are `steps`, and an evaluation each `eval_every`. Where the settings leave them
    open, the number of training rows decides, as in Multi-CLS BERT.
    """

    def __init__(self, settings: RunSettings, sizes: Sequence[int]) -> None:
        train = settings.train
        self.sizes, self.seed, self.sampling = sizes, settings.seed, settings.cln.sampling
        self.batch_size = train.batch_size or _batch_size(settings, max(sizes))
        epoch = sum(math.ceil(rows / self.batch_size) for rows in sizes)
        self.steps = min(train.epochs * epoch, train.max_steps or train.epochs * epoch)
        self.eval_every = min(train.eval_every or min(500, 2 * epoch), self.steps)
        self.rank, self.world_size = rank_and_world()

    def __iter__(self) -> Iterator[Share]:
        batches = task_batches(self.sizes, self.batch_size, self.seed, self.sampling)
        for step, (task, rows) in enumerate(islice(batches, self.steps)):
            number = step * self.world_size + self.rank
            begin, end = (len(rows) * (self.rank + n) // self.world_size for n in (0, 1))
            # All ranks must run the model equally often: without a row of its own a rank repeats one.
            mine = rows[begin:end] or [rows[self.rank % len(rows)]]
            yield Share(number, task, mine, end > begin, len(rows))


def _batch_size(settings: RunSettings, rows: int) -> int:
    """Returns the default batch size for the largest task's training rows, as in Multi-CLS BERT."""
    if settings.head == "isobn":
        return 32  # as its paper; of 4 rows its statistics are noise
    if rows > 3000 or settings.train_size == "full":
        return 16
    return 8 if rows > 300 else 4


def row_batches(num_rows: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Yields batches of row indices for ever; each epoch is a new permutation, its last batch may be smaller."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(num_rows, generator=generator).tolist()
        yield from (order[start : start + batch_size] for start in range(0, num_rows, batch_size))


def task_batches(
    sizes: Sequence[int], batch_size: int, seed: int, sampling: str
) -> Iterator[tuple[int, list[int]]]:
    """Yields batches (task, rows) for ever, each of one task, from the training rows of each task.

    With `sampling` "round_robin" the tasks take turns. With "proportional" an epoch holds every batch of every task
    once, in a random order, so a task comes in proportion to its rows.
    """
    streams = [row_batches(size, batch_size, seed + task) for task, size in enumerate(sizes)]
    order: Iterator[int] = cycle(range(len(sizes)))
    if sampling == "proportional":
        turns = [t for t, size in enumerate(sizes) for _ in range(math.ceil(size / batch_size))]
        positions = chain.from_iterable(row_batches(len(turns), len(turns), seed))
        order = (turns[position] for position in positions)
    yield from ((task, next(streams[task])) for task in order)


class TaskTrainer:
    """Trains a `TaskModel` on one task or several, and keeps the best evaluation in memory.

    Args:
        tasks: for each task of the model its rows by split: "train", the one that picks the weights, and others.
        identity: all that decides the numbers of the run, as JSON; marks its checkpoints.
        folder: folder of the checkpoints and curves.

    Attributes:
        best: The entry of the best evaluation in `history`, and its weights on the CPU.
        history: Step and loss of each evaluation, and the score and loss of the rows that pick.
    """

    def __init__(
        self,
        model: TaskModel,
        tasks: Sequence[Mapping[str, Encoded]],
        settings: RunSettings,
        identity: Mapping[str, Any],
        folder: Path,
    ) -> None:
        self.settings, self.folder = settings, folder
        self.train_rows = [splits["train"] for splits in tasks]
        self.splits = [dict(list(splits.items())[1:]) for splits in tasks]  # the first picks
        self.plan = StepPlan(settings, [len(rows) for rows in self.train_rows])
        self.identity = {**identity, "ranks": self.plan.world_size, "format": FORMAT}
        self.problems = [problem_type_of(task) for task in model.config.tasks]
        self.accelerator = _accelerator(settings, self.plan)
        train = settings.train
        optimizer = torch.optim.AdamW(
            parameter_groups(model, train.weight_decay),
            lr=train.learning_rate,
            betas=(0.9, train.adam_beta2),
            eps=train.adam_epsilon,
            fused=True,
        )
        self.task_model = model
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.best: dict[str, Any] = {}
        self.history: list[dict[str, float]] = []
        self.began = time.monotonic()
        self.saved = on_rank_0(time.monotonic)  # the clocks of machines differ

    def run(self) -> tuple[list[dict[str, Array]], dict[str, Any]]:
        """Trains, from the newest whole checkpoint if there is one; leaves the model with the best weights.

        Returns the outputs (N, C) of each task by split, without "train", and the record's fields on training.
        """
        begin, plan, is_first = self.resume(), self.plan, self.accelerator.is_main_process
        total = torch.zeros((), device=self.accelerator.device)
        scored = begin  # step of the evaluation before
        shown = {"initial": begin, "disable": not is_first}
        with progress_bar(plan.steps, "step", "fine-tuning", **shown) as bar:
            # The checkpoint was saved after the evaluation of step `begin`.
            log = SummaryWriter(self.folder / "runs", purge_step=begin + 1) if is_first else None
            for step, share in enumerate(islice(plan, begin, None), start=begin + 1):
                total += self.train_step(step, share)
                bar.update()
                if step % plan.eval_every and step < plan.steps:
                    continue
                loss = self.accelerator.reduce(total / (step - scored), "mean")
                for name, value in self.evaluate(step, float(loss)).items():
                    if log:
                        log.add_scalar(name, value, step)
                total, scored = torch.zeros_like(total), step
                if step < plan.steps:
                    self.save_if_due(step)
        if log:
            log.close()
        self.task_model.load_state_dict(self.best["weights"])
        outputs = [
            {name: self._predict(rows, number) for name, rows in splits.items()}
            for number, splits in enumerate(self.splits)
        ]
        return outputs, {
            "history": self.history,
            "best_step": self.best["step"],
            "steps": plan.steps,
            "seconds": round(time.monotonic() - self.began, 3),
            "ranks": plan.world_size,
            "batch_size": plan.batch_size,
        }

    def train_step(self, step: int, share: Share) -> torch.Tensor:
        """Updates the weights once; returns this rank's part of the loss, whose mean over ranks is the step's loss."""
        train, device = self.settings.train, self.accelerator.device
        for group in self.optimizer.param_groups:
            warmup = round(train.warmup_ratio * self.plan.steps)
            group["lr"] = train.learning_rate * schedule(step - 1, warmup, self.plan.steps)
        self.model.train()
        torch.manual_seed(dropout_seed(self.settings.seed, share.number))
        batch = self.train_rows[share.task].batch(share.rows)
        inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        labels = inputs.pop("labels")
        if not share.counted:
            labels.fill_(IGNORE_INDEX)
        logits = self.model(**inputs, task=share.task, counted=share.counted).logits
        loss = loss_sum(self.problems[share.task], logits.float(), labels)
        loss = loss / share.rows_of_step * self.plan.world_size  # gradients are means over ranks
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), train.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def evaluate(self, step: int, loss: float) -> dict[str, float]:
        """Scores the rows that pick, and keeps the weights if they are better, of equal scores by the loss.

        Returns what curves show. Scores are means over tasks.
        `loss` is the mean since the evaluation before; one that is not finite is a `UserError`.
        """
        if not math.isfinite(loss):
            raise UserError(
                f"the loss is not a finite number any more (seen at step {step}): nothing is written. Lower "
                f"train.learning_rate (= {self.settings.train.learning_rate:g}), or check the weights."
            )
        metrics, scores, losses = {"train/loss": loss}, list[float](), list[float]()
        for number, splits in enumerate(self.splits):
            rows = next(iter(splits.values()))
            outputs = self._predict(rows, number)
            values = score_predictions(rows.task, rows.examples, outputs)
            metrics |= {f"eval/{rows.task.name}_{name}": v for name, v in values.items()}
            main = rows.task.metrics[0]
            scores.append(larger_is_better(main, values[main]))
            of_rows = loss_sum(self.problems[number], torch.from_numpy(outputs), rows.labels)
            losses.append(float(of_rows) / len(rows))
        score, picking = float(np.mean(scores)), float(np.mean(losses))
        entry = {"step": step, "loss": loss, "score": score, "selection_loss": picking}
        self.history.append(entry)
        if not self.best or (score, -picking) > (self.best["score"], -self.best["selection_loss"]):
            named = self.task_model.state_dict().items()
            weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named}
            self.best = {**entry, "weights": weights}
        if self.accelerator.is_main_process:
            print_line(f"step {step}/{self.plan.steps}  loss {loss:.4f}  score {100 * score:.2f}")
        return metrics | {"eval/score": score, "eval/loss": picking}

    def _predict(self, rows: Encoded, task: int) -> Array:
        return predict_rows(self.task_model, rows, task, self.settings.train.precision)

    def save_if_due(self, step: int) -> None:
        """Saves a checkpoint if the last one is old enough; marks it as whole, then removes older ones."""
        now = on_rank_0(time.monotonic)
        if now - self.saved < 60 * self.settings.train.checkpoint_minutes:
            return
        self.saved = now
        folder = self.folder / f"checkpoint-{step}"
        is_first = self.accelerator.is_main_process
        if is_first and folder.exists():  # of another run, or torn
            shutil.rmtree(folder)
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(folder))
        self.accelerator.wait_for_everyone()
        if is_first:
            seconds = time.monotonic() - self.began
            state = {"best": self.best, "history": self.history, "seconds": seconds}
            torch.save(state, folder / STATE)
            write_json(folder / RUN, self.identity)
            for path in set(self.folder.glob("checkpoint-*")) - {folder}:
                shutil.rmtree(path)

    def resume(self) -> int:
        """Loads the newest whole checkpoint of this run, if there is one; returns its step, or 0."""
        newest = on_rank_0(self.newest_checkpoint)
        if newest is None:
            return 0
        state = torch.load(newest / STATE, weights_only=True)
        self.best, self.history = state["best"], state["history"]
        self.began -= state["seconds"]  # before it resumed
        with safe_unpickling(newest) if self.settings.config else nullcontext():
            self.accelerator.load_state(str(newest))
        if self.accelerator.is_main_process:
            print_line(f"resuming from step {_step_of(newest)} of {self.plan.steps}")
        return _step_of(newest)

    def newest_checkpoint(self) -> Path | None:
        """Returns the newest whole checkpoint of this run, which another number of ranks may have written.

        Checkpoints of other settings, and DeepSpeed's of another number of ranks, are named, and stay until this run
        has a checkpoint of its own.
        """
        mine = list[Path]()
        for mark in self.folder.glob(f"checkpoint-*/{RUN}"):
            changes = differences(read_json(mark), self.identity)
            if changes.keys() == {"ranks"} and self.settings.config:
                raise UserError(
                    f"{mark.parent}: {changes['ranks']}, which DeepSpeed cannot read. Start as many ranks as then, "
                    "or delete that folder to begin again."
                )
            if changes.keys() <= {"ranks"}:
                mine.append(mark.parent)
            else:
                what = ", ".join(changes.values())
                print_line(f"note: {mark.parent} is not resumed, it is of another run ({what})")
        return max(mine, key=_step_of, default=None)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def schedule(step: int, warmup: int, steps: int) -> float:
    """Returns the factor of the learning rate at a step, from 0: a linear rise, then a linear fall to 0."""
    if step < warmup:
        return step / warmup
    return max(0.0, (steps - step) / max(1, steps - warmup))


def find_device() -> torch.device:
    """Returns the GPU, or else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns of its guess
    return torch.device("cpu")


@torch.no_grad()
def predict_rows(
    model: nn.Module, rows: Encoded, task: int, precision: Precision | Literal["auto"] = "auto"
) -> Array:
    """Returns the model's outputs for each row, (N, C), in their order. A batch holds rows of like length."""
    device = find_device()
    model.eval().to(device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(choose_precision(precision, device))
    autocast = dtype is not None and next(model.parameters()).dtype == torch.float32
    by_length = sorted(range(len(rows)), key=rows.lengths.__getitem__)
    outputs = []
    for start in range(0, len(rows), EVALUATED):
        batch = rows.batch(by_length[start : start + EVALUATED])
        inputs = {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
        with torch.autocast(device.type, dtype=dtype, enabled=autocast):
            outputs.append(model(**inputs, task=task).logits.float().cpu())
    table = torch.cat(outputs)
    return np.asarray(table[np.argsort(by_length)].numpy(), dtype=np.float32)


def _accelerator(settings: RunSettings, plan: StepPlan) -> Accelerator:
    """Returns what knows device, precision, ranks and DeepSpeed; ZeRO stage 3 is refused."""
    AcceleratorState._reset_state(True)  # of an earlier run in this process
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    precision, plugin = choose_precision(settings.train.precision, find_device()), None
    if path := settings.config:
        config = load_deepspeed_config(path)
        if int(config.setdefault("zero_optimization", {}).setdefault("stage", 0)) > 2:
            raise UserError(f"--config {path}: no ZeRO stage 3 here: take ds_configs/zero2.json.")
        config = complete_deepspeed_config(
            config,
            micro_batch_size=math.ceil(plan.batch_size / plan.world_size),
            accumulation=1,
            world_size=plan.world_size,
            max_grad_norm=settings.train.max_grad_norm,
            precision=precision,
        )
        plugin = DeepSpeedPlugin(hf_ds_config=config)
    several = DistributedDataParallelKwargs(find_unused_parameters=len(settings.task_names) > 1)
    return Accelerator(
        mixed_precision="no" if precision == "fp32" else precision,
        cpu=not torch.cuda.is_available(),
        deepspeed_plugin=plugin,
        kwargs_handlers=[several],
    )
