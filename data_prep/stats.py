"""Prints what a corpus holds and what training sees of it, and draws one picture.

Counts come from the manifest. The rest is measured on a sample: on all rows of a small corpus, on
every n-th row of a large one, which is a fair share of all sources and files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from tokenizers import Tokenizer

from data_prep.drops import DropLog
from data_prep.examples import ExampleStream, SpecialIds, TrainingExample
from data_prep.settings import ExampleOptions
from data_prep.show import special_ids
from multicls.console import count, print_summary
from multicls.corpus import Corpus
from multicls.errors import UserError
from multicls.files import atomic_write, read_json

SAMPLE_TOKENS = 2_000_000  # rows with about as many are measured, a matter of seconds
LENGTH_TOKENS = 200_000  # and of these as many for each other length
SHOWN_DROPS = 3  # samples of dropped text for each reason
PERCENTILES = [0.05, 0.25, 0.5, 0.75, 0.95]
LENGTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512)  # from which one is recommended
MOST_PADDING = 0.2
UNITS = ("document", "row", "sentence", "token")


def sample_rows(corpus: Corpus, tokens: int = SAMPLE_TOKENS) -> range:
    """Returns the rows to measure, which hold about `tokens` tokens together."""
    step = max(1, corpus.manifest["tokens"] // tokens)
    return range(min(step // 2, corpus.num_rows - 1), corpus.num_rows, step)


def document_lengths(corpus: Corpus) -> np.ndarray:
    """Returns the number of sentences and of tokens of each document, (2, D)."""
    shards = list(map(corpus.shard, range(corpus.num_shards)))
    columns = [np.stack([np.diff(s.row_starts), s.num_tokens]).astype(np.int64) for s in shards]
    hashes = np.concatenate([shard.hashes for shard in shards])
    begins = np.flatnonzero(np.append(True, np.diff(hashes) != 0))  # of rows of one document
    return np.add.reduceat(np.concatenate(columns, axis=1), begins, axis=1)


def sampled_examples(
    corpus: Corpus, special: SpecialIds, seq_length: int, tokens: int = SAMPLE_TOKENS
) -> list[TrainingExample]:
    """Builds the first epoch's examples of sampled rows, as training does."""
    stream = ExampleStream(corpus, special, seq_length=seq_length, seed=0, validation_fraction=0.0)
    rows = sample_rows(corpus, tokens)
    return [example for row in rows for example in stream.examples_of_row(row, epoch=0)]


def padding_of(examples: list[TrainingExample]) -> float:
    """Returns the share of the positions that are padding."""
    return 1 - float(np.mean([example.attention_mask for example in examples]))


def fitting_length(corpus: Corpus, special: SpecialIds) -> tuple[int, float]:
    """Returns the longest of `LENGTHS` with little padding, or the best one; and its padding."""
    found = [
        (length, padding_of(sampled_examples(corpus, special, length, LENGTH_TOKENS)))
        for length in LENGTHS
        if length >= len(special.facets) + 16
    ]
    fitting = [entry for entry in found if entry[1] <= MOST_PADDING]
    return fitting[-1] if fitting else min(found, key=lambda entry: entry[1])


def print_stats(options: ExampleOptions) -> None:
    """Prints what a finished corpus holds, and draws the lengths of its texts to CORPUS.png."""
    corpus = Corpus.open(options.corpus)
    training = _training(corpus, options)
    (sentences, tokens), rows = document_lengths(corpus), sample_rows(corpus)
    lengths = {
        "sentences a document": sentences,
        "tokens a document": tokens,
        "tokens a sentence": np.concatenate([np.diff(corpus.row(row).offsets) for row in rows]),
    }
    manifest = corpus.manifest
    size = sum(entry["bytes"] for entry in corpus.files.values()) / 1e6
    print_summary(
        [
            ("corpus", visible(str(corpus.path))),
            ("holds", ", ".join(count(manifest[f"{unit}s"], unit) for unit in UNITS)),
            ("on disk", f"{count(corpus.num_shards, 'shard')}, {size:,.1f} MB"),
            ("kept", DropLog(manifest["drops"]).kept()),
        ]
    )
    sources = pd.DataFrame(manifest["sources"]).T.rename(index=visible)
    print(f"\n{sources.map('{:,}'.format).to_string()}\n")
    table = {name: pd.Series(values).describe(PERCENTILES) for name, values in lengths.items()}
    print(pd.DataFrame(table).T.to_string(float_format="{:,.1f}".format), end="\n\n")
    samples = read_json(corpus.path / "dropped.json")
    for reason, number in sorted(manifest["dropped"].items(), key=lambda item: -item[1]):
        print(f"left out: {number:,}  {visible(reason)}")
        for sample in samples.get(reason, [])[:SHOWN_DROPS]:
            line = visible(f"{sample['text']} ({sample['source']}: {sample['document']})")
            print(f"      {line[:110]}")
    print()
    print_summary(training)
    picture = corpus.path.resolve().with_name(f"{corpus.path.resolve().name}.png")
    try:
        _draw(picture, lengths)
    except OSError as error:
        raise UserError(f"{picture}: the picture cannot be written: {error.strerror}.") from None
    print(f"\npicture: {picture}")


def visible(text: str) -> str:
    """Returns the text on one line, with control and other unprintable characters as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _training(corpus: Corpus, options: ExampleOptions) -> list[tuple[str, str]]:
    """Returns lines on the examples of an epoch, and the length that fits."""
    length, facets = options.seq_length, options.num_facets
    lines = [("training", f"one epoch at seq_length {length} with {facets} facets")]
    try:
        tokenizer = Tokenizer.from_file(str(corpus.path / "tokenizer.json"))
        special = special_ids(corpus, tokenizer, facets)
    except UserError as error:
        return [*lines, ("not measured", str(error))]
    examples = sampled_examples(corpus, special, length)
    if not examples:
        return [*lines, ("no example", "no document has three sentences")]
    fitting, padding = fitting_length(corpus, special)
    fit = f"data.seq_length={fitting} has {padding:.1%} padding"
    if (padding := padding_of(examples)) > MOST_PADDING:
        fit += "; or join short documents (--short_documents join)"
    ordered = np.mean([example.so_labels >= 0 for example in examples])
    cut = np.mean([example.cut_tokens for example in examples]) / examples[0].input_ids.size
    return [
        *lines,
        ("padding", f"{padding:.1%} of the positions"),
        ("tokens cut", f"{cut:.2%} of the positions"),
        ("parts with an order", f"{ordered:.1%}, the others are a single sentence"),
        ("examples measured", f"{len(examples):,}"),
        ("length that fits", fit),
    ]


def _draw(picture: Path, lengths: dict[str, np.ndarray]) -> None:
    """Draws histograms of lengths in greys, and writes the picture atomically."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), dpi=150, layout="constrained")
    for axes, (name, values) in zip(figure.subplots(1, 3), lengths.items(), strict=True):
        edges = np.unique(np.geomspace(1, values.max() + 1, 60).astype(np.int64))
        axes.stairs(np.histogram(values, edges)[0], edges, fill=True, color="0.7")
        axes.axvline(np.median(values), color="black", label=f"median: {np.median(values):,.0f}")
        axes.set(xscale="log", xlabel=name, ylabel="number")
        axes.legend()
    with atomic_write(picture, "wb") as file:
        figure.savefig(file, format="png")
