"""The tables tell how many seeds are behind a number, mix nothing, and the page needs nothing but itself."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from finetune.report import main
from finetune.stats.ensembles import ensemble
from multicls.errors import UserError
from multicls.files import write_json
from tests.finetune.fake_results import fake_run


def report(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main([str(folder), *flags]) == 0
    return capsys.readouterr().out


def test_mean_standard_error_median_and_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, score in ((1, 0.5), (2, 0.6), (3, 0.7)):
        fake_run(tmp_path, seed=seed, score=score)
    text = report(tmp_path, capsys)
    # standard deviation 10, over the root of three
    assert "| rte | 100 | cls | RUN/hf (abcdef) | acc | 60.00 | 5.77 | 3 | 60.00 | dev |" in text
    assert "## Learning rates" not in text and "## Benchmark averages" not in text


def test_learning_rates_are_chosen_in_sight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, score in ((1, 0.5), (2, 0.6)):
        fake_run(tmp_path, seed=seed, score=score)
    fake_run(tmp_path, seed=1, score=0.7, learning_rate=5e-5)
    text = report(tmp_path, capsys)
    assert "| 55.00 | 5.00 | 2 | 55.00 | dev | 2e-05 |" in text
    assert "| 55.00 * | 70.00 (1 of 2) |" in text and "lr 5e-05 incomplete: 1 of 2 runs" in text


def test_other_settings_get_a_row_and_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_run(tmp_path, seed=1, score=0.5)
    fake_run(tmp_path, seed=2, score=0.6)
    fake_run(tmp_path, seed=1, score=0.7, label_noise=0.2)
    text = report(tmp_path, capsys)
    assert "| label_noise |" in text.splitlines()[0]
    assert "| 55.00 | 5.00 | 2 | 55.00 | dev | 0.0 |" in text and "| 70.00 | - | 1 | 70.00 | dev | 0.2 |" in text
    assert "different numbers of seeds" in text


def test_selections_are_never_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_run(tmp_path, score=0.5)
    fake_run(tmp_path, score=0.6, holdout=True)
    text = report(tmp_path, capsys)
    assert re.search(r"50\.00 \| - \| 1 \| 50\.00 \| dev", text) and re.search(r"60\.00 \| - \| 1 .*holdout", text)


def test_notes_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_run(tmp_path, score=0.5, notes=["not the protocol"])
    text = report(tmp_path, capsys)
    assert "| rte [1] | 100 | cls | RUN/hf (abcdef) | acc | 50.00 | - | 1 |" in text and "[1] not the protocol" in text


def test_cells_of_a_grid_that_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_run(tmp_path, model_name="k5")
    cell = {"task": "rte", "train_size": 100, "head": "cls", "model_name": "k5", "pretraining_seed": None,
            "selection": "dev", "data_seed": 1, "learning_rate": 2e-5}  # fmt: skip
    cells = [cell | {"seed": seed, "task": task} for seed in (1, 2) for task in ("rte", "mrpc")]
    write_json(tmp_path / "grids" / "quick.json", cells)
    text = report(tmp_path, capsys)
    assert "1 of 2: incomplete" in text and "without a finished run: mrpc, 100, cls, k5, dev." in text


def test_systems_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_run(tmp_path, "rte", score=0.5, model_name="k5")
    assert "## Systems side by side" not in report(tmp_path, capsys)
    fake_run(tmp_path, "rte", seed=2, score=0.6, model_name="k5")
    fake_run(tmp_path, "mrpc", score=0.7, model_name="k5")
    fake_run(tmp_path, "mrpc", "isobn", score=0.8, model_name="k5")
    place = {"train_size": 100, "head": "cls", "model_name": "k5", "selection": "dev", "pretraining_seed": None}
    cells = [place | {"task": "mrpc", "data_seed": 1, "learning_rate": 2e-5, "seed": seed} for seed in (1, 2)]
    write_json(tmp_path / "grids" / "quick.json", cells)
    text = report(tmp_path, capsys).split("## Systems side by side")[1]
    assert "| train rows | system | mrpc | rte |" in text
    assert "| 100 | cls, k5, dev | 70.00 (1 of 2) | 55.00 ± 5.00 |" in text
    assert "| 100 | isobn, k5, dev | 80.00 | - |" in text


def test_calibration_with_and_without_temperature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_run(tmp_path, "stsb")
    assert "## Calibration" not in report(tmp_path, capsys)
    fake_run(tmp_path, "rte")
    fake_run(tmp_path, "mrpc", holdout=True)
    lines = report(tmp_path, capsys).split("## Calibration")[1].splitlines()
    rte, mrpc = (next(line for line in lines if line.startswith(f"| {task} ")) for task in ("rte", "mrpc"))
    assert rte.endswith("| - | - | - | - | - |") and " - |" not in mrpc


def test_two_systems_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for task in ("rte", "cola"):
        for head, skill in (("cls", 0.3), ("multicls", 1.2)):
            for seed in (1, 2, 3):
                fake_run(tmp_path, task, head, seed, skill)
    text = report(tmp_path, capsys, "--compare", "multicls", "cls").split(" against ")[1]
    assert re.search(r"\| rte \| 100 \| \+\d.* \| 0\.002 \| 60 \| 0\.250 \| 3 \|", text)
    assert re.search(r"\| 2 tasks \| 100 \| \+\d.* \| 0\.500 \| 2 \|", text)
    with pytest.raises(UserError, match="--compare multcls: 0 systems.*Did you mean"):
        main([str(tmp_path), "--compare", "multcls", "cls"])
    with pytest.raises(UserError, match="--compare dev: 2 systems.*Say which"):
        main([str(tmp_path), "--compare", "dev", "cls"])


class Checker(HTMLParser):
    """Collects tags that are not closed, and whatever points outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        names = ("src", "href", "xlink:href", "action")
        self.outside += [value or "" for name, value in attrs if name in names and not (value or "").startswith("#")]
        assert tag not in ("script", "b", "link", "iframe"), tag

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_whole_escaped_and_needs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [fake_run(tmp_path, seed=seed, model_name="<b>$k5$", notes=["<script>"]) for seed in (1, 2, 3)]
    fake_run(tmp_path, "stsb", model_name="<b>$k5$")
    ensemble(tmp_path, runs)
    report(tmp_path, capsys, "--html", str(tmp_path / "report.html"))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert not checker.open and not checker.outside
    assert "url(http" not in text and "&lt;script&gt;" in text
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 2, "a strip plot and reliability diagrams"
    words = ["".join(ElementTree.fromstring(picture).itertext()) for picture in pictures]
    assert "cls x3, <b>$k5$, dev" in words[0] and "rte (acc)" in words[0] and "ECE" in words[1]
    report(tmp_path, capsys, "--html", str(tmp_path / "again.html"))
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == text


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no finished runs"):
        main([str(tmp_path)])
