"""A training step: operator calls, values read back, and its time against plain PyTorch, Hugging Face and DDP.

    python benchmarks/run.py step [--only counts small base groups ranks options] [--rounds 10] [--threads 1]
    python benchmarks/run.py step --device cuda [--seconds 4]

Steps train on real examples, the embedded sample corpus at L = 128, prepared before; each round gives all cases the
same batch of 10 examples (30 sequences). Hugging Face's side is BertForMaskedLM of the same size over the same padded
sequences and labels, with the logits of the full vocabulary, in a plain loop with fused AdamW that does not clip. DDP's
side trains our model on the same batches and clips as our engine does. With --only, the results go to a file of their
own. `--device cuda` is the GPU pass, see step_gpu.py.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import workload
from benchmarks.compare import Bar, Case, Report, Samples, take_turns
from benchmarks.workload import BASE, SMALL, Workload, hugging_face_step, plain_step, trainer_step
from multicls.distributed import leave_deepspeed, prepare_deepspeed
from multicls.files import REPOSITORY, read_json, write_json
from multicls.settings import Settings
from pretrain.engine import freeze_unused, pad_vocabulary
from pretrain.training import weighted_sum

READS = ("aten._local_scalar_dense.", "aten.nonzero.", "aten.is_nonzero.")
OURS = tuple(f"{REPOSITORY / folder}{os.sep}" for folder in ("pretrain", "multicls"))
Part = Literal["counts", "small", "base", "groups", "ranks", "options"]
GROUP = 10  # examples that are each other's negatives
CasesOfRank = Callable[[int, int], dict[str, Case]]  # of the number of ranks and the rank


class CountOperators(TorchDispatchMode):
    """Counts the operators called inside: those that launch work, views, and those that read a value back.

    On CPU, `tolist` and `numpy` read without an operator; on a GPU, tests/pretrain/test_gpu.py finds those as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work: Counter[str] = Counter()
        self.views: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()  # by who asked: "ours", "DeepSpeed's" or "others'"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one call and makes it."""
        (self.views if func.is_view else self.work)[str(func)] += 1
        if str(func).startswith(READS):
            self.reads[caller()] += 1
        return func(*args, **(kwargs or {}))


def caller() -> str:
    """Returns whose code makes the present call: the innermost frame of this project or of DeepSpeed decides."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(OURS):
            return "ours"
        if f"{os.sep}deepspeed{os.sep}" in file:
            return "DeepSpeed's"
        frame = frame.f_back
    return "others'"


def count(report: Report) -> None:
    """Counts a step of 12 layers of small width, bf16, ZeRO-2, one micro-batch, that does not log."""
    work = Workload((64, 12)).changed(precision="bf16", global_batch_size=4, negatives_group=4)
    step = trainer_step(work.trainer(), work.batches(4))
    step(), step()
    with CountOperators() as counted:
        step()
    what = "of a step, 12 layers, bf16, ZeRO-2, one micro-batch"
    report.figure(f"operator calls {what}, views left out", counted.work.total(), Bar("<=", 2800))
    report.figure(f"views {what}", counted.views.total())
    for name, bar in {"ours": Bar("<=", 0), "DeepSpeed's": Bar("<=", 3), "others'": None}.items():
        report.figure(f"values read back from the device in that step, {name}", counted.reads[name], bar)


def against_hugging_face(report: Report, name: str, shape: tuple[int, int], bar: float, rounds: int) -> None:
    """Compares our engine's step, and our model in plain PyTorch, with BertForMaskedLM."""
    work = Workload(shape)
    batches = work.batches(8)
    model, _ = work.build()
    freeze_unused(model, work.settings.objective)
    baseline, plain = hugging_face_step(shape, batches), plain_step(lambda inputs: model(**inputs).loss, model, batches)
    theirs, engine = "BertForMaskedLM, plain PyTorch", "ours, the engine's step (ZeRO-2, one rank)"
    cases = {theirs: baseline, "ours, plain PyTorch": plain, engine: trainer_step(work.trainer(), batches)}
    share = matrix_flops(plain) / matrix_flops(baseline)
    report.figure(f"matrix multiplications of a step of {name}, ours as a share of the baseline's", share)
    samples = take_turns(cases, rounds=rounds)
    report.compare(f"Step of {name}, fp32, 10 examples", samples, theirs, {engine: Bar("<=", bar)})


