"""Counts everything that is left out, by source and reason, and keeps samples."""

from __future__ import annotations

import heapq
import json
from collections import Counter, defaultdict
from typing import Any

import xxhash

from data_prep.read import RawDocument
from multicls.corpus import ShardRow

SAMPLES = 8  # of everything that is dropped, by reason
SAMPLE_LENGTH = 200

Sample = tuple[int, str, str, str]  # hash, source, document and text


class DropLog:
    """Counts what is read, joined and dropped, and keeps a fair sample of each reason.

    The samples are those with the smallest hashes, whatever the order in which drops come.

    Args:
        record: JSON values of a log, as `to_json` returns them.

    Attributes:
        documents: By source, the number of documents read, bad records included.
        characters: By source, the number of characters read.
        counts: By source and reason, how often something was dropped.
        dropped_characters: By source and reason.
        joined: Number of short documents that were joined, and of the documents that they became.
        samples: By reason, ascending.
    """

    def __init__(self, record: dict[str, Any] | None = None) -> None:
        self.documents: Counter[str] = Counter()
        self.characters: Counter[str] = Counter()
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.dropped_characters: dict[str, Counter[str]] = defaultdict(Counter)
        self.joined = Counter(short=0, joined=0)
        self.samples: dict[str, list[Sample]] = {}
        self.merge(record or {})

    def add(
        self, reason: str, raw: RawDocument | ShardRow, text: str, characters: int, count: int = 1
    ) -> None:
        """Counts `count` drops of a document that lose `characters` of it; `text` shows one.

        A reason to drop whole documents begins with "documents_" or "records_".
        """
        self.counts[raw.source][reason] += count
        self.dropped_characters[raw.source][reason] += characters
        sample = raw.source, raw.id, text[:SAMPLE_LENGTH]
        key = xxhash.xxh3_64_intdigest("\0".join(sample).encode("utf-8", "replace"))
        self._keep(reason, (key, *sample))

    def merge(self, record: dict[str, Any]) -> None:
        """Adds everything that another log has counted, from its `to_json`."""
        for name in ("documents", "characters", "joined"):
            getattr(self, name).update(record.get(name, {}))
        for name in ("counts", "dropped_characters"):
            for source, values in record.get(name, {}).items():
                getattr(self, name)[source].update(values)
        for reason, entries in record.get("samples", {}).items():
            for entry in entries:
                self._keep(reason, tuple(entry))

    def _keep(self, reason: str, sample: Sample) -> None:
        kept = self.samples.setdefault(reason, [])
        if len(kept) < SAMPLES or sample < kept[-1]:
            self.samples[reason] = heapq.nsmallest(SAMPLES, {*kept, sample})

    def to_json(self) -> dict[str, Any]:
        """Returns all that it holds as JSON values, sorted by their keys."""
        record: dict[str, Any] = json.loads(json.dumps(vars(self), sort_keys=True))
        return record

    def by_reason(self) -> dict[str, int]:
        """Returns how often something was dropped, by reason, over all sources."""
        return dict(sorted(sum(self.counts.values(), Counter()).items()))
