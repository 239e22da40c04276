"""Sentence boundaries and headings. `|` marks the boundaries."""

from __future__ import annotations

from collections import Counter

import pytest

from data_prep.sentences import is_heading, paragraphs, sentences, split_paragraph

CASES = [
    "Dr. Smith met Mr. J. R. Brown at 3.14 p.m. yesterday.|It rained.",
    '"I know. |It is late," she said.|He left.',
    '"Six years! |He would be thirty." |They laughed.',
    '"Is it you?" she asked.|"It is."',
    "“Come here. |Sit down,” said the man.|“Why?”",
    "It cost $3.50 in the U.S. market.|Nobody paid.",
    "(He was wrong.) |She was right.",
    '"Dr. Van Helsing, what I have to tell you is odd. |It is so."',
    "Come with me. |We shall see.",
    "He said so...|Then he went.",
    "See e.g. the first case, vol. 2, no. 5 of the list.|It is short.",
    "One of them stayed!--the other went.|So it was.",
]


@pytest.mark.parametrize("case", CASES)
def test_boundaries(case: str) -> None:
    expected = [part.strip() for part in case.split("|")]
    found = list(split_paragraph(" ".join(expected), "en"))
    if "!--" in case:  # a dash after an exclamation mark may go either way; nothing may be lost
        assert "".join(found).replace(" ", "") == "".join(expected).replace(" ", "")
    else:
        assert found == expected


@pytest.mark.parametrize(
    "text", ["CHAPTER I. ", "II", "Chapter 12. A Walk", "The End", "Foo (1990)", "Early life", "BOOK 1."]
)
def test_headings(text: str) -> None:
    assert is_heading(text)


@pytest.mark.parametrize("text", ["He ran.", "“Why?”", "It was so:", "Part of it was true.", "I saw it.", "x" * 101])
def test_not_headings(text: str) -> None:
    assert not is_heading(text)


def test_extracted_headings_end_with_a_full_stop() -> None:
    assert is_heading("Bilateral relations.", dotted=True) and is_heading(
        " Theory of the early universe and time.", dotted=True
    )
    assert not is_heading("Angora rabbits were bred in this city for wool.", dotted=True)


def test_hand_wrapped_lines_are_joined_and_long_lines_are_paragraphs() -> None:
    assert paragraphs("One\ntwo.\n\n  Three.  \n\n\nFour", "blocks") == ["One two.", "  Three.  ", "Four"]
    assert paragraphs(f"{'a ' * 60}\n{'b ' * 60}", "blocks") == ["a " * 60, "b " * 60]
    assert paragraphs("One.\nTwo.\n\n", "lines") == ["One.", "Two."]


def test_every_drop_is_counted() -> None:
    dropped: Counter[str] = Counter()
    assert sentences("Title\n\nIt is so. * * * .\n\n1, 2, 3.", "blocks", "en", dropped) == ["It is so."]
    assert dropped == {"headings": 1, "sentences_without_letter": 2}
