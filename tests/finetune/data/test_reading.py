"""The official files, the hub's rows, and files that are not quite official."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from finetune.data.examples import LabeledExample, fingerprint, passage_id
from finetune.data.reading import has_test_files, read_file, read_task, read_test
from finetune.data.tasks import TASKS
from multicls.errors import UserError

ROWS = {  # train, dev of the official data sets
    "cola": (8551, 1043), "sst2": (67349, 872), "mrpc": (3668, 408), "stsb": (5749, 1500), "rte": (2490, 277),
    "wnli": (635, 71), "cb": (250, 56), "copa": (400, 100), "multirc": (27243, 4848), "rte_superglue": (2490, 277),
    "wic": (5428, 638), "wsc": (554, 104), "boolq": (32, 3270), "sst5": (8544, 1101), "sts": (6040, 863),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ROWS))
def test_official_files(name: str, multicls_data: Path) -> None:
    task = TASKS[name]
    data = read_task(task, str(multicls_data))
    assert data.train is not None and (len(data.train), len(data.dev)) == ROWS[name]
    assert all(text.strip() for row in data.train + data.dev for text in (*row.texts, *row.choices))
    assert len({row.id for row in data.dev}) == len(data.dev) and data.test == []
    assert all(len(row.choices) == task.num_choices and len(row.spans) == task.num_spans for row in data.dev)
    if task.is_regression:
        assert {0.0, 5.0} < {row.label for row in data.train}
    else:
        assert {row.label for row in data.train} == set(range(len(task.labels)))


def test_multirc_and_record_keep_what_is_judged_together(multicls_data: Path) -> None:
    folder = str(multicls_data / "superglue")
    multirc, record = (read_task(TASKS[name], folder) for name in ("multirc", "record"))
    assert len({row.group for row in multirc.train or []}) == 5131 and len({row.group for row in multirc.dev}) == 953
    queries: dict[str, list[LabeledExample]] = {}
    for row in record.dev:
        queries.setdefault(row.group, []).append(row)
    assert len(queries) == 32
    for rows in queries.values():
        assert any(row.label for row in rows) and len({row.answer for row in rows}) == len(rows)
        assert all(row.answer in row.texts[1] and "@placeholder" not in row.texts[1] for row in rows)


def test_quora_leaves_out_two_rows(multicls_data: Path) -> None:
    data = read_task(TASKS["quora"], str(multicls_data / "cs224n"), train_from_dev=True)
    assert len(data.dev) == 20212 and data.notes == ["quora-dev.csv: 2 rows with missing columns or no label left out"]
    with open(multicls_data / "cs224n" / "quora-dev.csv", encoding="utf-8", newline="") as file:
        labelled = [row for row in csv.DictReader(file, delimiter="\t") if row["is_duplicate"]]
    assert [row.texts[0] for row in data.dev] == [row["sentence1"].strip() for row in labelled], "its quotes are undone"


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
    assert data.notes == [f"{name}.tsv: 1 row with missing columns or no label left out" for name in ("dev", "train")]


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
        ("{", "dev.jsonl:1: not valid JSON"),
        ("[1]", "dev.jsonl, row 1: not a JSON object"),
        ("1", "dev.jsonl:1: not a JSON object"),
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
    with pytest.raises(UserError, match="RTE/train.tsv .*: it holds CoLA"):
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

    def load(repository: str, split: str, **options: str) -> list[dict[str, object]]:
        asked.append((repository, split, options))
        return [{"premise": split, "hypothesis": "b", "label": -1 if "test" in split else 1, "idx": 7}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    data, test = read_task(TASKS["mnli"], None), read_test(TASKS["mnli"], None)
    splits = ("validation_matched", "validation_mismatched", "train", "test_matched", "test_mismatched")
    assert asked == [("nyu-mll/glue", split, {"name": "mnli"}) for split in splits]
    assert [(row.texts[0], row.label, row.part) for row in data.dev] == [
        ("validation_matched", 1, "m"), ("validation_mismatched", 1, "mm"),
    ]  # fmt: skip
    assert [row.id for row in test] == ["test_matched:7", "test_mismatched:7"]
    assert all(math.isnan(row.label) for row in test)
    asked.clear()
    read_task(TASKS["cb"], None)
    options = {"data_dir": "cb", "revision": "refs/convert/parquet"}
    assert asked == [("aps/super_glue", split, options) for split in ("validation", "train")]


HUB: dict[str, dict[str, Any]] = {
    "multirc": {"paragraph": "P.", "question": "Q?", "answer": "A", "idx": {"paragraph": 0, "question": 3, "answer": 9},
                "label": 1},
    "record": {"passage": "Xa met Yo.", "query": "@placeholder left.", "entities": ["Xa", "Yo"], "answers": ["Yo"],
               "idx": {"passage": 0, "query": 3}},
    "wsc": {"text": "Xa saw Yo. She left.", "span1_index": 0, "span1_text": "Xa", "span2_index": 3,
            "span2_text": "She", "label": 1},
    "wic": {"word": "b", "sentence1": "a b", "sentence2": "b b", "start1": 2, "end1": 3, "start2": 2, "end2": 3,
            "label": 0},
    "copa": {"premise": "P.", "choice1": "x", "choice2": "y", "question": "effect", "label": 1},
}  # fmt: skip
OFFICIAL: dict[str, dict[str, Any]] = {
    "multirc": {"idx": 0, "passage": {"text": "P.", "questions": [
        {"idx": 3, "question": "Q?", "answers": [{"idx": 9, "text": "A", "label": 1}]}]}},
    "record": {"idx": 0, "passage": {"text": "Xa met Yo.", "entities": [{"start": s, "end": s + 1} for s in (0, 7)]},
               "qas": [{"idx": 3, "query": "@placeholder left.", "answers": [{"start": 7, "end": 8, "text": "Yo"}]}]},
    "wsc": {"text": HUB["wsc"]["text"], "label": True, "target": {key: HUB["wsc"][key] for key in HUB["wsc"]
                                                                  if key.startswith("span")}},
    "wic": HUB["wic"] | {"label": False},
    "copa": HUB["copa"],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(HUB))
def test_hub_and_file_give_the_same_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [HUB[name]])
    for stem in ("train", "val"):
        put(tmp_path / TASKS[name].folder / f"{stem}.jsonl", json.dumps(OFFICIAL[name]) + "\n")
    found = [read_task(TASKS[name], source).train or [] for source in (str(tmp_path), None)]
    assert fingerprint(found[0]) == fingerprint(found[1]) and found[0] == found[1]
    met, saw = passage_id("Xa met Yo."), passage_id("Xa saw Yo. She left.")
    expected = {
        "multirc": [LabeledExample("train:0:3:9", ("P.", "Q? A"), 1, group="0:3", passage=passage_id("P."))],
        "record": [
            LabeledExample("train:0:3:Xa", ("Xa met Yo.", "Xa left."), 0, group="0:3", answer="Xa", passage=met),
            LabeledExample("train:0:3:Yo", ("Xa met Yo.", "Yo left."), 1, group="0:3", answer="Yo", passage=met),
        ],
        "wsc": [LabeledExample("train:0", ("Xa saw Yo. She left.",), 1, spans=((0, 0, 2), (0, 11, 14)), passage=saw)],
        "wic": [LabeledExample("train:0", ("a b", "b b"), 0, spans=((0, 2, 3), (1, 2, 3)), passage=passage_id("a b"))],
        "copa": [LabeledExample("train:0", ("P.", "What happened as a result?"), 1, choices=("x", "y"))],
    }
    assert found[0] == expected[name]


def test_a_mention_whose_index_is_off_is_found_nearby(tmp_path: Path) -> None:
    target = {"span1_text": "it", "span1_index": 4, "span2_text": "bit", "span2_index": 0}
    row = {"text": "bit it, or use it : fine", "target": target, "label": False}
    rows, _ = read_file(TASKS["wsc"], put(tmp_path / "val.jsonl", json.dumps(row) + "\n"))
    assert rows[0].spans == ((0, 15, 17), (0, 0, 3)), "a word of its own, not a part of 'bit'"


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        (
            "copa",
            {"premise": "a", "question": "why", "choice1": "b", "choice2": "c", "label": 0},
            "question 'why' is none",
        ),
        ("copa", {"premise": "a", "question": "cause", "choice1": "b", "label": 0}, "val.jsonl:1: no 'choice2'"),
        ("multirc", {"idx": 0, "passage": {"text": "a", "questions": "b"}}, "val.jsonl:1: not a row of multirc"),
        ("wic", HUB["wic"] | {"end2": 4}, "characters 2..4 are not in sentence2"),
        ("wsc", HUB["wsc"] | {"span2_text": "Zo"}, "'Zo' (word 3) is not in the text"),
        ("boolq", {"passage": "a", "question": "b", "label": "yes"}, "label 'yes' is none of false, true"),
        ("cb", {"premise": "a", "hypothesis": "b", "label": True}, "label True is none of entailment, contradiction"),
    ],
)
def test_superglue_rows_that_do_not_parse_are_named(
    task: str, row: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        read_file(TASKS[task], put(tmp_path / "val.jsonl", json.dumps(row) + "\n"))
    assert message in str(error.value)


def test_test_rows(tmp_path: Path) -> None:
    for stem in ("train", "dev"):
        put(tmp_path / "CoLA" / f"{stem}.tsv", "s\t1\t\tthe cat\n")
    with pytest.raises(UserError, match="CoLA: test.tsv.* is missing; --predict_test"):
        read_test(TASKS["cola"], str(tmp_path))
    put(tmp_path / "CoLA" / "test.tsv", "index\tsentence\n0\tthe dog\n1\ta dog\n")  # with a header, unlike the others
    test = read_test(TASKS["cola"], str(tmp_path))
    assert [(row.id, row.texts) for row in test] == [("test:0", ("the dog",)), ("test:1", ("a dog",))]
    assert all(math.isnan(row.label) for row in test)


def test_diagnostics_have_test_rows_only(tmp_path: Path) -> None:
    rows = [{"premise": "a", "hypothesis": "b", "label": "entailment", "idx": n, "pair_id": 40 + n} for n in range(4)]
    put(tmp_path / "AX-g" / "AX-g.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    test = read_test(TASKS["axg"], str(tmp_path))
    assert [row.group for row in test] == ["0", "0", "1", "1"]
    assert {row.label for row in test} == {0}, "its labels are public"
    for name, trained in (("axg", "rte_superglue"), ("ax", "mnli")):
        with pytest.raises(UserError, match=f"{name} has test rows only.*run.py --task {trained} --predict_test"):
            read_task(TASKS[name], str(tmp_path))
    with pytest.raises(UserError, match="sst5 has no test rows"):
        read_test(TASKS["sst5"], str(tmp_path))


PLAIN_AX = "index\tsentence1\tsentence2\n0\ta\tb\n1\tc\td\n"
FULL_AX = "Logic\tPremise\tHypothesis\tLabel\n\ta\tb\tneutral\n\tc\td\tentailment\n"


@pytest.mark.parametrize("name", ["AX/AX.tsv", "AX.tsv", "diagnostic/diagnostic.tsv", "MNLI/diagnostic.tsv",
                                  "glue/diagnostic/diagnostic.tsv", "GLUE/mnli/diagnostic-full.tsv"])  # fmt: skip
def test_usual_places_of_the_diagnostic(name: str, tmp_path: Path) -> None:
    assert not has_test_files(TASKS["ax"], str(tmp_path))
    put(tmp_path / name, FULL_AX if "full" in name else PLAIN_AX)
    assert has_test_files(TASKS["ax"], str(tmp_path))
    test = read_test(TASKS["ax"], str(tmp_path))
    assert [(row.id.split(":")[1], row.texts) for row in test] == [("0", ("a", "b")), ("1", ("c", "d"))]
    assert [row.label for row in test] == [1, 0] if "full" in name else all(math.isnan(row.label) for row in test)


def test_labels_of_the_diagnostic_are_taken_where_both_files_are(tmp_path: Path) -> None:
    put(tmp_path / "diagnostic" / "diagnostic.tsv", PLAIN_AX)
    put(tmp_path / "diagnostic" / "diagnostic-full.tsv", FULL_AX)
    assert [row.label for row in read_test(TASKS["ax"], str(tmp_path))] == [1, 0]


def test_lower_case_folders_and_all_columns_of_mnli(tmp_path: Path) -> None:
    header = "index\tsentence1\tsentence2\tlabel1\tlabel2\tgold_label\n"
    for stem in ("train", "dev_matched", "dev_mismatched"):
        put(tmp_path / "mnli" / f"{stem}.tsv", header + "0\ta\tb\tneutral\tentailment\tcontradiction\n")
    for stem in ("train", "dev"):
        put(tmp_path / "sst2" / f"{stem}.tsv", "sentence\tlabel\na\t1\n")
    assert [row.label for row in read_task(TASKS["mnli"], str(tmp_path)).dev] == [2, 2]
    assert [row.label for row in read_task(TASKS["sst2"], str(tmp_path)).dev] == [1]


def test_blank_lines_and_arrays_of_json(tmp_path: Path) -> None:
    row = {"sentence1": "a", "sentence2": "b", "label": "entailment"}
    for content in (f"{json.dumps(row)}\n\n{json.dumps(row)}\n", json.dumps([row, row], indent=1)):
        assert len(read_file(TASKS["rte"], put(tmp_path / "dev.jsonl", content))[0]) == 2


def test_folders_of_benchmarks(tmp_path: Path) -> None:
    """GLUE's and SuperGLUE's RTE side by side in one --data_dir."""
    for stem in ("train", "dev"):
        put(tmp_path / "glue" / "RTE" / f"{stem}.tsv", "sentence1\tsentence2\tlabel\na\tb\tentailment\n")
    for stem in ("train", "val"):
        row = {"premise": "c", "hypothesis": "d", "label": "entailment"}
        put(tmp_path / "superglue" / "RTE" / f"{stem}.jsonl", json.dumps(row) + "\n")
    assert read_task(TASKS["rte"], str(tmp_path)).dev[0].texts == ("a", "b")
    assert read_task(TASKS["rte_superglue"], str(tmp_path)).dev[0].texts == ("c", "d")
