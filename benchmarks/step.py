"""A training step: its time against Hugging Face's BertForMaskedLM and DDP.

OMP_NUM_THREADS=2 python benchmarks/step.py --parts small base --rounds 10
OMP_NUM_THREADS=1 python benchmarks/step.py --parts ranks
python benchmarks/step.py --parts base --examples 80

All cases of a round train on the same real examples of the sample corpus, 10 of three sequences of 128 tokens unless
`--examples` is set. Hugging Face's side is BertForMaskedLM of the same size over the same padded sequences and labels,
with the logits of the full vocabulary, in a plain loop with fused AdamW. DDP's side trains our model on the same
batches. It runs on the CPU, in fp32; benchmarks/gpu.py measures a GPU.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import Field

from multicls.errors import UserError, run_command
from multicls.settings import Settings, parse

SMALL, BASE = (256, 4), (768, 12)  # hidden size and layers


class Options(Settings):
    """Options of the benchmark."""

    parts: list[Literal["small", "base", "ranks"]] = Field(["small"], description="what to do")
    rounds: int = Field(10, ge=1, description="rounds of each comparison")
    examples: int = Field(10, ge=10, multiple_of=10, description="examples of a step and rank")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the parts and writes the report."""
    options = parse(Options, argv, prog="benchmarks/step.py", doc=__doc__)
    import torch  # after --help

    from benchmarks.harness import Report
    from benchmarks.training_step import Workload, against_bert, compare_ranks
    from pretrain.run import prepare_sample_corpus

    if torch.cuda.is_available():
        raise UserError("benchmarks/step.py runs on the CPU: set CUDA_VISIBLE_DEVICES=''.")
    prepare_sample_corpus()
    report = Report("A training step")
    models = {"small": ("4 layers x 256", SMALL, 0.45), "base": ("BERT-base", BASE, 0.85)}
    for part in options.parts:
        if part == "ranks":
            compare_ranks(report, Workload(SMALL, ranks=2), options.rounds)
        else:
            name, shape, limit = models[part]
            against_bert(report, name, Workload(shape, options.examples), limit, options.rounds)
    report.write()
    return 0


if __name__ == "__main__":
    run_command(main)
