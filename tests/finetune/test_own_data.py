"""A user's own labels: which task they are, which rows become dev, and what is wrong with them."""

import gzip
import json
import lzma
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from finetune.own_data import load_own
from finetune.settings import OwnDataSettings
from finetune.subsets import select_rows
from finetune.tasks import Task, TaskData
from multicls.errors import UserError
from multicls.tables import read_table
from tests.finetune.runs import write_rows

Rows = Sequence[dict[str, Any]]


def labelled(*labels: Any) -> list[dict[str, Any]]:
    return [{"text": f"row {number}", "label": label} for number, label in enumerate(labels)]


def read(
    folder: Path, rows: Rows, dev: Rows | None = None, suffix: str = "jsonl", **own: Any
) -> tuple[Task, TaskData]:
    own["train_file"] = write_rows(folder / f"t.{suffix}", rows)
    own["dev_file"] = write_rows(folder / f"d.{suffix}", dev or rows)
    data = load_own(OwnDataSettings(**own))
    return data.task, data


def test_classes(tmp_path: Path) -> None:
    rows = [{"text": "so, good", "label": "yes"}, {"text": "bad", "label": " no "}]
    task, data = read(tmp_path, rows, rows[:1], "csv")
    assert (task.name, task.labels, task.benchmark) == ("t", ("no", "yes"), "own")
    assert (task.metrics, task.fields) == (("acc", "macro_f1"), ("text",))
    found = [(row.place, row.texts, row.label) for row in data.train]
    file = str(tmp_path / "t.csv")
    assert found == [(f"{file}:2", ("so, good",), 1), (f"{file}:3", ("bad",), 0)]
    assert [row.id for row in data.dev] == ["dev:0"] and data.notes[0] == "2 classes: no, yes"


def test_pairs_and_scores(tmp_path: Path) -> None:
    row = {"sentence1": "not this", "text1": "a", "text2": "b"}
    rows = [row | {"label": label} for label in (-8.0, 2.5)]
    task, data = read(tmp_path, rows, rows[1:])
    assert task.is_regression
    assert (task.label_shift, task.label_scale) == (-2.75, 5.25), "mean and standard deviation"
    assert task.metrics == ("spearman", "pearson", "r2", "mae")
    assert [(row.id, row.texts, row.label) for row in data.dev] == [("dev:0", ("a", "b"), 2.5)]
    assert "labels are scores: a regression" in data.notes[0]


@pytest.mark.parametrize(
    ("labels", "suffix", "own", "expected"),
    [
        ((1, 0, 10, 2, 1), "csv", {}, ("0", "1", "2", "10")),
        ((1.0, 0, 2.0), "jsonl", {}, ("0", "1", "2")),
        (("01", "1", "02", "10"), "csv", {}, ("01", "1", "02", "10")),
        ((0.5, 1), "jsonl", {}, ()),
        ((0.5, 1), "jsonl", {"label_type": "class"}, ("0.5", "1")),
        ((1, 2, 3), "csv", {"label_type": "score"}, ()),
        (("nan", "x"), "jsonl", {}, ("nan", "x")),
        (("nan", "0", "nan"), "jsonl", {"label_type": "class"}, ("0", "nan")),
    ],
)
def test_numbers_are_classes_if_they_are_whole(
    labels: Any, suffix: str, own: dict[str, Any], expected: Any, tmp_path: Path
) -> None:
    task, data = read(tmp_path, labelled(*labels), None, suffix, **own)
    assert task.labels == expected and task.is_regression == (not expected)
    assert ("label_type score" in data.notes[0]) == all(name.isdigit() for name in expected or "x")


def test_several_labels_a_row(tmp_path: Path) -> None:
    """A label with a comma in its name stays one label."""
    task, data = read(tmp_path, labelled(["New York, NY", "b"], ["b"], []))
    assert task.multi_label and task.labels == ("New York, NY", "b") and task.num_labels == 2
    assert [row.labels for row in data.train] == [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0)]
    assert task.metrics == ("micro_f1", "macro_f1", "exact_match")


