"""HIRE against a loop over layers and examples, its ablations, and the published number of parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, RobertaConfig

from tests.finetune.models import SIZES, batch, make, parameters

SMALL: dict[str, Any] = SIZES | {"hidden_size": 8, "num_hidden_layers": 7, "initializer_range": 0.3}
INPUTS = batch((5, 9, 1))  # the second row is the longest, the last one has a single token


def hire(**options: Any) -> Any:
    model = make(BertConfig(**SMALL), "hire", head_options=options).double()
    if hasattr(model.head, "importance"):
        model.head.importance.weight.data.normal_()
    return model


def final_states(gru: torch.nn.GRU, states_LD: Tensor) -> Tensor:
    """Each layer's and each direction's last state over one sequence, (4 D,)."""
    return gru(states_LD)[1].flatten()


def naive(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and S, one example and one layer at a time, on unpadded sequences."""
    head, logits, weights = model.head, [], []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        layers = model.encoder(ids[mask.bool()][None], output_hidden_states=True).hidden_states
        scores = []
        for hidden in layers:
            scores.append(torch.relu(head.importance(final_states(head.reader, hidden[0]))))
        S = torch.softmax(torch.cat(scores), dim=0)
        A, R = sum(s * hidden[0] for s, hidden in zip(S, layers, strict=True)), layers[-1][0]
        M = torch.cat([R, A, R + A, R * A], dim=-1)
        F = head.fusion(M)[0]
        logits.append(model.classifiers[0](torch.tanh(head.dense(F[0]))))
        weights.append(S)
    return torch.stack(logits), torch.stack(weights)


def test_equals_a_loop_over_layers_and_examples() -> None:
    model = hire()
    output = model(**INPUTS)
    logits, weights = naive(model, INPUTS)
    torch.testing.assert_close(output.logits, logits, rtol=1e-9, atol=1e-9)
    states = model.encoder(**INPUTS, output_hidden_states=True).hidden_states
    lengths = INPUTS["attention_mask"].sum(dim=1)
    found = model.head.weigh(torch.stack(states), lengths).double()  # of a softmax in float32
    torch.testing.assert_close(found, weights, rtol=1e-5, atol=1e-6)
    assert weights.shape == (3, 8) and weights.std() > 0.01, "the layers do differ"
    gradients = []
    for values in (output.logits, logits):
        model.zero_grad()
        values.square().sum().backward(retain_graph=True)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("options", "width"),
    [
        ({"layers": "none"}, 16),
        ({"fusion": False}, 8),
        ({"fusion_layers": 0}, 32),
        ({"fusion_layers": 3}, 16),
        ({"layers": "none", "fusion": False}, 8),
    ],
)
def test_ablations(options: dict[str, Any], width: int) -> None:
    model = hire(**options)
    output, dense = model(**INPUTS), model.head.dense
    states = model.encoder(**INPUTS, output_hidden_states=True).hidden_states
    last = states[-1]
    assert dense.in_features == width
    if options == {"layers": "none"}:
        assert not hasattr(model.head, "reader")
        M = torch.cat([last, last, 2 * last, last * last], dim=-1)[1]  # the row without padding
        expected = torch.tanh(dense(model.head.fusion(M)[0][0]))
        torch.testing.assert_close(output.features[1], expected)
    if options == {"layers": "none", "fusion": False}:
        torch.testing.assert_close(output.features, torch.tanh(dense(last[:, 0])))


def test_dropout_is_in_the_grus_not_before_the_classifier() -> None:
    model = hire()
    assert model.head.reader.dropout == model.head.fusion.dropout == 0.1 and model.dropout.p == 0


def test_parameters_of_roberta_large() -> None:
    """437 M in the paper's Table 1, from 355 M."""
    large: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096}
    large |= {"num_hidden_layers": 24, "num_attention_heads": 16, "max_position_embeddings": 514}
    encoder = RobertaConfig(**large, vocab_size=50265, type_vocab_size=1)
    with torch.device("meta"):
        count = parameters(make(encoder, "hire"))
    assert count == pytest.approx(437e6, rel=0.01) and count == 438_252_547
