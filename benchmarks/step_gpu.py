"""The GPU pass of the step benchmark: BERT-base over micro-batch sizes, precisions and options, in under 8 minutes.

Each comparison is with BertForMaskedLM in pure bf16 (weights, moments and all, which is less work than mixed precision)
over the same sequences, with the logits of the full vocabulary and sdpa. Parts that do not fit into the time are left
out, and said to be. A machine without the sample packages needs runs/sample_corpus and runs/benchmarks/tokenizer, which
`python benchmarks/run.py step --only counts` leaves on another one.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.compare import Case, Report, Samples, take_turns
from benchmarks.workload import BASE, Workload, grouped_steps, hugging_face_step, trainer_step
from multicls.errors import UserError
from pretrain.batches import MicroBatch
from pretrain.flops import known_peak_tflops, training_flops

SIZES = (10, 20, 40, 80, 160, 320)  # examples of a micro-batch, three sequences each
MIDDLE = 40  # examples at which precisions and options are compared
BUDGET = 360.0  # seconds after which no further part begins
THEIRS = "BertForMaskedLM, bf16"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "aten::item",
         "aten::_local_scalar_dense", "aten::nonzero")  # fmt: skip


def measure(argv: Sequence[str], seconds: float) -> None:
    """Measures all parts, `seconds` for each comparison, and writes the results after each part.

    Raises:
        UserError: There is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise UserError("step --device cuda: torch finds no CUDA device; leave out --device cuda to measure on CPU.")
    torch.set_float32_matmul_precision("high")  # TF32 for fp32, as in a pretraining
    name = torch.cuda.get_device_name()
    report = Report("step.cuda", "A training step of BERT-base on a GPU", argv, device=name)
    rate = matmul_tflops()
    report.figure("measured rate of a large bf16 matrix product, TFLOP/s", rate)
    sheet = known_peak_tflops(name)
    if sheet:
        report.figure("dense bf16 peak by the data sheet, TFLOP/s", sheet)
    parts: dict[str, Case] = {
        "micro-batch sweep": lambda: sweep(report, seconds, {"the measured rate": rate, "the data sheet": sheet}),
        "profile": lambda: profiled(report),
        "groups": lambda: groups(report, seconds),
        "bf16": lambda: option(report, "bf16", {}, seconds),
        "unpad": lambda: option(report, "bf16, train.unpad", {"unpad": True}, seconds),
        "fp32": lambda: option(report, "fp32 with TF32", {"precision": "fp32"}, seconds),
        "fp16": lambda: option(report, "fp16", {"precision": "fp16"}, seconds),
        "compile": lambda: option(report, "bf16, train.compile", {"compile": True}, seconds),
    }
    started, problems = time.perf_counter(), []
    for part, run in parts.items():
        if time.perf_counter() - started > BUDGET:
            problems.append([part, "left out: the time was over"])
            continue
        try:
            run()
        except UserError:
            raise
        except Exception as error:  # one part that does not work here must not lose the others
            problems.append([part, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"])
            print(f"{part}: {error}", flush=True)
        free_memory()
        report.write()
    if problems:
        report.table("Parts without a result", ["part", "why"], problems)
        report.write()


def matmul_tflops(size: int = 8192) -> float:
    """Returns the rate of a square bf16 matrix product, in 1e12 operations a second; the best of 20."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    samples = take_turns({"matmul": lambda: left @ right}, rounds=20, warmup=5, wait=torch.cuda.synchronize)
    return 2 * size**3 / min(samples["matmul"].wall) / 1e12


def workload(size: int, **train: Any) -> Workload:
    """Returns BERT-base with `size` examples a step in one micro-batch, in bf16."""
    return Workload(BASE).changed(**{"precision": "bf16", "global_batch_size": size, "micro_batch_size": size} | train)


def sweep(report: Report, seconds: float, peaks: Mapping[str, float | None]) -> None:
    """Compares both sides at each micro-batch size, until one runs out of memory; `peaks` are in TFLOP/s."""
    config, rows = workload(SIZES[0]).build()[0].config, []
    trainer = workload(SIZES[0]).trainer()  # its engine does one micro-batch a step, of any size
    for size in SIZES:
        batches = workload(size).batches(4)
        torch.cuda.reset_peak_memory_stats()
        try:
            cases = {THEIRS: hugging_face_step(BASE, batches, "cuda", torch.bfloat16),
                     "ours": trainer_step(trainer, batches)}  # fmt: skip
            samples = timed(cases, seconds)
        except torch.OutOfMemoryError:
            rows.append([size, *["out of memory"] * 6])
            break
        report.compare(f"BERT-base, bf16, {size} examples", samples, THEIRS)
        theirs, ours = (statistics.median(samples[name].wall) for name in (THEIRS, "ours"))
        names = {"sequences": "sequences", "tokens": "tokens", "squared_lengths": "squared_lengths", "masked": "mlm"}
        counts = {name: mean_count(batches, key) for name, key in names.items()}
        achieved = training_flops(config, **counts) / ours / 1e12
        rows.append([size, counts["tokens"] / ours, counts["tokens"] / theirs, theirs / ours,
                     *(achieved / peak if peak else "unknown" for peak in peaks.values()),
                     torch.cuda.max_memory_allocated() / 1e9])  # fmt: skip
        del cases
        free_memory()
    columns = ["examples", "ours, real tokens/s", "theirs, real tokens/s", "x theirs"]
    columns += [*(f"MFU of {peak}" for peak in peaks), "peak GB, both"]
    report.table("BERT-base, bf16, by micro-batch size", columns, rows)


def mean_count(batches: Sequence[MicroBatch], name: str) -> float:
    """Returns the mean of a count over micro-batches."""
    return statistics.mean(batch.counts[name] for batch in batches)


def option(report: Report, name: str, train: dict[str, Any], seconds: float) -> None:
    """Compares one precision or option with Hugging Face's side at `MIDDLE` examples."""
    work = workload(MIDDLE, **train)
    batches = work.batches(4)
    theirs = hugging_face_step(BASE, batches, "cuda", torch.bfloat16)
    cases = {THEIRS: theirs, f"ours, {name}": trainer_step(work.trainer(), batches)}
    # enough warm-up for compilation, and for fp16's loss scale to fall to where it stays
    samples = timed(cases, seconds, warmup=20 if "fp16" in name else 5)
    report.compare(f"BERT-base, {MIDDLE} examples, {name}", samples, THEIRS)
    tokens = mean_count(batches, "tokens")
    rows = [[case, tokens / statistics.median(one.wall)] for case, one in samples.items()]
    report.table(f"BERT-base, {MIDDLE} examples, {name}", ["case", "real tokens/s"], rows)


def groups(report: Report, seconds: float) -> None:
    """Compares 8 groups of negatives in one forward pass with 8 accumulated micro-batches."""
    samples = timed(grouped_steps(BASE, precision="bf16"), seconds)
    report.compare("BERT-base, bf16, step of 80 examples", samples, "8 accumulated")


def profiled(report: Report, steps: int = 4) -> None:
    """Counts kernels and waits of the host in a step that does not log."""
    work = workload(SIZES[0])
    step = trainer_step(work.trainer(), work.batches(4))
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
    found = dict.fromkeys(("kernels", "copies and fills on the device", *WAITS), 0)
    for event in profiler.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            if not getattr(event, "is_user_annotation", False):
                copies = event.key.startswith(("Memcpy", "Memset"))
                found["copies and fills on the device" if copies else "kernels"] += event.count
        elif event.key in found:
            found[event.key] += event.count
    note = f"Calls a step, {SIZES[0]} examples, over {steps} steps; the profiler adds a cudaDeviceSynchronize or two"
    report.table(note, ["what", "calls a step"], [[name, count / steps] for name, count in found.items()])


def timed(cases: Mapping[str, Case], seconds: float, warmup: int = 3) -> dict[str, Samples]:
    """Returns the times of the cases, bounded by `seconds`."""
    return take_turns(cases, rounds=200, warmup=warmup, seconds=seconds, wait=torch.cuda.synchronize)


def free_memory() -> None:
    """Gives the memory of dropped models back to the device."""
    gc.collect()
    torch.cuda.empty_cache()
