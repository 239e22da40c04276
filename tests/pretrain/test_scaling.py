"""The square-root rule, and that docs/clusters.md has its numbers."""

from __future__ import annotations

import re

import pytest

from multicls.files import REPOSITORY
from pretrain.scaling import Schedule, batch_note, scaled

PAPER = Schedule(batch=10, learning_rate=2e-5, warmup_ratio=0.001, steps=635_000)


def by_rule(batch: int, recipe: Schedule = PAPER) -> Schedule:
    return scaled(recipe, batch)


def test_the_recipe_s_own_batch_changes_nothing() -> None:
    assert by_rule(10) == PAPER and PAPER.warmup_steps == 635


def test_larger_batch() -> None:
    rule = by_rule(640)
    assert rule.learning_rate == pytest.approx(1.6e-4) and rule.steps == 9922
    assert rule.warmup_steps == 635  # not 10
    assert rule.batch * rule.steps == pytest.approx(PAPER.batch * PAPER.steps, rel=1e-4)


def test_warm_up_is_no_more_than_a_fifth_unless_the_recipe_s_is() -> None:
    assert by_rule(6400).warmup_steps == round(0.2 * 992)
    assert by_rule(640, PAPER._replace(warmup_ratio=0.3)).warmup_ratio == pytest.approx(0.3)


def test_smaller_batch_keeps_the_examples_of_the_warm_up() -> None:
    rule = by_rule(5)
    assert rule.learning_rate == pytest.approx(2e-5 / 2**0.5)
    assert (rule.steps, rule.warmup_steps) == (1_270_000, 1270)


def test_batch_larger_than_the_whole_run() -> None:
    assert by_rule(10_000_000).steps == 1


def test_note_for_the_log() -> None:
    run = Schedule(batch=640, learning_rate=2e-5, warmup_ratio=0.001, steps=9922)
    assert batch_note(PAPER, run) == (
        "batch: 640 examples a step, the recipe has 10; by the square-root rule the learning rate would be 0.00016 "
        "and warm-up 635 steps; the run uses 2e-05 and 10"
    )
    assert batch_note(PAPER, PAPER._replace(learning_rate=1.0)) == ""
    assert "would be 0.00016" in batch_note(PAPER, run._replace(learning_rate=1.6e-4))


def test_table_of_the_page() -> None:
    text = (REPOSITORY / "docs" / "clusters.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([\d.e-]+) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert [(int(gpus), int(batch)) for gpus, batch, *_ in rows] == [(n, 10 * n) for n in (1, 4, 8, 16, 32, 64)]
    for _, batch, learning_rate, warmup, steps, ratio in rows:
        rule = by_rule(int(batch))
        assert float(learning_rate) == float(f"{rule.learning_rate:.2g}")
        assert int(warmup.replace(",", "")) == rule.warmup_steps
        assert int(steps.replace(",", "")) == rule.steps and float(ratio) == round(rule.warmup_ratio, 3)
