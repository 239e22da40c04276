"""Parts of the loop that need no launch: schedule, shares of the ranks, parameter groups, totals, checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from multicls import MultiClsBertConfig, MultiClsBertForPreTraining
from multicls.files import read_jsonl
from pretrain.batches import Share
from pretrain.metrics import Log, Totals, duration, term_counts
from pretrain.settings import ObjectiveSettings, TrainSettings
from pretrain.training import dropout_seed, freeze_unused, lr_at, parameter_groups


def model() -> MultiClsBertForPreTraining:
    config = MultiClsBertConfig(
        vocab_size=50, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8, num_facets=2
    )
    return MultiClsBertForPreTraining(config)


def test_learning_rate_rises_then_falls_linearly() -> None:
    train = TrainSettings(steps=100, learning_rate=1.0, warmup_fraction=0.1)
    rates = [lr_at(step, train) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[10:] == pytest.approx([(100 - step) / 90 for step in range(10, 100)])
    assert lr_at(100, train) == 0
    assert lr_at(0, TrainSettings(steps=10, learning_rate=1.0, warmup_fraction=0)) == 1.0


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_ranks_share_out_a_step_without_gaps_or_overlap(world_size: int) -> None:
    shares = [list(Share(6, rank, world_size).numbers(range(4, 6))) for rank in range(world_size)]
    assert sorted(number for share in shares for number in share) == list(range(24, 36))
    assert {len(share) for share in shares} == {12 // world_size}


def test_dropout_belongs_to_the_micro_batch() -> None:
    seeds = {dropout_seed(seed, number) for seed in range(20) for number in range(500)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_no_decay_on_biases_and_layer_norms() -> None:
    network = model()
    named = {id(p): name for name, p in network.named_parameters()}
    decayed, plain = ([named[id(p)] for p in group["params"]] for group in parameter_groups(network, 0.02))
    assert {"bert.encoder.layer.0.facets.weight", "bert.facet_head.dense.weight"} <= set(decayed)
    assert {"bert.facet_head.LayerNorm.weight", "bert.facet_head.LayerNorm.bias", "cls.predictions.bias"} <= set(plain)
    assert all("LayerNorm" in name or name.endswith("bias") for name in plain)
    assert sorted(decayed + plain) == sorted(named.values())


def test_what_no_objective_reaches_is_frozen() -> None:
    network = model()
    freeze_unused(network, ObjectiveSettings(tfidf=0, so=0, mcqt=0))
    inputs = torch.randint(10, 50, (6, 12))
    losses = network(inputs, labels=inputs).losses
    losses["mlm"].backward()
    for name, parameter in network.named_parameters():
        if "key.bias" not in name:
            assert parameter.requires_grad == (parameter.grad is not None and bool(parameter.grad.any())), name


def test_totals_are_means_over_terms_not_over_batches() -> None:
    totals, more = Totals(), Totals()
    totals.add({"loss/mlm": (torch.tensor(10.0), torch.tensor(2))})
    more.add({"loss/mlm": (torch.tensor(2.0), torch.tensor(4)), "acc/so": (torch.tensor(0.0), torch.tensor(0))})
    totals.include(more)
    assert totals.means() == {"loss/mlm": 2.0}


def test_counts_leave_out_padding_and_facets() -> None:
    batch = {
        "input_ids": torch.zeros(2, 8),
        "attention_mask": torch.tensor([[1] * 8, [1] * 6 + [0] * 2]),
        "labels": torch.tensor([[-100] * 7 + [3], [-100] * 8]),
        "tfidf_labels": torch.zeros(2, 5),
        "so_labels": torch.tensor([1, -100]),
    }
    assert {name: int(count) for name, count in term_counts(batch).items()} == {"mlm": 1, "tfidf": 8, "so": 1}


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


def test_durations() -> None:
    assert [duration(s) for s in (4, 65, 11_520)] == ["4s", "1m05s", "3h12"]
