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
from collections.abc import Sequence
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
from multicls.labels import read_labelled
from multicls.passages import CANDIDATES, LENGTH, TOKENS, Passages, read_passages
from multicls.probe import Array, Difference, Draws, draw_rows, embed, targets_of, topic_columns
from multicls.sample import SAMPLE, SAMPLE_CORPUS
from multicls.settings import Settings, parse
from pretrain.settings import ModelSettings

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


Rows = list[tuple[str, float, float, Difference]]  # name, score before and after, change


def compare(
    title: str,
    measure: Draws | Passages,
    views: tuple[dict[str, Array], dict[str, Array]],
    names: dict[str, str],
    reference: str | None = None,
) -> Rows:
    """Prints the scores of embeddings before and after, and returns them.

    Args:
        views: Embeddings of the rows before and after.
        names: Embedding -> its name in the table.
        reference: The embedding before that all are compared with; None: each with itself.
    """
    before, after = views
    print(title)
    print(f"  {'embedding':24}{'before':>8}{'after':>8}   change, 95 % interval")
    old = {
        name: measure.values(found, topic_columns(before, name)) for name, found in before.items()
    }
    rows: Rows = []
    for name in [name for name in names if name in after]:
        values = measure.values(after[name], topic_columns(after, name))
        change = measure.difference(values, old[reference or name])
        was = float(np.nanmean(old[name])) if name in old else np.nan
        now = float(np.nanmean(values))
        rows.append((names[name], was, now, change))
        low, high = 100 * change.low, 100 * change.high
        print(
            f"  {names[name]:24}{100 * was:8.1f}{100 * now:8.1f}   "
            f"{100 * change.mean:+.1f} ({low:+.1f} to {high:+.1f})"
        )
    return rows


def draw(path: Path, rows: Rows, losses: Sequence[dict[str, Any]]) -> None:
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
    for shift, label, color in ((-0.2, "before", "#b0b0b0"), (0.2, "after", "#2a78b5")):
        scores = [100 * (was if shift < 0 else now) for _, was, now, _ in rows]
        right.bar(columns + shift, scores, 0.4, label=label, color=color)
    title = f"Find the next passage among {CANDIDATES}"
    right.set(xticks=columns, ylabel="recall at 1, %", title=title)
    right.set_xticklabels([row[0] for row in rows])
    right.set_visible(bool(rows))
    right.margins(y=0.2)
    right.legend(loc="upper right", ncols=2)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table and draws the picture."""
    options = parse(Options, argv, prog="tools/first_look.py", doc=__doc__)
    import torch  # after --help
    from transformers import AutoModel, AutoTokenizer

    from pretrain.export import build_model

    run = Path(options.run)
    if not (run / "hf" / "config.json").exists():
        raise UserError(f"{run}: not a finished run; train it with pretrain/run.py first.")
    settings = yaml.safe_load((run / "settings.yaml").read_text("utf-8"))
    corpus = settings["data"]["corpus"]
    corpus = Corpus(SAMPLE_CORPUS if corpus == SAMPLE else corpus)
    of_run = settings.get("probe") or {"file": None, "text_column": None, "label_column": "label"}
    path, table = options.probe_file or of_run["file"], None
    if path:
        text = options.text_column or of_run["text_column"]
        table = read_labelled(path, text, options.label_column or of_run["label_column"])
    model = ModelSettings(**settings["model"])
    torch.manual_seed(settings["train"]["seed"])
    models = [build_model(model)]
    if not model.random_weights:  # the base model as it is has the embeddings but the new facets
        models.append(build_model(model, facets=False))
    hf = run / "hf"
    trained = (AutoModel.from_pretrained(hf), AutoTokenizer.from_pretrained(hf))
    models = [(untrained.multicls, tokenizer) for untrained, tokenizer in models]

    def views(texts: list[Any], length: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """Returns the embeddings before and after."""
        before, after = dict[str, Array](), dict[str, Array]()
        for found, (encoder, tokenizer) in [*((before, m) for m in models), (after, trained)]:
            facets, encoder = encoder.config.num_facets, encoder.eval()
            found |= embed(encoder, tokenizer, texts, max_length=length, num_facets=facets)
        return before, after

    fraction = settings["data"]["validation_fraction"]
    passages = read_passages(corpus, fraction, trained[1])
    rows: Rows = []
    if len(passages.queries):
        held_out = len(np.unique(passages.documents))
        title = f"recall at 1 among {CANDIDATES}: {len(passages.texts):,} passages, {held_out} held-out documents"
        rows = compare(title, passages, views(passages.texts, LENGTH), NAMES)
    elif table:
        print(f"no held-out document has two passages of {TOKENS} tokens: no recall")
    else:
        raise UserError(
            f"{corpus.path}: no held-out document has two passages of {TOKENS} tokens; set --probe_file."
        )
    if table:
        draws = draw_rows(table.kind, targets_of(table.kind, table.labels, table.classes))
        title = f"{draws.name} of {len(table.texts):,}, {len(draws.train)} draws; change: against the mean before"
        compare(title, draws, views(table.texts, options.max_length), LABELS, "mean")
    records = [r for r in read_jsonl(run / "metrics.jsonl") if r["split"] == "validation"]
    draw(run / "first_look.png", rows, records)
    print_summary([("picture", run / "first_look.png")])
    return 0


if __name__ == "__main__":
    run_command(main)
