"""Retrieval with embeddings that are not fine-tuned: nDCG@10, with intervals.

python benchmarks/embeddings.py --retrieval retrieval --models runs/sample/hf

The first model is all-MiniLM-L6-v2, from which the demo starts. `mean` (over the tokens without facets) and `sum` (of
the facets) are compared by cosine; "Eq. 2" is the score of MCQT, and MaxSim that of sentence-transformers'
MultiVectorEncoder. A collection is a folder of RETRIEVAL with docs.jsonl.gz, queries.jsonl ({"id", "text"}) and
qrels.tsv (query, document, grade). BM25 needs no model.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import pandas as pd
from pydantic import Field, PositiveInt

from benchmarks.harness import Report, read_lines
from benchmarks.peers import embed_texts
from multicls.errors import run_command
from multicls.measures import Array
from multicls.sample import sample_model
from multicls.settings import Settings, parse

UNTOUCHED = "all-MiniLM-L6-v2"
TOP = 10  # documents that nDCG looks at
Z = 1.96  # standard errors of a 95 % interval over queries


class Options(Settings):
    """Options of the benchmark."""

    retrieval: Path = Field(description="folder with a folder for each collection")
    models: list[str] = Field(["runs/sample/hf"], description="exported Multi-CLS models")
    max_length: PositiveInt = Field(256, description="tokens of a text")


def score_pairs(queries: dict[str, Array], documents: dict[str, Array], weight: float) -> Any:
    """Returns the scores (Q, N) of all queries and documents, by the way in which their embeddings are compared.

    Args:
        weight: lambda of Eq. 2.
    """
    import torch
    from sentence_transformers.util import cos_sim, maxsim
    from torch.nn.functional import normalize

    from multicls.modeling_multicls import mcqt_scores

    views = [name for name in ("mean", "sum") if name in documents]
    found: dict[str, Any] = {name: cos_sim(queries[name], documents[name]) for name in views}
    if "facets" in documents:
        shape = (-1, documents["mean"].shape[1])
        first, second = (
            torch.tensor(x["facets"]).unflatten(1, shape) for x in (queries, documents)
        )
        found["MaxSim"] = maxsim(
            normalize(first, dim=-1), normalize(second, dim=-1), chunk_elements=2**26
        )
        parts = first.split(16)  # queries at a time
        found["Eq. 2"] = torch.cat([mcqt_scores(part, second, weight) for part in parts])
    return {name: scores.numpy() for name, scores in found.items()}


def bm25(queries: Sequence[str], documents: Sequence[str]) -> Array:
    """Returns the scores (Q, N) of BM25 without stemming."""
    import bm25s

    index = bm25s.BM25()
    index.index(bm25s.tokenize(list(documents), show_progress=False), show_progress=False)
    words = bm25s.tokenize(list(queries), return_ids=False, show_progress=False)
    return np.stack([index.get_scores(query) for query in words])


def read_collection(folder: Path) -> tuple[list[str], list[str], Array]:
    """Returns the texts of queries and documents, and the grades (Q, N); only queries with a relevant document."""
    documents, queries = read_lines(folder / "docs.jsonl.gz"), read_lines(folder / "queries.jsonl")
    judged = pd.read_csv(folder / "qrels.tsv", sep="\t", header=None, dtype=str)
    grades = judged[2].astype(float).clip(lower=0).groupby([judged[0], judged[1]]).last().unstack()
    grades = grades.reindex(queries["id"].astype(str), columns=documents["id"].astype(str)).fillna(
        0
    )
    kept = grades.to_numpy().any(axis=1)
    return queries["text"][kept].tolist(), documents["text"].tolist(), grades.to_numpy()[kept]


def ndcg(scores: Array, grades: Array) -> Array:
    """Returns nDCG@10 of each query, (Q,)."""
    from sklearn.metrics import ndcg_score

    rows = zip(grades[:, None], scores[:, None], strict=True)
    return np.array([ndcg_score(grade, score, k=TOP) for grade, score in rows])


def add_retrieval(report: Report, folder: Path, models: dict[str, str], length: int) -> None:
    """Adds nDCG@10 of each collection, and the difference to the untouched model's mean over the same queries."""
    from transformers import AutoConfig

    collections = {path.parent.name: path.parent for path in sorted(folder.glob("*/qrels.tsv"))}
    found: dict[str, dict[str, Array]] = {}
    for name, path in collections.items():
        queries, documents, grades = read_collection(path)
        results = found.setdefault(name, {"BM25": ndcg(bm25(queries, documents), grades)})
        for model, source in models.items():
            print(f"{name}: {model}", flush=True)  # minutes for some thousand documents
            weight = getattr(AutoConfig.from_pretrained(source), "mcqt_lambda", 0.0)
            asked, given = (embed_texts(source, texts, length) for texts in (queries, documents))
            for how, scores in score_pairs(asked, given, weight).items():
                results[f"{model}, {how}"] = ndcg(scores, grades)
    rows = []
    for system in next(iter(found.values())):
        cells = []
        for results in found.values():
            change = results[system] - results[f"{UNTOUCHED}, mean"]
            half = Z * change.std(ddof=1) / len(change) ** 0.5
            shown = f"{100 * change.mean():+.1f} ± {100 * half:.1f}"
            cells.append(f"{100 * results[system].mean():.1f} ({shown})")
        rows.append([system, *cells])
    what = "nDCG@10 x 100 (difference to the first model's mean, 95 % interval over queries)"
    report.table(what, ["", *found], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes the report."""
    options = parse(Options, argv, prog="benchmarks/embeddings.py", doc=__doc__)
    models = {UNTOUCHED: str(sample_model())} | {name: name for name in options.models}
    report = Report("Retrieval with embeddings")
    add_retrieval(report, options.retrieval, models, options.max_length)
    report.write()
    return 0


if __name__ == "__main__":
    run_command(main)
