"""Three-part examples on the embedded Wikipedia sample."""

import bisect
import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.model_selection import StratifiedKFold, cross_val_predict

from data_prep import windows
from data_prep.examples import ARRAYS, ExampleStream, SpecialIds, TrainingExample
from data_prep.windows import generator, hashed, permuted
from multicls.corpus import FORMAT_VERSION, MANIFEST, Corpus, ShardRow, occurrences, write_shard
from multicls.errors import UserError
from multicls.files import write_json
from tests.data_prep.conftest import SAMPLE_IDS

Epoch = list[TrainingExample]


@pytest.fixture(scope="module")
def stream(sample_corpus: Corpus) -> ExampleStream:
    return ExampleStream(sample_corpus, SAMPLE_IDS, seq_length=128, seed=3)


@pytest.fixture(scope="module")
def epoch(stream: ExampleStream) -> Epoch:
    return stream.examples(0, range(stream.examples_per_epoch))


def test_parts_are_whole_sentences_with_little_padding(stream: ExampleStream, epoch: Epoch) -> None:
    cut = 0
    for example in epoch:
        document = stream.corpus.row(example.row)
        for p, part in enumerate(example.parts):
            assert part.first < part.end <= len(document.offsets) - 1
            assert p == 0 or part.first == example.parts[p - 1].end
            segments = [(part.first, part.cut), (part.cut, part.end)]
            if part.cut == part.end:
                segments = segments[:1]
            expected, types = [101, 1, 2, 3, 4, 5], [0] * 6
            for number, (first, end) in enumerate(segments[:: -1 if part.swapped else 1]):
                text = document.tokens[document.offsets[first] : document.offsets[end]].tolist()
                if len(text) > stream.budget:  # only a sentence longer than a part may be cut
                    assert part.end - part.first == 1
                    cut += 1
                expected += text[: stream.budget] + [102]
                types += [number] * (len(expected) - len(types))
            padding = [0] * (128 - len(expected))
            masked = example.labels[p] >= 0
            ids = np.where(masked, example.labels[p], example.input_ids[p])
            assert ids.tolist() == expected + padding
            assert example.token_type_ids[p].tolist() == types + padding
            assert example.attention_mask[p].tolist() == [1] * len(expected) + padding
    assert 0 < cut < 0.01 * 3 * len(epoch)
    filled = sum(int(example.attention_mask.sum()) for example in epoch)
    assert 1 - filled / (len(epoch) * 3 * 128) < 0.14
    assert sum(example.cut_tokens for example in epoch) < 0.01 * filled


def test_masking_never_touches_special_tokens(epoch: Epoch) -> None:
    special = [*SAMPLE_IDS[:4], *SAMPLE_IDS.facets]
    fates: Counter[str] = Counter()
    drawn = list[int]()
    for example in epoch:
        masked = example.labels >= 0
        assert not np.isin(example.labels[masked], special).any()
        text = ~np.isin(np.where(masked, example.labels, example.input_ids), special)
        for p in range(3):
            assert masked[p].sum() == max(1, round(0.15 * text[p].sum()))
        hidden = example.input_ids[masked]
        assert not np.isin(hidden[hidden != 103], special).any()
        fates["mask"] += int((hidden == 103).sum())
        fates["kept"] += int((hidden == example.labels[masked]).sum())
        fates["all"] += int(masked.sum())
        drawn += hidden[(hidden != 103) & (hidden != example.labels[masked])].tolist()
    assert fates["mask"] / fates["all"] == pytest.approx(0.8, abs=0.01)
    assert fates["kept"] / fates["all"] == pytest.approx(0.1, abs=0.01)
    tenths = np.histogram(drawn, bins=10, range=(0, 30_522))[0] / len(drawn)
    assert len(drawn) > 1000 and tenths == pytest.approx(0.1, abs=4 * (0.09 / len(drawn)) ** 0.5)


def test_half_of_the_parts_are_swapped_independently(epoch: Epoch) -> None:
    labels = np.array([example.so_labels for example in epoch])
    assert [[part.swapped for part in example.parts] for example in epoch] == (labels == 1).tolist()
    assert labels[labels >= 0].mean() == pytest.approx(0.5, abs=0.03)
    both = labels[(labels >= 0).all(axis=1)]
    assert np.abs(np.corrcoef(both.T) - np.eye(3)).max() < 0.1
    assert (labels == -100).mean() < 0.05
    parts = [part for example in epoch for part in example.parts if part.cut < part.end]
    cuts = [(part.cut - part.first) / (part.end - part.first) for part in parts]
    assert np.mean(cuts) == pytest.approx(0.5, abs=0.02)


