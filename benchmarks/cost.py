"""The cost of a training step against its size, measured on a small model; and on paper for up to 1,024 GPUs.

    python benchmarks/run.py cost [--quick] [--rounds 5] [--seconds 20]

Measured on CPU with one thread a rank, 2 layers x 128, fp32, ZeRO-2, real examples: sequence length L, number of facets
K, examples of a micro-batch and number of ranks (as many examples on each), one after the other, the others at L = 128,
K = 5, 10 examples, one rank. Draws runs/benchmarks/cost.png. The paper part computes a table for BERT-base by
`step_seconds`; its inputs are options, with their sources in --help.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from benchmarks.compare import RESULTS, Report, Samples, take_turns
from multicls.command_line import CommandLine
from multicls.settings import Settings

AT = {"L": 128, "K": 5, "examples": 10, "ranks": 1}  # where one axis varies, the others stay here
AXES: dict[str, tuple[int, ...]] = {
    "L": (64, 128, 256, 512),
    "K": (1, 2, 3, 5, 7, 10),
    "examples": (10, 20, 40, 80, 160, 320),
    "ranks": (1, 2),
}
QUICK: dict[str, tuple[int, ...]] = {"L": (64, 128), "K": (1, 5), "examples": (10, 20), "ranks": (1, 2)}
LABELS = {
    "L": "sequence length L (tokens)",
    "K": "facets K",
    "examples": "examples of a micro-batch",
    "ranks": "ranks, 10 examples each",
}
GPUS = tuple(2**power for power in range(11))


class Cluster(Settings):
    """Inputs of `step_seconds`; "assumed" marks those without a measurement or a data sheet."""

    parameters: float = Field(118e6, description="of BERT-base with five facets; counted")
    sequences: float = Field(
        240, description="of a rank's step: 80 examples, what train.micro_batch_tokens allows by default"
    )
    tokens: float = Field(113, description="real tokens of a sequence: L = 128 less 11.8 %, see docs/data_measured.md")
    masked: float = Field(
        15, description="tokens of a sequence that the MLM head predicts: 15 %, see data.mlm_probability"
    )
    peak: float = Field(989e12, description="operations a second of a GPU in bf16; H200, pretrain/flops.py")
    mfu: float = Field(
        0.4, description="share of the peak that a step reaches; assumed, `step --device cuda` measures it"
    )
    bytes_per_parameter: float = Field(2, description="gradients are reduced, and weights gathered, in bf16")
    bandwidth: float = Field(
        50e9, description="bytes a second of a GPU: 400 Gb/s InfiniBand, NVIDIA's DGX H100 data sheet"
    )
    overlap: float = Field(
        0.0, description="share of the all-reduce hidden behind the backward pass; 0 is the worst case"
    )
    loader_rate: float = Field(
        83_463, description="sequences a second of a rank's loader process; docs/data_measured.md"
    )
    checkpoint_seconds: float = Field(
        10, description="the run waits while one is written; assumed, the log of a run tells it"
    )
    save_every: float = Field(10_000, description="steps between checkpoints; default of run.save_every")


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step, by what they are spent on."""

    compute: float
    all_reduce: float
    loader: float
    checkpoint: float

    @property
    def total(self) -> float:
        """The sum of the shares."""
        return self.compute + self.all_reduce + self.loader + self.checkpoint


def step_seconds(gpus: int, flops: float, cluster: Cluster) -> StepSeconds:
    """Returns the seconds of one optimizer step if each GPU has the same micro-batch for any number of GPUs.

    compute = flops / (MFU * peak). all-reduce = (1 - overlap) * 2 (N - 1) / N * bytes / bandwidth, a ring's (Patarasuk
    and Yuan 2009); ZeRO-2's reduce-scatter and all-gather move as much. Latency is left out. loader: what its time
    exceeds the two by, since it works ahead. checkpoint = its seconds / steps between two.

    Args:
        gpus: N.
        flops: Operations of a GPU's step.
        cluster: The other inputs.
    """
    compute = flops / (cluster.mfu * cluster.peak)
    moved = 2 * (gpus - 1) / gpus * cluster.parameters * cluster.bytes_per_parameter
    exposed = (1 - cluster.overlap) * moved / cluster.bandwidth
    loading = cluster.sequences / cluster.loader_rate
    share = cluster.checkpoint_seconds / cluster.save_every
    return StepSeconds(compute, exposed, max(0.0, loading - compute - exposed), share)


