"""What a corpus folder holds and what training will see of it: tables on the terminal, and one picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.show import special_ids
from data_prep.triples import SpecialIds, TripleStream
from multicls.corpus import Corpus, Shard
from multicls.errors import UserError
from multicls.files import atomic_write, read_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from tokenizers import Tokenizer

BLOCK = 1 << 22  # pieces counted at a time: bincount makes int64 of them
SAMPLE_PIECES = 10_000_000  # rows of about as many are looked at, a matter of seconds
SAMPLES = 3  # of dropped text, a reason
FOLDS = 5  # of the cross-validation
FEWEST_LABELS = 50  # parts of each order that the cross-validation needs at least
COVERAGE = (0.5, 0.9, 0.99)
MOST_BARS = 10
BAR: dict[str, Any] = {"color": "0.7", "edgecolor": "black", "linewidth": 0.8}


class Tally:
    """How often each value of a whole quantity occurs: exact, and no larger than there are different values.

    Attributes:
        values: (n,) int64, ascending.
        counts: (n,) int64.
    """

    def __init__(self) -> None:
        self.values = np.zeros(0, np.int64)
        self.counts = np.zeros(0, np.int64)

    def add(self, values: np.ndarray) -> None:
        """Counts an array of values."""
        new, counts = np.unique(values, return_counts=True)
        counts = np.concatenate([self.counts, counts])
        self.values, where = np.unique(np.concatenate([self.values, new]), return_inverse=True)
        self.counts = np.zeros(len(self.values), np.int64)
        np.add.at(self.counts, where, counts)

    def __len__(self) -> int:
        return int(self.counts.sum())

    def sum(self) -> int:
        """The sum of all values counted."""
        return int(self.values @ self.counts)

    def percentile(self, percent: float) -> int:
        """The smallest value that at least so many percent of all values do not exceed."""
        return int(self.values[np.searchsorted(np.cumsum(self.counts), percent / 100 * len(self))])


class Contents:
    """What the shards of a corpus hold.

    Attributes:
        document_sentences, document_pieces, sentence_pieces: lengths.
        piece_counts: (V,) int64, how often each id occurs.
        sources: for each, (4,) int64: documents, sentences, pieces, pieces for what the vocabulary has not.
    """

    def __init__(self, vocabulary_size: int) -> None:
        self.document_sentences, self.document_pieces, self.sentence_pieces = Tally(), Tally(), Tally()
        self.piece_counts = np.zeros(vocabulary_size, np.int64)
        self.sources: dict[str, np.ndarray] = {}

    def add_documents(self, lengths: np.ndarray) -> None:
        """Adds documents by their sentences and pieces, (2, n)."""
        self.document_sentences.add(lengths[0])
        self.document_pieces.add(lengths[1])

    @property
    def totals(self) -> str:
        """Documents, sentences and pieces, for people."""
        numbers = len(self.document_pieces), len(self.sentence_pieces), self.sentence_pieces.sum()
        return "{:,} documents, {:,} sentences, {:,} pieces".format(*numbers)

    @property
    def curve(self) -> np.ndarray:
        """(ids that occur,) share of all pieces that the most frequent 1, 2, ... ids cover."""
        counts = np.sort(self.piece_counts[self.piece_counts > 0])[::-1]
        shares: np.ndarray = np.cumsum(counts) / counts.sum()
        return shares


def count(corpus: Corpus, unknown: int | None, numbers: Iterable[int]) -> Contents:
    """Counts everything in the shards `numbers`, one shard in memory at a time; `unknown` is the id of [UNK].

    Neighbouring rows of one hash are the runs of one document, also from a shard to the next.
    """
    contents = Contents(corpus.vocabulary_size)
    last_hash, rest = None, np.zeros((2, 0), np.int64)  # the document that may go on: its sentences and pieces
    for number in numbers:
        shard = Shard(corpus.path / corpus.manifest["shards"][number]["name"])  # not kept, so its pages are let go
        contents.sentence_pieces.add(np.diff(shard.sentences))
        for start in range(0, len(shard.tokens), BLOCK):
            block = shard.tokens[start : start + BLOCK]
            contents.piece_counts += np.bincount(block, minlength=corpus.vocabulary_size)
        rows = np.stack([np.diff(shard.documents), shard.num_tokens]).astype(np.int64)
        begins = np.flatnonzero(np.append(True, shard.hashes[1:] != shard.hashes[:-1]))
        lengths = np.add.reduceat(rows, begins, axis=1)
        if shard.hashes[0] == last_hash:
            lengths[:, :1] += rest
            begins = begins[1:]
        else:
            contents.add_documents(rest)
        last_hash, rest = shard.hashes[-1], lengths[:, -1:]
        contents.add_documents(lengths[:, :-1])
        strange = shard.tokens == unknown if unknown is not None else np.zeros(len(shard.tokens), bool)
        strange = np.add.reduceat(strange, shard.sentences[shard.documents[:-1]], dtype=np.int64)
        numbers_of_row = np.stack([np.isin(np.arange(len(strange)), begins), *rows, strange])
        for code, name in enumerate(shard.source_names):
            found = numbers_of_row[:, shard.source_codes == code].sum(axis=1)
            contents.sources[name] = contents.sources.get(name, 0) + found
    contents.add_documents(rest)
    return contents


@dataclass(frozen=True)
class LengthBaseline:
    """How well the lengths of two segments alone predict their order.

    Attributes:
        parts: number of parts with two segments.
        accuracy: share of the parts whose order is predicted, in cross-validation.
        error: binomial standard error of `accuracy`; the folds share training parts, so it is about a fifth too small.
        log_loss: mean cross-entropy of the predictions in nats; ln 2 = 0.6931 for a constant prediction.
    """

    parts: int
    accuracy: float
    error: float
    log_loss: float


def length_baseline(placed: np.ndarray, swapped: np.ndarray) -> LengthBaseline | None:
    """Predicts the order of two segments from their lengths by boosted trees, in seeded five-fold cross-validation.

    A model of sentence order learns from the text only what it predicts better than this.

    Args:
        placed: (n, 2) tokens of the segment placed first and of the one placed second.
        swapped: (n,) bool, the label.

    Returns:
        The accuracy on held-out parts; None if a label has fewer than `FEWEST_LABELS` parts.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    if np.bincount(swapped, minlength=2).min() < FEWEST_LABELS:
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
    """One epoch of training examples, measured on all examples of every `step`-th row.

    Attributes:
        examples_per_epoch: of the whole corpus, nothing held out.
        step: 1 where all rows were measured.
        rows, examples: what was measured.
        padding: share of the positions of a sequence.
        cut: share of the pieces chosen that do not fit, as their sentence alone is longer than a part.
        single: share of the parts that are a single sentence, which has no order to tell.
        short_segment: share of the parts with two segments that have a segment of a single sentence.
        lengths: how well segment lengths alone predict the order; None if there are too few parts to tell.
        seen: (4,) how many sentences the epoch shows never, once, twice, and more often.
    """

    examples_per_epoch: int
    step: int
    rows: int
    examples: int
    padding: float
    cut: float
    single: float
    short_segment: float
    lengths: LengthBaseline | None
    seen: np.ndarray


