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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from matplotlib.figure import Figure
from pydantic import Field

from benchmarks.compare import RESULTS, Case, Report, Samples, take_turns
from benchmarks.step import on_ranks
from benchmarks.workload import Workload, on_cpu, trainer_step
from multicls.configuration_multicls import MultiClsBertConfig
from multicls.settings import Settings
from pretrain.flops import training_flops

AT = {"L": 128, "K": 5, "examples": 10, "ranks": 1}  # where one axis varies, the others stay here
Axis = Literal["L", "K", "examples", "ranks"]
AXES: dict[Axis, tuple[int, ...]] = {
    "L": (64, 128, 256, 512), "K": (1, 2, 3, 5, 7, 10), "examples": (10, 20, 40, 80, 160, 320), "ranks": (1, 2),
}  # fmt: skip
LABELS = {
    "L": "sequence length L (tokens)",
    "K": "facets K",
    "examples": "examples of a micro-batch",
    "ranks": "ranks, 10 examples each",
}
GPUS = [2**power for power in range(11)]


class Cluster(Settings):
    """Inputs of `step_seconds`; "assumed" marks those without a measurement or a data sheet."""

    parameters: float = Field(118e6, description="of BERT-base with five facets; counted")
    sequences: float = Field(240, description="of a rank's step: 80 examples, as train.micro_batch_tokens allows")
    tokens: float = Field(113, description="real tokens of a sequence: L = 128 less 11.8 %, see docs/data_measured.md")
    masked: float = Field(15, description="tokens that the MLM head predicts: 15 %, see data.mlm_probability")
    peak: float = Field(989e12, description="operations a second of a GPU in bf16; H200, pretrain/flops.py")
    mfu: float = Field(0.4, description="share of the peak of a step; assumed, `step --device cuda` measures it")
    bytes_per_parameter: float = Field(2, description="gradients are reduced, and weights gathered, in bf16")
    bandwidth: float = Field(50e9, description="bytes a second of a GPU: 400 Gb/s InfiniBand, DGX H100 data sheet")
    overlap: float = Field(0.0, description="share of the all-reduce hidden behind the backward pass; 0: worst case")
    loader_rate: float = Field(83_463, description="sequences a second of a loader process; docs/data_measured.md")
    checkpoint_seconds: float = Field(10, description="the run waits while one is written; assumed, logs tell it")
    save_every: float = Field(10_000, description="steps between checkpoints; default of run.save_every")


class Options(Cluster):
    """Options of the benchmark."""

    quick: bool = Field(False, description="the first two points of each axis")
    axes: list[Axis] = Field(list(AXES), description="axes")
    paper: bool = Field(False, description="measure nothing, compute only what is on paper")
    rounds: int = Field(5, description="rounds of each point")
    seconds: float = Field(60.0, description="seconds of each axis; three rounds at least")


def step_seconds(gpus: int, flops: float, cluster: Cluster) -> dict[str, float]:
    """Returns the seconds of one optimizer step by what they are spent on; each GPU has the same micro-batch.

    compute = flops / (MFU * peak). all-reduce = (1 - overlap) * 2 (N - 1) / N * bytes / bandwidth, a ring's (Patarasuk
    and Yuan 2009); ZeRO-2's reduce-scatter and all-gather move as much. Latency is left out. loader: what its time
    exceeds the two by, since it works ahead. checkpoint = its seconds / steps between two. N = `gpus`; `flops` are the
    operations of a GPU's step.
    """
    compute = flops / (cluster.mfu * cluster.peak)
    moved = 2 * (gpus - 1) / gpus * cluster.parameters * cluster.bytes_per_parameter
    exposed = (1 - cluster.overlap) * moved / cluster.bandwidth
    waiting = max(0.0, cluster.sequences / cluster.loader_rate - compute - exposed)
    return {"compute": compute, "all-reduce": exposed, "loader": waiting,
            "checkpoint": cluster.checkpoint_seconds / cluster.save_every}  # fmt: skip


