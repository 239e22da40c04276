"""One command from a results folder to the zip that a benchmark's site takes."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune import submit
from finetune.data.examples import LabeledExample
from finetune.data.tasks import TASKS, Task
from finetune.store.results import Store
from finetune.submit import check_rows, submission_files
from multicls.errors import UserError
from tests.finetune.fake_results import fake_run

IGNORE_INDEX = float("nan")
SMALL = {name: replace(task, submissions=(("QQP", 10_000),)) if name == "qqp" else task for name, task in TASKS.items()}


@pytest.fixture(autouse=True)
def small_qqp(monkeypatch: pytest.MonkeyPatch) -> None:
    """QQP with 10,000 test rows instead of 390,965."""
    monkeypatch.setattr(submit, "TASKS", SMALL)


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


def test_arrays(task: Task, shift: float = 0.0) -> dict[str, Any]:
    """Returns the arrays that a run with --predict_test saves of a test set; `shift` is added to the last class."""
    rows, prefix = test_rows(task), f"test_{task.name}_"
    outputs = outputs_for(task, len(rows)) + shift * np.eye(task.num_choices or task.num_labels)[-1]
    arrays = {f"{prefix}{name}s": [getattr(row, name) for row in rows] for name in ("id", "part", "group", "answer")}
    arrays[f"{prefix}labels"] = [row.label for row in rows]
    return arrays | ({f"{prefix}scores": outputs[:, 0]} if task.is_regression else {f"{prefix}logits": outputs})


test_rows.__test__ = test_arrays.__test__ = False  # type: ignore[attr-defined]


def predicted_run(folder: Path, task: Task, shift: float = 0.0, **values: Any) -> None:
    record, store = fake_run(folder, task.name, train_size="full", model_name="k5", **values), Store(folder)
    arrays: dict[str, Any] = store.predictions(record["run_id"])
    for other in (task, *(SMALL[name] for name in task.diagnostics)):
        arrays |= test_arrays(other, shift)
    store.write(record, arrays)


def trained(benchmark: str) -> list[Task]:
    return [task for task in SMALL.values() if task.benchmark == benchmark and task.train]


@pytest.mark.parametrize("benchmark", ["glue", "superglue"])
def test_every_file_of_the_site_is_in_the_zip(benchmark: str, tmp_path: Path) -> None:
    for task in trained(benchmark):
        predicted_run(tmp_path / "results", task)
    output = tmp_path / "x.zip"
    arguments = [str(tmp_path / "results"), "--benchmark", benchmark, "--system", "k5 cls", "--output", str(output)]
    assert submit.main(arguments) == 0
    suffix = "tsv" if benchmark == "glue" else "jsonl"
    wanted = [f"{stem}.{suffix}" for task in SMALL.values() if task.benchmark == benchmark
              for stem, _ in task.submissions]  # fmt: skip
    with zipfile.ZipFile(output) as archive:
        assert sorted(archive.namelist()) == sorted(wanted)
        contents = {name: archive.read(name).decode().splitlines() for name in wanted}
    for task in SMALL.values():
        for stem, count in task.submissions if task.benchmark == benchmark else ():
            check_content(task, contents[f"{stem}.{suffix}"], count)


def check_content(task: Task, lines: list[str], count: int) -> None:
    """Checks indices and labels of a file as the site reads it."""
    allowed = {*task.labels, "0", "1"}
    if task.benchmark == "glue":
        indices, values = zip(*(line.split("\t") for line in lines), strict=True)
        assert indices == ("index", *map(str, range(count))) and values[0] == "prediction", task.name
        assert all(0 <= float(value) <= 5 if task.is_regression else value in allowed for value in values[1:]), (
            task.name
        )
    elif task.name != "multirc":
        rows = [json.loads(line) for line in lines]
        assert [row["idx"] for row in rows] == list(range(count)), task.name
        assert {str(row["label"]) for row in rows} <= allowed | ({"Xa", "Yo: Zu"} if task.name == "record" else set())


def test_a_score_that_is_no_number_is_refused(tmp_path: Path) -> None:
    task, store = SMALL["stsb"], Store(tmp_path)
    record = fake_run(tmp_path, "stsb", train_size="full", model_name="k5")
    arrays = store.predictions(record["run_id"]) | test_arrays(task)
    arrays["test_stsb_scores"][3] = np.nan
    store.write(record, arrays)
    with pytest.raises(UserError, match="stsb: .* predicted values that are not finite"):
        submit._files_of(task, submit.load_results(store).rows, "k5 cls", "full")


def test_the_best_run_or_an_ensemble_or_another_system_is_taken(tmp_path: Path) -> None:
    store, wnli, rte = tmp_path / "results", SMALL["wnli"], SMALL["rte"]
    for seed, score, shift in ((1, 0.5, -9.0), (2, 0.9, 9.0), (3, 0.4, -9.0)):
        predicted_run(store, wnli, shift, seed=seed, score=score)
    predicted_run(store, rte, -9.0, seed=1)
    predicted_run(store, rte, 9.0, seed=1, head="mean")
    systems = [(wnli, "k5 cls", {"1"}), (wnli, "k5 cls x3", {"0"}), (rte, "k5 mean", {"not_entailment"})]
    for task, system, expected in systems:
        rows = submit.load_results(Store(store), 3).rows
        lines = submit._files_of(task, rows, system, "full")[f"{task.folder}.tsv"].splitlines()[1:]
        assert {line.split("\t")[1] for line in lines} == expected, system


def test_what_is_missing_is_told_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^[^\n]*: no finished runs there") as nothing:
        submit.main([str(tmp_path), "--benchmark", "glue", "--output", str(tmp_path / "x.zip"), "--system", "k5 cls"])
    assert len(nothing.value.problems) == 1
    for task in trained("glue"):
        if task.name != "rte":
            predicted_run(tmp_path / "results", task)
    fake_run(tmp_path / "results", "rte", train_size="full", model_name="k5")
    arguments = [str(tmp_path / "results"), "--benchmark", "glue", "--output", str(tmp_path / "x.zip"), "--system"]
    with pytest.raises(UserError, match="rte: .* did not predict it; add --predict_test"):
        submit.main([*arguments, "k5 cls"])
    with pytest.raises(UserError, match="no finished run of 'k5 clss'.*Did you mean 'k5 cls'"):
        submit.main([*arguments, "k5 clss"])
    with pytest.raises(UserError, match="--for rtee: no task of glue.*'rte'"):
        submit.main([*arguments, "k5 cls", "--for", "rtee=k5 cls"])
    with pytest.raises(UserError, match="--for rte: write it as TASK=NAME"):
        submit.main([*arguments, "k5 cls", "--for", "rte"])
    assert not (tmp_path / "x.zip").exists()


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
