"""Parts of the loop that need no launch: schedule, sampler, parameter groups, padded vocabulary, log."""

from __future__ import annotations

from functools import partialmethod
from pathlib import Path

import pytest
import torch

from multicls import MultiClsBertConfig, MultiClsBertForPreTraining
from multicls.files import read_jsonl
from pretrain.batches import RankSampler
from pretrain.engine import PADDING_BIAS, compile_layers, freeze_unused, pad_vocabulary
from pretrain.export import VOCABULARY_ROWS
from pretrain.log import Log
from pretrain.settings import ObjectiveSettings, TrainSettings
from pretrain.training import lr_at


def model() -> MultiClsBertForPreTraining:
    config = MultiClsBertConfig(
        vocab_size=50, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8, num_facets=2
    )
    return MultiClsBertForPreTraining(config)


def test_learning_rate_rises_then_falls_linearly() -> None:
    train = TrainSettings(steps=100, learning_rate=1.0, warmup_ratio=0.1)
    rates = [lr_at(step, train) for step in range(100)]
    assert rates[:11] == pytest.approx([n / 11 for n in range(1, 12)])
    assert rates[10:] == pytest.approx([(100 - step) / 90 for step in range(10, 100)])
    assert lr_at(100, train) == 0
    assert lr_at(0, TrainSettings(steps=10, learning_rate=1.0, warmup_ratio=0)) == 1.0


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_ranks_share_out_a_step_without_gaps_or_overlap(world_size: int) -> None:
    shares = [list(RankSampler(6, rank, world_size).numbers(range(4, 6))) for rank in range(world_size)]
    assert sorted(number for share in shares for number in share) == list(range(24, 36))
    assert {len(share) for share in shares} == {12 // world_size}


def test_what_no_objective_reaches_is_frozen() -> None:
    network = model()
    freeze_unused(network, ObjectiveSettings(tfidf=0, so=0, mcqt=0))
    inputs = torch.randint(10, 50, (6, 12))
    losses = network(inputs, labels=inputs).losses
    losses["mlm"].backward()
    for name, parameter in network.named_parameters():
        if "key.bias" not in name:
            assert parameter.requires_grad == (parameter.grad is not None and bool(parameter.grad.any())), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_vocabulary_changes_no_loss_and_no_gradient(dtype: torch.dtype) -> None:
    plain, padded = model().eval(), model().eval()
    padded.load_state_dict(plain.state_dict())
    pad_vocabulary(padded, multiple=64)
    assert padded.cls.predictions.decoder.weight is padded.bert.embeddings.word_embeddings.weight
    assert padded.cls.predictions.decoder.weight.shape == (64, 8) and padded.config.vocab_size == 50
    inputs = torch.randint(10, 50, (6, 12), generator=torch.Generator().manual_seed(0))
    losses = []
    for network in (plain, padded):
        network.to(dtype)
        loss = network(inputs, labels=inputs).losses["mlm"]
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in padded.named_parameters():
        if (grad := parameter.grad) is None:
            assert gradients[name] is None
            continue
        if name in VOCABULARY_ROWS:
            assert len(grad) == 64 and not grad[50:].any(), name
            grad = grad[:50]
        torch.testing.assert_close(grad, gradients[name], rtol=1e-5, atol=1e-6)
    weight = padded.cls.predictions.bias.detach()
    assert (weight[50:] == weight.new_tensor(PADDING_BIAS)).all()
    with torch.no_grad():  # control: rows that do take part
        padded.cls.predictions.bias[50:] = 0
    assert padded(inputs, labels=inputs).losses["mlm"].item() > losses[0] + 0.1


def test_compiled_layers_change_no_loss_and_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles with a backend that needs no C++ compiler."""
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, compiled = model().eval(), model().eval()
    compiled.load_state_dict(plain.state_dict())
    compile_layers(compiled)
    inputs = torch.randint(10, 50, (6, 12), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(12) < torch.tensor([12, 9, 10, 12, 8, 11])[:, None]).long()
    losses = [network(inputs, attention_mask=mask, labels=inputs).loss for network in (plain, compiled)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
    for loss in losses:
        loss.backward()
    for (name, theirs), ours in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        if theirs.grad is not None and not name.endswith("key.bias"):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["calls_captured"] > 0


def test_metrics_done_again_are_dropped_first(tmp_path: Path) -> None:
    def records() -> list[int]:
        return [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")]

    log = Log(tmp_path, writes=True, resumed_step=0)
    for step in (0, 2, 4):
        log.record(step, "train", {"loss/total": 1.0})
    log.close()
    Log(tmp_path, writes=False, resumed_step=0).record(9, "train", {})  # another rank
    assert records() == [0, 2, 4]
    Log(tmp_path, writes=True, resumed_step=2).close()
    assert records() == [0, 2]
    Log(tmp_path, writes=True, resumed_step=0).close()  # killed before its first checkpoint: from the beginning
    assert records() == []


def test_what_finds_the_disk_full_is_written_later(tmp_path: Path) -> None:
    log = Log(tmp_path, writes=True, resumed_step=0)
    log.say("one")
    for name in ("log.txt", "metrics.jsonl"):
        (tmp_path / name).rename(tmp_path / "kept")
        (tmp_path / name).symlink_to("/dev/full")
        log.say("two")
        log.record(3, "train", {"loss/total": 1.0})
        (tmp_path / "kept").replace(tmp_path / name)
    log.say("three")
    log.record(4, "train", {"loss/total": 2.0})
    log.close()
    said = [line.split()[-1] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert said == ["one", "two", "two", "three"]
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [3, 3, 4]