def assert_plain_tfidf(stream: ExampleStream, example: TrainingExample) -> None:
    """Compares the TF-IDF targets of an example with the definition, one sentence after the other."""
    corpus, text = stream.corpus, stream.corpus.row(example.row)
    counts, frequency = Counter(text.tokens.tolist()), corpus.document_frequency
    for p, part in enumerate(example.parts):
        expected = [0.0]
        halves = [range(part.first, part.cut), range(part.cut, part.end)]
        for half in reversed(halves) if part.swapped else halves:
            segment: list[float] = []
            for s in half:
                ids = text.tokens[text.offsets[s] : text.offsets[s + 1]].tolist()
                raw = [
                    counts[i] * math.log(corpus.num_passages / max(frequency[i], 1)) for i in ids
                ]
                low, high = min(raw), max(raw)
                scale = 10 / (high - low) if high > low else 0.0
                segment += [(x - low) * scale for x in raw]
            expected += segment[: stream.budget] + [0.0] * bool(segment)
        targets = example.tfidf_labels[p]
        expected += [0.0] * (len(targets) - len(expected))
        np.testing.assert_allclose(targets, expected, atol=1e-4)


def test_tfidf_targets_match_a_loop(stream: ExampleStream, epoch: Epoch) -> None:
    for example in epoch[::60]:
        assert_plain_tfidf(stream, example)


