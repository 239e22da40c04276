"""The command, from rows to a line of results, on a tiny random model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from finetune.data import selection
from finetune.data.metrics import score
from finetune.data.tasks import TASKS
from finetune.run import _announce, main, plan_run, run
from finetune.settings import FinetuneSettings
from finetune.store.results import Busy, Store
from multicls.errors import UserError
from tests.finetune.conftest import BAD, GOOD, NOUNS

REPOSITORY = Path(__file__).resolve().parents[2]
QUICK = ["--epochs", "8", "--learning_rate", "3e-3", "--max_length", "24"]


def lines(output_dir: Path) -> list[dict[str, Any]]:
    path = output_dir / "results.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def finetune(
    model: Path, glue: Path, output_dir: Path, *more: str, task: str = "sst2", head: str = "cls"
) -> dict[str, Any]:
    """Runs the command in this process and returns the last line of results."""
    arguments = ["--model", str(model), "--task", task, "--head", head, "--data_dir", str(glue)]
    assert main([*arguments, "--output_dir", str(output_dir), *QUICK, *more]) == 0
    return lines(output_dir)[-1]


def arrays_of(record: dict[str, Any], output_dir: Path) -> dict[str, Any]:
    return Store(output_dir).predictions(record["run_id"])


def check_predictions(record: dict[str, Any], output_dir: Path) -> dict[str, Any]:
    """The saved predictions give the metrics of the line."""
    task = TASKS[record["task"]]
    arrays = arrays_of(record, output_dir)
    outputs = arrays["scores"][:, None] if task.is_regression else arrays["logits"]
    assert score(task, arrays["labels"], outputs, arrays["parts"].tolist()) == pytest.approx(record["scores"], abs=1e-6)
    assert record["score"] == record["scores"][task.metrics[0]] == max(point[2] for point in record["history"])
    assert len(arrays["ids"]) == len(set(arrays["ids"])) == record["dev_rows"]
    assert len(arrays["train_rows"]) == record["train_rows"]
    return arrays


@pytest.mark.slow
def test_command_line_learns_saves_and_skips(
    tiny_multicls: Path, glue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output_dir = tmp_path / "out"
    arguments = ["--model", str(tiny_multicls), "--task", "sst2", "--train_size", "100", "--head", "multicls"]
    arguments += ["--data_dir", str(glue), "--output_dir", str(output_dir), *QUICK]
    command = [sys.executable, str(REPOSITORY / "finetune" / "run.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)  # from another folder
    assert done.returncode == 0, done.stderr
    assert main(arguments) == 0
    assert "already finished: sst2, 100 train rows, multicls, seed 1" in capsys.readouterr().out
    (record,) = lines(output_dir)
    assert record["score"] > 0.9, "one of two words decides the label"
    assert (record["train_rows"], record["dev_rows"], record["steps"]) == (100, 60, 200)
    assert record["resolved"]["train"]["batch_size"] == 4 and record["notes"] == []
    assert [point[0] for point in record["history"]] == [50, 100, 150, 200]
    check_predictions(record, output_dir)


def test_same_seed_same_numbers_other_seed_other_numbers(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    runs = [
        finetune(tiny_bert, glue, tmp_path / str(i), "--train_size", "20", "--seed", s) for i, s in enumerate("112")
    ]
    logits = [check_predictions(run, tmp_path / str(i))["logits"] for i, run in enumerate(runs)]
    assert runs[0]["run_id"] == runs[1]["run_id"] != runs[2]["run_id"]
    assert runs[0]["history"] == runs[1]["history"] and np.array_equal(logits[0], logits[1])
    assert not np.allclose(logits[0], logits[2])


def test_heads_differ_on_the_same_checkpoint(tiny_multicls: Path, glue: Path, tmp_path: Path) -> None:
    for head in ("cls", "multicls"):
        finetune(tiny_multicls, glue, tmp_path, "--train_size", "20", "--max_steps", "2", head=head)
    first, second = (check_predictions(run, tmp_path)["logits"] for run in lines(tmp_path))
    assert not np.allclose(first, second)


def test_regression_and_saved_model(tiny_multicls: Path, glue: Path, tmp_path: Path) -> None:
    record = finetune(tiny_multicls, glue, tmp_path, "--save_model", task="stsb", head="multicls")
    arrays = check_predictions(record, tmp_path)
    assert record["metric"] == "spearman" and set(record["scores"]) == {"spearman", "pearson"}
    assert record["score"] > 0.6 and 4.0 < arrays["labels"].max() <= 5.0

    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path / "models" / record["run_id"]
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    rows = [line.split("\t") for line in (glue / "STS-B" / "dev.tsv").read_text(encoding="utf-8").splitlines()[1:4]]
    with torch.no_grad():
        batch = tokenizer([row[7] for row in rows], [row[8] for row in rows], return_tensors="pt", padding=True)
        scores = 5.0 * model(**batch).logits[:, 0].numpy()
    np.testing.assert_allclose(scores, arrays["scores"][:3], atol=1e-4)


def test_train_from_dev_is_disjoint_and_recorded(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    record = finetune(tiny_bert, glue, tmp_path, "--train_from_dev", "--train_size", "10", task="qnli")
    arrays = check_predictions(record, tmp_path)
    assert (record["train_rows"], record["dev_rows"]) == (10, 30)
    assert not {f"dev:{row}" for row in arrays["train_rows"]} & set(arrays["ids"])
    assert "not the protocol" in record["notes"][0]


def test_best_evaluation_wins_and_patience_stops(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    record = finetune(tiny_bert, glue, tmp_path, "--eval_every", "1", "--patience", "3", "--learning_rate", "1e-9")
    assert (record["best_step"], record["steps"], len(record["history"])) == (1, 4, 4)


def test_a_run_without_its_line_is_repeated(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    finetune(tiny_bert, glue, tmp_path, "--max_steps", "1")
    (tmp_path / "results.jsonl").unlink()  # as if it had been killed after the predictions
    finetune(tiny_bert, glue, tmp_path, "--max_steps", "1")
    assert len(lines(tmp_path)) == 1


def test_a_non_finite_loss_stops_before_anything_is_written(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a finite number.*learning_rate"):
        finetune(tiny_bert, glue, tmp_path, "--learning_rate", "1e38", "--max_grad_norm", "1e30")
    assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()} <= {"tb"}


def test_a_size_beyond_the_rows_takes_all_and_says_so(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    record = finetune(tiny_bert, glue, tmp_path, "--train_size", "1k", "--max_steps", "1")
    (note,) = record["notes"]
    assert record["train_rows"] == 120 and note.startswith("--train_size 1000: there are 120 rows, and all are taken.")


def test_holdout_chooses_and_dev_only_reports(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    more = ("--train_size", "40", "--eval_every", "20")
    dev, held = (finetune(tiny_bert, glue, tmp_path, *more, "--selection", kind) for kind in ("dev", "holdout"))
    arrays = arrays_of(held, tmp_path)
    assert (held["train_rows"], held["holdout_rows"], held["dev_rows"]) == (32, 8, 60)
    both = [*arrays["train_rows"], *arrays["holdout_rows"]]
    assert sorted(both) == arrays_of(dev, tmp_path)["train_rows"].tolist()
    assert (dev["selection"], "holdout" in dev["requested"], held["requested"]["holdout"]) == ("dev", False, 0.2)
    drawn = tmp_path / "rows" / "sst2-40-uniform-seed1.json"
    published = json.loads(drawn.read_text(encoding="utf-8"))
    assert (published["split"], published["split_rows"], published["rows"]) == ("train", 120, sorted(both))
    best = {step: main for step, _, main in held["history"]}[held["best_step"]]
    assert score(TASKS["sst2"], arrays["holdout_labels"], arrays["holdout_logits"]) == {"acc": best}
    assert score(TASKS["sst2"], arrays["labels"], arrays["logits"]) == held["scores"]


def test_holdout_reports_the_best_weights_not_the_last(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    """The first evaluation is the best here, so dev must be that of a run that ends there."""
    more = ("--train_size", "40", "--selection", "holdout", "--eval_every", "4", "--warmup_ratio", "0", "--head", "cls")
    long = finetune(tiny_bert, glue, tmp_path, *more, "--learning_rate", "1e-7")
    assert (long["best_step"], long["steps"]) == (4, 64)
    again = finetune(tiny_bert, glue, tmp_path, *more, "--learning_rate", "1e-7", "--save_model")
    assert len(lines(tmp_path)) == 2 and again["run_id"] == long["run_id"], "repeated for the model, which was not kept"
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path / "models" / again["run_id"]
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    texts = [line.split("\t")[0] for line in (glue / "SST-2" / "dev.tsv").read_text(encoding="utf-8").splitlines()[1:]]
    with torch.no_grad():
        batch = AutoTokenizer.from_pretrained(folder)(texts, return_tensors="pt", padding=True)
        np.testing.assert_allclose(model(**batch).logits, arrays_of(again, tmp_path)["logits"], atol=1e-5)


def test_label_noise_changes_labels_and_balanced_the_rows(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    more = ("--train_size", "20", "--max_steps", "1")
    plain, noisy, balanced = (
        finetune(tiny_bert, glue, tmp_path, *more, *options)
        for options in ((), ("--label_noise", "0.5"), ("--sampling", "balanced"))
    )
    rows = [arrays_of(record, tmp_path)["train_rows"].tolist() for record in (plain, noisy, balanced)]
    assert rows[0] == rows[1] != rows[2]
    assert len(list((tmp_path / "rows").iterdir())) == 3
    assert plain["history"][0][1] != noisy["history"][0][1], "another loss at the same first step"


def test_tasks_together_get_a_line_each(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    more = ("--max_steps", "4", "--eval_every", "2", "--set", "cln.sampling=round_robin")
    finetune(tiny_bert, glue, tmp_path, *more, task="sst2,stsb", head="cln")
    first, second = lines(tmp_path)
    assert (first["task"], second["task"]) == ("sst2", "stsb") and first["label"] == "cln of sst2,stsb"
    assert first["best_step"] == second["best_step"] and first["run_id"] != second["run_id"]
    means = {a[0]: (a[2] + b[2]) / 2 for a, b in zip(first["history"], second["history"], strict=True)}
    assert means[first["best_step"]] == max(means.values())
    assert "logits" in arrays_of(first, tmp_path) and "scores" in arrays_of(second, tmp_path)
    board = EventAccumulator(str(Store(tmp_path).tensorboard_path(first["run_id"])))
    board.Reload()
    tags = board.Tags()["scalars"]
    assert {"dev/sst2/acc", "dev/stsb/spearman"} <= set(tags), tags
    assert not list((tmp_path / "snapshots").glob("*")), "removed when the results are written"
    finetune(tiny_bert, glue, tmp_path, *more, task="sst2,stsb", head="cln")
    assert len(lines(tmp_path)) == 2


def test_own_rows(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    for name in ("train", "dev"):
        rows = (glue / "SST-2" / f"{name}.tsv").read_text(encoding="utf-8").replace("sentence\t", "text\t", 1)
        (tmp_path / f"{name}.tsv").write_text(rows, encoding="utf-8")
    files = ["--train_file", str(tmp_path / "train.tsv"), "--dev_file", str(tmp_path / "dev.tsv")]
    more = [*files, "--output_dir", str(tmp_path), *QUICK]
    main(["--model", str(tiny_bert), "--head", "cls", *more])
    (record,) = lines(tmp_path)
    assert record["benchmark"] == "own" and record["metric"] == "acc" and record["score"] > 0.9
    with pytest.raises(UserError, match="own_train has train rows of its own"):
        main(["--model", str(tiny_bert), "--head", "cls", *more, "--train_from_dev", "--train_size", "9"])
    # No table of tasks holds it, and yet it is compared and averaged as any.
    for head, seed in (("cls", "2"), ("mean", "1")):
        main(["--model", str(tiny_bert), "--head", head, *more, "--seed", seed, "--max_steps", "1"])
    from finetune import report

    assert report.main([str(tmp_path), "--ensembles", "2"]) == 0 and len(lines(tmp_path)) == 3


def test_a_run_in_other_hands_is_left_to_them(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    values = {"model": str(tiny_bert), "task": "sst2", "head": "cls", "data_dir": str(glue)}
    settings = FinetuneSettings.model_validate(
        values | {"output_dir": str(tmp_path), "max_length": 24, "train": {"max_steps": 1}}
    )
    planned = plan_run(settings)
    assert planned.records() is None and not list(tmp_path.iterdir()), "planning writes nothing"
    with Store(tmp_path).claim(planned.run_ids[0]), pytest.raises(Busy, match="another process works on it"):
        run(settings)
    assert [record["run_id"] for record in run(settings)] == planned.run_ids
    assert plan_run(settings).records()


def test_a_folder_of_another_protocol_is_left_alone(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"run_id": "old"}\n', encoding="utf-8")
    with pytest.raises(UserError, match="protocol 1, this is protocol 3.*--output_dir"):
        finetune(tiny_bert, glue, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--task": "rtee"}, "--task rtee: no such task. Did you mean 'rte'?"),
        ({"--head": "multcls"}, "--head multcls: no such head. Did you mean 'multicls'?"),
        ({"--head": "multicls", "--max_length": "24"}, "plain bert checkpoint"),
        ({"--head": "isobn", "--pooling": "multicls"}, "--pooling multicls"),
        ({"--task": "sst2,stsb"}, "only --head cln trains several tasks"),
        ({"--task": "sst2,sst2", "--head": "cln"}, "given twice"),
        ({"--task": "stsb", "--train_size": "9", "--sampling": "balanced"}, "task stsb has scores for labels"),
        ({"--task": "stsb", "--label_noise": "0.1"}, "task stsb has scores for labels"),
        ({"--train_size": "1", "--selection": "holdout"}, "1 train row(s) or passage(s) cannot be divided"),
        ({"--config": "ds_configs/zer2.json"}, "Did you mean 'ds_configs/zero2.json'?"),
        ({"--train_size": "many"}, "--train_size many: must be a number of rows"),
        ({"--train_size": "0"}, "--train_size"),
        ({"--learning_rate": "-1"}, "--learning_rate -1: must be greater than 0"),
        ({"--model": "/nowhere/hf"}, "--model /nowhere/hf: no such folder"),
        ({"--data_dir": "/nowhere"}, "--data_dir /nowhere"),
        ({"--task": "qnli"}, "--train_from_dev"),
        ({"--max_length": "65", "--train_size": "9"}, "--max_length 65"),
        ({"--set": "train.epoch=3"}, "train.epoch: no such setting. Did you mean 'train.epochs'?"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(
    change: dict[str, str], message: str, tiny_bert: Path, glue: Path, tmp_path: Path
) -> None:
    options = {"--model": str(tiny_bert), "--task": "sst2", "--head": "cls", "--data_dir": str(glue)} | change
    arguments = [text for option in options.items() for text in option]
    with pytest.raises(UserError) as error:
        main([*arguments, "--output_dir", str(tmp_path / "out")])
    assert message in str(error.value)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


def test_one_rank_tells_the_warnings(
    tiny_bert: Path, glue: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"model": str(tiny_bert), "task": "sst2", "data_dir": str(glue), "head": "cls", "train_size": 1000}
    planned = plan_run(FinetuneSettings.model_validate(flags | {"output_dir": str(tmp_path / "out")}))
    for rank in (0, 1):
        monkeypatch.setattr("finetune.run.rank_and_world", lambda rank=rank: (rank, 2))
        _announce(planned)
    assert caplog.text.count("and all are taken") == 1


def test_a_stopped_run_tells_how_to_go_on(
    tiny_bert: Path, glue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("finetune.run._train", stop)
    with pytest.raises(KeyboardInterrupt):  # with which `run_command` exits with 130
        finetune(tiny_bert, glue, tmp_path)
    assert "stopped; finished runs are kept in" in capsys.readouterr().err


def test_a_misspelt_file_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,label\na,x\nb,y\nc,x\nd,y\ne,x\nf,y\n")
    code = f"""if True:
        import sys
        from finetune.run import main
        from multicls.errors import UserError
        for model, file in (("m", "tt"), ({str(tmp_path / "none")!r}, "t")):
            try:
                main(["--model", model, "--head", "cls", "--train_file", f"{tmp_path}/{{file}}.csv"])
            except UserError as error:
                print(error)
        assert not {{"torch", "transformers", "sklearn"}} & set(sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{tmp_path}/tt.csv: no such file. Did you mean 't.csv'?",
                                        f"--model {tmp_path}/none: no such folder."]  # fmt: skip


