"""The parts of the loop: schedule, weight decay, batches, padding."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup

from finetune.data.encoding import Encoded
from finetune.data.metrics import score_examples
from finetune.data.reading import read_task
from finetune.data.tasks import TASKS
from finetune.heads.building import build_head
from finetune.heads.checkpoint import find_checkpoint, load_tokenizer
from finetune.heads.modeling_heads import TaskModel
from finetune.settings import FinetuneSettings, TrainSettings, resolve
from finetune.train.loop import (
    FinetuneResult,
    TaskSplit,
    chunks_of,
    copy_weights,
    fine_tune,
    learning_rate_at,
    load_weights,
    make_optimizer,
    predict,
    row_batches,
    task_batches,
)

CPU = torch.device("cpu")


def build(folder: Path, head: str, *tasks: str) -> TaskModel:
    settings = FinetuneSettings.model_validate({"model": str(folder), "task": ",".join(tasks), "head": head})
    return build_head(settings, find_checkpoint(str(folder)), [TASKS[task] for task in tasks])


def test_learning_rate_rises_over_the_warm_up_and_falls_to_zero() -> None:
    settings = TrainSettings(learning_rate=1.0, max_steps=100, warmup_ratio=0.1)
    rates = [learning_rate_at(step, settings) for step in range(100)]
    assert rates[0] == pytest.approx(1 / 11) and rates[10] == 1.0 and rates[-1] == pytest.approx(1 / 90)
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate_at(0, settings.model_copy(update={"warmup_ratio": 0.0})) == 1.0
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
    resolved = resolve(settings, [rows], "fp32")
    assert (resolved.batch_size, resolved.max_steps, resolved.eval_every) == (batch, steps, every)
    assert resolved.precision == "fp32"


def test_biases_and_layer_norms_do_not_decay(tiny_multicls: Path) -> None:
    model = build(tiny_multicls, "multicls", "rte")
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
    model, tokenizer = build(tiny_multicls, "multicls", "qnli").eval(), load_tokenizer(checkpoint, 32)
    rows = read_task(TASKS["qnli"], str(glue), train_from_dev=True).dev[:9]
    rows = [replace(row, texts=(row.texts[0] + " len bal" * (i % 5), row.texts[1])) for i, row in enumerate(rows)]
    encoded = Encoded(TASKS["qnli"], rows, tokenizer, 32)
    assert len(set(encoded.lengths)) > 3
    together, alone = (
        predict(model, encoded, CPU, settings.model_copy(update={"eval_batch_size": size})) for size in (9, 1)
    )
    np.testing.assert_allclose(together, alone, atol=1e-6)
    assert len({tuple(row) for row in alone.round(6).tolist()}) > 3, "rows differ, so that an order can be wrong"
    assert not model.training, "as it was found"


def test_size_balanced_epochs_hold_every_row_of_every_task_once_and_round_robin_takes_turns() -> None:
    batches = task_batches([10, 30, 5], 4, 1, "size_balanced")
    epoch = [next(batches) for _ in range(3 + 8 + 2)]
    for task, size in enumerate((10, 30, 5)):
        assert sorted(row for own, rows in epoch for row in rows if own == task) == list(range(size))
    order = [task for task, _ in epoch]
    assert order != sorted(order), "mixed"
    again = task_batches([10, 30, 5], 4, 1, "size_balanced")
    assert [next(again) for _ in range(13)] == epoch
    turns = task_batches([10, 30, 5], 4, 1, "round_robin")
    assert [next(turns)[0] for _ in range(20)] == [0, 1, 2] * 6 + [0, 1]


def test_steps_of_several_tasks_are_those_of_all_their_rows() -> None:
    settings = FinetuneSettings.model_validate({"model": "m", "task": "sst5,sts", "head": "cln", "train_size": 100})
    assert resolve(settings, [100, 90], "fp32").max_steps == 20 * (25 + 23)


@pytest.mark.parametrize(("rows", "chunks"), [(16, 4), (10, 4), (3, 4), (1, 8), (5, 1)])
def test_chunks_share_the_rows_out_evenly_and_every_one_has_some(rows: int, chunks: int) -> None:
    numbers = list(range(100, 100 + rows))
    found = chunks_of(numbers, chunks)
    assert [row for chunk, share in found for row in chunk if share] == numbers
    assert sum(share for _, share in found) == pytest.approx(1.0) and all(chunk for chunk, _ in found)
    assert max(len(chunk) for chunk, _ in found) - min(len(chunk) for chunk, _ in found) <= 1


def trained(folder: Path, glue: Path, **changes: object) -> tuple[FinetuneResult, TaskModel]:
    """Four steps on 12 rows, the last of them of an incomplete batch, without dropout."""
    data, checkpoint = read_task(TASKS["sst2"], str(glue)), find_checkpoint(str(folder))
    settings = TrainSettings.model_validate(
        {"max_steps": 4, "batch_size": 5, "eval_every": 2, "precision": "fp32", "learning_rate": 1e-2, **changes}
    )
    assert data.train
    torch.manual_seed(0)
    model = build(folder, "cls", "sst2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    train, dev = (
        Encoded(TASKS["sst2"], rows, load_tokenizer(checkpoint, 32), 32) for rows in (data.train[:12], data.dev)
    )
    part = TaskSplit(train, dev, lambda outputs: score_examples(TASKS["sst2"], data.dev, outputs))
    return fine_tune(model, [part], settings, 1, CPU, keep_weights=True), model


def hugging_face_outputs(folder: Path, glue: Path, **changes: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """`trained` once more, by the loop that everybody writes around Hugging Face's classifier."""
    settings = {"max_grad_norm": 0.5, "weight_decay": 1.0} | changes
    data, tokenizer = read_task(TASKS["sst2"], str(glue)), load_tokenizer(find_checkpoint(str(folder)), 32)
    assert data.train
    torch.manual_seed(0)
    start = build(folder, "cls", "sst2").classifiers[0].state_dict()
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, **off).train()
    model.classifier.load_state_dict(start)
    plain = [name for name, _ in model.named_parameters() if "bias" in name or "LayerNorm" in name]
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in model.named_parameters() if name not in plain]},
        {"params": [p for name, p in model.named_parameters() if name in plain], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=settings["weight_decay"])
    schedule = get_linear_schedule_with_warmup(optimizer, 0, 4)
    for rows in islice(row_batches(12, 5, 1), 4):
        batch = tokenizer([data.train[row].texts[0] for row in rows], padding=True, return_tensors="pt")
        model(**batch, labels=torch.tensor([int(data.train[row].label) for row in rows])).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    batch = tokenizer([row.texts[0] for row in data.dev], padding=True, return_tensors="pt")
    with torch.no_grad():
        return np.asarray(model.eval()(**batch).logits.numpy())


