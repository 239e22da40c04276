"""Sentence boundaries. `|` marks them."""

from __future__ import annotations

import pytest

from data_prep.sentences import split_paragraph

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
