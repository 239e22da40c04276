"""The work of a training step, counted, and the peaks of GPUs."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from multicls.environment import flops_per_token, peak_flops
from multicls.modeling_multicls import MultiClsConfig, MultiClsForPreTraining
from tests.encoders import encoder_config
from tests.pretrain.tools import micro_batch_of, random_inputs

ALL = ("mlm", "tfidf", "so", "mcqt")


@pytest.mark.parametrize(
    ("encoder", "objectives"), [("bert", ALL), ("modernbert", ALL), ("bert", ("mcqt",))]
)
def test_counted_work_is_that_of_a_real_step(encoder: str, objectives: tuple[str, ...]) -> None:
    """Within 5 % of torch's count of a step with masked positions, on real tensors."""
    config = MultiClsConfig(encoder=encoder_config(encoder, hidden_size=64), num_facets=3)
    model = MultiClsForPreTraining(config)
    model.freeze_unused(objectives)
    sequences, length, group = 12, 32, 4
    inputs = random_inputs(0, sequences, 3, length)
    inputs["attention_mask"] = torch.ones(sequences, length, dtype=torch.long)
    batch = micro_batch_of(inputs, 3)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(**batch.inputs, group_size=group, objectives=objectives).loss.backward()
    share = batch.counts["mlm"] / (sequences * length)
    sizes: Any = {"length": length, "group_size": group, "mlm_probability": share}
    counted = flops_per_token(config, objectives, **sizes)
    assert counted == pytest.approx(counter.get_total_flops() / (sequences * length), rel=0.05)
    assert flops_per_token(config, objectives, **sizes | {"length": 64}) > counted  # attention
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_bert_base_takes_548_mflop_a_token() -> None:
    """At 128 tokens with all losses; six for each of its weights would be 749."""
    config = MultiClsConfig()
    sizes: Any = {"length": 128, "group_size": 10, "mlm_probability": 0.15}
    assert flops_per_token(config, ALL, **sizes) == pytest.approx(548e6, rel=0.02)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", None),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_peaks(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak
