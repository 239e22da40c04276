"""The model: objectives against naive loops, facets, parameter counts, baselines as settings."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from multicls import (
    MultiClsBertConfig,
    MultiClsBertForPreTraining,
    MultiClsBertForSequenceClassification,
    MultiClsBertModel,
)
from multicls.modeling_multicls import mcqt_loss, mcqt_scores, part_scores

TINY = {
    "vocab_size": 97,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}


def tiny(**changes: object) -> MultiClsBertConfig:
    return MultiClsBertConfig(**(TINY | {"num_facets": 3} | changes))  # type: ignore[arg-type]


def batch(config: MultiClsBertConfig, examples: int = 4, length: int = 20) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = config.num_parts * examples
    ids = torch.randint(10, 97, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length - 5 :] = 0
    labels = torch.full_like(ids, -100)
    labels[:, 7:9] = ids[:, 7:9]
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "token_type_ids": torch.zeros_like(ids),
        "labels": labels,
        "tfidf_labels": torch.rand(rows, length - config.num_facets, generator=generator) * 10,
        "so_labels": torch.arange(rows) % 2,
    }


def naive_mcqt(queries: Tensor, targets: Tensor, others: Tensor | None, weight: float) -> Tensor:
    """Eq. 1 and 2, one pair of facets at a time."""
    candidates = list(targets) + ([] if others is None else list(others))
    total = torch.zeros((), dtype=torch.float64)
    for q, query in enumerate(queries):
        scores = []
        for candidate in candidates:
            pairs = [F.cosine_similarity(x, y, dim=0) for x, y in itertools.product(query, candidate)]
            sums = F.cosine_similarity(query.sum(0), candidate.sum(0), dim=0)
            scores.append(weight * torch.stack(pairs).max() + (1 - weight) * sums)
        total = total - scores[q] + torch.stack(scores).logsumexp(0)
    return total / len(queries)


@pytest.mark.parametrize("hard_negatives", [True, False])
@pytest.mark.parametrize(("facets", "weight"), [(1, 0.1), (3, 0.0), (3, 0.1), (3, 0.5), (3, 1.0)])
def test_mcqt_equals_a_naive_double_loop(hard_negatives: bool, facets: int, weight: float) -> None:
    torch.manual_seed(0)
    parts = 3 if hard_negatives else 2
    values = torch.randn(parts * 4, facets, 8)
    ours, theirs = values.clone().requires_grad_(), values.double().requires_grad_()
    loss = mcqt_loss(part_scores(ours, parts, weight))
    first, second, *third = theirs.chunk(parts)
    expected = naive_mcqt(first, second, third[0] if third else None, weight)
    if third:
        expected = expected + naive_mcqt(third[0], second, first, weight)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-6)


def test_mcqt_at_chance_and_with_one_facet() -> None:
    same = torch.ones(12, 3, 8)
    assert mcqt_loss(part_scores(same, 3, 0.1)).item() == pytest.approx(2 * math.log(8))
    torch.manual_seed(0)
    x, y = torch.randn(5, 1, 8), torch.randn(5, 1, 8)
    torch.testing.assert_close(mcqt_scores(x, y, 0.0), mcqt_scores(x, y, 1.0))  # lambda has no effect


def test_batch_that_is_not_part_major_is_refused() -> None:
    model = MultiClsBertForPreTraining(tiny())
    with pytest.raises(ValueError, match="3 parts"):
        model(torch.randint(10, 97, (4, 20)))


def test_losses_against_their_definitions() -> None:
    config = tiny()
    model = MultiClsBertForPreTraining(config).eval()
    inputs = batch(config)
    inputs["so_labels"][2] = -100
    out = model(**inputs)
    hidden = out.last_hidden_state
    logits = model.cls.predictions(hidden)  # at all positions; the model computes the masked ones only
    torch.testing.assert_close(out.losses["mlm"], F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten()))
    torch.testing.assert_close(out.losses["so"], F.cross_entropy(out.so_logits, inputs["so_labels"]))
    terms = [
        (out.tfidf[row, column] - inputs["tfidf_labels"][row, column]) ** 2
        for row in range(12)
        for column, position in enumerate([0, *range(4, 20)])
        if inputs["attention_mask"][row, position]
    ]
    torch.testing.assert_close(out.losses["tfidf"], torch.stack(terms).mean())
    torch.testing.assert_close(out.loss, sum(out.losses.values()))


def test_normalizers_replace_the_counts() -> None:
    config = tiny()
    model = MultiClsBertForPreTraining(config).eval()
    inputs = batch(config)
    own, shared = model(**inputs).losses, model(**inputs, normalizers={"mlm": 48.0, "so": 6.0}).losses
    torch.testing.assert_close(shared["mlm"], own["mlm"] * 24 / 48)
    torch.testing.assert_close(shared["so"], own["so"] * 12 / 6)
    torch.testing.assert_close(shared["tfidf"], own["tfidf"])


def test_padding_changes_no_loss() -> None:
    config = tiny()
    model = MultiClsBertForPreTraining(config).eval()
    inputs = batch(config)
    fill = {"labels": -100}
    longer = {
        name: F.pad(tensor, (0, 6), value=fill.get(name, 0)) if tensor.dim() == 2 else tensor
        for name, tensor in inputs.items()
    }
    short, long = model(**inputs).losses, model(**longer).losses
    for name in short:
        torch.testing.assert_close(short[name], long[name], rtol=1e-5, atol=1e-6)
    longer["attention_mask"][:, -6:] = 1  # the control
    assert (model(**longer).losses["mlm"] - short["mlm"]).abs() > 1e-5


def test_inserted_layers_touch_the_facets_only() -> None:
    config = tiny(facet_layers=[3])
    model = MultiClsBertModel(config).eval()
    plain = MultiClsBertModel(tiny(facet_layers=[])).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    ids = torch.randint(10, 97, (2, 12))
    ours, theirs = model(ids).last_hidden_state, plain(ids).last_hidden_state
    torch.testing.assert_close(ours[:, [0, *range(4, 12)]], theirs[:, [0, *range(4, 12)]])
    for k in range(3):
        weight = model.encoder.layer[2].facets.weight[k]
        torch.testing.assert_close(ours[:, 1 + k], theirs[:, 1 + k] @ weight.T, rtol=1e-4, atol=1e-6)


def test_every_weight_learns() -> None:
    """Inserted layers and the order transform too, which the authors' optimizer left out."""
    config = tiny()
    model = MultiClsBertForPreTraining(config)
    model(**batch(config)).loss.backward()
    without = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()}
    assert {name for name in without if "pooler" not in name and "key.bias" not in name} == set()


