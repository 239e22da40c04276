"""What is found again, and what is not taken for it."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from data_prep import duplicates
from data_prep.duplicates import REPEATS, Duplicates, RepeatedLines, SeenHashes, minhash_bands


def test_seen_hashes_are_a_set() -> None:
    rng = random.Random(0)
    ours, plain = SeenHashes(), set[int]()
    for _ in range(200):
        batch = [rng.choice((rng.randrange(300), rng.randrange(1 << 64))) for _ in range(rng.randrange(40))]
        hashes = np.array(batch, np.uint64)
        assert ours.holds(hashes).tolist() == [value in plain for value in batch]
        new = [value for value in batch if value not in plain]
        ours.add(np.array(new, np.uint64))
        plain |= set(new)
    sizes = [len(run) for run in ours._runs]
    assert sum(sizes) == len(plain) and len(sizes) <= 12
    assert all(older >= 2 * newer for older, newer in zip(sizes, sizes[1:], strict=False))


def test_copies_are_found_within_and_across_calls() -> None:
    seen = Duplicates(near=False)
    keys = [np.array([value], np.uint64) for value in (5, 7, 5)]
    assert seen.check(keys) == ["", "", "documents_duplicate"]
    seen.remember(np.stack(keys[:1]))  # 7 was dropped for another reason
    assert seen.check(keys[:2]) == ["documents_duplicate", ""]
    assert seen.check([]) == []


def test_repeated_lines_never_before_their_time_and_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "LINES_WATCHED", 1000)
    lines, true, found = RepeatedLines(), Counter[int](), Counter[int]()
    rng = random.Random(0)
    for i in range(20_000):
        own = [rng.randrange(1 << 60) for _ in range(3)]
        own += [1] if i % 3 == 0 else []
        own += [2] if i % 500 == 0 else []
        for line, repeated in zip(own, lines.add(own), strict=True):
            assert not repeated or true[line] >= REPEATS
            true[line] += 1
            found[line] += repeated
        assert len(lines.state()[0]) <= 1004
        if i % 997 == 0:
            lines = RepeatedLines(*lines.state())
    assert found[1] > 0.98 * true[1] and set(found) - {1, 2} == {line for line in found if true[line] == 1}
    assert max(count for line, count in found.items() if line > 2) == 0


def test_near_duplicates() -> None:
    pytest.importorskip("rensa")
    rng = random.Random(0)
    words = [f"w{rng.randrange(3000)}" for _ in range(2000)]
    changed = words.copy()
    changed[700] = changed[1500] = "other"  # 10 of 2000 five-word sequences differ
    distant = [word if rng.random() < 0.8 else "x" for word in words]
    seen = Duplicates(near=True)
    texts = [" ".join(words), " ".join(changed), " ".join(distant)]
    keys = [np.array([i, *minhash_bands(text)], np.uint64) for i, text in enumerate(texts)]
    assert seen.check(keys) == ["", "documents_near_duplicate", ""]
    seen.remember(np.stack(keys[:1]))
    assert seen.check(keys[1:]) == ["documents_near_duplicate", ""]
    np.testing.assert_array_equal(minhash_bands(texts[0].upper()), keys[0][1:])
