"""Trains every head with one subclass of transformers' Trainer.

A step's rows are cut into chunks, one for each rank and each of its micro-batches. The sum of their losses is divided
by the rows of the whole step, and dropout is seeded by seed, step and chunk. So ranks and micro-batches change no
number: 2 ranks x 1 micro-batch and 1 rank x 2 micro-batches differ only by the order of floating-point sums.

One epoch of Trainer is the whole run. The sampler knows the ranks, so accelerate does not shard the batches: it would
skip batches that are shorter than others, and count repeated rows.
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, cycle, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import PrinterCallback, Trainer, TrainingArguments

from finetune.encoding import Encoded
from finetune.heads.modeling_task import IGNORE_INDEX, TaskModel, loss_sum, problem_type_of
from finetune.metrics import score_predictions
from finetune.results import FORMAT, differences
from finetune.settings import TRAINER_ARGUMENTS, RunSettings
from finetune.tasks import Array, example_arrays
from multicls.console import print_line, progress_bar
from multicls.deepspeed_config import Precision
from multicls.distributed import on_rank_0, rank_and_world, safe_unpickling
from multicls.errors import UserError, first_line
from multicls.files import read_json, write_json
from multicls.measures import larger_is_better
from multicls.optim import choose_precision, dropout_seed

STATE = "run.pt"  # in a checkpoint: the best evaluation, the history and the seconds of training
RUN = "run.json"  # in a checkpoint, written last: the identity of its run


class Chunk(NamedTuple):
    """Rows of one forward pass of one rank."""

    number: int  # in the run, over all ranks
    task: int
    rows: Sequence[int]
    counted: bool  # False: the rows only keep the rank busy


class ChunkSampler(Sampler[list[Chunk]]):
    """This rank's chunks of all steps of a run, each in a list of its own.

    `batch_size` rows are a step, of `accumulation` forward passes on this rank and `chunks` on all, of at most
    `micro_batch_size` rows. There are `steps`, and an evaluation each `eval_every`. Where the settings leave them open,
    the number of training rows decides, as in Multi-CLS BERT.
    """

    def __init__(self, settings: RunSettings, sizes: Sequence[int]) -> None:
        train = settings.train
        self.batch_size = train.batch_size or _batch_size(settings, max(sizes))
        epoch = sum(math.ceil(rows / self.batch_size) for rows in sizes)
        self.steps = min(train.epochs * epoch, train.max_steps or train.epochs * epoch)
        self.eval_every = min(train.eval_every or min(500, 2 * epoch), self.steps)
        self.rank, self.world_size = rank_and_world()
        per_rank = math.ceil(self.batch_size / self.world_size)
        self.accumulation = math.ceil(per_rank / min(train.micro_batch_size or per_rank, per_rank))
        self.chunks = self.world_size * self.accumulation
        self.micro_batch_size = math.ceil(self.batch_size / self.chunks)
        self.batches = (sizes, self.batch_size, settings.seed, settings.cln.sampling)

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def __iter__(self) -> Iterator[list[Chunk]]:
        for step, (task, rows) in enumerate(islice(task_batches(*self.batches), self.steps)):
            cuts = [len(rows) * chunk // self.chunks for chunk in range(self.chunks + 1)]
            for index in range(self.rank, self.chunks, self.world_size):
                # All ranks must run the model equally often: without a row of its own a chunk repeats one.
                share = rows[cuts[index] : cuts[index + 1]]
                number = step * self.chunks + index
                yield [Chunk(number, task, share or [rows[index % len(rows)]], bool(share))]


def _batch_size(settings: RunSettings, rows: int) -> int:
    """Returns the default batch size for the largest task's training rows, as in Multi-CLS BERT."""
    if settings.head == "isobn":
        return 32  # as its paper; of 4 rows its statistics are noise
    if rows > 3000 or (settings.task_names and settings.train_size == "full"):
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


class _Batches(Dataset[dict[str, Any]]):
    """The batch of each chunk."""

    def __init__(self, tasks: Sequence[Encoded]) -> None:
        self.tasks = tasks

    def __getitem__(self, chunk: Chunk) -> dict[str, Any]:
        batch = self.tasks[chunk.task].batch(chunk.rows)
        if not chunk.counted:
            batch["labels"].fill_(IGNORE_INDEX)
        return batch | {"task": chunk.task, "chunk": chunk.number, "counted": chunk.counted}