@pytest.mark.parametrize(
    "changes", [{"num_facets": 0, "hard_negatives": False}, {"num_facets": 1}, {"facet_layers": []}]
)
def test_baselines_are_the_same_code_with_other_settings(changes: dict[str, object]) -> None:
    config = tiny(**changes)
    out = MultiClsBertForPreTraining(config)(**batch(config))
    assert set(out.losses) == {"mlm", "tfidf", "so", "mcqt"}
    assert out.facet_embeddings.shape == (config.num_parts * 4, config.num_embeddings_per_sequence, 16)
    candidates = 8 if config.hard_negatives else 4
    assert [None if s is None else tuple(s.shape) for s in out.mcqt_scores] == [
        (4, candidates),
        (4, candidates) if config.hard_negatives else None,
    ]


def test_reparameterised_pooling() -> None:
    model = MultiClsBertForSequenceClassification(tiny()).eval()
    ids = torch.randint(10, 97, (2, 12))
    out = model(ids)
    hidden, weight = model.bert(ids).last_hidden_state, model.bert.facet_head.dense.weight
    centred = weight - weight.mean(0)
    expected = sum(hidden[:, 1 + k] @ centred[k].T for k in range(3))
    torch.testing.assert_close(out.pooled, expected, rtol=1e-4, atol=1e-5)
    assert not model.facet_bias.any()
    # facets with one and the same weight would be cancelled, not merged: the gradient keeps them apart
    model.bert.facet_head.dense.weight.data[:] = weight[0].clone()
    assert model(ids).pooled.abs().max() < 1e-5


@pytest.mark.parametrize(("facets", "pooling"), [(1, "multicls"), (0, "cls"), (3, "sum")])
def test_other_poolings(facets: int, pooling: str) -> None:
    model = MultiClsBertForSequenceClassification(tiny(num_facets=facets, classifier_pooling=pooling)).eval()
    ids = torch.randint(10, 97, (2, 12))
    encoded = model.bert(ids)
    if pooling == "cls":
        expected = encoded.pooler_output
    else:
        weight = model.bert.facet_head.dense.weight
        expected = sum(encoded.last_hidden_state[:, 1 + k] @ weight[k].T for k in range(facets))
    torch.testing.assert_close(model(ids).pooled, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "millions"),
    [
        ({}, 118.4),
        ({"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}, 350.9),
    ],
)
def test_parameter_counts_of_the_paper(shape: dict[str, int], millions: float) -> None:
    """The published counts include the authors' task-type table (17 x D), which is folded into the token types here."""
    config = MultiClsBertConfig(**shape)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = MultiClsBertForSequenceClassification(config)
    assert config.facet_layers == ([4, 8] if config.num_hidden_layers == 12 else [8, 16])
    count = sum(p.numel() for p in model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.06)
    assert round((count + 17 * config.hidden_size) / 1e6, 1) == millions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"facet_layers": [4]}, r"1\.\.3"),
        ({"facet_layers": [2, 1]}, "ascending"),
        ({"num_facets": 0, "facet_layers": [1]}, "no facets"),
        ({"num_facets": 39}, "num_facets"),
        ({"mcqt_lambda": 1.5}, "mcqt_lambda"),
        ({"classifier_pooling": "mean"}, "classifier_pooling"),
    ],
)
def test_settings_out_of_range(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**changes)
