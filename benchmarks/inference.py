"""Inference with five facets, with one, and with five single-CLS models: time and peak memory.

OMP_NUM_THREADS=2 python benchmarks/inference.py --rounds 20 --batch_size 32

Classifiers of random weights in the shape of BERT-base read batches of full sequences. The ensemble averages the
probabilities of its members, which run one by one. Memory is the peak of a process of its own above what the imported
libraries take, weights included; on a GPU it is the allocator's peak.
"""

import multiprocessing
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import Field

from benchmarks.harness import Case, Report, take_turns
from multicls.errors import run_command
from multicls.settings import Settings, parse

LENGTH = 128  # tokens of a sequence
SIZES: dict[str, Any] = {}  # of the encoder; BertConfig's defaults are BERT-base's
PAPER = {"K=1": 0.2918, "K=5": 0.3119, "ensemble of 5": 1.4590}  # seconds


class Options(Settings):
    """Options of the benchmark."""

    rounds: int = Field(20, description="rounds of the comparison")
    batch_size: int = Field(32, description="sequences of a forward pass")


def make_system(name: str, options: Options) -> Case:
    """Returns a function that computes the probabilities (B, 2) of a batch of random tokens."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from multicls.modeling_multicls import MultiClsConfig, MultiClsForSequenceClassification

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    encoder = BertConfig(**SIZES)
    if name == "ensemble of 5":
        models: list[Any] = [BertForSequenceClassification(encoder) for _ in range(5)]
    else:
        config: Any = MultiClsConfig(encoder=encoder, num_facets=int(name[-1]))
        models = [MultiClsForSequenceClassification(config)]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    models = [model.eval().to(device, dtype) for model in models]
    tokens = torch.randint(1000, 20000, (options.batch_size, LENGTH), device=device)
    mask = torch.ones_like(tokens)

    @torch.inference_mode()
    def predict() -> Any:
        logits = [model(input_ids=tokens, attention_mask=mask).logits for model in models]
        return torch.stack(logits).float().softmax(-1).mean(0).cpu()  # waits for the device

    return predict


def peak_memory(name: str, options: Options) -> float:
    """Returns the peak memory of a system in GiB; call it in a process of its own."""
    import torch

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    make_system(name, options)()
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes the report."""
    options = parse(Options, argv, prog="benchmarks/inference.py", doc=__doc__)
    import torch  # after --help

    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        memory = {name: pool.apply(peak_memory, (name, options)) for name in PAPER}
    systems = {name: make_system(name, options) for name in PAPER}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    report = Report("Inference with five facets, with one, and with an ensemble", device)
    shape = f"{options.batch_size} x {LENGTH} tokens, BERT-base"
    report.compare(shape, take_turns(systems, rounds=options.rounds), "K=1")
    rows = [[name, PAPER[name] / PAPER["K=1"], memory[name]] for name in PAPER]
    report.table("Peak memory", ["system", "time in the paper, x K=1", "GiB"], rows)
    report.write()
    return 0


if __name__ == "__main__":
    run_command(main)
