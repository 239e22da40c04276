"""Counts the waits of the host for a device that this machine does not have; test_no_waits.py runs it.

DeepSpeed's engine runs on the CPU with a `synchronize` that counts. The model and a step run on fake tensors of a
registered device "gpu": an operator on two devices, or a read of a value, raises. So do the heads of fine-tuning.
"""

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from multicls.distributed import prepare_deepspeed
from pretrain.batches import MicroBatch
from pretrain.engine import Engine, prepare_layers
from pretrain.metrics import MetricSums
from pretrain.trainer import add_terms, train_step
from tests.finetune.models import about, batch, make
from tests.pretrain.tools import tiny_model
from tests.pretrain.two_ranks import Case, make_engine, micro_batch, settings

BATCHES = [micro_batch(0), micro_batch(1)]
# `hire` reads lengths on the host, as torch's packed sequences need; `isobn` asks for autocast, which "gpu" lacks.
HEADS = ("cls", "mean", "multicls", "multicls_sum", "facets", "cln")
TASKS = {
    "scores": about(""),
    "several labels": about("xyz", multi_label=True),
    "spans": about(num_spans=2),
}
KINDS = ("bert", "roberta", "modernbert", "mpnet", "distilbert", "electra")


class CountReads(TorchDispatchMode):
    """Counts the operators that copy one number to the host, by the innermost function of a package."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.places[place()] += 1
        return func(*args, **(kwargs or {}))


def place() -> str:
    """Returns the innermost function that is neither torch's nor this file's."""
    frame: Any = sys._getframe(1)
    while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"


def engine_waits(deepspeed: Any, file: str) -> dict[str, dict[str, int]]:
    """Returns the places that synchronize the device, and that read a number, in a step of four micro-batches."""
    engine, chosen = make_engine(deepspeed, Case(file))
    accelerator, calls = type(deepspeed.accelerator.get_accelerator()), Counter[str]()

    def synchronize(*_: Any) -> None:
        calls[place()] += 1

    with patch.multiple(
        accelerator, synchronize=synchronize, resolves_data_dependency=lambda self: False
    ):
        for step in range(3):  # the last one counts
            batches = [micro_batch(4 * step + slot) for slot in range(4)]
            calls.clear()
            with CountReads() as reads:
                train_step(engine, chosen, batches, step)
    return {"synchronize": dict(calls), "reads": dict(reads.places)}


class StubDeepSpeed:
    """DeepSpeed around a model on a device that does not exist: flat weights, and a norm instead of an update."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.device = model, device

    def initialize(self, model: Any, optimizer: Any, config: Any) -> Any:
        groups = [group["params"] for group in optimizer.param_groups]
        flat = [flatten(weights) for weights in groups]
        fields = {"bit16_groups": groups, "bit16_groups_flat": flat, "averaged_gradients": {}}
        self.optimizer = SimpleNamespace(
            param_groups=optimizer.param_groups, _grad_acc_hooks=[], **fields
        )
        self.module, self.passes = model, 0
        return [self]

    def gradient_accumulation_steps(self) -> int:
        return len(BATCHES)

    def zero_optimization_stage(self) -> int:
        return 2

    def fp16_enabled(self) -> bool:
        return False

    def step(self) -> None:
        self.passes += 1
        found = self.optimizer.averaged_gradients.values()
        assert bool(found) == (self.passes == len(BATCHES))
        self.norms = [self.optimizer.get_grad_norm_direct(gradients, None) for gradients in found]


def flatten(weights: list[Any]) -> torch.Tensor:
    """Returns a flat tensor, of which the weights become views, as DeepSpeed has them."""
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
        weight.data = part.view(weight.shape)
    return flat


