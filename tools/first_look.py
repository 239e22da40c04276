"""Shows what a pretraining run has changed: for each passage of held-out documents, find the passage that follows it.

python tools/first_look.py runs/sample

Each held-out document is cut into passages of whole sentences. A query is a passage; the right answer is the next
passage of its document, among 49 others drawn from all held-out documents. Embeddings are compared by cosine: at
[CLS], by the mean over the tokens, and at the facets, which are new and untrained before the pretraining. Intervals are
those of a bootstrap over documents. The picture, RUN/first_look.png, also has the losses on held-out text.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import yaml
from pydantic import Field
from pydantic_settings import CliPositionalArg

from multicls.console import print_summary
from multicls.corpus import Corpus, held_out_share
from multicls.errors import UserError, run_command
from multicls.files import read_jsonl
from multicls.sample import SAMPLE_CORPUS, sample_model
from multicls.settings import Settings, parse

TOKENS = 40  # of a passage, at least; 64 are read
PER_DOCUMENT = 20  # passages, so that no long document makes up the result
CANDIDATES = 50
LOSSES = {"mlm": "MLM", "tfidf": "TF-IDF", "mcqt": "MCQT"}
Array = np.ndarray[Any, np.dtype[Any]]


class Options(Settings):
    """Options of the command."""

    run: CliPositionalArg[str] = Field(description="finished run folder of pretrain/run.py")


def passages_of(corpus: Corpus, fraction: float, tokenizer: Any) -> tuple[list[str], Array]:
    """Returns the passages of the held-out documents in order, and the number of each one's document, (N,)."""
    texts: list[str] = []
    documents: list[int] = []
    limit = corpus.validation_limit(fraction)
    for number in range(corpus.num_rows):
        row = corpus.row(number)
        if held_out_share(np.array([row.hash], np.uint64))[0] >= limit:
            continue
        passages, begin = [], 0
        for end in row.offsets[1:].tolist():
            if end - begin >= TOKENS:
                passages.append(tokenizer.decode(row.tokens[begin:end].tolist()))
                begin = end
        texts += passages[:PER_DOCUMENT]
        documents += [number] * len(passages[:PER_DOCUMENT])
    return texts, np.array(documents)


def embeddings_of(model: Any, tokenizer: Any, texts: Sequence[str]) -> dict[str, Array]:
    """Returns the normalised embeddings (N, D) of the texts, by the way in which the model is read."""
    import torch

    facets = getattr(model.eval().config, "num_facets", 0)
    rows: dict[str, list[Any]] = {"[CLS]": [], "mean over tokens": []}
    for start in range(0, len(texts), 64):
        batch = list(texts[start : start + 64])
        inputs = tokenizer(batch, max_length=64, padding=True, truncation=True, return_tensors="pt")
        with torch.inference_mode():
            outputs = model(**inputs)
        mask = inputs["attention_mask"][..., None].clone()
        mask[:, 1 : 1 + facets] = 0
        rows["[CLS]"].append(outputs.last_hidden_state[:, 0])
        mean = (outputs.last_hidden_state * mask).sum(1) / mask.sum(1)
        rows["mean over tokens"].append(mean)
        if facets:
            rows.setdefault("facets", []).append(outputs.facet_embeddings.sum(1))
    return {
        name: torch.nn.functional.normalize(torch.cat(parts), dim=-1).numpy()
        for name, parts in rows.items()
    }


def hits_of(embeddings: Array, documents: Array) -> Array:
    """Returns for each query whether the next passage is nearer than all other candidates, (Q,)."""
    scores = embeddings @ embeddings.T
    generator, hits = np.random.default_rng(0), []
    for query in np.flatnonzero(documents[:-1] == documents[1:]):
        candidates = np.delete(np.arange(len(documents)), [query, query + 1])
        chosen = generator.choice(candidates, min(CANDIDATES - 1, len(candidates)), replace=False)
        hits.append(scores[query, query + 1] > scores[query, chosen].max())
    return np.array(hits)


