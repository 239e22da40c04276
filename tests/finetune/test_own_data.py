"""A user's own rows: what their labels are, which rows belong together, and what is wrong with them."""

import gzip
import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from finetune.own_data import OwnRows, read_own, units_of
from finetune.settings import RowSettings
from multicls.errors import UserError
from multicls.evaluation import folds
from multicls.tables import read_table
from tests.finetune.runs import write_rows

Dicts = Sequence[dict[str, Any]]


def labelled(*labels: Any) -> list[dict[str, Any]]:
    return [{"text": f"row {number}", "label": label} for number, label in enumerate(labels)]


def read(
    folder: Path, rows: Dicts, test: Dicts | None = None, suffix: str = "jsonl", **own: Any
) -> OwnRows:
    own["train_file"] = write_rows(folder / f"t.{suffix}", rows)
    if test is not None:
        own["test_file"] = write_rows(folder / f"d.{suffix}", test)
    return read_own(RowSettings(**own))


def test_classes(tmp_path: Path) -> None:
    rows = [{"text": "so, good", "label": "yes"}, {"text": "bad", "label": " no "}]
    table = read(tmp_path, rows, rows[:1], "csv")
    train, test, file = table.train, table.test, tmp_path / "t.csv"
    assert (train.kind, train.classes, train.metric) == ("class", ("no", "yes"), "acc")
    assert train.texts == [("so, good",), ("bad",)] and train.targets.tolist() == [1, 0]
    assert train.places == [f"{file}:2", f"{file}:3"] and table.notes[0] == "2 classes: no, yes"
    assert test is not None and test.targets.tolist() == [1]


def test_pairs_and_scores(tmp_path: Path) -> None:
    row = {"sentence1": "not this", "text1": "a", "text2": "b"}
    table = read(tmp_path, [row | {"label": label} for label in (-8.0, 2.5)])
    assert (table.train.kind, table.train.metric) == ("score", "spearman")
    assert table.train.texts[0] == ("a", "b") and table.train.targets.tolist() == [-8.0, 2.5]
    assert "labels are scores: a regression" in table.notes[0]


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
    table = read(tmp_path, labelled(*labels), None, suffix, **own)
    assert table.train.classes == expected and (table.train.kind == "score") == (not expected)
    whole = all(name.isdigit() for name in expected or "x")
    assert ("label_type score" in table.notes[0]) == whole


def test_several_labels_a_row(tmp_path: Path) -> None:
    """A label with a comma in its name stays one label."""
    train = read(tmp_path, labelled(["New York, NY", "b"], ["b"], [])).train
    assert (train.kind, train.classes) == ("multi_label", ("New York, NY", "b"))
    assert train.targets.tolist() == [[1, 1], [0, 1], [0, 0]] and train.metric == "micro_f1"


def test_rows_without_a_text_are_left_out_and_counted(tmp_path: Path) -> None:
    empty = [{"text": text, "label": "x"} for text in ("", " ", None, float("nan"))]
    table = read(tmp_path, [*labelled("x", "y", 0), *empty], text_column="text,label")
    assert len(table.train.texts) == 3
    assert "4 train rows without a text left out" in table.notes
    (tmp_path / "t.csv").write_text("text\na\n\nb\n")  # the empty line is an empty cell
    assert [row["text"] for _, row in read_table(tmp_path / "t.csv")] == ["a", None, "b"]


def test_two_torn_quotes_are_noted(tmp_path: Path) -> None:
    """They make one cell of all rows between them, as a text with line breaks does."""
    rows = [f"row {n},{'xy'[n % 2]}" for n in range(30)]
    rows[4], rows[14], path = f'"{rows[4]}', 'row 14",x', tmp_path / "t.csv"
    path.write_text("\n".join(["text,label", *rows, '"a\nb",x']) + "\n")
    table = read_own(RowSettings(train_file=str(path)))
    note = f"2 train rows with line breaks, the first up to {path}:16: texts, or torn quotes?"
    assert len(table.train.texts) == 21 and note in table.notes


