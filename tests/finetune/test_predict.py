"""New rows are labelled as the saved model was trained to, whatever file they come in."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune import run
from finetune.data.tasks import TASKS
from finetune.predict import answers_of, load_task, main
from multicls.errors import UserError
from tests.finetune.conftest import NOUNS

WORDS = {"fine": "nar", "poor": "ros", "same": "lol"}
TEXTS = [f"len {NOUNS[n % 6]} los {list(WORDS.values())[n % 3]}" for n in range(48)]
LABELS = [list(WORDS)[n % 3] for n in range(48)]


def write_csv(path: Path, rows: list[dict[str, Any]], separator: str = ",") -> str:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


def train(model: Path, folder: Path, *options: str) -> Path:
    arguments = [
        "--model",
        str(model),
        "--head",
        "cls",
        "--max_length",
        "32",
        "--output_dir",
        str(folder),
        "--save_model",
    ]
    assert run.main([*arguments, *options]) == 0
    (saved,) = (folder / "models").iterdir()
    return saved


@pytest.fixture(scope="module")
def three_classes(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that has learnt three classes of a CSV file."""
    folder = tmp_path_factory.mktemp("three")
    file = write_csv(folder / "t.csv", [{"text": a, "label": b} for a, b in zip(TEXTS, LABELS, strict=True)])
    return train(tiny_bert, folder / "out", "--train_file", file, "--dev_file", file, "--epochs", "12",
                 "--learning_rate", "1e-3")  # fmt: skip


def test_labels_probabilities_and_all_input_columns(three_classes: Path, tmp_path: Path, capsys: Any) -> None:
    rows = [{"id": f"{n}", "text": text, "note": 'a "b";\nc'} for n, text in enumerate(TEXTS[:10])]
    assert main([str(three_classes), write_csv(tmp_path / "new.csv", rows, ";")]) == 0
    found = read_csv(tmp_path / "new.predictions.csv")
    assert [{name: row[name] for name in rows[0]} for row in found] == rows
    assert list(found[0]) == ["id", "text", "note", "label", "p_fine", "p_poor", "p_same"]
    assert [row["label"] for row in found] == LABELS[:10]
    for row in found:
        shares = {name: float(row[f"p_{name}"]) for name in WORDS}
        assert abs(sum(shares.values()) - 1) < 1e-5 and max(shares, key=shares.__getitem__) == row["label"]
    text = capsys.readouterr().out
    assert "10 rows: 4 fine, 3 poor, 3 same" in text and f"written:  {tmp_path / 'new.predictions.csv'}" in text


def test_the_probabilities_are_those_of_the_run(three_classes: Path, tmp_path: Path) -> None:
    saved = three_classes.parents[1] / "predictions" / f"{three_classes.name}.npz"
    with np.load(saved, allow_pickle=False) as arrays:
        logits = arrays["logits"]
    main([str(three_classes), write_csv(tmp_path / "new.csv", [{"text": text} for text in TEXTS]), "--batch_size", "7"])
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    found = [[float(row[f"p_{name}"]) for name in WORDS] for row in read_csv(tmp_path / "new.predictions.csv")]
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_rows_with_labels_are_scored_and_keep_theirs(three_classes: Path, tmp_path: Path, capsys: Any) -> None:
    rows = [{"text": text, "label": label} for text, label in zip(TEXTS[:9], LABELS[1:10], strict=True)]
    (tmp_path / "new.json").write_text(json.dumps(rows))
    main([str(three_classes), str(tmp_path / "new.json"), "--output", str(tmp_path / "out.jsonl")])
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["label"] for row in found] == LABELS[1:10] and [row["predicted_label"] for row in found] == LABELS[:9]
    assert "against column 'label': acc 0.00  macro_f1 0.00" in capsys.readouterr().out
    rows[2]["label"] = "unheard"
    (tmp_path / "new.json").write_text(json.dumps(rows))
    main([str(three_classes), str(tmp_path / "new.json"), "--output", "-"])
    output = capsys.readouterr()
    assert len(list(csv.DictReader(io.StringIO(output.out)))) == 9, "stdout holds the rows and nothing else"
    assert "not scored" in output.err and "row 3: label 'unheard' is none of train's" in output.err


def test_other_columns_and_parquet(three_classes: Path, tmp_path: Path) -> None:
    import pandas

    pandas.DataFrame({"body": TEXTS[:4]}).to_parquet(tmp_path / "new.parquet")
    main([str(three_classes), str(tmp_path / "new.parquet"), "--text_column", "body"])
    assert [row["label"] for row in read_csv(tmp_path / "new.predictions.csv")] == LABELS[:4]


