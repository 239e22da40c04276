"""The official files, the hub's rows, and files that are not quite official."""

import csv
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import pytest

from finetune.benchmark_tasks import read_split, read_task
from finetune.tasks import TASKS, Example, passage_id
from multicls.errors import UserError

ROWS = {  # train, dev of the official data sets
    "cola": (8551, 1043),
    "sst2": (67349, 872),
    "mrpc": (3668, 408),
    "stsb": (5749, 1500),
    "rte": (2490, 277),
    "wnli": (635, 71),
    "cb": (250, 56),
    "copa": (400, 100),
    "multirc": (27243, 4848),
    "rte_superglue": (2490, 277),
    "wic": (5428, 638),
    "wsc": (554, 104),
    "boolq": (32, 3270),
    "sst5": (8544, 1101),
    "sts": (6040, 863),
}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_official_files(name: str, multicls_data: Path) -> None:
    task = TASKS[name]
    data = read_task(task, str(multicls_data))
    assert (len(data.train), len(data.dev)) == ROWS[name]
    assert all(text.strip() for row in data.train + data.dev for text in (*row.texts, *row.choices))
    assert len({row.id for row in data.dev}) == len(data.dev)
    shapes = {(len(row.choices), len(row.spans)) for row in data.dev}
    assert shapes == {(task.num_choices, task.num_spans)}
    labels = {row.label for row in data.train}
    assert {0.0, 5.0} < labels if task.is_regression else labels == set(range(len(task.labels)))


def test_multirc_and_record_keep_what_is_judged_together(multicls_data: Path) -> None:
    multirc = read_task(TASKS["multirc"], str(multicls_data))
    assert len({row.group for row in multirc.train}) == 5131
    assert len({row.group for row in multirc.dev}) == 953
    queries = defaultdict[str, list[Example]](list)
    for row in read_split(TASKS["record"], "dev", str(multicls_data))[0]:
        queries[row.group].append(row)
    assert len(queries) == 32
    for rows in queries.values():
        assert any(row.label for row in rows) and len({row.answer for row in rows}) == len(rows)
        assert all(row.answer in row.texts[1] for row in rows)
        assert not any("@placeholder" in row.texts[1] for row in rows)


def test_quora_leaves_out_two_rows(multicls_data: Path) -> None:
    dev, left_out = read_split(TASKS["quora"], "dev", str(multicls_data))
    assert len(dev) == 20212 and left_out == 2
    with open(multicls_data / "cs224n" / "quora-dev.csv", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["is_duplicate"]]
    assert [row.texts[0] for row in dev] == [row["sentence1"].strip() for row in rows]


@pytest.mark.parametrize(
    ("name", "column", "positive"), [("MRPC", "Quality", "1"), ("RTE", "label", "not_entailment")]
)
def test_labels_are_the_files(name: str, column: str, positive: str, multicls_data: Path) -> None:
    path = multicls_data / "glue" / name / "dev.tsv"
    table = pd.read_csv(path, sep="\t", quoting=csv.QUOTE_NONE, dtype=str, encoding="utf-8-sig")
    dev = read_task(TASKS[name.lower()], str(multicls_data / "glue")).dev
    assert [row.label for row in dev] == (table[column] == positive).astype(int).tolist()


