"""Tables say how many runs and which units are behind a number, what a constant answer has, and what was chosen."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from finetune.show import tables
from finetune.show.summary import headline, warnings
from finetune.show.tables import Table, markdown
from finetune.stats.averages import BENCHMARKS, benchmark_average
from finetune.stats.pairs import add_examples, compare_pairs, pairs_to_show
from finetune.stats.systems import Candidate, Results, SystemResult
from tests.finetune.show.fake import fake_row


def text_of(table: Table) -> str:
    return markdown(table)


def test_markdown() -> None:
    table = Table("Title", pd.DataFrame({"a": ["1", "x|y"], "b": ["-", "2.5"]}), ["A note."], frozenset({(1, "b")}))
    assert markdown(table) == "## Title\n\n| a | b |\n| --- | --- |\n| 1 | - |\n| x/y | **2.5** |\n\nA note.\n"
    assert table.numeric == [False, True]


def test_results_name_the_units_of_their_error() -> None:
    rows = [
        fake_row("rte", "k5 cls", (0.5, 0.6, 0.7)),
        fake_row("rte", "k5 hire", (0.5, 0.6, 0.7, 0.8), pretrainings=2, planned=6),
    ]
    text = text_of(tables.results_table(rows))
    # standard deviation 10, over the root of three; t of 2 degrees of freedom is 4.303
    assert (
        "| 60.00 ± 5.77 | 35.16 to 84.84 | 60.00 | 52.70 | 3 | 3 seeds of one pretraining and draw (seeds only)" in text
    )
    assert (
        "| 65.00 ± 10.00 | -62.06 to 192.06 | 65.00 | 52.70 | 4 of 6: incomplete | 2 pretrainings at one draw" in text
    )
    assert "chosen" not in text.splitlines()[2], "nothing was chosen"


def test_side_by_side_has_the_constant_answer_and_the_best_in_bold() -> None:
    rows = [
        fake_row("rte", "k5 cls", (0.5, 0.6)),
        fake_row("rte", "k5 hire", (0.8, 0.8), planned=4),
        fake_row("mrpc", "k5 cls", (0.7, 0.7), constant=0.812),
        fake_row("rte", "k5 cls", (0.9, 0.9), size="full"),
    ]
    text = text_of(tables.side_by_side(rows, "100"))
    assert "| system | rte, acc | mrpc, f1 |" in text
    assert "| k5 cls | 55.00 ± 5.00 | 70.00 ± 0.00 |" in text, "a single system is not the best one"
    assert "| k5 hire | **80.00 ± 0.00 (2 of 4)** | - |" in text
    assert "| constant answer | 52.70 | 81.20 |" in text


def test_best_of_each_selection_is_bold() -> None:
    rows = [fake_row("rte", name, (score, score), holdout=holdout) for holdout in (False, True)
            for name, score in (("a", 0.7), ("b", 0.6))]  # fmt: skip
    table = tables.side_by_side(rows, "100")
    assert table.bold == {(0, "rte, acc"), (2, "rte, acc")}, "dev and holdout are not compared"


def test_averages_only_of_complete_benchmarks() -> None:
    names = BENCHMARKS["GLUE, paper's 8"]
    rows = [fake_row(task, "cls", (0.5, 0.7), pretrainings=2) for task in names]
    assert "| system |" in text_of(tables.side_by_side(rows, "100"))
    assert "| 60.00 ± 10.00 |\n" in text_of(tables.side_by_side(rows, "100")).splitlines(True)[4]
    short = text_of(tables.side_by_side(rows[:-1], "100"))
    assert "No average of GLUE, paper's 8: no system has all tasks; missing: rte." in short
    assert "GLUE" not in text_of(tables.side_by_side(rows[:2], "100"))


def test_average_takes_pretrainings_as_units() -> None:
    """Tasks whose errors cancel within a pretraining have an average without error."""
    names = list(BENCHMARKS["GLUE, paper's 8"])
    rows = [fake_row(task, "cls", (0.5, 0.7) if index % 2 else (0.7, 0.5), pretrainings=2)
            for index, task in enumerate(names)]  # fmt: skip
    average = benchmark_average(rows, "GLUE, paper's 8")
    assert (average.value, average.error) == pytest.approx((60, 0))
    other = fake_row(names[0], "cls", (0.6,))
    average = benchmark_average([other, *rows[1:]], "GLUE, paper's 8")
    assert average.value == pytest.approx(60) and math.isnan(average.error), "the tasks have other runs"
    official = benchmark_average(rows, "GLUE, official 9")
    assert official.missing == ["mnli", "wnli"], "mnli has no acc_m here"


def pair(gap: float, pretrainings: int = 4) -> list[SystemResult]:
    noise = np.random.default_rng(0).normal(scale=0.01, size=(2, 4))
    return [fake_row("rte", name, (0.6 + up + noise[side]).tolist(), pretrainings=pretrainings, skill=up + 0.5)
            for side, (name, up) in enumerate((("k5 mean", 0.0), ("k5 cls", gap)))]  # fmt: skip


def test_comparisons_ask_two_questions_and_are_corrected() -> None:
    rows = pair(0.2)
    tests = list(add_examples(compare_pairs(rows)))
    line = text_of(tables.comparison_table(tests, len(tests))).splitlines()[4]
    assert line.startswith("| rte | 100 | k5 cls | k5 mean | +"), "the better one comes first"
    assert "| < 0.001 * | < 0.001 | 0.125 (0.125) |" in line and line.endswith("| 4 pretrainings at one draw, paired |")
    assert headline(rows, tests) == [
        "100 train rows: k5 cls has the best mean on rte. Corrected for the number of tests: on rte the lead over "
        "every other system is supported."
    ]


def test_no_difference_is_said_in_words() -> None:
    rows = pair(0.001)
    assert headline(rows, compare_pairs(rows))[0].endswith(
        "on rte no difference can be told between the leader and any other system."
    )
    one = [fake_row("rte", name, (score,)) for name, score in (("a", 0.5), ("b", 0.6))]
    assert "on rte no test is possible, because one unit does not tell" in headline(one, compare_pairs(one))[0]


def test_many_systems_are_corrected_for_all_pairs_and_shown_for_the_leader() -> None:
    rows = [fake_row("rte", f"m{index} cls", (0.5 + index / 100, 0.52)) for index in range(6)]
    tests = compare_pairs(rows)
    shown = pairs_to_show(tests, rows)
    assert len(tests) == 15 and len(shown) == 5 and all(test.a is rows[-1] for test in shown)
    assert len(pairs_to_show(compare_pairs(rows[:5]), rows[:5])) == 10


def test_slow_bootstraps_are_left_to_compare() -> None:
    rows = [fake_row(task, name, (0.5, 0.6)) for task in ("rte", "stsb") for name in ("a", "b", "c")]
    done = [(test.a.task, test.examples is not None) for test in add_examples(compare_pairs(rows))]
    assert done == [("rte", True)] * 3 + [("stsb", False)] * 3
    (two,) = add_examples(compare_pairs(rows[3:5]))
    assert two.examples is not None


def test_candidates_are_flagged_where_incomplete() -> None:
    tried = [Candidate({"train.learning_rate": rate}, count, 4, score, chosen)
             for rate, count, score, chosen in ((2e-5, 4, 55.0, True), (5e-5, 1, 70.0, False))]  # fmt: skip
    rows = [fake_row("rte", "k5 cls", (0.5, 0.6), holdout=True, candidates=tried), fake_row("cola", "k5 cls", (0.5,))]
    text = text_of(tables.candidates_table(rows))
    assert "| rte | 100 | k5 cls, holdout | held-out rows | lr 2e-05: 55.00 | lr 5e-05: 70.00 (1 of 4) |" in text
    assert "cola" not in text
    assert "| lr 2e-05 |" in text_of(tables.results_table(rows))


def test_macro_f1_stands_beside_accuracy_and_a_constant_answer_is_told() -> None:
    more = {"scores": {"acc": 0.83, "macro_f1": 0.3}, "constant": {"acc": 0.83, "macro_f1": 0.3}}
    plain = fake_row("rte", "k5 cls", (0.83, 0.83))
    skewed = replace(plain, records=[{**record, **more} for record in plain.records])
    good = fake_row("rte", "k5 mean", (0.95, 0.95))
    text = text_of(tables.macro_table([skewed, good]))
    assert "| rte | 100 | k5 cls | 83.00 | 83.00 | 30.00 | 30.00 |" in text and "k5 mean" not in text
    assert warnings(Results([skewed, good], [], [])) == [
        "rte, 100 train rows: a constant answer (83.00) does as well, within one standard error, as k5 cls."
    ]


def test_test_sets_have_their_own_table() -> None:
    rows = [fake_row("rte_superglue", "k5 cls", (0.5, 0.6), test_scores={"axb": {"matthews": 0.1}}), fake_row()]
    text = text_of(tables.scored_test_sets(rows))
    assert "| rte_superglue | 100 | k5 cls | axb | matthews | 2 | 10.00 ± 0.00 |" in text and text.count("\n| ") == 3


def test_calibration_with_one_temperature_a_row() -> None:
    rows = [
        fake_row("rte", "k5 cls", (0.5, 0.6), skill=0.2),
        fake_row("rte", "k5 hire", (0.5, 0.6), holdout=True, skill=0.2),
    ]
    rows += [fake_row("stsb"), fake_row("rte", "sure", (0.9, 0.9), holdout=True, skill=9)]
    text = text_of(tables.calibration_table(rows))
    plain, scaled, sure = text.splitlines()[4:7]
    assert plain.endswith("| - | - | - | - | - |") and " - |" not in scaled and "stsb" not in text
    assert sure.endswith(" (at its bound) |"), "all held-out rows are right"


def test_notes_are_told_once() -> None:
    rows = [fake_row(task, name, (0.9, 0.9), notes=["not the protocol."] if task == "rte" else [])
            for task in ("rte", "cola") for name in ("a", "b")]  # fmt: skip
    rows.append(fake_row("wic", "a", (0.9, 0.9), planned=3, candidates=[Candidate({}, 2, 3, 90.0, True)]))
    assert warnings(Results(rows, ["b on wic with 100 rows"], ["a on rte: runs of 2 commits"])) == [
        "Planned, but without a finished run: b on wic with 100 rows.",
        "Averaged over different environments: a on rte: runs of 2 commits.",
        "not the protocol (rte).",
        "runs incomplete: 2 of 3 (wic).",
    ]
