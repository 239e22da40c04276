"""The regression on frozen embeddings: it learns what they hold, for tasks of all shapes and few rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune.data.encoding import Encoded
from finetune.data.examples import LabeledExample
from finetune.data.tasks import Task, find_task
from finetune.heads.building import build_head
from finetune.heads.checkpoint import encode_rows, find_checkpoint, load_tokenizer
from finetune.heads.probe import fit_probe
from finetune.settings import FinetuneSettings
from multicls.errors import UserError

GOOD, BAD = ("nar", "pel"), ("ros", "tun")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class ManyLabels(Task):
    multi_label: bool = True


def text(label: int, number: int) -> str:
    return f"len {('bal', 'del', 'fil', 'gol')[number % 4]} los {(BAD, GOOD)[label][number % 2]}"


def fit(
    folder: Path, task: Task, train: list[LabeledExample], asked: list[LabeledExample], **settings: Any
) -> np.ndarray[Any, Any]:
    chosen = FinetuneSettings(model=str(folder), task=task.name, head="probe", max_length=32, **settings)
    checkpoint = find_checkpoint(str(folder))
    known, unknown = (encode_rows(checkpoint, task, rows, 32) for rows in (train, asked))
    return fit_probe(build_head(chosen, checkpoint, [task]), known, unknown, task, chosen, CPU)


def example(number: int, *texts: str, label: float, **values: Any) -> LabeledExample:
    return LabeledExample(id=str(number), texts=texts, label=label, part="", **values)


@pytest.mark.parametrize("pooling", ["cls", "mean", "multicls"])
def test_classes(tiny_multicls: Path, pooling: str) -> None:
    rows = [example(n, text(n % 2, n // 2), label=n % 2) for n in range(24)]
    outputs = fit(tiny_multicls, find_task("sst2"), rows, rows, pooling=pooling)
    assert outputs.shape == (24, 2) and outputs.dtype == np.float32
    assert np.allclose(np.exp(outputs).sum(axis=1), 1, atol=1e-5)
    assert (outputs.argmax(axis=1) == np.arange(24) % 2).mean() > 0.9
    assert np.array_equal(outputs, fit(tiny_multicls, find_task("sst2"), rows, rows, pooling=pooling)), "deterministic"


def test_several_labels_a_row(tiny_bert: Path) -> None:
    """One regression for each label; a row may have both or none."""
    rows = [example(n, f"len {('ros', 'nar')[n % 2]} {('tun', 'pel')[n // 2 % 2]}", label=0.0) for n in range(24)]
    checkpoint, task = find_checkpoint(str(tiny_bert)), ManyLabels("a", (("text",),), ("x", "y"), ("acc",), "single")
    encoded = Encoded(find_task("sst2"), rows, load_tokenizer(checkpoint, 32), 32)
    encoded.labels = torch.tensor([[n % 2, n // 2 % 2] for n in range(24)], dtype=torch.float32)
    settings = FinetuneSettings(model=str(tiny_bert), task="sst2", head="probe", pooling="mean")
    outputs = fit_probe(build_head(settings, checkpoint, [task]), encoded, encoded, task, settings, CPU)
    assert ((outputs > 0) == encoded.labels.numpy()).mean() > 0.95


def test_facets_that_are_not_there(tiny_bert: Path) -> None:
    rows = [example(n, text(n % 2, n), label=n % 2) for n in range(4)]
    with pytest.raises(UserError, match="--pooling multicls: .* plain bert checkpoint"):
        fit(tiny_bert, find_task("sst2"), rows, rows, pooling="multicls")


def test_few_rows_and_a_class_without_any(tiny_bert: Path) -> None:
    task = find_task("mnli")
    for labels in ([0, 0, 1], [0, 1], [2, 2]):
        rows = [example(n, text(label % 2, n), "len", label=label) for n, label in enumerate(labels)]
        outputs = fit(tiny_bert, task, rows, rows, pooling="mean")
        assert outputs.shape == (len(rows), 3) and np.isfinite(outputs).all()
        assert set(outputs.argmax(axis=1)) <= set(labels) and outputs[:, 1].max() <= 0
        unseen = sorted({0, 1, 2} - set(labels))
        assert (outputs[:, unseen] < -20).all()


def test_scores(tiny_bert: Path) -> None:
    rows = [example(n, "len los", text(n % 2, n // 2), label=5.0 * (n % 2)) for n in range(24)]
    outputs = fit(tiny_bert, find_task("stsb"), rows, rows, pooling="mean")
    assert outputs.shape == (24, 1) and np.corrcoef(outputs[:, 0], np.arange(24) % 2)[0, 1] > 0.9
    assert outputs.mean() == pytest.approx(0.5, abs=0.1), "on the scale of the encoded labels"


def test_choices(tiny_bert: Path) -> None:
    """The right one is the good one, wherever it stands."""
    right = [0, 1, 1, 0, 1] * 5
    rows = [example(n, "len los", choices=(text(1 - r, n), text(r, n)), label=r) for n, r in enumerate(right)]
    outputs = fit(tiny_bert, find_task("copa"), rows, rows, pooling="mean")
    assert outputs.shape == (25, 2) and (outputs.argmax(axis=1) == right).mean() > 0.9
    assert fit(tiny_bert, find_task("copa"), rows[:1], rows[:1], pooling="mean").argmax() == 0, "of a single row, too"


def test_spans(tiny_bert: Path) -> None:
    """Only the marked word tells: the texts of both classes hold the same words."""
    rows = []
    for n in range(24):
        first = "nar len ros" if n // 2 % 2 else "ros len nar"
        start = first.index("nar" if n % 2 else "ros")
        rows.append(example(n, first, "del bal", label=n % 2, spans=((0, start, start + 3), (1, 0, 3))))
    outputs = fit(tiny_bert, find_task("wic"), rows, rows, pooling="mean")
    assert (outputs.argmax(axis=1) == np.arange(24) % 2).mean() > 0.9
