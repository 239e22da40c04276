"""Makes steps with and without `FlatGradients` and compares them to the bit; test_flat_gradients.py runs it.

Prints a line of JSON: for each case the names of what differs, the largest difference of the fp32 weights, and the
operators of DeepSpeed's part of a step.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2]))

from multicls.distributed import leave_deepspeed, prepare_deepspeed
from pretrain.trainer import NonFiniteGuard, train_step
from tests.pretrain.two_ranks import BATCH, GROUP, Case, make_engine, micro_batch

STEPS = 6
BROKEN = 3  # this step has a NaN on the last rank
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
CASES = {
    f"{file}_{precision}{'_sums' if sums else ''}": (file, precision, sums)
    for file in ("zero1", "zero2")
    for precision in ("fp32", "bf16", "fp16")
    for sums in (False, True)
}


def run(deepspeed: Any, name: str, own_path: bool) -> dict[str, Any]:
    """Returns what six steps leave, with DeepSpeed's own path or ours."""
    file, precision, sums = CASES[name]
    if own_path and sums and file == "zero1" and precision != "fp32":
        file = "zero2"  # DeepSpeed's ZeRO 1 sums in 16 bits; without other ranks it means the same
    ranks, rank = dist.get_world_size(), dist.get_rank()
    size = GROUP if sums else BATCH // ranks
    changes = {"precision": precision, "micro_batch_size": size, "max_grad_norm": 0.5}
    more: dict[str, Any] = SUMS if sums and file == "zero2" else {}
    if precision == "fp16":
        more = more | {"fp16": {"enabled": True, "initial_scale_power": 8}}
    why = "for the test" if own_path else ""
    with patch("pretrain.engine.why_not_flat", return_value=why):
        engine, chosen = make_engine(deepspeed, Case(file, changes), **more)
    guard, norms, losses = NonFiniteGuard(engine, 3), list[float](), list[float]()
    for step in range(STEPS):
        slots = range(rank, BATCH // size, ranks)
        batches = [micro_batch(step * BATCH // size + slot, size) for slot in slots]
        if step == BROKEN and rank == ranks - 1:
            batches[0].inputs["tfidf_labels"][0, 0] = torch.nan
        terms = train_step(engine, chosen, batches, step)
        guard.check_step(step, batches, terms)
        norms.append(engine.state()["optim/grad_norm"])
        losses += [float(value) for found in terms for value, _ in found.values()]
    optimizer = engine.deepspeed.optimizer
    masters = optimizer.single_partition_of_fp32_groups
    return {
        "weights": torch.cat([p.detach().flatten().float() for p in engine.module.parameters()]),
        "masters": torch.cat([flat.detach().clone() for flat in masters]),
        "moments": torch.cat([optimizer.state[flat]["exp_avg"].clone() for flat in masters]),
        "norms": torch.tensor(norms[:BROKEN] + norms[BROKEN + 1 :]),
        "losses": torch.tensor([value for value in losses if value == value]),
        "skipped": torch.tensor([guard.skipped, len(losses)]),
    }


class CountOperators(TorchDispatchMode):
    """Counts the operators that compute, by whether the module's passes or something else called them."""

    def __init__(self) -> None:
        super().__init__()
        self.number: Counter[bool] = Counter()
        self.is_model = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = func.is_view or "detach" in str(func)
        self.number[self.is_model] += not is_view
        return func(*args, **(kwargs or {}))


def operators_beside_the_model(deepspeed: Any, file: str) -> tuple[int, int]:
    """Returns the trainable weights of a deep model, and the operators of a bf16 step beside those of its passes."""
    engine, chosen = make_engine(
        deepspeed,
        Case(file, {"precision": "bf16", "micro_batch_size": BATCH}, {"num_hidden_layers": 12}),
    )
    assert engine._flat is not None
    counter, model_pass, gather = CountOperators(), engine._pass, engine._flat.gather

    def counted_pass(*args: Any, **kwargs: Any) -> Any:
        counter.is_model = True
        terms = model_pass(*args, **kwargs)
        counter.is_model = False
        return terms

    def counted_gather() -> None:
        counter.is_model = False
        gather()

    batches = [micro_batch(0, BATCH)]
    train_step(engine, chosen, batches, 0)
    with (
        patch.object(engine, "_pass", counted_pass),
        patch.object(engine._flat, "gather", counted_gather),
        counter,
    ):
        train_step(engine, chosen, batches, 1)
    weights = [p for p in engine.module.parameters() if p.requires_grad]
    return len(weights), counter.number[False]


def main() -> None:
    deepspeed = prepare_deepspeed()
    accelerator = type(deepspeed.accelerator.get_accelerator())
    accelerator.is_fp16_supported = lambda self: True  # torch computes in it, slowly
    results: dict[str, Any] = {}
    if dist.get_world_size() == 1:
        results["operators"] = {
            file: operators_beside_the_model(deepspeed, file) for file in ("zero1", "zero2")
        }
    for name in sys.argv[2:]:
        ours, theirs = (run(deepspeed, name, own) for own in (False, True))
        differs = [key for key in ours if not torch.equal(ours[key], theirs[key])]
        difference = float((ours["masters"] - theirs["masters"]).abs().max())
        results[name] = {"differs": differs, "difference": difference}
        results[name]["skipped"] = ours["skipped"].tolist()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    leave_deepspeed()
    os._exit(0)


if __name__ == "__main__":
    main()
