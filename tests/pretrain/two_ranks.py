"""Makes optimizer steps in each named case, all in one launch of test_ds_configs.py.

Those of `FLAT` are made with and without `FlatGradients`, and compared to the bit.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2]))

from multicls.deepspeed_config import complete_deepspeed_config, load_deepspeed_config
from multicls.distributed import leave_deepspeed, prepare_deepspeed
from multicls.errors import print_stderr
from pretrain.batches import MicroBatch
from pretrain.engine import Engine
from pretrain.metrics import MetricSums, means
from pretrain.settings import PretrainSettings
from pretrain.trainer import NonFiniteGuard, add_terms, train_step
from tests.pretrain.tools import micro_batch_of, random_inputs, tiny_model

STEPS, GROUP, BATCH = 3, 3, 12  # BATCH examples a step, in groups of GROUP


class Case(NamedTuple):
    """A DeepSpeed file and the settings of `train` that it runs with."""

    file: str
    changes: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    model: dict[str, Any] = {}  # noqa: RUF012  # what `tiny_model` takes


FILES = ("zero1", "zero2", "zero3")
CASES = {
    **{name: Case(name) for name in FILES},
    **{f"{name}_bf16": Case(name, {"precision": "bf16"}) for name in FILES},
    "zero2_two_groups_a_pass": Case("zero2", {"micro_batch_size": 2 * GROUP}),
    "zero1_recorded": Case("zero1", {"graph": True}),
    "zero3_activation_checkpointing": Case("zero3", {"activation_checkpointing": True}),
    "zero2_modernbert": Case("zero2", model={"encoder": "modernbert"}),
    "zero3_deberta-v2": Case("zero3", model={"encoder": "deberta-v2"}),
}

FLAT = {
    f"flat_{file}_{precision}{'_sums' if sums else ''}": (file, precision, sums)
    for file in ("zero1", "zero2")
    for precision in ("fp32", "bf16", "fp16")
    for sums in (False, True)
}
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
BROKEN = 3  # of six steps with and without `FlatGradients`; it has a NaN on the last rank


def settings(**changes: Any) -> PretrainSettings:
    train: dict[str, Any] = {"steps": 10, "global_batch_size": BATCH, "negatives_group": GROUP}
    train |= {"learning_rate": 0.01, "micro_batch_size": GROUP, "precision": "fp32"}
    train |= {"skip_nonfinite": 1} | changes
    values = {"model": {"checkpoint": "m"}, "data": {"corpus": "c"}, "objective": {"so": 2}}
    return PretrainSettings.model_validate(values | {"train": train})


def micro_batch(number: int, size: int = GROUP) -> MicroBatch:
    """Returns `size` examples, part-major: the same examples for any size that divides the step."""
    first = number * size // GROUP
    groups = [random_inputs(first + n, 3 * GROUP, facets=2) for n in range(size // GROUP)]
    parts = {name: [inputs[name].chunk(3) for inputs in groups] for name in groups[0]}
    inputs = {
        name: torch.cat([chunks[p] for p in range(3) for chunks in found])
        for name, found in parts.items()
    }
    rows = torch.arange(size)[:, None] + number * size
    windows = torch.nn.functional.pad(rows, (0, 2))  # window 0 of each row, in epoch 0
    return micro_batch_of(inputs, 3, number, windows)


def batches_of(step: int, size: int) -> list[MicroBatch]:
    """Returns this rank's micro-batches of a step."""
    slots = range(dist.get_rank(), BATCH // size, dist.get_world_size())
    return [micro_batch(step * BATCH // size + slot, size) for slot in slots]


def make_engine(deepspeed: Any, case: Case, **more: Any) -> tuple[Engine, PretrainSettings]:
    """Returns the engine of a case and its settings; `more` are keys of the DeepSpeed JSON."""
    chosen = settings(**case.changes)
    train, precision = chosen.train, case.changes.get("precision", "fp32")
    ranks = dist.get_world_size()
    config = complete_deepspeed_config(
        load_deepspeed_config(f"ds_configs/{case.file}.json"),
        micro_batch_size=int(train.micro_batch_size),
        accumulation=train.passes(ranks),
        world_size=ranks,
        max_grad_norm=train.max_grad_norm,
        precision=precision,
    )
    config |= more
    if case.file == "zero3":  # nothing so small would be shared out
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    model = tiny_model(**case.model)
    return Engine(deepspeed, model, config, chosen), chosen


def run(deepspeed: Any, case: Case) -> dict[str, Any]:
    """Makes three steps; one whose loss is infinite on the last rank; a good one; and one more that is broken."""
    engine, chosen = make_engine(deepspeed, case)
    size = int(chosen.train.micro_batch_size)
    guard = NonFiniteGuard(engine, chosen.train.skip_nonfinite)

    def step(number: int, broken: bool = False) -> dict[str, float]:
        batches = batches_of(number, size)
        if broken and dist.get_rank() == dist.get_world_size() - 1:
            # The squared error is infinite, but its gradient would be finite.
            batches[0].inputs["tfidf_labels"][0, 0] = 1e30
        terms = train_step(engine, chosen, batches, number, measured=number % 2 == 0)
        sums, updated = MetricSums(), guard.check_step(number, batches, terms)
        add_terms(sums, batches, terms, updated)
        return means(sums.totals(engine.device))

    @torch.no_grad()
    def loss() -> float:
        with engine.evaluation():
            return float(engine.deepspeed(**micro_batch(99).to(engine.device).inputs).loss)

    found: dict[str, Any] = {"losses": [step(number) for number in range(STEPS)]}
    found["levels"] = [loss()]
    found["skipped"] = sorted(step(STEPS, broken=True))
    found["levels"].append(loss())
    step(STEPS + 1)
    found["levels"].append(loss())
    try:
        step(STEPS + 2, broken=True)
    except FloatingPointError as error:
        found["stopped"] = str(error)
    found["levels"].append(loss())
    return found | {"accumulated": str(engine.deepspeed.get_data_types()[1])}


def six_steps(deepspeed: Any, name: str, own_path: bool) -> dict[str, Any]:
    """Returns what six steps leave, with DeepSpeed's own path or ours."""
    file, precision, sums = FLAT[name]
    if own_path and sums and file == "zero1" and precision != "fp32":
        file = "zero2"  # DeepSpeed's ZeRO 1 sums in 16 bits; without other ranks it means the same
    size = GROUP if sums else BATCH // dist.get_world_size()
    changes = {"precision": precision, "micro_batch_size": size, "max_grad_norm": 0.5}
    more: dict[str, Any] = SUMS if sums and file == "zero2" else {}
    if precision == "fp16":
        more = more | {"fp16": {"enabled": True, "initial_scale_power": 8}}
    why = "for the test" if own_path else ""
    with patch("pretrain.engine.why_not_flat", return_value=why):
        engine, chosen = make_engine(deepspeed, Case(file, changes), **more)
    guard, norms, losses = NonFiniteGuard(engine, 3), list[float](), list[float]()
    for step in range(6):
        batches = batches_of(step, size)
        if step == BROKEN and dist.get_rank() == dist.get_world_size() - 1:
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
    deepspeed, results = prepare_deepspeed(), dict[str, Any]()
    accelerator = type(deepspeed.accelerator.get_accelerator())
    accelerator.is_fp16_supported = lambda self: True  # torch computes in it, slowly
    for name in sys.argv[2:]:
        if dist.get_rank() == dist.get_world_size() - 1:
            print_stderr(f"case {name}")
        if name in CASES:
            results[name] = run(deepspeed, CASES[name])
        elif name in FLAT:
            ours, theirs = (six_steps(deepspeed, name, own) for own in (False, True))
            differs = [key for key in ours if not torch.equal(ours[key], theirs[key])]
            results[name] = {"differs": differs, "skipped": ours["skipped"].tolist()}
        else:
            files = ("zero1", "zero2")
            results[name] = {file: operators_beside_the_model(deepspeed, file) for file in files}
    assert "torch._inductor.lowering" not in sys.modules, "torch's compiler was imported"
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    leave_deepspeed()
    os._exit(0)  # gloo's threads may outlive the interpreter and abort the process


if __name__ == "__main__":
    main()