def test_cls_learns_what_a_plain_loop_around_hugging_face_s_classifier_learns(tiny_bert: Path, glue: Path) -> None:
    ours, _ = trained(
        tiny_bert, glue, warmup_ratio=0.0, learning_rate=1e-3, max_grad_norm=0.5, weight_decay=1.0, eval_every=4
    )
    np.testing.assert_allclose(ours.outputs[0], hugging_face_outputs(tiny_bert, glue), atol=1e-5)
    for other in ({"max_grad_norm": 1e9}, {"weight_decay": 0.0}):  # what this would not notice, it would not test
        assert np.abs(ours.outputs[0] - hugging_face_outputs(tiny_bert, glue, **other)).max() > 1e-4


def test_gradient_accumulation_changes_nothing(tiny_bert: Path, glue: Path) -> None:
    whole, _ = trained(tiny_bert, glue)
    for micro in (1, 2, 4):
        parts, _ = trained(tiny_bert, glue, micro_batch_size=micro)
        np.testing.assert_allclose(parts.outputs[0], whole.outputs[0], atol=2e-4)
        np.testing.assert_allclose([point[1] for point in parts.history], [point[1] for point in whole.history], 1e-4)


def test_kept_weights_are_those_of_the_best_evaluation(tiny_bert: Path, glue: Path) -> None:
    outcome, model = trained(tiny_bert, glue, max_steps=40, eval_every=2)
    assert outcome.weights and outcome.best_step < outcome.steps
    last = copy_weights(model)
    assert any(not torch.equal(last[name], weight) for name, weight in outcome.weights.items())
    load_weights(model, outcome.weights)
    data, tokenizer = read_task(TASKS["sst2"], str(glue)), load_tokenizer(find_checkpoint(str(tiny_bert)), 32)
    again = predict(model, Encoded(TASKS["sst2"], data.dev, tokenizer, 32), CPU, TrainSettings(precision="fp32"))
    np.testing.assert_array_equal(again, outcome.outputs[0])
