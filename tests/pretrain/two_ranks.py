"""Makes a few optimizer steps under each DeepSpeed file, all in one launch of test_ds_configs.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from multicls import MultiClsBertConfig, MultiClsBertForPreTraining
from multicls.distributed import leave_deepspeed, prepare_deepspeed
from multicls.ds_config import load_ds_config, resolve_ds_config
from multicls.modeling_multicls import mcqt_loss, part_scores
from pretrain.batches import MicroBatch, RankSampler
from pretrain.engine import build_engine
from pretrain.gather import gather_rows
from pretrain.metrics import means
from pretrain.settings import PretrainSettings, batch_arithmetic
from pretrain.stopping import StopRequest
from pretrain.training import Trainer
from tests.pretrain.tools import micro_batch_of

STEPS, GROUP, BATCH, LENGTH, FACETS = 3, 3, 12, 16, 2  # BATCH examples a step, in groups of GROUP


class Case(NamedTuple):
    """A DeepSpeed file and the settings of `train` that it runs with."""

    file: str
    changes: dict[str, Any] = {}  # noqa: RUF012 (never changed)


FILES = ("zero0", "zero1", "zero2", "zero3", "zero2_offload")
CASES = {
    **{name: Case(name) for name in FILES},
    **{f"{name}_bf16": Case(name, {"precision": "bf16"}) for name in FILES},
    "zero2_two_groups_a_pass": Case("zero2", {"micro_batch_size": 2 * GROUP}),
    "zero3_activation_checkpointing": Case("zero3", {"activation_checkpointing": True}),
    "zero2_gather": Case("zero2", {"gather_negatives": True}),
}


def settings(**changes: Any) -> PretrainSettings:
    train: dict[str, Any] = {"steps": 10, "global_batch_size": BATCH, "negatives_group": GROUP, "learning_rate": 0.01}
    train |= {"micro_batch_size": GROUP, "precision": "fp32", "skip_nonfinite": 1} | changes
    return PretrainSettings.model_validate({"model": {"checkpoint": "m"}, "data": {"corpus": "c"}, "train": train})


def model() -> MultiClsBertForPreTraining:
    torch.manual_seed(1)
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = MultiClsBertConfig(**sizes, intermediate_size=32, max_position_embeddings=LENGTH, num_facets=FACETS)  # type: ignore[arg-type]
    return MultiClsBertForPreTraining(config)


def micro_batch(number: int, size: int = GROUP) -> MicroBatch:
    """Returns `size` examples, part-major: the same examples for any size that divides the step."""
    groups = [group(number * size // GROUP + place) for place in range(size // GROUP)]
    parts = {name: [inputs[name].chunk(3) for inputs in groups] for name in groups[0]}
    inputs = {name: torch.cat([chunks[p] for p in range(3) for chunks in found]) for name, found in parts.items()}
    examples = torch.arange(size) + number * size
    return micro_batch_of(inputs, 3, number, torch.stack([torch.zeros_like(examples), examples], dim=1))


def group(number: int) -> dict[str, Tensor]:
    """Returns random text with random padding; each loss has another number of terms than in other groups."""
    generator = torch.Generator().manual_seed(number)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    rows = 3 * GROUP
    ids = draw(5, 60, rows, LENGTH)
    mask = (torch.arange(LENGTH) < draw(LENGTH // 2, LENGTH + 1, rows, 1)).long()
    masked = (draw(0, 5, rows, LENGTH) == 0) & mask.bool() & (torch.arange(LENGTH) > FACETS)
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "token_type_ids": torch.zeros_like(ids),
        "labels": ids.where(masked, -100),
        "tfidf_labels": torch.rand(rows, LENGTH - FACETS, generator=generator) * 10,
        "so_labels": draw(0, 2, rows),
    }


def run(deepspeed: Any, case: Case) -> dict[str, Any]:
    """Makes three steps; one whose loss is infinite on the last rank; a good one; and one more that is broken."""
    chosen = settings(**case.changes)
    precision: Any = chosen.train.precision
    ranks = torch.distributed.get_world_size()
    arithmetic = batch_arithmetic(chosen, ranks)
    resolved = resolve_ds_config(
        load_ds_config(f"ds_configs/{case.file}.json"), where="", precision=precision, **arithmetic
    )
    if case.file == "zero3":
        resolved["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # or nothing so small is shared out
    engine = build_engine(deepspeed, model(), chosen, resolved)
    nothing: Any = None
    trainer = Trainer(engine, chosen, nothing, nothing, nothing, nothing, StopRequest())
    size = int(chosen.train.micro_batch_size)

    def step(number: int, broken: bool = False) -> dict[str, float]:
        batches = [micro_batch(n, size) for n in RankSampler(BATCH // size, trainer.rank, ranks).numbers([number])]
        if broken and trainer.rank == ranks - 1:
            # The squared error is infinite, but its gradient would be finite.
            batches[0].inputs["tfidf_labels"][0, 0] = 1e30
        return means(trainer.train_step(batches, number, measured=number % 2 == 0).totals(trainer.device))

    @torch.no_grad()
    def loss() -> float:
        engine.eval()
        value = float(engine(**micro_batch(99).to(trainer.device).inputs).loss)
        engine.train()
        return value

    losses = [step(number) for number in range(STEPS)]
    levels = [loss()]
    step(STEPS, broken=True)
    levels.append(loss())
    step(STEPS + 1)
    levels.append(loss())
    try:
        step(STEPS + 2, broken=True)
        stopped = ""
    except FloatingPointError as error:
        stopped = str(error)
    return {"losses": losses, "levels": [*levels, loss()], "stopped": stopped}


def gathered(parts: int) -> dict[str, Any]:
    """Returns MCQT over the facets of all ranks: the mean of their losses, and the gradients of all rows, part-major.

    Each rank has two groups; a group is compared with the same group of the other ranks.
    """
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rows = facets(parts, ranks)[:, :, rank].flatten(0, 2).requires_grad_()
    loss = mcqt_loss(part_scores(rows, parts, 0.1, GROUP, gather_rows), GROUP)
    loss.backward()
    gradients = [torch.empty_like(rows) for _ in range(ranks)]
    torch.distributed.all_gather(gradients, rows.grad)
    total = loss.detach()
    torch.distributed.all_reduce(total)
    by_part = torch.stack(gradients).unflatten(1, (parts, 2, GROUP)).movedim(0, 2)
    return {"loss": float(total) / ranks, "gradient": by_part.flatten().tolist()}


def facets(parts: int, ranks: int) -> Tensor:
    """Returns facet embeddings (parts, 2 groups, ranks, GROUP, FACETS, 8)."""
    generator = torch.Generator().manual_seed(parts)
    return torch.randn(parts, 2, ranks, GROUP, FACETS, 8, dtype=torch.float64, generator=generator)


def main() -> None:
    deepspeed = prepare_deepspeed()
    results: dict[str, Any] = {"gathered": {parts: gathered(parts) for parts in (2, 3)}}
    for name, case in CASES.items():
        if torch.distributed.get_world_size() == 1 and "gather_negatives" in case.changes:
            continue
        print(f"case {name}", file=sys.stderr, flush=True)
        results[name] = run(deepspeed, case)
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    leave_deepspeed()


if __name__ == "__main__":
    main()
