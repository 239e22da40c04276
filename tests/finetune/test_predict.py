"""New rows are labelled as the saved model was trained to, whatever file they come in."""

import json
from datetime import date
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from finetune.predict import answers_of, main
from finetune.predict import write_rows as write_answers
from finetune.saved import write_record
from finetune.tuned import Tuned
from multicls.errors import UserError
from multicls.evaluation import Rows
from multicls.files import write_json
from multicls.tables import RawRows
from tests.finetune.conftest import NOUNS
from tests.finetune.runs import write_rows

WORDS = {"fine": "nar", "poor": "ros", "same": "lol"}
LABELS = [list(WORDS)[n % 3] for n in range(48)]
TEXTS = [f"len {NOUNS[n % 6]} los {WORDS[LABELS[n]]}" for n in range(48)]


@pytest.fixture(scope="module")
def three_classes(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that has learnt three classes."""
    folder = tmp_path_factory.mktemp("three")
    texts = [(text,) for text in TEXTS]
    rows = Rows("class", np.arange(48) % 3, texts, classes=tuple(WORDS))
    Tuned("mean", str(tiny_bert), 24, learning_rate=3e-3, epochs=20).fit(rows).save(folder)
    write_record(folder, "tuned", "class", rows.classes, ["text"])
    return str(folder)


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
    answers = answers_of("class", ["0", "1"], np.array([[0.0, 1.0]]), np.zeros(1))
    taken = {"predicted_label": "0", "predicted_label_2": "2"}  # of two runs before
    rows: RawRows = [("1", taken | cells), ("2", {})]
    with open(tmp_path / "o.csv", "wb") as file:
        write_answers(file, ".csv", rows, answers.set_axis(["1"]))
    table = pd.read_csv(tmp_path / "o.csv", dtype=str, keep_default_na=False)
    first, second = table.to_dict("records")
    texts = {"w": "ä", "n": "0.1234567890123456", "l": '["a", 1]', "t": "2026-01-02"}
    labels = taken | {"predicted_label_2_2": "1"}
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
    """Probabilities are those before the thresholds were subtracted."""
    outputs = np.log(np.array([[0.4, 0.4]]) / 0.6)
    for thresholds, expected in (([0.3, 0.5], ["a"]), ([0.5, 0.5], [])):
        shift = np.log(np.array(thresholds) / (1 - np.array(thresholds)))
        answers = answers_of("multi_label", ["a", "b"], outputs - shift, shift)
        assert answers["predicted_label"][0] == expected
        assert answers[["p_a", "p_b"]].to_numpy().tolist() == [[0.4, 0.4]]


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
        (["MODEL", "ROWS", "--precision", "0.9"], "only systems of finetune/compare.py"),
        (["FOLDER", "ROWS"], "not a fitted model of texts"),
        (["OLD", "ROWS"], "saved by another version"),
    ],
)
def test_mistakes(arguments: list[str], message: str, three_classes: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.csv", [{"text": "a", "id": 1}])
    other = write_rows(tmp_path / "other.csv", [{"body": "a"}])
    places = {"MODEL": three_classes, "ROWS": rows, "OTHER": other, "FOLDER": str(tmp_path)}
    places["OLD"] = str(tmp_path / "old")
    write_json(tmp_path / "old" / "system.json", {"format": 1})
    with pytest.raises(UserError, match=message):
        main(
            [
                argument.replace("ROWS/", f"{rows}/")
                if "/" in argument
                else places.get(argument, argument)
                for argument in arguments
            ]
        )
