"""finetune/compare.py: from labelled rows to a verdict, a fitted system, and predictions."""

import csv
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from finetune import compare, predict
from finetune.compare_report import abstention
from finetune.tuned import Tuned
from multicls.errors import UserError
from multicls.evaluation import Rows, Scores, Splits, fit_predict
from multicls.systems import Linear
from tests.finetune.conftest import BAD, GOOD, NOUNS
from tests.finetune.runs import write_rows


def sentences(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows whose label one word of each decides."""
    draw, rows = random.Random(seed), []
    for index in range(number):
        good = index % 2
        words = [draw.choice(NOUNS), "los", draw.choice((BAD, GOOD)[good]), draw.choice(NOUNS)]
        draw.shuffle(words)
        rows.append({"text": f"len {' '.join(words)} {index}", "label": ("bad", "good")[good]})
    return rows


def run(tmp_path: Path, model: Path, **flags: Any) -> str:
    """Runs the command in a folder; returns the report."""
    output = tmp_path / "out"
    words = [f"--{name}={value}" for name, value in flags.items() if not isinstance(value, list)]
    for name, values in flags.items():
        if isinstance(values, list):
            words += [f"--{name}", *values]
    compare.main([*words, "--model", f"tiny={model}", "--output_dir", str(output)])
    return (output / "report.md").read_text(encoding="utf-8")


def predicted(tmp_path: Path, rows: str, *flags: str) -> pd.DataFrame:
    """Labels rows with the saved system."""
    file = tmp_path / "labelled.csv"
    predict.main([str(tmp_path / "out" / "model"), rows, "--output", str(file), *flags])
    return pd.read_csv(file, keep_default_na=False)


def test_a_table_gives_a_verdict_and_a_system(
    tmp_path: Path, tiny_bert: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = sentences(120)
    rows[7]["label"] = "good"  # wrong: 7 is odd ... even rows are bad
    wrong = rows[6] | {"label": "good"}
    train = write_rows(tmp_path / "train.csv", [*rows[:6], wrong, *rows[7:]])
    test = write_rows(tmp_path / "test.csv", sentences(60, 1))
    unlabelled = [{"text": row["text"]} for row in sentences(30, 2)]
    new = write_rows(tmp_path / "new.csv", [{"text": rows[0]["text"]}, *unlabelled])
    flags = {"train_file": train, "test_file": test, "new_file": new}
    report = run(tmp_path, tiny_bert, **flags)
    assert "| words |" in report and "| tiny mean+topics |" in report and "| majority |" in report
    assert "On 60 test rows" in report and "folds over 120 labelled rows" in report
    assert "fitted on all 120 rows" in report and "## Rows to label next" in report
    listed = list(csv.DictReader((tmp_path / "out" / "rows_to_label.csv").open()))
    assert len(listed) == 20 and rows[0]["text"] not in {row["text"] for row in listed}
    suspects = list(csv.DictReader((tmp_path / "out" / "labels_to_check.csv").open()))
    assert suspects[0]["place"].endswith("train.csv:8") and suspects[0]["label"] == "good"
    table = predicted(tmp_path, test)
    assert (table["label"] == table["predicted_label"]).mean() > 0.9
    few = predicted(tmp_path, test, "--precision", "0.95")
    sure = few[few["predicted_label"] != ""]
    assert len(sure) > 10 and (sure["label"] == sure["predicted_label"]).mean() > 0.9
    assert "labelled:" in capsys.readouterr().out


def test_a_second_call_computes_nothing(
    tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = write_rows(tmp_path / "train.csv", sentences(60))
    report = run(tmp_path, tiny_bert, train_file=train, repeats=1)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr("finetune.compare.fit_predict", refuse)
    monkeypatch.setattr("multicls.embeddings.Embedder.embed", refuse)
    assert run(tmp_path, tiny_bert, train_file=train, repeats=1) == report
    changed = sentences(60)
    changed[0]["label"] = "good"
    write_rows(tmp_path / "train.csv", changed)
    with pytest.raises(AssertionError, match="computed again"):
        run(tmp_path, tiny_bert, train_file=train, repeats=1)


@pytest.mark.parametrize(("system", "stop"), [("words", 9), ("tuned-mean", 1)])
def test_a_killed_comparison_goes_on_at_its_fold(
    system: str, stop: int, tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished folds are not fitted again, and all files are those of a comparison without a stop."""
    fits = list[int]()

    def stop_at(number: int) -> None:
        def fit(*arguments: Any) -> Any:
            if len(fits) == number:
                raise KeyboardInterrupt
            fits.append(len(arguments[2]))
            return fit_predict(*arguments)

        fits.clear()
        monkeypatch.setattr(compare, "fit_predict", fit)

    monkeypatch.setattr(compare, "fewer", lambda splits: Splits(splits.folds[:1] % 2, ()))
    train = write_rows(tmp_path / "train.csv", sentences(40))
    flags: dict[str, Any] = {"train_file": train, "systems": [system], "epochs": 1}
    stop_at(1000)
    report, every = run(tmp_path, tiny_bert, **flags), len(fits)
    whole = {file.name: file.read_bytes() for file in (tmp_path / "out").rglob("*.npy")}
    shutil.rmtree(tmp_path / "out")
    stop_at(stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, tiny_bert, **flags)
    stop_at(1000)
    assert run(tmp_path, tiny_bert, **flags) == report and len(fits) == every - stop
    assert {f.name: f.read_bytes() for f in (tmp_path / "out").rglob("*.npy")} == whole


def test_a_fit_is_kept_as_long_as_nothing_changes_its_outputs(
    tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = list[str]()

    def fit(system: Any, rows: Rows, train: Any, scored: Any) -> Any:
        fits.append(repr(system))
        return np.eye(2)[rows.targets[scored]]

    monkeypatch.setattr(compare, "fit_predict", fit)
    train = write_rows(tmp_path / "train.csv", sentences(40))
    table = compare.read_own(compare.CompareOptions(train_file=train))
    rows = replace(table.train, features={"a/mean": np.zeros((40, 3)), "b/mean": np.ones((40, 3))})
    tuned = Tuned("mean", "folder", 64, 1e-4, 10, "hash")

    def number(*, repeats: int = 1, rows: Rows = rows, **systems: Any) -> int:
        fits.clear()
        named = {name.replace("_", " "): system for name, system in systems.items()}
        compare.evaluate_all(named, replace(table, train=rows), repeats, tmp_path / "fits")
        return len(fits)

    linear: Any = {"a_mean": Linear.of("mean", "a")}
    assert number(**linear) == 25 and number(**linear) == 0
    assert number(repeats=2, **linear) == 5, "the others are finished"
    other = {"a/mean": np.ones((40, 3)), "b/mean": np.ones((40, 3))}
    assert number(rows=replace(rows, features=other), **linear) == 25
    assert number(rows=replace(rows, metric="f1"), **linear) == 25
    more = {**rows.features, "b/mean": np.zeros((40, 3))}
    assert number(rows=replace(rows, features=more), **linear) == 0, "it reads those of a"
    assert number(a_tuned=tuned) == 11
    assert number(rows=replace(rows, features=other), a_tuned=tuned) == 0, "it reads texts"
    assert number(a_tuned=replace(tuned, sha256="other weights")) == 11
    assert number(a_tuned=replace(tuned, learning_rate=2e-4)) == 11


def test_the_saved_linear_system_predicts_what_was_evaluated(
    tmp_path: Path, tiny_multicls: Path
) -> None:
    """All parts, topics of the model itself, of whole texts; the saved folder stands alone."""
    copied = shutil.copytree(tiny_multicls, tmp_path / "model")
    train = write_rows(tmp_path / "train.csv", sentences(80))
    run(tmp_path, copied, train_file=train, systems=["mean+facets+topics"], max_length=8)
    shutil.rmtree(copied)
    record = json.loads((tmp_path / "out" / "model" / "system.json").read_text())
    assert record["system"] == "linear" and record["name"] == "tiny mean+facets+topics"
    rows = [{"text": "len los " + "bal " * 30 + word} for word in ("nar", "ros")]
    first, second = predicted(tmp_path, write_rows(tmp_path / "long.csv", rows))["p_good"]
    assert first != second, "topics read beyond the eighth token"


def test_scores_of_pairs_have_the_cosine_beside_them(tmp_path: Path, tiny_bert: Path) -> None:
    draw, rows = random.Random(0), []
    for _ in range(80):
        first, second = (" ".join(draw.choices([*NOUNS, *GOOD, *BAD], k=4)) for _ in "ab")
        common = len(set(first.split()) & set(second.split()))
        rows.append({"text1": first, "text2": second, "label": 2000 + common + draw.random() / 9})
    train = write_rows(tmp_path / "train.csv", rows)
    report = run(tmp_path, tiny_bert, train_file=train, repeats=1)
    assert "| tiny cosine |" in report and "spearman" in report
    table = predicted(tmp_path, train)
    assert table["predicted_score"].between(1990, 2010).all(), "in the unit of the labels"


def test_predictions_from_a_file_are_a_system(tmp_path: Path, tiny_bert: Path) -> None:
    rows = sentences(60)
    train = write_rows(tmp_path / "train.csv", rows)
    theirs = write_rows(tmp_path / "llm.csv", rows[::-1])
    report = run(
        tmp_path, tiny_bert, train_file=train, systems=["words"], predictions=[f"llm={theirs}"]
    )
    assert "| llm | 100.0 (95.0 to 100.0) |" in report
    assert not (tmp_path / "out" / "cache").exists(), "nothing reads embeddings"
    assert "model" in {path.name for path in (tmp_path / "out").iterdir()}
    write_rows(tmp_path / "llm.csv", rows[1:])
    with pytest.raises(UserError, match="holds no prediction for the text of .*train.csv:2"):
        run(tmp_path, tiny_bert, train_file=train, predictions=[f"llm={theirs}"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "20 labelled rows; set 20|19 labelled rows"),
        ({"systems": ["wrods"]}, "--systems wrods: no such system. Did you mean 'words'"),
        ({"systems": ["tuned-maen"]}, "tuned-maen: no such system. Did you mean 'tuned-mean'"),
        ({"systems": ["majority"]}, "--systems majority: none of them learns; add one"),
        ({"predictions": ["words=x.csv"]}, "--predictions words: two systems have this name"),
        ({"predictions": ["tiny=x.csv"]}, "--predictions tiny: two systems have this name"),
        ({"max_length": 2}, "--max_length 2: .* reads 3 to 64 tokens"),
    ],
)
def test_refused(
    tmp_path: Path,
    tiny_bert: Path,
    flags: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each mistake is found before a text is embedded."""
    monkeypatch.delattr("multicls.embeddings.Embedder.embed")
    number = 40 if flags else 19
    train = write_rows(tmp_path / "train.csv", sentences(number))
    with pytest.raises(UserError, match=message):
        run(tmp_path, tiny_bert, train_file=train, **flags)
    with pytest.raises(UserError, match="--train_file: required"):
        compare.main(["--output_dir", str(tmp_path / "out")])


def test_heads_on_facets_are_those_of_models_with_facets(
    tmp_path: Path, tiny_bert: Path, tiny_multicls: Path
) -> None:
    """One name of a system compares a trained model's facets with the mean of the original."""
    options, systems = compare.CompareOptions(), dict[str, Any]()
    rows = Rows("class", np.arange(2), [("a",), ("b",)])
    for name, folder in (("old", tiny_bert), ("new", tiny_multicls)):
        model = compare.open_model(str(folder), None)
        systems |= compare.systems_of_model(name, str(folder), model, options, rows)
    chosen = compare.choose(systems, [], ["tuned-facets", "tuned-mean"])
    assert list(chosen) == ["new tuned-facets", "old tuned-mean", "new tuned-mean"]


@pytest.mark.slow
def test_a_fine_tuned_head_is_a_system(tmp_path: Path, tiny_bert: Path) -> None:
    train = write_rows(tmp_path / "train.csv", sentences(40))
    tuned: dict[str, Any] = {"systems": ["tuned-mean"], "learning_rate": 3e-3, "epochs": 8}
    report = run(tmp_path, tiny_bert, train_file=train, **tuned, repeats=1)
    assert "| tiny tuned-mean |" in report
    table = predicted(tmp_path, train)
    assert (table["predicted_label"] == table["label"]).mean() > 0.9
    sure = predicted(tmp_path, train, "--precision", "0.8")["predicted_label"]
    assert set(sure) <= {"bad", "good", ""} and (sure != "").any()


def test_abstention_keeps_its_precision() -> None:
    generator = np.random.default_rng(0)
    confidence = generator.random(4000) * 3
    right = generator.random(4000) < 1 / (1 + np.exp(-confidence))
    outputs = np.stack([confidence, np.zeros(4000)], axis=1)
    targets = np.where(right, 0, 1)
    rows = Rows("class", targets, classes=("a", "b"))
    scores = Scores(np.zeros((1, 4000)), np.zeros((0, 4000)), rows.units, 0.0, outputs[None])
    for wanted, threshold, share in abstention(rows, scores):
        taken = 1 / (1 + np.exp(-confidence)) >= threshold - 1e-12
        assert right[taken].mean() >= wanted - 1e-9 and taken.mean() == pytest.approx(share)
