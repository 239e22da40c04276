"""The official files, and files that are not quite official."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from finetune.reading import read_file, read_task
from finetune.tasks import TASKS
from multicls.errors import UserError

ROWS = {  # train, dev of the official data sets
    "cola": (8551, 1043), "sst2": (67349, 872), "mrpc": (3668, 408), "stsb": (5749, 1500), "rte": (2490, 277),
    "wnli": (635, 71),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ROWS))
def test_official_files(name: str, multicls_data: Path) -> None:
    data = read_task(TASKS[name], str(multicls_data / "glue"))
    assert data.train is not None and (len(data.train), len(data.dev)) == ROWS[name]
    assert all(text.strip() for row in data.train + data.dev for text in row.texts)
    assert len({row.id for row in data.dev}) == len(data.dev)
    if not TASKS[name].is_regression:
        assert {row.label for row in data.train} == {0, 1}


@pytest.mark.parametrize(("name", "column", "positive"), [("MRPC", "Quality", "1"), ("RTE", "label", "not_entailment")])
def test_labels_as_the_csv_module_reads_them(name: str, column: str, positive: str, multicls_data: Path) -> None:
    with open(multicls_data / "glue" / name / "dev.tsv", encoding="utf-8-sig", newline="") as file:
        expected = [
            int(row[column] == positive) for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        ]
    assert [row.label for row in read_task(TASKS[name.lower()], str(multicls_data / "glue")).dev] == expected


def test_dev_only_copies(multicls_data: Path) -> None:
    glue = str(multicls_data / "glue")
    assert len(read_task(TASKS["qnli"], glue, train_from_dev=True).dev) == 5463
    mnli = read_task(TASKS["mnli"], glue, train_from_dev=True)
    assert len(mnli.dev) == 9815 and {row.part for row in mnli.dev} == {"m"} and "dev_mismatched" in mnli.notes[0]
    assert {row.label for row in mnli.dev} == {0, 1, 2}
    for name, missing in (("qnli", "train.tsv"), ("mnli", "dev_mismatched.tsv")):
        with pytest.raises(UserError, match=missing):
            read_task(TASKS[name], glue)


def put(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_quotes_bom_carriage_returns_and_unicode_line_separators(tmp_path: Path) -> None:
    content = '\ufeffsentence\tlabel\r\n"a " quote\t1\r\nx\u2028y\x85z\t0\r\n'
    rows, _ = read_file(TASKS["sst2"], put(tmp_path / "dev.tsv", content))
    assert [(row.texts, row.label) for row in rows] == [(('"a " quote',), 1), (("x\u2028y\x85z",), 0)]


def test_cola_has_no_header(tmp_path: Path) -> None:
    rows, _ = read_file(TASKS["cola"], put(tmp_path / "dev.tsv", "s\t0\t*\tthe cat good\ns\t1\t\tthe cat\n"))
    assert [(row.texts, row.label) for row in rows] == [(("the cat good",), 0), (("the cat",), 1)]


def test_jsonl_with_names_or_indices(tmp_path: Path) -> None:
    lines = (
        '{"premise": "a", "hypothesis": "b", "label": "neutral"}\n{"sentence1": "a", "sentence2": "c", "label": 2}\n'
    )
    rows, _ = read_file(TASKS["mnli"], put(tmp_path / "dev_matched.jsonl", lines), "m")
    assert [(row.texts, row.label, row.part) for row in rows] == [(("a", "b"), 1, "m"), (("a", "c"), 2, "m")]


def test_qqp_leaves_out_short_rows_and_says_so(tmp_path: Path) -> None:
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    for name in ("train", "dev"):
        put(tmp_path / "QQP" / f"{name}.tsv", header + "1\t2\t3\ta\tb\t1\n4\t5\ttorn\n6\t7\t8\tc\td\t0\n")
    data = read_task(TASKS["qqp"], str(tmp_path))
    assert [row.texts for row in data.dev] == [("a", "b"), ("c", "d")]
    assert data.notes == [f"{name}.tsv: 1 rows with missing columns left out" for name in ("dev", "train")]


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("sst2", "sentence\tlabel\ngood\t1\nbad\n", "dev.tsv:3: 1 columns instead of 2"),
        ("sst2", "sentence\tlabel\ngood\tfine\n", "dev.tsv:2: label 'fine' is none of 0, 1"),
        ("sst2", "text\tlabel\ngood\t1\n", "dev.tsv:1: no column 'sentence'"),
        ("sst2", b"sentence\tlabel\n\xff\t1\n", "dev.tsv:2: not UTF-8"),
        ("sst2", "sentence\tlabel\n", "no rows"),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\t5.5\n", "dev.tsv:2: score '5.5' is not a number in 0..5"),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\tnan\n", "dev.tsv:2: score 'nan'"),
        ("rte", "sentence1\tsentence2\tlabel\na\tb\t0\n", "dev.tsv:2: label '0' is none of entailment, not_entailment"),
    ],
)
def test_rows_that_do_not_parse_are_named(task: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read_file(TASKS[task], put(tmp_path / "dev.tsv", content))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "dev.jsonl:1: not JSON"),
        ("[1]", "dev.jsonl:1: not a JSON object"),
        ('{"sentence1": "a", "label": 0}', "dev.jsonl:1: no 'sentence2'"),
        ('{"sentence1": "a", "sentence2": 3, "label": 0}', "must be text"),
        ('{"sentence1": "a", "sentence2": "b", "label": -1}', "label -1"),
        ('{"sentence1": "a", "sentence2": "b", "label": true}', "label True"),
    ],
)
def test_json_lines_that_do_not_parse_are_named(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read_file(TASKS["rte"], put(tmp_path / "dev.jsonl", line + "\n"))
    assert message in str(error.value)


def test_missing_folders(tmp_path: Path) -> None:
    (tmp_path / "CoLA").mkdir()
    with pytest.raises(UserError, match="RTE/: it holds CoLA"):
        read_task(TASKS["rte"], str(tmp_path))
    with pytest.raises(UserError, match="no such folder"):
        read_task(TASKS["rte"], str(tmp_path / "nowhere"))


def test_the_hub_without_network_names_data_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*args: object, **options: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match="no network.*--data_dir.*RTE/train.tsv"):
        read_task(TASKS["rte"], None)


def test_the_hub_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(repository: str, config: str, split: str) -> list[dict[str, object]]:
        asked.append((repository, config, split))
        return [{"premise": split, "hypothesis": "b", "label": 2, "idx": 0}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = read_task(TASKS["mnli"], None)
    assert asked == [("nyu-mll/glue", "mnli", s) for s in ("train", "validation_matched", "validation_mismatched")]
    assert [(row.texts[0], row.label, row.part) for row in data.dev] == [
        ("validation_matched", 2, "m"), ("validation_mismatched", 2, "mm"),
    ]  # fmt: skip
