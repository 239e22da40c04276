"""The page needs nothing but itself, escapes what it shows, and its pictures have room whatever the names."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from finetune.show.figures import strip_plots
from finetune.show.page import build_report
from finetune.stats.systems import Results
from multicls.errors import UserError
from tests.finetune.show.fake import fake_row

LONG = "a-model-with-a-name-of-sixty-characters-as-people-give-them-v2 cls"


class Checker(HTMLParser):
    """Collects tags that are not closed, and whatever points outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        names = ("src", "href", "xlink:href", "action")
        self.outside += [value or "" for name, value in attrs if name in names and not (value or "").startswith("#")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        assert tag not in ("script", "b", "link", "iframe"), tag

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def results(**more: object) -> Results:
    rows = [
        fake_row("rte", name, scores, pretrainings=2, skill=skill, holdout=True)
        for name, scores, skill in (("<b>$k5$ cls", (0.5, 0.6, 0.7, 0.8), 0.5), ("mean", (0.4, 0.5, 0.4, 0.5), 1.0))
    ]
    rows.append(fake_row("stsb", "<b>$k5$ cls", (0.5, 0.6), notes=["<script>"]))
    return Results(rows, [], [])  # fmt: skip


def test_page_is_whole_escaped_and_needs_nothing() -> None:
    text = build_report(results(), Path("out/<i>"), pictures=True).html()
    checker = Checker()
    checker.feed(text)
    assert not checker.open and not checker.outside
    assert "url(http" not in text and "&lt;script&gt;" in text and "&lt;i&gt;" in text
    links = re.findall(r'href="#(s\d+)"', text)
    assert len(links) > 5 and set(links) <= set(checker.ids), "the contents lead somewhere"
    assert re.search(r'name="viewport" content="width=device-width', text) and "prefers-color-scheme: dark" in text
    assert text == build_report(results(), Path("out/<i>")).html(), "the same results give the same page"


def test_pictures_are_text_in_the_colours_of_the_page() -> None:
    text = build_report(results(), Path("out")).html()
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    words = ["".join(ElementTree.fromstring(picture).itertext()) for picture in pictures]
    strips = [found for found in words if "rte (acc)" in found]
    assert len(strips) == 1 and "<b>$k5$ cls" in strips[0] and "mean" in strips[0]
    assert sum("pooled ECE" in found for found in words) == 2, "a reliability diagram for each classifier"
    assert "#000000" not in "".join(pictures) and "currentColor" in pictures[0]


def test_panels_are_as_wide_with_long_names() -> None:
    def size(name: str) -> tuple[float, ...]:
        (picture,) = strip_plots([fake_row("rte", name, (0.5, 0.6)), fake_row("rte", f"{name} 2", (0.5, 0.6))])
        view = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture.panels[0])
        assert view
        return tuple(map(float, view.groups()))

    short, long = size("cls"), size(f"{LONG}, {LONG}")
    assert short[0] == long[0] and long[1] > short[1]


def test_a_panel_for_each_task_and_a_picture_for_each_size_and_benchmark() -> None:
    rows = [fake_row(task, "cls", (0.5, 0.6), size=size) for size in ("100", "full") for task in ("rte", "cola", "wic")]
    pictures = strip_plots(rows)
    assert [(picture.title, len(picture.panels)) for picture in pictures] == [
        ("Runs: GLUE, 100 train rows", 2),
        ("Runs: SuperGLUE, 100 train rows", 1),
        ("Runs: GLUE, full train rows", 2),
        ("Runs: SuperGLUE, full train rows", 1),
    ]


def test_single_run() -> None:
    report = build_report(Results([fake_row("rte", "k5 cls", (0.713,))], [], []), Path("out"))
    assert report.headline == ["k5 cls on rte, 100 train rows: acc 71.30 ± 2.00 (one run; its error is over dev "
                               "examples); a constant answer has 52.70."]  # fmt: skip
    assert "| one run; its error is over dev examples |" in report.markdown()
    assert not any(section.title.startswith("Runs") for section in report.sections)


def test_missing_predictions_are_told() -> None:
    rows = [fake_row("rte", name, (0.5, 0.6), predicted=name == "a") for name in ("a", "b")]
    report = build_report(Results(rows, [], []), Path("out"), pictures=False)
    assert report.warnings == [
        "rte, 100 train rows: a constant answer (52.70) does as well, within one standard error, as every system.",
        "Without calibration and bootstrap: b on rte: 0.npz: no such file.",
    ]
    assert "## Calibration" in report.markdown()  # fmt: skip


def test_compare_speaks_of_two_systems_only() -> None:
    rows = [fake_row("rte", name, [score, score + 0.01, score], skill=score)
            for name, score in (("k5 cls", 0.6), ("k5 mean", 0.7), ("k5 hire", 0.9))]  # fmt: skip
    report = build_report(Results(rows, [], []), Path("out"), ("cls", "mean"), pictures=False)
    assert report.headline == [
        "100 train rows: k5 mean has the best mean on rte. Corrected for the number of tests: on rte the lead over "
        "every other system is supported (for other seeds; this says nothing about other pretrainings or draws of "
        "rows)."
    ]
    text = report.markdown()
    assert "| rte | 100 | k5 cls | k5 mean | -10.00 |" in text and "over 1 test;" in text
    with pytest.raises(UserError, match="--compare men: no system of that name. Did you mean 'k5 mean'"):
        build_report(Results(rows, [], []), Path("out"), ("cls", "men"))
    with pytest.raises(UserError, match="--compare k5: 3 systems.*Say which: k5 cls; k5 mean; k5 hire"):
        build_report(Results(rows, [], []), Path("out"), ("k5", "mean"))