def test_settings_errors_exit_with_2_and_import_no_torch() -> None:
    script = str(REPOSITORY / "finetune" / "run.py")
    code = f"""if True:
        import os, runpy, sys
        os._exit = sys.exit  # with which the command ends
        sys.argv = ["run.py", "--task", "rte", "--head", "cls", "--epochs", "x"]
        try:
            runpy.run_path({script!r}, run_name="__main__")
        except SystemExit as stop:
            print(stop.code, {{"torch", "transformers", "sklearn"}} & set(sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2 set()"
    assert "--model: missing; give a pretraining run's hf/ folder" in done.stderr
    assert "--epochs x: must be a whole number" in done.stderr


def test_printed_config_is_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", "m", "--task", "rte", "--head", "cls", "--train_size", "1k", "--learning_rate", "5e-5"]
    main([*given, "--print_config"])
    printed = capsys.readouterr().out
    (tmp_path / "recipe.yaml").write_text(printed, encoding="utf-8")
    main(["--recipe", str(tmp_path / "recipe.yaml"), "--print_config"])
    assert capsys.readouterr().out == printed and "train_size: 1000" in printed


def test_a_run_of_run_py_completes_the_cell_of_a_grid(
    tiny_bert: Path, glue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from finetune import grid

    finetune(tiny_bert, glue, tmp_path, "--train_size", "16", "--max_steps", "2")
    recipe = tmp_path / "grid.yaml"
    recipe.write_text(
        "{systems: [cls], tasks: [sst2], train_sizes: [16], seeds: [1, 2], settings: {max_length: 24, train: "
        "{epochs: 8, learning_rate: 0.003, max_steps: 2}}}"
    )
    flags = ["--recipe", str(recipe), "--model", f"bert={tiny_bert}", "--data_dir", str(glue)]
    assert grid.main([*flags, "--output_dir", str(tmp_path), "--status"]) == 0
    assert capsys.readouterr().out.endswith("finished 1, impossible 0, failed 0, missing 1, of 2\n")


def test_tests_with_labels_are_scored(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    rows = (glue / "SST-2" / "dev.tsv").read_text(encoding="utf-8").replace("sentence\t", "text\t", 1)
    for name in ("train", "test"):
        (tmp_path / f"{name}.tsv").write_text(rows, encoding="utf-8")
    files = ["--train_file", str(tmp_path / "train.tsv"), "--test_file", str(tmp_path / "test.tsv")]
    main(["--model", str(tiny_bert), "--head", "cls", *files, "--output_dir", str(tmp_path / "out"), *QUICK])
    (record,) = lines(tmp_path / "out")
    (scores,) = record["test_scores"].values()
    assert scores["acc"] > 0.8 and record["dev_rows"] == 13, "a fifth of the rows of each class"


def test_other_data_under_one_name_are_refused_also_for_a_finished_run(tiny_bert: Path, tmp_path: Path) -> None:
    rows = [f"len {noun} los {word},{word in GOOD:d}" for noun in NOUNS for word in (*GOOD, *BAD)]
    file, test, command = tmp_path / "a.csv", tmp_path / "test.csv", ["--max_steps", "1", "--max_length", "24"]
    command += ["--model", str(tiny_bert), "--head", "cls", "--train_file", str(file), "--output_dir", str(tmp_path)]
    file.write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    test.write_text("\n".join(["text,label", *rows[:8]]), encoding="utf-8")
    main(command)
    main([*command, "--test_file", str(test)])  # a test set that comes later is no other data
    assert lines(tmp_path)[-1]["test_scores"].keys() == {"own_a"}
    selection._read.cache_clear()  # as another process
    selection._select.cache_clear()
    test.write_text("\n".join(["text,label", *rows[:7]]), encoding="utf-8")
    with pytest.raises(UserError, match="own_a-test.json.*read other data"):
        main([*command, "--test_file", str(test)])
    file.write_text("\n".join(["text,label", *rows[1:]]), encoding="utf-8")
    selection._read.cache_clear()
    selection._select.cache_clear()
    with pytest.raises(UserError, match="own_a.json.*read other data"):
        main(command)
    assert len(lines(tmp_path)) == 2


def test_a_probe_reads_in_the_precision_that_its_record_names(
    tiny_bert: Path, glue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.train import loop

    devices: list[str] = []
    monkeypatch.setattr("finetune.run.reset_peak_memory", devices.append)
    options = {"task": "sst2", "head": "probe"}
    plain = finetune(tiny_bert, glue, tmp_path / "plain", **options)
    monkeypatch.setattr(loop, "find_device", lambda: (loop.torch.device("cpu"), "bf16"))  # as a GPU
    chosen = finetune(tiny_bert, glue, tmp_path / "auto", **options)
    asked = finetune(tiny_bert, glue, tmp_path / "asked", "--precision", "bf16", **options)
    first, second, third = (arrays_of(record, tmp_path / name)["logits"] for record, name in
                            ((plain, "plain"), (chosen, "auto"), (asked, "asked")))  # fmt: skip
    assert chosen["run_id"] == asked["run_id"] != plain["run_id"]
    assert (second == third).all() and (first != second).any()
    assert devices == ["cpu"] * 3, "each record has the peak memory of its own run"


def test_a_snapshot_is_of_the_same_data(tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.train import loop

    folders = []

    def stop(*args: Any, snapshots: Path, **options: Any) -> None:
        folders.append(snapshots)
        raise UserError("stopped")

    monkeypatch.setattr(loop, "fine_tune", stop)
    for number, word in enumerate(NOUNS[:2]):
        (tmp_path / str(number)).mkdir()
        file = tmp_path / str(number) / "a.csv"
        file.write_text("text,label\n" + "".join(f"{word} {noun},{noun in NOUNS[:3]}\n" for noun in NOUNS))
        with pytest.raises(UserError, match="stopped"):
            main(["--model", str(tiny_bert), "--head", "cls", "--train_file", str(file), "--max_length", "24",
                  "--output_dir", str(tmp_path)])  # fmt: skip
    assert folders[0].parent == folders[1].parent and folders[0] != folders[1]
