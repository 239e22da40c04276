"""Inference: time and memory of Multi-CLS BERT with five facets and with one, and of five single-CLS models together.

    OMP_NUM_THREADS=2 python benchmarks/run.py finetune_inference [--rounds 20] [--batch_size 32] [--length 128]

Classifiers of random weights, in the shape of BERT-base by default; every system reads a batch of full rows of the same
length (facets included) and gives probabilities; the ensemble averages those of its members, which run one by one. The
systems take turns, so that all see the same machine; medians, as ratios against one facet. Peak memory is that of a
process of its own (on a GPU: of the allocator) above what the imported libraries take, so weights are part of it.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.compare import Case, Report, take_turns
from benchmarks.workload import bert_config
from multicls.configuration_multicls import MultiClsBertConfig
from multicls.modeling_multicls import MultiClsBertForSequenceClassification
from multicls.settings import Settings

SYSTEMS = {  # facets of a model, models, seconds in the paper
    "K=1": (1, 1, 0.2918),
    "K=5": (5, 1, 0.3119),
    "ensemble of 5, single CLS": (0, 5, 1.4590),
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_system(name: str, args: Options) -> Case:
    """Returns a function that gives the probabilities (B, 2) of a batch of random tokens."""
    torch.manual_seed(0)
    facets, count, _ = SYSTEMS[name]
    shape = bert_config((args.hidden, args.layers))
    config: Any = MultiClsBertConfig(num_facets=facets, **shape) if facets else BertConfig(**shape)
    kind: Any = MultiClsBertForSequenceClassification if facets else BertForSequenceClassification
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    models = [kind(config).eval().to(DEVICE, dtype) for _ in range(count)]
    tokens = torch.randint(1000, 20000, (args.batch_size, args.length), device=DEVICE)

    @torch.inference_mode()
    def predict() -> torch.Tensor:
        answers = [model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits for model in models]
        return torch.stack(answers).float().softmax(-1).mean(0).cpu()  # which waits for the device

    return predict


def peak_memory(name: str, args: Options) -> float:
    """Returns the GiB that a system takes at its peak; call it in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    make_system(name, args)()
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20


class Options(Settings):
    """Options of the benchmark."""

    rounds: int = Field(20, description="rounds of the comparison")
    batch_size: int = Field(32, description="rows of a forward pass")
    length: int = Field(128, description="tokens of a row")
    layers: int = Field(12, description="layers of the encoder")
    hidden: int = Field(768, description="hidden size of the encoder")


def main(args: Options, argv: Sequence[str]) -> None:
    """Measures and writes the results."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        memory = {name: pool.apply(peak_memory, (name, args)) for name in SYSTEMS}
    samples = take_turns({name: make_system(name, args) for name in SYSTEMS}, rounds=args.rounds)
    device = "cpu" if DEVICE.type == "cpu" else torch.cuda.get_device_name()
    report = Report("finetune_inference", "Inference with five facets, one, and an ensemble", argv, device)
    what = f"{args.batch_size} x {args.length} tokens, {args.layers} layers x {args.hidden}"
    report.compare(what, samples, "K=1")
    rows = [[name, seconds / SYSTEMS["K=1"][2], memory[name], memory[name] / memory["K=1"]]
            for name, (_, _, seconds) in SYSTEMS.items()]  # fmt: skip
    report.table("Peak memory", ["system", "time in the paper, x K=1", "GiB", "x K=1"], rows)
    report.write()
