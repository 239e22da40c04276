"""Prints what a corpus holds and what training sees of it, and draws one picture.

Counts come from the manifest. The rest is measured on a sample: on all rows of a small corpus, on every n-th row of a
large one. Rows stand in the order of the input, so every n-th row is a fair share of all sources and files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from data_prep.examples import ExampleStream, SpecialIds
from data_prep.show import special_ids
from multicls.corpus import Corpus
from multicls.errors import UserError
from multicls.files import atomic_write, read_json
from multicls.words import counted

if TYPE_CHECKING:
    from rich.console import Console
    from tokenizers import Tokenizer

SAMPLE_TOKENS = 10_000_000  # rows with about as many are measured, a matter of seconds
SHOWN_DROPS = 3  # samples of dropped text for each reason
FOLDS = 5  # of the cross-validation
MIN_LABELS = 50  # parts of each order that the cross-validation needs
COVERAGE = (0.5, 0.9, 0.99)
PERCENTILES = (5, 50, 95, 100)


def sample_rows(corpus: Corpus) -> range:
    """Returns the rows to measure, which hold about `SAMPLE_TOKENS` tokens together."""
    step = max(1, corpus.manifest["tokens"] // SAMPLE_TOKENS)
    return range(step // 2, corpus.num_rows, step)


def document_lengths(corpus: Corpus) -> np.ndarray:
    """Returns the number of sentences and of tokens of each document, (2, D), from the offsets of all rows."""
    shards = list(map(corpus.shard, range(corpus.num_shards)))
    rows = [np.stack([np.diff(shard.row_starts), shard.num_tokens]).astype(np.int64) for shard in shards]
    hashes = np.concatenate([shard.hashes for shard in shards])
    begins = np.flatnonzero(np.append(True, hashes[1:] != hashes[:-1]))  # a document may go on in the next shard
    return np.add.reduceat(np.concatenate(rows, axis=1), begins, axis=1)


@dataclass(frozen=True)
class SampledText:
    """The tokens of the sampled rows."""

    sentence_lengths: np.ndarray  # (S,) number of tokens of each sentence
    token_counts: np.ndarray  # (V,) number of occurrences of each id
    unknown: dict[str, tuple[int, int]]  # number of [UNK] and of all tokens, by source

    @property
    def coverage(self) -> np.ndarray:
        """Share of all tokens that the most frequent 1, 2, ... ids cover; one entry for each id that occurs."""
        counts = np.sort(self.token_counts[self.token_counts > 0])[::-1]
        shares: np.ndarray = np.cumsum(counts) / counts.sum()
        return shares


def measure_text(corpus: Corpus, rows: range, unknown_id: int | None) -> SampledText:
    """Counts the tokens of the sampled rows."""
    found = [corpus.row(number) for number in rows]
    unknown: dict[str, tuple[int, int]] = {}
    for row in found:
        before, total = unknown.get(row.source, (0, 0))
        here = 0 if unknown_id is None else int(np.count_nonzero(row.tokens == unknown_id))
        unknown[row.source] = before + here, total + len(row.tokens)
    counts = np.bincount(np.concatenate([row.tokens for row in found]), minlength=corpus.vocabulary_size)
    return SampledText(np.concatenate([np.diff(row.offsets) for row in found]), counts, unknown)


class LengthBaseline(NamedTuple):
    """Scores of a model that predicts the order of two segments from their lengths, in cross-validation."""

    parts: int  # number of parts with two segments
    accuracy: float  # share of the parts whose order is predicted
    error: float  # binomial standard error; the folds share training parts, so it is about a fifth too small
    log_loss: float  # mean cross-entropy in nats; ln 2 = 0.6931 for a constant prediction


def length_baseline(placed: np.ndarray, swapped: np.ndarray) -> LengthBaseline | None:
    """Predicts the order of two segments from their lengths by boosted trees, in seeded five-fold cross-validation.

    A model of sentence order learns from the text only what it predicts better than this.

    Args:
        placed: (n, 2) tokens of the segment placed first and of the one placed second.
        swapped: (n,) bool, the label.

    Returns:
        The accuracy on held-out parts; None if a label has fewer than `MIN_LABELS` parts.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    if np.bincount(swapped, minlength=2).min() < MIN_LABELS:
        return None
    features = np.column_stack([placed, placed[:, 0] - placed[:, 1]])
    # Small, slow trees: with more of them, the log loss of parts without any leak rises above ln 2.
    trees = HistGradientBoostingClassifier(
        max_iter=50, learning_rate=0.05, max_leaf_nodes=8, min_samples_leaf=50, early_stopping=False
    )
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    probabilities = cross_val_predict(trees, features, swapped, cv=folds, method="predict_proba")
    correct = probabilities.argmax(axis=1) == swapped
    of_label = np.take_along_axis(probabilities, swapped[:, None].astype(int), axis=1)
    error = correct.std() / len(correct) ** 0.5
    return LengthBaseline(len(correct), float(correct.mean()), float(error), float(-np.log(of_label).mean()))


