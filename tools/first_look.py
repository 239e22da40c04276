"""Shows what a pretraining run has changed, on held-out text and on labelled rows.

python tools/first_look.py runs/sample
python tools/first_look.py runs/mine --probe_file tickets.csv

Each held-out document is cut into passages of whole sentences. A query is a passage; the right answer is the next
passage of its document, among 49 others drawn from all held-out documents. Embeddings are compared by cosine: at
[CLS], by the mean over the tokens, and the facets, which are new and untrained before the pretraining.
With labelled rows, read as in the run unless a flag says otherwise, linear models are evaluated in repeated folds over
all of them (multicls/evaluation.py); all embeddings are compared with the mean of the original checkpoint. The
picture, RUN/first_look.png, also has the losses on held-out text.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import pandas as pd
from pydantic import Field
from pydantic_settings import CliPositionalArg

from multicls.console import print_summary
from multicls.corpus import Corpus
from multicls.distributed import uses_cuda
from multicls.embeddings import embed_rows
from multicls.errors import UserError, run_command
from multicls.evaluation import folds, rows_of
from multicls.files import read_jsonl
from multicls.labels import LabelledSettings, read_labelled
from multicls.measures import Array
from multicls.passages import LENGTH, TOKENS, Passages, read_passages
from multicls.sample import SAMPLE, SAMPLE_CORPUS
from multicls.settings import parse
from multicls.systems import Probe

LOSSES = {"loss/mlm": "MLM", "loss/tfidf": "TF-IDF", "loss/mcqt": "MCQT"}
NAMES = {"cls": "[CLS]", "mean": "mean over tokens", "facets": "facets"}
LABELS = NAMES | {"mean+topics": "mean and topics", "facets+topics": "facets and topics"}


class Options(LabelledSettings):
    """Options of the command. How labels are read is by default as in the run."""

    run: CliPositionalArg[Path] = Field(description="finished run folder of pretrain/run.py")
    probe_file: str | None = Field(
        None,
        description="labelled rows: CSV, TSV, JSON lines or Parquet; default: those of the run",
    )
    max_length: int | None = Field(
        None,
        ge=8,
        description="tokens of a labelled row that are read; default: as many as the run's",
    )


def compare(
    title: str,
    measure: Probe | Passages,
    before: dict[str, Array],
    after: dict[str, Array],
    names: dict[str, str],
    reference: str | None = None,
) -> pd.DataFrame:
    """Prints the scores of embeddings before and after, in percent, and returns them.

    Args:
        before: Embeddings by part.
        names: Embedding -> its name in the table.
        reference: The embedding before that all are compared with; None: each with itself.
    """
    print(title)
    change_to = "after - mean before" if reference else "change"
    print(f"  {'embedding':24}{'before':>8}{'after':>8}   {change_to}, 95 % interval")
    old, new = measure.scores(before), measure.scores(after)
    scores = pd.DataFrame(columns=["before", "after"], dtype=float)
    for name, shown in names.items():
        if name in new:
            change = measure.difference(new[name], old[reference or name])
            was = 100 * old[name].mean if name in old else np.nan
            now = 100 * new[name].mean
            scores.loc[shown] = was, now
            print(f"  {shown:24}{was:8.1f}{now:8.1f}   {change}")
    return scores


def draw(path: Path, recalls: pd.DataFrame | None, records: Sequence[dict[str, Any]]) -> None:
    """Draws the losses on held-out text, and recall before and after."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    losses = pd.DataFrame(records, columns=["step", *LOSSES]).set_index("step")
    losses = losses.dropna(axis=1, how="all").rename(columns=LOSSES)  # some have a weight of 0
    shares, what = 100 * losses / losses.iloc[0], "% of the loss at step 0"
    shares.plot(ax=left, marker="o", ylabel=what, title="Losses on held-out text")
    right.set_visible(recalls is not None)
    if recalls is not None:
        colors, title = ["#b0b0b0", "#2a78b5"], "Find the next passage"
        recalls.plot.bar(
            ax=right, rot=0, width=0.8, color=colors, ylabel="recall at 1, %", title=title
        )
        right.margins(y=0.2)
        right.legend(loc="upper right", ncols=2)
    figure.savefig(path, dpi=110)