def on_paper(report: Report, cluster: Cluster) -> None:
    """Adds the table of `step_seconds` for BERT-base."""
    from multicls.configuration_multicls import MultiClsBertConfig
    from pretrain.flops import training_flops

    sequences, tokens = cluster.sequences, cluster.sequences * cluster.tokens
    squared, masked = tokens * cluster.tokens, sequences * cluster.masked
    config = MultiClsBertConfig()
    flops = training_flops(config, sequences=sequences, tokens=tokens, squared_lengths=squared, masked=masked)
    alone = step_seconds(1, flops, cluster).total
    rows = []
    for gpus in GPUS:
        step = step_seconds(gpus, flops, cluster)
        parts = [1000 * seconds for seconds in (step.compute, step.all_reduce, step.loader, step.checkpoint)]
        rows.append([gpus, *parts, 1000 * step.total, gpus * tokens / step.total, f"{alone / step.total:.1%}"])
    inputs = ", ".join(f"{name} {getattr(cluster, name):g}" for name in Cluster.model_fields)
    columns = ["GPUs", "compute, ms", "all-reduce, ms", "loader, ms", "checkpoint, ms", "step, ms", "tokens/s"]
    report.table(f"BERT-base on paper; {inputs}", [*columns, "efficiency"], rows, computed=True)


def measure(axis: str, values: Sequence[int], rounds: int, seconds: float) -> dict[int, Samples]:
    """Returns the times of a step at each value of one axis."""
    from benchmarks.step import on_ranks

    if axis == "ranks":
        found = {count: on_ranks(count, one_case, rounds, threads=1) for count in values}
        return {count: samples["ours"] for count, samples in found.items()}
    cases = {str(value): small_step(AT | {axis: value}) for value in values}
    samples = take_turns(cases, rounds=rounds, seconds=seconds)
    return {value: samples[str(value)] for value in values}


def one_case(ranks: int, rank: int) -> dict[str, Callable[[], Any]]:
    """Returns the case of one rank."""
    return {"ours": small_step(AT | {"ranks": ranks}, rank)}


def small_step(at: Mapping[str, int], rank: int = 0) -> Callable[[], Any]:
    """Returns a step of the small model at one point."""
    from benchmarks.workload import Shape, Workload, trainer_step

    train = {"global_batch_size": at["examples"] * at["ranks"], "micro_batch_size": at["examples"]}
    model, data = {"num_facets": at["K"]}, {"seq_length": at["L"]}
    work = Workload(Shape(128, 2), model, data, train, ranks=at["ranks"])
    return trainer_step(work.trainer(), work.batches(2, rank=rank))


def draw(found: Mapping[str, Mapping[int, Samples]], path: Path) -> None:
    """Draws the median step over each axis, with the least and the most; readable in black and white."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(8, 6), layout="constrained")
    for panel, (axis, points) in zip(panels.flat, found.items(), strict=False):
        values = list(points)
        middle = [1000 * statistics.median(one.wall) for one in points.values()]
        low = [mid - 1000 * min(one.wall) for mid, one in zip(middle, points.values(), strict=True)]
        high = [1000 * max(one.wall) - mid for mid, one in zip(middle, points.values(), strict=True)]
        panel.errorbar(values, middle, yerr=[low, high], color="black", marker="o", markerfacecolor="white", capsize=3)
        if values[-1] / values[0] > 4 and axis != "K":
            panel.set_xscale("log", base=2)
            panel.set_yscale("log", base=10)
        else:
            panel.set_ylim(bottom=0)
        panel.set_xticks(values, [str(value) for value in values])
        panel.minorticks_off()
        panel.set_xlabel(LABELS[axis])
        panel.set_ylabel("milliseconds a step")
        panel.grid(color="0.85")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"written: {path}")


class CostOptions(Cluster):
    """Options of the benchmark."""

    quick: bool = Field(default=False, description="two points an axis")
    axes: list[Literal["L", "K", "examples", "ranks"]] = Field(
        default=["L", "K", "examples", "ranks"], description="axes"
    )
    paper: bool = Field(default=False, description="measure nothing, compute only what is on paper")
    rounds: int = Field(default=5, description="rounds of each point")
    seconds: float = Field(default=60.0, description="seconds of each axis; three rounds at least")


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, draws and computes."""
    args = CommandLine("benchmarks/run.py cost", __doc__, CostOptions).parse(argv)
    axes = [] if args.paper else args.axes
    found: dict[str, dict[int, Samples]] = {}
    if axes:
        import torch

        from benchmarks.workload import on_cpu

        on_cpu()
        torch.set_num_threads(1)
    report = Report("cost", "Cost of a step against its size, 2 layers x 128 on CPU", argv)
    for axis in axes:
        values = (QUICK if args.quick else AXES)[axis]
        found[axis] = measure(axis, values, args.rounds, args.seconds)
        columns = [LABELS[axis], "ms a step (median)", "least", "most", "CPU ms (median)", "ms a sequence"]
        report.table(f"Step over {LABELS[axis]}", columns, [row(axis, *point) for point in found[axis].items()])
    if found:
        draw(found, RESULTS / "cost.png")
    on_paper(report, args)
    report.write()


def row(axis: str, value: int, samples: Samples) -> list[Any]:
    """Returns a row of the table of one axis."""
    at = AT | {axis: value}
    step = statistics.median(samples.wall)
    times = [1000 * seconds for seconds in (step, min(samples.wall), max(samples.wall), statistics.median(samples.cpu))]
    return [value, *times, 1000 * step / math.prod((3, at["examples"], at["ranks"]))]