def put(path: Path, content: str) -> str:
    """Writes DATA/TASK/FILE and returns DATA."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode())
    return str(path.parent.parent)


def read(name: str, folder: Path, content: str, split: str = "dev") -> list[Example]:
    """Writes the first file of a split, as lines of JSON or a table, and reads it."""
    task = TASKS[name]
    ((stem, part, *_), *_) = getattr(task, split)
    suffix = ".tsv" if "\t" in content else ".jsonl"
    data = put(folder / task.folder / (stem + suffix), content)
    one_file: dict[str, Any] = {split: ((stem, part),)}
    return read_split(replace(task, **one_file), split, data)[0]


def jsonl(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("task", "content", "expected"),
    [
        (  # quotes, byte order mark, carriage returns and Unicode's line separators
            "sst2",
            '\ufeffsentence\tlabel\r\n"a " quote\t1\r\nx\u2028y\x85z\t0\r\n',
            [(('"a " quote',), 1), (("x\u2028y\x85z",), 0)],
        ),
        (  # no header
            "cola",
            "s\t0\t*\tthe cat good\ns\t1\t\tthe cat\n",
            [(("the cat good",), 0), (("the cat",), 1)],
        ),
        (  # columns as in files and on the Hub, names and indices of labels
            "mnli",
            jsonl(
                {"premise": "a", "hypothesis": "b", "label": "neutral"},
                {"sentence1": "a", "sentence2": "c", "gold_label": 2},
            ),
            [(("a", "b"), 1), (("a", "c"), 2)],
        ),
    ],
)
def test_forms_of_files(task: str, content: str, expected: Any, tmp_path: Path) -> None:
    assert [(row.texts, row.label) for row in read(task, tmp_path, content)] == expected


def test_qqp_leaves_out_short_rows_and_says_so(tmp_path: Path) -> None:
    table = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    table += "1\t2\t3\ta\tb\t1\n4\t5\ttorn\n6\t7\t8\tc\td\t0\n"
    for name in ("train", "dev"):
        put(tmp_path / "QQP" / f"{name}.tsv", table)
    data = read_task(TASKS["qqp"], str(tmp_path))
    assert [row.texts for row in data.dev] == [("a", "b"), ("c", "d")]
    assert data.notes == [f"{name}: 1 row without a label left out" for name in ("train", "dev")]


RTE = '{"sentence1": "a", "sentence2": "b", "label": %s}'
WIC = {"sentence1": "a b", "sentence2": "b b", "start1": 2, "end1": 3, "start2": 2, "end2": 3}
WSC = {"span1_text": "Xa", "span1_index": 0, "span2_text": "She", "span2_index": 3}
HE = {"text": "Xa saw Yo. He left.", "target": WSC, "label": True}
COPA = {"premise": "P.", "question": "effect", "choice1": "x", "choice2": "y", "label": 1}


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("sst2", "sentence\tlabel\nbad\n", "task sst2: no row of dev has a label"),
        ("mrpc", "Quality\t#1 String\t#2 String\n1\ta\n", "2: not a row of mrpc: sentence1 and"),
        ("sst2", "sentence\tlabel\ngood\tfine\n", "dev.tsv:2: .*label 'fine' is none of 0, 1"),
        ("sst2", "text\tlabel\ngood\t1\n", "dev.tsv:2: no 'sentence'; there is 'text', 'label'"),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\t5.5\n", "score '5.5' is not .* 0..5"),
        ("rte", '{"sentence1": "a", "label": 0}', "dev.jsonl:1: no 'sentence2'"),
        ("rte", '{"sentence1": "a", "sentence2": 3, "label": 0}', "must be text"),
        ("rte", RTE % -1, "label -1"),
        ("copa", jsonl({"premise": "a", "question": "cause", "label": 0}), "1: no 'choice1'"),
        ("multirc", '{"idx": 0, "passage": {"text": "a", "questions": "b"}}', "not a row of"),
        ("wsc", json.dumps(HE), "'She' is not in the text"),
        ("wsc", json.dumps(HE | {"target": WSC | {"span1_index": 99}}), "not a row of wsc"),
        ("boolq", '{"passage": "a", "question": "b", "label": "yes"}', "none of false, true"),
        ("cb", '{"premise": "a", "hypothesis": "b", "label": true}', "label True is none of ent"),
    ],
)
def test_torn_rows_are_named(task: str, content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read(task, tmp_path, content)


def test_missing_files_are_named(tmp_path: Path) -> None:
    """No file is a reason to go on."""
    with pytest.raises(UserError, match="RTE/train.tsv.* or .*/glue/RTE/.*: no such file"):
        read_task(TASKS["rte"], str(tmp_path))
    put(tmp_path / "QNLI" / "dev.tsv", "index\tquestion\tsentence\tlabel\n0\ta\tb\tentailment\n")
    with pytest.raises(UserError, match="task qnli needs .*QNLI/train.tsv"):
        read_task(TASKS["qnli"], str(tmp_path))


def test_the_hub_without_network_names_data_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    offline = mock.Mock(side_effect=ConnectionError("no network"))
    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(UserError, match="no network.*--data_dir.*RTE/"):
        read_task(TASKS["rte"], None)


def test_the_hub_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def load(repository: str, split: str, **options: str) -> list[dict[str, object]]:
        requests.append((repository, split, options))
        return [{"premise": split, "hypothesis": "b", "label": 1, "idx": 7}]

    monkeypatch.setattr("datasets.load_dataset", load)
    data = read_task(TASKS["mnli"], None)
    parts = ["train", "validation_matched", "validation_mismatched"]
    assert requests == [("nyu-mll/glue", part, {"name": "mnli"}) for part in parts]
    found = [(row.texts[0], row.label, row.part) for row in data.dev]
    assert found == [("validation_matched", 1, "m"), ("validation_mismatched", 1, "mm")]
    assert data.train[0].id == "train:7"
    requests.clear()
    read_task(TASKS["cb"], None)
    options = {"data_dir": "cb", "revision": "refs/convert/parquet"}
    assert requests == [("aps/super_glue", split, options) for split in ("train", "validation")]


QUESTION = {"idx": 3, "question": "Q?", "answers": [{"idx": 9, "text": "A", "label": 1}]}
ANSWER = {"start": 7, "end": 8, "text": "Yo"}
QUERY = {"idx": 3, "query": "@placeholder left.", "answers": [ANSWER]}
NAMES = [{"start": start, "end": start + 1} for start in (0, 7)]
MET, SAW, SPANS = "Xa met Yo.", "Xa saw Yo. She left.", ((0, 0, 2), (0, 11, 14))


def example(key: str, texts: tuple[str, ...], label: int, **values: Any) -> Example:
    return Example(f"train:{key}", texts, label, passage=passage_id(texts[0]), **values)


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], list[Example]]] = {  # official, Hub's, ours
    "multirc": (
        {"idx": 0, "passage": {"text": "P.", "questions": [QUESTION]}},
        {"paragraph": "P.", "question": "Q?", "answer": "A", "label": 1}
        | {"idx": {"paragraph": 0, "question": 3, "answer": 9}},
        [example("0:3:9", ("P.", "Q? A"), 1, group="0:3")],
    ),
    "record": (
        {"idx": 0, "passage": {"text": MET, "entities": NAMES}, "qas": [QUERY]},
        {"passage": MET, "query": "@placeholder left.", "entities": ["Xa", "Yo"]}
        | {"answers": ["Yo"], "idx": {"passage": 0, "query": 3}},
        [
            example("0:3:Xa", (MET, "Xa left."), 0, group="0:3", answer="Xa"),
            example("0:3:Yo", (MET, "Yo left."), 1, group="0:3", answer="Yo"),
        ],
    ),
    "wsc": (
        {"text": SAW, "target": WSC, "label": True},
        {"text": SAW, **WSC, "label": 1},
        [example("0", (SAW,), 1, spans=SPANS)],
    ),
    "wic": (
        WIC | {"label": False},
        WIC | {"label": 0},
        [example("0", ("a b", "b b"), 0, spans=((0, 2, 3), (1, 2, 3)))],
    ),
    "copa": (
        COPA,
        COPA,
        [Example("train:0", ("P.", "What happened as a result?"), 1, choices=("x", "y"))],
    ),
}


@pytest.mark.parametrize("name", sorted(FORMS))
def test_hub_and_file_are_alike(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    official, hub, expected = FORMS[name]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: [hub])
    assert read(name, tmp_path, jsonl(official), "train") == expected
    assert read_split(TASKS[name], "train", None)[0] == expected


def test_a_mention_whose_index_is_off_is_found_nearby(tmp_path: Path) -> None:
    target = {"span1_text": "it", "span1_index": 3, "span2_text": "bit", "span2_index": 0}
    row = {"text": "bit it, use it : fine", "target": target, "label": False}
    (example,) = read("wsc", tmp_path, jsonl(row))
    assert example.spans == ((0, 12, 14), (0, 0, 3)), "a word of its own, not a part of 'bit'"


def test_folders_of_benchmarks(tmp_path: Path) -> None:
    """GLUE's and SuperGLUE's RTE side by side in one --data_dir."""
    glue, superglue = tmp_path / "glue" / "RTE", tmp_path / "superglue" / "RTE"
    row = {"premise": "c", "hypothesis": "d", "label": "entailment"}
    for stem in ("train", "dev", "val"):
        put(glue / f"{stem}.tsv", "sentence1\tsentence2\tlabel\na\tb\tentailment\n")
        put(superglue / f"{stem}.jsonl", jsonl(row))
    assert read_task(TASKS["rte"], str(tmp_path)).dev[0].texts == ("a", "b")
    assert read_task(TASKS["rte_superglue"], str(tmp_path)).dev[0].texts == ("c", "d")
