"""A user's own labels: which task they are, which rows become dev, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from finetune.data.examples import LabeledExample, TaskData
from finetune.data.own_rows import read_own
from finetune.data.tasks import Task
from finetune.settings import OwnDataSettings
from multicls.errors import UserError

Rows = Sequence[dict[str, Any]]


def write(path: Path, rows: Rows) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        content = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        lines: list[Iterable[object]] = [rows[0], *(row.values() for row in rows)]
        content = "".join(",".join(f'"{cell}"' for cell in line) + "\n" for line in lines)
    path.write_text(content, encoding="utf-8")
    return str(path)


def labelled(*labels: Any) -> list[dict[str, Any]]:
    return [{"text": f"row {number}", "label": label} for number, label in enumerate(labels)]


def read(folder: Path, rows: Rows, dev: Rows | None = None, suffix: str = "jsonl", **own: Any) -> tuple[Task, TaskData]:
    train_file, dev_file = write(folder / f"t.{suffix}", rows), write(folder / f"d.{suffix}", dev or rows)
    return read_own(OwnDataSettings(train_file=train_file, dev_file=dev_file, **own))


def test_classes(tmp_path: Path) -> None:
    rows = [{"text": "so, good", "label": "yes"}, {"text": "bad", "label": " no "}]
    task, data = read(tmp_path, rows, rows[:1], "csv")
    assert (task.name, task.labels, task.shape, task.benchmark) == ("own_t", ("no", "yes"), "single", "own")
    assert (task.metrics, task.fields, task.label) == (("acc", "macro_f1"), (("text",),), ("label",))
    assert data.train and [(row.id, row.texts, row.label) for row in data.train] == [
        ("train:0", ("so, good",), 1), ("train:1", ("bad",), 0),
    ]  # fmt: skip
    assert [row.id for row in data.dev] == ["dev:0"] and data.notes == ["2 classes: no, yes"]


def test_pairs_and_scores(tmp_path: Path) -> None:
    rows = [{"sentence1": "not this", "text1": "a", "text2": "b", "label": label} for label in (-8.0, 2.5)]
    task, data = read(tmp_path, rows, rows[1:])
    assert task.is_regression and task.label_scale == 8.0 and task.metrics == ("spearman", "pearson")
    assert (
        data.dev == [LabeledExample("dev:0", ("a", "b"), 2.5)] and "a regression, trained on label/8" in data.notes[0]
    )


def test_whole_numbers_are_classes_however_many_there_are(tmp_path: Path) -> None:
    task, data = read(tmp_path, labelled(*range(77), 1))
    assert len(task.labels) == 77 and task.labels[:3] == ("0", "1", "2") and task.labels[10] == "10"
    assert data.notes[0].startswith("77 classes: 0, 1, 2") and "--label_type score" in data.notes[0]
    assert read(tmp_path, labelled(*range(77), 1), label_type="score")[0].is_regression
    assert read(tmp_path, labelled("1.0", 2), labelled("2.0"), "csv")[1].dev[0].label == 1
    assert read(tmp_path, labelled(0.5, 1))[0].is_regression
    assert not read(tmp_path, labelled(0.5, 1), label_type="class")[0].is_regression
    assert read(tmp_path, labelled("nan", "x"))[0].labels == ("nan", "x")


@pytest.mark.parametrize(("cells", "note"), [
    ((["a", "b"], ["b"], []), "as lists"),
    (("a|b", "b", ""), "separated by '|'"), (("a; b", "b", ""), "separated by ';'"),
    (("a, b", "b", ""), "separated by ','"),
])  # fmt: skip
def test_several_labels_a_row(cells: tuple[Any, ...], note: str, tmp_path: Path) -> None:
    task, data = read(tmp_path, labelled(*cells), label_type="multi_label")
    assert task.multi_label and task.labels == ("a", "b") and task.num_labels == 2 and data.train
    assert [row.labels for row in data.train] == [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0)]
    assert task.metrics == ("micro_f1", "macro_f1", "exact_match")
    assert note in data.notes[0] and data.notes[1] == "1 train row without a label"
    if isinstance(cells[0], list):
        assert read(tmp_path, labelled(*cells))[0].multi_label, "lists can be nothing else"
        with pytest.raises(UserError, match="holds lists of labels: give --label_type multi_label, not class"):
            read(tmp_path, labelled(*cells), label_type="class")


def test_columns_of_other_names(tmp_path: Path) -> None:
    rows = [{"body": "a", "title, short": "b", "kind": kind, "text": "no"} for kind in "xyx"]
    task, data = read(tmp_path, rows, suffix="csv", text_column="body", label_column="kind")
    assert task.fields == (("body",),) and task.labels == ("x", "y") and data.dev[0].texts == ("a",)
    task, data = read(tmp_path, rows, text_column="title, short", label_column="kind")
    assert data.dev[0].texts == ("b",), "a column may have a comma in its name"
    assert read(tmp_path, rows, text_column="body, text", label_column="kind")[1].dev[0].texts == ("a", "no")


def test_a_share_of_the_train_file_is_dev(tmp_path: Path) -> None:
    rows = labelled(*("abbb"[n % 4] for n in range(100)))
    rows[7] = rows[3]  # twice the same row
    file = write(tmp_path / "t.csv", rows)
    _, data = read_own(OwnDataSettings(train_file=file, dev_share=0.3))
    assert data.train and len(data.train) + len(data.dev) == 100 and 29 <= len(data.dev) <= 31
    assert abs(sum(row.label == 0 for row in data.dev) - 7.5) < 1.5, "classes in proportion"
    assert not {row.texts for row in data.train} & {row.texts for row in data.dev}, "equal texts stay together"
    assert data == read_own(OwnDataSettings(train_file=file, dev_share=0.3))[1]
    assert "of the 100 train rows" in data.notes[-1]
    with pytest.raises(UserError, match="holds one text only"):
        read_own(OwnDataSettings(train_file=write(tmp_path / "u.jsonl", [{"text": "a", "label": x} for x in "xy"])))


def test_names_with_commas_are_quoted(tmp_path: Path) -> None:
    assert read(tmp_path, labelled("food, drink", "travel"))[1].notes == ["2 classes: 'food, drink', 'travel'"]


def test_one_row_a_class_is_enough_if_dev_has_the_same_classes(tmp_path: Path) -> None:
    task, data = read(tmp_path, labelled(*"abcdefghijkl"), labelled("b", "l", "b"))
    assert len(task.labels) == len(data.train or ()) == 12 and [row.label for row in data.dev] == [1, 11, 1]


def test_a_share_for_dev_may_leave_one_label_of_several_a_row(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", labelled(["a", "b"], []))
    assert len(read_own(OwnDataSettings(train_file=file))[1].dev) == 1


def test_a_share_for_dev_may_not_take_a_class_of_two(tmp_path: Path) -> None:
    file = write(tmp_path / "t.csv", labelled("x", "y"))
    with pytest.raises(UserError, match="--dev_share 0.2: it leaves 1 train row of one class, of 2 rows"):
        read_own(OwnDataSettings(train_file=file))


def test_a_labelled_test_file(tmp_path: Path) -> None:
    train, test = write(tmp_path / "t.csv", labelled(*"ababab")), write(tmp_path / "x.jsonl", labelled("b"))
    _, data = read_own(OwnDataSettings(train_file=train, test_file=test))
    assert [(row.id, row.label) for row in data.test] == [("test:0", 1)]


def hub_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, **splits: Rows) -> str:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    for split, rows in splits.items():
        table = datasets.Dataset.from_list(list(rows))
        if isinstance(rows[0]["label"], int):
            table = table.cast_column("label", datasets.ClassLabel(names=["neg", "unused", "pos"]))
        (folder / "mine").mkdir(exist_ok=True)
        table.to_parquet(folder / "mine" / f"{split}.parquet")
    return str(folder / "mine")


def test_a_data_set_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = hub_folder(tmp_path, monkeypatch, train=labelled(2, 0, 2), validation=labelled(0), test=labelled(2))
    task, data = read_own(OwnDataSettings(dataset=name, metric="f1"))
    assert task.labels == ("neg", "pos") and task.name == "own_mine" and data.train
    assert ([row.label for row in data.train], [row.label for row in data.dev]) == ([1, 0, 1], [0])
    assert [row.label for row in data.test] == [1] and "f1 is that of the class 'pos'" in data.notes


def test_a_data_set_without_dev_rows_and_test_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = labelled(*(["x", "y"][n % 2] for n in range(20)))
    name = hub_folder(tmp_path, monkeypatch, train=rows, test=[{"text": "a", "label": None}])
    _, data = read_own(OwnDataSettings(dataset=name))
    assert data.train and (len(data.train), len(data.dev), data.test) == (16, 4, [])
    assert "the test split has no labels: left out" in data.notes
    with pytest.raises(UserError, match=r"--dataset .*/none: cannot be loaded"):
        read_own(OwnDataSettings(dataset=str(tmp_path / "none")))


@pytest.mark.parametrize(("labels", "metric", "first"), [
    ("xyz", "matthews", "matthews"), ("xyx", "f1", "f1"), ((0.5, 1.0), "pearson", "pearson"),
    ("xyz", "macro_f1", "macro_f1"),
    ("xyz", "f1", "with 3 classes; possible: acc, macro_f1, matthews."),
    ((0.5, 1.0), "acc", "possible: spearman, pearson"),
    ("xyz", "exact_match", "not a metric of labels of type class"),
    (([], ["a", "b"]), "acc", "possible: micro_f1, macro_f1"),
])  # fmt: skip
def test_metrics(labels: Sequence[Any], metric: str, first: str, tmp_path: Path) -> None:
    if " " not in first:
        task, _ = read(tmp_path, labelled(*labels), metric=metric)
        assert task.metrics[0] == first and len(set(task.metrics)) == len(task.metrics) >= 2
        return
    with pytest.raises(UserError, match=f"--metric {metric}: .*{first}"):
        read(tmp_path, labelled(*labels), metric=metric)


TWO = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]


@pytest.mark.parametrize(("train", "dev", "own", "message"), [
    ([{"text": "a", "lable": "x"}], None, {}, "no column 'label' for the label; the columns are"),
    ([{"body": "a", "label": "x"}], None, {}, "t.csv: no column 'text' or 'text1' and 'text2' or 'sentence1'"),
    (TWO, None, {"text_column": "texd"}, "no column 'texd'; the columns are 'text', 'label'. Did you mean 'text'?"),
    (TWO, None, {"text_column": "a,b,c"}, "give one column, or two"),
    ([{"TEXT ": "a", "label": "x"}], None, {}, "Did you mean 'TEXT '? Case and blanks count. Name the column by"),
    ([{"text": "a", "lables": "x", "how was the weather?": "b"}], None, {}, "Did you mean 'lables'? Name it by"),
    ([{"text": "a", "Label": "x"}], None, {}, "Did you mean 'Label'? Case and blanks count. Name it by --label_column"),
    ([{"where is my parcel?": "a", "x": "x"}], None, {}, "These look like a row: put a line with the names of the col"),
    (labelled(*range(11)), None, {}, "t.csv: column 'label' has another label in each of the 11 train rows (0, 1, 2"),
    (labelled(*"abcdefghijk"), None, {}, "(a, b, c, ...), so nothing can be learned from it. Is it an id or a text?"),
    (labelled("x", "x"), None, {}, "t.csv: every label is 'x'; a task needs two classes or scores"),
    ([*TWO, {"text": " ", "label": "y"}], None, {}, "t.csv:4: column 'text' is ' '; it must be a text"),
    ([*TWO, {"text": "c", "label": ""}], None, {}, "t.csv:4: column 'label' is ''; it must be a label"),
    (labelled(1.5, 2, "nan"), None, {}, "t.csv:4: label 'nan' is not a finite number"),
    (labelled(1, 2, "a"), None, {"label_type": "score"}, "t.csv:4: label 'a' is not a finite number"),
    (TWO, labelled("z"), {}, "d.csv:2: label 'z' is none of train's: x, y"),
    (TWO, [{"txt": "a", "label": "x"}], {}, "d.csv:2: no 'text'; the columns are 'txt', 'label'. Did you mean 'txt'"),
    (labelled("a|b", "a"), labelled("z"), {"label_type": "multi_label"}, "d.csv:2: label 'z' is none of train's: a, b"),
])  # fmt: skip
def test_rows_that_do_not_fit_are_named(
    train: Rows, dev: Rows | None, own: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, train, dev, "csv", **own)
    assert message in str(error.value)


def test_whole_numbers_keep_their_spelling(tmp_path: Path) -> None:
    """Codes such as 01 are names; only 1.0 is written as 1, for tables that hold numbers."""
    task, data = read(tmp_path, labelled("01", "1", "02", "10"), suffix="csv")
    assert task.labels == ("01", "1", "02", "10") and data.train
    assert [row.label for row in data.train] == [0, 1, 2, 3]
    task, _ = read(tmp_path, labelled("1.0", "1", "2.0", "-3"), suffix="csv")
    assert task.labels == ("-3", "1", "2")


def test_labels_called_nan_are_no_scores(tmp_path: Path) -> None:
    rows = labelled("nan", "0", "nan", "0")
    with pytest.raises(UserError, match="give --label_type class"):
        read(tmp_path, rows)
    assert read(tmp_path, rows, label_type="class")[0].labels == ("0", "nan")
