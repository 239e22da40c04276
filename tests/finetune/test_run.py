"""One run, from rows to its folder: records, refusals, messages, locks, saved models and cards."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.preprocessing import StandardScaler
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from finetune import grid
from finetune.benchmark_tasks import read_task
from finetune.fitted import (
    REGRESSION,
    STRENGTHS,
    apply_layer,
    fit_classifier,
    fit_layer,
    fit_words,
)
from finetune.heads.build import Incompatible
from finetune.metrics import score_predictions
from finetune.predict import predict
from finetune.results import load_predictions, load_results
from finetune.run import main
from finetune.settings import OwnDataSettings, RunSettings
from finetune.tasks import TASKS, Example, TaskData
from finetune.training import ChunkSampler
from multicls.errors import UserError
from multicls.files import FolderInUse, locked, read_json
from multicls.settings import load_settings, to_yaml
from tests.finetune.conftest import Tune, sentiment_rows, write_tsv
from tests.finetune.runs import finetune, logits_of, score_of, settings_of, write_rows

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
    arrays = load_predictions(folder, "sst2")["dev"]
    assert score_predictions(TASKS["sst2"], arrays) == pytest.approx(dev["scores"])
    files = {"record.json", "settings.yaml", "predictions.parquet", "runs", ".lock"}
    assert {path.name for path in folder.iterdir()} <= files
    events = EventAccumulator(str(next((folder / "runs").iterdir()))).Reload()
    assert {"eval/score", "eval/sst2_acc", "train/loss"} <= set(events.Tags()["scalars"])
    assert load_results(tmp_path)["selection_score"].tolist() == [dev["scores"]["acc"]]
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
    with pytest.raises(UserError, match=r"another run \(trainer.optim None, not adafactor\)"):
        tune(**named, trainer={"optim": "adafactor"})
    path = Path(record["path"]) / "record.json"
    path.write_text(path.read_text().replace('"format": ', '"format": 1'))
    with pytest.raises(UserError, match="another version"):
        tune(**named)


def test_other_own_rows_under_one_name_are_refused(tmp_path: Path) -> None:
    """A run or grid on other rows is refused; the test file counts, the names of files do not."""
    files = {}
    for name, word in (("one", "late"), ("two", "lost"), ("copy", "late")):
        rows = [{"text": f"{(word, 'broken')[n % 2]} {n}", "label": n % 2} for n in range(30)]
        files[name] = write_rows(tmp_path / f"{name}.csv", rows)

    def run(train: str, test: str) -> list[str]:
        own = ["--train_file", files[train], "--test_file", files[test], "--task_name", "tickets"]
        return [*own, "--output_dir", str(tmp_path / "results")]

    head, systems = ["--head", "tfidf", "--name", "tfidf"], tmp_path / "grid.yaml"
    systems.write_text("systems: [tfidf]")
    grids = ["--recipe", str(systems)]
    with pytest.raises(UserError, match="no column 'x'"):
        main([*head, *run("one", "one"), "--text_column", "x"])
    assert not (tmp_path / "results").exists()
    assert main([*head, *run("one", "one")]) == 0
    for command, flags in ((main, head), (grid.main, grids)):
        for words in (run("one", "two"), run("two", "one")):
            with pytest.raises(UserError, match="holds another run .*other rows"):
                command([*flags, *words])
        assert command([*flags, *run("copy", "one")]) == 0, "the same rows"


def test_the_next_command_labels_new_rows_not_those_of_training(
    tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"len {('ros', 'nar')[n % 2]} {n}", "label": n % 2} for n in range(20)]
    file = write_rows(tmp_path / "tickets.csv", rows)
    words = ["--model", str(tiny_bert), "--train_file", file, "--head", "mean", "--save_model"]
    words += ["--max_length", "24", "--max_steps", "1", "--output_dir", str(tmp_path)]
    assert main(words) == 0
    (line,) = (li for li in capsys.readouterr().out.splitlines() if li.startswith("next:"))
    assert "finetune/predict.py" in line and line.endswith("p1-d1-s1/model ROWS.csv")


def test_the_card_of_a_saved_model(tune: Tune, tiny_bert: Path, tmp_path: Path) -> None:
    record = tune(**QUICK, task="stsb", save_model=True)
    card = (Path(record["path"]) / "model" / "README.md").read_text()
    for text in ("pipeline_tag: text-", "| spearman | dev |", "majority class", "95 % interval"):
        assert text in card
    assert "two texts: sentence1, sentence2." in card
    assert str(tmp_path) not in card and str(tiny_bert) not in card


def test_fitted_heads(tiny_multicls: Path, glue: Path, tmp_path: Path) -> None:
    """`probe` on each pooling, `tfidf` without a model; words decide the label, so both must find it."""
    fitted: dict[str, Any] = {"train__learning_rate": "", "train_size": 60, "selection": "holdout"}
    for pooling in ("cls", "facets", "mean_topics", "facets_topics"):
        values = fitted | {"head": "probe", "pooling": pooling, "save_model": True}
        record = finetune(tiny_multicls, glue, tmp_path, **values)
        assert score_of(record) > 0.9 and "history" not in record
        model, dev = str(Path(record["path"]) / "model"), read_task(TASKS["sst2"], str(glue)).dev
        again = predict(model, 0, replace(TASKS["sst2"], max_length=24), dev)
        expected = logits_of(record) / record["tasks"][0]["temperature"]
        np.testing.assert_allclose(again, expected, rtol=1e-3, err_msg=pooling)
    model_free: dict[str, Any] = fitted | {"head": "tfidf", "max_length": ""}
    assert score_of(finetune("", glue, tmp_path, **model_free)) > 0.9
    scores = finetune("", glue, tmp_path, **model_free | {"task": "stsb"})
    assert score_of(scores) > 0.5 and scores["system"] == "tfidf"


classify = partial(fit_classifier, REGRESSION, {"C": STRENGTHS})


@pytest.mark.parametrize("labels", [[0, 1] * 10 + [2], [1] * 21])
def test_fitted_heads_learn_beside_a_class_of_one_row_and_from_one_class(labels: list[int]) -> None:
    """C is chosen also beside a class of one row."""
    features = np.eye(3)[labels] + np.random.default_rng(0).normal(0, 0.3, (21, 3))
    classifier = classify(features, np.array(labels), list(map(str, range(21))), 1)
    assert classifier.predict(features)[:20].tolist() == labels[:20]
    assert len(set(labels)) == 1 or classifier.C != 1.0


def test_a_probe_is_a_linear_layer() -> None:
    """Folded standardisation and coefficients give scikit-learn's numbers; an unseen class is unlikely."""
    draw = np.random.default_rng(0)
    features = draw.normal(3, [0.1, 1, 10, 0.01], (60, 4))
    four = replace(TASKS["sst2"], labels=tuple("abcd"))
    for classes in (2, 3):
        labels = (features[:, 1] > 3).astype(int) + (features[:, 2] > 9) * (classes - 2)
        rows = [Example(f"{n}", ("",), float(label)) for n, label in enumerate(labels)]
        outputs = apply_layer(fit_layer(four, features, rows, seed=1), features)
        scaled = StandardScaler().fit_transform(features)
        reference = classify(scaled, labels, [row.id for row in rows], 1)
        found, expected = softmax(outputs.astype(float), axis=1), reference.predict_proba(scaled)
        np.testing.assert_allclose(found[:, :classes], expected, atol=1e-5)
        assert found[:, classes:].max() < 1e-9
    dead = np.concatenate([features, draw.normal(0, 1e-30, (60, 1)), np.ones((60, 1))], axis=1)
    weight, bias = fit_layer(four, dead, rows, seed=1)
    assert not weight[:, 4:].any(), "a dimension that is almost 0 has no weight of 1e30"
    np.testing.assert_allclose(apply_layer((weight, bias), dead), outputs, atol=1e-4)
    scores = replace(TASKS["stsb"], label_scale=2.0)
    rows = [Example(f"{n}", ("",), float(2 * row[1] - row[2])) for n, row in enumerate(features)]
    outputs = apply_layer(fit_layer(scores, features, rows, seed=1), features)[:, 0]
    np.testing.assert_allclose(2 * outputs, [row.label for row in rows], atol=0.2)
    several = replace(TASKS["sst2"], labels=("a", "b"), multi_label=True)
    marks = [(float(row[1] > 3), float(row[2] > 3)) for row in features]
    rows = [Example(f"{n}", ("",), 0.0, labels=mark) for n, mark in enumerate(marks)]
    outputs = apply_layer(fit_layer(several, features, rows, seed=1), features)
    assert ((outputs > 0) == (np.array(marks) > 0)).mean() > 0.95


