"""The settings of a run: what goes together, and every shipped recipe of single runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.settings import FinetuneSettings, check_names
from multicls.errors import UserError
from multicls.files import REPOSITORY
from multicls.settings import load_settings

RUNS = ("sample", "cln", "isobn", "hire")


def settings(**changes: object) -> FinetuneSettings:
    values = {"model": "m", "task": "rte", "head": "cls"} | changes
    loaded = load_settings(FinetuneSettings, flags=values)
    check_names(loaded)
    return loaded


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": None}, "give either --task NAME, or your own"),
        ({"own.train_file": "a.csv", "own.dev_file": "b.csv"}, "give either --task NAME, or your own"),
        ({"task": None, "own.train_file": "a.csv", "own.dataset": "b"}, "either a train_file or a dataset"),
        ({"own.dev_file": "a.csv"}, "need a train_file"),
        ({"task": "rte,sts"}, "only --head cln"),
        ({"task": "rte,rte", "head": "cln"}, "given twice"),
        ({"head": "probe", "save_model": True}, "--head probe trains no model"),
        ({"task": None, "own.train_file": "a", "predict_test": True}, "no benchmark's"),
        ({"train_size": "1m"}, "100 or 1k"),
        ({"label_noise": 1.5}, "label_noise = 1.5"),
        ({"holdout": 0}, "holdout = 0"),
        ({"train.adam_beta2": 1}, "train.adam_beta2 = 1"),
        ({"isobn.momentum": 2}, "isobn.momentum = 2"),
        ({"hire.layer": "mean_all"}, "Did you mean 'hire.layers'?"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as error:
        settings(**changes)
    assert message in str(error.value)


def test_all_wrong_names_are_told_at_once() -> None:
    with pytest.raises(UserError) as error:
        settings(task="rtee,stz", head="clz")
    assert [problem.split(":")[0] for problem in error.value.problems] == ["--task rtee", "--task stz", "--head clz"]


def test_names_and_sizes_are_read_as_people_write_them() -> None:
    assert settings(task="sst5, quora,sts", head="cln").task_names == ["sst5", "quora", "sts"]
    assert [settings(train_size=size).train_size for size in ("1k", "100", 7, "full")] == [1000, 100, 7, "full"]


@pytest.mark.parametrize("name", RUNS)
def test_shipped_recipes_of_single_runs_load(name: str) -> None:
    recipe = REPOSITORY / "finetune" / "recipes" / f"{name}.yaml"
    keys = {line.partition(":")[0] for line in recipe.read_text(encoding="utf-8").splitlines()}
    needed = {key: value for key, value in {"model": "m", "task": "rte", "head": "cls"}.items() if key not in keys}
    check_names(load_settings(FinetuneSettings, [recipe], flags=needed))


def test_no_recipe_is_forgotten() -> None:
    grids = {"heads_100", "paper_glue", "paper_superglue", "quick"}
    assert {path.stem for path in Path(REPOSITORY / "finetune" / "recipes").glob("*.yaml")} <= {*RUNS, *grids}


def test_settings_that_decide_nothing_are_not_requested() -> None:
    def same(first: dict[str, object], second: dict[str, object]) -> bool:
        return settings(**first).requested() == settings(**second).requested()

    assert same({"data_seed": 1}, {"data_seed": 2}), "all rows are one draw"
    assert same({"sampling": "uniform"}, {"sampling": "balanced"})
    assert same({"task": "sst5,sts", "head": "cln"}, {"task": "sst5, sts", "head": "cln"})
    for drawn in ({"train_size": 100}, {"selection": "holdout"}, {"label_noise": 0.1}):
        assert not same({"data_seed": 1, **drawn}, {"data_seed": 2, **drawn})
    assert settings(train_size=100).changed() == {}
    own = {"task": None, "own.train_file": "a.csv"}
    assert settings(**own, **{"own.metric": "f1"}).changed() == {"own.metric": "f1"}