def measure(corpus: Corpus, special: SpecialIds, seq_length: int) -> Training:
    """Draws the first epoch's examples as training does: all of them or, of a large corpus, those of every n-th row.

    Rows stand in the order of the input, so every n-th is a fair share of all sources and files.

    Raises:
        UserError: `seq_length` leaves no room for text.
    """
    stream = TripleStream(corpus, special, seq_length=seq_length, seed=0, validation_fraction=0.0)
    step = max(1, corpus.manifest["tokens"] // SAMPLE_PIECES)
    rows = range(step // 2, corpus.num_documents, step)
    seen = np.zeros(4, np.int64)
    examples = filled = cut = chosen = single = short = 0
    placed: list[tuple[int, int]] = []  # tokens of the segment placed first and of the one placed second
    swapped: list[bool] = []
    for row in rows:
        offsets = corpus.document(row).offsets
        times = np.zeros(len(offsets) - 1, np.int64)
        for example in stream.examples_of(row, epoch=0):
            examples += 1
            filled += int(example.attention_mask.sum())
            cut += example.cut_pieces
            first, end = example.parts[0].first, example.parts[-1].end  # parts follow each other
            times[first:end] += 1
            chosen += int(offsets[end] - offsets[first])
            for part in example.parts:
                if part.cut == part.end:
                    single += 1
                    continue
                short += part.cut - part.first == 1 or part.end - part.cut == 1
                left, right = (int(n) for n in np.diff(offsets[[part.first, part.cut, part.end]]))
                placed.append((right, left) if part.swapped else (left, right))
                swapped.append(part.swapped)
        seen += np.bincount(np.minimum(times, 3), minlength=4)
    parts = examples * stream.num_parts
    return Training(
        examples_per_epoch=stream.examples_per_epoch,
        step=step,
        rows=len(rows),
        examples=examples,
        padding=1 - filled / (parts * seq_length),
        cut=cut / chosen,
        single=single / parts,
        short_segment=short / max(len(placed), 1),
        lengths=length_baseline(np.array(placed).reshape(-1, 2), np.array(swapped, bool)),
        seen=seen,
    )


def stats(folder: str | Path, picture: str | Path | None, seq_length: int, num_facets: int) -> None:
    """Prints what a corpus holds and draws it.

    Args:
        folder: a finished corpus.
        picture: the PNG file to write; None draws nothing.
        seq_length: L of the training examples that are measured.
        num_facets: K of them.

    Raises:
        UserError: no finished corpus, `seq_length` too short for the facets and text, or `picture` is a folder.
    """
    from rich.console import Console
    from rich.progress import track
    from tokenizers import Tokenizer

    if picture is not None and Path(picture).is_dir():
        raise UserError(f"{picture}: a folder; give the name of the PNG file to write.")
    console = Console(markup=False, highlight=False, emoji=False)  # names in a corpus are no markup
    corpus = Corpus.open(folder)
    tokenizer = Tokenizer.from_file(str(corpus.path / "tokenizer.json"))
    training: Training | str
    try:
        special = special_ids(corpus, tokenizer, num_facets)
    except UserError as error:
        training = f"not measured: {error}"
    else:
        training = measure(corpus, special, seq_length)
    shards = range(corpus.num_shards)
    numbers = track(shards, "reading", console=console, transient=True, disable=not console.is_terminal)
    contents = count(corpus, _unknown_id(corpus, tokenizer), numbers)
    _print_totals(console, corpus, contents)
    _print_lengths(console, contents)
    _print_dropped(console, corpus)
    _print_facts(console, "vocabulary", _vocabulary_facts(corpus, contents))
    title = f"training: one epoch at seq_length {seq_length} with {num_facets} facets"
    _print_facts(console, title, _training_facts(training))
    if picture is not None:
        _draw(picture, corpus, contents, training)
        console.print(f"picture: {picture}", soft_wrap=True)


def _unknown_id(corpus: Corpus, tokenizer: Tokenizer) -> int | None:
    """Id of [UNK], whatever its name; byte-level vocabularies need none."""
    model = read_json(corpus.path / "tokenizer.json")["model"]
    number: int | None = model.get("unk_id")  # unigram models have a number, the others a name
    return tokenizer.token_to_id(model["unk_token"]) if model.get("unk_token") else number


def visible(text: str) -> str:
    """The text on one line, with control and other unprintable characters as escapes."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def _print_table(console: Console, title: str, names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table with its first column to the left, numbers to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for i, name in enumerate((title, *names)):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()


def _print_facts(console: Console, title: str, facts: dict[str, str]) -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(name, value)
    console.print(title, style="bold")
    console.print(table)
    console.print()


def _print_totals(console: Console, corpus: Corpus, contents: Contents) -> None:
    manifest, made_from = corpus.manifest, corpus.manifest["made_from"]
    size = sum(entry["bytes"] for entry in [*manifest["shards"], *manifest["files"].values()])
    facts = {
        "holds": contents.totals,
        "on disk": f"{corpus.num_documents:,} rows in {corpus.num_shards:,} shards, {size / 1e6:,.1f} MB",
        "tokenizer": f"vocabulary {corpus.vocabulary_size:,}, {manifest['tokenizer']['dtype']}",
        "splitter": " ".join(map(str, made_from["splitter"].values())),
        "versions": ", ".join(f"{name} {version}" for name, version in made_from["packages"].items()),
    }
    _print_facts(console, visible(str(corpus.path)), facts)


def _print_lengths(console: Console, contents: Contents) -> None:
    rows = []
    for name in ("document_sentences", "document_pieces", "sentence_pieces"):
        tally: Tally = getattr(contents, name)
        over, of = name.split("_")
        percentiles = [f"{tally.percentile(percent):,}" for percent in (5, 50, 95, 100)]
        rows.append([f"{of} a {over}", f"{tally.sum() / len(tally):,.1f}", *percentiles])
    _print_table(console, "lengths", ["mean", "5 %", "median", "95 %", "max"], rows)
    rows = []
    for name, (documents, sentences, pieces, unknown) in contents.sources.items():
        shares = [_percent(pieces / contents.sentence_pieces.sum()), f"{pieces / sentences:.1f}"]
        totals = [f"{number:,}" for number in (documents, sentences, pieces)]
        rows.append([visible(name), *totals, *shares, _percent(unknown / pieces, 3)])
    names = ["documents", "sentences", "pieces", "of all", "a sentence", "unknown"]
    _print_table(console, "source", names, rows)


def _print_dropped(console: Console, corpus: Corpus) -> None:
    dropped: dict[str, int] = corpus.manifest["dropped"]
    path = corpus.path / "dropped.json"
    samples = read_json(path) if path.is_file() else {}
    console.print("dropped" if dropped else "dropped: nothing", style="bold")
    width = max((len(f"{number:,}") for number in dropped.values()), default=0)
    for reason, number in sorted(dropped.items(), key=lambda item: -item[1]):
        console.print(f"{number:{width},}  {visible(reason)}")
        for sample in samples.get(reason, [])[:SAMPLES]:
            line = f"{'':{width}}    {sample['source']}, {sample['document']}: {sample['text']}"
            console.print(visible(line), no_wrap=True, overflow="ellipsis", style="dim")
    console.print("(no samples: this corpus has no dropped.json)\n" if dropped and not path.is_file() else "")


def _covering(curve: np.ndarray, share: float) -> int:
    """How many of the most frequent ids cover a share of all pieces."""
    return int(np.searchsorted(curve, share)) + 1


def _vocabulary_facts(corpus: Corpus, contents: Contents) -> dict[str, str]:
    curve, size = contents.curve, corpus.vocabulary_size
    unknown = sum(int(numbers[3]) for numbers in contents.sources.values())
    return {
        "ids that occur": f"{len(curve):,} of {size:,} ({_percent(len(curve) / size)})",
        "in 10 documents or more": f"{np.count_nonzero(corpus.document_frequency >= 10):,}",
        "cover 50, 90, 99 % of pieces": ", ".join(f"{_covering(curve, share):,}" for share in COVERAGE),
        "unknown pieces": f"{unknown:,} ({_percent(unknown / contents.sentence_pieces.sum(), 4)})",
    }


def _training_facts(training: Training | str) -> dict[str, str]:
    if isinstance(training, str):
        return {"": training}
    rows = f"{training.rows:,} rows ({'all' if training.step == 1 else f'one in {training.step}'})"
    never, once, twice, more = training.seen / training.seen.sum()
    return {
        "examples an epoch": f"{training.examples_per_epoch:,}",
        "padding": _percent(training.padding),
        "pieces cut": _percent(training.cut, 2),
        "parts with an order": f"{_percent(1 - training.single)}, the others are a single sentence",
        "with a one-sentence segment": f"{_percent(training.short_segment)} of those",
        "order from lengths alone": _length_facts(training.lengths),
        "sentences seen 0, 1, 2+ times": ", ".join(map(_percent, (never, once, twice + more))),
        "shares measured on": f"{rows}, {training.seen.sum():,} sentences, {training.examples:,} examples",
    }


def _length_facts(found: LengthBaseline | None) -> str:
    if found is None:
        return f"not measured: fewer than {FEWEST_LABELS} parts of each order"
    return f"{found.accuracy:.4f} ± {found.error:.4f} right, log loss {found.log_loss:.4f}"


def _draw(picture: str | Path, corpus: Corpus, contents: Contents, training: Training | str) -> None:
    """Draws six panels, in greys so that a small print in black and white can be read; written atomically."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, hspace=0.04)  # inches, inches, share of a panel
    figure = Figure(figsize=(12, 7), dpi=150, layout=layout)
    figure.suptitle(f"{_label(corpus.path.resolve().name)}: {contents.totals}", fontsize=14)
    panels = figure.subplots(2, 3).flat
    titles = ("Sentence length", "Document length", "Sources", "Dropped", "Vocabulary", "Sentences in one epoch")
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=12, fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
    _draw_sentences(panels[0], contents.sentence_pieces)
    _draw_documents(panels[1], contents.document_pieces)
    total = contents.sentence_pieces.sum()
    shares = {name: 100 * numbers[2] / total for name, numbers in contents.sources.items()}
    _draw_bars(panels[2], shares, "share of pieces (%)", "{:.1f}")
    panels[2].set_xlim(0, 1.2 * max(shares.values()))
    dropped = {reason: number for reason, number in corpus.manifest["dropped"].items() if number}
    _draw_bars(panels[3], dropped, "count (log)", "{:,}")
    panels[3].set(xscale="log", xlim=(0.5, 10 * max(dropped.values(), default=1) ** 1.3))
    _draw_vocabulary(panels[4], contents.curve)
    _draw_epoch(panels[5], training)
    with atomic_write(picture, "wb") as file:
        figure.savefig(file, format="png")


def _label(text: str, most: int = 40) -> str:
    """Text for the picture: printable, short, and a dollar no formula."""
    text = visible(text)
    return (text if len(text) <= most else text[: most - 1] + "…").replace("$", r"\$")


def _draw_sentences(axes: Axes, tally: Tally) -> None:
    longest = tally.percentile(99.5)
    step = -(-longest // 40)
    edges = np.arange(1, longest + step + 1, step).tolist()
    axes.hist(tally.values, edges, weights=100 * tally.counts / len(tally), **BAR)
    for percent, style, name in ((50, "-", "median"), (95, "--", "95 %")):
        value = tally.percentile(percent)
        axes.axvline(value, color="black", linestyle=style, linewidth=1.2, label=f"{name}: {value}")
    axes.set(xlabel=f"pieces a sentence ({step} a bar; up to 99.5 %)", ylabel="share of sentences (%)")
    axes.legend(framealpha=1, edgecolor="white", loc="upper right")


def _draw_documents(axes: Axes, tally: Tally) -> None:
    edges = np.geomspace(tally.values[0] * 0.99, tally.values[-1] * 1.01, 41).tolist()
    axes.hist(tally.values, edges, weights=100 * tally.counts / len(tally), label="of documents", **BAR)
    weights = 100 * tally.counts * tally.values / tally.sum()
    line: dict[str, Any] = {"histtype": "step", "color": "black", "linewidth": 1.8}
    axes.hist(tally.values, edges, weights=weights, label="of pieces", **line)
    axes.set(xlabel="pieces a document (log)", ylabel="share (%)", xscale="log", ylim=(0, 1.2 * axes.get_ylim()[1]))
    axes.legend(frameon=False, loc="upper center", ncols=2, handlelength=1.5, columnspacing=1)


def _draw_bars(axes: Axes, values: dict[str, float], unit: str, form: str) -> None:
    """Horizontal bars, the largest on top, each with its value; the smallest of many are summed up."""
    ordered = sorted(values.items(), key=lambda item: -item[1])
    if len(ordered) > MOST_BARS:
        others = ordered[MOST_BARS - 1 :]
        ordered = [*ordered[: MOST_BARS - 1], (f"{len(others)} others", sum(value for _, value in others))]
    names, numbers = [_label(name, 26) for name, _ in ordered], [value for _, value in ordered]
    drawn = axes.barh(range(len(names)), numbers, height=0.65, **BAR)
    axes.bar_label(drawn, [form.format(number) for number in numbers], padding=3)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel=unit, ylim=(max(len(names), 4) - 0.4, -0.6))  # few bars stay thin


def _draw_vocabulary(axes: Axes, curve: np.ndarray) -> None:
    axes.plot(np.arange(1, len(curve) + 1), 100 * curve, color="black", linewidth=1.8)
    for share in COVERAGE:
        place = (_covering(curve, share), 100 * share)
        text = f"{place[0]:,} ids: {_percent(share, 0)}"
        axes.plot(*place, "o", color="black")
        axes.annotate(text, place, (-8, 0), textcoords="offset points", ha="right")
    axes.set(xlabel="most frequent ids (log)", ylabel="share of pieces covered (%)", xscale="log", ylim=(0, 104))


def _draw_epoch(axes: Axes, training: Training | str) -> None:
    if isinstance(training, str):
        import textwrap

        axes.set_axis_off()
        text = textwrap.fill(_label(training, 200), 34)
        axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
        return
    shares = 100 * training.seen / training.seen.sum()
    drawn = axes.bar(["0", "1", "2", "3+"], shares, width=0.65, **BAR)
    axes.bar_label(drawn, [f"{share:.1f}" for share in shares], padding=2)
    axes.set(xlabel="times that a sentence is seen", ylabel="share of sentences (%)", ylim=(0, 1.1 * shares.max()))
