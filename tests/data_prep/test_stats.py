"""Statistics of a corpus against plain loops, on an invented corpus of three shards."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data_prep.examples import ExampleStream
from data_prep.stats import (
    SampledText,
    Training,
    document_lengths,
    length_baseline,
    measure_text,
    measure_training,
    sample_rows,
    stats,
    visible,
)
from multicls.corpus import FORMAT_VERSION, Corpus, ShardRow, occurrences, write_manifest, write_shard
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
    rows = [row for shard in shards for row in shard]
    frequency = np.zeros(vocabulary, np.int64)
    for row in rows:
        frequency[np.unique(row.tokens)] += 1
    folder.mkdir()
    np.save(folder / "document_frequency.npy", frequency)
    (folder / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    (folder / "dropped.json").write_text("{}")
    entries = []
    for number, shard in enumerate(shards):
        name = f"shard-{number:05d}.arrow"
        write_shard(folder / name, shard)
        entries.append({"name": name, "rows": len(shard), "bytes": (folder / name).stat().st_size})
    counts = {source: counts_of([row for row in rows if row.source == source]) for source in {r.source for r in rows}}
    manifest = {
        "format": "multicls-corpus",
        "format_version": FORMAT_VERSION,
        **counts_of(rows),
        "sources": counts,
        "dropped": DROPPED,
        "tokenizer": {"vocabulary_size": vocabulary, "dtype": "uint16", "fingerprint": ""},
        "files": {"tokenizer.json": {"bytes": (folder / "tokenizer.json").stat().st_size}},
        "shards": entries,
    }
    write_manifest(folder, manifest)
    return Corpus.open(folder)


def counts_of(rows: list[ShardRow]) -> dict[str, int]:
    """Returns the manifest's counts of rows."""
    return {
        "documents": len({row.hash for row in rows}),
        "rows": len(rows),
        "sentences": sum(len(row.offsets) - 1 for row in rows),
        "tokens": sum(len(row.tokens) for row in rows),
    }


@pytest.fixture
def invented(tmp_path: Path, tiny_tokenizer: Path) -> Corpus:
    """Two sources; one document has rows in all three shards, another two rows in the first."""
    rng = np.random.default_rng(5)
    numbers = [[1, 2, 2, 3, 4], [4], [4, 5, 6, 7]]
    shards = [
        [row(rng, "b [red]" if n == 6 else "a", n, int(rng.integers(6, 60)), 90) for n in shard] for shard in numbers
    ]
    return write_corpus(tmp_path / "cor$p$us", tiny_tokenizer, shards, 90)


def plain_documents(corpus: Corpus) -> list[list[ShardRow]]:
    rows: dict[int, list[ShardRow]] = {}
    for number in range(corpus.num_rows):
        rows.setdefault(corpus.row(number).hash, []).append(corpus.row(number))
    return list(rows.values())


def test_lengths_are_those_of_plain_loops(invented: Corpus) -> None:
    documents = plain_documents(invented)
    assert len(documents) == invented.num_documents == 7 < invented.num_rows
    sentences = [sum(len(row.offsets) - 1 for row in rows) for rows in documents]
    tokens = [sum(len(row.tokens) for row in rows) for rows in documents]
    assert document_lengths(invented).tolist() == [sentences, tokens]


def test_the_text_is_counted_as_in_plain_loops(invented: Corpus) -> None:
    rows = [row for document in plain_documents(invented) for row in document]
    text = measure_text(invented, range(invented.num_rows), UNKNOWN)
    assert sorted(text.sentence_lengths) == sorted(int(n) for row in rows for n in np.diff(row.offsets))
    everything = [int(token) for row in rows for token in row.tokens]
    assert text.token_counts.tolist() == [everything.count(token) for token in range(90)]
    for name in ("a", "b [red]"):
        own = [int(token) for row in rows if row.source == name for token in row.tokens]
        assert text.unknown[name] == (own.count(UNKNOWN), len(own)) and UNKNOWN in own
    without = measure_text(invented, range(invented.num_rows), None)
    assert [unknown for unknown, _ in without.unknown.values()] == [0, 0]


def test_coverage_starts_with_the_most_frequent_id() -> None:
    text = SampledText(np.array([5, 5]), np.array([1, 0, 7, 0, 2]), {})
    assert text.coverage.tolist() == [0.7, 0.9, 1.0]