def matrix_flops(step: Case) -> int:
    """Returns the floating-point operations of the matrix multiplications in a step, forward and backward."""
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def groups(report: Report, rounds: int) -> None:
    """Compares 8 groups of negatives in one forward pass with 8 accumulated micro-batches of one group."""
    samples = take_turns(workload.grouped_steps(SMALL), rounds=rounds)
    report.compare("Step of 80 examples, 4 x 256", samples, "8 accumulated",
                   {"8 groups in one forward": Bar("<=", 0.9)})  # fmt: skip


def options(report: Report, rounds: int) -> None:
    """Compares train.compile and train.unpad with neither."""
    cases = {}
    for name in ("neither", "train.compile", "train.unpad"):
        work = Workload(SMALL, {} if name == "neither" else {name: True})
        cases[name] = trainer_step(work.trainer(), work.batches(4))
    report.compare("Options, 4 x 256, 10 examples", take_turns(cases, rounds=rounds, warmup=2), "neither")


def ranks(report: Report, rounds: int, threads: int) -> None:
    """Compares our engine on two ranks with torch's DDP in the same two processes; CPU seconds are of both."""
    samples = on_ranks(2, zero_and_ddp, rounds, threads=threads)
    bars = {"ours, ZeRO-2": Bar("<=", 1.08)}
    report.compare("Step on 2 ranks (gloo), 4 x 256, 10 examples a rank", samples, "DDP, plain PyTorch", bars)


def zero_and_ddp(world_size: int, rank: int) -> dict[str, Case]:
    """Returns the cases of `ranks` for one rank."""
    work = Workload(SMALL, {"train.global_batch_size": GROUP * world_size}, world_size)
    batches, trainer, objective = work.batches(4, rank), work.trainer(), work.settings.objective
    model, _ = work.build()
    freeze_unused(model, objective)
    pad_vocabulary(model)
    parallel = torch.nn.parallel.DistributedDataParallel(model)

    def loss_of(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return weighted_sum(parallel(**inputs, group_size=GROUP).losses, objective)

    ddp = plain_step(loss_of, parallel, batches, clip=True)
    return {"DDP, plain PyTorch": ddp, "ours, ZeRO-2": trainer_step(trainer, batches)}


def on_ranks(count: int, make: CasesOfRank, rounds: int, *, threads: int) -> dict[str, Samples]:
    """Returns the times of cases that take turns on `count` processes together, each with so many threads.

    Wall seconds are those of rank 0, which waits for the others, CPU seconds those of all ranks together.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (count, make, rounds, threads, folder), nprocs=count)
        return {name: Samples(**one) for name, one in read_json(Path(folder) / "samples.json").items()}


def _rank(rank: int, count: int, make: CasesOfRank, rounds: int, threads: int, folder: str) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "OMP_NUM_THREADS": threads}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DS_ACCELERATOR": "cpu"}  # a file is where they meet
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    torch.set_num_threads(threads)
    prepare_deepspeed()
    samples = take_turns(make(count, rank), rounds=rounds, wait=torch.distributed.barrier)
    everyone: Any = [None] * count
    torch.distributed.all_gather_object(everyone, samples)
    if rank == 0:
        for name, one in samples.items():
            one.cpu = [sum(cpu) for cpu in zip(*(other[name].cpu for other in everyone), strict=True)]
        write_json(Path(folder) / "samples.json", {name: vars(one) for name, one in samples.items()})
    leave_deepspeed()


class Options(Settings):
    """Options of the benchmark."""

    device: Literal["cpu", "cuda"] = Field("cpu", description="device")
    only: list[Part] = Field([], description="parts of the CPU pass; default: all")
    rounds: int = Field(10, description="rounds of each comparison; half of them for BERT-base")
    threads: int = Field(1, description="threads of torch, on CPU; of each rank where there are two")
    seconds: float = Field(4.0, description="seconds of each comparison on the GPU")


def main(args: Options, argv: Sequence[str]) -> None:
    """Measures what the command line asks for, and writes the results."""
    if args.device == "cuda":
        from benchmarks import step_gpu

        step_gpu.measure(argv, args.seconds)
        return
    workload.on_cpu()
    torch.set_num_threads(args.threads)
    report = Report(".".join(["step", *filter(None, ["_".join(args.only)])]), "A training step on CPU", argv)
    parts: dict[Part, Case] = {
        "counts": lambda: count(report),
        "small": lambda: against_hugging_face(report, "4 layers x 256", SMALL, 0.38, args.rounds),
        "base": lambda: against_hugging_face(report, "BERT-base", BASE, 0.85, max(3, args.rounds // 2)),
        "groups": lambda: groups(report, args.rounds),
        "ranks": lambda: ranks(report, args.rounds, args.threads),
        "options": lambda: options(report, args.rounds),
    }
    for name in args.only or parts:
        parts[name]()
    report.write()