@dataclass(frozen=True)
class Training:
    """The examples that the sampled rows give in the first epoch."""

    examples_per_epoch: int  # of the whole corpus, nothing held out
    examples: int  # number of examples measured
    padding: float  # share of the positions of a sequence
    cut: float  # share of the chosen tokens left out, because their sentence alone is longer than a part
    single: float  # share of the parts that are a single sentence, which has no order to tell
    lengths: LengthBaseline | None  # None if there are too few parts
    seen: np.ndarray  # (4,) number of sentences that the epoch shows 0, 1, 2, and more times


def measure_training(corpus: Corpus, rows: range, special: SpecialIds, seq_length: int) -> Training:
    """Builds the first epoch's examples of the sampled rows, as training does, and measures them.

    Raises:
        UserError: `seq_length` leaves no room for text.
    """
    stream = ExampleStream(corpus, special, seq_length=seq_length, seed=0, validation_fraction=0.0)
    seen = np.zeros(4, np.int64)
    sums = np.zeros(4, np.int64)  # examples, filled positions, tokens left out, tokens chosen
    tables = [np.zeros((0, 4), np.int64)]  # for each part: tokens of both segments, has_two_segments, swapped
    for row in rows:
        offsets = corpus.row(row).offsets.astype(np.int64)
        times = np.zeros(len(offsets) - 1, np.int64)
        for example in stream.examples_of_row(row, epoch=0):
            first, cut, end, swapped = np.array(example.parts, np.int64).T
            times[first[0] : end[-1]] += 1  # parts are consecutive
            chosen = offsets[end[-1]] - offsets[first[0]]
            sums += [1, example.attention_mask.sum(), example.cut_tokens, chosen]
            tokens = offsets[cut] - offsets[first], offsets[end] - offsets[cut]
            tables.append(np.column_stack([*tokens, cut < end, swapped]))
        seen += np.bincount(np.minimum(times, 3), minlength=4)
    parts = np.concatenate(tables)
    ordered = parts[parts[:, 2] == 1]
    swapped = ordered[:, 3] == 1
    examples, filled, left_out, all_chosen = sums.tolist()
    return Training(
        examples_per_epoch=stream.examples_per_epoch,
        examples=examples,
        padding=1 - filled / max(len(parts) * seq_length, 1),
        cut=left_out / max(all_chosen, 1),
        single=1 - len(ordered) / max(len(parts), 1),
        lengths=length_baseline(np.where(swapped[:, None], ordered[:, 1::-1], ordered[:, :2]), swapped),
        seen=seen,
    )