def test_training_is_measured_on_the_examples_of_an_epoch(invented: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.stats.MIN_LABELS", 5)
    measured = measure_training(invented, sample_rows(invented), SPECIAL_IDS, 32)
    stream = ExampleStream(invented, SPECIAL_IDS, seq_length=32, seed=0, validation_fraction=0.0)
    seen = [[0] * (len(invented.row(row).offsets) - 1) for row in range(invented.num_rows)]
    padding = positions = cut = chosen = single = parts = 0
    for index in range(stream.examples_per_epoch):
        (example,) = stream.examples(0, [index])
        offsets = invented.row(example.row).offsets
        padding += int((example.attention_mask == 0).sum())
        positions += example.attention_mask.size
        cut += example.cut_tokens
        for part in example.parts:
            parts += 1
            single += part.end == part.first + 1
            chosen += int(offsets[part.end] - offsets[part.first])
            for sentence in range(part.first, part.end):
                seen[example.row][sentence] += 1
    times = [n for sentences in seen for n in sentences]
    assert cut > 0 and single > 0
    assert measured.examples == measured.examples_per_epoch == stream.examples_per_epoch
    assert sample_rows(invented) == range(invented.num_rows)
    assert measured.padding == pytest.approx(padding / positions)
    assert (measured.cut, measured.single) == pytest.approx((cut / chosen, single / parts))
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
    monkeypatch.setattr("data_prep.stats.SAMPLE_TOKENS", invented.manifest["tokens"] // 3)
    rows = sample_rows(invented)
    assert rows == range(1, invented.num_rows, 3)
    measured: Training = measure_training(invented, rows, SPECIAL_IDS, 32)
    assert measured.seen.sum() == sum(len(invented.row(row).offsets) - 1 for row in rows)
    assert measured.examples < measured.examples_per_epoch


def assert_whole_picture(path: Path) -> None:
    from PIL import Image

    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG" and image.size == (1500, 600)
    assert [file.name for file in path.parent.iterdir() if file.name.startswith(".")] == []


@pytest.mark.filterwarnings("error")
def test_prints_and_draws(
    invented: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.stats.MIN_LABELS", 5)
    stats(invented.path, tmp_path / "new" / "picture.png", 32, 5)
    printed = capsys.readouterr().out
    totals = "{documents} documents, {sentences} sentences, {tokens:,} tokens".format(**invented.manifest)
    for text in (totals, "10 rows in 3 shards", "vocabulary 90, uint16"):
        assert text in printed
    assert "1,234  headings" in printed
    assert "b [red]" in printed, "names are no markup"
    assert "10 rows (all)" in printed
    assert "right, log loss 0." in printed
    assert_whole_picture(tmp_path / "new" / "picture.png")


def test_samples_of_what_was_dropped(invented: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["\x1b[31mCHAPTER\tI\u202e", "[bold]x[/bold]", "long " * 100, "the fourth"]
    samples = [{"source": "a", "document": f"d{n}", "text": text} for n, text in enumerate(texts)]
    (invented.path / "dropped.json").write_text(json.dumps({"headings": samples}))
    stats(invented.path, invented.path.parent / "x.png", 32, 5)
    printed = capsys.readouterr().out
    assert "\\x1b[31mCHAPTER\\tI\\u202e (a: d0)" in printed
    assert "[bold]x[/bold] (a: d1)" in printed
    assert "not measured: fewer than 50 parts of each order" in printed
    assert "the fourth" not in printed
    table, picture = printed.rstrip().split("\n\npicture: ")  # a path is not broken
    assert max(map(len, table.splitlines())) <= 80 and picture == str(invented.path.parent / "x.png")
    assert visible("ordinary text, Ünïcödé and שלום") == "ordinary text, Ünïcödé and שלום"


def test_a_tokenizer_without_special_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE({chr(97 + n): n for n in range(20)}, [])).save(str(tmp_path / "tokenizer.json"))
    rng = np.random.default_rng(1)
    rows = [row(rng, f"source {n}", n, 8, 20) for n in range(14)]
    corpus = write_corpus(tmp_path / "corpus", tmp_path, [rows], 20)
    stats(corpus.path, tmp_path / "picture.png", 128, 5)
    printed = " ".join(capsys.readouterr().out.split())  # lines are broken at 80 columns
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
