"""Sentence splitters on your text: MB per second of CPU time, and the share of the tests' English cases they get right.

    pip install blingfire nupunkt segtok pysbd syntok
    python benchmarks/run.py sentence_splitters FILE...

A line of a file is a paragraph. The splitters are called paragraph by paragraph; a slow one gets less text. The repairs
of data_prep.sentences were made with the cases in view, the other splitters were not. Writes a table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.compare import Report, new_parser
from multicls.files import REPOSITORY

Splitter = Callable[[str], Iterable[str]]
SECONDS = 10  # a splitter's runs end after the paragraph in which its time is over
CASES = REPOSITORY / "tests" / "data_prep" / "sentence_cases.txt"


def _ours() -> Splitter:
    from data_prep.sentences import split_paragraph

    return lambda text: split_paragraph(text, "en")


def _sentencex() -> Splitter:
    import sentencex

    return lambda text: sentencex.segment("en", text)


def _blingfire() -> Splitter:
    import blingfire

    return lambda text: blingfire.text_to_sentences(text).split("\n")


def _nupunkt() -> Splitter:
    import nupunkt

    return lambda text: map(str, nupunkt.sent_tokenize(text))


def _segtok() -> Splitter:
    from segtok.segmenter import split_single

    return split_single


def _pysbd() -> Splitter:
    import pysbd

    return pysbd.Segmenter(language="en", clean=False).segment


def _syntok() -> Splitter:
    from syntok import segmenter

    def split(text: str) -> list[str]:
        return [
            "".join(token.spacing + token.value for token in sentence)
            for paragraph in segmenter.process(text)
            for sentence in paragraph
        ]

    return split


SPLITTERS: dict[str, Callable[[], Splitter]] = {
    "data_prep.sentences": _ours,
    "sentencex": _sentencex,
    "blingfire": _blingfire,
    "nupunkt": _nupunkt,
    "segtok": _segtok,
    "pysbd": _pysbd,
    "syntok": _syntok,
}


def speed(split: Splitter, paragraphs: list[str], seconds: float) -> float:
    """Median MB/s of three runs, each on paragraphs of its own (nupunkt remembers) and a third of the time at most."""
    rates = []
    for run in range(3):
        size, start = 0, time.process_time()
        for paragraph in paragraphs[run::3]:
            for _sentence in split(paragraph):
                pass
            size += len(paragraph.encode())
            if time.process_time() - start > seconds / 3:
                break
        rates.append(size / 1e6 / (time.process_time() - start))
    return statistics.median(rates)


def right(split: Splitter) -> str:
    """Counts the hand-marked English cases that come out as marked, white space aside."""
    lines = CASES.read_text(encoding="utf-8").splitlines()
    cases = [line.split("|") for line in lines if line and not line.startswith("#") and line[2:4] != ": "]
    count = sum([s.strip() for s in split(" ".join(case)) if s.strip()] == case for case in cases)
    return f"{count} of {len(cases)} ({count / len(cases):.1%})"


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the table."""
    parser = new_parser("sentence_splitters", __doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="text, a line a paragraph")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for each splitter")
    args = parser.parse_args(argv)
    text = "\n".join(path.read_text(encoding="utf-8") for path in args.files)
    paragraphs = [line.strip() for line in text.split("\n") if line.strip()]
    rows: list[list[object]] = []
    for name, load in SPLITTERS.items():
        try:
            split = load()
        except ImportError as error:
            rows.append([name, f"not installed ({error})", ""])
            continue
        rows.append([name, speed(split, paragraphs, args.seconds), right(split)])
    report = Report("sentence_splitters", "Sentence splitters", argv)
    what = f"{len(text.encode()) / 1e6:.1f} MB, {len(paragraphs)} paragraphs"
    report.table(what, ["splitter", "MB/s of CPU time", "cases right"], rows)
    report.write()
