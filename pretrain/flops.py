"""Counts the arithmetic of a step and of a GPU, for the share that training reaches (MFU)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multicls.configuration_multicls import MultiClsBertConfig

# Dense bf16 (fp16 where a GPU has no bf16) with fp32 accumulation, 1e12 operations a second, from the data sheets.
# The keys are patterns of torch.cuda.get_device_name; the first that matches counts.
PEAK_TFLOPS: dict[str, float | None] = {
    r"\bMIG\b": None,  # a part of a GPU
    r"\bB200\b": 2250.0,
    r"\b(GH200|H200)\b": 989.0,
    r"\bH100 PCIe\b": 756.0,
    r"\bH100 NVL\b": 835.0,
    r"\bH100\b": 989.0,
    r"\bA100\b": 312.0,
    r"\bA40\b": 150.0,
    r"\bA30\b": 165.0,
    r"\bA10\b": 125.0,
    r"\bL40S\b": 362.0,
    r"\bL4\b": 121.0,
    r"\bV100-PCIE\b": 112.0,
    r"\bV100\b": 125.0,
    r"\bT4\b": 65.0,
    r"\bRTX A6000$": 155.0,
    r"\bRTX 3090$": 71.0,
    r"\bRTX 4090$": 165.0,
}


def known_peak_tflops(device_name: str) -> float | None:
    """Returns the peak of a GPU in 1e12 dense 16-bit operations a second; None if the table lacks it."""
    return next((peak for pattern, peak in PEAK_TFLOPS.items() if re.search(pattern, device_name)), None)


def training_flops(
    config: MultiClsBertConfig, *, sequences: float, tokens: float, squared_lengths: float, masked: float
) -> float:
    """Returns the operations that the forward and backward passes over some sequences need.

    A multiply-add counts 2 forward and 4 backward. Counted: matrices of the encoder for each real token (4 D^2 + 2 D I
    a layer), both products of attention, the TF-IDF head for each token but the facets, inserted layers, facet head and
    SO head once a sequence, the MLM head at masked tokens. Not counted: padding, embeddings, biases, norms,
    activations, the comparisons of MCQT, the optimizer, and what activation checkpointing computes again.

    Args:
        tokens: Their real (unpadded) tokens, special ones and facets included.
        squared_lengths: Sum over the sequences of their real tokens squared.
        masked: Number of tokens that the MLM head predicts.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    square = hidden**2
    per_facet = square * (len(config.facet_layers or []) + 2)  # inserted layers, facet head, SO's first matrix
    multiply_adds = (
        layers * (4 * square + 2 * hidden * config.intermediate_size) * tokens
        + 2 * layers * hidden * squared_lengths
        + (square + hidden) * (tokens - config.num_facets * sequences)
        + (per_facet * config.num_embeddings_per_sequence + 2 * hidden) * sequences
        + (square + hidden * config.vocab_size) * masked
    )
    return 6.0 * multiply_adds


def throughput(
    config: MultiClsBertConfig, totals: Mapping[str, tuple[float, float]], seconds: float, peak_tflops: float | None
) -> dict[str, float]:
    """Returns the speed over a window of steps with the `MetricSums.totals()` `totals`.

    `peak_tflops` is the peak of all devices together; None: no `speed/mfu`.
    """
    tokens, sequences = totals["data/tokens_per_sequence"]
    values = {
        "data/tokens": tokens,
        "speed/sequences_per_second": sequences / seconds,
        "speed/tokens_per_second": tokens / seconds,
    }
    if peak_tflops:
        squared, masked = totals["moment/squared_length"][0], totals["loss/mlm"][1]
        flops = training_flops(config, sequences=sequences, tokens=tokens, squared_lengths=squared, masked=masked)
        values["speed/mfu"] = flops / seconds / (1e12 * peak_tflops)
    return values
