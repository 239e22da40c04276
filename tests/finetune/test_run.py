"""One run, from rows to its folder: records, refusals, messages, locks, saved models and cards."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from finetune import grid
from finetune.metrics import score_predictions
from finetune.results import load_predictions, load_results
from finetune.run import main
from finetune.settings import OwnDataSettings, RunSettings
from finetune.tasks import TASKS
from finetune.training import ChunkSampler
from multicls.errors import UserError
from multicls.files import FolderInUse, locked, read_json
from multicls.settings import load_settings, to_yaml
from tests.finetune.conftest import Tune, sentiment_rows, write_tsv
from tests.finetune.runs import finetune, settings_of, write_rows

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
    with pytest.raises(UserError, match=r"another run \(trainer.optim None, not adafactor\)"):
        tune(**named, trainer={"optim": "adafactor"})
    path = Path(record["path"]) / "record.json"
    path.write_text(path.read_text().replace('"format": ', '"format": 1'))
    with pytest.raises(UserError, match="another version"):
        tune(**named)


def test_other_own_rows_under_one_name_are_refused(tiny_bert: Path, tmp_path: Path) -> None:
    """A run or grid on other rows is refused; the test file counts, the names of files do not."""
    files = {}
    for name, word in (("one", "late"), ("two", "lost"), ("copy", "late")):
        rows = [{"text": f"{(word, 'broken')[n % 2]} {n}", "label": n % 2} for n in range(30)]
        files[name] = write_rows(tmp_path / f"{name}.csv", rows)

    def run(train: str, test: str) -> list[str]:
        own = ["--train_file", files[train], "--test_file", files[test], "--task_name", "tickets"]
        quick = ["--max_steps", "1", "--max_length", "24", "--selection", "holdout"]
        return [*own, *quick, "--output_dir", str(tmp_path / "results")]

    head = ["--head", "mean", "--name", "m-mean", "--model", str(tiny_bert)]
    grids = ["--systems", "mean", "--model", f"m={tiny_bert}"]
    with pytest.raises(UserError, match="no column 'x'"):
        main([*head, *run("one", "one"), "--text_column", "x"])
    assert not (tmp_path / "results").exists()
    assert main([*head, *run("one", "one")]) == 0
    for command, flags in ((main, head), (grid.main, grids)):
        for words in (run("one", "two"), run("two", "one")):
            with pytest.raises(UserError, match="holds another run .*other rows"):
                command([*flags, *words])
        assert command([*flags, *run("copy", "one")]) == 0, "the same rows"


def test_a_run_on_own_rows_holds_rows_out_and_shows_an_interval(
    tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"len {('ros', 'nar')[n % 2]} {n}", "label": n % 2} for n in range(40)]
    words = ["--model", str(tiny_bert), "--max_length", "24", "--max_steps", "1"]
    words += ["--output_dir", str(tmp_path / "r"), "--train_file"]
    assert main([*words, write_rows(tmp_path / "t.csv", rows)]) == 0
    out = capsys.readouterr().out
    assert "95 % interval of acc for new rows: " in out and "optimistic" not in out
    record = read_json(next((tmp_path / "r").glob("*/*/*/record.json")))
    assert (record["head"], record["selection"]) == ("mean", "holdout")
    with pytest.raises(UserError, match="rows? to train on; set 8"):
        main([*words, write_rows(tmp_path / "few.csv", rows[:8])])


def test_the_smallest_error_picks_the_weights(
    tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MAE is in the unit of the labels, and the smallest counts, not the largest."""
    rows = [
        {"text": f"len {('ros', 'nar')[n % 2]} {n}", "label": n % 2 * 9 + 0.5} for n in range(60)
    ]
    words = ["--model", str(tiny_bert), "--max_length", "24", "--epochs", "4", "--metric", "mae"]
    words += ["--learning_rate", "3e-3", "--output_dir", str(tmp_path), "--save_model"]
    assert main([*words, "--train_file", write_rows(tmp_path / "t.csv", rows)]) == 0
    (path,) = tmp_path.glob("*/*/*/record.json")
    record = read_json(path)
    (entry,), history = record["tasks"], record["history"]
    errors = {evaluation["step"]: -evaluation["score"] for evaluation in history}
    assert errors[record["best_step"]] == min(errors.values()) < max(errors.values())
    error = entry["splits"]["dev"]["scores"]["mae"]
    assert 0 < error < 4.5 < 9 and f"mae {error:.2f}" in capsys.readouterr().out
    assert f"| mae | dev | {error:.1f} (95 %" in (path.parent / "model" / "README.md").read_text()


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
        ({"task": ""}, "set either --task NAME"),
        ({"model": ""}, "--model: required"),
        ({"head": "cls", "task": "rte,cola"}, "only --head cln trains several"),
        ({"head": "cln", "task": "rte,rte"}, "each once"),
        ({"head": "isobn", "train__micro_batch_size": 1}, "must be 2 or more"),
        ({"head": "isobn", "train__batch_size": 1}, "must be 2 or more"),
        ({"pooling": "mean"}, "--pooling: the head cls does not read it"),
        ({"isobn__beta": 1.0}, "--isobn.beta: the head cls does not read it"),
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
