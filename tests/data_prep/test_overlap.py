"""Near copies of documents, and evaluation rows in them: both leave, and are counted."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import build, merge, overlap
from data_prep.ledger import Ledger, last_lines, size
from multicls.corpus import Corpus
from multicls.errors import UserError
from tests.data_prep.conftest import WORDS, prepared, same_files, text_of


def sentences(number: int, rng: random.Random) -> list[str]:
    """Sentences of twelve random words."""
    return [" ".join(rng.choices(WORDS, k=12)).capitalize() + "." for _ in range(number)]


def edited(text: str, every: int) -> str:
    """The text with another word in place of each `every`-th one."""
    words = text.split(" ")
    words[every // 2 :: every] = ["zebra"] * len(words[every // 2 :: every])
    return " ".join(words)


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Originals, then copies with one word in 100 changed, an exact one, texts that share half, and a short one."""
    rng, folder = random.Random(0), tmp_path_factory.mktemp("copies")
    originals = [" ".join(sentences(30, rng)) for _ in range(30)]
    later = {f"near{i}": edited(originals[i], 100) for i in range(10)}
    later["same"] = originals[10]
    for i in range(11, 21):
        half = originals[i].split(". ")[:15]
        later[f"half{i}"] = ". ".join([*half, " ".join(sentences(15, rng))])
    later["short"] = "The cat sat. " * 2
    for name, texts in (("a", {f"original{i}": t for i, t in enumerate(originals)}), ("b", later)):
        lines = (json.dumps({"id": key, "text": text}) for key, text in texts.items())
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def names_of(corpus: Corpus) -> list[str]:
    return [corpus.row(number).id.partition("#")[2] for number in range(corpus.num_rows)]


