"""One command from a results folder to the zip that a benchmark's site takes."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune import submit
from finetune.data.tasks import TASKS, Task
from finetune.store.results import Store
from multicls.errors import UserError
from tests.finetune.data.test_submissions import outputs_for, test_rows
from tests.finetune.fake_results import fake_run

SMALL = {name: replace(task, submissions=(("QQP", 10_000),)) if name == "qqp" else task for name, task in TASKS.items()}


@pytest.fixture(autouse=True)
def small_qqp(monkeypatch: pytest.MonkeyPatch) -> None:
    """QQP with 10,000 test rows instead of 390,965."""
    monkeypatch.setattr(submit, "TASKS", SMALL)


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