def on_paper(report: Report, cluster: Cluster) -> None:
    """Adds the table of `step_seconds` for BERT-base."""
    tokens = cluster.sequences * cluster.tokens
    flops = training_flops(
        MultiClsBertConfig(), sequences=cluster.sequences, tokens=tokens, squared_lengths=tokens * cluster.tokens,
        masked=cluster.sequences * cluster.masked,
    )  # fmt: skip
    steps = [step_seconds(gpus, flops, cluster) for gpus in GPUS]
    alone = sum(steps[0].values())
    rows = []
    for gpus, step in zip(GPUS, steps, strict=True):
        total = sum(step.values())
        milliseconds = [1000 * seconds for seconds in (*step.values(), total)]
        rows.append([gpus, *milliseconds, gpus * tokens / total, f"{alone / total:.1%}"])
    inputs = ", ".join(f"{name} {getattr(cluster, name):g}" for name in Cluster.model_fields)
    columns = ["GPUs", *(f"{name}, ms" for name in (*steps[0], "step")), "tokens/s", "efficiency"]
    report.table(f"BERT-base on paper; {inputs} (computed, not measured)", columns, rows)


def measure(axis: str, values: Sequence[int], rounds: int, seconds: float) -> dict[int, Samples]:
    """Returns the times of a step at each value of one axis."""
    if axis == "ranks":
        return {count: on_ranks(count, one_case, rounds, threads=1)["ours"] for count in values}
    cases = {str(value): small_step(AT | {axis: value}) for value in values}
    samples = take_turns(cases, rounds=rounds, seconds=seconds)
    return {value: samples[str(value)] for value in values}


def one_case(ranks: int, rank: int) -> dict[str, Case]:
    """Returns the case of one rank."""
    return {"ours": small_step(AT | {"ranks": ranks}, rank)}


def small_step(at: Mapping[str, int], rank: int = 0) -> Case:
    """Returns a step of the small model at one point."""
    work = Workload((128, 2), {"model.num_facets": at["K"], "data.seq_length": at["L"]}, at["ranks"])
    work = work.changed(global_batch_size=at["examples"] * at["ranks"], micro_batch_size=at["examples"])
    return trainer_step(work.trainer(), work.batches(2, rank))


def table(report: Report, axis: str, points: Mapping[int, Samples]) -> None:
    """Adds the table of one axis."""
    rows = []
    for value, one in points.items():
        at, step = AT | {axis: value}, statistics.median(one.wall)
        times = [1000 * seconds for seconds in (step, min(one.wall), max(one.wall), statistics.median(one.cpu))]
        rows.append([value, *times, 1000 * step / math.prod((3, at["examples"], at["ranks"]))])
    columns = [LABELS[axis], "ms a step (median)", "least", "most", "CPU ms (median)", "ms a sequence"]
    report.table(f"Step over {LABELS[axis]}", columns, rows)


def draw(found: Mapping[str, Mapping[int, Samples]], path: Path) -> None:
    """Draws the median step over each axis, with the least and the most; readable in black and white."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    for panel, (axis, points) in zip(figure.subplots(2, 2).flat, found.items(), strict=False):
        values, walls = list(points), [one.wall for one in points.values()]
        middle = [1000 * statistics.median(wall) for wall in walls]
        low = [mid - 1000 * min(wall) for mid, wall in zip(middle, walls, strict=True)]
        high = [1000 * max(wall) - mid for mid, wall in zip(middle, walls, strict=True)]
        panel.errorbar(values, middle, yerr=[low, high], color="black", marker="o", markerfacecolor="white", capsize=3)
        if values[-1] / values[0] > 4 and axis != "K":
            panel.set_xscale("log", base=2)
            panel.set_yscale("log", base=10)
        else:
            panel.set_ylim(bottom=0)
        panel.set_xticks(values, map(str, values))
        panel.minorticks_off()
        panel.set(xlabel=LABELS[axis], ylabel="milliseconds a step")
        panel.grid(color="0.85")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"written: {path}")


def main(args: Options, argv: Sequence[str]) -> None:
    """Measures, draws and computes."""
    on_cpu()
    torch.set_num_threads(1)
    report = Report("cost", "Cost of a step against its size, 2 layers x 128 on CPU", argv)
    found: dict[str, dict[int, Samples]] = {}
    for axis in [] if args.paper else args.axes:
        found[axis] = measure(axis, AXES[axis][:2] if args.quick else AXES[axis], args.rounds, args.seconds)
        table(report, axis, found[axis])
    if found:
        draw(found, RESULTS / "cost.png")
    on_paper(report, args)
    report.write()
