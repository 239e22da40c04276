"""CLN: an exact start, tasks that do not touch each other, and what learns in each mode."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import EuroBertConfig, ModernBertConfig

from finetune.heads.cln import ConditionalLayerNorm
from finetune.heads.modeling_task import IncompatibleHead
from tests.finetune.models import SIZES, about, batch, make

TASKS = [about("abcde"), about("ab"), about("")]
INPUTS = batch()


def cln(encoder: Any, tasks: int = 3, pooling: str = "cls", **options: str) -> Any:
    return make(encoder, "cln", *TASKS[:tasks], pooling=pooling, head_options=options)


def take_weights(conditional: Any, plain: Any) -> list[str]:
    """Gives a model the weights of one without CLN; returns the names of the weights it has besides."""
    weights = {key.replace("head.", "head.pooling."): v for key, v in plain.state_dict().items()}
    missing, unexpected = conditional.load_state_dict(weights, strict=False)
    assert not unexpected and missing and all("task_" in key for key in missing)
    return list(missing)


def training_step(model: Any, task: int, labels: list[float], learning_rate: float = 0.1) -> None:
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=learning_rate)
    model.train()(**INPUTS, labels=torch.tensor(labels), task=task).loss.backward()
    optimizer.step()
    model.eval()


def logits(model: Any, task: int = 0) -> Tensor:
    return model(**INPUTS, task=task).logits


@pytest.mark.parametrize("encoder", ["bert", "roberta", "multicls"])
def test_the_start_is_the_plain_model_bit_for_bit(encoder: str) -> None:
    plain, conditional = make(encoder, "cls", *TASKS), cln(encoder)
    new = take_weights(conditional, plain)
    assert len(new) == 10  # LayerNorms: 1 of the embeddings, 2 a layer; two vectors each
    assert all(conditional.get_parameter(key).shape == (3, 16) for key in new)
    for task in range(3):
        assert torch.equal(logits(conditional, task), logits(plain, task))
    with torch.no_grad():
        conditional.get_parameter(next(key for key in new if "task_bias" in key))[1] += 1
    assert not torch.equal(logits(conditional, 1), logits(plain, 1)), "it is in use"
    assert torch.equal(logits(conditional, 0), logits(plain, 0))


@pytest.mark.parametrize("bias", [True, False])
def test_the_formula(bias: bool) -> None:
    norm = nn.LayerNorm(4, eps=1e-3, bias=bias)
    conditional, x = ConditionalLayerNorm(norm, 2), torch.randn(3, 4)
    for parameter in conditional.parameters():
        nn.init.normal_(parameter)
    conditional.task = 1
    scaled = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-3).sqrt()
    expected = scaled * (norm.weight + conditional.task_weight[1]) + conditional.task_bias[1]
    expected = expected + norm.bias if bias else expected
    torch.testing.assert_close(conditional(x), expected)


def test_an_encoder_whose_layer_norms_have_no_bias() -> None:
    """ModernBERT's: it starts as the plain model, saves no bias, and learns."""
    ids: dict[str, Any] = {
        f"{name}_token_id": n for n, name in enumerate(("pad", "cls", "sep", "bos", "eos"))
    }
    encoder = ModernBertConfig(**SIZES, **ids)
    plain, conditional = make(encoder, "mean", TASKS[0]), cln(encoder, 1, "mean")
    missing = take_weights(conditional, plain)
    assert not any(key.endswith("norm.bias") for key in conditional.state_dict())
    assert torch.equal(logits(conditional), logits(plain))
    training_step(conditional, 0, [4, 1, 0, 2], learning_rate=0.01)
    assert all(conditional.state_dict()[key].any() for key in missing)


@pytest.mark.parametrize("mode", ["full", "last_linear"])
@pytest.mark.parametrize("encoder", ["bert", "roberta", "multicls"])
def test_modes(encoder: str, mode: str) -> None:
    """`last_linear` leaves what the checkpoint brought as it is, and learns all the same."""
    model = cln(encoder, train=mode)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    training_step(model, 1, [0, 1, 1, 0])
    after = model.state_dict()
    changed = {key for key, value in after.items() if not torch.equal(value, before[key])}
    own = {key for key in changed if "task_" in key or key.startswith("classifiers.")}
    assert {"classifiers.1.weight", "encoder.embeddings.LayerNorm.task_weight"} <= {
        key.replace("encoder.encoder.embeddings", "encoder.embeddings") for key in own
    }
    assert not any(key.startswith(("classifiers.0", "classifiers.2")) for key in changed)
    # RoBERTa has no pretrained pooler: its is new.
    pooler = {"head.pooling.dense.weight", "head.pooling.dense.bias"}
    if mode == "last_linear":
        assert changed - own == (pooler if encoder == "roberta" else set())
    else:
        assert pooler < changed - own
        assert any(key.endswith("word_embeddings.weight") for key in changed)
    for key in (key for key in changed if "task_" in key):
        assert torch.equal(after[key][[0, 2]], before[key][[0, 2]]), "the other tasks' rows"


def test_an_encoder_without_layer_norms_is_refused() -> None:
    encoder = EuroBertConfig(**SIZES, num_key_value_heads=2, pad_token_id=0)
    with pytest.raises(IncompatibleHead, match="no LayerNorms"):
        cln(encoder, 1, "mean")
