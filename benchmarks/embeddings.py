"""Sentence embeddings without fine-tuning: Spearman correlation with the scores of STS-B's dev set.

OMP_NUM_THREADS=2 python benchmarks/embeddings.py --data_dir glue --models runs/sample/hf

The first row is all-MiniLM-L6-v2, from which the demo starts. The embedding is the mean over the tokens without facets,
compared by cosine. The error is the standard deviation over 1,000 bootstrap samples.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from pydantic import Field

from benchmarks.harness import Report
from multicls.errors import run_command
from multicls.sample import sample_model
from multicls.settings import Settings, parse

SAMPLES = 1000


class Options(Settings):
    """Options of the benchmark."""

    data_dir: str = Field(description="folder with STS-B in GLUE's layout")
    models: list[str] = Field(["runs/sample/hf"], description="exported Multi-CLS models")


def similarities(folder: str, pairs: list[list[str]]) -> np.ndarray:
    """Returns the cosine of each pair of sentences, (N,)."""
    from sentence_transformers import SentenceTransformer

    import multicls.modeling_multicls  # noqa: F401 (registers the model)

    model: Any = SentenceTransformer(folder, local_files_only=True)
    first, second = (model.encode(texts, convert_to_tensor=True) for texts in pairs)
    return np.asarray(model.similarity_pairwise(first, second).cpu())


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes the report."""
    options = parse(Options, argv, prog="benchmarks/embeddings.py", doc=__doc__)
    import pandas as pd  # after --help
    from scipy.stats import spearmanr

    frame = pd.read_csv(Path(options.data_dir, "STS-B", "dev.tsv"), sep="\t", quoting=3)
    pairs = [frame["sentence1"].tolist(), frame["sentence2"].tolist()]
    gold = frame["score"].to_numpy()
    samples = np.random.default_rng(0).integers(len(gold), size=(SAMPLES, len(gold)))
    rows = []
    for name in ["all-MiniLM-L6-v2", *options.models]:
        folder = str(sample_model()) if name == "all-MiniLM-L6-v2" else name
        values = similarities(folder, pairs)
        error = np.std([spearmanr(values[sample], gold[sample])[0] for sample in samples])
        rows.append([name, f"{100 * spearmanr(values, gold)[0]:.1f} ± {100 * error:.1f}"])
    report = Report("Sentence embeddings on STS-B")
    report.table(f"Spearman x 100, {len(gold)} pairs", ["model", "Spearman"], rows)
    report.write()
    return 0


if __name__ == "__main__":
    run_command(main)
