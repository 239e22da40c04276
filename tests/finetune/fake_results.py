"""Results folders as runs leave them, of invented predictions, through the real `write_result`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.metrics import score
from finetune.data.tasks import find_task
from finetune.store.results import run_id_of, write_result


def fake_run(
    folder: Path,
    task: str = "rte",
    head: str = "cls",
    seed: int = 1,
    skill: float = 1.0,
    rows: int = 60,
    holdout: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    """Writes a run whose logits are `skill` times the truth plus noise of the seed; returns its line.

    Args:
        changes: parts of the record (model, model_name, pretraining_seed, notes, score, holdout_scores) or of its
            identity; train settings as `learning_rate`.
    """
    found = find_task(task)
    draw = np.random.default_rng([seed, int(100 * skill), *head.encode()])
    labels = np.random.default_rng(0).integers(0, max(2, len(found.labels)), rows).astype(float)
    parts = ("model_name", "pretraining_seed", "score", "holdout_scores")
    record = {name: changes.pop(name) for name in parts if name in changes}
    path, notes = changes.pop("model", "RUN/hf"), changes.pop("notes", [])
    identity = {
        "task": task, "train_size": 100, "head": head, "seed": seed, "data_seed": 1, "sampling": "uniform",
        "label_noise": 0.0, "selection": "holdout" if holdout else "dev", "max_length": 128, "train_from_dev": False,
        "model": changes.pop("fingerprint", "abcdef0123456789"), "data": "d" * 16,
        "train": {"learning_rate": changes.pop("learning_rate", 2e-5), "epochs": 20, "batch_size": 4, "max_steps": 500},
    } | changes  # fmt: skip
    if found.is_regression:
        outputs = (skill * labels + draw.normal(size=rows))[:, None]
    else:
        outputs = 2 * skill * np.eye(len(found.labels))[labels.astype(int)] + draw.normal(
            size=(rows, len(found.labels))
        )
    predictions: dict[str, Any] = {
        "ids": np.array([f"row{number}" for number in range(rows)]), "parts": np.array([""] * rows),
        "groups": np.array([f"g{number // 3}" if found.shape == "multi_answer" else "" for number in range(rows)]),
        "labels": labels, "train_rows": np.arange(100),
    }  # fmt: skip
    predictions |= {"scores": outputs[:, 0] * found.label_scale} if found.is_regression else {"logits": outputs}
    if holdout and not found.is_regression:
        predictions |= {"holdout_labels": labels[:30], "holdout_logits": outputs[:30] * 3}
    groups = predictions["groups"].tolist()
    scores = score(found, labels, outputs, groups=groups)
    line = {
        "run_id": run_id_of(identity), "identity": identity, "model": path, "model_name": None,
        "pretraining_seed": None, "benchmark": found.benchmark, "metric": found.metrics[0],
        "score": scores[found.metrics[0]], "scores": scores, "best_step": 400, "steps": 500,
        "history": [[250, 0.7, 0.5]], "train_rows": 100, "dev_rows": rows, "seconds": 1.0, "device": "cpu",
        "notes": list(notes), "versions": {}, "git_commit": None,
    } | record  # fmt: skip
    write_result(folder, line, predictions)
    return line