def test_rows_without_a_text_are_left_out_and_counted(tmp_path: Path) -> None:
    empty = [{"text": text, "label": "x"} for text in ("", " ", None, float("nan"))]
    rows, pairs = [*labelled("x", "y", 0), *empty], {"text_column": "text,label"}
    _, data = read(tmp_path, rows, labelled("x"), **pairs)
    assert len(data.train) == 3 and "4 train rows without a text left out" in data.notes
    (tmp_path / "t.csv").write_text("text\na\n\nb\n")  # the empty line is an empty cell
    assert [row["text"] for _, row in read_table(tmp_path / "t.csv")] == ["a", None, "b"]


def test_two_torn_quotes_are_noted(tmp_path: Path) -> None:
    """They make one cell of all rows between them, as a text with line breaks does."""
    rows = [f"row {n},{'xy'[n % 2]}" for n in range(30)]
    rows[4], rows[14], path = f'"{rows[4]}', 'row 14",x', tmp_path / "t.csv"
    path.write_text("\n".join(["text,label", *rows, '"a\nb",x']) + "\n")
    data = load_own(OwnDataSettings(train_file=str(path)))
    note = f"2 train rows with line breaks, the first up to {path}:16: texts, or torn quotes?"
    assert len(data.train) + len(data.dev) == 21 and note in data.notes


def test_columns_of_other_names(tmp_path: Path) -> None:
    rows = [{"body": "a", "kind": kind, "text": "no"} for kind in "xyx"]
    for column, texts in (("body", ("a",)), ("body,text", ("a", "no"))):
        task, data = read(tmp_path, rows, None, "csv", text_column=column, label_column="kind")
        assert task.labels == ("x", "y") and data.dev[0].texts == texts


def test_a_share_of_the_train_file_is_dev(tmp_path: Path) -> None:
    rows = labelled(*("abbb"[n % 4] for n in range(100)))
    rows[7] = rows[3]  # twice the same row
    own = OwnDataSettings(train_file=write_rows(tmp_path / "t.csv", rows), dev_share=0.3)
    data = load_own(own)
    assert len(data.train) + len(data.dev) == 100 and 29 <= len(data.dev) <= 31
    assert abs(sum(row.label == 0 for row in data.dev) - 7.5) < 1.5, "classes in proportion"
    assert not {row.texts for row in data.train} & {row.texts for row in data.dev}
    assert data == load_own(own) and "of the 100 training rows" in data.notes[-1]


def sides(data: TaskData, what: Any) -> list[set[Any]]:
    """Returns what the rows of train, validation and dev hold, of a holdout of all rows."""
    rows = select_rows(data, "full", 1, holdout=True)
    return [{what(row) for row in side} for side in (rows.train, rows.validation, rows.dev)]


