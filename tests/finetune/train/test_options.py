"""Options of the loop: class weights, several labels, less memory, TensorBoard, and reading everything once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModel, AutoTokenizer

from finetune.data.encoding import Encoded
from finetune.data.examples import LabeledExample
from finetune.data.metrics import score_examples
from finetune.data.tasks import TASKS, Task
from finetune.heads import checkpoint as checkpoints
from finetune.heads.building import build_head
from finetune.heads.checkpoint import encode_rows, find_checkpoint, load_tokenizer
from finetune.heads.modeling_heads import TaskModel
from finetune.settings import FinetuneSettings, TrainSettings
from finetune.train.loop import FinetuneResult, TaskSplit, class_weights, fine_tune, predict
from multicls.errors import UserError

CPU = torch.device("cpu")
TRAIN = {"max_steps": 4, "batch_size": 5, "eval_every": 2, "precision": "fp32", "learning_rate": 5e-3}
WORDS = (("ros", "tun"), ("nar", "pel"))


def examples(count: int, positive_every: int = 2) -> list[LabeledExample]:
    """Rows of which one in `positive_every` is of class 1."""
    labels = [int(n % positive_every == 0) for n in range(count)]
    return [LabeledExample(str(n), (f"len {WORDS[label][n // 2 % 2]}",), label) for n, label in enumerate(labels)]


def trained(
    folder: Path, rows: list[LabeledExample], task: str = "sst2", head: str = "cls", board: Path | None = None,
    dropout: bool = False, **changes: Any
) -> tuple[FinetuneResult, TaskModel]:  # fmt: skip
    settings, checkpoint = FinetuneSettings(model=str(folder), task=task, head=head), find_checkpoint(str(folder))
    torch.manual_seed(0)
    model = build_head(settings, checkpoint, [TASKS[task]])
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and not dropout:
            module.p = 0.0
    encoded = encode_rows(checkpoint, TASKS[task], rows, 16)
    part = TaskSplit(encoded, encoded, lambda outputs: score_examples(TASKS[task], rows, outputs), "dev/x")
    train = TrainSettings.model_validate(TRAIN | changes)
    return fine_tune(model, [part], train, 1, CPU, keep_weights=True, tensorboard=board), model


def assert_close(one: FinetuneResult, two: FinetuneResult, atol: float) -> None:
    np.testing.assert_allclose(one.outputs[0], two.outputs[0], atol=atol)
    np.testing.assert_allclose([point[1] for point in one.history], [point[1] for point in two.history], atol=atol)


def test_balanced_weights_give_each_class_the_same_total() -> None:
    rows = Encoded.__new__(Encoded)
    rows.labels, rows.lengths = torch.tensor([0] * 6 + [1] * 3 + [3]), [1] * 10
    task = {"name": "a", "num_labels": 4, "num_choices": 0, "is_regression": False}
    weights = class_weights(task, rows, TrainSettings(class_weights="balanced"), CPU)
    assert weights is not None and weights[[0, 1, 3]].tolist() == pytest.approx([10 / 18, 10 / 9, 10 / 3])
    assert float(weights[rows.labels].mean()) == pytest.approx(1), "the learning rate means what it did"
    assert class_weights(task, rows, TrainSettings(), CPU) is None
    for kind in ({"is_regression": True}, {"num_choices": 2}, {"multi_label": True}):
        with pytest.raises(UserError, match="--class_weights balanced: task a"):
            class_weights(task | kind, rows, TrainSettings(class_weights="balanced"), CPU)


def test_class_weights_help_the_rare_class_whatever_the_micro_batches(tiny_bert: Path) -> None:
    rows = examples(24, positive_every=6)
    plain, _ = trained(tiny_bert, rows, max_steps=12)
    whole, _ = trained(tiny_bert, rows, max_steps=12, class_weights="balanced")
    margins = [float((result.outputs[0][:, 1] - result.outputs[0][:, 0]).mean()) for result in (plain, whole)]
    assert margins[1] > margins[0] + 0.1
    for micro in (1, 2, 4):
        parts, _ = trained(tiny_bert, rows, max_steps=12, class_weights="balanced", micro_batch_size=micro)
        assert_close(parts, whole, 5e-4)


@pytest.mark.parametrize("head", ["cls", "multicls", "hire", "cln", "isobn"])
def test_gradient_checkpointing_changes_no_number(
    head: str, tiny_multicls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, calls = examples(12), 0
    original = torch.utils.checkpoint.checkpoint

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    kept, _ = trained(tiny_multicls, rows, head=head, dropout=True)
    monkeypatch.setattr("transformers.modeling_utils.checkpoint", counted)
    monkeypatch.setattr("torch.utils.checkpoint.checkpoint", counted)
    again, _ = trained(tiny_multicls, rows, head=head, dropout=True, gradient_checkpointing=True)
    assert_close(again, kept, 1e-6)
    assert calls >= 4 * 3, "each of the three layers in each of the four steps"


def test_evaluation_batches_change_no_output(tiny_bert: Path) -> None:
    seen: list[int] = []
    rows = examples(10)
    _, model = trained(tiny_bert, rows)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    encoded = encode_rows(find_checkpoint(str(tiny_bert)), TASKS["sst2"], rows, 16)
    few, many = (predict(model, encoded, CPU, TrainSettings(precision="fp32", eval_batch_size=n)) for n in (3, 64))
    np.testing.assert_allclose(few, many, atol=1e-6)
    assert seen == [3, 3, 3, 1, 10]


def test_curves_for_tensorboard(tiny_bert: Path, tmp_path: Path) -> None:
    result, _ = trained(tiny_bert, examples(12), board=tmp_path)
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    assert set(board.Tags()["scalars"]) == {"loss/train", "optim/lr", "dev/x/acc"}
    for name, column in (("loss/train", 1), ("dev/x/acc", 2)):
        expected = [(step, value[0] if isinstance(value, list) else value)
                    for step, value in ((point[0], point[column]) for point in result.history)]  # fmt: skip
        assert [(event.step, pytest.approx(event.value, abs=1e-5)) for event in board.Scalars(name)] == expected


@dataclass(frozen=True)
class ManyLabels(Task):
    multi_label: bool = True


def test_several_labels_a_row(tiny_bert: Path) -> None:
    """Label 0 is told by one word and label 1 by another; a row may have both or none."""
    task = ManyLabels("own_topics", (("text",),), ("a", "b"), ("acc",), "single", "own")
    rows = [LabeledExample(str(n), (f"len {('ros', 'nar')[n % 2]} {('tun', 'pel')[n // 2 % 2]}",), 0.0)
            for n in range(16)]  # fmt: skip
    labels = torch.tensor([[n % 2, n // 2 % 2] for n in range(16)], dtype=torch.float32)
    encoded = Encoded(TASKS["sst2"], rows, load_tokenizer(find_checkpoint(str(tiny_bert)), 16), 16)
    encoded.labels = labels
    settings = FinetuneSettings(model=str(tiny_bert), task="sst2", head="mean")

    def score(outputs: Any) -> dict[str, float]:
        return {"acc": float(((outputs > 0) == labels.numpy()).mean())}

    found = []
    for micro in (None, 3):
        torch.manual_seed(0)
        model = build_head(settings, find_checkpoint(str(tiny_bert)), [task])
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        train = TrainSettings.model_validate(TRAIN | {"max_steps": 40, "micro_batch_size": micro})
        found.append(fine_tune(model, [TaskSplit(encoded, encoded, score)], train, 1, CPU))
    assert found[0].scores == [{"acc": 1.0}] and found[0].outputs[0].shape == (16, 2)
    np.testing.assert_allclose(found[0].history[0][1], found[1].history[0][1], rtol=1e-4)
    assert model.config.problem_type == "multi_label_classification"


def test_runs_of_one_model_read_weights_tokenizer_and_rows_once(
    tiny_bert: Path, tiny_multicls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    def counted(kind: Any, name: str) -> None:
        original = kind.from_pretrained

        def read(*args: Any, **kwargs: Any) -> Any:
            reads.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(kind, "from_pretrained", read)

    caches = (checkpoints._read_encoder, checkpoints._read_tokenizer, checkpoints._encode_rows)
    for cache in caches:
        cache.cache_clear()
    first, model = trained(tiny_bert, examples(12))
    for cache in caches:
        cache.cache_clear()
    counted(AutoModel, "weights")
    counted(AutoTokenizer, "tokenizer")
    for folder in (tiny_bert, tiny_multicls, tiny_bert, tiny_multicls):
        again, other = trained(folder, examples(12))
    assert sorted(reads) == ["tokenizer", "tokenizer", "weights", "weights"]
    again, other = trained(tiny_bert, examples(12))
    np.testing.assert_array_equal(again.outputs[0], first.outputs[0])
    assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in model.state_dict().items())
    found, rows, task = find_checkpoint(str(tiny_bert)), examples(12), TASKS["sst2"]
    assert encode_rows(found, task, rows, 16) is encode_rows(found, task, examples(12), 16)
    for changed in ((replace(task, about="x"), rows, 16), (task, rows[1:], 16), (task, rows, 12)):
        assert encode_rows(found, *changed) is not encode_rows(found, task, rows, 16)
    for size in range(1, 12):
        encode_rows(found, task, rows[:size], 16)
    assert checkpoints._encode_rows.cache_info().currsize == 8, "not every size is kept"


def test_a_missing_pooler_is_drawn_by_each_run_s_seed(tiny_bert: Path, tmp_path: Path) -> None:
    """The pooler depends on the run's own seed alone, though runs share the weights that were read."""
    from safetensors.torch import load_file, save_file

    weights = load_file(tiny_bert / "model.safetensors")
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((tiny_bert / file).read_bytes())
    kept = {name: weight for name, weight in weights.items() if "pooler" not in name}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    found = find_checkpoint(str(tmp_path))
    states = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        states.append(checkpoints.load_encoder(found).state_dict() | {"next": torch.rand(3)})
    assert all(torch.equal(states[0][name], weight) for name, weight in states[2].items())
    differ = {name for name, weight in states[1].items() if not torch.equal(weight, states[0][name])}
    assert differ == {"pooler.dense.weight", "next"}
    assert states[0]["pooler.dense.weight"].std() == pytest.approx(0.02, rel=0.1)
