"""CLN: an exact start, tasks that do not touch each other, and what learns in each mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, ModernBertConfig, PretrainedConfig, RobertaConfig

from finetune.heads.cln import ConditionalLayerNorm
from finetune.heads.modeling_heads import TaskModel, TaskModelConfig
from multicls.configuration_multicls import MultiClsBertConfig

TASKS = [
    {"name": name, "labels": [], "num_labels": outputs, "num_choices": 0, "num_spans": 0, "is_regression": outputs == 1}
    for name, outputs in (("sentiment", 5), ("paraphrase", 2), ("similarity", 1))
]
SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 40, "initializer_range": 0.2,
}  # fmt: skip
ENCODERS = [BertConfig(**SIZES), RobertaConfig(**SIZES), MultiClsBertConfig(**SIZES, num_facets=2, facet_layers=[1])]
INPUTS = {"input_ids": torch.randint(5, 60, (4, 9), generator=torch.Generator().manual_seed(1))}


def make(encoder: PretrainedConfig, head: str = "cln", tasks: int = 3, **options: Any) -> Any:
    torch.manual_seed(0)
    return TaskModel(TaskModelConfig(encoder=encoder, head=head, head_options=options, tasks=TASKS[:tasks])).eval()


def training_step(model: Any, task: int, labels: Tensor, learning_rate: float = 0.1) -> None:
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    model(**INPUTS, labels=labels, task=task).loss.backward()
    optimizer.step()
    model.eval()


@pytest.mark.parametrize("encoder", ENCODERS, ids=lambda config: config.model_type)
def test_the_start_is_the_plain_model_bit_for_bit(encoder: PretrainedConfig) -> None:
    plain, conditional = make(encoder, head="cls"), make(encoder)
    weights = {key.replace("head.", "head.pooling."): value for key, value in plain.state_dict().items()}
    missing, unexpected = conditional.load_state_dict(weights, strict=False)
    norms = [module for module in plain.encoder.modules() if isinstance(module, nn.LayerNorm)]
    assert not unexpected and len(missing) == 2 * len(norms) == 10  # 1 of the embeddings, 2 a layer
    for name, parameter in conditional.named_parameters():
        parameter.grad = None
        if "task_" in name:
            assert parameter.shape == (3, 16) and not parameter.any()
    for task in range(3):
        assert torch.equal(conditional(**INPUTS, task=task).logits, plain(**INPUTS, task=task).logits)
    with torch.no_grad():
        conditional.encoder.embeddings.LayerNorm.task_bias[1] += 1
    assert not torch.equal(conditional(**INPUTS, task=1).logits, plain(**INPUTS, task=1).logits), "it is in use"
    assert torch.equal(conditional(**INPUTS, task=0).logits, plain(**INPUTS, task=0).logits)


@pytest.mark.parametrize("bias", [True, False])
def test_the_formula(bias: bool) -> None:
    norm = nn.LayerNorm(4, eps=1e-3, bias=bias)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    conditional = ConditionalLayerNorm(norm, 2)
    nn.init.normal_(conditional.task_weight), nn.init.normal_(conditional.task_bias)
    x = torch.randn(3, 4)
    conditional.task = 1
    scaled = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-3).sqrt()
    expected = scaled * (norm.weight + conditional.task_weight[1]) + conditional.task_bias[1]
    expected = expected + norm.bias if bias else expected
    torch.testing.assert_close(conditional(x), expected)


def test_an_encoder_whose_layer_norms_have_no_bias() -> None:
    """ModernBERT's: it starts as the plain model, saves no bias, and learns."""
    encoder = ModernBertConfig(**SIZES, pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2)
    plain = make(encoder, "mean", 1)
    conditional = TaskModel(TaskModelConfig(encoder=encoder, head="cln", pooling="mean", tasks=TASKS[:1])).eval()
    weights = {key.replace("head.", "head.pooling."): value for key, value in plain.state_dict().items()}
    missing, unexpected = conditional.load_state_dict(weights, strict=False)
    assert not unexpected and missing and all("task_" in key for key in missing)
    assert not any(key.endswith("norm.bias") for key in conditional.state_dict())
    assert torch.equal(conditional(**INPUTS).logits, plain(**INPUTS).logits)
    training_step(conditional, 0, torch.tensor([4, 1, 0, 2]), learning_rate=0.01)
    assert all(conditional.state_dict()[key].any() for key in missing)


def test_modes() -> None:
    """`last_linear` leaves what the checkpoint brought as it is, and learns all the same."""
    labels = torch.tensor([0, 1, 1, 0])
    for encoder in ENCODERS:
        for mode in ("full", "last_linear"):
            model = make(encoder, train=mode)
            before = {key: value.clone() for key, value in model.state_dict().items()}
            training_step(model, 1, labels)
            changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
            own = {key for key in changed if "task_" in key or key.startswith("classifiers.")}
            assert {"classifiers.1.weight", "encoder.embeddings.LayerNorm.task_weight"} <= own
            assert not any(key.startswith(("classifiers.0", "classifiers.2")) for key in changed)
            new_pooler = {"head.pooling.dense.weight", "head.pooling.dense.bias"}  # RoBERTa has no pretrained one
            learnt = changed - own
            if mode == "last_linear":
                assert learnt == (new_pooler if encoder.model_type == "roberta" else set())
            else:
                assert new_pooler < learnt and "encoder.embeddings.word_embeddings.weight" in learnt
            for key in (key for key in changed if "task_" in key):
                assert torch.equal(model.state_dict()[key][[0, 2]], before[key][[0, 2]]), "the other tasks' rows"


def test_a_single_task() -> None:
    model = make(ENCODERS[0], tasks=1)
    labels = torch.tensor([4, 1, 0, 2])
    before = model(**INPUTS, labels=labels).loss.item()
    training_step(model, 0, labels, learning_rate=0.01)
    assert model(**INPUTS, labels=labels).loss.item() < before
