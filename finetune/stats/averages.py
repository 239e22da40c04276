"""Benchmark averages: one number for a system on all tasks of GLUE or SuperGLUE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from finetune.stats.estimates import estimate
from finetune.stats.systems import SystemResult

MAIN: tuple[str, ...] = ()  # the score that chooses the best evaluation
_PAIR = ("acc", "f1")

# Metrics averaged for a task's number, by benchmark. Paper: Multi-CLS BERT, section 3.1, whose two averages leave WNLI
# and ReCoRD out. Official: those of the leaderboards (Wang et al., 2019a, b).
BENCHMARKS: dict[str, dict[str, tuple[str, ...]]] = {
    "GLUE, paper's 8": dict.fromkeys(("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"), MAIN),
    "GLUE, official 9": {
        "cola": MAIN, "sst2": MAIN, "mrpc": _PAIR, "stsb": ("pearson", "spearman"), "qqp": _PAIR,
        "mnli": ("acc_m", "acc_mm"), "qnli": MAIN, "rte": MAIN, "wnli": MAIN,
    },
    "SuperGLUE, paper's 7": dict.fromkeys(("boolq", "cb", "copa", "multirc", "rte_superglue", "wic", "wsc"), MAIN),
    "SuperGLUE, official 8": dict.fromkeys(
        ("boolq", "cb", "copa", "multirc", "record", "rte_superglue", "wic", "wsc"), MAIN
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Average:
    """A benchmark's average of one system at one train size, in percent."""

    value: float = math.nan  # mean over tasks of each task's mean; nan if a task is missing
    error: float = math.nan  # standard error over pretrainings and draws; nan if the tasks do not have the same ones
    missing: list[str] = field(default_factory=list)  # tasks without a number
    partial: list[str] = field(default_factory=list)  # tasks with unfinished runs

    def __str__(self) -> str:
        """Returns the number with its error, or "-" for an incomplete benchmark."""
        if self.missing:
            return "-"
        error = "" if math.isnan(self.error) else f" ± {self.error:.2f}"
        return f"{self.value:.2f}{error}" + (f" (runs missing: {', '.join(self.partial)})" if self.partial else "")


def benchmark_average(results: Sequence[SystemResult], benchmark: str) -> Average:
    """Returns the average over the tasks of `BENCHMARKS[benchmark]`.

    The error is that of `estimate`, where the score of a pretraining, draw and seed is its average over all tasks.
    All `results` are those of one system at one train size.
    """
    tasks = BENCHMARKS[benchmark]
    here = {result.task: result for result in results if result.task in tasks}
    frames = {task: _scores(result, tasks[task]) for task, result in here.items()}
    if missing := [task for task in tasks if task not in frames or frames[task].isna().any()]:
        return Average(missing=missing)
    partial = [task for task, result in here.items() if len(result.records) < result.planned]
    columns = [scores.groupby(level=scores.index.names).mean() for scores in frames.values()]
    mean = float(np.mean([estimate(scores.reset_index()).mean for scores in columns]))
    if any(set(scores.index) != set(columns[0].index) for scores in columns):
        return Average(mean, partial=partial)
    return Average(mean, estimate((sum(columns[1:], columns[0]) / len(columns)).reset_index()).error, partial=partial)


def _scores(result: SystemResult, metrics: tuple[str, ...]) -> pd.Series:
    """Returns the score of each run in percent, indexed by pretraining, draw and seed; nan if a metric is missing."""
    scores = result.frame.set_index(["pretraining", "draw", "seed"])["score"]
    if metrics:  # one value a run, in the order of the frame
        values = [np.mean([record["scores"].get(name, math.nan) for name in metrics]) for record in result.records]
        scores = pd.Series(100 * np.array(values, dtype=float), scores.index, name="score")
    return scores
