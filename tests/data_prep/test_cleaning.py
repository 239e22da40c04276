"""Layout, headings and what else is left out."""

from __future__ import annotations

import pytest

from data_prep.cleaning import RULES, SAMPLES, Drops, clean, is_heading, paragraphs
from data_prep.readers import RawDocument


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


def test_one_sentence_a_line_is_not_taken_for_a_wrapped_paragraph() -> None:
    wrapped = "He ran far away\nfrom all those dogs.\nThen he sat on\na mat."
    assert paragraphs(wrapped, "blocks") == [wrapped.replace("\n", " ")]
    listed = 'He ran far away.\nThe dogs barked!\n"Who sat on a mat?"\nNobody did.'
    assert paragraphs(listed, "blocks") == listed.split("\n")


def cleaned(text: str, *without: str, layout: str = "blocks") -> tuple[list[str], Drops]:
    drops = Drops()
    lines = clean(RawDocument("s", "d", "t", text, layout), frozenset(RULES) - set(without), "en", drops)
    return [sentence for line in lines for sentence in line], drops


# rule: (text, what is kept with the rule, what without it, the count in the manifest)
RULE_CASES = {
    "unicode": (
        "Cafe\u0301 is\u00a0open.\r\nIt is.",
        ["Café is open.", "It is."],
        ["Cafe\u0301 is\u00a0open.", "It is."],
        {},
    ),
    "control_characters": ("It\u200b is\x00 so.", ["It is so."], ["It\u200b is\x00 so."], {"characters_control": 2}),
    "headings": ("Title\n\nIt is so.", ["It is so."], ["Title", "It is so."], {"lines_heading": 1}),
    "boilerplate": (
        "It is so.\n\nAll rights reserved by him.\n\nSee also\n\nA list of things.",
        ["It is so."],
        ["It is so.", "All rights reserved by him.", "A list of things."],
        {"lines_boilerplate": 3},
    ),
    "sentences_without_letter": (
        "It is so. 1, 2, 3.",
        ["It is so."],
        ["It is so.", "1, 2, 3."],
        {"sentences_without_letter": 1},
    ),
    "long_sentences": (
        "It is so. A" + "a" * 10_000 + ".",
        ["It is so."],
        ["It is so.", "A" + "a" * 10_000 + "."],
        {"sentences_too_long": 1},
    ),
}


@pytest.mark.parametrize("rule", RULE_CASES)
def test_every_rule_drops_counts_and_can_be_left_out(rule: str) -> None:
    text, with_rule, without_rule, counts = RULE_CASES[rule]
    kept, drops = cleaned(text)
    assert (kept, dict(drops.counts)) == (with_rule, counts)
    kept, drops = cleaned(text, rule)
    assert kept == without_rule and not set(counts) & set(drops.counts)


def test_what_stands_around_an_ebook_is_left_out() -> None:
    marks = ["*** START OF THE PROJECT GUTENBERG EBOOK X ***", "*** END OF THE PROJECT GUTENBERG EBOOK X ***"]
    book = ["Foreword by us.", marks[0], "It is so.", marks[1], "A licence follows."]
    assert cleaned("\n\n".join(book))[0] == ["It is so."]


def test_lists_at_the_end_of_an_article_are_left_out() -> None:
    kept = ["It is so, as all of us know.", "It was so for a very long time."]
    lines = [
        kept[0],
        "References.",
        "Smith, a book on it.",
        "History.",
        kept[1],
        "External links.",
        "A page on it, too.",
    ]
    assert cleaned("\n".join(lines), layout="dotted_lines")[0] == kept


def test_joiners_and_right_to_left_text_are_kept() -> None:
    persian = "می\u200cخواهم بروم. او رفت؟"
    assert cleaned(persian)[0] == ["می\u200cخواهم بروم.", "او رفت؟"]


def test_samples_are_the_same_whatever_the_order() -> None:
    raws = [RawDocument("s", str(i), "", "", "") for i in range(100)]
    one, two, three = Drops(), Drops(), Drops()
    for raw in raws:
        one.add("x", raw, "text")
    for raw in reversed(raws):
        (two if int(raw.id) % 3 else three).add("x", raw, "text")
    two.merge(three)
    assert one.samples == two.samples and one.counts == two.counts == {"x": 100}
    ids = [int(sample.document) for _, sample in one.samples["x"]]
    assert len(set(ids)) == SAMPLES and max(ids) > 20  # not the first ones
