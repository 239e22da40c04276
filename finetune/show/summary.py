"""Sentences about a results folder: who leads and whether that can be told from chance, and what to know first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from finetune.show.tables import CONSTANT, error_of, number, units_text, with_error
from finetune.stats.pairs import PairTest, leaders
from finetune.stats.systems import Results, SystemResult


def headline(rows: Sequence[SystemResult], tests: Sequence[PairTest], by_selection: bool = True) -> list[str]:
    """Returns for each train size and selection which systems lead on which tasks, and what the tests support.

    Without `by_selection` rows of different selections are compared, too.
    """
    best = leaders(rows, by_selection)
    sentences = []
    for size, selection in dict.fromkeys((size, selection) for _, size, selection in best):
        here = [row for (_, *place), row in best.items() if place == [size, selection]]
        rivals = {row.task: [test for test in tests if row is test.a or row is test.b] for row in here}
        if any(rivals.values()):
            where = f"{size} train rows" + (f", selection {selection}" if len({key[2] for key in best}) > 1 else "")
            sentences.append(f"{where}: {_who_leads([row for row in here if rivals[row.task]])}. {_verdict(rivals)}")
    if not sentences:
        sentences = [f"{row.system.title} on {row.task}, {row.train_size} train rows: {row.metric} "
                     f"{with_error(row.estimate.mean, error_of(row))} ({units_text(row)})"
                     + ("." if math.isnan(row.constant) else f"; a {CONSTANT} has {number(row.constant)}.")
                     for row in rows]  # fmt: skip
    return sentences


def _who_leads(rows: Sequence[SystemResult]) -> str:
    tasks: dict[str, list[str]] = {}
    for row in rows:
        tasks.setdefault(row.system.title, []).append(row.task)
    first, *others = sorted(tasks, key=lambda name: -len(tasks[name]))
    sentence = f"{first} has the best mean on {words(tasks[first])}"
    return "; ".join([sentence, *(f"{name} on {words(tasks[name])}" for name in others)])


def _verdict(rivals: Mapping[str, Sequence[PairTest]]) -> str:
    """Returns for how many of the others each lead is supported by the corrected t-tests."""
    supported: dict[str, list[str]] = {}
    for task, tests in ((task, tests) for task, tests in rivals.items() if tests):
        if all(math.isnan(test.corrected) for test in tests):
            kind = "no test is possible, because one unit does not tell how much others would differ"
        elif not any(test.significant for test in tests):
            kind = "no difference can be told between the leader and any other system"
        else:
            beaten = sum(test.significant for test in tests)
            others = "every other system" if beaten == len(tests) else f"{beaten} of {len(tests)} others"
            kind = f"the lead over {others} is supported"
            if any("seeds only" in test.comparison.units for test in tests if test.comparison and test.significant):
                kind += " (for other seeds; this says nothing about other pretrainings or draws of rows)"
        supported.setdefault(kind, []).append(task)
    order = sorted(supported, key=lambda kind: ("is supported" not in kind, "every" not in kind))
    parts = [f"on {words(supported[kind])} {kind}" for kind in order]
    return "Corrected for the number of tests: " + "; ".join(parts) + "."


def warnings(results: Results) -> list[str]:
    """Returns what a reader has to know before the numbers: constant answers, missing runs, mixed versions, notes."""
    found = _as_good_as_constant(results.rows)
    found += [f"Planned, but without a finished run: {'; '.join(results.never_run)}."] if results.never_run else []
    if results.mixed:
        found.append(f"Averaged over different environments: {'; '.join(results.mixed)}.")
    said: dict[str, list[SystemResult]] = {}
    for row in results.rows:
        for text in dict.fromkeys([*row.problems, *row.notes]):
            said.setdefault(text, []).append(row)
    return found + [f"{text.rstrip('.')} ({_places(rows, results.rows)})." for text, rows in said.items()]


def _as_good_as_constant(rows: Sequence[SystemResult]) -> list[str]:
    """Returns a sentence for each task and size where systems are no better than a constant answer."""
    sentences = []
    for task, size in dict.fromkeys((row.task, row.train_size) for row in rows):
        here = [row for row in rows if (row.task, row.train_size) == (task, size)]
        found = [row for row in here if row.estimate.mean - np.nan_to_num(error_of(row)) <= row.constant]
        if not found:
            continue
        names = "every system" if len(found) == len(here) > 1 else "; ".join(row.system.title for row in found)
        sentences.append(f"{task}, {size} train rows: a {CONSTANT} ({number(found[0].constant)}) does as well, within "
                         f"one standard error, as {names}.")  # fmt: skip
    return sentences


def _places(rows: Sequence[SystemResult], everything: Sequence[SystemResult]) -> str:
    """Returns which rows a note is about, in a few words."""
    if len(rows) == len(everything):
        return "all results"
    tasks = dict.fromkeys(row.task for row in rows)
    if len(rows) == sum(row.task in tasks for row in everything):
        return ", ".join(tasks)
    names = [f"{row.system.title} on {row.task}, {row.train_size} train rows" for row in rows]
    return "; ".join(names[:2]) + (f"; and {len(names) - 2} others" if len(names) > 2 else "")


def words(names: Sequence[str]) -> str:
    """Returns "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
