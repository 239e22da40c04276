"""The pages of docs/: the commands of a story are run, the site is whole, and what is generated is current."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch

from tests.test_readme import NOT_COPIED, REPOSITORY, Block, runnable_blocks


def run_blocks(blocks: list[Block], copy: Path) -> str:
    """Runs blocks of a page in a copy of the repository; returns what they print."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    output = ""
    for block in blocks:
        shell = ["bash", "-euo", "pipefail"] if block.language == "bash" else [sys.executable]
        done = subprocess.run(
            [*shell, "-c", block.commands], cwd=copy, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"line {block.line}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        output += done.stdout
    return output


def blocks_of(page: str) -> list[Block]:
    return runnable_blocks((REPOSITORY / "docs" / page).read_text(encoding="utf-8"))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A fresh copy of the repository."""
    return Path(shutil.copytree(REPOSITORY, tmp_path / "copy", ignore=shutil.ignore_patterns(*NOT_COPIED)))


@pytest.mark.slow
def test_own_labels_from_a_table_to_predictions(copy: Path) -> None:
    output = run_blocks(blocks_of("own_labels.md"), copy)
    for said in ("acc 100.00", "minilm cls", "page:        runs/own/results/report.html", "20 rows: 9 billing",
                 "'label': 'defect'"):  # fmt: skip
        assert said in output, said
    assert "[WARNING]" not in output, "DeepSpeed, which transformers imports when it saves, warns of its guess"
    assert len((copy / "runs/own/labelled.csv").read_text(encoding="utf-8").splitlines()) == 21


@pytest.mark.slow
def test_own_text_from_a_folder_to_predictions(copy: Path) -> None:
    """The commands of the page as they are, but for the length of the pretraining."""
    blocks, whole = blocks_of("own_text.md"), " --epochs 1 "
    assert sum(whole in block.commands for block in blocks) == 1
    blocks = [block._replace(commands=block.commands.replace(whole, " --steps 6 ")) for block in blocks]
    output = run_blocks([blocks_of("own_labels.md")[0], *blocks], copy)
    said = ("292 documents", "sentences 2 to 3 | 4 to 4", "length: 67,507 training tokens; 6 steps", "step 6/6  loss ",
            "model:  runs/own_text/run/hf", "tensor([[0.", "own_tickets, full train rows", "labelled: 20 rows: ",
            "ticket,label,p_billing")  # fmt: skip
    for text in said:
        assert text in output, f"{text}\n{output[-9000:]}"
    assert len((copy / "runs/own_text/labelled.csv").read_text(encoding="utf-8").splitlines()) == 21
    lines = [line for line in output.splitlines() if re.match(r"\d\d:\d\d:\d\d ", line)]
    assert lines and max(map(len, lines)) <= 120


@pytest.mark.slow
def test_snippets_of_the_model_pages_run(tmp_path: Path) -> None:
    """MiniLM with new facets stands in for the demo's model."""
    from multicls.embeddings import write_sentence_transformer
    from multicls.from_bert import from_bert
    from multicls.sample import sample_model

    folder = tmp_path / "runs" / "sample" / "hf"
    torch.manual_seed(0)  # the new facets are drawn
    for part in from_bert(str(sample_model())):
        part.save_pretrained(folder)
    write_sentence_transformer(folder)
    pages = [(REPOSITORY / "docs" / name).read_text(encoding="utf-8") for name in ("embeddings.md", "model.md")]
    blocks = [block.commands for page in pages for block in runnable_blocks(page) if block.language == "python"]
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(blocks) == 3 and "(3, 384)" in done.stdout and "torch.Size([3, 5, 384])" in done.stdout
    found = re.search(r"^tensor\(\[ ?(-?[\d.]+), +(-?[\d.]+)\]\)$", done.stdout, re.MULTILINE)
    assert found and float(found[1]) > 0.7 > 0.3 > float(found[2])


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


def test_lists_begin_after_an_empty_line() -> None:
    """GitHub shows other lists as well; the site's Markdown does not."""
    wrong = re.compile(r"^(?!- |\* |[|#>]|\d+\. )\S.*\n(?:- |1\. ).*", re.MULTILINE)
    assert wrong.findall("text\n- item\n") and not wrong.findall("- item\n- item\n\ntext\n\n1. item\n")
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")]
    texts = {path.name: re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.M | re.S) for path in pages}
    assert not {name: wrong.findall(text) for name, text in texts.items() if wrong.findall(text)}


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


def test_messages_in_the_faq_are_those_of_the_code() -> None:
    others = ("No module named", "EADDRINUSE", "address already in use", "trust_remote_code=True", "loss/so",
              "--tokenizer: missing")  # of others, or put together from a key and a text  # fmt: skip
    folders = ("multicls", "data_prep", "pretrain", "finetune")
    code = "".join(path.read_text("utf-8") for name in folders for path in (REPOSITORY / name).rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code) + (REPOSITORY / "Makefile").read_text("utf-8")  # joins split texts
    page = (REPOSITORY / "docs" / "faq.md").read_text("utf-8")
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    quoted = [piece.strip() for cell in cells for text in re.findall("`([^`]+)`", cell) for piece in text.split("...")]
    wrong = [piece for piece in quoted if piece not in code and not piece.startswith(others)]
    assert len(cells) > 15 and not wrong, wrong