def make_fake(model: torch.nn.Module, device: torch.device) -> None:
    """Replaces all weights and buffers by fake ones on the device, in a `FakeTensorMode`."""
    for module in model.modules():
        groups: list[Any] = [module._parameters, module._buffers]
        for tensors in groups:
            for name, tensor in tensors.items():
                if tensor is not None:
                    fake: Any = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    is_weight = tensors is module._parameters
                    tensors[name] = torch.nn.Parameter(fake) if is_weight else fake


def head_on_fake_gpu(head: str, task: dict[str, Any]) -> str:
    """Makes a forward and a backward pass of a fine-tuning head on a fake GPU; returns "" or the error."""
    model, inputs, device = make("multicls", head, task).train(), batch(), torch.device("gpu:0")
    shape = (4, task["num_labels"]) if task.get("multi_label") else (4,)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes: dict[str, Any] = {
            name: mode.from_tensor(value).to(device) for name, value in inputs.items()
        }
        make_fake(model, device)
        if count := task["num_spans"]:
            fakes["spans"] = torch.ones(4, count, 12, dtype=torch.bool, device=device)
        kind = torch.float32 if task["is_regression"] or len(shape) > 1 else torch.long
        try:
            model(**fakes, labels=torch.zeros(shape, dtype=kind, device=device)).loss.backward()
        except (DataDependentOutputException, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"[:200]
    return ""


def on_fake_gpu(kind: str) -> str:
    """Makes a step in bf16, with metrics, on a fake GPU; returns "" or the error."""
    model = tiny_model(encoder=kind).bfloat16().train()
    chosen, batches = settings(), list[MicroBatch]()
    with patch("pretrain.engine.uses_cuda", return_value=True):
        train = {"compile": False, "unpad": False}
        prepare_layers(model, chosen.train.model_copy(update=train), "bf16")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for batch in BATCHES:
            fakes: dict[str, torch.Tensor] = {
                name: mode.from_tensor(tensor) for name, tensor in batch.inputs.items()
            }
            batches.append(replace(batch, inputs=fakes))
        device = torch.device("gpu:0")
        make_fake(model, device)
        model.tie_weights()
        stub = StubDeepSpeed(model, device)
        with patch("pretrain.engine.why_not_flat", return_value=""):
            engine = Engine(stub, model, {}, chosen)
        try:
            terms = train_step(engine, chosen, batches, 0, measured=True)
            sums = MetricSums()
            add_terms(sums, batches, terms, updated=True)
        except (DataDependentOutputException, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"[:200]
    tensors = [value for value in sums._sums.values() if isinstance(value, torch.Tensor)]
    assert len(tensors) > 8 and {value.device for value in tensors} == {device}
    gradients = [found.flat_partition for found in stub.optimizer.averaged_gradients.values()]
    assert gradients and {sums.dtype for sums in gradients} == {torch.float32}
    assert {tensor.device for tensor in (*gradients, *stub.norms)} == {device}
    assert all(p.grad is None for p in model.parameters()) and engine._flat
    assert {flat.dtype for flat in engine._flat.flat} == {torch.bfloat16}
    return ""


def main() -> None:
    deepspeed, results = prepare_deepspeed(), dict[str, Any]()
    _setup_privateuseone_for_python_backend("gpu")
    # Of fake tensors transformers believes that they are traced, and does not read their mask.
    with (
        patch("torch.distributed.all_reduce"),
        patch("transformers.masking_utils.is_tracing", return_value=False),
    ):
        with patch("pretrain.engine.keep_mask_on_device"):
            results["control"] = on_fake_gpu("bert")
        results["fake"] = {kind: on_fake_gpu(kind) for kind in KINDS}
        results["heads"] = {head: head_on_fake_gpu(head, about()) for head in HEADS}
        results["heads"] |= {name: head_on_fake_gpu("mean", task) for name, task in TASKS.items()}
    AttentionMaskInterface.register("sdpa", sdpa_mask)
    # After the fake ones: a backward pass counts the devices once.
    results |= {file: engine_waits(deepspeed, file) for file in ("zero1", "zero2")}
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
