"""A user's files: every format gives the same rows, and what is wrong is named with its place."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from finetune.data.tables import read_table
from multicls.errors import UserError

ROWS = [{"text": 'so; "good",\nit | is', "label": "yes"}, {"text": "bad", "label": "no"}]


def as_csv(separator: str, rows: list[dict[str, str]] = ROWS) -> str:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


@pytest.mark.parametrize(("name", "content"), [
    *((f"{n}.csv", as_csv(separator)) for n, separator in enumerate(",;\t|")),
    ("bom.csv", "\ufeff" + as_csv(";")),
    ("a.jsonl", "\n".join(map(json.dumps, ROWS)) + "\n\n"),
    ("a.json", json.dumps(ROWS, indent=2)),
    ("b.jsonl", json.dumps(ROWS)),
])  # fmt: skip
def test_formats(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    assert [row for _, row in read_table(tmp_path / name, [["text", "label"]])] == ROWS
    assert [row for _, row in read_table(tmp_path / name)] == ROWS, "the header alone decides as well"


def test_parquet(tmp_path: Path) -> None:
    import pandas

    pandas.DataFrame(ROWS).to_parquet(tmp_path / "a.parquet")
    assert [row for _, row in read_table(tmp_path / "a.parquet")] == ROWS
    (tmp_path / "b.parquet").write_bytes(b"no Parquet")
    with pytest.raises(UserError, match=r"b.parquet: cannot be read"):
        read_table(tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"c.parquet: .*o such file"):
        read_table(tmp_path / "c.parquet")


def test_tabs_without_quotes(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('text\tlabel\r\n"so" he\ty\r\n\r\nb,c\tn\r\n', newline="")
    rows = read_table(tmp_path / "a.tsv")
    assert [(where.rsplit(":", 1)[1], row["text"]) for where, row in rows] == [("2", '"so" he'), ("4", "b,c")]


def test_the_wanted_columns_decide_the_separator(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text;label;a,b,c,d\nx;y;z\n")
    assert read_table(path, [["text", "label"]])[0][1] == {"text": "x", "label": "y", "a,b,c,d": "z"}


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.txt", b"", "must end in .csv, .tsv"),
    ("b.csv", b"text,label\n", "b.csv: no rows"),
    ("c.csv", b"text;label\na;b\na\n", r"c.csv:3: 1 columns instead of 2 \(separator ';'; columns text, label\)"),
    ("c.tsv", b"text\tlabel\n\"a\nb\"\tc\n", "c.tsv:2: 1 columns instead of 2.*name the file .csv"),
    ("d.csv", b'text,label\n"a', "d.csv:2: cannot be read: unexpected end of data"),
    ("e.csv", b"text,label\na,x\n\xe9,x\n", "e.csv:3: not UTF-8.*Save the file as UTF-8"),
    ("f.csv", b"text,text,label\na,b,x\n", "f.csv: column 'text' is there more than once"),
    ("g.jsonl", b'{"text": "a"}\n\n{"text": \n', "g.jsonl:3: not valid JSON"),
    ("h.jsonl", b'{"text": "\\ud83d"}', "h.jsonl:1: not valid JSON"),
    ("i.json", b'[{"text": "a"}, 3]', "i.json, row 2: not a JSON object"),
    ("j.json", b"[", "j.json: not valid JSON"),
])  # fmt: skip
def test_what_cannot_be_read_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_table(tmp_path / name)


def test_a_missing_file_and_very_long_cells(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder; give a file"):
        read_table(tmp_path)
    with pytest.raises(UserError, match="none.csv: no such file"):
        read_table(tmp_path / "none.csv")
    row: dict[str, Any] = {"text": "word " * 40_000, "label": "x"}
    (tmp_path / "a.csv").write_text(as_csv(",", [row]))
    assert read_table(tmp_path / "a.csv")[0][1] == row
