"""Shows what a pretraining run has changed, on held-out text and on labelled rows.

python tools/first_look.py runs/sample
python tools/first_look.py runs/mine --probe_file tickets.csv

Each held-out document is cut into passages of whole sentences. A query is a passage; the right answer is the next
passage of its document, among 49 others drawn from all held-out documents. Embeddings are compared by cosine: at
[CLS], by the mean over the tokens, and the sum of the facets, which are new and untrained before the pretraining.
With labelled rows a linear model is fitted on 100 of them and scored on the others, in 20 draws
(multicls/probe.py); all embeddings are compared with the mean of the original checkpoint. The picture,
RUN/first_look.png, also has the losses on held-out text.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import yaml
from pydantic import Field
from pydantic_settings import CliPositionalArg

from multicls.console import print_summary
from multicls.corpus import Corpus
from multicls.errors import UserError, run_command
from multicls.files import read_jsonl
from multicls.labels import LabelledRows, read_labelled
from multicls.passages import (
    CANDIDATES,
    LENGTH,
    TOKENS,
    next_passage_hits,
    passages_of,
    recall_interval,
)
from multicls.probe import MEASURES, Array, draw_rows, embed, interval, probe, targets_of
from multicls.sample import SAMPLE_CORPUS, sample_model
from multicls.settings import Settings, parse

LOSSES = {"mlm": "MLM", "tfidf": "TF-IDF", "mcqt": "MCQT"}
NAMES = {"cls": "[CLS]", "mean": "mean over tokens", "sum": "facets"}
LABELS = {"cls": "[CLS]", "mean": "mean over tokens", "facets": "facets, concatenated"}
LABELS |= {"mean_topics": "mean and topics"}  # topics are new: no value before


class Options(Settings):
    """Options of the command."""

    run: CliPositionalArg[str] = Field(description="finished run folder of pretrain/run.py")
    probe_file: str | None = Field(
        None,
        description="labelled rows: CSV, TSV, JSON lines or Parquet; default: those of the run",
    )
    text_column: str | None = Field(None, description="column, or COLUMN1,COLUMN2 for pairs")
    label_column: str | None = Field(None, description="column of the label")
    max_length: int = Field(128, ge=8, description="tokens of a labelled row that are read")


Embed = Callable[[list[Any], int], dict[str, Array]]


def compare_passages(
    before: Embed, after: Embed, corpus: Corpus, fraction: float, tokenizer: Any
) -> Any:
    """Prints next-passage recall before and after; returns its rows: name, before, after, and interval, in percent.

    Raises:
        UserError: No held-out document has two passages.
    """
    texts, documents = passages_of(corpus, fraction, tokenizer)
    if not (documents[:-1] == documents[1:]).any():
        raise UserError(f"{corpus.path}: no held-out document has two passages of {TOKENS} tokens.")
    old, new = before(texts, LENGTH), after(texts, LENGTH)
    rows: list[tuple[Any, ...]] = []
    for name in [name for name in NAMES if name in new]:
        hits = [next_passage_hits(views[name], documents) for views in (old, new)]
        change = recall_interval(hits[1], hits[0], documents)
        scores = [100 * float(values.mean()) for values in hits]
        rows.append((NAMES[name], *scores, 100 * change.low, 100 * change.high))
    held_out = len(np.unique(documents))
    print(f"recall at 1 among {CANDIDATES}: {len(texts):,} passages, {held_out} held-out documents")
    print(f"  {'embedding':24}{'before':>8}{'after':>8}   change, 95 % interval")
    for name, was, now, low, high in rows:
        print(f"  {name:24}{was:8.1f}{now:8.1f}   {now - was:+.1f} ({low:+.1f} to {high:+.1f})")
    return rows


def compare_labels(before: Embed, after: Embed, table: LabelledRows, max_length: int) -> None:
    """Prints the probe on labelled rows, before and after, each against the mean before."""
    draws = draw_rows(table.kind, targets_of(table.kind, table.labels, table.classes))
    old, new = before(table.texts, max_length), after(table.texts, max_length)
    reference = probe(old["mean"], draws)
    title = f"{MEASURES[draws.kind]} of a linear model on {draws.train_rows} of {len(table.texts):,} labelled rows"
    print(f"{title}, {len(draws.train)} draws")
    print(f"  {'embedding':24}{'before':>8}{'after':>8}   after, against the mean before")
    for name in [name for name in LABELS if name in new]:
        values = probe(new[name], draws)
        now = np.nanmean(values)
        was = np.nanmean(probe(old[name], draws)) if name in old else np.nan
        change = interval(values, reference)
        low, high = 100 * change.low, 100 * change.high
        print(
            f"  {LABELS[name]:24}{100 * was:8.1f}{100 * now:8.1f}   "
            f"{100 * change.mean:+.1f} ({low:+.1f} to {high:+.1f})"
        )


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
    of_run = settings.get("probe") or {"file": None, "text_column": None, "label_column": "label"}
    path, table = options.probe_file or of_run["file"], None
    if path:
        text = options.text_column or of_run["text_column"]
        table = read_labelled(path, text, options.label_column or of_run["label_column"])
    tokenizer = AutoTokenizer.from_pretrained(run / "hf")
    torch.manual_seed(settings["train"]["seed"])
    chosen = {
        name: settings["model"][name] for name in ("num_facets", "facet_layers", "random_weights")
    }
    revision = settings["model"].get("revision")
    untrained = build(base, revision=revision, **chosen, report=lambda line: None)[
        0
    ].multicls.eval()
    plain = untrained  # of random weights nothing else is before the run
    if not chosen["random_weights"]:
        plain = AutoModel.from_pretrained(base, revision=revision or "main").eval()
    trained = AutoModel.from_pretrained(run / "hf").eval()
    facets = {"num_facets": settings["model"]["num_facets"]}
    base_tokenizer = (
        tokenizer
        if plain is untrained
        else AutoTokenizer.from_pretrained(base, revision=revision or "main")
    )
    base_facets = {"num_facets": getattr(plain.config, "num_facets", 0)}

    def before(texts: list[Any], length: int) -> dict[str, Array]:
        views = embed(untrained, tokenizer, texts, max_length=length, **facets)
        return views | embed(plain, base_tokenizer, texts, max_length=length, **base_facets)

    def after(texts: list[Any], length: int) -> dict[str, Array]:
        return embed(trained, tokenizer, texts, max_length=length, **facets)

    fraction = settings["data"]["validation_fraction"]
    rows = compare_passages(before, after, corpus, fraction, tokenizer)
    if table:
        compare_labels(before, after, table, options.max_length)
    records = [r for r in read_jsonl(run / "metrics.jsonl") if r["split"] == "validation"]
    draw(run / "first_look.png", rows, records)
    print_summary([("picture", run / "first_look.png")])
    return 0


if __name__ == "__main__":
    run_command(main)
