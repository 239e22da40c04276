"""Submission files by the sites' rules."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from finetune.data.examples import LabeledExample
from finetune.data.submissions import check_rows, submission_files
from finetune.data.tasks import TASKS, Task

IGNORE_INDEX = float("nan")


def test_rows(task: Task) -> list[LabeledExample]:
    """Returns as many rows as the benchmark has, with two answers to a MultiRC question and two ReCoRD entities."""
    rows = []
    for (_, part), (_, count) in zip(task.test, task.submissions, strict=True):
        count = min(count, 10_000) if task.name == "qqp" else count
        for n in range(count):
            keys = {"multirc": [f"{n // 8}:{n // 2}:{n}"], "record": [f"{n // 2}:{n}:Xa", f"{n // 2}:{n}:Yo: Zu"]}
            for key in keys.get(task.name, [f"{n}"]):
                group, answer = (f"{n // 2}:{n}", key.split(":", 2)[2]) if task.name == "record" else ("", "")
                rows.append(LabeledExample(f"test:{key}", (), IGNORE_INDEX, part, group=group, answer=answer))
    return rows


def outputs_for(task: Task, rows: int) -> Any:
    columns = task.num_choices or task.num_labels
    return np.random.default_rng(1).normal(size=(rows, columns)).astype(np.float32)


test_rows.__test__ = False  # type: ignore[attr-defined]


def test_glue_files() -> None:
    rows = [LabeledExample(f"test:{n}", (), IGNORE_INDEX) for n in (0, 1)]
    found = submission_files(TASKS["qnli"], rows, np.array([[0.0, 1.0], [1.0, 0.0]]))
    assert found == {"QNLI.tsv": "index\tprediction\n0\tnot_entailment\n1\tentailment\n"}
    found = submission_files(TASKS["stsb"], rows, np.array([[0.5], [1.2]]))
    assert found == {"STS-B.tsv": "index\tprediction\n0\t2.5\n1\t5.0\n"}, "in 0..5"
    rows = [
        LabeledExample("test_matched:0", (), IGNORE_INDEX, "m"),
        LabeledExample("test_mismatched:0", (), IGNORE_INDEX, "mm"),
    ]
    assert submission_files(TASKS["mnli"], rows, np.eye(3)[[1, 2]]) == {
        "MNLI-m.tsv": "index\tprediction\n0\tneutral\n", "MNLI-mm.tsv": "index\tprediction\n0\tcontradiction\n"
    }  # fmt: skip


@pytest.mark.parametrize(("task", "label"), [("boolq", "true"), ("wic", "true"), ("wsc", "True"), ("copa", 1),
                                             ("rte_superglue", "not_entailment"), ("cb", "contradiction")])  # fmt: skip
def test_superglue_labels(task: str, label: object) -> None:
    outputs = np.eye(len(TASKS[task].labels))[[1]]
    (content,) = submission_files(TASKS[task], [LabeledExample("test:7", (), IGNORE_INDEX)], outputs).values()
    assert json.loads(content) == {"idx": 7, "label": label}


def test_multirc_is_nested_and_record_names_the_entity() -> None:
    rows = [LabeledExample(f"test:{key}", (), IGNORE_INDEX) for key in ("0:0:0", "0:0:1", "0:1:2", "4:9:30")]
    (content,) = submission_files(TASKS["multirc"], rows, np.eye(2)[[1, 0, 0, 1]]).values()
    first, second = map(json.loads, content.splitlines())
    assert first == {"idx": 0, "passage": {"questions": [
        {"idx": 0, "answers": [{"idx": 0, "label": 1}, {"idx": 1, "label": 0}]},
        {"idx": 1, "answers": [{"idx": 2, "label": 0}]}]}}  # fmt: skip
    assert second == {"idx": 4, "passage": {"questions": [{"idx": 9, "answers": [{"idx": 30, "label": 1}]}]}}
    rows = [
        LabeledExample(f"test:2:{q}:{name}", (), IGNORE_INDEX, group=f"2:{q}", answer=name)
        for q in (5, 6)
        for name in ("X: a", "Y")
    ]
    (content,) = submission_files(TASKS["record"], rows, np.array([[0, 2.0], [0, 1], [3, 1], [1, 0]])).values()
    assert [json.loads(line) for line in content.splitlines()] == [
        {"idx": 5, "label": "X: a"}, {"idx": 6, "label": "Y"},
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "changed", "message"), [
    ("wnli", "146", "WNLI: 147 predictions instead of 146."),
    ("wnli", "144", "WNLI: index 144 is there more than once."),
    ("wnli", "1_45", "WNLI: the indices must be 0..145."),
    ("multirc", "0:0:0", "MultiRC: index 0:0:0 is there more than once."),
])  # fmt: skip
def test_what_the_site_would_refuse(name: str, changed: str, message: str) -> None:
    rows = test_rows(TASKS[name])
    assert check_rows(TASKS[name], rows) == []
    if "147" not in message:
        rows.pop()
    rows.append(LabeledExample(f"test:{changed}", (), IGNORE_INDEX))
    assert check_rows(TASKS[name], rows) == [message]


def test_each_query_of_record_and_each_part_of_mnli_counts() -> None:
    rows = test_rows(TASKS["record"])
    assert check_rows(TASKS["record"], rows) == [] and len(rows) == 20_000, "two entities for each query"
    assert check_rows(TASKS["record"], rows[2:]) == ["ReCoRD: 9999 predictions instead of 10000."]
    assert check_rows(TASKS["mnli"], test_rows(TASKS["mnli"])[1:]) == ["MNLI-m: 9795 predictions instead of 9796."]
