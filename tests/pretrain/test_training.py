"""Parts of the loop that need no launch: schedule, sampler, frozen and compiled parts."""

from __future__ import annotations

from functools import partialmethod

import pytest
import torch

from pretrain.engine import compile_layers
from pretrain.settings import ObjectiveSettings, TrainSettings
from pretrain.training import lr_at, weighted_sum
from tests.pretrain.tools import tiny_model


def test_the_warm_up_is_a_share_of_the_steps() -> None:
    rates = [
        lr_at(step, TrainSettings(steps=100, learning_rate=1.0, warmup_ratio=0.1))
        for step in (0, 9, 10, 100)
    ]
    assert rates == pytest.approx([1 / 11, 10 / 11, 1, 0])


def test_each_loss_counts_by_its_weight() -> None:
    objective = ObjectiveSettings(mlm=0.5, tfidf=0, so=2, mcqt=0)
    losses = {"mlm": torch.tensor(4.0), "so": torch.tensor(3.0)}
    assert weighted_sum(losses, objective.in_use) == 0.5 * 4 + 2 * 3


def test_compiled_layers_change_no_loss_and_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles with a backend that needs no C++ compiler."""
    compile_eagerly = partialmethod(torch.nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compile_eagerly)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, compiled = tiny_model().eval(), tiny_model().eval()
    compile_layers(compiled)
    inputs = torch.randint(10, 50, (6, 12), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(12) < torch.tensor([12, 9, 10, 12, 8, 11])[:, None]).long()
    ours, theirs = (
        one(inputs, attention_mask=mask, labels=inputs).loss for one in (compiled, plain)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    (ours + theirs).backward()
    for (name, one), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        if one.grad is not None and not name.endswith("key.bias"):
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["calls_captured"] > 0