def embed_before_and_after(
    models: Sequence[tuple[Any, Any]], trained: tuple[Any, Any], texts: Any, length: int
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Returns the embeddings of texts before and after, by part.

    Args:
        models: Models before the pretraining with their tokenizers; a later one's embeddings replace an earlier one's.
        trained: The encoder after it, and its tokenizer.
    """
    device = "cuda" if uses_cuda() else "cpu"
    before, after = dict[str, Array](), dict[str, Array]()
    begun = [(before, model.multicls, tokenizer) for model, tokenizer in models]
    # Topics come from the corpus, not from the training: the model before has the same.
    topics = trained[0].topics.to(device) if trained[0].topics is not None else None
    for found, encoder, tokenizer in [*begun, (after, *trained)]:
        found |= embed_rows(
            encoder.eval().to(device),
            tokenizer,
            texts,
            max_length=length,
            num_facets=encoder.config.num_facets,
            device=device,
            topics=topics,
        )
    return before, after


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table and draws the picture."""
    options = parse(Options, argv, prog="tools/first_look.py", doc=__doc__)
    from transformers import AutoModel, AutoTokenizer  # after --help

    from pretrain.export import model_before, settings_of
    from pretrain.folder import RunFolder

    run, folder = options.run, RunFolder(options.run)
    hf = folder.export
    if not (hf / "config.json").exists():
        raise UserError(f"{run}: not a finished run; train it with pretrain/run.py first.")
    settings = settings_of(folder)
    corpus = Corpus(SAMPLE_CORPUS if settings.data.corpus == SAMPLE else settings.data.corpus)
    of_run, table = settings.probe, None
    if path := options.probe_file or of_run.file:
        given = options.model_dump(include=set(LabelledSettings.model_fields), exclude_unset=True)
        table = read_labelled(path, of_run.model_copy(update=given))
        rows = rows_of(table, path)
        probe = Probe(rows, folds(rows))
    # The base model as it is has the embeddings but the new facets, which a model that began at random has alone.
    with_facets = (True,) if settings.model.random_weights else (True, False)
    models = [model_before(folder, facets) for facets in with_facets]
    trained = (AutoModel.from_pretrained(hf), AutoTokenizer.from_pretrained(hf))
    parts = partial(embed_before_and_after, models, trained)
    passages = read_passages(corpus, settings.data.validation_fraction, trained[1])
    followed = len(passages.queries)
    few = f"{len(passages.texts)} passages of {TOKENS} tokens are held out, {followed} with a next one: too few"
    recalls = None
    if passages.are_enough:
        held_out, among = len(np.unique(passages.documents)), passages.candidates
        title = f"recall at 1 among {among}: {len(passages.texts):,} passages, {held_out} held-out documents"
        texts = [(text,) for text in passages.texts]
        recalls = compare(title, passages, *parts(texts, LENGTH), NAMES)
    elif table:
        print(f"{few} for recall")
    else:
        raise UserError(f"{corpus.path}: {few} for recall; set --probe_file.")
    if table:
        what = f"{rows.metric} of linear models on {len(table.texts):,} rows, in folds"
        title = f"{what}; change: against the mean before"
        length = options.max_length or settings.data.seq_length
        compare(title, probe, *parts(table.texts, length), LABELS, "mean")
    records = [r for r in read_jsonl(folder.metrics) if r["split"] == "validation"]
    draw(run / "first_look.png", recalls, records)
    print_summary([("picture", run / "first_look.png")])
    return 0


if __name__ == "__main__":
    run_command(main)
