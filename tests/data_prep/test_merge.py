"""The merge finds what a plain search finds, for any number of ranges and parts."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from data_prep.merge import REPEATS, _slices, duplicate_documents, repeated_lines
from data_prep.parts import minhash_bands


def hash_tables(folder: Path, parts: list[list[list[int]]]) -> list[Path]:
    """Writes hashes.npy of parts; a document is [hash, band 1, band 2, ...]."""
    for number, documents in enumerate(parts):
        entries = [(key, kind, d) for d, keys in enumerate(documents) for kind, key in enumerate(keys)]
        table = np.array(sorted(entries), np.uint64).reshape(-1, 3).T
        (folder / str(number)).mkdir(parents=True)
        np.save(folder / str(number) / "hashes.npy", table)
    return [folder / str(number) for number in range(len(parts))]


def drawn(rng: random.Random) -> int:
    """A 64-bit number: of the lower end, of the upper end, or any."""
    return rng.choice((rng.randrange(20), (1 << 64) - 1 - rng.randrange(20), rng.randrange(1 << 64)))


@pytest.mark.parametrize("ranges", [1, 2, 7])
def test_copies_are_found_across_parts(ranges: int, tmp_path: Path) -> None:
    rng = random.Random(0)
    parts = [[[drawn(rng), drawn(rng)] for _ in range(rng.randrange(30))] for _ in range(5)]
    seen: tuple[set[int], set[int]] = set(), set()
    expected = {}
    for p, documents in enumerate(parts):
        for d, (key, band) in enumerate(documents):
            if key in seen[0] or band in seen[1]:
                expected[p, d] = int(key not in seen[0])
            seen[0].add(key)
            seen[1].add(band)
    folders = hash_tables(tmp_path, parts)
    found: dict[tuple[int, int], int] = {}
    for rank in range(ranges):
        for part, document, near in duplicate_documents(_slices(folders, "hashes.npy", rank, ranges, 2), True).tolist():
            found[part, document] = min(near, found.get((part, document), 1))
    assert len(expected) > 20 and {0, 1} == set(expected.values())
    assert found == expected


def test_exact_copies_may_stay(tmp_path: Path) -> None:
    folders = hash_tables(tmp_path, [[[5, 1], [5, 2]], [[6, 2]]])
    table = _slices(folders, "hashes.npy", 0, 1)
    assert duplicate_documents(table, exact=False).tolist() == [[1, 0, 1]]
    assert sorted(duplicate_documents(table, exact=True).tolist()) == [[0, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize("ranges", [1, 3])
def test_a_line_goes_once_it_stood_in_ten_documents(ranges: int, tmp_path: Path) -> None:
    rng = random.Random(1)
    lines = [drawn(rng) for _ in range(6)]
    parts = []
    for _ in range(6):
        documents = []
        for _ in range(rng.randrange(40)):
            own = [rng.choice([*lines, drawn(rng)]) for _ in range(rng.randrange(4))]  # some twice in a document
            documents.append((rng.choice((rng.randrange(1 << 64), 77)), own))  # some are copies of one document
        parts.append(documents)
    seen: dict[int, list[int]] = defaultdict(list)
    expected = []
    for p, documents in enumerate(parts):
        for d, (key, own) in enumerate(documents):
            for number, line in enumerate(own):
                before = seen[line].index(key) if key in seen[line] else len(seen[line])
                if before >= REPEATS:
                    expected.append([p, d, number, number + 1])
            for line in own:
                if key not in seen[line]:
                    seen[line].append(key)
    for p, documents in enumerate(parts):
        entries = [(h, key, d, i, i + 1) for d, (key, own) in enumerate(documents) for i, h in enumerate(own)]
        table = np.array(entries, np.uint64).reshape(-1, 5).T
        (tmp_path / str(p)).mkdir()
        np.save(tmp_path / str(p) / "lines.npy", table[:, np.argsort(table[0], kind="stable")])
    folders = [tmp_path / str(p) for p in range(len(parts))]
    slices = [_slices(folders, "lines.npy", rank, ranges, REPEATS + 1) for rank in range(ranges)]
    found = [repeated_lines(table).tolist() for table in slices]
    assert sum(table.shape[1] for table in slices) < sum(len(own) for documents in parts for _, own in documents)
    assert len(expected) > 5
    assert sorted(entry for entries in found for entry in entries) == sorted(expected)


def test_nothing_is_found_in_nothing() -> None:
    assert duplicate_documents(np.zeros((4, 0), np.uint64), True).shape == (0, 3)
    assert repeated_lines(np.zeros((6, 0), np.uint64)).shape == (0, 4)


def test_minhash_tells_near_copies_from_others() -> None:
    pytest.importorskip("rensa")
    rng = random.Random(0)
    words = [f"w{rng.randrange(3000)}" for _ in range(2000)]
    changed = words.copy()
    changed[700] = changed[1500] = "other"  # 10 of 2000 five-word sequences differ
    distant = [word if rng.random() < 0.8 else "x" for word in words]
    plain, near, far = (minhash_bands(" ".join(text)) for text in (words, changed, distant))
    assert (plain == near).any() and not (plain == far).any()
    np.testing.assert_array_equal(minhash_bands(" ".join(words).upper()), plain)
