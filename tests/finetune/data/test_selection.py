"""The rows of a run: passages stay together, and a fingerprint covers all that decides the numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.data.examples import LabeledExample, fingerprint
from finetune.data.selection import TaskRows, select_rows
from finetune.settings import FinetuneSettings
from multicls.errors import UserError


def rows_of(**settings: Any) -> TaskRows:
    (rows,) = select_rows(FinetuneSettings.model_validate({"model": "-", "head": "cls"} | settings))
    return rows


@pytest.mark.parametrize("size", [300, "full"])
@pytest.mark.parametrize("name", ["multirc", "wsc", "wnli", "wic", "record"])
def test_no_held_out_row_shares_its_passage_with_train(name: str, size: int | str, multicls_data: Path) -> None:
    rows = rows_of(task=name, train_size=size, selection="holdout", data_dir=str(multicls_data))
    learnt = {row.texts[0] for row in rows.train}
    assert rows.held and not [row for row in rows.held if row.texts[0] in learnt]
    total = len(rows.held) + len(rows.train)
    assert 0.08 < len(rows.held) / total < 0.35 and total == len(rows.drawn)


def test_classes_stay_in_proportion_where_rows_share_nothing(multicls_data: Path) -> None:
    rows = rows_of(task="rte", train_size=100, selection="holdout", data_dir=str(multicls_data))
    drawn = [*rows.train, *rows.held]
    share = sum(row.label for row in drawn) / len(drawn)
    assert len(rows.held) == 20 and abs(sum(row.label for row in rows.held) - 20 * share) <= 1


def test_train_rows_from_dev_leave_out_their_passages(multicls_data: Path) -> None:
    rows = rows_of(task="mnli", train_size=100, train_from_dev=True, data_dir=str(multicls_data))
    assert not {row.texts[0] for row in rows.train} & {row.texts[0] for row in rows.dev}
    assert len(rows.dev) < 9815 - 100


def test_the_fingerprint_covers_all_but_names_of_files() -> None:
    row = LabeledExample("train:1", ("a", "b"), 1.0)
    other: dict[str, Any] = {"texts": ("a", "c"), "label": 0.0, "part": "m", "choices": ("x",), "spans": ((0, 0, 1),),
                             "group": "g", "answer": "z", "labels": (1.0,), "passage": "p"}  # fmt: skip
    found = {fingerprint([row]), fingerprint([row], ("neg", "pos")), fingerprint([row, row])}
    found |= {fingerprint([replace(row, **{name: value})]) for name, value in other.items()}
    assert len(found) == 3 + len(other) and set(vars(row)) == {*other, "id"}
    assert fingerprint([replace(row, id="validation:1")]) == fingerprint([row])


@pytest.fixture
def own(tmp_path: Path) -> dict[str, Any]:
    lines = [json.dumps({"text": f"row {n}", "label": ["a", "b"][n % 2 : n % 3 + 1]}) for n in range(40)]
    (tmp_path / "m.jsonl").write_text("\n".join(lines))
    return {"own": {"train_file": str(tmp_path / "m.jsonl"), "test_file": str(tmp_path / "m.jsonl")}}


def test_several_labels_a_row_are_drawn_and_held_out(own: dict[str, Any]) -> None:
    rows = rows_of(**own, train_size=20, selection="holdout")
    assert (len(rows.train), len(rows.held), len(rows.dev)) == (16, 4, 8)
    assert [(task.name, len(test)) for task, test in rows.test] == [("own_m", 40)]
    assert all(len(row.labels) == 2 for row in rows.train)
    assert rows_of(**own, train_size=20, data_seed=2).dev == rows.dev, "one dev set for all draws"
    for option in ({"sampling": "balanced"}, {"label_noise": 0.2}):
        with pytest.raises(UserError, match=f"--{next(iter(option))}.*own_m has several labels a row"):
            rows_of(**own, train_size=20, **option)


def test_labels_that_no_train_row_has_are_warned_of(tmp_path: Path) -> None:
    rows = [{"text": f"row {n}", "label": label} for n, label in enumerate(["a, b", *"cdefghijklm", "c", *"nopqrst"])]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = {"own": {"train_file": str(tmp_path / "r.jsonl"), "test_file": str(tmp_path / "r.jsonl")}}
    found = rows_of(**own)
    dev, test = found.warnings
    assert dev.startswith("3 dev rows of 4 cannot be right: no train row has the labels ")
    assert test.startswith("3 test (own_r) rows of 20 cannot be right")
    assert rows_of(**own, train_size=1).warnings[0].startswith("all train rows have the label '")
    assert "there are 16 rows, and all are taken" in rows_of(**own, train_size=17).warnings[-1]


def test_rows_without_a_label_do_not_have_the_one_that_all_others_have(tmp_path: Path) -> None:
    for name, labels in (("t", ["a", "", "a", ""]), ("d", ["a", ""])):
        rows = [{"text": f"row {name} {n}", "label": [label] if label else []} for n, label in enumerate(labels)]
        rows += [{"text": "row b", "label": ["b"]}] if name == "t" else []
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = {"train_file": str(tmp_path / "t.jsonl"), "dev_file": str(tmp_path / "d.jsonl")}
    seeds = [seed for seed in range(1, 20) if not rows_of(own=own, train_size=4, data_seed=seed).train_rows.count(4)]
    assert seeds and not rows_of(own=own, train_size=4, data_seed=seeds[0]).warnings


def test_content_is_that_of_the_data_not_of_the_draw(glue: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = {"task": "sst2", "data_dir": str(glue), "train_size": 20}
    drawn = rows_of(**common)
    for change in ({"data_seed": 2}, {"label_noise": 0.5}, {"train_size": 30}):
        assert rows_of(**common | change).content == drawn.content
    (tmp_path / "SST-2").mkdir()
    for name in ("train", "dev"):
        text = (glue / "SST-2" / f"{name}.tsv").read_text()
        (tmp_path / "SST-2" / f"{name}.tsv").write_text(text + "len man nar\t1\n" * (name == "train"))
    assert rows_of(**common | {"data_dir": str(tmp_path)}).content != drawn.content


def test_an_absent_diagnostic_is_noted(tmp_path: Path) -> None:
    header, row = "sentence1\tsentence2\tgold_label\n", "a\tb\tneutral\n"
    for stem in ("train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched"):
        (tmp_path / "MNLI").mkdir(exist_ok=True)
        (tmp_path / "MNLI" / f"{stem}.tsv").write_text(header + row)
    common = {"task": "mnli", "data_dir": str(tmp_path), "predict_test": True}
    rows = rows_of(**common)
    assert [task.name for task, _ in rows.test] == ["mnli"] and f"ax is not in {tmp_path}: not predicted" in rows.notes
    other = tmp_path / "with_ax"
    (tmp_path / "MNLI").rename(other.with_name("x"))
    other.mkdir()
    (tmp_path / "x").rename(other / "MNLI")
    (other / "diagnostic-full.tsv").write_text("Premise\tHypothesis\tLabel\na\tb\tneutral\n")
    rows = rows_of(**common | {"data_dir": str(other)})
    assert [(task.name, [row.label for row in test]) for task, test in rows.test][1:] == [("ax", [1])]
