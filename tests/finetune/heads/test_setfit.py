"""SetFit by its own package; the tests that run it need `multicls[setfit]`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from finetune.data.examples import LabeledExample
from finetune.data.tasks import find_task
from finetune.heads.building import check_head
from finetune.heads.checkpoint import find_checkpoint
from finetune.heads.setfit import fit_setfit
from finetune.settings import FinetuneSettings
from multicls.errors import UserError

CPU = torch.device("cpu")
GOOD, BAD = ("nar", "pel"), ("ros", "tun")
needs_setfit = pytest.mark.skipif(not importlib.util.find_spec("setfit"), reason="needs multicls[setfit]")


def example(number: int, label: float, *more: str) -> LabeledExample:
    noun = ("bal", "del", "fil", "gol")[number % 4]
    word = (BAD, GOOD)[int(label)][number // 2 % 2]
    return LabeledExample(id=str(number), texts=(f"len {noun} los {word}", *more), label=label)


def settings_of(folder: Path, task: str) -> FinetuneSettings:
    return FinetuneSettings(model=str(folder), task=task, head="setfit", max_length=16)


@needs_setfit
@pytest.mark.parametrize(("task", "more"), [("sst2", ()), ("rte", ("the del los",))])
def test_setfit_learns_classes_and_a_seed_gives_its_numbers(
    tiny_multicls: Path, task: str, more: tuple[str, ...]
) -> None:
    rows = [example(number, number % 2, *more) for number in range(12)]
    checkpoint, settings = find_checkpoint(str(tiny_multicls)), settings_of(tiny_multicls, task)
    first, again = (fit_setfit(checkpoint, rows, rows, find_task(task), settings, CPU) for _ in range(2))
    assert first.shape == (12, 2) and first.dtype == np.float32
    assert (first.argmax(axis=1) == np.arange(12) % 2).all()
    np.testing.assert_allclose(np.exp(first).sum(axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(first, again)


def test_what_setfit_cannot_do(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, checkpoint = [example(0, 0), example(1, 0)], find_checkpoint(str(tiny_bert))
    for task in ("stsb", "copa", "wic"):
        with pytest.raises(UserError, match="another kind"):
            fit_setfit(checkpoint, rows, rows, find_task(task), settings_of(tiny_bert, task), CPU)
    only = fit_setfit(checkpoint, rows, rows, find_task("sst2"), settings_of(tiny_bert, "sst2"), CPU)
    assert only.argmax(axis=1).tolist() == [0, 0], "a single class needs no model"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"setfit is not installed: pip install 'multicls\[setfit\]'"):
        check_head(settings_of(tiny_bert, "sst2"), checkpoint)
