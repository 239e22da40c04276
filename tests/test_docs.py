"""The pages of docs/: the commands of a story are run, the site is whole, and what is generated is current."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.test_readme import NOT_COPIED, REPOSITORY, runnable_blocks


@pytest.mark.slow
def test_own_labels_from_a_table_to_predictions(tmp_path: Path) -> None:
    copy = tmp_path / "repository"
    shutil.copytree(REPOSITORY, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    output = ""
    for block in runnable_blocks((REPOSITORY / "docs" / "own_labels.md").read_text(encoding="utf-8")):
        shell = ["bash", "-euo", "pipefail"] if block.language == "bash" else [sys.executable]
        done = subprocess.run(
            [*shell, "-c", block.commands], cwd=copy, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"line {block.line}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        output += done.stdout
    for said in ("acc 100.00", "minilm cls", "page with figures: runs/own/results/report.html", "20 rows: 9 billing",
                 "'label': 'defect'"):  # fmt: skip
        assert said in output, said
    assert len((copy / "runs/own/labelled.csv").read_text(encoding="utf-8").splitlines()) == 21


class Page(HTMLParser):
    """The anchors of a page, its links, and the addresses from which it loads something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        self.links |= {values[name] for name in ("href", "src") if name in values}
        loads = tag in ("script", "img", "iframe", "source") or (tag == "link" and values.get("rel") != "canonical")
        self.loaded |= {values[name] for name in ("href", "src") if loads and name in values}


def problems_of(site: Path) -> list[str]:
    """Returns the links of a built site that lead nowhere, and whatever it loads from elsewhere."""
    pages = {path.resolve(): Page(path.read_text("utf-8")) for path in site.glob("**/*.html")}
    problems = []
    for path, page in pages.items():
        problems += [f"{path.name} loads {url}" for url in page.loaded if urlsplit(url).netloc]
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":  # the last is served at any address
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            whole = target in pages and unquote(parts.fragment) in {"", *pages[target].anchors}
            if not whole and (target in pages or not target.exists()):
                problems.append(f"{path.name}: {link}")
    return problems


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical", reason="zensical builds the site; it needs Python 3.11 or newer")
    copy = tmp_path_factory.mktemp("site")
    for name in ("zensical.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs"):
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, copy / name)
        elif source.exists():
            shutil.copy(source, copy)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=copy, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return copy / "build" / "site"


def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    assert not problems_of(site)
    pages = {path.stem for path in (REPOSITORY / "docs").glob("*.md")}
    assert pages == {path.stem for path in site.glob("*.html")} - {"404"}
    text = (site / "index.html").read_text("utf-8")
    assert "make demo" in text, "the start page shows the README"
    listed = Page(text).links
    assert {f"{page}.html" for page in pages - {"index"}} <= {link.removeprefix("./") for link in listed}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="top"><a href="b.html#x">1</a><a href="c.html">2</a><a href="#top">3</a>')
    (tmp_path / "b.html").write_text('<p id="y"><a href="a.html#top"></a><script src="https://cdn.example/x.js">')
    assert sorted(problems_of(tmp_path)) == [
        "a.html: b.html#x", "a.html: c.html", "b.html loads https://cdn.example/x.js"
    ]  # fmt: skip


def test_settings_page_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from tools.settings_page import page; sys.stdout.write(page())"],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = (REPOSITORY / "docs" / "settings.md").read_text("utf-8")
    assert done.stdout == written, "run: python tools/settings_page.py"
    assert "`objective.mcqt`" in written and "`--dry_run`" in written and "`own.label_column`" in written
    assert "| `--workers " in written, "flags of a subcommand"


def test_method_figure_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools import method_figure

    monkeypatch.setattr(method_figure, "PICTURE", tmp_path / "method.svg")
    method_figure.main()
    for picture in (tmp_path / "method.svg", REPOSITORY / "docs" / "images" / "method.svg"):
        text = picture.read_text("utf-8")
        assert "<!-- MCQT -->" in text and "<!-- part C -->" in text and "http://www.w3.org/2000/svg" in text
