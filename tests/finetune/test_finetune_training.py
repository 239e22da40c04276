"""The parts of the loop: schedule, weight decay, batches, padding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from finetune.checkpoint import find_checkpoint, load_tokenizer
from finetune.heads import build_head
from finetune.reading import read_task
from finetune.settings import FinetuneSettings, TrainSettings, resolve
from finetune.tasks import TASKS
from finetune.training import Encoded, learning_rate_at, make_optimizer, predict, row_batches

CPU = torch.device("cpu")


def test_learning_rate_rises_over_the_warm_up_and_falls_to_zero() -> None:
    settings = TrainSettings(learning_rate=1.0, max_steps=100, warmup=0.1)
    rates = [learning_rate_at(step, settings) for step in range(100)]
    assert rates[0] == pytest.approx(1 / 11) and rates[10] == 1.0 and rates[-1] == pytest.approx(1 / 90)
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate_at(0, settings.model_copy(update={"warmup": 0.0})) == 1.0
    assert all(rate > 0 for rate in rates)


@pytest.mark.parametrize(
    ("size", "rows", "batch", "steps", "every"),
    [
        (100, 100, 4, 500, 50),
        (1000, 1000, 8, 2500, 250),
        ("full", 2490, 16, 3120, 312),
        ("full", 67349, 16, 84200, 500),
    ],
)
def test_settings_of_the_paper_by_train_size(size: int | str, rows: int, batch: int, steps: int, every: int) -> None:
    settings = FinetuneSettings.model_validate({"model": "m", "task": "rte", "head": "cls", "train_size": size})
    resolved = resolve(settings, rows, "fp32")
    assert (resolved.batch_size, resolved.max_steps, resolved.eval_every) == (batch, steps, every)
    assert resolved.precision == "fp32"


def test_biases_and_layer_norms_do_not_decay(tiny_multicls: Path) -> None:
    model = build_head("multicls", find_checkpoint(str(tiny_multicls)), 2)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decaying, others = make_optimizer(model, TrainSettings()).param_groups
    assert decaying["weight_decay"] == 0.01 and others["weight_decay"] == 0.0
    assert not [n for p in decaying["params"] if "bias" in (n := names[id(p)]) or "LayerNorm" in n]
    assert all("bias" in (name := names[id(p)]) or "LayerNorm" in name for p in others["params"])
    assert len(decaying["params"]) + len(others["params"]) == len(names)


def test_every_epoch_sees_every_row_once() -> None:
    batches = row_batches(10, 4, seed=1)
    epochs = [[next(batches) for _ in range(3)] for _ in range(2)]
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[4, 4, 2]] * 2
    flat = [[row for batch in epoch for row in batch] for epoch in epochs]
    assert sorted(flat[0]) == sorted(flat[1]) == list(range(10)) and flat[0] != flat[1]


def test_outputs_keep_the_order_of_rows_and_padding_changes_nothing(tiny_multicls: Path, glue: Path) -> None:
    checkpoint, settings = find_checkpoint(str(tiny_multicls)), TrainSettings(precision="fp32")
    model, tokenizer = build_head("multicls", checkpoint, 2), load_tokenizer(checkpoint, 32)
    rows = read_task(TASKS["qnli"], str(glue), train_from_dev=True).dev[:9]
    rows = [replace(row, texts=(row.texts[0] + " len bal" * (i % 5), row.texts[1])) for i, row in enumerate(rows)]
    encoded = Encoded(TASKS["qnli"], rows, tokenizer, 32)
    assert len(set(encoded.lengths)) > 3
    together, alone = (predict(model, encoded, CPU, settings, batch_size=size) for size in (9, 1))
    np.testing.assert_allclose(together, alone, atol=1e-6)
    assert len({tuple(row) for row in alone.round(6).tolist()}) > 3, "rows differ, so that an order can be wrong"
    assert not model.training, "as it was found"
