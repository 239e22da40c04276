"""Statistics of a corpus against plain loops, on an invented corpus of three shards."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data_prep.examples import ExampleStream
from data_prep.stats import Contents, Tally, Training, count, length_baseline, measure, stats, visible
from multicls.corpus import FORMAT_VERSION, Corpus, ShardRow, occurrences, write_shard
from multicls.errors import UserError
from tests.data_prep.conftest import SPECIAL_IDS

UNKNOWN = 1  # [UNK] of the tiny tokenizer
DROPPED = {"headings": 1234, "documents_too_short": 5, "sentences_without_letter": 0}


def row(rng: np.random.Generator, source: str, number: int, sentences: int, vocabulary: int) -> ShardRow:
    lengths = rng.integers(1, 40, size=sentences)
    pieces = np.minimum(rng.geometric(0.05, size=lengths.sum()), vocabulary - 1).astype(np.uint16)
    offsets = np.cumsum([0, *lengths], dtype=np.int32)
    return ShardRow(source, f"{source}/{number}", "", number << 50, pieces, offsets, occurrences(pieces))


def write_corpus(folder: Path, tokenizer: Path, shards: list[list[ShardRow]], vocabulary: int) -> Corpus:
    """A finished corpus folder of the given rows."""
    rows = [document for shard in shards for document in shard]
    frequency = np.zeros(vocabulary, np.int64)
    for document in rows:
        frequency[np.unique(document.tokens)] += 1
    folder.mkdir()
    np.save(folder / "document_frequency.npy", frequency)
    (folder / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    entries = []
    for number, documents in enumerate(shards):
        name = f"shard-{number:05d}.arrow"
        write_shard(folder / name, documents)
        entries.append({"name": name, "documents": len(documents), "bytes": (folder / name).stat().st_size})
    manifest = {
        "format": "multicls-corpus",
        "format_version": FORMAT_VERSION,
        "tokens": sum(len(document.tokens) for document in rows),
        "dropped": DROPPED,
        "tokenizer": {"vocabulary_size": vocabulary, "dtype": "uint16", "fingerprint": ""},
        "made_from": {"splitter": {"name": "by hand", "version": "1.2"}, "packages": {"numpy": "9.9"}},
        "files": {"tokenizer.json": {"bytes": (folder / "tokenizer.json").stat().st_size}},
        "shards": entries,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return Corpus.open(folder)


@pytest.fixture
def invented(tmp_path: Path, tiny_tokenizer: Path) -> Corpus:
    """Two sources; one document has runs in all three shards, another two runs in the first."""
    rng = np.random.default_rng(5)
    numbers = [[1, 2, 2, 3, 4], [4], [4, 5, 6, 7]]
    shards = [
        [row(rng, "b [red]" if n == 6 else "a", n, int(rng.integers(6, 60)), 90) for n in shard] for shard in numbers
    ]
    return write_corpus(tmp_path / "cor$p$us", tiny_tokenizer, shards, 90)


def all_of(tally: Tally) -> list[int]:
    return np.repeat(tally.values, tally.counts).tolist()


def plain_documents(corpus: Corpus) -> dict[int, list[ShardRow]]:
    rows: dict[int, list[ShardRow]] = {}
    for number in range(corpus.num_rows):
        document = corpus.row(number)
        rows.setdefault(document.hash, []).append(document)
    return rows


def test_counts_are_those_of_plain_loops(invented: Corpus) -> None:
    contents = count(invented, UNKNOWN, range(3))
    documents = list(plain_documents(invented).values())
    assert len(documents) == 7 < invented.num_rows
    sentences = [[len(r.offsets) - 1 for r in runs] for runs in documents]
    pieces = [[len(r.tokens) for r in runs] for runs in documents]
    assert all_of(contents.document_sentences) == sorted(map(sum, sentences))
    assert all_of(contents.document_pieces) == sorted(map(sum, pieces))
    lengths = [int(n) for runs in documents for r in runs for n in np.diff(r.offsets)]
    assert all_of(contents.sentence_pieces) == sorted(lengths)
    everything = [int(piece) for runs in documents for r in runs for piece in r.tokens]
    assert contents.piece_counts.tolist() == [everything.count(piece) for piece in range(90)]
    for name in ("a", "b [red]"):
        own = [runs for runs in documents if runs[0].source == name]
        unknown = sum(int(piece) == UNKNOWN for runs in own for r in runs for piece in r.tokens)
        rows = [r for runs in own for r in runs]
        expected = [len(own), sum(len(r.offsets) - 1 for r in rows), sum(len(r.tokens) for r in rows), unknown]
        assert contents.sources[name].tolist() == expected and unknown > 0
    assert contents.totals == f"7 documents, {len(lengths)} sentences, {len(everything):,} pieces"


def test_without_an_unknown_piece_none_is_counted(invented: Corpus) -> None:
    assert [numbers[3] for numbers in count(invented, None, range(3)).sources.values()] == [0, 0]


def test_percentiles_are_values_that_occur() -> None:
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, 50, size=size) for size in (1, 70, 0, 33)]
    tally = Tally()
    for batch in batches:
        tally.add(batch)
    values = np.concatenate(batches)
    assert len(tally) == len(values) and tally.sum() == values.sum()
    for percent in (5, 50, 95, 100):
        assert tally.percentile(percent) == np.percentile(values, percent, method="inverted_cdf")


def test_coverage_curve_starts_with_the_most_frequent() -> None:
    contents = Contents(5)
    contents.piece_counts[:] = [1, 0, 7, 0, 2]
    assert contents.curve.tolist() == [0.7, 0.9, 1.0]


def test_training_is_measured_on_the_examples_of_an_epoch(invented: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.stats.FEWEST_LABELS", 5)
    measured = measure(invented, SPECIAL_IDS, 32)
    stream = ExampleStream(invented, SPECIAL_IDS, seq_length=32, seed=0, validation_fraction=0.0)
    seen = [[0] * (len(invented.row(row).offsets) - 1) for row in range(invented.num_rows)]
    padding = positions = cut = chosen = single = parts = short = 0
    for index in range(stream.examples_per_epoch):
        example = stream.example(0, index)
        offsets = invented.row(example.document).offsets
        padding += int((example.attention_mask == 0).sum())
        positions += example.attention_mask.size
        cut += example.cut_pieces
        for part in example.parts:
            parts += 1
            single += part.end == part.first + 1
            short += part.first < part.cut < part.end and 1 in (part.cut - part.first, part.end - part.cut)
            chosen += int(offsets[part.end] - offsets[part.first])
            for sentence in range(part.first, part.end):
                seen[example.document][sentence] += 1
    times = [n for sentences in seen for n in sentences]
    assert cut > 0 and single > 0
    assert measured.examples == measured.examples_per_epoch == stream.examples_per_epoch
    assert (measured.rows, measured.step) == (invented.num_rows, 1)
    assert measured.padding == pytest.approx(padding / positions)
    assert (measured.cut, measured.single) == pytest.approx((cut / chosen, single / parts))
    assert short > 0 and measured.short_segment == pytest.approx(short / (parts - single))
    assert measured.lengths is not None and measured.lengths.parts == parts - single
    assert measured.seen.tolist() == [times.count(0), times.count(1), times.count(2), sum(n > 2 for n in times)]


@pytest.mark.parametrize("leak", [0.0, 0.1])
def test_lengths_that_tell_the_order_are_found(leak: float) -> None:
    rng = np.random.default_rng(3)
    lengths = rng.integers(10, 60, size=(6000, 2))
    lengths[:, 0] += np.rint(leak * lengths[:, 0]).astype(int)  # the earlier segment, longer where there is a leak
    swapped = rng.random(6000) < 0.5
    placed = np.where(swapped[:, None], lengths[:, ::-1], lengths)
    found = length_baseline(placed, swapped)
    assert found is not None and found == length_baseline(placed, swapped) and found.parts == 6000
    assert found.error == pytest.approx((found.accuracy * (1 - found.accuracy) / 6000) ** 0.5)
    if leak:
        assert found.accuracy > 0.5 + 4 * found.error and found.log_loss < 0.690
    else:
        assert abs(found.accuracy - 0.5) < 3 * found.error and found.log_loss > 0.6925


def test_a_few_parts_are_no_measure_of_the_order() -> None:
    swapped = np.arange(200) < 49
    assert length_baseline(np.ones((200, 2), int), swapped) is None
    assert length_baseline(np.zeros((0, 2), int), np.zeros(0, bool)) is None


def test_of_a_large_corpus_every_nth_row_is_measured(invented: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.stats.SAMPLE_PIECES", invented.manifest["tokens"] // 3)
    measured: Training = measure(invented, SPECIAL_IDS, 32)
    assert (measured.step, measured.rows) == (3, len(range(1, invented.num_rows, 3)))
    assert measured.seen.sum() == sum(len(invented.row(row).offsets) - 1 for row in range(1, 10, 3))
    assert measured.examples < measured.examples_per_epoch


def assert_whole_picture(path: Path) -> None:
    from PIL import Image

    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG" and image.size == (1800, 1050)
    assert [file.name for file in path.parent.iterdir() if file.name.startswith(".")] == []


@pytest.mark.filterwarnings("error")
def test_prints_and_draws(
    invented: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.stats.FEWEST_LABELS", 5)
    stats(invented.path, tmp_path / "new" / "picture.png", 32, 5)
    printed = capsys.readouterr().out
    contents = count(invented, UNKNOWN, range(3))
    for text in (contents.totals, "10 rows in 3 shards", "by hand 1.2", "numpy 9.9", "vocabulary 90, uint16"):
        assert text in printed
    assert "1,234  headings" in printed and "no samples: this corpus has no dropped.json" in printed
    assert "b [red]" in printed, "names are no markup"
    assert "10 rows (all)" in printed
    assert "right, log loss 0." in printed and "% of those" in printed
    assert_whole_picture(tmp_path / "new" / "picture.png")


def test_samples_of_what_was_dropped(invented: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["\x1b[31mCHAPTER\tI\u202e", "[bold]x[/bold]", "long " * 100, "the fourth"]
    samples = [{"source": "a", "document": f"d{n}", "text": text} for n, text in enumerate(texts)]
    (invented.path / "dropped.json").write_text(json.dumps({"headings": samples}))
    stats(invented.path, None, 32, 5)
    printed = capsys.readouterr().out
    assert "a, d0: \\x1b[31mCHAPTER\\tI\\u202e" in printed
    assert "a, d1: [bold]x[/bold]" in printed
    assert "not measured: fewer than 50 parts of each order" in printed
    assert "the fourth" not in printed and "no samples" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert visible("ordinary text, Ünïcödé and שלום") == "ordinary text, Ünïcödé and שלום"


def test_a_tokenizer_without_special_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE({chr(97 + n): n for n in range(20)}, [])).save(str(tmp_path / "tokenizer.json"))
    rng = np.random.default_rng(1)
    rows = [row(rng, f"source {n}", n, 8, 20) for n in range(14)]
    corpus = write_corpus(tmp_path / "corpus", tmp_path, [rows], 20)
    stats(corpus.path, tmp_path / "picture.png", 128, 5)
    printed = capsys.readouterr().out
    assert "not measured" in printed and "[CLS], [SEP], [PAD], [MASK]" in printed
    assert "examples an epoch" not in printed and "14 documents" in printed
    assert_whole_picture(tmp_path / "picture.png")


def test_bad_settings_print_and_write_nothing(
    invented: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="too short for 5 facets"):
        stats(invented.path, tmp_path / "picture.png", 12, 5)
    with pytest.raises(UserError, match="a folder; give the name"):
        stats(invented.path, tmp_path, 32, 5)
    with pytest.raises(UserError, match="no such corpus folder"):
        stats(tmp_path / "nowhere", tmp_path / "picture.png", 32, 5)
    assert capsys.readouterr().out == "" and not (tmp_path / "picture.png").exists()
