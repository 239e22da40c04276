"""Every pair of systems that can be compared, tested and corrected together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from finetune.data.tasks import task_of
from finetune.stats.comparisons import FROM_COUNTS, Comparison, Interval, bootstrap_difference, compare, holm, parts_of
from finetune.stats.systems import SystemResult
from multicls.errors import UserError, did_you_mean

SIGNIFICANT = 0.05  # of a corrected p-value
MAX_SHOWN = 10  # pairs of systems; with more, tables hold each place's leader against the others


@dataclass(frozen=True)
class PairTest:
    """Two systems on one task at one train size."""

    a: SystemResult
    b: SystemResult
    comparison: Comparison | None = None  # difference A - B over pretrainings and draws; None if there is a problem
    problem: str = ""  # why the two cannot be compared
    corrected: float = math.nan  # p-value of the t-test, corrected by Holm's method for all tests of the report
    examples: Interval | None = None  # difference over dev examples, if it was asked for

    @property
    def significant(self) -> bool:
        """True if the corrected test tells the two apart."""
        return self.corrected < SIGNIFICANT


def compare_pairs(rows: Sequence[SystemResult], only: tuple[str, str] | None = None) -> list[PairTest]:
    """Returns the tests of all pairs of systems, corrected together.

    Args:
        rows: Systems of one task, train size and selection form pairs.
        only: Names of the two systems to compare instead, whatever their selection.
    """
    tests = []
    for a, b in _pairs(rows, only):
        try:
            tests.append(PairTest(a, b, compare(a.frame, b.frame)))
        except UserError as error:
            tests.append(PairTest(a, b, problem=str(error)))
    corrected = holm([test.comparison.p if test.comparison else math.nan for test in tests])
    return [replace(test, corrected=p) for test, p in zip(tests, corrected, strict=True)]


def _pairs(rows: Sequence[SystemResult], only: tuple[str, str] | None) -> Iterator[tuple[SystemResult, SystemResult]]:
    """Yields the pairs in the order of `only`, else the one with the better mean first."""
    for one, other in combinations(rows, 2):
        a, b = (one, other) if one.estimate.mean >= other.estimate.mean else (other, one)
        if (a.task, a.train_size, a.metric) == (b.task, b.train_size, b.metric):
            alike = a.system.selection == b.system.selection
            if (only is None and alike) or only == (a.system.title, b.system.title):
                yield a, b
            elif only == (b.system.title, a.system.title):
                yield b, a


def leaders(rows: Sequence[SystemResult], by_selection: bool = True) -> dict[tuple[str, str, str], SystemResult]:
    """Returns the row with the best mean of each task, train size and selection; without `by_selection` that is ""."""
    best: dict[tuple[str, str, str], SystemResult] = {}
    for row in rows:
        place = (row.task, row.train_size, row.system.selection if by_selection else "")
        if place not in best or row.estimate.mean > best[place].estimate.mean:
            best[place] = row
    return best


def pairs_to_show(tests: Sequence[PairTest], rows: Sequence[SystemResult]) -> list[PairTest]:
    """Returns all tests, or those of the leaders if there are more than `MAX_SHOWN` pairs of systems; leaders first."""
    best = {id(row) for row in leaders(rows).values()}
    everything = _count_pairs(tests) <= MAX_SHOWN
    return [test for test in tests if everything or id(test.a) in best or id(test.b) in best]


def _count_pairs(tests: Iterable[PairTest]) -> int:
    return len({frozenset((test.a.system.title, test.b.system.title)) for test in tests})


def add_examples(tests: Sequence[PairTest]) -> Iterator[PairTest]:
    """Yields the tests with their bootstrap over dev examples, where both sides have predictions.

    With more than two systems, metrics that take long (correlations, multi-label) are left out.
    """
    few = _count_pairs(tests) == 1
    for test in tests:
        fast = FROM_COUNTS.keys() >= set(parts_of(test.a.metric))
        a, b = (row.loaded[0] if few or fast else [] for row in (test.a, test.b))
        try:
            found = bootstrap_difference(task_of(test.a.records[0]), a, b) if a and b else None
            yield replace(test, examples=found)
        except UserError as error:  # other dev rows
            yield replace(test, problem=str(error))


def find_system(name: str, systems: Iterable[str]) -> str:
    """Returns the system called `name`, or the only one with all of its words.

    Raises:
        UserError: There is none, or more than one.
    """
    systems = list(dict.fromkeys(systems))
    if name in systems:
        return name
    wanted = set(name.replace(",", " ").split())
    found = [system for system in systems if wanted and wanted <= set(system.replace(",", " ").split())]
    if len(found) != 1:
        hint = f" Say which: {'; '.join(found)}." if found else did_you_mean(name, systems)
        count = f"{len(found)} systems" if found else "no system"
        raise UserError(f"--compare {name}: {count} of that name.{hint}")
    return found[0]
