"""Metrics against plain loops, what the log keeps and passes on, and parts of the loop that need no launch."""

import math
import os
from dataclasses import replace
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor

from multicls.modeling_multicls import (
    MultiClsForPreTraining,
    encoder_layers,
    mcqt_loss,
    part_scores,
)
from pretrain.batches import MicroBatch
from pretrain.engine import prepare_layers
from pretrain.graphs import pad_positions
from pretrain.metrics import MetricSums, collapses, loss_terms, means, measure
from pretrain.settings import TrainSettings
from pretrain.setup import describe_machine
from tests.pretrain.tools import micro_batch_of, random_inputs, tiny_model

EXAMPLES = 4
CPU = torch.device("cpu")


def model(facets: int, hard_negatives: bool = True) -> MultiClsForPreTraining:
    return tiny_model(facets, hard_negatives).eval()


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)


def shares_of(batch: MicroBatch) -> dict[str, Tensor]:
    """Returns the normalizers of a step of one micro-batch: its numbers of terms."""
    return {name: torch.tensor(float(batch.counts[name])) for name in ("mlm", "tfidf", "so")}


def terms_of(network: Any, batch: MicroBatch, normalizers: dict[str, Tensor]) -> Any:
    outputs = network(**batch.inputs, normalizers=normalizers)
    terms = loss_terms(outputs.losses, normalizers)
    return terms | measure(outputs, batch.inputs, normalizers, batch.counts["examples"])


def metrics_of(network: MultiClsForPreTraining, *inputs: dict[str, Tensor]) -> dict[str, float]:
    """Returns the metrics of some steps, of a micro-batch each, as training gathers them."""
    sums = MetricSums()
    for tensors in inputs:
        batch = micro_batch_of(tensors, network.config.num_parts)
        sums.add(terms_of(network, batch, shares_of(batch)), batch.counts)
    return means(sums.totals(CPU))


def plain_loop(network: Any, batches: list[dict[str, Tensor]]) -> dict[str, float]:
    """Computes the metrics one sequence, token and pair after the other."""
    facets, parts = network.config.num_facets, network.config.num_parts
    seen: dict[str, list[float]] = {}
    targets, predictions = [], []
    squares, freedom = [0.0] * max(facets, 1), 0
    for batch in batches:
        outputs = network(**batch)
        logits = iter(outputs.logits)
        embeddings = outputs.facet_embeddings.double()
        for row in range(len(batch["input_ids"])):
            length = int(batch["attention_mask"][row].sum())
            for place, label in enumerate(batch["labels"][row].tolist()):
                if label != -100:
                    seen.setdefault("acc/mlm", []).append(int(next(logits).argmax()) == label)
                if place < length and not 1 <= place <= facets:
                    text = place if place == 0 else place - facets
                    targets.append(float(batch["tfidf_labels"][row, text]))
                    predictions.append(float(outputs.tfidf[row, text]))
            if (order := int(batch["so_labels"][row])) != -100:
                seen.setdefault("acc/so", []).append(int(outputs.so_logits[row].argmax()) == order)
            for i in range(facets if facets > 1 else 0):
                for j in set(range(facets)) - {i}:
                    cosine = torch.cosine_similarity(embeddings[row, i], embeddings[row, j], dim=0)
                    seen.setdefault("facets/mean_cosine", []).append(float(cosine))
        for k in range(max(facets, 1)):
            unit = torch.stack([row[k] / row[k].norm() for row in embeddings])
            squares[k] += float(unit.var(dim=0).sum()) * (len(unit) - 1)
        freedom += len(embeddings) - 1
        for scores in outputs.mcqt_scores[: parts - 1]:
            for query in range(EXAMPLES):
                seen.setdefault("acc/mcqt", []).append(int(scores[query].argmax()) == query)
    expected = {name: sum(values) / len(values) for name, values in seen.items()}
    expected |= {f"facets/variance_{k + 1}": total / freedom for k, total in enumerate(squares)}
    mean = sum(targets) / len(targets)
    residual = sum((y - p) ** 2 for y, p in zip(targets, predictions, strict=True))
    expected["loss/tfidf"] = residual / len(targets)
    expected["r2/tfidf"] = 1 - residual / sum((y - mean) ** 2 for y in targets)
    return expected


@pytest.mark.parametrize(("facets", "parts"), [(3, 3), (2, 2), (1, 3), (0, 2)])
def test_metrics_equal_a_plain_loop(facets: int, parts: int) -> None:
    network = model(facets, hard_negatives=parts == 3)
    batches = [random_inputs(seed, parts * EXAMPLES, facets) for seed in range(3)]
    with torch.no_grad():
        found, expected = metrics_of(network, *batches), plain_loop(network, batches)
    assert found.keys() == expected.keys() | {"loss/mlm", "loss/so", "loss/mcqt"}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_micro_batches_that_are_not_counted_add_nothing() -> None:
    network, batch = model(3), micro_batch_of(random_inputs(0, 3 * EXAMPLES, 3), 3)
    plain, padded = MetricSums(), MetricSums()
    terms = terms_of(network, batch, shares_of(batch))
    plain.add(terms, batch.counts)
    padded.add(terms, batch.counts)
    broken = {name: (value * math.nan, count) for name, (value, count) in terms.items()}
    padded.add(broken, batch.counts, counted=False)
    assert padded.totals(CPU) == plain.totals(CPU)


