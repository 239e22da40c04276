"""The command, from rows to a line of results, on a tiny random model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.metrics import score
from finetune.run import main
from finetune.tasks import TASKS
from multicls.errors import UserError

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


def check_predictions(record: dict[str, Any], output_dir: Path) -> dict[str, Any]:
    """The saved predictions give the metrics of the line."""
    task = TASKS[record["identity"]["task"]]
    with np.load(output_dir / "predictions" / f"{record['run_id']}.npz", allow_pickle=False) as file:
        arrays = dict(file)
    outputs = arrays["scores"][:, None] if task.is_regression else arrays["logits"]
    assert score(task, arrays["labels"], outputs, arrays["parts"].tolist()) == pytest.approx(record["scores"], abs=1e-6)
    assert record["score"] == record["scores"][task.metrics[0]] == max(point[2] for point in record["history"])
    assert len(arrays["ids"]) == len(set(arrays["ids"])) == record["dev_rows"]
    assert len(arrays["train_rows"]) == record["train_rows"]
    return arrays


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
    assert "already finished: sst2, 100 train rows, head multicls, seed 1" in capsys.readouterr().out
    (record,) = lines(output_dir)
    assert record["score"] > 0.9, "one of two words decides the label"
    assert (record["train_rows"], record["dev_rows"], record["steps"]) == (100, 60, 200)
    assert record["identity"]["train"]["batch_size"] == 4 and record["notes"] == []
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
        finetune(tiny_bert, glue, tmp_path / "out", "--learning_rate", "1e38", "--clip", "1e30")
    assert not (tmp_path / "out").exists()


def test_a_size_beyond_the_rows_takes_all_and_says_so(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    record = finetune(tiny_bert, glue, tmp_path, "--train_size", "1k", "--max_steps", "1")
    assert record["train_rows"] == 120 and record["notes"] == ["1000 train rows asked for, 120 exist: all taken"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--task": "rtee"}, "--task rtee: no such task. Did you mean 'rte'?"),
        ({"--head": "multcls"}, "--head multcls: no such head. Did you mean 'multicls'?"),
        ({"--head": "multicls", "--max_length": "24"}, "plain bert checkpoint"),
        ({"--train_size": "many"}, "--train_size: train_size = 'many'"),
        ({"--train_size": "0"}, "--train_size"),
        ({"--learning_rate": "-1"}, "--learning_rate: train.learning_rate = '-1'"),
        ({"--model": "/nowhere/hf"}, "--model /nowhere/hf: no such folder"),
        ({"--data_dir": "/nowhere"}, "--data_dir /nowhere"),
        ({"--task": "qnli"}, "--train_from_dev"),
        ({"--max_length": "65"}, "--max_length 65"),
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
    assert not (tmp_path / "out").exists()


def test_settings_errors_exit_with_2_and_import_no_torch() -> None:
    script = str(REPOSITORY / "finetune" / "run.py")
    code = f"""if True:
        import runpy, sys
        sys.argv = ["run.py", "--task", "rte", "--head", "cls", "--epochs", "x"]
        try:
            runpy.run_path({script!r}, run_name="__main__")
        except SystemExit as stop:
            print(stop.code, {{"torch", "transformers", "sklearn"}} & set(sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2 set()"
    assert "model: this setting is required" in done.stderr and "train.epochs = 'x'" in done.stderr


def test_printed_config_is_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", "m", "--task", "rte", "--head", "cls", "--train_size", "1k", "--learning_rate", "5e-5"]
    main([*given, "--print_config"])
    printed = capsys.readouterr().out
    (tmp_path / "recipe.yaml").write_text(printed, encoding="utf-8")
    main(["--recipe", str(tmp_path / "recipe.yaml"), "--print_config"])
    assert capsys.readouterr().out == printed and "train_size: 1000" in printed