def test_fine_tuning_starts_from_a_probe(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    """At a rate of almost 0 the model is the probe; every head takes it, and classes of several tasks."""
    still = {"train__learning_rate": 1e-30, "train__max_steps": 1, "train_size": 60}
    record = finetune(tiny_bert, glue, tmp_path, head="mean", train__init="probe", **still)
    probe = {"head": "probe", "pooling": "mean", "train__learning_rate": "", "train_size": 60}
    np.testing.assert_allclose(
        logits_of(record), logits_of(finetune(tiny_bert, glue, tmp_path, **probe)), atol=1e-4
    )
    moving = still | {"train__learning_rate": 1e-3, "train__max_steps": 20, "name": "moving"}
    moved = finetune(tiny_bert, glue, tmp_path, head="mean", train__init="probe", **moving)
    assert np.abs(logits_of(moved) - logits_of(record)).max() > 0.1, "all weights are trained"
    for head, task in (("hire", "sst2"), ("cln", "sst2,stsb")):
        values = still | {"head": head, "task": task, "train__init": "probe"}
        assert score_of(finetune(tiny_bert, glue, tmp_path, **values)) > 0.6


def test_the_bag_of_words_chooses_its_n_grams_and_learns_from_all_labels() -> None:
    """Order decides the first task, so pairs of words are needed; the validation rows alone have class 2."""
    orders = [("a good bad", 0.0), ("a bad good", 1.0)]
    rows = [Example(f"{n}", (f"{text} {n}",), label) for n in range(20) for text, label in orders]
    three = replace(TASKS["sst2"], labels=tuple("abc"))
    held = [Example(f"v{n}", ("rare words",), 2.0) for n in range(4)]
    data = TaskData(three, rows, [*rows[:4], *held], validation=[*rows[:2], *held])
    (outputs,) = fit_words(data, 1)
    assert outputs["dev"].argmax(axis=1).tolist() == [0, 1, 0, 1, 2, 2, 2, 2]
    assert outputs["validation"].argmax(axis=1).max() < 2, "they have not been seen there"


def test_fitted_heads_refuse_choices_and_several_labels_a_row() -> None:
    """A grid leaves such runs out."""
    several = replace(TASKS["sst2"], multi_label=True)
    for task, what in ((TASKS["copa"], "more than a text"), (several, "several labels a row")):
        with pytest.raises(Incompatible, match=f"{what}.*; use another head"):
            fit_words(TaskData(task, [], []), 1)


def test_several_tasks_with_cln(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    record = finetune(
        tiny_bert, glue, tmp_path, head="cln", task="sst2,stsb", **QUICK, save_model=True
    )
    assert [task["task"] for task in record["tasks"]] == ["sst2", "stsb"]
    means = [e["score"] for e in record["history"]]
    assert Path(record["path"]).parent.name == "sst2+stsb-20"
    runs = load_results(tmp_path)
    assert len(runs) == 2 and runs["selection_score"].mean() == pytest.approx(max(means))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": "rt"}, "no such task. Did you mean 'rte'"),
        ({"head": "cl"}, "no such head. Did you mean 'cls'"),
        ({"task": ""}, "set either --task NAME"),
        ({"model": ""}, "--model: required"),
        ({"head": "cls", "task": "rte,cola"}, "only --head cln trains several"),
        ({"head": "cln", "task": "rte,rte"}, "each once"),
        ({"head": "isobn", "train__micro_batch_size": 1}, "must be 2 or more"),
        ({"head": "isobn", "train__batch_size": 1}, "must be 2 or more"),
        ({"pooling": "mean"}, "--pooling: the head cls does not read it"),
        ({"isobn__beta": 1.0}, "--isobn.beta: the head cls does not read it"),
        ({"head": "probe", "train__epochs": 5}, "--epochs: the head probe does not read it"),
        ({"head": "tfidf", "save_model": True}, "--save_model: the head tfidf"),
        ({"train_size": "x"}, "valid integer"),
        ({"own__dev_file": "d.csv"}, "--dev_file is for your own rows: set --train_file"),
        ({"own__metric": "f1"}, "--metric is for your own rows: set --train_file"),
        ({"own__text_column": "a,b,c"}, "text_column"),
        ({"own__train_file": "t.csv", "task": ""}, "--data_dir is for benchmarks"),
        ({"own": {"train_file": "t", "dev_file": "d", "dev_share": 0.3}}, "either a dev_file or a"),
        ({"train__epochs": 0}, "train.epochs"),
        ({"trainer": {"fp16": True}}, "trainer.fp16: not one to set here"),
        ({"trainer": {"optm": "x"}}, "trainer.optm: .* Did you mean 'optim'"),
        (
            {"trainer": {"metric_for_best_model": "train_loss"}},
            "trainer.metric_for_best_model: not",
        ),
        ({"trainer": {"dataloader_prefetch_factor": 2}}, "trainer.dataloader_prefetch_factor: not"),
        ({"trainer": {"lr_scheduler_type": "reduce_lr_on_plateau"}}, "does not work here"),
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


def test_a_setting_of_transformers_that_fails_is_named(
    tiny_bert: Path, glue: Path, tmp_path: Path
) -> None:
    trainer = {"lr_scheduler_type": "warmup_stable_decay"}  # needs settings of its own
    with pytest.raises(
        UserError, match=r"trainer \{'lr_scheduler_type': 'warmup_stable_decay'\}: "
    ):
        finetune(tiny_bert, glue, tmp_path, train_size=20, trainer=trainer)


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
    sampler = ChunkSampler(settings_of("m", Path("x"), Path("x"), train_size=size), [rows])
    assert (sampler.batch_size, sampler.steps, sampler.eval_every) == (batch, steps, every)


def test_the_default_batch_of_other_runs(tmp_path: Path) -> None:
    """The batch of own rows follows their number, whatever the flag; IsoBN's statistics need more rows."""
    own = RunSettings(model="m", head="cls", own=OwnDataSettings(train_file="t.csv"))
    assert [ChunkSampler(own, [rows]).batch_size for rows in (80, 800, 8000)] == [4, 8, 16]
    isobn = settings_of("m", tmp_path, tmp_path, head="isobn", train_size=100)
    assert ChunkSampler(isobn, [100]).batch_size == 32


def test_the_recipe_of_a_run_gives_the_run(tmp_path: Path) -> None:
    trainer = {"optim": "adafactor", "adam_epsilon": 1e-6, "full_determinism": "true"}
    values: dict[str, Any] = {"isobn__beta": 1e-5, "trainer": trainer, "subset": 3}
    settings = settings_of("m", tmp_path, tmp_path, head="isobn", pooling="mean", **values)
    (tmp_path / "settings.yaml").write_text(to_yaml(settings))
    again = load_settings(RunSettings, [tmp_path / "settings.yaml"])
    assert again == settings and again.trainer["full_determinism"] is True


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
