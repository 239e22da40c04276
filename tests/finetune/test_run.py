"""One run, from rows to its folder: records, refusals, messages, locks, saved models and cards."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from finetune.benchmark_tasks import read_task
from finetune.results import load_results, read_predictions
from finetune.run import _load_task as load_tasks_cache
from finetune.run import main
from finetune.saved import SavedSystem
from finetune.settings import RunSettings
from finetune.tasks import TASKS
from finetune.training import StepPlan
from multicls.errors import UserError
from multicls.files import FolderInUse, locked, read_json
from multicls.settings import load_settings, to_yaml
from tests.finetune.conftest import Tune, sentiment_rows, write_tsv
from tests.finetune.runs import finetune, logits_of, settings_of

QUICK: dict[str, Any] = {"train_size": 20, "train__max_steps": 6, "train__eval_every": 3}


def test_a_run_leaves_its_folder_and_is_not_repeated(
    tiny_multicls: Path, glue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--model {tiny_multicls} --task sst2 --head multicls --data_dir {glue} --train_size 100 --epochs 8"
    words = f"{flags} --max_length 24 --learning_rate 3e-3".split()
    words += ["--output_dir", str(tmp_path := tmp_path / "my results")]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert f"finetune/report.py '{tmp_path}'\n" in out
    assert "dev, 60 rows, which also picked the checkpoint: optimistic: acc" in out
    folder = tmp_path / f"{tiny_multicls.name}-multicls" / "sst2-100" / "p1-d1-s1"
    record = read_json(folder / "record.json")
    (task,) = record["tasks"]
    dev = task["splits"]["dev"]
    assert dev["scores"]["acc"] > 0.9, "one of two words decides the label"
    assert (task["train_rows"], dev["rows"], record["steps"]) == (100, 60, 200)
    assert [entry["step"] for entry in record["history"]] == [50, 100, 150, 200]
    table = read_predictions(folder, "sst2")
    assert (table["label"] == table["predicted"]).mean() == table["value"].mean()
    assert table["value"].mean() == pytest.approx(dev["scores"]["acc"])
    assert table["guess"].mean() == pytest.approx(dev["baselines"]["acc"])
    files = {"record.json", "settings.yaml", "predictions.parquet", "runs", ".lock"}
    assert {path.name for path in folder.iterdir()} <= files
    events = EventAccumulator(str(next((folder / "runs").iterdir()))).Reload()
    assert {"eval/score", "eval/sst2_acc", "train/loss"} <= set(events.Tags()["scalars"])
    assert [run["selection_score"] for run in load_results(tmp_path)] == [dev["scores"]["acc"]]
    for again in (words, ["--recipe", str(folder / "settings.yaml")]):
        capsys.readouterr()
        assert main(again) == 0 and "already finished" in capsys.readouterr().out


def test_other_settings_weights_and_versions_and_a_run_in_the_making_are_refused(
    tune: Tune, tiny_multicls: Path, glue: Path, tmp_path: Path
) -> None:
    named = QUICK | {"name": "mine"}
    record = tune(**named)
    with locked(Path(record["path"])), pytest.raises(FolderInUse):
        tune(**named)
    with pytest.raises(UserError, match=r"another run \(train.weight_decay 0.01, not 0.5\)"):
        tune(**named, train__weight_decay=0.5)
    with pytest.raises(UserError, match=r"another run \(other weights, configuration"):
        finetune(tiny_multicls, glue, tmp_path, **named)
    path = Path(record["path"]) / "record.json"
    path.write_text(path.read_text().replace('"format": ', '"format": 1'))
    with pytest.raises(UserError, match="another version"):
        tune(**named)


def test_other_rows_are_refused(tune: Tune, glue: Path, tmp_path: Path) -> None:
    """The content of the files counts, their place does not."""
    tune(**QUICK)
    data = shutil.copytree(glue, tmp_path / "glue")
    assert tune(**QUICK, data_dir=str(data))["seconds"] == tune(**QUICK)["seconds"]
    write_tsv(data / "SST-2/dev.tsv", "sentence\tlabel", sentiment_rows(60, 9))
    load_tasks_cache.cache_clear()
    with pytest.raises(UserError, match="holds another run .*other rows"):
        tune(**QUICK, data_dir=str(data))


def test_the_card_of_a_saved_model(tune: Tune, tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    """The folder predicts scores in the unit of the labels."""
    record = tune(**QUICK, task="stsb", save_model=True)
    card = (Path(record["path"]) / "model" / "README.md").read_text()
    for text in (
        "pipeline_tag: text-",
        "| stsb | spearman | 60 |",
        "majority class",
        "max_steps: 6",
    ):
        assert text in card
    assert "two texts: sentence1, sentence2." in card and "by 5 to have the label" in card
    assert str(tmp_path) not in card and str(tiny_bert) not in card
    texts = [row.texts for row in read_task(TASKS["stsb"], str(glue)).dev]
    found = SavedSystem(Path(record["path"]) / "model").predict(texts)
    np.testing.assert_allclose(found, 5 * logits_of(record), rtol=1e-4, atol=1e-4)


def test_several_tasks_with_cln(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    record = finetune(
        tiny_bert, glue, tmp_path, head="cln", task="sst2,stsb", **QUICK, save_model=True
    )
    assert [task["task"] for task in record["tasks"]] == ["sst2", "stsb"]
    means = [e["score"] for e in record["history"]]
    assert Path(record["path"]).parent.name == "sst2+stsb-20"
    scores = [run["selection_score"] for run in load_results(tmp_path)]
    assert len(scores) == 2 and sum(scores) / 2 == pytest.approx(max(means))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": "rt"}, "no such task. Did you mean 'rte'"),
        ({"head": "cl"}, "no such head. Did you mean 'cls'"),
        ({"model": ""}, "--model: required"),
        ({"head": "cls", "task": "rte,cola"}, "only --head cln trains several"),
        ({"head": "cln", "task": "rte,rte"}, "each once"),
        ({"head": "isobn", "train__batch_size": 1}, "must be 2 or more"),
        ({"pooling": "mean"}, "--pooling: the head cls does not read it"),
        ({"isobn__beta": 1.0}, "--isobn.beta: the head cls does not read it"),
        ({"train_size": "x"}, "valid integer"),
        ({"train__epochs": 0}, "train.epochs"),
        (
            {"head": "hire", "hire": {"fusion": False, "fusion_layers": 1}},
            "fusion_layers: without fusion",
        ),
        ({"train__epoch": 3}, "Did you mean 'train.epochs'"),
    ],
)
def test_settings_that_do_not_fit(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        settings_of(values.pop("model", "m"), tmp_path, tmp_path, **values)


def test_a_run_without_a_task_is_refused(tune: Tune) -> None:
    with pytest.raises(UserError, match="--task: required; finetune/compare.py is for your own"):
        tune(task="")


@pytest.mark.parametrize(
    ("size", "rows", "batch", "steps", "every"),
    [
        (100, 100, 4, 500, 50),
        (1000, 1000, 8, 2500, 250),
        ("full", 2490, 16, 3120, 312),
        ("full", 67349, 16, 84200, 500),
        ("full", 250, 16, 320, 32),
        (1000, 80, 4, 400, 40),
    ],
)
def test_settings_of_the_paper(size: Any, rows: int, batch: int, steps: int, every: int) -> None:
    sampler = StepPlan(settings_of("m", Path("x"), Path("x"), train_size=size), [rows])
    assert (sampler.batch_size, sampler.steps, sampler.eval_every) == (batch, steps, every)


def test_the_default_batch_of_isobn(tmp_path: Path) -> None:
    """Its statistics need more rows."""
    isobn = settings_of("m", tmp_path, tmp_path, head="isobn", train_size=100)
    assert StepPlan(isobn, [100]).batch_size == 32


def test_the_recipe_of_a_run_gives_the_run(tmp_path: Path) -> None:
    values: dict[str, Any] = {"isobn__beta": 1e-5, "train__adam_epsilon": 1e-6, "subset": 3}
    settings = settings_of("m", tmp_path, tmp_path, head="isobn", pooling="mean", **values)
    (tmp_path / "settings.yaml").write_text(to_yaml(settings))
    again = load_settings(RunSettings, [tmp_path / "settings.yaml"])
    assert again == settings and again.train.adam_epsilon == 1e-6


def test_only_a_run_that_takes_all_rows_of_all_tasks_has_no_subset(
    tiny_bert: Path, glue: Path, tmp_path: Path
) -> None:
    """The tasks have 20 and 120 rows: a size of 20 leaves the second one its subsets, 120 does not."""
    shutil.copytree(glue, tmp_path / "glue")
    write_tsv(tmp_path / "glue/SST-2/train.tsv", "sentence\tlabel", sentiment_rows(20, 1))
    values: dict[str, Any] = QUICK | {"head": "cln", "task": "sst2,stsb", "subset": 2}
    for size, subset in ((20, 2), (120, 1)):
        values["train_size"] = size
        record = finetune(tiny_bert, tmp_path / "glue", tmp_path, **values)
        assert record["subset"] == subset