class TaskTrainer(Trainer):
    """Trains a `TaskModel` on one task or several, and keeps the best evaluation in memory.

    Args:
        tasks: for each task of the model its rows by split: "train", the one that picks the weights, and others.
            Without "dev" no rows pick the weights, the last ones count.
        identity: all that decides the numbers of the run, as JSON; marks its checkpoints.
        folder: folder of the checkpoints and curves.
    """

    history: list[dict[str, float]]  # step and loss of each evaluation; score, selection_loss
    best: dict[str, Any]  # the entry of the best evaluation, and its weights on the CPU

    def __init__(
        self,
        model: TaskModel,
        tasks: Sequence[Mapping[str, Encoded]],
        settings: RunSettings,
        identity: Mapping[str, Any],
        folder: Path,
    ) -> None:
        AcceleratorState._reset_state(True)  # of an earlier run in this process
        train = [splits["train"] for splits in tasks]
        self.settings = settings.train
        balanced, device = settings.train.class_weights == "balanced", find_device()
        self.class_weights = [_class_weights(r).to(device) if balanced else None for r in train]
        self.sampler = ChunkSampler(settings, [len(rows) for rows in train])
        arguments = training_arguments(settings, self.sampler, folder)
        if arguments.gradient_checkpointing and not model.encoder.supports_gradient_checkpointing:
            kind = model.encoder.config.model_type
            raise UserError(f"trainer.gradient_checkpointing: {kind} has none; leave it out.")
        self.task_model = model
        precision, batch_size = settings.train.precision, arguments.per_device_eval_batch_size
        self._predict = partial(predict_rows, model, precision=precision, batch_size=batch_size)
        self.splits = [dict(list(splits.items())[1:]) for splits in tasks]  # the first picks
        self.identity = {**identity, "ranks": self.sampler.world_size, "format": FORMAT}
        self.best, self.history, self.picks = {}, [], all("dev" in splits for splits in tasks)
        self._task, self._began, self._saved = 0, time.monotonic(), time.monotonic()
        super().__init__(
            model,
            arguments,
            train_dataset=_Batches(train),
            eval_dataset=train,  # not read: `evaluate` has its own
            compute_loss_func=self._loss,
        )
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Returns the rank's own chunks, which accelerate must not shard again."""
        dataset: Any = self.train_dataset
        return DataLoader(dataset, batch_sampler=self.sampler, collate_fn=itemgetter(0))

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any) -> Tensor:
        """Computes the gradients of a chunk, with its own seed for dropout."""
        torch.manual_seed(dropout_seed(self.args.seed, inputs.pop("chunk")))
        self._task = inputs["task"]
        self._bar.update()
        if self.state.global_step + 1 == self.state.max_steps:
            self.control.should_log = True  # also where it is no multiple of `logging_steps`
        return super().training_step(model, inputs, *args)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Moves a chunk to the device; scores stay float32, which Trainer rounds to DeepSpeed's type."""
        prepared = super()._prepare_inputs(inputs)
        return prepared | {"labels": inputs["labels"].to(self.args.device)}

    def _loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        """Returns the chunk's part of the loss, the mean over the counted rows of the step."""
        problem = problem_type_of(self.task_model.config.tasks[self._task])
        logits, weights = outputs.logits.float(), self.class_weights[self._task]
        return loss_sum(problem, logits, labels, weights) / num_items_in_batch

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Scores the rows that pick, keeps the weights if they are better, and decides whether to stop or to save."""
        entry = {"step": self.state.global_step, "loss": self._checked_loss()}
        metrics = {"eval_train_loss": entry["loss"]}
        if self.picks:
            metrics |= self._score()
            entry |= {"score": metrics["eval_score"], "selection_loss": metrics["eval_loss"]}
        self.history.append(entry)
        self._keep_best(entry)
        self.log(metrics)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if self.is_world_process_zero():
            score = f"  score {100 * entry['score']:.2f}" if self.picks else ""
            where = f"step {self.state.global_step}/{self.state.max_steps}"
            print_line(f"{where}  loss {entry['loss']:.4f}{score}")
        self._stop_or_save()
        return metrics

    def _checked_loss(self) -> float:
        """Returns the mean loss since the evaluation before; one that is not finite is a `UserError`."""
        loss = next(entry["loss"] for entry in reversed(self.state.log_history) if "loss" in entry)
        if not math.isfinite(loss):
            raise UserError(
                f"the loss is not a finite number any more (seen at step {self.state.global_step}): nothing is "
                f"written. Lower train.learning_rate (= {self.args.learning_rate:g}), or check the weights."
            )
        return float(loss)

    def _score(self) -> dict[str, float]:
        """Returns the metrics on the rows of all tasks that pick: `eval_score` and `eval_loss` are means over tasks."""
        metrics, scores, losses = dict[str, float](), [], []
        for number, splits in enumerate(self.splits):
            rows = next(iter(splits.values()))
            outputs = self._predict(rows, number)
            values = score_predictions(rows.task, example_arrays(rows.examples, outputs))
            main = rows.task.metrics[0]
            scores.append(larger_is_better(main, values[main]))
            metrics |= {f"eval_{rows.task.name}_{name}": v for name, v in values.items()}
            problem = problem_type_of(self.task_model.config.tasks[number])
            loss = loss_sum(problem, torch.from_numpy(outputs), rows.labels)
            losses.append(float(loss) / len(rows))
        return metrics | {"eval_score": float(np.mean(scores)), "eval_loss": float(np.mean(losses))}

    def _keep_best(self, entry: Mapping[str, float]) -> None:
        """Copies the weights if no evaluation before was better, of equal scores by its loss, or if none picks."""
        if self.picks and self.best:
            now, before = ((e["score"], -e["selection_loss"]) for e in (entry, self.best))
            if now <= before:
                return
        named = self.task_model.state_dict().items()
        weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named}
        self.best = {**entry, "weights": weights}

    def _stop_or_save(self) -> None:
        step, now = self.state.global_step, on_rank_0(time.monotonic)
        due = now - self._saved >= 60 * self.settings.checkpoint_minutes
        if step - self.best["step"] >= self.settings.patience:
            self.control.should_training_stop = True
        elif due and step < self.state.max_steps:
            self.control.should_save, self._saved = True, now

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Saves Trainer's checkpoint and the best evaluation; marks it as whole, then removes older ones."""
        output = Path(str(self.args.output_dir))
        folder = output / f"checkpoint-{self.state.global_step}"
        if self.args.should_save and folder.exists():  # of another run, or torn
            shutil.rmtree(folder)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            seconds = time.monotonic() - self._began
            state = {"best": self.best, "history": self.history, "seconds": seconds}
            torch.save(state, folder / STATE)
            write_json(folder / RUN, self.identity)
            for path in set(output.glob("checkpoint-*")) - {folder}:
                shutil.rmtree(path)

    def _newest_checkpoint(self) -> Path | None:
        """Returns the newest whole checkpoint of this run, which another number of ranks may have written.

        Checkpoints of other settings are named, and stay until this run has a checkpoint of its own; DeepSpeed's of
        another number of ranks is a `UserError`.
        """
        mine, ranks = list[Path](), self.identity["ranks"]
        for mark in Path(str(self.args.output_dir)).glob(f"checkpoint-*/{RUN}"):
            changes = differences(read_json(mark), self.identity)
            if changes.keys() <= {"ranks"}:
                mine.append(mark.parent)
            else:
                what = ", ".join(changes.values())
                print_line(f"note: {mark.parent} is not resumed, it is of another run ({what})")
        newest = max(mine, key=_step_of, default=None)
        if newest and (before := read_json(newest / RUN)["ranks"]) != ranks:
            if self.is_deepspeed_enabled:
                raise UserError(
                    f"{newest}: written by {before} ranks, not {ranks}, which DeepSpeed cannot read. Start {before} "
                    "ranks, or delete that folder to begin again."
                )
            print_line(f"note: {newest} was written by {before} ranks; dropout now differs")
        return newest

    def run(self) -> tuple[list[dict[str, Array]], dict[str, Any]]:
        """Trains, from the newest whole checkpoint if there is one; leaves the model with the best weights.

        Returns the outputs (N, C) of each task by split, without "train", and the record's fields on training.
        """
        shown = self.is_world_process_zero()
        bar = progress_bar(len(self.sampler), "batch", "fine-tuning", disable=not shown)
        with bar as self._bar, ExitStack() as stack:
            if newest := on_rank_0(self._newest_checkpoint):
                state = torch.load(newest / STATE, weights_only=True)
                self.best, self.history = state["best"], state["history"]
                self._began -= state["seconds"]  # before it resumed
                self._bar.update(_step_of(newest) * self.sampler.accumulation)
                if self.is_deepspeed_enabled:
                    stack.enter_context(safe_unpickling(newest))
                if shown:
                    print_line(f"resuming from step {_step_of(newest)} of {self.sampler.steps}")
            self.train(resume_from_checkpoint=str(newest) if newest else None)
        self.task_model.load_state_dict(self.best["weights"])
        outputs = [
            {name: self._predict(rows, number) for name, rows in splits.items()}
            for number, splits in enumerate(self.splits)
        ]
        return outputs, {
            "history": self.history,
            "best_step": self.best["step"],
            "steps": self.state.global_step,
            "seconds": round(time.monotonic() - self._began, 3),
            "ranks": self.sampler.world_size,
            "batch_size": self.sampler.batch_size,
        }


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def find_device() -> torch.device:
    """Returns the GPU, or else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns of its guess
    return torch.device("cpu")


@torch.no_grad()
def predict_rows(
    model: nn.Module,
    rows: Encoded,
    task: int,
    precision: Precision | Literal["auto"] = "auto",
    batch_size: int = 64,
    read: Callable[[Any], Tensor] = itemgetter("logits"),
    **options: bool,
) -> Array:
    """Returns what `read` takes from the model's output for each row, (N, M), in their order, on all ranks.

    Each rank computes a part. A batch holds rows of like length, for less padding. `options` are the model's.
    """
    device = find_device()
    model.eval().to(device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(choose_precision(precision, device))
    autocast = dtype is not None and next(model.parameters()).dtype == torch.float32
    rank, world_size = rank_and_world()
    by_length = sorted(range(len(rows)), key=rows.lengths.__getitem__)
    batches = [by_length[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    mine = batches[rank::world_size] or batches[:1]  # a rank without rows repeats some
    outputs = []
    for batch_rows in mine:
        batch = rows.batch(batch_rows)
        inputs = {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
        with torch.autocast(device.type, dtype=dtype, enabled=autocast):
            values = read(model(**inputs, task=task, **options)).float()
        outputs.append(values.reshape(len(batch_rows), -1))
    table = torch.full((len(rows), outputs[0].shape[1]), -math.inf, device=device)
    table[torch.tensor(list(chain.from_iterable(mine)), device=device)] = torch.cat(outputs)
    if world_size > 1:
        dist.all_reduce(table, dist.ReduceOp.MAX)
    return np.asarray(table.cpu().numpy(), dtype=np.float32)


def training_arguments(
    settings: RunSettings, sampler: ChunkSampler, folder: Path
) -> TrainingArguments:
    """Returns the training arguments, ours and those of `settings.trainer`; a wrong one is a `UserError`."""
    train = settings.train
    precision = choose_precision(train.precision, find_device())
    defaults: dict[str, Any] = {
        "per_device_eval_batch_size": 64,
        "report_to": "tensorboard",
        "ddp_find_unused_parameters": len(settings.task_names) > 1,
    }
    ours = train.model_dump(include={"learning_rate", "weight_decay", "max_grad_norm"})
    ours |= {
        "output_dir": str(folder),
        "max_steps": sampler.steps,
        "seed": settings.seed,
        "per_device_train_batch_size": sampler.micro_batch_size,
        "gradient_accumulation_steps": sampler.accumulation,
        "warmup_steps": round(train.warmup_ratio * sampler.steps),
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "use_cpu": not torch.cuda.is_available(),  # without it two ranks get losses of NaN there
        "eval_strategy": "steps",
        "eval_steps": sampler.eval_every,
        "logging_steps": sampler.eval_every,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "deepspeed": _deepspeed(settings, sampler, precision),
    }
    assert not ours.keys() & TRAINER_ARGUMENTS, "all of them are refused in settings.trainer"
    try:
        arguments = TrainingArguments(**defaults | settings.trainer | ours)
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(f"trainer {settings.trainer}: {first_line(error)}") from None
    arguments._n_gpu = min(arguments.n_gpu, 1)  # one process uses one GPU
    return arguments


def _deepspeed(
    settings: RunSettings, sampler: ChunkSampler, precision: Precision
) -> dict[str, Any] | None:
    """Returns the completed DeepSpeed JSON; ZeRO stage 3 is refused."""
    if not (path := settings.config):
        return None
    from multicls.deepspeed_config import complete_deepspeed_config, load_deepspeed_config

    config = load_deepspeed_config(path)
    if int(config.get("zero_optimization", {}).get("stage", 0)) > 2:
        raise UserError(f"--config {path}: no ZeRO stage 3 here: take ds_configs/zero2.json.")
    return complete_deepspeed_config(
        config,
        micro_batch_size=sampler.micro_batch_size,
        accumulation=sampler.accumulation,
        world_size=sampler.world_size,
        max_grad_norm=settings.train.max_grad_norm,
        precision=precision,
    )


def _class_weights(rows: Encoded) -> Tensor:
    """Returns the weight of each class (C,), n / (C n_c): the mean over the rows is 1."""
    task = rows.task
    if task.is_regression or task.num_choices or task.multi_label:
        raise UserError(f"--class_weights: task {task.name} has no rows of one of several classes.")
    counts = torch.bincount(rows.labels, minlength=task.num_labels)
    return len(rows) / ((counts > 0).sum() * counts.clamp(min=1))
