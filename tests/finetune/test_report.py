"""The command prints tables of a results folder and writes the page beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from finetune.report import main
from multicls.errors import UserError
from tests.finetune.fake_results import fake_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for task in ("rte", "cola"):
        for head, skill in (("cls", 0.3), ("hire", 1.2)):
            for seed in (1, 2):
                fake_run(tmp_path, task, head, seed, skill, model_name="k5")
    return tmp_path


def test_the_page_is_written_and_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Fine-tuning results: ") and all(len(line) <= 120 for line in text.splitlines()[:-3])
    summary = [line.partition(":")[0] for line in text.splitlines()[-3:]]
    assert summary == ["tables", "page", "next"] and str(folder / "report.html") in text.splitlines()[-2]
    markdown = (folder / "report.md").read_text(encoding="utf-8")
    assert "| k5 hire | **" in markdown
    for score in re.findall(r"\*\*(.+?)\*\*", markdown):
        assert score in text
    assert "<svg" in (folder / "report.html").read_text(encoding="utf-8")


def test_tables_only(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # pytest-xdist says 80, which folds the pair
    assert main([str(folder), "--no_html", "--task", "rte", "--compare", "hire", "cls"]) == 0
    printed = capsys.readouterr().out
    assert "cola" not in printed and re.search(r"k5 hire - k5 cls +rte +100 +\+", printed)
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "| rte | 100 | k5 hire | k5 cls | +" in text and "cola" not in text
    assert not (folder / "report.html").exists()


def test_ensembles_get_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "--no_html", "--ensembles", "2"]) == 0
    assert "k5 hire x2" in capsys.readouterr().out


def test_mistakes(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("empty", "no finished runs there"),
        ("none", "no such folder"),
        ("results.jsonl", "is a file; give the folder that it is in"),
    ):
        path = tmp_path / "empty" if name == "empty" else folder / name
        with pytest.raises(UserError, match=message):
            main([str(path)])
    with pytest.raises(UserError, match="--task rt: no finished run of it.*Did you mean 'rte'"):
        main([str(folder), "--task", "rt"])


def test_an_ensemble_has_two_members_or_more(folder: Path) -> None:
    with pytest.raises(UserError, match="--ensembles 1: must be at least 2"):
        main([str(folder), "--ensembles", "1"])
