"""Draws sentence boundaries and dropped paragraphs for reading by a person: 300 of each, chosen by hash.

    python benchmarks/run.py reading --genre novels --input PATH...
    python benchmarks/run.py reading --genre notes --input README.md docs

Writes runs/benchmarks/reading_GENRE.txt. each boundary stands as `¦` between the sentences around it;
each dropped paragraph stands with the rule that dropped it. Read them, count the wrong ones, and write the counts into
docs/data_measured.md. The same input and seed give the same file.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

import xxhash
from pydantic import Field

from benchmarks.compare import RESULTS
from benchmarks.data_prep import documents
from data_prep.clean import SAMPLE_LENGTH, Drops, clean
from data_prep.read import RawDocument
from data_prep.settings import RULES
from multicls.command_line import CommandLine
from multicls.files import atomic_write
from multicls.settings import Settings

NUMBER = 300
CONTEXT = 160  # characters on each side of a boundary


class AllDrops(Drops):
    """Keeps every drop as (reason, document, text, length), where `Drops` keeps samples."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[str, str, str]] = []

    def add(self, reason: str, raw: RawDocument, text: str, count: int = 1, rule: str = "") -> None:
        """Keeps the drop and counts it."""
        super().add(reason, raw, text, count, rule)
        if text.strip():
            shown = (
                text if len(text) <= 2 * SAMPLE_LENGTH else f"{text[: 2 * SAMPLE_LENGTH]} [... {len(text)} characters]"
            )
            self.all.append((reason, raw.id, " ".join(shown.split())))


class Draw:
    """The entries with the smallest hashes, whatever the order in which they come."""

    def __init__(self, seed: int, number: int) -> None:
        self.seed = seed
        self.number = number
        self.seen = 0
        self._heap: list[tuple[int, str]] = []

    def add(self, entry: str) -> None:
        """Takes an entry into account."""
        self.seen += 1
        key = -xxhash.xxh3_64_intdigest(entry.encode("utf-8", "replace"), self.seed)
        if len(self._heap) < self.number:
            heapq.heappush(self._heap, (key, entry))
        elif key > self._heap[0][0]:
            heapq.heapreplace(self._heap, (key, entry))

    def entries(self) -> list[str]:
        """Returns the drawn entries in a fixed order."""
        return [entry for _, entry in sorted(self._heap, reverse=True)]


def boundaries(lines: list[list[str]]) -> Iterator[str]:
    """Yields each boundary within a line: the sentences before and after it."""
    for line in lines:
        for before, after in zip(line, line[1:], strict=False):
            yield f"{before[-CONTEXT:]} ¦ {after[:CONTEXT]}"


class ReadingOptions(Settings):
    """Options of the benchmark."""

    genre: str = Field(description="the name of the file that is written")
    input: list[str] = Field(min_length=1, title="[NAME=]WHAT", description="the text, as for data_prep/run.py")
    documents: str = Field(default="file", description="as for data_prep/run.py")
    language: str = Field(default="en", description="language of the sentence splitter")
    number: int = Field(default=NUMBER, description="boundaries and dropped paragraphs to draw")
    seed: int = Field(default=0, description="another seed draws others")


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the file to read."""
    args = CommandLine("benchmarks/run.py reading", __doc__, ReadingOptions).parse(argv)
    drops = AllDrops()
    cuts, dropped = Draw(args.seed, args.number), Draw(args.seed, args.number)
    sentences = 0
    for raw in documents(args.input, args.documents):
        lines = clean(raw, frozenset(RULES), args.language, drops)
        sentences += sum(map(len, lines))
        for cut in boundaries(lines):
            cuts.add(cut)
    for reason, document, text in drops.all:
        dropped.add(f"{reason} ({document}): {text}")
    counts = ", ".join(f"{reason} {count}" for reason, count in sorted(Counter(drops.counts).items()))
    parts = [
        f"{args.genre}: {sentences} sentences kept; dropped: {counts or 'nothing'}",
        f"BOUNDARIES ({len(cuts.entries())} of {cuts.seen})",
        *(f"{number}. {entry}" for number, entry in enumerate(cuts.entries(), 1)),
        f"DROPPED ({len(dropped.entries())} of {dropped.seen})",
        *(f"{number}. {entry}" for number, entry in enumerate(dropped.entries(), 1)),
    ]
    path = RESULTS / f"reading_{args.genre}.txt"
    with atomic_write(path) as file:
        file.write("\n".join([*parts, *drops.warnings(), ""]))
    print(f"wrote {path}")
