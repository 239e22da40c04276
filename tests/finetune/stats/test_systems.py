"""Systems are declared: no run changes the rows of another system, and plans say what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.run import request_ids_of
from finetune.stats.systems import Results, SystemResult, load_results
from finetune.store.results import Store
from tests.finetune.fake_results import fake_run, fake_settings

FINGERPRINT = "abcdef0123456789"


def row_of(results: Results, name: str, task: str = "rte", size: str = "100") -> SystemResult:
    (found,) = [row for row in results.rows if (row.system.title, row.task, row.train_size) == (name, task, size)]
    return found


def planned(name: str, fingerprint: str = FINGERPRINT, candidate: dict[str, Any] | None = None, **values: Any) -> Any:
    """Entries of a plan, one for each task of the run."""
    settings = fake_settings(**values)
    about = {"system": name, "model_name": "k5", "label": settings.label, "selection": settings.selection,
             "train_size": str(settings.train_size), "candidate": candidate or {},
             "joint": settings.task_names if len(settings.task_names) > 1 else []}  # fmt: skip
    ids = request_ids_of(settings, fingerprint)
    return [about | {"task": task, "request_id": one} for task, one in zip(settings.task_names, ids, strict=True)]


def add_plan(folder: Path, *entries: Any, choose: str = "mean") -> None:
    Store(folder).add_plan({"choose": choose, "runs": [run for each in entries for run in each]})


def test_a_run_with_other_settings_changes_no_other_row(tmp_path: Path) -> None:
    for task in ("copa", "cb", "rte"):
        for head in ("cls", "hire"):
            for seed in (1, 2):
                fake_run(tmp_path, task=task, head=head, seed=seed, model_name="minilm")
    before = load_results(Store(tmp_path)).rows
    assert {row.system.title for row in before} == {"minilm cls", "minilm hire"} and len(before) == 6
    fake_run(tmp_path, task="copa", head="hire", seed=1, model_name="minilm", epochs=10)
    after = load_results(Store(tmp_path)).rows
    assert [row for row in after if row.system.title != "minilm hire, epochs 10"] == before
    assert len(after) == 7 and row_of(load_results(Store(tmp_path)), "minilm hire", "copa").estimate.runs == 2


def test_resolved_values_do_not_make_systems_but_are_told(tmp_path: Path) -> None:
    fake_run(tmp_path, seed=1, model_name="m", git_commit="a")
    fake_run(tmp_path, seed=2, model_name="m", git_commit="b", versions={"torch": "2.14", "transformers": "5.23"})
    results = load_results(Store(tmp_path))
    assert [row.estimate.runs for row in results.rows] == [2]
    assert results.mixed == ["m cls on rte, 100 rows: runs of 2 commits, 2 versions of torch"]


def test_numeric_modes_are_apart(tmp_path: Path) -> None:
    fake_run(tmp_path, seed=1, model_name="m")
    fake_run(tmp_path, seed=2, model_name="m", numeric={"device": "cuda", "precision": "bf16", "deepspeed": None})
    titles = [row.system.title for row in load_results(Store(tmp_path)).rows]
    assert sorted(titles) == ["m cls, bf16 on cuda", "m cls, fp32 on cpu"]


def test_a_run_made_by_hand_completes_the_plan(tmp_path: Path) -> None:
    add_plan(tmp_path, planned("k5 cls", seed=1), planned("k5 cls", seed=2))
    assert load_results(Store(tmp_path)).never_run == ["k5 cls on rte with 100 rows"]
    fake_run(tmp_path, seed=1)  # run.py knows no name of a model
    row = row_of(load_results(Store(tmp_path)), "k5 cls")
    assert (len(row.records), row.planned, row.problems) == (1, 2, ["runs incomplete: 1 of 2"])
    fake_run(tmp_path, seed=2)
    results = load_results(Store(tmp_path))
    assert row_of(results, "k5 cls").problems == [] and len(results.rows) == 1 and not results.never_run


def test_plans_accumulate(tmp_path: Path) -> None:
    add_plan(tmp_path, planned("k5 cls", seed=1), planned("k5 cls", seed=2))
    add_plan(tmp_path, planned("k5 cls", seed=1))
    fake_run(tmp_path, seed=1)
    assert row_of(load_results(Store(tmp_path)), "k5 cls").problems == ["runs incomplete: 1 of 2"]


def test_the_best_complete_candidate_is_chosen(tmp_path: Path) -> None:
    rates = (1e-5, 2e-5, 4e-5)
    add_plan(tmp_path, *(planned("k5 cls", seed=seed, candidate={"train.learning_rate": rate}, learning_rate=rate)
                         for rate in rates for seed in (1, 2)))  # fmt: skip
    scores = {(1e-5, 1): 0.6, (1e-5, 2): 0.6, (2e-5, 1): 0.9, (4e-5, 1): 0.5, (4e-5, 2): 0.5}
    for (rate, seed), score in scores.items():
        fake_run(tmp_path, seed=seed, learning_rate=rate, score=score)
    row = row_of(load_results(Store(tmp_path)), "k5 cls")
    assert [one.values["train.learning_rate"] for one in row.candidates if one.chosen] == [1e-5], "2e-5 was lucky once"
    assert [(one.text, one.finished, round(one.score)) for one in row.candidates] == [
        ("lr 1e-05", 2, 60), ("lr 2e-05", 1, 90), ("lr 4e-05", 2, 50)]  # fmt: skip
    assert row.problems == ["lr 2e-05 incomplete: 1 of 2"] and round(row.estimate.mean) == 60


def test_held_out_rows_choose_and_dev_reports(tmp_path: Path) -> None:
    for rate, held, dev in ((1e-5, 0.8, 0.5), (2e-5, 0.6, 0.9)):
        settings: dict[str, Any] = {"seed": 1, "learning_rate": rate, "selection": "holdout"}
        add_plan(tmp_path, planned("k5 cls", candidate={"train.learning_rate": rate}, **settings))
        fake_run(tmp_path, holdout=True, learning_rate=rate, score=dev, holdout_scores={"acc": held})
    row = row_of(load_results(Store(tmp_path)), "k5 cls, holdout")
    assert round(row.estimate.mean) == 50 and row.candidates[0].chosen


def test_median_is_a_choice(tmp_path: Path) -> None:
    entries = [planned("k5 cls", seed=seed, candidate={"isobn.beta": beta}, learning_rate=beta)
               for beta in (0.25, 0.5) for seed in (1, 2, 3)]  # fmt: skip
    add_plan(tmp_path, *entries, choose="median")
    for beta, scores in ((0.25, (0.6, 0.6, 0.0)), (0.5, (0.5, 0.5, 0.5))):
        for seed, score in enumerate(scores, start=1):
            fake_run(tmp_path, seed=seed, learning_rate=beta, score=score)
    row = row_of(load_results(Store(tmp_path)), "k5 cls")
    assert [one.text for one in row.candidates if one.chosen] == ["beta 0.25"]


def test_a_joint_system_takes_one_candidate_for_all_tasks(tmp_path: Path) -> None:
    scores = {1e-5: (0.9, 0.1), 2e-5: (0.7, 0.6)}
    for rate, both in scores.items():
        values: dict[str, Any] = {"task": "rte,cola", "head": "cln", "learning_rate": rate}
        entries = planned("k5 cln", candidate={"train.learning_rate": rate}, **values)
        add_plan(tmp_path, entries)
        for entry, score in zip(entries, both, strict=True):
            record = fake_run(tmp_path, task=entry["task"], head="cls", seed=int(rate * 1e5), model_name=entry["task"])
            metric = record["metric"]
            joint = record | {"request_id": entry["request_id"], "run_id": entry["request_id"], "score": score,
                              "scores": {metric: score}, "label": "cln of cola,rte"}  # fmt: skip
            Store(tmp_path).write(joint, {})
    results = load_results(Store(tmp_path))
    for task in ("rte", "cola"):
        row = row_of(results, "k5 cln", task)
        assert [one.text for one in row.candidates if one.chosen] == ["lr 2e-05"], task


def test_seeds_of_one_pretraining_are_no_units(tmp_path: Path) -> None:
    for pretraining in (1, 2, 3, 4):
        for seed in (1, 2, 3, 4):
            fake_run(tmp_path, seed=seed, model_name="k5", pretraining_seed=pretraining,
                     fingerprint=f"{pretraining}" * 16, score=0.5 + 0.01 * pretraining)  # fmt: skip
    (row,) = load_results(Store(tmp_path)).rows
    estimate = row.estimate
    assert (estimate.pretrainings, estimate.runs, estimate.df) == (4, 16, 3)
    assert estimate.error == pytest.approx(1.29099 / 2, rel=1e-4), "deviation of the four means / sqrt(4)"


def test_ensembles_share_no_members_and_choose_by_their_own_held_out_rows(tmp_path: Path) -> None:
    for seed in range(1, 6):
        for rate, skill in ((1e-5, 0.2), (2e-5, 0.6)):
            add_plan(tmp_path, planned("k5 cls", seed=seed, candidate={"train.learning_rate": rate},
                                       learning_rate=rate, selection="holdout"))  # fmt: skip
            fake_run(tmp_path, seed=seed, learning_rate=rate, skill=skill, holdout=True)
    row = row_of(load_results(Store(tmp_path), ensembles=2), "k5 cls x2, holdout")
    members = [member for record in row.records for member in record["members"]]
    assert len(members) == len(set(members)) == 4
    assert [one.text for one in row.candidates if one.chosen] == ["lr 2e-05"]
    assert all("holdout_scores" in record for record in row.records), "dev must not choose"
    assert len(row.predictions()) == 2 and "holdout_logits" in row.predictions()[0]


def test_folders_of_protocol_2_are_read(tmp_path: Path) -> None:
    identity = {
        "task": "rte", "train_size": 100, "head": "isobn", "pooling": "mean", "seed": 1, "data_seed": 1,
        "sampling": "uniform", "label_noise": 0.0, "selection": "dev", "train_from_dev": False, "max_length": 128,
        "model": FINGERPRINT, "data": "d" * 16, "options": {"beta": 0.5},
        "train": {"learning_rate": 2e-5, "epochs": 20, "batch_size": 4, "max_steps": 500, "precision": "fp32"},
    }  # fmt: skip
    old: dict[str, Any] = {
        "identity": identity, "model": "RUN/hf", "model_name": "m", "pretraining_seed": None, "benchmark": "glue",
        "metric": "acc", "scores": {"acc": 0.6}, "device": "cpu", "notes": [], "versions": {},
    }  # fmt: skip
    lines = [old | {"run_id": f"{seed}", "score": 0.5 + seed / 10, "identity": identity | {"seed": seed}}
             for seed in (1, 2)]  # fmt: skip
    ensemble = old | {"run_id": "e", "score": 0.9, "identity": identity | {"ensemble": ["1", "2"]}}
    (tmp_path / "results.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, ensemble]))
    (tmp_path / "results.json").write_text('{"protocol": 2}')
    (row,) = load_results(Store(tmp_path)).rows
    assert row.system.label == "isobn/mean" and row.estimate.runs == 2 and round(row.estimate.mean) == 65


def test_plans_that_give_one_name_to_other_settings_are_apart(tmp_path: Path) -> None:
    """Whichever runs first keeps the name, on all tasks; a setting that a recipe overrides for a task disputes none."""

    def plan(task: str, epochs: int, override: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        changed = {"train.epochs": epochs} | (override or {})
        return [run | {"changed": changed} for run in planned("k5 cls", task=task, seed=1, epochs=epochs)]

    add_plan(tmp_path, plan("rte", 20), plan("copa", 20), plan("cb", 20, {"train.batch_size": 8}))
    add_plan(tmp_path, plan("copa", 10))
    for task in ("rte", "copa", "cb"):
        fake_run(tmp_path, task=task, seed=1, epochs=20, score=0.9)
    before = load_results(Store(tmp_path))
    assert [row.system.name for row in before.rows] == ["k5 cls"] * 3
    assert before.never_run == ["k5 cls, epochs 10 on copa with 100 rows"]
    fake_run(tmp_path, task="copa", seed=1, epochs=10, score=0.5)
    after = load_results(Store(tmp_path)).rows
    assert [row for row in after if row.system.name == "k5 cls"] == before.rows
    assert round(row_of(load_results(Store(tmp_path)), "k5 cls, epochs 10", "copa").estimate.mean) == 50

    other = tmp_path / "other"  # the short grid ran first
    add_plan(other, plan("copa", 10))
    fake_run(other, task="copa", seed=1, epochs=10)
    add_plan(other, plan("rte", 20), plan("copa", 20))
    fake_run(other, task="copa", seed=1, epochs=20)
    fake_run(other, task="rte", seed=1, epochs=20)
    names = [(row.task, row.system.name) for row in load_results(Store(other)).rows]
    assert sorted(names) == [("copa", "k5 cls"), ("copa", "k5 cls, epochs 20"), ("rte", "k5 cls, epochs 20")]


def test_draws_that_took_all_rows_are_one(tmp_path: Path) -> None:
    for data_seed in (1, 2, 3):
        for seed in (1, 2):
            fake_run(tmp_path, task="cb", seed=seed, data_seed=data_seed, train_size=1000, model_name="m",
                     score=0.5 + 0.1 * seed, all_rows=True)  # fmt: skip
    (row,) = load_results(Store(tmp_path)).rows
    assert (row.estimate.draws, row.estimate.runs, row.planned, row.problems) == (1, 2, 2, [])
