"""Prints what a corpus holds and what training sees of it, and draws one picture.

Counts come from the manifest. The rest is measured on a sample: on all rows of a small corpus, on
every n-th row of a large one, which is a fair share of all sources and files.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from tokenizers import Tokenizer

from data_prep.drops import DropLog
from data_prep.examples import ExampleStream, SpecialIds
from data_prep.report import report
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


class TrainingFacts(NamedTuple):
    """The examples that sampled rows give in the first epoch."""

    examples: int  # number of examples measured
    padding: float  # share of the positions of a sequence
    cut: float  # share of the chosen tokens left out: their sentence alone is longer than a part
    ordered: float  # share of the parts that have two segments
    seen: np.ndarray  # (3,) share of the sentences that the epoch shows 0, 1, and more times


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


def measure_training(
    corpus: Corpus, rows: range, special: SpecialIds, seq_length: int
) -> TrainingFacts:
    """Builds the first epoch's examples of the sampled rows, as training does, and measures them.

    Raises:
        UserError: `seq_length` leaves no room for text.
    """
    stream = ExampleStream(corpus, special, seq_length=seq_length, seed=0, validation_fraction=0.0)
    seen = np.zeros(3, np.int64)
    examples = filled = left_out = chosen = ordered = 0
    for row in rows:
        offsets = corpus.row(row).offsets.astype(np.int64)
        times = np.zeros(len(offsets) - 1, np.int64)
        for example in stream.examples_of_row(row, epoch=0):
            first, end = example.parts[0].first, example.parts[-1].end
            times[first:end] += 1  # parts are consecutive
            examples += 1
            filled += int(example.attention_mask.sum())
            left_out += example.cut_tokens
            chosen += int(offsets[end] - offsets[first])
            ordered += sum(part.cut < part.end for part in example.parts)
        seen += np.bincount(np.minimum(times, 2), minlength=3)
    parts = max(examples * stream.num_parts, 1)
    padding, cut = 1 - filled / (parts * seq_length), left_out / max(chosen, 1)
    return TrainingFacts(examples, padding, cut, ordered / parts, seen / seen.sum())


def fitting_length(corpus: Corpus, special: SpecialIds) -> tuple[int, float]:
    """Returns the longest of `LENGTHS` with little padding, or the best one; and its padding."""
    rows = sample_rows(corpus, LENGTH_TOKENS)
    lengths = [length for length in LENGTHS if length >= len(special.facets) + 16]
    found = [(n, measure_training(corpus, rows, special, n).padding) for n in lengths]
    fitting = [entry for entry in found if entry[1] <= MOST_PADDING]
    return fitting[-1] if fitting else min(found, key=lambda entry: entry[1])


def print_stats(options: ExampleOptions) -> None:
    """Prints what a finished corpus holds, and draws the lengths of its texts to CORPUS.png.

    Raises:
        UserError: The corpus is not finished, or `seq_length` is too short.
    """
    corpus = Corpus.open(options.corpus)
    tokenizer = Tokenizer.from_file(str(corpus.path / "tokenizer.json"))
    try:
        special = special_ids(corpus, tokenizer, options.num_facets)
    except UserError as error:
        training = [("not measured", str(error))]
    else:
        training = _training(corpus, special, options.seq_length)
    documents = document_lengths(corpus)
    sentences = np.concatenate([np.diff(corpus.row(row).offsets) for row in sample_rows(corpus)])
    lengths = {
        "sentences a document": documents[0],
        "tokens a document": documents[1],
        "tokens a sentence": sentences,
    }
    print_summary([("corpus", visible(str(corpus.path))), *_holdings(corpus)])
    sources = pd.DataFrame(corpus.manifest["sources"]).T.rename(index=visible)
    print(f"\n{sources.map('{:,}'.format).to_string()}\n")
    table = {name: pd.Series(values).describe(PERCENTILES) for name, values in lengths.items()}
    print(pd.DataFrame(table).T.to_string(float_format="{:,.1f}".format), end="\n\n")
    _print_dropped(corpus)
    title = f"one epoch at seq_length {options.seq_length} with {options.num_facets} facets"
    print_summary([("training", title), *training])
    picture = corpus.path.resolve().with_name(f"{corpus.path.resolve().name}.png")
    try:
        _draw(picture, lengths)
    except OSError as error:
        raise UserError(f"{picture}: the picture cannot be written: {error.strerror}.") from None
    print(f"\npicture: {picture}")


def visible(text: str) -> str:
    """Returns the text on one line, with control and other unprintable characters as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _holdings(corpus: Corpus) -> list[tuple[str, str]]:
    manifest, units = corpus.manifest, ("document", "sentence", "token")
    size = sum(entry["bytes"] for entry in corpus.files.values()) / 1e6
    rows, shards = count(corpus.num_rows, "row"), count(corpus.num_shards, "shard")
    used, joined = np.count_nonzero(corpus.document_frequency), manifest["joined_documents"]
    return [
        ("holds", ", ".join(count(manifest[f"{unit}s"], unit) for unit in units)),
        ("on disk", f"{rows} in {shards}, {size:,.1f} MB"),
        ("tokenizer", f"{used:,} of {corpus.vocabulary_size:,} ids occur"),
        ("joined", f"{joined['short']:,} short documents became {joined['joined']:,}"),
    ]


def _print_dropped(corpus: Corpus) -> None:
    samples = read_json(corpus.path / "dropped.json")
    print(f"kept: {report(DropLog(corpus.manifest['drops']))[0][1]}; left out:")
    for reason, number in sorted(corpus.manifest["dropped"].items(), key=lambda item: -item[1]):
        print(f"{number:,}  {visible(reason)}")
        for sample in samples.get(reason, [])[:SHOWN_DROPS]:
            line = visible(f"{sample['text']} ({sample['source']}: {sample['document']})")
            print(f"      {line if len(line) <= 110 else line[:109] + '…'}")
    print()


def _training(corpus: Corpus, special: SpecialIds, seq_length: int) -> list[tuple[str, str]]:
    facts = measure_training(corpus, sample_rows(corpus), special, seq_length)
    if not facts.examples:
        return [("no example", "no document has three sentences")]
    length, padding = fitting_length(corpus, special)
    fit = f"data.seq_length={length} has {padding:.1%} padding"
    if facts.padding > MOST_PADDING:
        fit += "; or join short documents (--short_documents join)"
    return [
        ("padding", f"{facts.padding:.1%} of the positions"),
        ("tokens cut", f"{facts.cut:.2%}"),
        ("parts with an order", f"{facts.ordered:.1%}, the others are a single sentence"),
        ("sentences seen 0, 1, 2+ times", ", ".join(f"{share:.1%}" for share in facts.seen)),
        ("examples measured", f"{facts.examples:,}"),
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
