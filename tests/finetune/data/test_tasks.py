"""The table of tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.data.tasks import TASKS, find_task
from multicls.errors import UserError

DOCS = Path(__file__).resolve().parents[3] / "docs" / "tasks.md"


def test_all_tasks_of_both_benchmarks() -> None:
    files = {
        "glue": "CoLA SST-2 MRPC STS-B QQP MNLI-m MNLI-mm QNLI RTE WNLI AX",
        "superglue": "BoolQ CB COPA MultiRC ReCoRD RTE WiC WSC AX-b AX-g",
    }
    for benchmark, names in files.items():
        tasks = [task for task in TASKS.values() if task.benchmark == benchmark]
        assert sorted(stem for task in tasks for stem, _ in task.submissions) == sorted(names.split())
        assert all(len(task.test) == len(task.submissions) for task in tasks)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_the_table_is_consistent(name: str) -> None:
    task = TASKS[name]
    assert (task.num_choices > 0) == (task.shape == "choice") and (task.num_spans > 0) == (task.shape == "span")
    assert task.num_labels == (1 if task.is_regression or task.num_choices else len(task.labels))
    assert len(task.fields) == 1 or task.shape != "single"
    assert task.max_length == (256 if task.benchmark == "superglue" else 128)
    assert task.passage is None or task.passage < len(task.fields)
    if task.metrics[0].startswith("mean("):
        assert task.metrics[0] == f"mean({','.join(task.metrics[1:])})"
    for other in task.diagnostics:  # predicted by this task's model: the classes must mean the same
        assert TASKS[other].labels == task.labels and not TASKS[other].train
    assert f"| `{name}` |" in DOCS.read_text(encoding="utf-8")


def test_an_unknown_task() -> None:
    with pytest.raises(UserError, match="--task multrc: no such task. Did you mean 'multirc'?"):
        find_task("multrc")
