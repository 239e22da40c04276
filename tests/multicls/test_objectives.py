"""Every objective against definitions written out position by position, in float64: values and gradients."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from multicls.modeling_multicls import MultiClsForPreTraining, mcqt_loss, mcqt_scores, part_scores
from tests.multicls.test_model import batch
from tests.pretrain.tools import tiny


def naive_score(x: Tensor, y: Tensor, weight: float) -> Tensor:
    """Eq. 2 for two sequences, one pair of facets at a time."""
    pairs = [a @ b / (a.norm() * b.norm()) for a, b in itertools.product(x, y)]
    x_sum, y_sum = x.sum(dim=0), y.sum(dim=0)
    return weight * torch.stack(pairs).max() + (1 - weight) * (x_sum @ y_sum) / (
        x_sum.norm() * y_sum.norm()
    )


def naive_mcqt(parts: list[Tensor], weight: float) -> Tensor:
    """Section 2.4: A looks for its B among all B and C; C, where there is one, among all B and A."""
    first, second, *third = parts
    directions = [(first, [*second, *(third[0] if third else [])])]
    directions += [(third[0], [*second, *first])] if third else []
    losses = []
    for queries, candidates in directions:
        for q, query in enumerate(queries):
            scores = torch.stack([naive_score(query, other, weight) for other in candidates])
            losses.append((scores.exp().sum().log() - scores[q]) / len(queries))
    return torch.stack(losses).sum()


def test_mcqt_at_chance_and_with_one_facet() -> None:
    same = torch.ones(12, 3, 8)
    assert mcqt_loss(part_scores(same, 3, 0.1)).item() == pytest.approx(2 * math.log(8))
    x, y = torch.randn(5, 1, 8), torch.randn(6, 1, 8)
    torch.testing.assert_close(mcqt_scores(x, y, 0.0), mcqt_scores(x, y, 1.0))  # whatever lambda


def linear(module: Any, x: Tensor) -> Tensor:
    return F.linear(x, module.weight, module.bias)


def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape, weight, bias, eps=1e-12)


def transformed(head: Any, x: Tensor) -> Tensor:
    return normed(F.gelu(linear(head.dense, x)), head.LayerNorm.weight, head.LayerNorm.bias)


def naive_losses(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The four objectives from the encoder's last hidden states on, one position at a time."""
    hidden = model.multicls(inputs["input_ids"], inputs["attention_mask"])[0]
    config, mlm = model.config, model.mlm.lm.cls.predictions
    rows, length = inputs["input_ids"].shape
    embeddings = model.get_input_embeddings().weight
    terms: dict[str, list[Tensor]] = {"mlm": [], "tfidf": [], "so": []}
    facets = []
    for row in range(rows):
        for position in range(length):
            label = inputs["labels"][row, position]
            if label != -100:
                state = transformed(mlm.transform, hidden[row, position])
                terms["mlm"].append(F.cross_entropy(embeddings @ state + mlm.bias, label))
        for column, position in enumerate([0, *range(1 + config.num_facets, length)]):
            if inputs["attention_mask"][row, position]:
                guess = linear(model.tfidf.decoder, transformed(model.tfidf, hidden[row, position]))
                terms["tfidf"].append((guess[0] - inputs["tfidf_labels"][row, column]) ** 2)
        states = [hidden[row, k] for k in range(1, 1 + config.num_facets)] or [hidden[row, 0]]
        if int(inputs["so_labels"][row]) != -100:
            transformed_states = linear(model.order.transform, torch.cat(states))
            logits = linear(model.order.classifier, transformed_states)
            terms["so"].append(F.cross_entropy(logits, inputs["so_labels"][row]))
        head = model.multicls.facet_head
        maps = head.dense.weight.unflatten(0, (len(states), -1))
        embedded = [
            normed(F.gelu(maps[k] @ state), head.LayerNorm.weight[k], head.LayerNorm.bias[k])
            for k, state in enumerate(states)
        ]
        facets.append(torch.stack(embedded))
    losses = {name: torch.stack(values).mean() for name, values in terms.items()}
    parts = list(torch.stack(facets).chunk(config.num_parts))
    return losses | {"mcqt": naive_mcqt(parts, config.mcqt_lambda)}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_facets": 0, "hard_negatives": False},  # MTL: the quick thoughts of one embedding
        {"num_facets": 1, "mcqt_lambda": 0.5},
        {"num_facets": 2, "mcqt_lambda": 1.0, "hard_negatives": False},
        {"num_facets": 5, "mcqt_lambda": 0.1},
        {"num_facets": 5, "mcqt_lambda": 0.0, "facet_layers": []},
    ],
    ids=lambda changes: "-".join(f"{name}={value}" for name, value in changes.items()),
)
def test_losses_and_gradients_of_the_model(changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = tiny(**changes)
    model: Any = MultiClsForPreTraining(config).double().eval()
    for parameter in model.parameters():  # biases and LayerNorms away from 0 and 1
        parameter.data += 0.1 * torch.randn_like(parameter)
    inputs = batch(config, examples=3, length=14)
    inputs["tfidf_labels"] = inputs["tfidf_labels"].double()
    inputs["so_labels"][2] = -100
    parameters = dict(model.named_parameters())
    ours, theirs = model(**inputs).losses, naive_losses(model, inputs)
    assert ours.keys() == theirs.keys()
    for name, loss in ours.items():
        torch.testing.assert_close(loss, theirs[name], rtol=1e-10, atol=1e-12)
        options: Any = {"allow_unused": True, "retain_graph": True}
        weights = list(parameters.values())
        gradients = torch.autograd.grad(loss, weights, **options)
        expected = torch.autograd.grad(theirs[name], weights, **options)
        assert sum(gradient is not None for gradient in gradients) > 40
        for key, one, other in zip(parameters, gradients, expected, strict=True):
            assert (one is None) == (other is None), key
            if one is not None:
                message = f"gradient of {name} by {key}"
                torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-11, msg=message)


def test_the_scale_of_mcqt_multiplies_its_scores() -> None:
    scores = torch.randn(4, 8), torch.randn(4, 8)
    scaled = mcqt_loss((5 * scores[0], 5 * scores[1]))
    assert torch.equal(mcqt_loss(scores, scale=5.0), scaled) and scaled != mcqt_loss(scores)
    assert mcqt_loss((scores[0], None), scale=1e-6) == pytest.approx(math.log(8), abs=1e-4)
