"""The table of tasks, and a user's own rows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from finetune.data.examples import LabeledExample
from finetune.data.own_rows import read_own
from finetune.data.tasks import TASKS, find_task
from multicls.errors import UserError

DOCS = Path(__file__).resolve().parents[3] / "docs" / "tasks.md"


def test_all_tasks_of_both_benchmarks() -> None:
    files = {
        "glue": "CoLA SST-2 MRPC STS-B QQP MNLI-m MNLI-mm QNLI RTE WNLI AX",
        "superglue": "BoolQ CB COPA MultiRC ReCoRD RTE WiC WSC AX-b AX-g",
    }
    for benchmark, names in files.items():
        tasks = [task for task in TASKS.values() if task.benchmark == benchmark]
        assert sorted(stem for task in tasks for stem, _ in task.submissions) == sorted(names.split())
        assert all(len(task.test) == len(task.submissions) for task in tasks)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_the_table_is_consistent(name: str) -> None:
    task = TASKS[name]
    assert (task.num_choices > 0) == (task.shape == "choice") and (task.num_spans > 0) == (task.shape == "span")
    assert task.num_labels == (1 if task.is_regression or task.num_choices else len(task.labels))
    assert len(task.fields) == 1 or task.shape != "single"
    assert task.max_length == (256 if task.benchmark == "superglue" else 128)
    if task.metrics[0].startswith("mean("):
        assert task.metrics[0] == f"mean({','.join(task.metrics[1:])})"
    for other in task.diagnostics:  # predicted by this task's model: the classes must mean the same
        assert TASKS[other].labels == task.labels and not TASKS[other].train
    assert f"| `{name}` |" in DOCS.read_text(encoding="utf-8")


def test_an_unknown_task() -> None:
    with pytest.raises(UserError, match="--task multrc: no such task. Did you mean 'multirc'?"):
        find_task("multrc")


def write(folder: Path, name: str, rows: list[dict[str, object]]) -> str:
    path = folder / name
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)
    separator, quote = ("\t", "") if path.suffix == ".tsv" else (",", '"')
    lines: list[Iterable[object]] = [rows[0], *(row.values() for row in rows)]
    text = "".join(separator.join(f"{quote}{cell}{quote}" for cell in line) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8-sig")
    return str(path)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_own_classes(suffix: str, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"text": "so, good", "label": "yes"}, {"text": "bad", "label": "no"}]
    task, data = read_own(write(tmp_path, f"my.{suffix}", rows), write(tmp_path, f"dev.{suffix}", rows[:1]))
    assert (task.name, task.labels, task.shape, task.benchmark) == ("own_my", ("no", "yes"), "single", "own")
    assert data.train == [LabeledExample("my:0", ("so, good",), 1), LabeledExample("my:1", ("bad",), 0)]
    assert data.dev == [LabeledExample("dev:0", ("so, good",), 1)] and data.notes == ["2 classes: no, yes"]


def test_own_pairs_and_scores(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"sentence1": "not this", "text1": "a", "text2": "b", "sentence2": "nor this", "label": label}
        for label in (-8.0, 2.5)
    ]
    task, data = read_own(write(tmp_path, "t.jsonl", rows), write(tmp_path, "d.csv", rows[1:]))
    assert task.is_regression and task.label_scale == 8.0 and task.metrics == ("pearson", "spearman")
    assert data.dev == [LabeledExample("d:0", ("a", "b"), 2.5)] and data.notes[0].startswith(
        "labels are numbers: a regression"
    )


@pytest.mark.parametrize(
    ("labels", "regression"),
    [(range(20), False), (range(21), True), ([0, 1], False), ([0.5, 1], True), (["nan", "x"], False)],
)
def test_when_numbers_are_scores(labels: Iterable[object], regression: bool, tmp_path: Path) -> None:
    file = write(tmp_path, "t.csv", [{"text": "a", "label": label} for label in labels])
    assert read_own(file, file)[0].is_regression == regression


def test_cells_of_several_lines_and_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('text,label\n"two\nlines ""quoted""",x\nplain,\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"t.csv:4: label is ''"):
        read_own(str(path), str(path))


@pytest.mark.parametrize(
    ("train", "dev", "message"),
    [
        ([{"text": "a", "lable": "x"}], None, "no column 'label'; the columns are 'text', 'lable'. Did you"),
        ([{"body": "a", "label": "x"}], None, "t.csv: no column 'text' or 'text1' and 'text2' or 'sentence1'"),
        ([{"text": "a", "label": "x"}], None, "t.csv: every label is 'x'"),
        ([{"text": "a", "label": "x"}, {"text": " ", "label": "y"}], None, "t.csv:3: text is ' '"),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "y"}], [{"text": "a", "label": "z"}],
         "d.csv:2: label 'z' is none of train's: x, y"),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "y"}], [{"txt": "a", "label": "x"}],
         "d.csv:2: no 'text'; the columns are 'txt', 'label'. Did you mean 'txt'"),
    ],
)  # fmt: skip
def test_own_rows_that_do_not_fit_are_named(
    train: list[dict[str, object]], dev: list[dict[str, object]] | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        read_own(write(tmp_path, "t.csv", train), write(tmp_path, "d.csv", dev or train))
    assert message in str(error.value)


def test_own_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name, content, message in (("a.txt", "", "must be one of"), ("b.csv", "text,label\n", "no rows"),
                                   ("c.csv", "text,label\na\n", "c.csv:2: 1 columns instead of 2"),
                                   ("d.csv", 'text,label\n"a', "d.csv:2: cannot be read"),
                                   ("e.csv", "text,label\né,x\n", "e.csv: not UTF-8"),
                                   ("f.csv", "text,text,label\na,b,x\n", "'text' is there more than once"),
                                   ("g.csv", "text,label\na,0.5\nb,nan\n", "all labels are numbers.*'nan'"),
                                   ("h.jsonl", '{"text": "\\ud83d", "label": 1}', "h.jsonl:1: not")):  # fmt: skip
        (tmp_path / name).write_text(content, encoding="latin-1")
        with pytest.raises(UserError, match=message):
            read_own(str(tmp_path / name), str(tmp_path / name))
    with pytest.raises(UserError, match="No such file"):
        read_own(str(tmp_path / "none.csv"), str(tmp_path / "none.csv"))


def test_blank_lines_blanks_around_labels_and_very_long_texts(tmp_path: Path) -> None:
    long = "word " * 40_000
    contents = {
        "a.csv": f"text,label\n{long}, x\n\nb,y\n\n",
        "b.tsv": f"text\tlabel\r\n{long}\tx \r\nb\ty\r\n\r\n",
        "c.jsonl": f'{{"text": "{long}", "label": "x"}}\n{{"text": "b", "label": "y"}}\n\n',
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content.encode())
        task, data = read_own(str(tmp_path / name), str(tmp_path / name))
        assert task.labels == ("x", "y") and [row.texts for row in data.dev] == [(long,), ("b",)]