def test_groups_are_each_others_negatives_and_no_more() -> None:
    network, group = model(3), 2
    inputs = random_inputs(0, 3 * EXAMPLES, 3)
    batch, outputs = micro_batch_of(inputs, 3), network(**inputs, group_size=group)
    right, count = measure(outputs, batch.inputs, shares_of(batch), group)["acc/mcqt"]
    parts = [part.split(group) for part in outputs.facet_embeddings.chunk(3)]
    scores = [part_scores(torch.cat(found), 3, 0.1) for found in zip(*parts, strict=True)]
    losses = torch.stack([mcqt_loss(one) for one in scores])
    torch.testing.assert_close(outputs.losses["mcqt"], losses.mean())
    directions = [found for one in scores for found in one if found is not None]
    hits = sum(int((found.argmax(1) == torch.arange(group)).sum()) for found in directions)
    assert (int(right), count) == (hits, 8)
    one_group_of_four = network(**inputs).losses["mcqt"]  # control
    assert abs(outputs.losses["mcqt"] - one_group_of_four) > 1e-3


def test_collapsed_facets_are_warned_of() -> None:
    """A facet head of zeros gives every sequence and facet the same embedding, its bias: nothing varies."""
    network, inputs = model(3), random_inputs(0, 3 * EXAMPLES, 3)
    assert collapses(metrics_of(network, inputs)) == []
    torch.nn.init.zeros_(network.multicls.facet_head.dense.weight)
    torch.nn.init.ones_(network.multicls.facet_head.LayerNorm.bias)
    collapsed = metrics_of(network, inputs)
    assert collapsed["facets/mean_cosine"] == pytest.approx(1)
    assert collapsed["facets/variance_1"] == pytest.approx(0)
    assert len(collapses(collapsed)) == 4  # one for the cosine, one for each facet


def test_targets_that_are_all_the_same_have_no_r2() -> None:
    inputs = random_inputs(0, 3 * EXAMPLES, 2)
    inputs["tfidf_labels"] = torch.full_like(inputs["tfidf_labels"], 3.3)
    assert "r2/tfidf" not in metrics_of(model(2), inputs)


@pytest.mark.parametrize(("encoder", "compiles"), [("bert", False), ("modernbert", True)])
def test_auto_compiles_what_gains_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, encoder: str, compiles: bool
) -> None:
    called = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: called.append(1))
    monkeypatch.setattr("pretrain.engine.uses_cuda", lambda: True)
    monkeypatch.setattr("pretrain.engine.keep_mask_on_device", lambda: None)
    auto = TrainSettings(steps=1)
    prepare_layers(tiny_model(encoder=encoder), auto, "fp32")
    assert not called
    train, notes = prepare_layers(tiny_model(encoder=encoder), auto, "bf16")
    assert bool(called) == bool(notes) == compiles == train.compile


def test_compiled_layers_give_the_same_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that torch's compiler traces give the same losses; its kernels, which take a minute, are left out."""
    compile_layer = torch.nn.Module.compile
    traced = partialmethod(compile_layer, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    plain, compiled = model(2), model(2)
    prepare_layers(compiled, TrainSettings(steps=1, compile=True), "fp32")
    layers = encoder_layers(compiled.multicls.encoder)
    assert layers and all(layer._compiled_call_impl is not None for layer in layers)
    inputs = random_inputs(0, 3 * EXAMPLES, 2)
    expected = plain(**inputs).losses
    assert len(expected) == 4
    torch.testing.assert_close(compiled(**inputs).losses, expected)


def test_padded_positions_change_no_metric() -> None:
    """They point to [CLS], which has no label."""
    network, batch = model(2), micro_batch_of(random_inputs(0, 3 * EXAMPLES, 2), 3)
    padded = replace(batch, inputs=pad_positions(batch.inputs, 64))
    assert len(padded.inputs["masked_positions"]) == 64 > batch.counts["mlm"]
    found, expected = (
        {name: float(value) for name, (value, _) in terms_of(network, one, shares_of(one)).items()}
        for one in (padded, batch)
    )
    assert {"loss/mlm", "acc/mlm"} <= found.keys() and found == pytest.approx(expected, rel=1e-5)


def test_a_busy_machine_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    for load, warned in ((0.0, False), (99.0, True)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert ("OMP_NUM_THREADS=1" in describe_machine()[-1]) == warned
