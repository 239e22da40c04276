"""Sentence embeddings without fine-tuning: Spearman correlation with STS-B's dev scores, in percent.

    OMP_NUM_THREADS=2 python benchmarks/run.py embeddings --data_dir glue [--models runs/sample/hf ...]

The first model is all-MiniLM-L6-v2, from which the demo starts. "mean" and "facets" are the embeddings of
`SentenceTransformer`, compared by cosine; "max-sim" is the MCQT score (Eq. 2 of the paper) of the K facet embeddings
with the lambda of the pretraining, "best pair" its first term alone. The error is the standard deviation of the
correlation over 1,000 samples of the pairs, drawn with replacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from pydantic import Field
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from torch import Tensor

import multicls  # noqa: F401 (registers the model)
from benchmarks.compare import Report
from finetune.data.reading import read_task
from finetune.data.tasks import find_task
from multicls.modeling_multicls import mcqt_scores
from multicls.sample import sample_model
from multicls.settings import Settings

SAMPLES = 1000


@torch.inference_mode()
def facets_of(model: Any, tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """Returns the facet embeddings of each text, (N, K, D)."""
    found = []
    for start in range(0, len(texts), 64):
        inputs = tokenizer(texts[start : start + 64], padding=True, truncation=True, return_tensors="pt")
        found.append(model(**inputs.to(model.device)).facet_embeddings.cpu())
    return torch.cat(found)


def similarities(folder: str, pairs: tuple[list[str], list[str]]) -> dict[str, Tensor]:
    """Returns the similarity of each pair, (N,), by the kind of embedding."""
    model: Any = SentenceTransformer(folder, local_files_only=True)

    def cosines() -> Tensor:
        first, second = (model.encode(texts, convert_to_tensor=True, show_progress_bar=False) for texts in pairs)
        return model.similarity_pairwise(first, second).cpu()

    found, encoder = {"mean": cosines()}, model[0].auto_model
    if getattr(encoder.config, "num_facets", 0):
        encoder.config.sentence_embedding = "facets"
        found["facets (sum)"] = cosines()
        first, second = (facets_of(encoder, model.tokenizer, texts)[:, None] for texts in pairs)
        best = encoder.config.mcqt_lambda
        found[f"facets (max-sim, lambda {best:g})"] = mcqt_scores(first, second, best).flatten()
        found["facets (best pair)"] = mcqt_scores(first, second, 1.0).flatten()
    return found


class Options(Settings):
    """Options of the benchmark."""

    data_dir: str = Field(description="the folder with STS-B in GLUE's layout")
    models: list[str] = Field(["runs/sample/hf"], description="exported Multi-CLS models")


def main(args: Options, argv: Sequence[str]) -> None:
    """Measures and writes the results."""
    rows = read_task(find_task("stsb"), args.data_dir).dev
    pairs = ([row.texts[0] for row in rows], [row.texts[1] for row in rows])
    gold = np.array([row.label for row in rows])
    draws = np.random.default_rng(0).integers(len(gold), size=(SAMPLES, len(gold)))
    table = []
    for label, model in {"all-MiniLM-L6-v2": str(sample_model()), **{model: model for model in args.models}}.items():
        for kind, found in similarities(model, pairs).items():
            values = found.numpy()
            error = np.std([spearmanr(values[draw], gold[draw])[0] for draw in draws])
            table.append([label, kind, f"{100 * spearmanr(values, gold)[0]:.1f} ± {100 * error:.1f}"])
    report = Report("embeddings", "Sentence embeddings on STS-B", argv)
    report.table(f"Spearman x 100, {len(gold)} pairs of STS-B dev", ["model", "embedding", "Spearman"], table)
    report.write()