def stats(folder: str | Path, picture: str | Path, seq_length: int, num_facets: int) -> None:
    """Prints what a finished corpus holds and draws it to `picture`, a PNG file.

    Raises:
        UserError: the corpus is not finished, `seq_length` is too short, or `picture` is a folder.
    """
    from rich.console import Console
    from tokenizers import Tokenizer

    if Path(picture).is_dir():
        raise UserError(f"{picture}: a folder; give the name of the PNG file to write.")
    console = Console(markup=False, highlight=False, emoji=False)  # names in a corpus are no markup
    corpus = Corpus.open(folder)
    tokenizer = Tokenizer.from_file(str(corpus.path / "tokenizer.json"))
    rows = sample_rows(corpus)
    try:
        special = special_ids(corpus, tokenizer, num_facets)
    except UserError as error:
        training = {"": f"not measured: {error}"}
    else:
        training = _training_facts(measure_training(corpus, rows, special, seq_length))
    text = measure_text(corpus, rows, _unknown_id(corpus, tokenizer))
    _print_table(console, ["corpus", visible(str(corpus.path))], _corpus_facts(corpus, rows).items(), "left")
    _print_sources(console, corpus, text)
    _print_lengths(console, corpus, text)
    _print_dropped(console, corpus)
    _print_table(console, ["vocabulary", ""], _vocabulary_facts(corpus, text).items(), "left")
    title = f"one epoch at seq_length {seq_length} with {num_facets} facets"
    _print_table(console, ["training", title], training.items(), "left")
    _draw(picture, corpus, text)
    console.print(f"picture: {picture}", soft_wrap=True)


def _unknown_id(corpus: Corpus, tokenizer: Tokenizer) -> int | None:
    """Returns the id of [UNK], whatever its name; None for a byte-level vocabulary, which needs none."""
    model = read_json(corpus.path / "tokenizer.json")["model"]
    number: int | None = model.get("unk_id")  # unigram models have a number, the others a name
    return tokenizer.token_to_id(model["unk_token"]) if model.get("unk_token") else number


