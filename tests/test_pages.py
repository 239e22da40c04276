"""README and docs/ do what they say: their commands are run, the site is whole, the generated page is current.

Each bash and Python block of the pages in `SHOWN` is run, in this order, in one copy of the repository. A block with a
title is a file to write, a diff is a change to make. `<!-- not run: reason -->` before a block leaves it out. Of the
commands on other pages, the flags are checked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest

REPOSITORY = Path(__file__).parents[1]
NOT_COPIED = (".git", ".venv", "runs", "build", "*.egg-info", "__pycache__", ".*_cache")
BLOCK = re.compile(
    r'(?:<!-- *not run: *(?P<reason>.+?) *-->\s*)?^```(?P<language>bash|python|diff|\w+(?= title="))'
    r'(?: title="(?P<file>[^"]+)")?\n(?P<text>.*?)^```',
    re.MULTILINE | re.DOTALL,
)
ALL_PAGES = ["README.md", *(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md"))]
COMMAND = re.compile(
    r"(?:(\w+/\w+\.py)|slurm/(\w+)\.sbatch|-m (multicls)\.convert)((?:[^\n`#|&;]|\\\n)*)"
)
BATCH = {"pretrain": "pretrain/run.py", "finetune_array": "finetune/grid.py"}
BATCH["data_prep"] = "data_prep/run.py"
SHORTER = {"docs/own_text.md": (" --epochs 1 ", " --steps 6 ")}  # of a pretraining
SHOWN = {  # what the commands of a page print
    "README.md": ("recall at 1", "torch.Size([1, 5, 384])"),
    "docs/model.md": ("torch.Size([3, 5, 384])",),
    "docs/own_labels.md": ("labelled: 20 rows",),
    "docs/own_text.md": ("step 6", "labelled: 20 rows"),
    "docs/extending.md": (),
}


class Block(NamedTuple):
    """A fenced block: commands to run, a file to write or a change to make; `reason` leaves it out."""

    language: str
    file: str | None
    text: str
    reason: str | None
    line: int


def blocks_of(text: str) -> list[Block]:
    return [
        Block(m["language"], m["file"], m["text"], m["reason"], text.count("\n", 0, m.end()))
        for m in BLOCK.finditer(text)
    ]


def changed(text: str, diff: str) -> str:
    """Returns `text` with the lines of a diff replaced, which must occur once."""
    lines = diff.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] or "\n" for line in lines if line[0] in " +")
    places = [match.start() for match in re.finditer(f"^(?={re.escape(old)})", text, re.MULTILINE)]
    assert len(places) == 1, f"the page changes these lines, not there once:\n{old}"
    return text[: places[0]] + new + text[places[0] + len(old) :]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository in which `make` finds this environment."""
    folder = tmp_path_factory.mktemp("pages") / "repository"
    shutil.copytree(REPOSITORY, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
    (folder / ".venv").mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (folder / ".venv" / name).symlink_to(Path(sys.prefix) / name)
    (folder / ".venv" / ".ready").touch()
    return folder


def run_block(block: Block, page: str, folder: Path) -> str:
    """Runs, writes or changes what a block says; returns what it prints."""
    if block.file:
        path = folder / block.file
        is_change = block.language == "diff"
        path.write_text(changed(path.read_text(), block.text) if is_change else block.text)
        return ""
    text = block.text.replace(*SHORTER.get(page, ("", "")))
    shell = ["bash", "-euxo", "pipefail"] if block.language == "bash" else [sys.executable]
    tools = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [*shell, "-c", text],
        cwd=folder,
        env=os.environ | tools | {"HF_MODULES_CACHE": str(folder / "build/modules")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    # bash -x prints each command before it runs, so the last one in the output is the culprit
    assert done.returncode == 0, f"{page}, block before line {block.line}:\n{done.stdout[-6000:]}"
    return done.stdout


@pytest.mark.walk
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", SHOWN)
def test_commands_of_a_page_run(page: str, copy: Path) -> None:
    blocks = blocks_of((REPOSITORY / page).read_text("utf-8"))
    has_data = "MULTICLS_DATA" in os.environ
    to_run = [b for b in blocks if not b.reason and (has_data or "MULTICLS_DATA" not in b.text)]
    assert len(to_run) >= 3, "the blocks of the page are found"
    output = "".join(run_block(block, page, copy) for block in to_run)
    for text in SHOWN[page]:
        assert text in output, f"{text!r} is not in\n{output[-9000:]}"


def test_flags_on_all_pages_exist() -> None:
    reference = (REPOSITORY / "docs" / "settings.md").read_text("utf-8")
    known: dict[str, set[str]] = {}
    for section in reference.split("\n## ")[1:]:
        words = re.findall(r"--[\w.]+", section)
        known.setdefault(section.split()[0], {"--help"}).update(words)
    problems = []
    for page in ALL_PAGES:
        for match in COMMAND.finditer((REPOSITORY / page).read_text("utf-8")):
            script = match[1] or BATCH.get(match[2] or "", "multicls/convert.py")
            flags = set(re.findall(r"(?<!\S)--[\w.]+", match[4]))
            if script in known and (unknown := flags - known[script]):
                problems.append(f"{page}: {script} {' '.join(sorted(unknown))}")
    assert not problems, "\n".join(problems)


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
        addresses = {values[name] for name in ("href", "src") if name in values}
        self.links |= addresses
        if tag in ("script", "img", "source") or (tag == "link" and values["rel"] != "canonical"):
            self.loaded |= addresses


def problems_of(site: Path) -> list[str]:
    """Returns the links of a built site that lead nowhere, and whatever it loads from elsewhere."""
    pages = {path.resolve(): Page(path.read_text("utf-8")) for path in site.glob("**/*.html")}
    problems = []
    for path, page in pages.items():
        problems += [f"{path.name} loads {url}" for url in page.loaded if urlsplit(url).netloc]
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            whole = target in pages and unquote(parts.fragment) in {"", *pages[target].anchors}
            if not whole and (target in pages or not target.exists()):
                problems.append(f"{path.name}: {link}")
    return problems


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    links = '<a href="b.html#x">1</a><a href="c.html">2</a><a href="#top">3</a>'
    (tmp_path / "a.html").write_text(f'<h1 id="top">{links}')
    outside = '<script src="https://cdn.example/x.js">'
    (tmp_path / "b.html").write_text(f'<p id="y"><a href="a.html#top"></a>{outside}')
    broken = ["a.html: b.html#x", "a.html: c.html", "b.html loads https://cdn.example/x.js"]
    assert sorted(problems_of(tmp_path)) == broken


def test_links_of_the_site_lead_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("zensical", reason="builds the site; needs Python 3.11 or newer")
    for name in ("zensical.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(REPOSITORY / name, tmp_path)
    shutil.copytree(REPOSITORY / "docs", tmp_path / "docs")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    plain: dict[str, Any] = {"env": os.environ | {"NO_COLOR": "1"}, "text": True}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, **plain)
    assert done.returncode == 0, done.stdout
    site = tmp_path / "build" / "site"
    assert not problems_of(site)
    pages = {path.stem for path in (REPOSITORY / "docs").glob("*.md")}
    assert pages == {path.stem for path in site.glob("*.html")} - {"404"}
    start = (site / "index.html").read_text("utf-8")
    assert "make demo" in start, "the start page shows the README"
    listed = {link.removeprefix("./") for link in Page(start).links}
    assert {f"{page}.html" for page in pages - {"index"}} <= listed, "each page is in the menu"


def test_settings_page_is_current() -> None:
    code = "import sys; from tools.settings_page import page; sys.stdout.write(page())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written = (REPOSITORY / "docs" / "settings.md").read_text("utf-8")
    assert done.stdout == written, "run: python tools/settings_page.py"


def test_the_pages_stay_short() -> None:
    words = {page: len((REPOSITORY / page).read_text("utf-8").split()) for page in ALL_PAGES}
    assert sum(words.values()) <= 25_000, words
