"""New rows are labelled as the saved model was trained to, whatever file they come in."""

import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from finetune.predict import answers_of, find_task, main, predict_command
from finetune.predict import write_rows as write_answers
from finetune.tasks import TASKS
from multicls.errors import UserError
from multicls.files import write_json
from multicls.tables import RawRows
from tests.finetune.conftest import NOUNS
from tests.finetune.runs import finetune, write_rows

WORDS = {"fine": "nar", "poor": "ros", "same": "lol"}
LABELS = [list(WORDS)[n % 3] for n in range(48)]
TEXTS = [f"len {NOUNS[n % 6]} los {WORDS[LABELS[n]]}" for n in range(48)]


def train(model: Path, folder: Path, rows: list[dict[str, Any]], **values: Any) -> str:
    file = write_rows(folder / "t.jsonl", rows)
    common = {"task": "", "data_dir": "", "save_model": True, "own__train_file": file}
    common |= {"selection": "dev"}
    record = finetune(model, folder, folder / "r", **common, train__epochs=20, **values)
    return str(Path(record["path"]) / "model")


@pytest.fixture(scope="module")
def three_classes(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that has learnt three classes."""
    rows = [{"text": a, "label": b} for a, b in zip(TEXTS, LABELS, strict=True)]
    return train(tiny_bert, tmp_path_factory.mktemp("three"), rows)


def test_rows_are_labelled(
    three_classes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"id": f"0{n}", "text": text, "label": "x"} for n, text in enumerate(TEXTS)]
    rows[3]["text"], rows[4]["label"] = " ", "two\nlines"
    assert main([three_classes, write_rows(tmp_path / "new.csv", rows)]) == 0
    out = capsys.readouterr().out
    assert "47 rows" in out and "note: 1 row without a text" in out
    assert "note: 1 row with line breaks, the first up to" in out and "new.csv:7" in out
    answers = pd.read_csv(tmp_path / "new.predictions.csv", dtype=str, keep_default_na=False)
    assert answers["predicted_label"].tolist() == [*LABELS[:3], "", *LABELS[4:]]
    assert answers["id"].tolist() == [row["id"] for row in rows]
    shares = answers.loc[0, [f"p_{name}" for name in WORDS]].astype(float)
    assert shares.sum() == pytest.approx(1, abs=1e-5)


def test_cells_and_columns_of_the_rows_stay(tmp_path: Path) -> None:
    """Predictions keep long numbers, dates, lists and letters, and a user's column of their name."""
    cells = {"w": "ä", "n": 0.1234567890123456, "l": ["a", 1], "t": date(2026, 1, 2)}
    answers = answers_of(TASKS["sst2"], np.array([[0.0, 1.0]], dtype=np.float32))
    rows: RawRows = [("1", {"predicted_label": "0"} | cells), ("2", {})]
    with open(tmp_path / "o.csv", "wb") as file:
        write_answers(file, ".csv", rows, answers.set_axis(["1"]))
    table = pd.read_csv(tmp_path / "o.csv", dtype=str, keep_default_na=False)
    first, second = table.to_dict("records")
    texts = {"w": "ä", "n": "0.1234567890123456", "l": '["a", 1]', "t": "2026-01-02"}
    labels = {"predicted_label": "0", "predicted_label_2": "1"}
    assert first.items() > {**labels, **texts}.items() and not any(second.values())
    with open(tmp_path / "o.jsonl", "wb") as file:
        write_answers(file, ".jsonl", rows, answers.set_axis(["1"]))
    first, second = map(json.loads, (tmp_path / "o.jsonl").read_text().splitlines())
    assert all(
        first[name] == value for name, value in (labels | cells | {"t": "2026-01-02"}).items()
    )
    assert set(second.values()) == {None}
    with open(tmp_path / "o.parquet", "wb") as file:
        write_answers(file, ".parquet", rows, answers.set_axis(["1"]))
    parquet = pd.read_parquet(tmp_path / "o.parquet")
    assert parquet.iloc[0].to_dict().items() > {"w": "ä", "n": cells["n"], "l": '["a", 1]'}.items()


def test_several_labels_have_their_thresholds() -> None:
    several = replace(TASKS["sst2"], labels=("a", "b"), multi_label=True)
    outputs = np.log(np.array([[0.4, 0.4]]) / 0.6).astype(np.float32)
    for thresholds, expected in (([0.3, 0.5], ["a"]), ([], [])):
        assert answers_of(several, outputs, thresholds)["predicted_label"][0] == expected


@pytest.mark.slow
def test_several_labels_a_row(tiny_bert: Path, tmp_path: Path) -> None:
    """A label with a comma in its name stays one label."""
    names, words = ["New York, NY", "b"], (("ros", "nar"), ("tun", "pel"))
    marks = [(n % 2, n // 2 % 2) for n in range(40)]
    rows = []
    for n, (first, second) in enumerate(marks):
        text = f"{NOUNS[n % 5]} {words[0][first]} {words[1][second]}"
        rows.append({"text": text, "label": names[:1] * first + names[1:] * second})
    model = train(tiny_bert, tmp_path, rows, train__batch_size=4)
    assert main([model, write_rows(tmp_path / "n.jsonl", rows)]) == 0
    answers = pd.read_csv(tmp_path / "n.predictions.csv")
    assert (answers["predicted_label"] == answers["label"]).mean() > 0.9


def test_scores_are_on_the_scale_of_the_labels() -> None:
    columns = answers_of(TASKS["stsb"], np.array([[0.5], [1.0]], dtype=np.float32))
    assert columns.to_dict("list") == {"predicted_score": [2.5, 5.0]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MODEL", "none.csv"], "none.csv: No such file"),
        (["MODEL", "ROWS", "--text_column", "texd"], "no column 'texd' .*Did you mean 'text'"),
        (["MODEL", "ROWS", "--text_column", "text,id"], "the model reads 1 text a row"),
        (["MODEL", "OTHER"], "no column 'text' for the text"),
        (["MODEL", "ROWS", "--output", "ROWS"], "pass another file, ending in"),
        (["MODEL", "ROWS", "--output", "x.txt"], "ending in .csv, .jsonl, .parquet"),
        (["MODEL", "ROWS", "--output", "ROWS/x.csv"], "x.csv: cannot be written to"),
        (["MODEL", "ROWS", "--task", "b"], "is fine-tuned on t"),
        (["FOLDER", "ROWS"], "not a fine-tuned model"),
        (["OLD", "ROWS"], "saved by another version"),
    ],
)
def test_mistakes(arguments: list[str], message: str, three_classes: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.csv", [{"text": "a", "id": 1}])
    other = write_rows(tmp_path / "other.csv", [{"body": "a"}])
    places = {"MODEL": three_classes, "ROWS": rows, "OTHER": other, "FOLDER": str(tmp_path)}
    places["OLD"] = str(tmp_path / "old")
    write_json(tmp_path / "old" / "config.json", {"tasks": [{"name": "t", "num_choices": 0}]})
    with pytest.raises(UserError, match=message):
        main(
            [
                argument.replace("ROWS/", f"{rows}/")
                if "/" in argument
                else places.get(argument, argument)
                for argument in arguments
            ]
        )


def test_commands_name_this_one_only_where_it_works(tmp_path: Path) -> None:
    joint = " ROWS.csv --task sst5"
    for tasks, words in (("sst2", " ROWS.csv"), ("sst5,sts", joint), ("copa", ""), ("wic", "")):
        descriptions = [TASKS[task].describe() for task in tasks.split(",")]
        (tmp_path / "config.json").write_text(json.dumps({"tasks": descriptions}))
        record = {"tasks": [{"description": description} for description in descriptions]}
        command = predict_command(tmp_path, record)
        assert command == (words and f"python finetune/predict.py {tmp_path}{words}")
        if words:
            number, task = find_task(str(tmp_path), descriptions[-1]["name"])
            assert (number, task.describe()) == (len(descriptions) - 1, descriptions[-1])
        if words in ("", joint):
            with pytest.raises(UserError, match="only run.py predicts it|fine-tuned on sst5, sts"):
                find_task(str(tmp_path))
