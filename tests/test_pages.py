"""README and docs/ do what they say: their commands are run, the site is whole, the generated page is current.

Each bash and Python block of the pages in `SHOWN` is run, in this order, in a copy of the repository, by a shell that
refuses unset variables. A block with a title is a file to write, a diff is a change to make. `<!-- not run: reason -->`
before a block leaves it out. The flags of all commands are checked, and so is the language: short sentences, few
numbers, no hashes, narrow code, and a ceiling of words.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from multicls import __version__
from multicls.files import REPOSITORY
from tests.processes import completed

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
TWO_STEPS = "--steps 2 --run.eval_examples 6 --run.eval_every 2 --run.save_every 2"
SHORTER = [  # words of commands that would take minutes
    ("own_text/corpus \\\n    --epochs 1", f"own_text/corpus {TWO_STEPS}"),
    ("--run.eval_examples 3", "--run.eval_examples 3 --data.num_workers 0"),
    ('"dask gensim matplotlib networkx numpy pandas scipy sklearn"', '"dask gensim"'),
    ("finetune/compare.py ", "finetune/compare.py --repeats 1 "),
    ("corpus \\\n    --probe_file", f"corpus {TWO_STEPS} --probe_file"),
    ("--step 40", "--step 2"),
    ("--steps 10", "--steps 2"),
]
SHORTER_RECIPE = [("steps: 40\n", "steps: 2\n"), ("examples: 30\n", "examples: 6\n")]
SHORTER_RECIPE.append(("fraction: 0.5 ", "fraction: 0.1 "))
TOPICS = ("model", "own_labels", "own_text", "data", "pretraining")
RUN = ("README.md", *(f"docs/{topic}.md" for topic in TOPICS))
SHOWN = {  # what the commands of pages print that are run in one copy
    RUN: (
        "next-passage recall",
        "torch.Size([3, 5, 384])",
        "written:  runs/own/labelled.csv",
    ),
    ("docs/extending.md",): ('"loss/spread"',),
}


def changed(text: str, diff: str) -> str:
    """Returns `text` with the lines of a diff replaced, which must occur once."""
    lines = diff.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] or "\n" for line in lines if line[0] in " +")
    places = [match.start() for match in re.finditer(f"^(?={re.escape(old)})", text, re.MULTILINE)]
    assert len(places) == 1, f"the page changes these lines, not there once:\n{old}"
    return text[: places[0]] + new + text[places[0] + len(old) :]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the repository in which `make` finds this environment."""
    folder = tmp_path / "repository"
    shutil.copytree(REPOSITORY, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
    (folder / ".venv").mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (folder / ".venv" / name).symlink_to(Path(sys.prefix) / name)
    (folder / ".venv" / ".ready").touch()
    recipe = folder / "pretrain" / "recipes" / "sample.yaml"
    assert all(recipe.read_text().count(long) == 1 for long, _ in SHORTER_RECIPE)
    recipe.write_text(shorter(recipe.read_text(), SHORTER_RECIPE))
    return folder


def shorter(text: str, words: list[tuple[str, str]]) -> str:
    for long, short in words:
        text = text.replace(long, short)
    return text


def run_block(block: re.Match[str] | dict[str, str], page: str, folder: Path) -> str:
    """Runs, writes or changes what a block says; returns what it prints."""
    if block["file"]:
        path = folder / block["file"]
        is_change = block["language"] == "diff"
        path.write_text(changed(path.read_text(), block["text"]) if is_change else block["text"])
        return ""
    text = shorter(block["text"], SHORTER)
    shell = ["bash", "-euxo", "pipefail"] if block["language"] == "bash" else [sys.executable]
    env = {name: value for name, value in os.environ.items() if name != "MULTICLS_DATA"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    done = subprocess.run(
        [*shell, "-c", text],
        cwd=folder,
        env=env | {"HF_MODULES_CACHE": str(folder / "build/modules")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    # bash -x prints each command before it runs, so the last one in the output is the culprit
    assert done.returncode == 0, f"{page}:\n{done.stdout[-6000:]}"
    return done.stdout


@pytest.mark.walk
@pytest.mark.parametrize(
    "pages", [pytest.param(pages, marks=pytest.mark.xdist_group(pages[0])) for pages in SHOWN]
)
def test_commands_of_pages_run(pages: tuple[str, ...], copy: Path) -> None:
    output = ""
    for page in pages:
        blocks = [b for b in BLOCK.finditer((REPOSITORY / page).read_text()) if not b["reason"]]
        assert blocks, f"no command of {page} is found"
        output += "".join(run_block(block, page, copy) for block in blocks)
    for text in SHOWN[pages]:
        assert text in output, f"{text!r} is not in\n{output[-9000:]}"


@pytest.mark.walk
def test_the_notebook_runs(copy: Path) -> None:
    cells = json.loads((copy / "docs" / "tour.ipynb").read_text("utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    output = run_block({"file": "", "language": "python", "text": code}, "docs/tour.ipynb", copy)
    for text in ("next-passage recall", "It is fitted on all", "    0.", "tensor([["):
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


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The sources of the site."""
    for name in ("zensical.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(REPOSITORY / name, tmp_path)
    shutil.copytree(REPOSITORY / "docs", tmp_path / "docs")
    return tmp_path


def problems_of(folder: Path) -> str:
    """Builds the site; returns what it reports of links and anchors that lead nowhere."""
    pytest.importorskip("zensical", reason="builds the site")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = completed(command, cwd=folder, env=os.environ | {"NO_COLOR": "1"})
    return done.stdout + done.stderr if done.returncode else ""


def test_the_site_is_whole(site: Path) -> None:
    assert not problems_of(site)
    texts = {path.stem: path.read_text("utf-8") for path in (site / "build/site").glob("*.html")}
    pages = {path.stem for path in (site / "docs").glob("*.md")}
    assert texts.keys() - {"404"} == pages and "Does it help?" in texts["index"]
    assert f"multicls {__version__}" in texts["index"], "the footer has the version"
    listed = (site / "zensical.toml").read_text("utf-8")
    assert not [page for page in pages if f'"{page}.md"' not in listed], "each page is in the menu"
    loaded = r'<(?:script|img|source|link rel="stylesheet")[^>]+(?:src|href)="?(?:https?:)?//'
    assert not [page for page, text in texts.items() if re.search(loaded, text)]


def test_links_of_pages_and_readme_lead_somewhere(site: Path) -> None:
    def included(found: re.Match[str]) -> str:
        text, name = (site / found[1]).read_text("utf-8"), found[2]
        return text.partition(f"[start:{name}] -->")[2].split(" [end:")[0] if name else text

    for page in (site / "docs").glob("*.md"):  # links of included text are not checked
        text = re.sub(r'--8<-- "(.*?\.md):?(.*)"', included, page.read_text("utf-8"))
        images = re.findall(r"\bimages/[\w.-]+", text)
        assert not [image for image in images if not (site / "docs" / image).exists()], page.name
        page.write_text(text)
    assert not problems_of(site)
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    targets = re.findall(r"^\[[\w-]+\]: ([^#\s]+)", readme, re.MULTILINE)
    assert targets and all((REPOSITORY / target).exists() for target in targets)
    for broken in ("[page](gone.md)", "[place](faq.md#gone)"):  # the control
        (site / "docs" / "model.md").write_text(broken)
        assert "does not exist" in problems_of(site)


FENCE = re.compile(r"^```(\w*).*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_PROSE = re.compile(r"<!--.*?-->|<picture>.*?</picture>", re.DOTALL)
MADE = re.compile(  # by a command
    r"<!-- reasons.*?<!-- end of reasons -->|<!-- results:.*?<!-- /results -->", re.DOTALL
)
HASH = re.compile(r"\b(?=[a-f\d]*[a-f])(?=[a-f\d]*\d)[a-f\d]{7,40}\b")
WRITTEN = [page for page in ALL_PAGES if not page.endswith("settings.md")]


def text_of(page: str) -> str:
    """Returns a page without what a command has written into it."""
    return MADE.sub("", (REPOSITORY / page).read_text("utf-8"))


def sentences(text: str) -> list[str]:
    """Returns the sentences of a page: no code, tables, headings, images, and lines of how to reproduce a table."""
    text = NOT_PROSE.sub("", FENCE.sub("", text))
    text = re.sub(r"^(?:[|#]|!\[|\[[\w-]+\]: |Reproduce: |--8<--).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "Code", text)
    text = re.sub(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"<[^>]+>|\*", "", text)
    paragraphs = re.split(r"\n\s*\n|\n(?=- |\d+\. )", text)
    parts = (re.split(r"(?<=[.!?])\)?\s+(?=\W*[A-Z\d])", part) for part in paragraphs)
    return [" ".join(part.split()) for found in parts for part in found if part.strip()]


def faults(text: str, words: int, numbers: int) -> list[str]:
    """Returns what breaks the rules of pages.

    Args:
        words: Most words of a sentence.
        numbers: Most numbers of a sentence.
    """
    found = []
    for sentence in sentences(text):
        if sum(bool(re.search(r"\w", word)) for word in sentence.split()) > words:
            found.append(f"a sentence of more than {words} words: {sentence}")
        if len(re.findall(r"(?<![\w.:-])\d[\d.,]*", sentence)) > numbers:
            found.append(f"more than {numbers} numbers: {sentence}")
        if re.search(r"\btests/|\bseeds? \d", sentence):
            found.append(f"a path of a test, or a seed: {sentence}")
    prose = re.sub(r"\]\([^)]*\)|^Reproduce: .*", "", FENCE.sub("", text), flags=re.MULTILINE)
    found += [f"a hash: {match[0]}" for match in HASH.finditer(prose)]
    for language, code in FENCE.findall(text):
        for line in code.splitlines():
            if len(line) > 80:
                found.append(f"code of more than 80 columns: {line}")
            if language in ("bash", "python", "yaml") and re.search(r"^\s*[^#\s].*\s# ", line):
                found.append(f"a comment behind a command: {line}")
    return found


@pytest.mark.parametrize("page", WRITTEN)
def test_language_of_pages(page: str) -> None:
    numbers = 2 if page == "README.md" else 3
    assert not (found := faults(text_of(page), 25, numbers)), "\n".join(found)


def test_language_of_a_bad_page_is_refused() -> None:
    bad = "One two three\nfour [five six](x.md). 1 of 2, or 3.\n\nDone at 4bd0566, seed 1.\n\n"
    bad += f"```bash\nmake demo  # two minutes\n{'x' * 81}\n```\n\nReproduce: `pytest tests/x.py`\n"
    found = [fault.partition(":")[0] for fault in faults(bad, 5, 2)]
    assert found == [
        "a sentence of more than 5 words",
        "more than 2 numbers",
        "a path of a test, or a seed",
        "a hash",
        "a comment behind a command",
        "code of more than 80 columns",
    ]


def test_pages_are_short() -> None:
    words = {page: len(text_of(page).split()) for page in WRITTEN}
    assert len((REPOSITORY / "README.md").read_text("utf-8").split()) <= 1000, "tables, too"
    words.pop("README.md")
    assert words["docs/results.md"] <= 900
    assert sum(words.values()) <= 14_000, words
    news = (REPOSITORY / "CHANGELOG.md").read_text("utf-8").split("\n## ")[1]
    assert news.startswith("Unreleased") and len(news.split("\n")) <= 34, "30 lines and a heading"


def test_settings_page_is_current() -> None:
    code = "import sys; from tools.settings_page import page; sys.stdout.write(page())"
    done = completed([sys.executable, "-c", code], cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    written = (REPOSITORY / "docs" / "settings.md").read_text("utf-8")
    assert done.stdout == written, "run: python tools/settings_page.py"