@pytest.mark.parametrize("shared", ["pair", "question", "answer"])
def test_rows_that_share_a_text_stay_on_one_side(shared: str, tmp_path: Path) -> None:
    """25 pairs four times each; 25 questions with four answers each; "yes" and "no" join no questions."""
    rows = []
    for n in range(100):
        pair = f"Question {n % 25}?", f"answer {n if shared == 'question' else n % 25}"
        if shared == "answer":
            pair = f"question  {n % 25}?".upper() if n % 2 else pair[0], ("yes", "no")[n // 25 % 2]
        rows.append({"text1": pair[0], "text2": pair[1], "label": "xy"[n % 2]})
    data = load_own(OwnDataSettings(train_file=write_rows(tmp_path / "t.csv", rows)))
    for column in range(1 if shared == "answer" else 2):
        train, validation, dev = sides(
            data, lambda row, c=column: row.texts[c].casefold().split()[-1]
        )
        assert validation and dev and not train & validation and not (train | validation) & dev
    note = "equal texts in 'text2' join 100 of 100 rows: they may stand on both sides of a split"
    assert (note in data.notes) == (shared == "answer")


def test_rows_of_a_group_stay_on_one_side(tmp_path: Path) -> None:
    rows = [{"text": f"row {n}", "label": "xy"[n % 2], "customer": n % 20} for n in range(100)]
    file = write_rows(tmp_path / "t.csv", rows)
    data = load_own(OwnDataSettings(train_file=file, group_column="customer"))
    train, validation, dev = sides(data, lambda row: int(row.texts[0].split()[1]) % 20)
    assert validation and dev and not train & validation and not (train | validation) & dev
    some = [row | {"customer": None} for row in rows[:60]] + rows[60:]
    own = OwnDataSettings(
        train_file=write_rows(tmp_path / "some.jsonl", some), group_column="customer"
    )
    units = Counter(row.unit for row in load_own(own).train)
    assert max(units.values()) == 2, "rows without a group are none"
    mixed = [
        {"text": f"row {n % 90}", "label": "xy"[n % 2], "customer": max(n, 60)} for n in range(100)
    ]
    own = OwnDataSettings(
        train_file=write_rows(tmp_path / "mixed.csv", mixed), group_column="customer"
    )
    train, validation, dev = sides(load_own(own), lambda row: row.texts[0])
    assert not train & validation and not (train | validation) & dev, "a group of most rows"
    thanks = [row | {"text": "Thanks"} if n < 20 else row for n, row in enumerate(rows)]
    file_2 = write_rows(tmp_path / "thanks.csv", thanks)
    data = load_own(OwnDataSettings(train_file=file_2, group_column="customer"))
    assert len(data.dev) == 20 and any("'text' join 100 of 100 rows" in note for note in data.notes)
    test = write_rows(tmp_path / "test.csv", [{"text": "new", "label": "x", "customer": 3}])
    bare = write_rows(tmp_path / "bare.csv", [{"text": "new", "label": "x"}])
    own = OwnDataSettings(train_file=file, test_file=test, group_column="customer")
    assert any(
        note.startswith("1 of the 1 test row share a text, nearly, or a group with train")
        for note in load_own(own).notes
    )
    assert load_own(own.model_copy(update={"test_file": bare})).test
    with pytest.raises(UserError, match="no column 'custmer' for the group; .*Did you mean 'cust"):
        load_own(OwnDataSettings(train_file=file, group_column="custmer"))


def test_rows_of_test_that_stand_in_train_are_counted_and_named(tmp_path: Path) -> None:
    rows = [{"text": f"Text {n}", "label": "xy"[n % 2]} for n in range(50)]
    more = [*rows, {"text": "text  7 ", "label": "x"}, {"text": "new", "label": "x"}]
    files = {
        "train": rows + [{"text": "Text 3", "label": "x"}],
        "test": more[40:],
        "dev": rows[5:6],
    }
    paths = {f"{name}_file": write_rows(tmp_path / f"{name}.csv", r) for name, r in files.items()}
    notes = load_own(OwnDataSettings(**paths)).notes
    train, test = paths["train_file"], paths["test_file"]
    first = f"(the first: {test}:2, also {train}:42): scores on them are too high"
    assert f"11 of the 12 test rows stand in train, too {first}" in notes
    assert any(note.startswith("1 of the 1 dev row stand in train") for note in notes)
    assert f"1 text of train with two labels or more, the first: {train}:5 and {train}:52" in notes
    same = OwnDataSettings(train_file=train, dev_file=test, test_file=test)
    assert any("12 of the 12 test rows stand in dev, too" in note for note in load_own(same).notes)


def test_labels_in_one_cell_and_rows_without_a_label(tmp_path: Path) -> None:
    cells = ["a; b", "b", " ", "a", "['a', 'b']"]
    file = write_rows(tmp_path / "t.csv", labelled(*cells))
    with pytest.raises(
        UserError, match=r"t.csv:6: the label is .*, a list as text. Set --label_sep"
    ):
        load_own(OwnDataSettings(train_file=file, dev_file=file, unlabelled="drop"))
    with pytest.raises(UserError, match=r"t.csv:4: 1 train row without a label.*unlabelled drop"):
        load_own(OwnDataSettings(train_file=file, dev_file=file, label_separator=","))
    own = OwnDataSettings(
        train_file=file, dev_file=file, label_separator=";", unlabelled="drop", label_type="auto"
    )
    data = load_own(own)
    assert (
        f"1 train row without a label left out, the first: {file}:4" in data.notes
        and len(data.train) == 4
    )
    commas = write_rows(tmp_path / "c.csv", labelled("a,b", "b", "['a', 'b']"))
    data = load_own(OwnDataSettings(train_file=commas, dev_file=commas, label_separator=","))
    assert [row.labels for row in data.train] == [(1.0, 1.0), (0.0, 1.0), (1.0, 1.0)]
    quoted = write_rows(tmp_path / "q.csv", labelled("['a, x', 'b']", "('b',)"))
    data = load_own(OwnDataSettings(train_file=quoted, dev_file=quoted, label_separator=","))
    assert data.task.labels == ("a, x", "b") and [sum(row.labels) for row in data.train] == [2, 1]
    names = "children's; 90s; (US) sales", '"toys"; 90s', "90s;\n(US) sales"
    file = write_rows(tmp_path / "n.csv", labelled(*names))
    task = load_own(OwnDataSettings(train_file=file, dev_file=file, label_separator=";")).task
    assert set(task.labels) == {"children's", "90s", "(US) sales", "toys"}
    file = write_rows(tmp_path / "n.csv", labelled("(don't know)", "(Paris, France)", "(1)"))
    assert len(load_own(OwnDataSettings(train_file=file, dev_file=file)).task.labels) == 3
    for text in ("[1, 2]", "('a', 'b')", "{'a'}"):
        file = write_rows(tmp_path / "l.csv", labelled(text, text))
        with pytest.raises(UserError, match="a list as text. Set --label_separator"):
            load_own(OwnDataSettings(train_file=file, dev_file=file))


def test_notes_on_many_labels_are_short(tmp_path: Path) -> None:
    names = [f"label{n}" for n in range(1000)]
    file = write_rows(tmp_path / "t.csv", labelled(*names, *names))
    data = load_own(OwnDataSettings(train_file=file))
    assert sum(map(len, data.notes)) < 1500 and "1,000 classes: label0" in data.notes[0]
    assert "(990 more)" in data.notes[0]


def test_one_row_a_class_is_enough_if_dev_has_the_same_classes(tmp_path: Path) -> None:
    task, data = read(tmp_path, labelled(*"abcdefghijkl"), labelled("b", "l", "b"))
    assert len(task.labels) == 12 and [row.label for row in data.dev] == [1, 11, 1]


@pytest.mark.parametrize(
    ("labels", "metric", "first"),
    [
        ("xyz", "matthews", "matthews"),
        ("xyx", "f1", "f1"),
        ((0.5, 1.0), "pearson", "pearson"),
        ("xyz", "macro_f1", "macro_f1"),
        ("xyz", "f1", "of type class have the metrics acc, macro_f1, matthews."),
        ((0.5, 1.0), "acc", "of type score have the metrics spearman, pearson"),
        (([], ["a", "b"]), "acc", "of type multi_label have the metrics micro_f1"),
    ],
)
def test_metrics(labels: Sequence[Any], metric: str, first: str, tmp_path: Path) -> None:
    if " " not in first:
        task, _ = read(tmp_path, labelled(*labels), metric=metric)
        assert task.metrics[0] == first and len(set(task.metrics)) == len(task.metrics) >= 2
        return
    with pytest.raises(UserError, match=f"metric {metric}: .*{first}"):
        read(tmp_path, labelled(*labels), metric=metric)


TWO = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]


