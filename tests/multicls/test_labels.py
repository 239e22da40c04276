"""Labelled rows for a probe: each text once, labels as people write them."""

from pathlib import Path

import pytest

from multicls.errors import UserError
from multicls.labels import LabelledSettings, read_labelled


def read(folder: Path, text: str, **columns: str) -> tuple[dict[str, object], list[str]]:
    """Returns the label of each text of a table, and the notes."""
    (folder / "rows.csv").write_text(text, encoding="utf-8")
    found = read_labelled(folder / "rows.csv", LabelledSettings.model_validate(columns))
    texts = [text for (text,) in found.texts]
    return dict(zip(texts, found.labels, strict=True)), found.notes


def test_a_text_counts_once(tmp_path: Path) -> None:
    table = "text,label\none,a\ntwo,b\none,a\none,b\n"
    rows, notes = read(tmp_path, table)
    assert rows == {"one": ("a",), "two": ("b",)}
    assert notes == ["2 rows left out whose text another row has", "2 classes"]


def test_several_labels_in_a_cell(tmp_path: Path) -> None:
    """A row without any would count as right whatever is predicted."""
    table = "text,label\none,a; b\ntwo,;\nthree,b\n"
    rows, notes = read(tmp_path, table, label_separator=";")
    assert rows == {"one": ("a", "b"), "three": ("b",)}
    assert notes == ["1 row without any of the labels left out", "2 classes"]
    with pytest.raises(UserError, match="Set --label_separator ','"):
        read(tmp_path, "text,label\none,\"['a']\"\ntwo,b\n")


def test_numbers_that_are_read_as_classes_are_named(tmp_path: Path) -> None:
    whole = "--label_type score makes them"
    cases = {("1,5", "2,5", "n/a"): "most are numbers", ("-1", "0"): whole, ("1.0", "2.0"): whole}
    for labels, hint in cases.items():
        table = "".join(f'{n},"{label}"\n' for n, label in enumerate(labels))
        assert hint in read(tmp_path, f"text,label\n{table}")[1][-1]
    texts = "".join(f"{n},{n}{'long' * 100}\n" for n in range(20))
    with pytest.raises(UserError, match=r"each row has another label \(0long.{,99}\)\. Name"):
        read(tmp_path, f"text,label\n{texts}")


def test_numbers_are_scores_on_demand_and_rows_without_a_label_may_go(tmp_path: Path) -> None:
    table = "text,label\none,1\ntwo,5\nthree,\n"
    with pytest.raises(UserError, match=r"rows.csv:4: 1 row without a label. .*--unlabelled drop"):
        read(tmp_path, table)
    rows, notes = read(tmp_path, table, unlabelled="drop", label_type="score")
    assert rows == {"one": 1.0, "two": 5.0}
    assert notes[-1] == "labels are scores" and "1 row without a label left out" in notes[0]