def test_a_model_of_a_benchmark_and_a_regression(tiny_bert: Path, glue: Path, tmp_path: Path, capsys: Any) -> None:
    saved = train(tiny_bert, tmp_path / "out", "--task", "stsb", "--data_dir", str(glue), "--max_steps", "2")
    assert main([str(saved), str(glue / "STS-B" / "dev.tsv"), "--output", str(tmp_path / "x.csv")]) == 0
    found = read_csv(tmp_path / "x.csv")
    assert len(found) == 60 and {"sentence1", "score", "predicted_score"} <= set(found[0])
    text = capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "results.jsonl").read_text())
    assert f"against column 'score': spearman {100 * record['score']:.2f}" in text, "the score of the run"


def test_several_labels_a_row() -> None:
    from finetune.data.tasks import Task

    task = Task("own_m", (("text",),), ("a", "b"), ("micro_f1",), "single", "own", multi_label=True)
    found = answers_of(task, np.array([[2.0, 0.1], [-1.0, 3.0], [-1.0, -2.0]]))
    assert found["label"] == ["a|b", "b", ""] and found["p_a"][0] == pytest.approx(1 / (1 + np.exp(-2.0)), abs=1e-6)


def test_several_labels_a_row_from_training_to_new_rows(tiny_bert: Path, tmp_path: Path, capsys: Any) -> None:
    rows = [{"text": text, "label": "poor|odd" if "ros" in text else "fine"} for text in TEXTS]
    file = write_csv(tmp_path / "t.csv", rows)
    saved = train(tiny_bert, tmp_path / "out", "--train_file", file, "--test_file", file, "--label_type", "multi_label",
                  "--epochs", "6", "--learning_rate", "1e-3")  # fmt: skip
    assert main([str(saved), file, "--output", str(tmp_path / "x.csv")]) == 0
    found = read_csv(tmp_path / "x.csv")
    for row in found:
        given = row["predicted_label"].split("|")
        shares = {name: float(row[f"p_{name}"]) for name in ("fine", "odd", "poor")}
        assert all((share > 0.5) == (name in given) for name, share in shares.items() if abs(share - 0.5) > 1e-5)
    assert "against column 'label': micro_f1" in capsys.readouterr().out


def save_config(folder: Path, *others: dict[str, Any], **about: Any) -> str:
    """A folder without weights: all that is wrong is told before they are read."""
    task = {"name": "own_x", "labels": ["a", "b"], "num_choices": 0, "num_spans": 0, "is_regression": False} | about
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "encoder-with-head", "tasks": [task, *others]}))
    return str(folder)


def test_what_the_model_was_trained_on_decides(tmp_path: Path) -> None:
    about = {"text_columns": ["q", "a"], "label_column": "kind", "max_length": 48, "multi_label": True}
    folder = save_config(tmp_path / "a", {"name": "rte"}, **about)
    with pytest.raises(UserError, match="several tasks; add --task, one of own_x, rte"):
        load_task(folder)
    with pytest.raises(UserError, match="--task own_y: .*Did you mean 'own_x'"):
        load_task(folder, "own_y")
    found = load_task(folder, "own_x")
    assert (found.task.fields, found.task.label, found.max_length) == ((("q",), ("a",)), ("kind",), 48)
    assert found.task.multi_label and load_task(folder, "rte").task == TASKS["rte"]
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"num_choices": 2}, "own_x chooses between sentences"),
        ({"num_spans": 2}, "judges marked words"),
        ({"is_regression": True}, "does not hold the scale of its scores"),
    )
    for change, message in wrong:
        with pytest.raises(UserError, match=message):
            load_task(save_config(tmp_path / next(iter(change)), **change))


@pytest.mark.parametrize(("name", "options", "message"), [
    ("new.csv", (), "no column 'text'.*Did you mean 'texts'\\?"),
    ("new.csv", ("--text_column", "texts,id"), "reads 1 text\\(s\\) a row, not 2"),
    ("new.csv", ("--text_column", "body"), "no column 'body'"),
    ("new.csv", ("--text_column", "texts", "--output", "{}/new.csv"), "these are the rows to label"),
    ("new.csv", ("--text_column", "texts", "--output", "x.xlsx"), "must end in .csv or .jsonl"),
    ("new.csv", ("--text_column", "texts", "--batch_size", "0"), "--batch_size 0"),
    ("nwe.csv", (), "no such file. Did you mean .new.csv"),
])  # fmt: skip
def test_bad_input_is_named(name: str, options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    model, rows = save_config(tmp_path / "model", text_columns=["text"]), tmp_path / "rows"
    rows.mkdir()
    write_csv(rows / "new.csv", [{"id": "1", "texts": "a"}])
    with pytest.raises(UserError, match=message):
        main([model, str(rows / name), *(option.format(rows) for option in options)])
    assert [path.name for path in rows.iterdir()] == ["new.csv"]


def test_a_folder_that_is_no_fine_tuned_model(tiny_bert: Path, tmp_path: Path) -> None:
    for folder in (tiny_bert, tmp_path):
        with pytest.raises(UserError, match="not a fine-tuned model. .*run.py ... --save_model"):
            main([str(folder), "new.csv"])
