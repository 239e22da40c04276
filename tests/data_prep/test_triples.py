"""Three-part examples on the embedded Wikipedia sample."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from data_prep.triples import Example, SpecialIds, TripleStream, permuted
from multicls.errors import UserError
from multicls.shards import Corpus


@pytest.fixture(scope="module")
def stream(sample_corpus: Corpus, sample_ids: SpecialIds) -> TripleStream:
    return TripleStream(sample_corpus, sample_ids, seq_length=128, seed=3)


@pytest.fixture(scope="module")
def epoch(stream: TripleStream) -> list[Example]:
    return [stream.example(0, i) for i in range(stream.examples_per_epoch)]


def original(example: Example, p: int) -> list[int]:
    """The ids of part p before masking, padding left out."""
    ids = np.where(example.labels[p] >= 0, example.labels[p], example.input_ids[p])
    return [int(i) for i in ids[example.attention_mask[p] == 1]]


def test_parts_are_consecutive_whole_sentences_of_one_document(
    stream: TripleStream, epoch: list[Example], sample_corpus: Corpus
) -> None:
    cut = 0
    for example in epoch:
        document = sample_corpus.document(example.document)
        for p, part in enumerate(example.parts):
            assert part.first < part.end <= len(document.offsets) - 1
            assert p == 0 or part.first == example.parts[p - 1].end
            runs = [(part.first, part.cut), (part.cut, part.end)]
            if part.cut == part.end:
                runs = runs[:1]
            expected = [101, 1, 2, 3, 4, 5]
            for first, end in reversed(runs) if part.swapped else runs:
                text = document.pieces[document.offsets[first] : document.offsets[end]].tolist()
                if len(text) > stream.budget:
                    assert part.end - part.first == 1, "only a sentence longer than a part may be cut"
                    cut += 1
                expected += text[: stream.budget] + [102]
            assert original(example, p) == expected
    assert 0 < cut < 0.01 * 3 * len(epoch)


def test_token_types_mask_and_padding(epoch: list[Example]) -> None:
    for example in epoch[:300]:
        for p, part in enumerate(example.parts):
            ids, types, length = original(example, p), example.token_type_ids[p], int(example.attention_mask[p].sum())
            assert (example.input_ids[p, length:] == 0).all() and (types[length:] == 0).all()
            first_sep = ids.index(102)
            assert ids[-1] == 102 and ids.count(102) == (1 if part.cut == part.end else 2)
            assert (types[: first_sep + 1] == 0).all() and (types[first_sep + 1 : length] == 1).all()


def test_padding_is_little_and_few_pieces_are_cut(epoch: list[Example]) -> None:
    filled = sum(int(example.attention_mask.sum()) for example in epoch)
    assert 1 - filled / (len(epoch) * 3 * 128) < 0.14
    assert sum(example.cut_pieces for example in epoch) < 0.01 * filled


def test_masking_never_touches_special_tokens(epoch: list[Example], sample_ids: SpecialIds) -> None:
    special = sample_ids.all()
    fates: Counter[str] = Counter()
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
    assert fates["mask"] / fates["all"] == pytest.approx(0.8, abs=0.01)
    assert fates["kept"] / fates["all"] == pytest.approx(0.1, abs=0.01)


def test_half_of_the_parts_are_swapped_independently(epoch: list[Example]) -> None:
    labels = np.array([example.so_labels for example in epoch])
    assert [[part.swapped for part in example.parts] for example in epoch] == (labels == 1).tolist()
    assert labels[labels >= 0].mean() == pytest.approx(0.5, abs=0.03)
    both = labels[(labels >= 0).all(axis=1)]
    assert np.abs(np.corrcoef(both.T) - np.eye(3)).max() < 0.1
    assert (labels == -100).mean() < 0.05
    cuts = [(part.cut - part.first) / (part.end - part.first) for e in epoch for part in e.parts if part.cut < part.end]
    assert np.mean(cuts) == pytest.approx(0.5, abs=0.02)


def test_tfidf_targets_match_a_plain_loop(stream: TripleStream, epoch: list[Example], sample_corpus: Corpus) -> None:
    frequency = sample_corpus.document_frequency
    for example in epoch[::60]:
        document = sample_corpus.document(example.document)
        counts = Counter(document.pieces.tolist())
        for p, part in enumerate(example.parts):
            sentences: list[list[float]] = []
            for s in range(part.first, part.end):
                pieces = document.pieces[document.offsets[s] : document.offsets[s + 1]].tolist()
                raw = [counts[i] * math.log(sample_corpus.num_documents / max(int(frequency[i]), 1)) for i in pieces]
                low, high = min(raw), max(raw)
                sentences.append([10 * (x - low) / (high - low) if high > low else 0.0 for x in raw])
            runs = [sentences[: part.cut - part.first], sentences[part.cut - part.first :]]
            expected = [0.0]
            for run in reversed(runs) if part.swapped else runs:
                expected += [x for sentence in run for x in sentence][: stream.budget] + [0.0] * bool(run)
            expected += [0.0] * (128 - 5 - len(expected))
            np.testing.assert_allclose(example.tfidf_labels[p], expected, atol=1e-5)


def test_document_frequency_counts_documents(sample_corpus: Corpus) -> None:
    counts: Counter[int] = Counter()
    for i in range(sample_corpus.num_documents):
        counts.update(set(sample_corpus.document(i).pieces.tolist()))
    assert dict(enumerate(sample_corpus.document_frequency.tolist())) == {i: counts[i] for i in range(30522)}


def test_an_example_depends_on_nothing_but_its_number(
    stream: TripleStream, sample_corpus: Corpus, sample_ids: SpecialIds
) -> None:
    other = TripleStream(Corpus.open(sample_corpus.path), sample_ids, seq_length=128, seed=3)
    size = 4
    wanted = {number: other.micro_batch(number, size) for number in (450, 3, 7)}  # 450 lies across the epoch's end
    for number in (3, 450, 7):
        batch = stream.micro_batch(number, size)
        for name, array in batch.items():
            np.testing.assert_array_equal(array, wanted[number][name])
        assert batch["input_ids"].shape == (12, 128) and batch["tfidf_labels"].shape == (12, 123)
        for i, (epoch, index) in enumerate(batch["example_ids"].tolist()):
            assert epoch * stream.examples_per_epoch + index == number * size + i
            example = stream.example(epoch, index)
            np.testing.assert_array_equal(batch["input_ids"][i::size], example.input_ids)  # part-major
            np.testing.assert_array_equal(batch["so_labels"][i::size], example.so_labels)
    seed = TripleStream(sample_corpus, sample_ids, seq_length=128, seed=4)
    assert (seed.micro_batch(3, size)["input_ids"] != wanted[3]["input_ids"]).any()


def test_epochs_cover_sentences_about_equally_with_fresh_boundaries(
    stream: TripleStream, epoch: list[Example], sample_corpus: Corpus
) -> None:
    epochs = [epoch, *([stream.example(e, i) for i in range(stream.examples_per_epoch)] for e in (1, 2))]
    coverage = [np.zeros(len(sample_corpus.document(d).offsets) - 1) for d in range(sample_corpus.num_documents)]
    for examples in epochs:
        for example in examples:
            coverage[example.document][example.parts[0].first : example.parts[-1].end] += 1
    counts = np.concatenate([c for c in coverage if c.any()])
    assert counts.mean() == pytest.approx(3, rel=0.08)
    assert (counts == 0).mean() < 0.01 and (counts > 5).mean() < 0.03
    boundaries = [{(e.document, part.first) for e in examples for part in e.parts} for examples in epochs]
    assert len(boundaries[0] & boundaries[1]) < 0.5 * len(boundaries[0])


def test_splits_share_no_document(sample_corpus: Corpus, sample_ids: SpecialIds, epoch: list[Example]) -> None:
    def documents(split: str, fraction: float) -> set[int]:
        stream = TripleStream(
            sample_corpus,
            sample_ids,
            seq_length=128,
            seed=0,
            split=split,  # type: ignore[arg-type]
            validation_fraction=fraction,
        )
        return {stream.example(0, i).document for i in range(stream.examples_per_epoch)}

    train, validation = documents("train", 0.2), documents("validation", 0.2)
    assert not train & validation and train | validation == set(range(sample_corpus.num_documents))
    with pytest.raises(UserError, match="validation_fraction = 0.0"):
        documents("validation", 0.0)


@pytest.mark.parametrize("facets", [(), (1,), (1, 2, 3, 4, 5)])
def test_two_parts_and_other_numbers_of_facets(sample_corpus: Corpus, facets: tuple[int, ...]) -> None:
    special = SpecialIds(cls=101, sep=102, pad=0, mask=103, facets=facets)
    batch = TripleStream(sample_corpus, special, seq_length=64, seed=0, num_parts=2).micro_batch(0, 3)
    assert batch["input_ids"].shape == (6, 64) and batch["tfidf_labels"].shape == (6, 64 - len(facets))
    assert (batch["input_ids"][:, : 1 + len(facets)] == [101, *facets]).all()


def test_short_sequences_are_refused(sample_corpus: Corpus, sample_ids: SpecialIds) -> None:
    with pytest.raises(UserError, match="seq_length = 12"):
        TripleStream(sample_corpus, sample_ids, seq_length=12, seed=0)


@pytest.mark.parametrize("size", [1, 2, 3, 97, 1024, 1803])
def test_permutation(size: int) -> None:
    order = [permuted(i, size, (5, 1)) for i in range(size)]
    assert sorted(order) == list(range(size))
    if size > 90:
        assert order != sorted(order) and order != [permuted(i, size, (5, 2)) for i in range(size)]