def interval(before: Array, after: Array, documents: Array) -> tuple[float, float]:
    """Returns the 95 % interval of the difference of two hit rates by a bootstrap over documents."""
    queries = documents[:-1][documents[:-1] == documents[1:]]
    groups = [np.flatnonzero(queries == number) for number in np.unique(queries)]
    change, generator = after.astype(float) - before, np.random.default_rng(0)
    draws = generator.integers(len(groups), size=(1000, len(groups)))
    means = [change[np.concatenate([groups[i] for i in draw])].mean() for draw in draws]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def draw(path: Path, rows: Sequence[Sequence[Any]], losses: Sequence[dict[str, Any]]) -> None:
    """Draws the losses on held-out text, and recall before and after."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for name, label in LOSSES.items():
        if f"loss/{name}" not in losses[0]:  # a loss of weight 0
            continue
        values = [record[f"loss/{name}"] for record in losses]
        share = [100 * value / values[0] for value in values]
        left.plot([record["step"] for record in losses], share, marker="o", label=label)
    left.set(xlabel="step", ylabel="% of the loss at step 0", title="Losses on held-out text")
    left.legend()
    columns = np.arange(len(rows))
    right.bar(columns - 0.2, [row[1] for row in rows], 0.4, label="before", color="#b0b0b0")
    right.bar(columns + 0.2, [row[2] for row in rows], 0.4, label="after", color="#2a78b5")
    title = f"Find the next passage among {CANDIDATES}"
    right.set(xticks=columns, ylabel="recall at 1, %", title=title)
    right.set_xticklabels([row[0] for row in rows])
    right.margins(y=0.2)
    right.legend(loc="upper right", ncols=2)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table and draws the picture."""
    options = parse(Options, argv, prog="tools/first_look.py", doc=__doc__)
    import torch  # after --help
    from transformers import AutoModel, AutoTokenizer

    from multicls.build import build

    run = Path(options.run)
    if not (run / "hf" / "config.json").exists():
        raise UserError(f"{run}: not a finished run; train it with pretrain/run.py first.")
    settings = yaml.safe_load((run / "settings.yaml").read_text("utf-8"))
    base, corpus = settings["model"]["checkpoint"], settings["data"]["corpus"]
    base = str(sample_model()) if base == "sample" else base
    corpus = Corpus(SAMPLE_CORPUS if corpus == "sample" else corpus)
    tokenizer = AutoTokenizer.from_pretrained(run / "hf")
    texts, documents = passages_of(corpus, settings["data"]["validation_fraction"], tokenizer)
    if not (documents[:-1] == documents[1:]).any():
        raise UserError(f"{run}: no held-out document has two passages of {TOKENS} tokens.")
    torch.manual_seed(settings["train"]["seed"])
    chosen = {name: settings["model"][name] for name in ("num_facets", "facet_layers")}
    untrained = build(base, **chosen, report=lambda line: None)[0]
    before = embeddings_of(untrained.multicls, tokenizer, texts)
    plain = AutoTokenizer.from_pretrained(base)
    before |= embeddings_of(AutoModel.from_pretrained(base), plain, texts)
    after = embeddings_of(AutoModel.from_pretrained(run / "hf"), tokenizer, texts)
    rows = []
    for name in before:
        old, new = hits_of(before[name], documents), hits_of(after[name], documents)
        low, high = interval(old, new, documents)
        rows.append((name, 100 * old.mean(), 100 * new.mean(), 100 * low, 100 * high))
    held_out = len(np.unique(documents))
    print(f"recall at 1 among {CANDIDATES}: {len(texts):,} passages, {held_out} held-out documents")
    print(f"  {'embedding':24}{'before':>8}{'after':>8}   change, 95 % interval")
    for name, old, new, low, high in rows:
        print(f"  {name:24}{old:8.1f}{new:8.1f}   {new - old:+.1f} ({low:+.1f} to {high:+.1f})")
    records = [r for r in read_jsonl(run / "metrics.jsonl") if r["split"] == "validation"]
    draw(run / "first_look.png", rows, records)
    print_summary([("picture", run / "first_look.png")])
    return 0


if __name__ == "__main__":
    run_command(main)
