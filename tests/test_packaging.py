"""The wheel holds what it should, and once installed it loads exports and converts checkpoints."""

import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModel

import multicls
from multicls.build import build
from multicls.files import REPOSITORY
from tests.multicls.test_parity import FIXTURE, RIGHT, base_of
from tests.processes import completed
from tests.test_pages import NOT_COPIED

BUILD = "import setuptools.build_meta as b; print(b.build_wheel('..'))"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a copy of the repository, `tree`, and a wheel of it, built without network."""
    folder = tmp_path_factory.mktemp("packages")
    shutil.copytree(REPOSITORY, folder / "tree", ignore=shutil.ignore_patterns(*NOT_COPIED))
    assert completed([sys.executable, "-c", BUILD], cwd=folder / "tree").returncode == 0
    return folder


@pytest.mark.slow
def test_the_wheel_holds_the_package_only(built: Path) -> None:
    (wheel,) = built.glob(f"multicls-{multicls.__version__}-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(f"multicls-{multicls.__version__}.dist-info/METADATA").decode()
    tree = built / "tree"
    files = {str(path.relative_to(tree)) for path in tree.glob("multicls/*") if path.is_file()}
    assert names == files
    always = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE)
    assert "transformers" in always and not set(always) & {"deepspeed", "datasets", "pandas"}


SCRIPT = """
import sys
stages = "deepspeed accelerate datasets distributed pyarrow pandas sklearn scipy tensorboard matplotlib jinja2"
sys.modules.update(dict.fromkeys([*stages.split(), "sentence_transformers", "xxhash"]))  # not installed
import multicls.modeling_multicls
from transformers import AutoModel, AutoTokenizer
model = AutoModel.from_pretrained(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
print(model(**tokenizer("len bal", return_tensors="pt")).facet_embeddings.shape)
from multicls.convert import main
assert not main(sys.argv[3:])
used = [module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "multicls"]
assert used and all(file.startswith(sys.argv[1]) for file in used), used
"""


@pytest.mark.slow
def test_the_wheel_loads_exports_and_converts(built: Path, tiny_bert: Path, tmp_path: Path) -> None:
    """It is installed on top of the packages of this environment, without those that only the stages require."""
    (wheel,), site, export = built.glob("*.whl"), tmp_path / "site", tmp_path / "export"
    pip = [sys.executable, *["-m", "pip", "install", "--no-index", "--no-deps", "--target"]]
    assert completed([*pip, site, wheel]).returncode == 0
    for part in build(str(tiny_bert), num_facets=2, facet_layers=[1], report=lambda line: None):
        part.save_pretrained(export)
    authors = {key: value for key, value in load_file(FIXTURE).items() if key.startswith("peer.")}
    state = {key.removeprefix("peer."): value for key, value in authors.items()}
    torch.save({"sd": state, "epoch": 0}, tmp_path / "model.pt")
    base = ["--base", base_of(state, tmp_path / "base")]
    arguments = [site, export, "model.pt", *RIGHT.split(), "--output", "converted", *base]
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = completed([sys.executable, "-c", SCRIPT, *arguments], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "torch.Size([1, 2, 32])" in done.stdout
    assert AutoModel.from_pretrained(tmp_path / "converted").config.num_facets == 3


def test_one_version_everywhere() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == multicls.__version__
    assert f"\n## {multicls.__version__}\n" in (REPOSITORY / "CHANGELOG.md").read_text("utf-8")
