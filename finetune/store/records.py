"""A run from its plan to what it leaves: its line of results and its predictions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.store.results import Array, Record, Store
from multicls.distributed import rank_and_world
from multicls.environment import environment_record, peak_memory_gb
from multicls.errors import UserError

if TYPE_CHECKING:
    from finetune.data.examples import LabeledExample
    from finetune.data.selection import TaskRows
    from finetune.data.tasks import Task
    from finetune.heads.checkpoint import Checkpoint
    from finetune.settings import FinetuneSettings, TrainSettings
    from finetune.train.loop import FinetuneResult

ERROR_RESAMPLES = 200  # of dev, for the standard error of a run's score


@dataclass(frozen=True)
class PlannedRun:
    """A run before it is run; lists have one entry for each task."""

    settings: FinetuneSettings
    train: TrainSettings  # the settings of the training, resolved
    numeric: dict[str, Any]  # device, precision and DeepSpeed file: what changes numbers beside the settings
    rows: list[TaskRows]
    checkpoint: Checkpoint
    request_ids: list[str]  # hashes of what was requested
    run_ids: list[str]  # hashes of what was requested, in this numeric mode

    @property
    def store(self) -> Store:
        """The results folder."""
        return Store(self.settings.output_dir)

    @property
    def title(self) -> str:
        """Task, size, head and seed of the run, for people."""
        names = ",".join(own.task.name for own in self.rows)
        return f"{names}, {self.settings.train_size} train rows, {self.settings.label}, seed {self.settings.seed}"

    def records(self) -> list[Record] | None:
        """Returns the lines of the run, None if it or the model that it is to leave is missing."""
        done = {record["run_id"]: record for record in self.store.records()}
        if not done.keys() >= set(self.run_ids) or (self.settings.save_model and not self.model_path.exists()):
            return None
        records = [done[run_id] for run_id in self.run_ids]
        wanted = {task.name for own in self.rows for task, _ in own.test}
        tested = {name for record in records for name in record["tested"]}
        return records if wanted <= tested else None

    @property
    def model_path(self) -> Path:
        """Folder of the saved model."""
        return self.store.model_path(self.run_ids[0])


@dataclass(frozen=True)
class Predicted:
    """The outputs of a trained model: for each task those (N, C) for held-out rows, dev rows and test sets."""

    result: FinetuneResult
    held: list[Array]  # for `selection` dev those for dev
    dev: list[Array]
    test: list[list[Array]]
    model: Any = None  # with its best weights; None where there is no model of ours


def make_record(planned: PlannedRun, predicted: Predicted, task: int) -> dict[str, Any]:
    """Returns the line of results of one task."""
    import torch

    from finetune.data.metrics import constant_scores, score_examples
    from finetune.stats.comparisons import bootstrap_score

    settings, own, result = planned.settings, planned.rows[task], predicted.result
    scores = score_examples(own.task, own.dev, predicted.dev[task])
    held: dict[str, Any] = {}
    error: float | None = None
    with suppress(UserError):  # there is one example or passage only
        error = bootstrap_score(own.task, make_predictions(own, predicted, task), ERROR_RESAMPLES) / 100
    if own.held:
        held_scores = score_examples(own.task, own.held, predicted.held[task])
        held = {"holdout_rows": len(own.held), "holdout_scores": held_scores}
    return {
        "run_id": planned.run_ids[task], "request_id": planned.request_ids[task],
        "task": own.task.name, "benchmark": own.task.benchmark,
        **settings.model_dump(include={"model", "model_name", "pretraining_seed", "data_seed", "seed", "selection"}),
        "train_size": str(settings.train_size), "fingerprint": planned.checkpoint.fingerprint, "label": settings.label,
        "requested": settings.requested(), "changed": settings.changed(), "numeric": planned.numeric,
        "resolved": {"max_length": settings.max_length or own.task.max_length, "train": planned.train.model_dump()},
        "metric": own.task.metrics[0], "score": scores[own.task.metrics[0]], "scores": scores, "score_error": error,
        "constant": constant_scores(own.task, own.train, own.dev),
        **held,
        "tested": [other.name for other, _ in own.test],
        "test_scores": _test_scores(own, predicted.test[task]),
        "best_step": result.best_step, "steps": result.steps,
        "history": [(step, loss, mains[task]) for step, loss, mains in result.history],
        "train_rows": len(own.train),
        "all_rows": len(own.drawn) == own.split_rows and not own.held and not settings.label_noise,
        "dev_rows": len(own.dev), "labels": list(own.task.labels), "multi_label": own.task.multi_label,
        "seconds": round(result.seconds, 2),
        "peak_memory_gb": round(peak_memory_gb(planned.numeric["device"]), 3),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "ranks": rank_and_world()[1],
        "notes": [*own.notes, *own.warnings], "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **environment_record(),
    }  # fmt: skip


def _test_scores(own: TaskRows, outputs: Sequence[Array]) -> dict[str, dict[str, float]]:
    """Returns the scores of each test set whose labels are known."""
    from finetune.data.metrics import score_examples

    tests = zip(own.test, outputs, strict=True)
    known = [(task, rows, values) for (task, rows), values in tests if all(row.label == row.label for row in rows)]
    return {task.name: score_examples(task, rows, values) for task, rows, values in known}


def make_predictions(own: TaskRows, predicted: Predicted, task: int) -> dict[str, Any]:
    """Returns the arrays of one task's predictions."""
    arrays = _arrays(own.task, own.dev, predicted.dev[task])
    arrays["train_rows"] = own.train_rows
    if own.held:
        held = _arrays(own.task, own.held, predicted.held[task])
        arrays |= {f"holdout_{name}": values for name, values in held.items()} | {"holdout_rows": own.held_rows}
    for (other, examples), outputs in zip(own.test, predicted.test[task], strict=True):
        test = _arrays(other, examples, outputs)
        arrays |= {f"test_{other.name}_{name}": values for name, values in test.items()}
    return arrays


def _arrays(task: Task, examples: Sequence[LabeledExample], outputs: Array) -> dict[str, Any]:
    names = ("id", "part", "group", "passage", "answer")
    arrays: dict[str, Any] = {f"{name}s": np.array([getattr(example, name) for example in examples]) for name in names}
    arrays["labels"] = np.array([example.labels if task.multi_label else example.label for example in examples])
    if task.is_regression:
        return arrays | {"scores": outputs[:, 0] * task.label_scale}
    return arrays | {"logits": outputs}