@pytest.mark.parametrize(
    ("train", "options", "message"),
    [
        ([{"text": "a", "lable": "x"}], {}, "t.jsonl:1: no column 'label' for the label; "),
        ([{"body": "a", "label": "x"}], {}, "no column 'text' or 'text1' and 'text2' or"),
        (TWO, {"text_column": "texd"}, "(the first line of a table) are 'text', 'label'. Did you"),
        ([{"text": "a", "Label": ""}], {}, "Did you mean 'Label'? Name it by --label_column"),
        (labelled(*range(11)), {"dev": labelled(12)}, "each row has another label (0, 1, 10, ...)"),
        (labelled("x", "x"), {}, "t.jsonl: all labels are alike"),
        (
            [*TWO, {"text": "c", "label": ""}],
            {},
            "t.jsonl:3: 1 train row without a label. Label them, or",
        ),
        ([*TWO, {"text": "c"}], {}, "t.jsonl:3: 1 train row without a label"),
        (labelled(1.5, 2, "nan"), {}, "t.jsonl:3: label 'nan' is not a finite number"),
        (labelled(1, 2, "a"), {"label_type": "score"}, "label 'a' is not a finite number"),
        (labelled(["a"], ["b"]), {"label_type": "class"}, "label is ['a']; it must be a label"),
        (labelled("a|b", "b"), {"label_type": "multi_label"}, "'a|b'; it must be a list"),
        (labelled(["a"], "b"), {}, "t.jsonl:2: the label is 'b'; it must be a list of"),
        (TWO, {"dev": labelled("z")}, "d.jsonl:1: label 'z' is not in the training rows. Known: x"),
        (TWO, {"dev": [{"txt": "a", "label": "x"}]}, "d.jsonl:1: no column 'text' for the text"),
        ([{"text": ["a"], "label": "x"}, TWO[1]], {}, "['a']; it must be a text"),
        (labelled(["a", None], ["b"]), {}, "t.jsonl:1: the label is ['a', None]; it must be a"),
        (labelled([["a"]], ["b"]), {}, "t.jsonl:1: the label is [['a']]; it must be a list"),
        ([{"text": " ", "label": "x"}], {}, "t.jsonl:1: no row has a text"),
    ],
)
def test_rows_that_do_not_fit_are_named(
    train: Rows, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, train, **options)
    assert message in str(error.value)