def test_near_copies_leave_and_originals_stay(
    copies: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    """All planted copies are found, and nothing else; what leaves is counted, and a report leaves all in place."""
    corpora = {
        name: prepared(tiny_tokenizer, tmp_path / name, copies, near_duplicates=name)
        for name in ("keep", "report", "drop")
    }
    near = {f"near{i}" for i in range(10)}
    names = names_of(corpora["keep"])
    assert names_of(corpora["report"]) == names and near < set(names)
    assert names_of(corpora["drop"]) == [name for name in names if name not in near]
    dropped = {"documents_too_short": 1, "documents_duplicate": 1}
    assert corpora["keep"].manifest["dropped"] == dropped
    assert corpora["report"].manifest["dropped"] == dropped | {"documents_similar": 10}
    assert corpora["drop"].manifest["dropped"] == dropped | {"documents_near_duplicate": 10}
    report = dict(last_lines(corpora["report"]))
    assert report["similar"].startswith("10 documents have most of the text of an earlier one")
    ledger = Ledger(json.loads((corpora["drop"].path / "dropped.json").read_text()))
    rows = map(json.loads, (copies / "b.jsonl").read_text().splitlines())
    lost = sum(size(row["text"]) for row in rows if row["id"] in near)
    assert ledger.totals()[1]["documents_near_duplicate"] == lost
    assert ledger.text.total() == ledger.kept.total() + ledger.totals()[1].total()


@pytest.mark.slow
def test_three_workers_drop_the_same(copies: Path, tiny_tokenizer: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps({"text": json.loads((copies / "a.jsonl").open().readline())["text"]})
    )
    for workers in (1, 3):
        settings: dict[str, Any] = {"near_duplicates": "drop", "decontaminate": [str(rows)]}
        prepared(tiny_tokenizer, tmp_path / str(workers), copies, workers=workers, **settings)
    same_files(tmp_path / "1", tmp_path / "3")


@pytest.mark.parametrize("shared", [0.5, 0.75, 0.85])
def test_the_share_of_documents_that_are_found_is_that_of_the_theory(shared: float) -> None:
    """Documents that share s of their shingles have an equal key with probability 1 - (1 - s^8)^14."""
    rng, found, number = np.random.default_rng(0), 0, 1000
    for _ in range(number):
        tokens = rng.integers(30_000, size=(2, 404))
        same = round(2 * 400 * shared / (1 + shared))  # of the 400 shingles of each
        tokens[1, : same + 4] = tokens[0, : same + 4]
        found += bool(set(overlap.band_keys(tokens[0])) & set(overlap.band_keys(tokens[1])))
    expected = 1 - (1 - shared**8) ** 14
    error = (expected * (1 - expected) / number) ** 0.5
    assert found / number == pytest.approx(expected, abs=4 * error)


def test_a_key_of_any_band_makes_a_near_copy(tmp_path: Path) -> None:
    """Document 2b + 1 has the key of band b of the document before it; the last one has the hash of the first."""
    hashes = np.arange(15 * 29, dtype=np.uint64).reshape(15, 29)
    for band in range(14):
        hashes[1 + band, 2 * band + 1] = hashes[1 + band, 2 * band]
    hashes[0, 28] = hashes[0, 0]
    build.write_hashes(tmp_path, hashes)
    for near, kind in (("keep", 0), ("report", merge.SIMILAR), ("drop", merge.NEAR)):
        (kinds,) = merge.find_copies([tmp_path], True, near, None)  # type: ignore[arg-type]
        assert kinds.tolist() == [0, kind] * 14 + [merge.SAME]


def test_short_and_empty_documents_have_keys() -> None:
    short = [overlap.band_keys(np.array(tokens)) for tokens in ([7], [7], [8], [7, 8, 9])]
    assert short[0] == short[1] and len({key for keys in short for key in keys}) == 3 * 14


@pytest.mark.parametrize("shared", [3, 4])
def test_shingles_are_five_tokens(shared: int) -> None:
    """Two paragraphs change places between equal words: shingles of more than one token more than these differ."""
    rng = np.random.default_rng(0)
    one, two, three, four = rng.integers(30_000, size=(4, 20))
    words = np.arange(40_000, 40_000 + shared)
    texts = (
        [one, words, two, words, three, words, four],
        [one, words, three, words, two, words, four],
    )
    keys = [overlap.band_keys(np.concatenate(parts)) for parts in texts]
    assert (keys[0] == keys[1]) == (shared == 4) and len(keys[0]) == 14


def test_sentences_with_evaluation_rows_leave(
    corpus_of: Callable[..., Corpus], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row has a text of 13 words and more, one of 9 words and one a short one."""
    rng = random.Random(1)
    texts = [sentences(12, rng) for _ in range(5)]
    nine, short = texts[1][3].lower().split()[2:11], texts[2][5][:-1]
    long = f"{texts[0][4]} {texts[0][5]}"  # in the first document, over the end of a sentence
    rows = tmp_path / "rows.csv"
    rows.write_text(
        f'text,label\n"{long}",animals\n{" ".join(nine)},x\n{" ".join(short.split()[:7])},y\n'
    )
    texts[3][8] = "Then -- " + ", ".join(word.upper() for word in long[:-1].split()[4:17]) + "!"
    texts[4][2] = " ".join(long.split()[:12])  # a word too few
    corpus = corpus_of([" ".join(text) for text in texts], decontaminate=[str(rows)])
    gone = {0: (4, 5), 1: (3,), 3: (8,)}
    for number, text in enumerate(texts):
        kept = [s for i, s in enumerate(text) if i not in gone.get(number, ())]
        assert text_of(corpus, number)[:9] == [squeeze(sentence) for sentence in kept][:9]
    assert corpus.manifest["dropped"] == {"sentences_of_evaluation": 4}
    lost = sum(size(texts[i][s]) for i, places in gone.items() for s in places)
    record = json.loads((corpus.path / "dropped.json").read_text())
    assert record["characters"]["in"]["sentences_of_evaluation"] == lost
    assert "decontaminate: 3 rows; 1 have no cell of 8 words" in capsys.readouterr().out
    assert any("sentences_of_evaluation (such as" in line for _, line in last_lines(corpus))


def squeeze(sentence: str) -> str:
    return sentence.replace(" ", "").lower()


def test_other_rows_are_another_corpus(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """The rows' content counts, not the name of their file."""
    text = " ".join(sentences(20, random.Random(2)))
    (tmp_path / "in.txt").write_text(text)
    for name, more in (("a.csv", ""), ("b.csv", ""), ("c.csv", text)):
        row = "The cat sat on one mat and then it ran far."
        (tmp_path / name).write_text(f"text,label\n{row},x\n{more},y\n")
    made = [tiny_tokenizer, tmp_path / "out", tmp_path / "in.txt"]
    first = prepared(*made, decontaminate=[str(tmp_path / "a.csv")]).manifest
    assert prepared(*made, decontaminate=[str(tmp_path / "b.csv")]).manifest == first
    with pytest.raises(UserError, match=r"other settings or input \(decontaminate\)"):
        prepared(*made, decontaminate=[str(tmp_path / "c.csv")])


def test_words_of_any_script() -> None:
    words = "don|t|我|们|strasse|x|1"
    assert overlap._words("Don't 我们。 STRASSE, x_1") == words.split("|")