@pytest.mark.parametrize("shared", ["pair", "question", "answer"])
def test_rows_that_share_a_text_stay_on_one_side(shared: str, tmp_path: Path) -> None:
    """25 pairs four times each; 25 questions with four answers each; "yes" and "no" join no questions."""
    rows = []
    for n in range(100):
        pair = f"Question {n % 25}?", f"answer {n if shared == 'question' else n % 25}"
        if shared == "answer":
            pair = f"question  {n % 25}?".upper() if n % 2 else pair[0], ("yes", "no")[n // 25 % 2]
        rows.append({"text1": pair[0], "text2": pair[1], "label": "xy"[n % 2]})
    table = read(tmp_path, rows, suffix="csv")
    numbers = np.arange(100) % 25
    assert all(len(set(table.train.units[numbers == n])) == 1 for n in range(25))
    (fold,) = folds(table.train, 1).folds
    assert all(len(set(fold[numbers == n])) == 1 for n in range(25)) and len(set(fold)) == 5
    note = "equal texts in 'text2' join 100 of 100 rows: they may stand on both sides of a split"
    assert (note in table.notes) == (shared == "answer")


def test_rows_of_a_group_are_a_unit(tmp_path: Path) -> None:
    rows = [{"text": f"row {n}", "label": "xy"[n % 2], "customer": n % 20} for n in range(100)]
    own: dict[str, Any] = {"suffix": "csv", "group_column": "customer"}
    table = read(tmp_path, rows, **own)
    assert [len(set(table.train.units[n::20])) for n in range(20)] == [1] * 20
    some = [row | {"customer": None} for row in rows[:60]] + rows[60:]
    units = read(tmp_path, some, **own | {"suffix": "jsonl"}).train.units
    assert np.bincount(units).max() == 2, "rows without a group are none"
    thanks = [row | {"text": "Thanks"} if n < 20 else row for n, row in enumerate(rows)]
    table = read(tmp_path, thanks, **own)
    assert len(set(table.train.units)) == 20, "a common phrase joins no groups"
    assert any("'text' join 100 of 100 rows" in note for note in table.notes)
    new = {"text": "new", "label": "x"}
    notes = read(tmp_path, rows, [new | {"customer": 3}], **own).notes
    what = "1 of the 1 test row share a text, nearly, or a group with train"
    assert any(note.startswith(what) for note in notes)
    notes = read(tmp_path, rows, [new], **own).notes
    assert any(note.startswith("test rows have no column 'customer'") for note in notes)
    with pytest.raises(UserError, match="no column 'custmer' for the group; .*Did you mean 'cust"):
        read(tmp_path, rows, suffix="csv", group_column="custmer")


def test_a_large_group_is_no_common_phrase() -> None:
    """Rows that share a text stay together beside a group of most rows."""
    texts = [(f"row {n % 90}",) for n in range(100)]
    units, notes = units_of(("text",), texts, [str(max(n, 60)) for n in range(100)])
    assert not notes and units[5] == units[95]


def test_rows_of_test_that_stand_in_train_are_counted_and_named(tmp_path: Path) -> None:
    rows = [{"text": f"Text {n}", "label": "xy"[n % 2]} for n in range(50)]
    more = [*rows, {"text": "text  7 ", "label": "x"}, {"text": "new", "label": "x"}]
    notes = read(tmp_path, [*rows, {"text": "Text 3", "label": "x"}], more[40:], "csv").notes
    train, test = tmp_path / "t.csv", tmp_path / "d.csv"
    first = f"(the first: {test}:2, also {train}:42): scores on them are too high"
    assert f"11 of the 12 test rows stand in train, too {first}" in notes
    assert f"1 text of train with two labels or more, the first: {train}:5 and {train}:52" in notes


def test_labels_in_one_cell_and_rows_without_a_label(tmp_path: Path) -> None:
    cells = labelled("a; b", "b", " ", "a", "['a', 'b']")

    def csv(rows: Dicts, **own: Any) -> OwnRows:
        return read(tmp_path, rows, suffix="csv", **own)

    with pytest.raises(UserError, match=r"t.csv:6: the label is .*, a list as text. Set --label_s"):
        csv(cells, unlabelled="drop")
    with pytest.raises(UserError, match=r"t.csv:4: 1 train row without a label.*unlabelled drop"):
        csv(cells, label_separator=",")
    table = csv(cells, label_separator=";", unlabelled="drop")
    note = f"1 train row without a label left out, the first: {tmp_path / 't.csv'}:4"
    assert note in table.notes and len(table.train.texts) == 4
    table = csv(labelled("a,b", "b", "['a', 'b']"), label_separator=",")
    assert table.train.targets.tolist() == [[1, 1], [0, 1], [1, 1]]
    table = csv(labelled("['a, x', 'b']", "('b',)"), label_separator=",")
    assert table.train.classes == ("a, x", "b") and table.train.targets.sum(axis=1).tolist() == [
        2,
        1,
    ]
    names = "children's; 90s; (US) sales", '"toys"; 90s', "90s;\n(US) sales"
    classes = csv(labelled(*names), label_separator=";").train.classes
    assert set(classes) == {"children's", "90s", "(US) sales", "toys"}
    assert len(csv(labelled("(don't know)", "(Paris, France)", "(1)")).train.classes) == 3
    for text in ("[1, 2]", "('a', 'b')", "{'a'}"):
        with pytest.raises(UserError, match="a list as text. Set --label_separator"):
            csv(labelled(text, text))


def test_notes_on_many_labels_are_short(tmp_path: Path) -> None:
    names = [f"label{n}" for n in range(1000)]
    notes = read(tmp_path, labelled(*names, *names), suffix="csv").notes
    assert sum(map(len, notes)) < 1500 and "1,000 classes: label0" in notes[0]
    assert "(990 more)" in notes[0]
    assert any(note.startswith("1000 of 1000 classes have fewer than 5 tr") for note in notes)


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
        assert read(tmp_path, labelled(*labels), metric=metric).train.metric == first
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
        (labelled(*range(11)), {}, "each row has another label (0, 1, 10, ...)"),
        (labelled("x", "x"), {}, "t.jsonl: all labels are alike"),
        (
            [*TWO, {"text": "c", "label": ""}],
            {},
            "t.jsonl:3: 1 train row without a label. Label them, or",
        ),
        (labelled(1.5, 2, "nan"), {}, "t.jsonl:3: label 'nan' is not a finite number"),
        (labelled(1, 2, "a"), {"label_type": "score"}, "label 'a' is not a finite number"),
        (labelled(["a"], ["b"]), {"label_type": "class"}, "label is ['a']; it must be a label"),
        (labelled("a|b", "b"), {"label_type": "multi_label"}, "'a|b'; it must be a list"),
        (labelled(["a"], "b"), {}, "t.jsonl:2: the label is 'b'; it must be a list of"),
        (
            TWO,
            {"test": labelled("z")},
            "d.jsonl:1: label 'z' is not in the training rows. Known: x",
        ),
        (TWO, {"test": [{"txt": "a", "label": "x"}]}, "d.jsonl:1: no column 'text' for the text"),
        ([{"text": ["a"], "label": "x"}, TWO[1]], {}, "['a']; it must be a text"),
        (labelled(["a", None], ["b"]), {}, "t.jsonl:1: the label is ['a', None]; it must be a"),
        ([{"text": " ", "label": "x"}], {}, "t.jsonl:1: no row has a text"),
    ],
)
def test_rows_that_do_not_fit_are_named(
    train: Dicts, options: dict[str, Any], message: str, tmp_path: Path
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
        read_own(RowSettings(train_file=str(tmp_path / "b.parquet")))


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
    spellings = ["Refund", "Refund", "refund", "late  item", "late item", "x"]
    spellings += ["re\u0301gie", "r\u00e9gie"]
    table = read(tmp_path, labelled(*spellings))
    assert len(table.train.classes) == 7
    (note,) = (note for note in table.notes if "differ by case" in note)
    assert "'Refund' and 'refund'" in note and note.endswith("--join_labels makes them one")
    train = read(tmp_path, labelled(*spellings), join_labels=True).train
    assert len(train.classes) == 4 and {"Refund", "x"} < set(train.classes)
    assert len(set(train.targets[:3])) == 1


def test_columns_of_zeros_and_ones(tmp_path: Path) -> None:
    rows = [{"text": f"t{n}", "a": n % 2, "b": 1 - n % 2, "c": "0"} for n in range(6)]
    train = read(tmp_path, rows, suffix="csv", label_column="a,b,c").train
    assert (train.kind, train.classes) == ("class", ("a", "b")), "each row has one"
    rows[0]["c"] = "1"
    train = read(tmp_path, rows, suffix="csv", label_column="a,b,c").train
    assert train.kind == "multi_label" and train.targets[0].tolist() == [0, 1, 1]
    with pytest.raises(UserError, match="column 'a' is 'often'; it must be 0 or 1"):
        read(tmp_path, [{**rows[0], "a": "often"}], suffix="csv", label_column="a,b")
    with pytest.raises(UserError, match="no column 'a' and 'd' for the label"):
        read(tmp_path, rows, suffix="csv", label_column="a,d")


def test_suspicious_columns_and_nearly_equal_rows(tmp_path: Path) -> None:
    rows = [{"text": str(n), "label": "ab"[n % 2]} for n in range(6)]
    notes = read(tmp_path, rows, suffix="csv").notes
    assert any("most texts in 'text' are numbers" in note for note in notes)
    story = "the courier has left my parcel at the wrong house and nobody was there again"
    rows = labelled(*"abab")
    rows[0]["text"], rows[1]["text"] = story, story.replace("again", "today")
    table = read(tmp_path, rows, [{"text": f"{story} ok", "label": "a"}])
    assert table.test is not None
    assert table.train.units[0] == table.train.units[1] == table.test.units[0]
    (note,) = (note for note in table.notes if "1 of the 1 test row" in note)
    assert "nearly" in note
    texts = ("caf\u00e9 au lait", "cafe\u0301  au LAIT")
    composed = [{"text": text, "label": label} for text, label in zip(texts, "ab", strict=True)]
    units = read(tmp_path, [*composed, *labelled("a")]).train.units
    assert units[0] == units[1]


def test_the_main_metric_of_rare_classes(tmp_path: Path) -> None:
    assert read(tmp_path, labelled(*"aaaaaaaaab")).train.metric == "macro_f1"
    assert read(tmp_path, labelled(*"aaaaaabbbb")).train.metric == "acc"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "must end in .csv, .tsv"),
        ("b.csv", b"text,label\n", "b.csv: no rows"),
        ("c.csv", b"text;label\na;b\na\n", r"c.csv:3: fewer cells than the 2 columns text, label"),
        ("d.csv", b"text,label\na,b,c\n", r"d.csv:2: more cells than the 2 columns"),
        ("c.tsv", b'text\tlabel\n"a\nb\tc\n', "c.tsv:2: fewer cells.*name the file .csv"),
        ("f.tsv", b"text\tlabel\na\rb\tc\n", "f.tsv:2: fewer cells"),
        ("d.csv", b'text,label\na,b\n"c,x\nd,x\ne,x\n', "d.csv:3: cannot be read: unexpected end"),
        ("e.csv", b"text,label\na,x\n\xe9,x\n", "e.csv:3: not UTF-8.*iconv -f latin1"),
        ("f.csv", b"text,text,label\na,b,x\n", "f.csv: column 'text' is there more than once"),
        ("g.jsonl", b'{"text": "a"}\n\n{"text": \n', "g.jsonl:3: not valid JSON"),
        ("h.jsonl", b'{"text": "\\ud83d"}', "h.jsonl:1: not valid JSON"),
        ("h.jsonl", b'{"text": "a", "text": "b"}', "h.jsonl:1: .* a key occurs twice"),
        ("k.csv", "text,label\na,x\n".encode("utf-16"), "k.csv:1: not UTF-8.*iconv -f utf16"),
        ("l.parquet", b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer, not"),
        ("l.csv", b'text,label\n"a" b,x\n', "l.csv:2: cannot be read: ',' expected after.*twice"),
        ("p.csv.gz", b"text,label\na,x\n", "p.csv.gz: cannot be decompressed"),
        ("q.json", b'["a"]', "q.json: not a list of JSON objects"),
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