LONG = 'so; "good",\nit | is' + " word" * 40_000  # longer than Python's csv reads by default
ROWS = [{"text": LONG, "label": "yes"}, {"text": "bad", "label": "no"}]


def as_csv(separator: str) -> str:
    return pd.DataFrame(ROWS).to_csv(sep=separator, index=False, lineterminator="\r\n")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((f"{n}.csv", as_csv(separator)) for n, separator in enumerate(",;\t|")),
        ("bom.csv", "\ufeff" + as_csv(";")),
        ("blank.csv", as_csv(",") + "\r\n\r\n"),
        ("mac.csv", as_csv(";").replace("\r\n", "\r")),
        ("a.jsonl", "\n".join(map(json.dumps, ROWS)) + "\n\n"),
    ],
)
def test_formats(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    assert [row for _, row in read_table(tmp_path / name)] == ROWS


def test_parquet(tmp_path: Path) -> None:
    pd.DataFrame(ROWS).to_parquet(tmp_path / "a.parquet")
    assert [row for _, row in read_table(tmp_path / "a.parquet")] == ROWS
    pd.DataFrame({"text": [b"x", b"y"], "label": ["x", "y"]}).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(UserError, match="row 1: column 'text' is b'x'; it must be a text"):
        load_own(OwnDataSettings(train_file=str(tmp_path / "b.parquet")))


def test_tabs_without_quotes(tmp_path: Path) -> None:
    content = 'text\tlabel\r\n"so" he\ty\r\n\r\nb,c\u2028\x85d\tn\r\n'
    (tmp_path / "a.tsv").write_text(content, encoding="utf-8", newline="")
    rows = [(where.rsplit(":", 1)[1], row["text"]) for where, row in read_table(tmp_path / "a.tsv")]
    assert rows == [("2", '"so" he'), ("4", "b,c\u2028\x85d")]


def test_files_as_people_have_them(tmp_path: Path) -> None:
    """The names of Windows, compressed files, a JSON list, Excel's first line, and pandas' quoted TSV."""
    csv = b'text;label\n"a;b";x\n'
    listed = json.dumps([{"text": "a;b", "label": "x"}]).encode()
    contents = {
        "A.CSV": csv,
        "b.csv.gz": gzip.compress(csv),
        "c.csv.xz": lzma.compress(csv),
        "d.json": listed,
        "e.json": listed[1:-1] + b"\n",
        "f.csv": b"sep=;\r\n" + csv,
        "g.tsv": b'text\tlabel\n"a;b"\tx\n',
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        ((where, row),) = read_table(tmp_path / name)
        assert row == {"text": "a;b", "label": "x"}, name
    assert where.endswith("g.tsv:2")
    frame = pd.DataFrame([{"text": 'a "b"\tc', "label": "x"}, {"text": "d\ne", "label": "y"}])
    frame.to_csv(tmp_path / "h.tsv", sep="\t", index=False)
    assert [row for _, row in read_table(tmp_path / "h.tsv")] == frame.to_dict("records")
    quoted = [row["text"] for _, row in read_table(tmp_path / "g.tsv", raw=True)]
    assert quoted == ['"a;b"'], "official files have no quotes"
    ((where, _),) = read_table(tmp_path / "f.csv")
    assert where.endswith("f.csv:3"), "the line in the file"


def test_spellings_of_labels_are_named_and_joined(tmp_path: Path) -> None:
    """Case, blanks within, and the two forms of an accent."""
    spellings = [
        "Refund",
        "Refund",
        "refund",
        "re\u0301gie",
        "r\u00e9gie",
        "late  item",
        "late item",
    ]
    _, data = read(tmp_path, labelled(*spellings, "x"))
    assert len(data.task.labels) == 7
    (note,) = (note for note in data.notes if "differ by case" in note)
    assert "'Refund' and 'refund'" in note and note.endswith("--join_labels makes them one")
    task, data = read(tmp_path, labelled(*spellings, "x"), join_labels=True)
    assert len(task.labels) == 4 and {"Refund", "x"} < set(task.labels)
    assert [row.label for row in data.train[:3]] == [data.train[0].label] * 3


def test_columns_of_zeros_and_ones(tmp_path: Path) -> None:
    rows = [{"text": f"t{n}", "a": n % 2, "b": 1 - n % 2, "c": "0"} for n in range(6)]
    task, data = read(tmp_path, rows, suffix="csv", label_column="a,b,c")
    assert (task.multi_label, task.labels) == (False, ("a", "b")), "each row has one"
    rows[0]["c"] = "1"
    task, data = read(tmp_path, rows, suffix="csv", label_column="a,b,c")
    assert task.multi_label and data.train[0].labels == (0, 1, 1)
    with pytest.raises(UserError, match="column 'a' is 'often'; it must be 0 or 1"):
        read(tmp_path, [{**rows[0], "a": "often"}], suffix="csv", label_column="a,b")
    with pytest.raises(UserError, match="no column 'a' and 'd' for the label"):
        read(tmp_path, rows, suffix="csv", label_column="a,d")


def test_suspicious_columns_and_nearly_equal_rows(tmp_path: Path) -> None:
    rows = [{"text": str(n), "label": "ab"[n % 2]} for n in range(6)]
    _, data = read(tmp_path, rows, suffix="csv")
    assert any("most texts in 'text' are numbers" in note for note in data.notes)
    story = "the courier has left my parcel at the wrong house and nobody was there again"
    rows = labelled(*"abab")
    rows[0]["text"], rows[1]["text"] = story, story.replace("again", "today")
    _, data = read(tmp_path, rows, [{"text": f"{story} ok", "label": "a"}])
    assert data.train[0].unit == data.train[1].unit == data.dev[0].unit
    (note,) = (note for note in data.notes if "1 of the 1 dev row" in note)
    assert "nearly" in note
    composed = [
        {"text": "caf\u00e9 au lait", "label": "a"},
        {"text": "cafe\u0301  au LAIT", "label": "b"},
    ]
    _, data = read(tmp_path, [*composed, *labelled("a")])
    assert data.train[0].unit == data.train[1].unit


def test_the_main_metric_of_rare_classes(tmp_path: Path) -> None:
    assert read(tmp_path, labelled(*"aaaaaaaaab"))[0].metrics[0] == "macro_f1"
    assert read(tmp_path, labelled(*"aaaaaabbbb"))[0].metrics[0] == "acc"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "must end in .csv, .tsv"),
        ("b.csv", b"text,label\n", "b.csv: no rows"),
        ("b.tsv", b"", "b.tsv: no rows"),
        ("c.csv", b"text;label\na;b\na\n", r"c.csv:3: fewer cells than the 2 columns text, label"),
        ("d.csv", b"text,label\na,b,c\n", r"d.csv:2: more cells than the 2 columns"),
        ("e.csv", b"\n\ntext,label\na,b\n", r"e.csv:3: more cells than the 0 columns"),
        ("c.tsv", b'text\tlabel\n"a\nb\tc\n', "c.tsv:2: fewer cells.*name the file .csv"),
        ("f.tsv", b"text\tlabel\na\rb\tc\n", "f.tsv:2: fewer cells"),
        ("d.csv", b'text,label\na,b\n"c,x\nd,x\ne,x\n', "d.csv:3: cannot be read: unexpected end"),
        ("e.csv", b"text,label\na,x\n\xe9,x\n", "e.csv:3: not UTF-8.*Save it as UTF-8"),
        ("f.csv", b"text,text,label\na,b,x\n", "f.csv: column 'text' is there more than once"),
        ("g.jsonl", b'{"text": "a"}\n\n{"text": \n', "g.jsonl:3: not valid JSON"),
        ("h.jsonl", b'{"text": "\\ud83d"}', "h.jsonl:1: not valid JSON"),
        ("h.jsonl", b'{"text": "a", "text": "b"}', "h.jsonl:1: .* a key occurs twice"),
        ("i.jsonl", b'[{"text": "a"}]', "i.jsonl:1: not a JSON object"),
        ("k.csv", "text,label\na,x\n".encode("utf-16"), "k.csv:1: not UTF-8"),
        ("l.csv", b'text,label\n"a" b,x\n', "l.csv:2: cannot be read: ',' expected after.*twice"),
        ("o.csv", b"text,label\na,x\n\xe9,x\n", "o.csv:3: .*iconv -f latin1 -t utf8 o.csv"),
        ("p.csv.gz", b"text,label\na,x\n", "p.csv.gz: cannot be decompressed"),
        ("q.json", b'["a"]', "q.json: not a list of JSON objects"),
        ("n.csv", "text,label\na,x\n".encode("utf-16-le"), "n.csv:1: not UTF-8"),
        ("m.parquet", b"no Parquet", "m.parquet: cannot be read"),
        ("r.xlsx", b"", "r.xlsx: a spreadsheet; save it as CSV"),
    ],
)
def test_broken_files_are_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_table(tmp_path / name)


@pytest.mark.parametrize("name", ["none.csv", "none.parquet", "folder.csv"])
def test_a_file_that_is_none(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(UserError, match=rf"{name}: (No such file|Is a directory)"):
        read_table(tmp_path / name)
