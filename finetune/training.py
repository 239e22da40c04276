"""The fine-tuning loop: AdamW with bias correction, linear warm-up and decay, the best evaluation on dev wins."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from finetune.reading import Example
from finetune.settings import TrainSettings
from finetune.tasks import Task
from multicls.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("finetune")
Scores = dict[str, float]
CHECK_EVERY = 50  # steps between looks at the loss on the device: each look waits for the device


@dataclass
class Outcome:
    """What a run gives.

    Attributes:
        scores: all metrics of the best evaluation, the main one first.
        outputs: (N, C) float32 outputs of the best evaluation, in the order of the dev rows.
        best_step: the step of that evaluation.
        steps: steps taken.
        history: (step, mean train loss since the last evaluation, main score) of every evaluation.
        seconds: wall time of training and evaluation.
        weights: those of the best evaluation, on the CPU, where they were asked for.
    """

    scores: Scores = field(default_factory=dict)
    outputs: np.ndarray[Any, np.dtype[np.float32]] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    best_step: int = 0
    steps: int = 0
    history: list[tuple[int, float, float]] = field(default_factory=list)
    seconds: float = 0.0
    weights: dict[str, Tensor] | None = None


class Encoded:
    """Tokenized rows with their targets; batches are padded to their own longest row."""

    def __init__(
        self, task: Task, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, max_length: int
    ) -> None:
        texts = [list(column) for column in zip(*(example.texts for example in examples), strict=True)]
        features = tokenizer(*texts, truncation=True, max_length=max_length)
        self.features = {name: [torch.tensor(ids) for ids in rows] for name, rows in features.items()}
        self.lengths = [len(ids) for ids in features["input_ids"]]
        self.padding = {"input_ids": tokenizer.pad_token_id or 0, "token_type_ids": tokenizer.pad_token_type_id}
        labels = [example.label for example in examples]
        self.labels = torch.tensor(labels, dtype=torch.float32 if task.is_regression else torch.long)
        self.labels = self.labels / task.label_scale if task.is_regression else self.labels

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, rows: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """The inputs and `labels` of some rows, (B, L) and (B,)."""
        inputs = {
            name: pad_sequence([ids[row] for row in rows], batch_first=True, padding_value=self.padding.get(name, 0))
            for name, ids in self.features.items()
        }
        inputs["labels"] = self.labels[list(rows)]
        return {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}


def find_device() -> tuple[torch.device, Literal["fp32", "bf16"]]:
    """The GPU if there is one, else the CPU; and the precision it is quick in, "bf16" or "fp32"."""
    if torch.cuda.is_available():
        return torch.device("cuda"), "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    return torch.device("cpu"), "fp32"


def seed_everything(seed: int, device: torch.device) -> None:
    """Same seed, same numbers: new weights, dropout and, on a GPU, deterministic kernels where they exist."""
    torch.manual_seed(seed)
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)


def learning_rate_at(step: int, settings: TrainSettings) -> float:
    """Rises linearly from 0 over the warm-up, falls linearly to 0 at the end.

    Args:
        step: 0 for the first step.
        settings: resolved, so that `max_steps` is the length of the run.
    """
    total = settings.max_steps or 1
    warm_up = round(settings.warmup * total)
    factor = (step + 1) / (warm_up + 1) if step < warm_up else (total - step) / max(1, total - warm_up)
    return settings.learning_rate * factor


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW; biases and LayerNorms do not decay."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[parameter.ndim >= 2 and "bias" not in name and "norm" not in name.lower()].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": settings.weight_decay},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        fused=True,
    )


def row_batches(num_rows: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Endless batches of row indices; every epoch is a new permutation, its last batch may be smaller."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(num_rows, generator=generator).tolist()
        yield from (order[start : start + batch_size] for start in range(0, num_rows, batch_size))


def train_step(
    model: nn.Module,
    batch: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    settings: TrainSettings,
    learning_rate: float,
) -> Tensor:
    """One update; returns the detached loss of the batch."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    with _autocast(batch["labels"].device, settings):
        loss: Tensor = model(**batch).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


