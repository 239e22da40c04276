"""Draws sentence boundaries and dropped paragraphs for reading by a person: 300 of each, chosen by hash.

    python benchmarks/run.py reading --genre novels --input PATH...
    python benchmarks/run.py reading --genre notes --input README.md docs

Writes runs/benchmarks/reading_GENRE.txt. Each boundary stands as `¦` between the sentences around it;
each dropped paragraph stands with the rule that dropped it. Read them, count the wrong ones, and write the counts into
docs/data_measured.md. The same input and seed give the same file.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import xxhash
from pydantic import Field

from benchmarks.compare import RESULTS
from benchmarks.data_prep import documents
from data_prep.clean import SAMPLE_LENGTH, Drops, clean
from data_prep.read import RawDocument
from data_prep.settings import RULES
from multicls.files import atomic_write
from multicls.settings import Settings

CONTEXT = 160  # characters on each side of a boundary
LONGEST = 2 * SAMPLE_LENGTH  # characters of a dropped paragraph that are shown


class Options(Settings):
    """Options of the benchmark."""

    genre: str = Field(description="the name of the file that is written")
    input: list[str] = Field(min_length=1, title="[NAME=]WHAT", description="the text, as for data_prep/run.py")
    documents: str = Field("file", description="as for data_prep/run.py")
    language: str = Field("en", description="language of the sentence splitter")
    number: int = Field(300, description="boundaries and dropped paragraphs to draw")
    seed: int = Field(0, description="another seed draws others")


class AllDrops(Drops):
    """Keeps the text of every drop, where `Drops` keeps samples; and counts what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.sentences = self.boundaries = 0

    def add(self, reason: str, raw: RawDocument, text: str, count: int = 1, rule: str = "") -> None:
        """Keeps the drop and counts it."""
        super().add(reason, raw, text, count, rule)
        if text.strip():
            shown = text if len(text) <= LONGEST else f"{text[:LONGEST]} [... {len(text)} characters]"
            self.texts.append(f"{reason} ({raw.id}): {' '.join(shown.split())}")


def boundaries(args: Options, drops: AllDrops) -> Iterator[str]:
    """Yields each boundary within a line of the text, the sentences before and after it; adds what is dropped."""
    for raw in documents(args.input, args.documents):
        for line in clean(raw, frozenset(RULES), args.language, drops):
            drops.sentences += len(line)
            for before, after in zip(line, line[1:], strict=False):
                drops.boundaries += 1
                yield f"{before[-CONTEXT:]} ¦ {after[:CONTEXT]}"


def main(args: Options, _: Sequence[str]) -> None:
    """Writes the file to read."""
    drops = AllDrops()

    def place(entry: str) -> int:
        return xxhash.xxh3_64_intdigest(entry.encode("utf-8", "replace"), args.seed)

    cuts = heapq.nsmallest(args.number, boundaries(args, drops), place)
    dropped = heapq.nsmallest(args.number, drops.texts, place)
    counts = ", ".join(f"{reason} {count}" for reason, count in sorted(drops.counts.items()))
    parts = [f"{args.genre}: {drops.sentences} sentences kept; dropped: {counts or 'nothing'}"]
    for name, entries, seen in (("BOUNDARIES", cuts, drops.boundaries), ("DROPPED", dropped, len(drops.texts))):
        parts.append(f"{name} ({len(entries)} of {seen})")
        parts += [f"{number}. {entry}" for number, entry in enumerate(entries, 1)]
    path = RESULTS / f"reading_{args.genre}.txt"
    with atomic_write(path) as file:
        file.write("\n".join([*parts, *drops.warnings(), ""]))
    print(f"wrote {path}")