def visible(text: str) -> str:
    """Returns the text on one line, with control and other unprintable characters as escapes."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def _totals(corpus: Corpus) -> str:
    return ", ".join(counted(corpus.manifest[f"{unit}s"], unit) for unit in ("document", "sentence", "token"))


def _print_table(
    console: Console, names: Sequence[str], rows: Iterable[Sequence[str]], justify: Literal["left", "right"] = "right"
) -> None:
    """Prints a table; all columns but the first are justified to one side."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for i, name in enumerate(names):
        table.add_column(name, justify=justify if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()


def _corpus_facts(corpus: Corpus, rows: range) -> dict[str, str]:
    size = sum(entry["bytes"] for entry in [*corpus.manifest["shards"], *corpus.manifest["files"].values()])
    return {
        "holds": _totals(corpus),
        "on disk": f"{counted(corpus.num_rows, 'row')} in {counted(corpus.num_shards, 'shard')}, {size / 1e6:,.1f} MB",
        "tokenizer": f"vocabulary {corpus.vocabulary_size:,}, {corpus.manifest['tokenizer']['dtype']}",
        "measured on": f"{counted(len(rows), 'row')} ({'all' if rows.step == 1 else f'one in {rows.step}'})",
    }


def _print_sources(console: Console, corpus: Corpus, text: SampledText) -> None:
    rows = []
    for name, counts in corpus.manifest["sources"].items():
        unknown, tokens = text.unknown.get(name, (0, 0))
        shares = counts["tokens"] / corpus.manifest["tokens"], counts["tokens"] / counts["sentences"]
        numbers = [f"{counts[unit]:,}" for unit in ("documents", "sentences", "tokens")]
        last = _percent(unknown / tokens, 3) if tokens else "-"
        rows.append([visible(name), *numbers, _percent(shares[0]), f"{shares[1]:.1f}", last])
    _print_table(console, ["source", "documents", "sentences", "tokens", "of all", "a sentence", "unknown"], rows)


def _print_lengths(console: Console, corpus: Corpus, text: SampledText) -> None:
    sentences, tokens = document_lengths(corpus)
    rows = []
    measured = {
        "sentences a document": sentences,
        "tokens a document": tokens,
        "tokens a sentence": text.sentence_lengths,
    }
    for name, lengths in measured.items():
        percentiles = np.percentile(lengths, PERCENTILES, method="inverted_cdf").tolist()
        rows.append([name, f"{lengths.mean():,.1f}", *(f"{value:,}" for value in percentiles)])
    _print_table(console, ["lengths", "mean", "5 %", "median", "95 %", "max"], rows)


def _print_dropped(console: Console, corpus: Corpus) -> None:
    dropped: dict[str, int] = corpus.manifest["dropped"]
    samples = read_json(corpus.path / "dropped.json")
    console.print("dropped" if dropped else "dropped: nothing", style="bold")
    width = max((len(f"{number:,}") for number in dropped.values()), default=0)
    for reason, number in sorted(dropped.items(), key=lambda item: -item[1]):
        console.print(f"{number:{width},}  {visible(reason)}")
        for sample in samples.get(reason, [])[:SHOWN_DROPS]:
            line = f"{'':{width}}    {sample['text']} ({sample['source']}: {sample['document']})"
            console.print(visible(line), no_wrap=True, overflow="ellipsis", style="dim")
    console.print()


def _vocabulary_facts(corpus: Corpus, text: SampledText) -> dict[str, str]:
    coverage, size = text.coverage, corpus.vocabulary_size
    unknown, tokens = (sum(column) for column in zip(*text.unknown.values(), strict=True))
    return {
        "ids that occur": f"{np.count_nonzero(corpus.document_frequency):,} of {size:,}",
        "cover 50, 90, 99 % of tokens": ", ".join(f"{np.searchsorted(coverage, share) + 1:,}" for share in COVERAGE),
        "unknown tokens": f"{unknown:,} ({_percent(unknown / tokens, 4)})",
    }


def _training_facts(training: Training) -> dict[str, str]:
    never, once, twice, more = training.seen / training.seen.sum()
    found = training.lengths
    if found is None:
        order = f"not measured: fewer than {MIN_LABELS} parts of each order"
    else:
        order = f"{found.accuracy:.4f} ± {found.error:.4f} right, log loss {found.log_loss:.4f}"
    return {
        "examples an epoch": f"{training.examples_per_epoch:,}",
        "padding": _percent(training.padding),
        "tokens cut": _percent(training.cut, 2),
        "parts with an order": f"{_percent(1 - training.single)}, the others are a single sentence",
        "order from lengths alone": order,
        "sentences seen 0, 1, 2+ times": ", ".join(map(_percent, (never, once, twice + more))),
        "examples measured": f"{training.examples:,}",
    }


def _draw(picture: str | Path, corpus: Corpus, text: SampledText) -> None:
    """Draws sentence lengths and vocabulary coverage in greys, and writes the picture atomically."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=150, layout="constrained")
    name = visible(corpus.path.resolve().name)[:40].replace("$", r"\$")  # a dollar starts no formula
    figure.suptitle(f"{name}: {_totals(corpus)}")
    left, right = figure.subplots(1, 2)
    median, most, end = np.percentile(text.sentence_lengths, (50, 95, 99.5), method="inverted_cdf").tolist()
    shares = 100 * np.bincount(text.sentence_lengths)[: end + 1] / len(text.sentence_lengths)
    left.bar(np.arange(len(shares)), shares, width=1, color="0.7")
    left.axvline(median, color="black", label=f"median: {median}")
    left.axvline(most, color="black", linestyle="--", label=f"95 %: {most}")
    left.set(title="Sentence length", xlabel="tokens a sentence (up to 99.5 %)", ylabel="share of sentences (%)")
    left.legend()
    coverage = text.coverage
    right.plot(np.arange(1, len(coverage) + 1), 100 * coverage, color="black")
    for share in COVERAGE:
        place = int(np.searchsorted(coverage, share)) + 1
        label = f"{place:,} ids: {_percent(share, 0)}"
        right.annotate(label, (place, 100 * share), (-8, 0), textcoords="offset points", ha="right")
        right.plot(place, 100 * share, "o", color="black")
    right.set(title="Vocabulary", xlabel="most frequent ids", ylabel="share of tokens covered (%)", xscale="log")
    with atomic_write(picture, "wb") as file:
        figure.savefig(file, format="png")
