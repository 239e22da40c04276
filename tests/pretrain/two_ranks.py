"""Makes a few optimizer steps in each named case, all in one launch of test_ds_configs.py."""

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from multicls.deepspeed_config import complete_deepspeed_config, load_deepspeed_config
from multicls.distributed import leave_deepspeed, prepare_deepspeed
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
    "zero2_negatives_of_ranks": Case("zero2", {"negatives": "ranks"}),
    "zero3_negatives_of_ranks": Case("zero3", {"negatives": "ranks"}),
    "zero1_negatives_recorded": Case("zero1", {"negatives": "ranks", "graph": True}),
    "zero3_activation_checkpointing": Case("zero3", {"activation_checkpointing": True}),
    "zero2_modernbert": Case("zero2", model={"encoder": "modernbert"}),
    "zero3_deberta-v2": Case("zero3", model={"encoder": "deberta-v2"}),
}


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


def make_engine(deepspeed: Any, case: Case, **more: Any) -> tuple[Engine, PretrainSettings]:
    """Returns the engine of a case and its settings; `more` are keys of the DeepSpeed JSON."""
    chosen = settings(**case.changes)
    train, precision = chosen.train, case.changes.get("precision", "fp32")
    ranks = torch.distributed.get_world_size()
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
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    size = int(chosen.train.micro_batch_size)
    guard = NonFiniteGuard(engine, chosen.train.skip_nonfinite)

    def step(number: int, broken: bool = False) -> dict[str, float]:
        slots = range(rank, BATCH // size, ranks)
        batches = [micro_batch(number * BATCH // size + slot, size) for slot in slots]
        if broken and rank == ranks - 1:
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


def main() -> None:
    deepspeed = prepare_deepspeed()
    results: dict[str, Any] = {}
    for name in sys.argv[2:]:
        results[name] = run(deepspeed, CASES[name])
    assert "torch._inductor.lowering" not in sys.modules, "torch's compiler was imported"
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    leave_deepspeed()
    os._exit(0)  # gloo's threads may outlive the interpreter and abort the process


if __name__ == "__main__":
    main()
