"""Statistics of fine-tuning: coverage, false positives and power of the tests in simulated worlds.

    python benchmarks/run.py finetune_statistics [--worlds 10000] [--pretrainings 1 2 4] [--draws 1 3] [--seed_sd 2]

A score is the sum of independent normal effects: the system's mean + pretraining + draw of train rows + system x draw +
pretraining x draw + seed. Variances are multiples of the seed variance: pretraining 0.5, 1 and 2; draw 1; system x draw
0.25 or none; pretraining x draw 0.25. All systems see the same draws. Two heads on the same pretrainings share half of
the variance of pretraining and of pretraining x draw; two systems of unrelated pretrainings share none.

What is simulated is what runs: `mean_of_cells`, `difference_of_cells` and `sign_flip_p` of `finetune.stats`. With one
draw the true value is the mean at that draw, with one pretraining the mean of that pretraining.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pydantic import Field

from benchmarks.compare import Bar, Report
from finetune.stats.comparisons import difference_of_cells, least_sign_flip_p, sign_flip_p, sign_flip_units
from finetune.stats.estimates import Array, StudentMean, mean_of_cells
from multicls.errors import UserError
from multicls.settings import Settings

LEVEL = 0.05
POINTS = (1, 2, 4)  # true differences whose power is reported
PRETRAINING = (0.5, 1.0, 2.0)  # variances between pretrainings
SYSTEM_BY_DRAW = (0.25, 0.0)
PRETRAINING_BY_DRAW = 0.25
SHARED = 0.5  # share of the two pretraining variances that two heads on one pretraining have in common
WORLD = ("pretrainings", "draws", "pretraining variance", "system x draw")
MEAN, DIFFERENCE, T_TEST = PRECISE = ("covers mean, %", "covers difference, %", "false positives: t, %")
FLIP = "sign-flip, % (least p)"
NAIVE_MEAN, NAIVE_TEST = "naive: covers mean, %", "naive: false positives, %"
HARD = ((2, 3, 8.0, 0.0), (4, 3, 8.0, 0.0), (4, 3, 0.5, 16.0), (4, 2, 0.5, 16.0))


@dataclass(frozen=True)
class World:
    """How the scores of two systems come about; variances in multiples of the seed variance."""

    paired: bool  # two heads on the same pretrainings
    pretrainings: int  # number of them, of each system
    draws: int  # number of draws of train rows
    pretraining: float  # variance between pretrainings
    system_by_draw: float  # variance of what a draw does to one system only
    draw: float = 1.0  # variance between draws
    seeds: int = 4  # number of fine-tuning seeds of each cell
    seed_sd: float = 2.0  # standard deviation over seeds, in points


class Scores(NamedTuple):
    """Scores of both systems (N, P, D, S) in N worlds without a difference, and what they estimate (N,)."""

    a: Array
    b: Array
    mean: Array
    difference: Array


def draw_scores(world: World, worlds: int) -> Scores:
    """Returns simulated scores; the same world gives the same numbers."""
    rng = np.random.default_rng(0)
    models, draws, seeds = world.pretrainings, world.draws, world.seeds

    def effect(variance: float, *shape: int) -> Array:
        return world.seed_sd * variance**0.5 * rng.normal(size=(worlds, *shape))

    shared = SHARED if world.paired else 0.0
    common = [effect(shared * world.pretraining, models, 1, 1), effect(shared * PRETRAINING_BY_DRAW, models, draws, 1)]
    draw = effect(world.draw, 1, draws, 1)
    scores, targets = [], []
    for _ in "ab":
        model = common[0] + effect((1 - shared) * world.pretraining, models, 1, 1)
        cell = common[1] + effect((1 - shared) * PRETRAINING_BY_DRAW, models, draws, 1)
        of_draw = draw + effect(world.system_by_draw, 1, draws, 1)
        scores.append(model + of_draw + cell + effect(1.0, models, draws, seeds))
        at_draw, of_model = of_draw[:, 0, 0, 0] * (draws == 1), model[:, 0, 0, 0] * (models == 1)
        targets.append(at_draw + of_model)
    return Scores(scores[0], scores[1], targets[0], targets[0] - targets[1])


def difference_of(a: Array, b: Array, paired: bool) -> StudentMean:
    """Returns the difference of two tables of cells (N, P, D), as `compare` takes it."""
    one_each = a.shape[-2] == b.shape[-2] == 1
    return mean_of_cells(a - b) if paired or one_each else difference_of_cells(a, b)


def measure(world: World, worlds: int) -> dict[str, float]:
    """Returns what the intervals and tests do in a number of worlds: shares of them in percent, by heading.

    That of the sign-flip test is nan where the test does not apply.
    """
    scores = draw_scores(world, worlds)
    a, b = scores.a.mean(axis=-1), scores.b.mean(axis=-1)
    found = difference_of(a, b, world.paired)
    every_run = [side.reshape(worlds, -1, 1) for side in (scores.a, scores.b)]
    flip = np.array(np.nan)
    if world.paired or world.pretrainings == 1:
        units = sign_flip_units(a - b - scores.difference[:, None, None])
        flip = flip if units is None else sign_flip_p(units) < LEVEL
    happened = {
        MEAN: _covers(mean_of_cells(a), scores.mean),
        DIFFERENCE: _covers(found, scores.difference),
        T_TEST: _differs(found, scores.difference),
        FLIP: flip,
        **{f"power at {points}, %": _differs(found, scores.difference - points) for points in POINTS},
        NAIVE_MEAN: _covers(mean_of_cells(every_run[0]), scores.mean),
        NAIVE_TEST: _differs(difference_of(every_run[0], every_run[1], world.paired), scores.difference),
    }
    return {heading: float(100 * array.mean()) for heading, array in happened.items()}


def _covers(found: StudentMean, truth: Array) -> Array:
    low, high = found.interval
    return (low <= truth) & (truth <= high)


def _differs(found: StudentMean, truth: Array) -> Array:
    """Returns where the t-test finds a difference beyond `truth` (N,)."""
    return found._replace(mean=found.mean - truth).p_value() < LEVEL


def all_worlds(pretrainings: Sequence[int], draws: Sequence[int], seeds: int, seed_sd: float) -> list[World]:
    """Returns the worlds of the tables.

    Draw effects on one system only matter with several draws, variances between pretrainings with several pretrainings.
    """
    worlds = []
    for paired, models, rows in product((True, False), pretrainings, draws):
        if models == rows == 1:
            continue
        variances = PRETRAINING if models > 1 else PRETRAINING[1:2]
        for by_draw, variance in product(SYSTEM_BY_DRAW if rows > 1 else SYSTEM_BY_DRAW[:1], variances):
            worlds.append(World(paired, models, rows, variance, by_draw, seeds=seeds, seed_sd=seed_sd))
    if not worlds:
        raise UserError("--pretrainings 1 --draws 1: nothing to simulate; give several of one of them.")
    return worlds


def table_row(world: World, found: Mapping[str, float]) -> list[Any]:
    """Returns a line of the tables, with the headings of `WORLD` and `measure`."""
    cells = {name: f"{value:.{int(name in PRECISE)}f}" for name, value in found.items()}
    least = least_sign_flip_p(world.pretrainings * world.draws)
    cells[FLIP] = "-" if np.isnan(found[FLIP]) else f"{found[FLIP]:.1f} ({least:g})"
    return [world.pretrainings, world.draws, f"{world.pretraining:g}", f"{world.system_by_draw:g}", *cells.values()]


def add_bars(report: Report, measured: pd.DataFrame) -> None:
    """Adds the extremes over all worlds, with their bars."""
    least, greatest = measured.min(), measured.max()
    for name, heading in (("the mean", MEAN), ("the difference", DIFFERENCE)):
        report.figure(f"least coverage of the 95 % interval of {name}, %", least[heading], Bar(">=", 93))
        report.figure(f"greatest coverage of the 95 % interval of {name}, %", greatest[heading], Bar("<=", 98))
    positives = "greatest rate of false positives"
    report.figure(f"{positives} of the t-test at 5 %, %", greatest[T_TEST], Bar("<=", 6))
    flip = float(np.nanmax([0.0, greatest[FLIP]]))
    report.figure(f"{positives} of the sign-flip test at 5 %, %", flip, Bar("<=", 6))
    report.figure("least coverage if runs count as units, %", least[NAIVE_MEAN])
    report.figure(f"{positives} if runs count as units, %", greatest[NAIVE_TEST])


def add_hard_worlds(report: Report, world: World, worlds: int) -> None:
    """Adds the coverage where one source of noise is far above the other, which no bar is set for."""
    rows = []
    for models, draws, variance, draw in HARD:
        hard = replace(world, pretrainings=models, draws=draws, pretraining=variance, draw=draw, system_by_draw=0.0)
        rows.append([models, draws, f"{variance:g}", f"{draw:g}", f"{measure(hard, worlds)[MEAN]:.1f}"])
    columns = [*WORLD[:3], "draw variance", MEAN]
    report.table("Beyond the bars: one source of noise far above the other", columns, rows)


class Options(Settings):
    """Options of the benchmark."""

    worlds: int = Field(10_000, description="simulated data sets of each kind")
    pretrainings: list[int] = Field([1, 2, 4], description="pretrainings of each system")
    draws: list[int] = Field([1, 3], description="draws of train rows")
    seeds: int = Field(4, description="fine-tuning seeds of each pretraining and draw")
    seed_sd: float = Field(2.0, description="standard deviation over seeds, in points")


def main(args: Options, argv: Sequence[str]) -> None:
    """Simulates all worlds and writes the tables."""
    worlds = all_worlds(args.pretrainings, args.draws, args.seeds, args.seed_sd)
    measured = {world: measure(world, args.worlds) for world in worlds}
    report = Report("finetune_statistics", "Statistics of fine-tuning in simulated worlds", argv)
    add_bars(report, pd.DataFrame(measured.values()))
    columns = [*WORLD, *measured[worlds[0]]]
    for paired, title in ((True, "Two heads on the same pretrainings"), (False, "Two systems, unrelated pretrainings")):
        rows = [table_row(world, found) for world, found in measured.items() if world.paired == paired]
        report.table(f"{title}, seed standard deviation {args.seed_sd:g} points", columns, rows)
    add_hard_worlds(report, worlds[0], args.worlds)
    report.write()
