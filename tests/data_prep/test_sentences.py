"""Sentence boundaries, against cases marked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.sentences import split_paragraph

CASES = [
    line
    for line in (Path(__file__).parent / "sentence_cases.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def test_there_are_200_cases() -> None:
    assert len(CASES) == len(set(CASES)) == 200


@pytest.mark.parametrize("case", CASES)
def test_boundaries(case: str) -> None:
    language, case = (case[:2], case[4:]) if case[2:4] == ": " else ("en", case)
    expected = case.split("|")
    assert list(split_paragraph(" ".join(expected), language)) == expected


ONLY_MARKS = ["", "   ", "?", "|", '"', "'", "' ' '", "--", '."', ". . .", "(1) "]
ODD_BLANKS = ["a.\n\nB.", '"No." -- "No."', "A.\u2003B.\xa0C.", "他。她。"]


@pytest.mark.parametrize("text", ONLY_MARKS + ODD_BLANKS)
def test_nothing_is_lost_but_white_space(text: str) -> None:
    found = list(split_paragraph(text, "en"))
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(sentence == sentence.strip() != "" for sentence in found)