@torch.no_grad()
def predict(
    model: nn.Module, rows: Encoded, device: torch.device, settings: TrainSettings, batch_size: int = 64
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Outputs (N, C) of all rows, in their order; rows of like length go together, for less padding."""
    was_training = model.training
    model.eval()
    by_length = sorted(range(len(rows)), key=rows.lengths.__getitem__)
    outputs = []
    for start in range(0, len(rows), batch_size):
        batch = rows.batch(by_length[start : start + batch_size], device)
        del batch["labels"]
        with _autocast(device, settings):
            outputs.append(model(**batch).logits.float())
    model.train(was_training)
    table = torch.cat(outputs)
    table = table[torch.argsort(torch.tensor(by_length, device=device))]
    return np.asarray(table.cpu().numpy(), dtype=np.float32)


def fine_tune(
    model: nn.Module,
    train: Encoded,
    dev: Encoded,
    score: Callable[[np.ndarray[Any, np.dtype[np.float32]]], Scores],
    settings: TrainSettings,
    seed: int,
    device: torch.device,
    keep_weights: bool = False,
) -> Outcome:
    """Trains and evaluates `model` on `device`.

    Args:
        model: as `finetune.heads.build_head` gives it.
        train: the rows to learn from.
        dev: the rows to evaluate on.
        score: the metrics of outputs (N, C) on `dev`, the main one first.
        settings: resolved by `finetune.settings.resolve`.
        seed: of the order of the rows.
        device: where the model goes and stays.
        keep_weights: keep a copy of the weights of the best evaluation.

    Raises:
        UserError: the loss is no longer a number.
    """
    assert settings.max_steps and settings.batch_size and settings.eval_every, "settings are not resolved"
    optimizer = make_optimizer(model.to(device), settings)
    outcome, started, losses = Outcome(), time.perf_counter(), []
    batches = row_batches(len(train), settings.batch_size, seed)
    model.train()
    with _progress(settings.max_steps) as show:
        for step in range(1, settings.max_steps + 1):
            batch = train.batch(next(batches), device)
            losses.append(train_step(model, batch, optimizer, settings, learning_rate_at(step - 1, settings)))
            evaluates = step % settings.eval_every == 0 or step == settings.max_steps
            if evaluates or step % CHECK_EVERY == 0:
                _stop_if_not_finite(losses, step, settings)
            outcome.steps = step
            if evaluates:
                _evaluate(model, outcome, predict(model, dev, device, settings), score, losses, keep_weights)
                losses.clear()
                if step - outcome.best_step >= settings.patience:
                    log.info("no better dev score for %d steps: stopped", step - outcome.best_step)
                    break
            show(outcome, evaluates, time.perf_counter() - started)
    outcome.seconds = time.perf_counter() - started
    return outcome


def _evaluate(
    model: nn.Module,
    outcome: Outcome,
    outputs: np.ndarray[Any, np.dtype[np.float32]],
    score: Callable[[np.ndarray[Any, np.dtype[np.float32]]], Scores],
    losses: list[Tensor],
    keep_weights: bool,
) -> None:
    """Adds an evaluation to `outcome`, and keeps it if it is strictly better than all before."""
    scores = score(outputs)
    main = next(iter(scores.values()))
    best = next(iter(outcome.scores.values()), None)
    outcome.history.append((outcome.steps, round(float(torch.stack(losses).mean()), 6), main))
    if best is None or main > best:
        outcome.scores, outcome.outputs, outcome.best_step = scores, outputs, outcome.steps
        if keep_weights:
            outcome.weights = {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()}


def _stop_if_not_finite(losses: list[Tensor], step: int, settings: TrainSettings) -> None:
    if not torch.isfinite(torch.stack(losses)).all():
        raise UserError(
            f"the loss is not a finite number any more (seen at step {step}): nothing is written. Lower "
            f"train.learning_rate (= {settings.learning_rate:g}), or check the checkpoint's weights."
        )


def _autocast(device: torch.device, settings: TrainSettings) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=settings.precision == "bf16")


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[Outcome, bool, float], None]]:
    """A bar on a terminal; elsewhere one line an evaluation, with the time left."""
    bar = tqdm(total=steps, disable=not sys.stderr.isatty(), unit="step", leave=False)

    def show(outcome: Outcome, evaluated: bool, seconds: float) -> None:
        bar.update()
        if not evaluated:
            return
        step, loss, main = outcome.history[-1]
        bar.set_postfix(loss=f"{loss:.3f}", dev=f"{main:.4f}")
        if bar.disable:
            left = seconds / step * (steps - step)
            log.info("step %d/%d  loss %.4f  dev %.4f  eta %d:%02d", step, steps, loss, main, *divmod(round(left), 60))

    with bar:
        yield show
