"""Parameter groups and precision of pretraining, dropout seeds of both stages, the software's record."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from multicls import environment
from multicls.environment import environment_record
from multicls.errors import UserError
from multicls.optim import choose_precision, dropout_seed, parameter_groups

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(3, 3)
        self.LayerNorm = nn.LayerNorm(3)
        self.facet_norm = nn.Parameter(torch.ones(5, 3))
        self.facet_bias = nn.Parameter(torch.zeros(5, 3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)


def test_biases_and_norms_do_not_decay_even_as_tables() -> None:
    model = Model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed, plain = parameter_groups(model, 0.02)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.02, 0.0)
    assert [names[parameter] for parameter in decayed["params"]] == ["dense.weight"]
    found = " ".join(sorted(names[parameter] for parameter in plain["params"]))
    assert found == "LayerNorm.bias LayerNorm.weight dense.bias facet_bias facet_norm"
    assert len(parameter_groups(nn.LayerNorm(3), 0.02)) == 1, "an empty group is left out"


def test_new_weights_have_a_learning_rate_of_their_own() -> None:
    model: Any = nn.ModuleDict({"encoder": Model(), "facet_head": Model()})
    assert {group["lr_factor"] for group in parameter_groups(model, 0.02, 10.0)} == {1.0}
    model.new_weights = frozenset({"facet_head.dense.weight", "encoder.dense.bias"})
    groups = parameter_groups(model, 0.02, 10.0)
    factors = [
        (group["weight_decay"], group["lr_factor"], len(group["params"])) for group in groups
    ]
    assert factors == [(0.02, 10.0, 1), (0.02, 1.0, 1), (0.0, 10.0, 1), (0.0, 1.0, 9)]
    assert {group["lr_factor"] for group in parameter_groups(model, 0.02)} == {1.0}


def test_dropout_seeds_differ_and_repeat() -> None:
    assert dropout_seed(1, 0) == 2964727883954193085, "resumed runs depend on it"
    seeds = {dropout_seed(seed, number) for seed in range(20) for number in range(500)}
    assert len(seeds) == 20 * 500 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(("major", "precision"), [(7, "fp16"), (8, "bf16")])
def test_auto_is_bf16_or_fp16(major: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch counts emulated bf16 as supported by default."""
    properties = SimpleNamespace(major=major, minor=0)
    monkeypatch.setattr("torch.version.hip", None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    monkeypatch.setattr("torch.cuda._check_bf16_tensor_supported", lambda device: True)
    assert torch.cuda.is_bf16_supported() and choose_precision("auto", CUDA) == precision
    assert choose_precision("bf16", CUDA) == "bf16" and choose_precision("fp32", CUDA) == "fp32"
    assert choose_precision("auto", CPU) == "fp32" and choose_precision("bf16", CPU) == "bf16"
    with pytest.raises(UserError, match="needs a GPU"):
        choose_precision("fp16", CPU)


def test_environment_has_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = environment_record()
    assert record["versions"]["torch"] == torch.__version__
    assert len(str(record["git_commit"]).removesuffix("-dirty")) in (4, 40)
    monkeypatch.setattr(environment, "REPOSITORY", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment_record()["git_commit"] is None, "not a repository"
