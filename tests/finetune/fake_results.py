"""Results folders as runs leave them, of invented predictions, through the real `Store`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.metrics import score
from finetune.data.tasks import find_task
from finetune.settings import FinetuneSettings
from finetune.store.results import Store, short_hash

RECORD = ("fingerprint", "score", "holdout_scores", "notes", "numeric", "versions", "git_commit", "constant", "history",
          "all_rows")  # fmt: skip


def fake_settings(task: str = "rte", head: str = "cls", **values: Any) -> FinetuneSettings:
    """Settings of a run; train settings as `learning_rate` and the like."""
    train = {name: values.pop(name) for name in ("learning_rate", "epochs", "batch_size") if name in values}
    values = {"model": "RUN/hf", "train_size": 100} | values
    return FinetuneSettings.model_validate(values | {"task": task, "head": head, "train": train})


def fake_run(
    folder: Path, task: str = "rte", head: str = "cls", seed: int = 1, skill: float = 1.0, rows: int = 60,
    holdout: bool = False, **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """Writes a run whose logits are `skill` times the truth plus noise of the seed; returns its record.

    Args:
        changes: fields of the record (`RECORD`), or settings.
    """
    from finetune.run import request_ids_of

    given = {name: changes.pop(name) for name in RECORD if name in changes}
    settings = fake_settings(task, head, seed=seed, selection="holdout" if holdout else "dev", **changes)
    found = find_task(settings.task_names[0])
    draw = np.random.default_rng([seed, settings.data_seed, int(100 * skill), *head.encode()])
    labels = np.random.default_rng(0).integers(0, max(2, len(found.labels)), rows).astype(float)
    if found.is_regression:
        outputs = (skill * labels + draw.normal(size=rows))[:, None]
    else:
        outputs = 2 * skill * np.eye(len(found.labels))[labels.astype(int)]
        outputs = outputs + draw.normal(size=(rows, len(found.labels)))
    kind, values = ("scores", outputs[:, 0] * found.label_scale) if found.is_regression else ("logits", outputs)
    groups = [f"g{number // 3}" if found.shape == "multi_answer" else "" for number in range(rows)]
    predictions: dict[str, Any] = {
        "ids": [f"row{number}" for number in range(rows)], "parts": [""] * rows, "groups": groups,
        "passages": [""] * rows, "answers": [""] * rows, "labels": labels, "train_rows": np.arange(100), kind: values,
    }  # fmt: skip
    scores = score(found, labels, outputs, groups=groups)
    numeric = given.pop("numeric", {"device": "cpu", "precision": "fp32", "deepspeed": None})
    fingerprint = given.get("fingerprint", "abcdef0123456789")
    (request_id, *_) = request_ids_of(settings, fingerprint)
    held = {}
    if holdout:
        predictions |= {f"holdout_{name}": predictions[name][:30] for name in ("ids", "labels", "parts", "groups")}
        predictions[f"holdout_{kind}"] = values[:30] * 3
        held_scores = score(found, labels[:30], outputs[:30], groups=groups[:30])
        held = {"holdout_rows": 30, "holdout_scores": held_scores}
    names = ("model", "model_name", "pretraining_seed", "data_seed", "seed", "selection")
    record = {
        "run_id": short_hash([request_id, numeric]), "request_id": request_id, "task": found.name,
        "benchmark": found.benchmark, **settings.model_dump(include=set(names)),
        "train_size": str(settings.train_size), "fingerprint": fingerprint, "label": settings.label,
        "requested": settings.requested(), "changed": settings.changed(), "numeric": numeric,
        "resolved": {"max_length": 128, "train": settings.train.model_dump() | {"max_steps": 500}},
        "metric": found.metrics[0], "score": scores[found.metrics[0]], "scores": scores, "score_error": 0.03,
        "constant": dict.fromkeys(found.metrics, 0.4), **held, "tested": [], "test_scores": {}, "best_step": 400,
        "steps": 500, "history": [[250, 0.7, 0.5], [500, 0.6, 0.55]], "train_rows": 100, "dev_rows": rows,
        "labels": list(found.labels), "seconds": 1.0, "gpu": None, "ranks": 1, "notes": [],
        "time": "2026-01-01T00:00:00+0000", "versions": {"torch": "2.13", "transformers": "5.23"}, "git_commit": None,
    } | given  # fmt: skip
    if "score" in given:
        record["scores"] = record["scores"] | {record["metric"]: given["score"]}
    Store(folder).write(record, predictions)
    return record
