"""Layout, headings and what else is left out."""

from __future__ import annotations

from collections import Counter

import pytest

from data_prep.cleaning import is_heading, paragraphs, sentences


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
