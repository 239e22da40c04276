"""Sentence boundaries, against cases marked by hand."""

from pathlib import Path

import pytest

from data_prep.sentences import LONG, LONG_PARAGRAPH, cut_long, language_of, split_paragraph


def read_cases(name: str) -> list[str]:
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


CASES = read_cases("sentence_cases.txt")
NEW_CASES = read_cases("sentence_cases_2.txt")
FIRST_FIGURE = 93  # of the new cases, when the splitter saw them first


def is_right(case: str) -> bool:
    language, case = (case[:2], case[4:]) if case[2:4] == ": " else ("en", case)
    return list(split_paragraph(" ".join(case.split("|")), language)) == case.split("|")


@pytest.mark.parametrize("case", CASES)
def test_boundaries(case: str) -> None:
    assert is_right(case)


def test_cases_that_the_splitter_was_not_made_for() -> None:
    assert sum(map(is_right, NEW_CASES)) >= FIRST_FIGURE


ONLY_MARKS = ["", "   ", "?", "|", '"', "'", "' ' '", "--", '."', ". . .", "(1) "]
ODD_BLANKS = ["a.\n\nB.", '"No." -- "No."', "A.\u2003B.\xa0C.", "他。她。"]


@pytest.mark.parametrize("text", ONLY_MARKS + ODD_BLANKS)
def test_nothing_is_lost_but_white_space(text: str) -> None:
    found = list(split_paragraph(text, "en"))
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(sentence == sentence.strip() != "" for sentence in found)


def test_long_paragraphs_without_spaces_are_cut_at_full_stops_first() -> None:
    """The splitter would take hours for a novel in one paragraph; its sentences are the same."""
    sentences = [f"{'猫' * (i % 17 + 1)}在垫子上{'。' if i % 3 else '！'}" for i in range(4000)]
    text = "".join(sentences)
    assert len(text) > 2 * LONG_PARAGRAPH
    assert list(split_paragraph(text, "en")) == sentences
    assert "".join(split_paragraph("字" * 50_000, "en")) == "字" * 50_000


# language: text, a | at each boundary
MARKS = [
    "zh: 他来到长江口。|“你好！”|她说。|“再见。”|“好！”|他走了。",
    "fr: « Bonjour. »| Puis il est parti.| Elle dit : « Non ! »| Il rit.| « Reste ! » cria-t-elle.| « Bon. »",
    "de: „Ja.“| Er ging.| »Nein!«| »Doch.«| Sie kam.",
    "de: Im 19. Jahrhundert kam der 1. FC.| Er wurde 19.| Dann ging er.",
    "it: Vedi pag. 5 del libro.| È così.",
    "ja: 「行く。」と彼は言った。|彼は行った。",
    "hi: डॉ. शर्मा आए।| वे गए।",
    "km: ខ្ញុំទៅផ្សារ។| គាត់មិនមកទេ។",
    "ar: ذهب إلى السوق.| هل جاء؟| نعم، جاء.",
    "en: See Art. 5 para. 2, and paras. 3 and 4, of it.| It holds.",
]


@pytest.mark.parametrize("case", MARKS)
def test_marks_stand_with_their_sentence_and_numbers_with_their_word(case: str) -> None:
    expected = [part.strip() for part in case[4:].split("|")]
    text = case[4:].replace("|", "")
    assert list(split_paragraph(text, case[:2])) == expected
    if case[:2] not in ("de", "fr", "it"):  # of Latin letters, the language has to be named
        assert list(split_paragraph(text, "auto")) == expected


SCRIPTS = {
    "en": "Straße, 3 μm", "zh": "猫在垫子上。", "ja": "猫はマットの上。", "hi": "वे गए।", "th": "เขาไม่มา",
    "ru": "Он ушёл в 5 часов.", "el": "Πήγε σπίτι.", "ar": "ذهب إلى السوق.", "hy": "Նա գնաց։", "my": "သူသွားသည်။",
}  # fmt: skip


def test_the_language_of_a_script() -> None:
    expected = {language: language for language in SCRIPTS} | {"th": "en"}
    assert {language: language_of(text) for language, text in SCRIPTS.items()} == expected


def test_text_without_full_stops_is_cut_at_clauses_and_blanks() -> None:
    """Only white space is lost; a text without blanks is one piece, unless its script has none."""
    speech = "and then we went to the shop, and there " * 60
    pieces = cut_long(speech.strip())
    assert " ".join(pieces) == speech.strip() and all(200 <= len(piece) <= LONG for piece in pieces)
    assert all(piece.endswith(("shop,", "there")) for piece in pieces)
    assert cut_long("a" * 5000) == ["a" * 5000] and cut_long("A cat. " * 9) == ["A cat. " * 9]
    thai = cut_long("ไปตลาด " * 100)
    assert len(thai) > 3 and "".join(thai).replace(" ", "") == "ไปตลาด" * 100
    assert "".join(cut_long("字" * 1000)) == "字" * 1000


PIECES = [(1000, [1000]), (1010, [399, 399, 210]), (1400, [399, 399, 600])]
PIECES += [(1410, [399, 399, 399, 210])]
WIDE_PIECES = [(300, [300]), (301, [150, 151]), (375, [150, 225]), (376, [150, 150, 76])]


def test_lengths_of_pieces() -> None:
    """Over 1,000 characters a text is cut at the last blank before 400, while over 600 characters are left."""
    for length, pieces in PIECES:
        text = "ninechars " * (length // 10 - 1) + "ninecharsx"
        assert list(map(len, cut_long(text))) == pieces
    for length, pieces in WIDE_PIECES:  # without blanks
        assert list(map(len, cut_long("字" * length))) == pieces