def frequency_of(corpus: Corpus) -> np.ndarray:
    """The number of passages of about 1,000 tokens that contain each token."""
    passages = []
    for row in (corpus.row(number).tokens for number in range(corpus.num_rows)):
        number = max(1, round(len(row) / 1000))
        ends = [len(row) * p // number for p in range(number + 1)]
        passages += [row[first:end] for first, end in itertools.pairwise(ends)]
    assert len(passages) == corpus.num_passages
    size = corpus.vocabulary_size
    return np.sum([np.bincount(np.unique(passage), minlength=size) for passage in passages], axis=0)


def test_document_frequency_counts_passages(sample_corpus: Corpus) -> None:
    assert (sample_corpus.document_frequency == frequency_of(sample_corpus)).all()
    assert sample_corpus.num_passages > 2 * sample_corpus.num_rows


def test_an_example_depends_on_nothing_but_its_number(stream: ExampleStream) -> None:
    size = next(size for size in (4, 5) if stream.examples_per_epoch % size)
    last = stream.examples_per_epoch // size  # this one lies across the epoch's end
    together = stream.micro_batches([3, last, 7], size)
    assert together["input_ids"].shape == (3, 3 * size, 128)
    assert together["tfidf_labels"].shape == (3, 3 * size, 123)
    for b, number in enumerate((3, last, 7)):
        for i, (row, window, epoch) in enumerate(together["windows"][b].tolist()):
            place = divmod(number * size + i, stream.examples_per_epoch)
            (example,) = stream.examples(place[0], [place[1]])
            shown = stream.examples_of_row(row, epoch)[window]
            for name in ARRAYS:  # part-major
                np.testing.assert_array_equal(together[name][b, i::size], getattr(example, name))
                np.testing.assert_array_equal(getattr(shown, name), getattr(example, name))
    assert {epoch for _, _, epoch in together["windows"][1].tolist()} == {0, 1}
    other = ExampleStream(stream.corpus, SAMPLE_IDS, seq_length=128, seed=4)
    assert (other.micro_batches([3], size)["input_ids"] != together["input_ids"][:1]).any()


def rows_of(stream: ExampleStream) -> set[int]:
    """The rows that an epoch shows."""
    return {example.row for example in stream.examples(0, range(stream.examples_per_epoch))}


def test_epochs_cover_sentences_about_equally(stream: ExampleStream, epoch: Epoch) -> None:
    epochs = [epoch, *(stream.examples(e, range(stream.examples_per_epoch)) for e in (1, 2, 3))]
    documents = sorted({example.row for example in epoch})
    coverage = {d: np.zeros((4, len(stream.corpus.row(d).offsets) - 1), int) for d in documents}
    for e, examples in enumerate(epochs):
        for example in examples:
            coverage[example.row][e, example.parts[0].first : example.parts[-1].end] += 1
    counts = np.concatenate([coverage[d] for d in documents], axis=1)
    assert counts.mean() == pytest.approx(1, abs=0.06)
    assert (counts == 1).mean() > 0.85 and (counts > 2).mean() < 0.001
    assert (counts.sum(axis=0) == 0).mean() < 0.005 and (counts.sum(axis=0) > 6).mean() < 0.02
    first, middle, last = (
        np.mean([seen[:, int(share * (seen.shape[1] - 1))] > 0 for seen in coverage.values()])
        for share in (0, 0.5, 1)
    )
    assert min(first, last) > 0.8 and middle > 0.93
    one, two = ({(e.row, p.first) for e in examples for p in e.parts} for examples in epochs[:2])
    assert len(one & two) < 0.6 * len(one)  # about 0.5 +- 0.02


def test_splits_share_no_document(sample_corpus: Corpus) -> None:
    fifth = fixed(seq_length=128, validation_fraction=0.2)
    train = rows_of(ExampleStream(sample_corpus, SAMPLE_IDS, **fifth))
    validation = rows_of(ExampleStream(sample_corpus, SAMPLE_IDS, **fifth, split="validation"))
    assert not train & validation and train | validation == set(range(sample_corpus.num_rows))
    with pytest.raises(UserError, match="validation_fraction = 0.0"):
        ExampleStream(sample_corpus, SAMPLE_IDS, **fixed(split="validation"))


def test_all_rows_of_a_document_are_held_out_together_and_count_once(tmp_path: Path) -> None:
    # The third document takes three rows.
    hashes = [5 << 60, 9 << 60, 3 << 60, 3 << 60, 3 << 60]
    corpus = corpus_of(tmp_path, hashes, text=[[9] * 30] * 5)
    part = fixed(validation_fraction=0.01)
    validation = ExampleStream(corpus, SPECIAL, **part, split="validation")
    assert rows_of(validation) == {2, 3, 4} and validation.num_documents == 1
    assert ExampleStream(corpus, SPECIAL, **part).num_documents == 2


@pytest.mark.parametrize("first_hash", [1, 9 << 60])
def test_a_single_document_cannot_be_divided(first_hash: int, tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [first_hash, first_hash], text=[[9] * 30] * 2)
    with pytest.raises(UserError, match="--documents blank_line"):
        for split in ("train", "validation"):
            ExampleStream(corpus, SPECIAL, **fixed(validation_fraction=0.01, split=split))
    assert ExampleStream(corpus, SPECIAL, **fixed()).num_documents == 1


@pytest.mark.parametrize("facets", [(), (1,), (1, 2, 3, 4, 5)])
def test_two_parts_and_other_facets(sample_corpus: Corpus, facets: tuple[int, ...]) -> None:
    special = SAMPLE_IDS._replace(facets=facets)
    batch = ExampleStream(sample_corpus, special, **fixed(num_parts=2)).micro_batches([0], 3)
    assert batch["input_ids"].shape == (1, 6, 64)
    assert batch["tfidf_labels"].shape == (1, 6, 64 - len(facets))
    assert (batch["input_ids"][..., : 1 + len(facets)] == [101, *facets]).all()


def corpus_of(folder: Path, hashes: list[int] | None = None, **sources: list[list[int]]) -> Corpus:
    """A corpus of sources of rows, each given by the lengths of its sentences; tokens are 20, 21, ..."""
    rng, rows = np.random.default_rng(0), []
    for source, documents in sources.items():
        for number, lengths in enumerate(documents):
            tokens = rng.integers(20, 200, sum(lengths)).astype(np.uint16)
            offsets = np.cumsum([0, *lengths]).astype(np.int32)
            hashed = hashes[number] if hashes else int(rng.integers(1 << 62)) * 2
            name, counts = f"{source}{hashed if hashes else number}", occurrences(tokens)
            rows.append(ShardRow(source, name, "", hashed, tokens, offsets, counts))
    folder.mkdir(parents=True, exist_ok=True)
    middle, shards = len(rows) // 2 if len({row.hash for row in rows}) > 1 else 0, []
    for name, part in (("a.arrow", rows[:middle]), ("b.arrow", rows[middle:])):
        if not part:
            continue
        write_shard(folder / name, part)
        size = (folder / name).stat().st_size
        shards.append({"name": name, "rows": len(part), "bytes": size})
    np.save(folder / "document_frequency.npy", np.ones(200, np.int64))
    tokenizer = {"vocabulary_size": 200, "fingerprint": ""}
    manifest = {"shards": shards, "tokenizer": tokenizer, "format_version": FORMAT_VERSION}
    manifest |= {"files": {}, "documents": len({row.hash for row in rows})}
    manifest["sources"] = {name: {"rows": len(documents)} for name, documents in sources.items()}
    write_json(folder / MANIFEST, manifest)
    return Corpus(folder)


SPECIAL = SpecialIds(cls=1, sep=2, pad=0, mask=3, facets=(4, 5))


def fixed(**changes: Any) -> Any:
    """Arguments of a stream of all documents."""
    return {"seq_length": 64, "seed": 1, "validation_fraction": 0.0} | changes


def test_every_document_of_three_sentences_gives_three_parts(tmp_path: Path) -> None:
    rng, lengths = np.random.default_rng(1), list[list[int]]()
    for n in rng.integers(1, 40, 1500).tolist():
        long, short = rng.integers(1, 300, n), rng.integers(1, 40, n)
        lengths.append(np.where(rng.random(n) < 0.1, long, short).tolist())
    stream = ExampleStream(corpus_of(tmp_path, text=lengths), SPECIAL, **fixed())
    for document, sentences in enumerate(lengths):
        examples = stream.examples_of_row(document, epoch=0)
        assert bool(examples) == (len(sentences) >= 3)
        for example in examples:
            bounds = [part.first for part in example.parts] + [example.parts[-1].end]
            assert bounds == sorted(set(bounds)) and bounds[-1] <= len(sentences)
            for part in example.parts:
                assert sum(sentences[part.first : part.end]) <= 59 or part.end - part.first == 1
            if bounds[0] == 0 and bounds[-1] == len(sentences) >= 6 and max(sentences) < 9:
                assert all(part.end - part.first >= 2 for part in example.parts)


def length_baseline(placed: np.ndarray, swapped: np.ndarray) -> tuple[float, float, float]:
    """Predicts the order by boosted trees from the tokens of the first and second segment, (n, 2).

    Returns accuracy, its binomial standard error and log loss of a five-fold cross-validation.
    """
    features = np.column_stack([placed, placed[:, 0] - placed[:, 1]])
    # Small, slow trees: with more of them, the log loss of parts without any leak rises above ln 2.
    trees = HistGradientBoostingClassifier(
        max_iter=50, learning_rate=0.05, max_leaf_nodes=8, min_samples_leaf=50, early_stopping=False
    )
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    predicted = cross_val_predict(trees, features, swapped, cv=folds, method="predict_proba")
    correct = predicted.argmax(axis=1) == swapped
    of_label = np.take_along_axis(predicted, swapped[:, None].astype(int), axis=1)
    return correct.mean(), correct.std() / len(correct) ** 0.5, -np.log(of_label).mean()


def lengths_by_place(stream: ExampleStream) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the segments placed first and second, (n, 2), and the labels, (n,), of one epoch's ordered parts."""
    arrays = stream.micro_batches([0], stream.examples_per_epoch)
    labels = arrays["so_labels"][0]
    second = arrays["token_type_ids"][0].sum(axis=1) - 1  # without its [SEP]
    first = arrays["attention_mask"][0].sum(axis=1) - second - 3 - len(stream.special.facets)
    return np.column_stack([first, second])[labels >= 0], labels[labels >= 0] == 1


@pytest.mark.slow
def test_lengths_do_not_tell_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(2)
    lengths = [generator.geometric(0.06, n).tolist() for n in generator.integers(3, 200, 600)]
    stream = ExampleStream(corpus_of(tmp_path, text=lengths), SPECIAL, **fixed())
    placed, swapped = lengths_by_place(stream)
    accuracy, error, log_loss = length_baseline(placed, swapped)
    assert len(placed) > 8000 and abs(accuracy - 0.5) < 3 * error and log_loss > 0.6925
    # Control: with all parts filled from the front, as greedy filling does, the lengths tell.
    monkeypatch.setattr(windows, "MIRRORED", 0.0)
    accuracy, error, log_loss = length_baseline(*lengths_by_place(stream))
    assert accuracy > 0.5 + 5 * error and log_loss < 0.6925


def test_source_weights(tmp_path: Path) -> None:
    sizes = {"wiki": [[20] * 60] * 60, "books": [[20] * 120] * 40, "web": [[20] * 30] * 20}
    corpus = corpus_of(tmp_path, None, **sizes)
    plain = ExampleStream(corpus, SPECIAL, **fixed())
    weights = {"wiki": 0.5, "books": 2, "web": 0}
    stream = ExampleStream(corpus, SPECIAL, **fixed(), source_weights=weights)
    wiki, books = 60 * len(plain.examples_of_row(0, 0)), 40 * len(plain.examples_of_row(60, 0))
    assert plain.examples_per_epoch == wiki + books + 20 * len(plain.examples_of_row(119, 0))
    assert stream.examples_per_epoch == round(wiki / 2) + 2 * books

    def shown(epoch: int) -> Counter[int]:
        examples = stream.examples(epoch, range(stream.examples_per_epoch))
        return Counter(example.row for example in examples)

    first, second, third = map(shown, range(3))
    assert any(first[row] != third[row] for row in range(60)), "another half in the next pass"
    for row in range(60):  # each window once in two epochs
        assert first[row] + second[row] == len(plain.examples_of_row(row, 0))
    for row in range(60, 100):
        assert first[row] == second[row] == 2 * len(plain.examples_of_row(row, 0))
    assert max(first) == 99 and sum(first[d] > 0 for d in range(60)) > 54
    ones = ExampleStream(corpus, SPECIAL, **fixed(), source_weights=dict.fromkeys(weights, 1))
    one, other = (s.micro_batches(range(50), 1)["input_ids"] for s in (plain, ones))
    assert (one == other).all()


def test_bad_source_weights_are_refused_together(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, wiki=[[20] * 60], books=[[20] * 120])
    weights = {"wikki": 1.0, "bouks": 1.0, "wiki": 2.0}
    with pytest.raises(UserError, match="'books'(.|\n)*'wiki'"):
        ExampleStream(corpus, SPECIAL, **fixed(), source_weights=weights)
    with pytest.raises(UserError, match="source_weights"):
        ExampleStream(corpus, SPECIAL, **fixed(), source_weights={"wiki": 0, "books": 0})


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@settings(max_examples=40, deadline=None)
def test_permutations_are_one_to_one(size: int, key: int) -> None:
    order = [permuted(index, size, key) for index in range(size)]
    assert sorted(order) == list(range(size))
    if size > 300:
        assert abs(np.corrcoef(order, range(size))[0, 1]) < 0.3


def test_generators_depend_on_every_number() -> None:
    draws = {generator(*key).random() for key in [(1,), (1, 1), (1, 0, 1), (1, 0, 0, 1), (2,)]}
    assert len(draws) == 5 and generator(3, 4, 5).random() == generator(3, 4, 5).random()
    uniform = np.array([hashed(3, number) for number in range(20_000)]) / 2**64
    assert np.histogram(uniform, bins=20, range=(0, 1))[0] == pytest.approx(1000, rel=0.15)
    assert abs(np.corrcoef(uniform[1:], uniform[:-1])[0, 1]) < 0.03


def test_idf_is_over_rows_where_documents_take_several(tmp_path: Path) -> None:
    """Document frequencies count rows; an idf over documents would be negative for a token of most rows."""
    corpus = corpus_of(tmp_path, [3 << 60] * 5 + [9 << 60], text=[[4] * 90] * 6)
    np.save(tmp_path / "document_frequency.npy", frequency_of(corpus))
    stream = ExampleStream(corpus, SPECIAL, **fixed(num_parts=1))
    assert_plain_tfidf(stream, stream.examples_of_row(0, epoch=0)[0])


def test_parts_take_sentences_up_to_their_whole_budget() -> None:
    """Three sentences of 10 tokens fill a part of 30; one token less, and the third is left to the next."""
    boundaries = np.arange(0, 101, 10)
    assert windows.fill_parts(boundaries, 0, 3, 30, []) == [0, 3, 6, 9]
    assert windows.fill_parts(boundaries, 0, 3, 29, []) == [0, 2, 4, 6]
    uneven = np.array([0, 10, 12, 42, 72, 102, 132])  # from 10 on the first part would hold 2
    assert windows.fill_parts(uneven, 5, 3, 30, []) == [2, 3, 4, 5]


def test_cuts_of_long_parts_are_drawn_by_the_squares_of_all_lengths() -> None:
    """The sum of the squares passes 2^31; offsets on disk are int32."""
    offsets = np.arange(0, 60_001, 10, dtype=np.int32)
    for seed in range(9):
        window = windows.Window(0, 0, 0)
        parts, _ = windows.choose_parts(offsets, window, 1, seed, 3, 19_000)
        draws = generator(seed, 1, 0, 0).random(9).tolist()
        for p, (first, cut, end, _) in enumerate(parts):
            squares = [min(10 * (i - first), 10 * (end - i)) ** 2 for i in range(first + 1, end)]
            sums = list(itertools.accumulate(squares))
            assert sums[-1] > 1 << 31
            assert cut == first + 1 + bisect.bisect_right(sums, draws[3 + p] * sums[-1])


@pytest.mark.parametrize("block", [1, 7, 256])
def test_every_window_of_the_split_is_found_once(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources lie in both shards, and a block may hold rows of the other source, split and without windows."""
    monkeypatch.setattr(windows, "BLOCK", block)
    rng = np.random.default_rng(3)
    lengths = [[9] * n for n in rng.integers(1, 90, 60).tolist()]
    corpus = corpus_of(tmp_path, wiki=lengths[:35], books=lengths[35:])
    limit = corpus.validation_limit(0.3)
    held_out = np.concatenate([corpus.held_out(i, limit) for i in range(corpus.num_shards)])
    for split in ("train", "validation"):
        stream = ExampleStream(corpus, SPECIAL, **fixed(validation_fraction=0.3, split=split))
        index, expected = stream._index, []
        for row, sentences in enumerate(lengths):
            number = max(1, round(9 * len(sentences) / (3 * 59 * 0.875)))
            if len(sentences) >= 3 and held_out[row] == (split == "validation"):
                expected += [(row, window) for window in range(number)]
        found = [index.find(5, 2, i) for i in range(stream.examples_per_epoch)]
        assert sorted(window[:2] for window in found) == expected
        assert {window.pass_number for window in found} == {2}
        assert stream.num_tokens == sum(
            9 * len(lengths[row]) for row in {row for row, _ in expected}
        )


def test_rows_and_windows_beyond_32_bits(tmp_path: Path) -> None:
    """The second shard's rows begin at five billion; in the other corpus a row has a hundred million windows."""
    corpus = corpus_of(tmp_path / "rows", text=[[9] * 30] * 8)
    corpus.first_rows = [0, 5_000_000_000, 5_000_000_004]
    corpus.num_rows = corpus.first_rows[-1]
    stream = ExampleStream(corpus, SPECIAL, **fixed())
    far = {row for row in rows_of(stream) if row > 1 << 32}
    assert far == {5_000_000_000 + i for i in range(4)}
    example = stream.examples_of_row(5_000_000_002, 0)[0]
    text = corpus.shard(1).row(2).tokens
    shown = np.where(example.labels >= 0, example.labels, example.input_ids)[0]
    assert shown[3] in text and example.row == 5_000_000_002

    corpus = corpus_of(tmp_path / "windows", text=[[9] * 30] * 200)
    for number in range(2):
        corpus.shard(number).num_tokens = np.full(100, 4_000_000_000, np.uint32)
    stream = ExampleStream(corpus, SPECIAL, **fixed())
    each = round(4_000_000_000 / (3 * 59 * 0.875))
    assert stream.examples_per_epoch == 200 * each > 1 << 32
    assert stream.num_tokens == 200 * 4_000_000_000
    found = [stream._index.find(1, 0, i) for i in range(600)]
    assert len({window.row for window in found}) > 180
    assert all(0 <= window.number < each for window in found)
    assert np.mean([window.number / each for window in found]) == pytest.approx(0.5, abs=0.05)
