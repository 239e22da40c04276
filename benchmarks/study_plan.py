"""The plan of the study: its arms and systems, and how a budget of time becomes tokens, seeds and an evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from multicls.errors import UserError
from multicls.settings import Settings
from multicls.words import duration

BASE = "base"  # name of the untouched model in tables
EVALUATIONS = 5  # validations of a pretraining, beside the one before its first step
MOST_SEEDS = 4  # pretrainings of an arm, as in the paper; after these come more passes over the text
RESERVE = 0.1  # share of the budget that is kept for what was not foreseen
ENSEMBLE = 5  # members


class Arm(NamedTuple):
    """A way to continue the pretraining."""

    recipe: str  # on top of base.yaml; "" for base.yaml alone
    parts: int  # sequences of an example
    facets: int  # of a sequence
    systems: tuple[str, ...]  # names in `SYSTEMS` that make sense for its models


ARMS = {
    "mlm": Arm("mlm_only", 3, 0, ("cls", "mean")),
    "mtl": Arm("mtl", 2, 0, ("cls", "mean", "isobn")),
    "k1": Arm("k1", 3, 1, ("multicls", "mean")),
    "k5": Arm("", 3, 5, ("multicls", "mean", "isobn/multicls")),
    "k5_no_hard": Arm("no_hard_negative", 2, 5, ("multicls", "mean")),
    "k5_no_layers": Arm("no_facet_layers", 3, 5, ("multicls", "mean")),
}
MEASURED_ARMS = ("k5", "mtl")  # with facets and without: the slower of the two stands for all
SPECIAL = 3  # tokens of a sequence beside text and facets: [CLS], and [SEP] after each of its two segments
BASE_SYSTEMS = ("cls", "mean", "isobn")
SYSTEMS: dict[str, dict[str, str]] = {  # name -> settings of finetune/run.py
    **{name: {"head": name} for name in ("cls", "mean", "multicls", "isobn")},
    "isobn/multicls": {"head": "isobn", "pooling": "multicls"},
}
ENSEMBLE_SYSTEMS = {"cls": [BASE, "mlm"], "multicls": ["k5"]}  # systems -> models whose runs form ensembles
TASKS = ("cola", "sst2", "mrpc", "stsb", "rte", "cb", "copa", "wic")
FOUR_TASKS = ("cola", "sst2", "stsb", "copa")


class Pretraining(Settings):
    """The length of each arm: equal tokens of text, in steps of equally many sequences."""

    tokens: float
    seeds: tuple[int, ...]
    sequences: int = 30
    seq_length: int = 128
    learning_rate: float = 5e-5
    warmup_ratio: float = 0.05
    eval_every: int = 1
    eval_examples: int = 120


class Evaluation(Settings):
    """The grid of fine-tuning runs, and the smaller one of the ensembles."""

    level: str
    tasks: tuple[str, ...] = TASKS
    train_sizes: tuple[int, ...] = (100, 1000)
    learning_rates: tuple[float, ...] = (5e-5, 1e-4, 2e-4)
    draws: tuple[int, ...] = (1, 2, 3)
    seeds: tuple[int, ...] = (1, 2)
    epochs: int = 20
    max_length: int = 128
    ensemble_tasks: tuple[str, ...] = ("cola", "sst2", "mrpc", "rte")
    ensemble_rate: float = 1e-4

    def num_runs(self, pretraining_seeds: int) -> int:
        """Returns the number of fine-tuning runs for each task and train size, ensembles left out."""
        models = len(BASE_SYSTEMS) + pretraining_seeds * sum(len(arm.systems) for arm in ARMS.values())
        return models * len(self.learning_rates) * len(self.draws) * len(self.seeds)


# From the largest to the smallest. A budget gets the first that fits.
LADDER = (
    Evaluation(level="full"),
    Evaluation(level="two learning rates", learning_rates=(5e-5, 2e-4)),
    Evaluation(level="100 rows, three learning rates", train_sizes=(100,)),
    Evaluation(level="100 rows, two learning rates", train_sizes=(100,), learning_rates=(5e-5, 2e-4)),
    Evaluation(level="100 rows, one learning rate", train_sizes=(100,), learning_rates=(1e-4,)),
    Evaluation(level="100 rows, one learning rate, one seed", train_sizes=(100,), learning_rates=(1e-4,), seeds=(1,)),
    Evaluation(level="100 rows, one learning rate, one seed, two draws", train_sizes=(100,), learning_rates=(1e-4,),
               seeds=(1,), draws=(1, 2), ensemble_tasks=("sst2", "rte")),
    Evaluation(level="100 rows, one learning rate, one seed, two draws, four tasks", train_sizes=(100,),
               learning_rates=(1e-4,), seeds=(1,), draws=(1, 2), tasks=FOUR_TASKS, ensemble_tasks=("sst2",)),
)  # fmt: skip
SMOKE = (
    Pretraining(tokens=100_000, seeds=(1, 2), sequences=12, seq_length=64, eval_every=40, eval_examples=60),
    Evaluation(level="smoke", train_sizes=(100,), learning_rates=(1e-4,), seeds=(1,), draws=(1, 2), epochs=4,
               tasks=FOUR_TASKS, ensemble_tasks=("sst2",)),
)  # fmt: skip


class Measured(NamedTuple):
    """Seconds with `Plan.jobs` processes side by side, each of which takes so long."""

    pretrain_start: float  # what a pretraining takes beside its steps
    step: float  # of the slowest arm
    step_tokens: float  # tokens of text in it
    grid_start: float
    runs: dict[tuple[int, str], float]  # a fine-tuning run, by train size and task


class Plan(Settings):
    """All decisions of a study, in STUDY/plan.json."""

    size: Literal["smoke"] | None
    budget: float | None  # seconds
    device: Literal["cpu", "cuda"]
    hardware: str
    jobs: int  # processes side by side
    base: str
    base_name: str
    corpus: str
    data: str
    one_pass: float  # tokens of text to train on in the corpus
    pretraining: Pretraining
    evaluation: Evaluation
    expected: dict[str, float]  # seconds of each stage, if they were measured
    made: str  # date

    def words(self) -> list[str]:
        """Returns the decisions as sentences."""
        train, check = self.pretraining, self.evaluation
        runs = check.num_runs(len(train.seeds)) * len(check.tasks) * len(check.train_sizes)
        size = f"budget {duration(self.budget)}" if self.budget else f"size {self.size}"
        lines = [
            f"{size} on {self.hardware}, {self.jobs} processes side by side; base model: {self.base_name}",
            f"pretraining: {len(ARMS)} arms ({', '.join(ARMS)}) x {len(train.seeds)} seeds x {train.tokens:,.0f} "
            f"tokens ({train.tokens / self.one_pass:.2g} passes), {train.sequences} sequences of {train.seq_length} a "
            f"step, peak learning rate {train.learning_rate:g}",
            f"evaluation, {check.level}: {len(check.tasks)} tasks x {'/'.join(map(str, check.train_sizes))} rows x "
            f"{len(check.draws)} draws x {len(check.seeds)} seeds x {len(check.learning_rates)} learning rates, "
            f"{check.epochs} epochs: {runs:,} runs; ensembles of {ENSEMBLE} on {', '.join(check.ensemble_tasks)}",
        ]
        expected = ", ".join(f"{duration(seconds)} of {stage}" for stage, seconds in self.expected.items())
        return lines + [f"expected: {expected}"] * bool(expected)


def num_members() -> int:
    """Returns the number of fine-tuning runs for the ensembles of a task."""
    return ENSEMBLE * sum(map(len, ENSEMBLE_SYSTEMS.values()))


def pretraining_seconds(measured: Measured, tokens: float, seeds: int, jobs: int) -> float:
    """Returns the seconds that all pretrainings take, `jobs` at a time."""
    return _rounds(seeds, jobs) * (measured.pretrain_start + measured.step * tokens / measured.step_tokens)


def _rounds(seeds: int, jobs: int) -> int:
    return math.ceil(seeds * len(ARMS) / jobs)


def evaluation_seconds(measured: Measured, evaluation: Evaluation, seeds: int, jobs: int) -> float:
    """Returns the seconds that all fine-tuning runs take, `jobs` at a time."""
    each = evaluation.num_runs(seeds)
    seconds = sum(each * measured.runs[size, task] for size in evaluation.train_sizes for task in evaluation.tasks)
    least = evaluation.train_sizes[0]
    seconds += sum(num_members() * measured.runs[least, task] for task in evaluation.ensemble_tasks)
    return seconds / jobs + 4 * measured.grid_start  # two grids of the ensembles, and the analysis of facets


def decide(
    measured: Measured, seconds: float, one_pass: float, jobs: int, pieces: int
) -> tuple[Pretraining, Evaluation, dict[str, float]]:
    """Returns the pretraining and the evaluation that a budget allows, about half of it for each, and their seconds.

    Tokens are capped at `one_pass` over the corpus until each arm has `MOST_SEEDS` pretrainings; more seeds come before
    more passes. `seconds` are left of the budget, and `pieces` is the number of calls, each of which starts anew.

    Raises:
        UserError: The budget is too small for the smallest evaluation.
    """
    usable = (1 - RESERVE) * seconds - pieces * max(measured.pretrain_start, measured.grid_start)

    def tokens_in(share: float, seeds: int) -> float:
        return (share / _rounds(seeds, jobs) - measured.pretrain_start) * measured.step_tokens / measured.step

    seeds = max([2, *(n for n in range(3, MOST_SEEDS + 1) if tokens_in(usable / 2, n) >= one_pass)])
    tokens = tokens_in(usable / 2, seeds)
    tokens = min(tokens, one_pass) if seeds < MOST_SEEDS else tokens
    steps, first = tokens / measured.step_tokens, pretraining_seconds(measured, tokens, seeds, jobs)
    levels = {level: evaluation_seconds(measured, level, seeds, jobs) for level in LADDER}
    evaluation = next((level for level, second in levels.items() if first + second <= usable), None)
    if evaluation is None or steps < EVALUATIONS:
        least = evaluation_seconds(measured, LADDER[-1], 2, jobs)
        least = max(least, pretraining_seconds(measured, EVALUATIONS * measured.step_tokens, 2, jobs))
        least = (2 * least + seconds - usable) / (1 - RESERVE)
        raise UserError(f"--budget: {duration(seconds)} that are left after the measurement do not suffice for two "
                        f"pretrainings of each arm and the smallest evaluation; about {duration(least)} would. Give "
                        "that, or --size smoke.")  # fmt: skip
    pretraining = Pretraining(tokens=round(tokens), seeds=tuple(range(1, seeds + 1)),
                              eval_every=max(1, int(steps // EVALUATIONS)))  # fmt: skip
    return pretraining, evaluation, {"pretraining": first, "evaluation": levels[evaluation]}


def grids(plan: Plan, models: Mapping[str, list[str]]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns the recipes of finetune/grid.py by name, in their order, each with its results folder.

    `models` has folders by name: `BASE`, and the pretrainings of each arm by ascending seed.
    """
    about = plan.evaluation
    of_models = {BASE: BASE_SYSTEMS} | {name: arm.systems for name, arm in ARMS.items()}
    users = {name: [model for model, systems in of_models.items() if name in systems] for name in SYSTEMS}

    def grid(users: Mapping[str, list[str]], train: dict[str, Any], **values: Any) -> dict[str, Any]:
        settings = {"max_length": about.max_length, "train": {"epochs": about.epochs, "snapshot_minutes": 1.0} | train}
        systems = {name: SYSTEMS[name] | {"models": using} for name, using in users.items()}
        return {"selections": ["holdout"], "settings": settings, "systems": systems} | values

    main = grid(
        users, {}, models=dict(models), tasks=about.tasks, train_sizes=about.train_sizes, seeds=about.seeds,
        data_seeds=about.draws, search={"train.learning_rate": about.learning_rates},
    )  # fmt: skip
    members = grid(
        ENSEMBLE_SYSTEMS, {"learning_rate": about.ensemble_rate}, tasks=about.ensemble_tasks,
        models={name: folders[:1] for name, folders in models.items()}, train_sizes=about.train_sizes[:1],
        seeds=list(range(1, ENSEMBLE + 1)), data_seeds=about.draws[:1],
    )  # fmt: skip
    facets = {"multicls": SYSTEMS["multicls"] | {"models": ["k5"], "save_model": True}}
    saved = members | {"seeds": [1], "systems": facets}
    return {"results": ("results", main), "facets": ("ensembles", saved), "ensembles": ("ensembles", members)}
