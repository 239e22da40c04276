"""Layout, headings and what else is left out."""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path

import pytest

from data_prep.clean import SAMPLES, Drops, clean, is_heading, is_prose, paragraphs
from data_prep.read import RawDocument
from data_prep.settings import RULES


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


PROSE = [
    "When the ferry came round the point, the whole of the village stood on the pier, and no one said a word.",
    "It was late.",
    "The captain, who had not slept for two nights, brought the boat in with care; he threw the rope himself, since "
    "his only hand had been left behind at the last harbour with a broken arm. Then he looked along the row of faces, "
    "counted them twice, and asked for the doctor.",
    "Nobody moved until the boy with the lantern stepped out of the crowd and told him, in a low and hurried voice, "
    "that the doctor had gone up the valley on the evening before and that the road was under water now.",
    "“Then we shall need a cart,” said the captain, “and two strong horses, and somebody who knows the way.”",
]


@pytest.mark.parametrize("width", [60, 72, 88, 105, 120, 140])
@pytest.mark.parametrize("between, indent", [("\n\n", ""), ("\n", "    "), ("\n\n", "  "), ("\n", "")])
@pytest.mark.parametrize("overlong", [False, True])
def test_wrapped_text_has_the_sentences_of_the_unwrapped(width: int, between: str, indent: str, overlong: bool) -> None:
    story = PROSE * 4
    lines = [textwrap.fill(text, width, initial_indent=indent) for text in story]
    if overlong:
        lines[7], story[7] = (indent + "The line that nobody wrapped is longer than all of the others. " * 5,) * 2
    sentences = cleaned(between.join(lines))[0]
    assert " ".join(sentences) == " ".join(" ".join(story).split())
    assert sentences == cleaned("\n\n".join(story))[0]


@pytest.mark.parametrize("width", [60, 72, 88, 105, 120, 140])
def test_wrapped_novels_have_the_words_of_the_unwrapped(multicls_data: Path, width: int) -> None:
    texts = (multicls_data / "corpus" / "books" / "emma.txt").read_text(encoding="utf-8").split("\n")
    texts = [text.strip() for text in texts if text.strip()][:1500]
    plain = cleaned("\n\n".join(texts))[0]
    for between, indent in (("\n\n", ""), ("\n", "  ")):
        found = cleaned(between.join(textwrap.fill(text, width, initial_indent=indent) for text in texts))[0]
        assert len(found) == pytest.approx(len(plain), rel=0.03)
        assert len(" ".join(found).split()) == pytest.approx(len(" ".join(plain).split()), rel=0.01)


def test_verse_and_lists_stay_lines() -> None:
    verse = [
        "The heron stands beside the reeds,",
        "And watches while the water clears;",
        "He has but few and simple needs,",
    ]
    assert paragraphs("\n".join(verse * 5), "blocks") == verse * 5
    listed = ["- bread and butter", "- a coil of rope, thin but strong enough", "- lamp oil", "- matches, in a tin"]
    prose = textwrap.fill(PROSE[2], 72)
    text = "\n\n".join([prose, "\n".join(listed), prose, "\n".join(verse)])
    assert paragraphs(text, "blocks") == [PROSE[2], *listed, PROSE[2], *verse]
    item = "- " + PROSE[3]
    wrapped = textwrap.fill(item, 72, subsequent_indent="  ")
    assert paragraphs(f"{wrapped}\n{wrapped}\n\n{prose}", "blocks") == [item, item, PROSE[2]]


def test_long_lines_are_paragraphs() -> None:
    assert paragraphs(f"{'a ' * 90}\n{'b ' * 90}", "blocks") == ["a " * 90, "b " * 90]
    assert paragraphs("One.\nTwo.\n\n", "lines") == ["One.", "Two."]


def test_words_broken_at_the_hyphen_are_whole() -> None:
    text = (
        "The road to the harbour was narrow and steep, and it led past a well-\nknown inn where sailors would sit "
        "through the long evenings--\nthey came from everywhere. " + PROSE[2]
    )
    assert "a well-known inn" in paragraphs("\n".join(textwrap.wrap(text.replace("\n", ""), 72)), "blocks")[0]


def test_one_sentence_a_line_is_not_taken_for_a_wrapped_paragraph() -> None:
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
        "It is so.\n\nAll rights reserved by him.\n\n[Footnote 3: It was not.]\n\nTranscriber's Note:\n\nWe mended it.",
        ["It is so."],
        [
            "It is so.",
            "All rights reserved by him.",
            "[Footnote 3: It was not.]",
            "Transcriber's Note:",
            "We mended it.",
        ],
        {"lines_boilerplate": 4},
    ),
    "end_matter": (
        "It is so.\n\nSee also\n\nA list of things.",
        ["It is so."],
        ["It is so.", "A list of things."],
        {"lines_end_matter": 2},
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


LONG_PROSE = (
    "It was so for a very long time, as the older people of the town remembered well and liked to tell. "
    "Then the new bridge came, and with it the trade of both the valleys."
)


def test_end_matter_of_an_article_ends_where_prose_begins() -> None:
    kept = "It is so, as all of us know."
    lines = [
        kept,
        "References.",
        "Smith, a book on it.",
        "Works:",
        "Lane (2001). A long way down the river. Press.",
        LONG_PROSE,
    ]
    assert cleaned("\n".join(lines), layout="dotted_lines")[0] == [kept, *split(LONG_PROSE)]
    lines = [kept, "See also: .", "A short line that stays in.", LONG_PROSE]
    assert cleaned("\n".join(lines), layout="dotted_lines")[0] == [kept, lines[2], *split(LONG_PROSE)]


def test_a_list_without_full_stops_stays_end_matter() -> None:
    lines = [
        LONG_PROSE,
        "Further reading",
        "Lane, A long way down",
        "Holt, P. (1999). The Two Valleys. Press.",
        "Weblinks",
    ]
    assert cleaned("\n".join([*lines, "A page about it, by Holt."]), layout="lines")[0] == split(LONG_PROSE)


def test_end_matter_lasts_to_a_heading_of_the_same_or_a_higher_level() -> None:
    text = (
        "{kept}\n== References ==\n=== Notes ===\nA note on it.\n=== Books ===\n* Lane, ''The Valleys'', ISBN 0.\n"
        "== Legacy ==\nThe bridge stands.\n=== Sources ===\nHolt, p. 3.\n=== Today ===\nIt is open."
    )
    expected = [*split(LONG_PROSE), "The bridge stands.", "It is open."]
    kept, drops = cleaned(text.replace("{kept}", LONG_PROSE), layout="wikitext")
    assert kept == expected and drops.counts["lines_end_matter"] == 7
    markdown = "Text is here.\n\n## See also\n\nA page.\n\n### More\n\nAnother page.\n\n## Use\n\nIt is used."
    assert cleaned(markdown)[0] == ["Text is here.", "It is used."]


def test_prose() -> None:
    assert is_prose(LONG_PROSE) and not is_prose("It is short. It is no prose.")
    assert not is_prose(
        "Holt, P. (1999). The Two Valleys, pp. 3-14, Press of the Valley, ISBN 0-00-000000-0. Retrieved. " * 2
    )


def split(text: str) -> list[str]:
    return [sentence if sentence.endswith(".") else sentence + "." for sentence in text.split(". ")]


ROWS = [
    "`` are n't you coming down to the boat ? ''",
    "`` marta ? ''",
    "he shook his head and looked away",
    "she had n't seen him for three weeks . or was it four ?",
    "`` it 's only the wind , '' he said . ''",
    "chapter twelve",
]


def test_rows_that_are_sentences_are_kept_as_they_are() -> None:
    kept, drops = cleaned("\n".join([*ROWS, "* * *"]), layout="sentences")
    assert kept == ROWS and drops.counts == {"sentences_without_letter": 1}


@pytest.mark.parametrize("row", ["`` where is he ? ''", "`` oh ! '' )", "he ran . ''", "it was so : "])
def test_blanks_before_closing_marks_make_no_heading(row: str) -> None:
    assert not is_heading(row)


def test_novels_rewritten_as_rows_lose_none(multicls_data: Path) -> None:
    text = (multicls_data / "corpus" / "books" / "emma.txt").read_text(encoding="utf-8").lower()
    rows = [" ".join(row.split()) for row in text.replace(". ", " .\n").replace('"', " '' ").split("\n")]
    rows = [row for row in rows if any(map(str.isalpha, row))]
    assert len(rows) > 5000 and cleaned("\n".join(rows), layout="sentences")[0] == rows


def test_contents_of_an_ebook_are_left_out() -> None:
    entries = ["I. The Ferry ......... 3", "II. In Which Nobody Speaks.    17", "III. The Road Under Water. . . . . 29"]
    assert cleaned("\n".join([*entries, PROSE[0]]))[0] == [PROSE[0]]
    table = ["CONTENTS", "", "The Ferry Comes.", "Nobody Speaks; The Doctor Is Away.", "", PROSE[2]]
    assert cleaned("\n".join(table))[0] == cleaned(PROSE[2])[0]


def test_extracted_sentences_that_miss_something_are_dropped() -> None:
    lines = [
        "The value formula_3 is small. It grows, however, with time.",
        "The club has these members:",
        "Call codice_1 first of all of them.",
        "It was so for years: nobody cared about it.",
        "A poet wrote:",
        '"It was not so at all."',
    ]
    kept, drops = cleaned("\n".join(lines), layout="dotted_lines")
    assert kept == ["It grows, however, with time.", *lines[3:]]
    assert drops.counts == {"sentences_with_holes": 3}
    assert cleaned(lines[1], "holes", layout="dotted_lines")[0] == [lines[1]]


@pytest.mark.parametrize(
    "first", ["Lark may refer to:", "LARK can also refer to the following:.", "Lark (bird) commonly refers to:"]
)
def test_pages_that_only_list_meanings_are_dropped(first: str) -> None:
    kept, drops = cleaned(f"{first}\nA bird that sings in the morning.\nA town.", layout="dotted_lines")
    assert kept == [] and drops.counts == {"documents_disambiguation": 1}
    assert cleaned("The word may refer to many things. It is old.", layout="dotted_lines")[0]


def test_mojibake_is_repaired() -> None:
    pytest.importorskip("ftfy")
    kept, drops = cleaned("The cafÃ© isnâ€™t open. It was so.\n\nÂ«Ã‰tienne est lÃ\xa0Â», dit-il.")
    assert kept[:2] == ["The café isn’t open.", "It was so."] and kept[2] == "«Étienne est là», dit-il."
    assert drops.counts == {"lines_mojibake_repaired": 2}
    fine = "Ça va à Ãlcool. Der Bär, die Größe, naïve “text”… São."
    assert cleaned(fine)[0] == cleaned(fine, "mojibake")[0]


def test_a_rule_that_takes_much_of_a_file_is_told() -> None:
    drops = Drops()
    for number in range(2):
        text = "\n".join(["a title without an end " * 4] * 20 + [LONG_PROSE] * 5)
        other = Drops()
        clean(RawDocument("s", f"notes.txt#{number}", "", text, "lines"), frozenset(RULES), "en", other)
        drops.merge(other)
    clean(RawDocument("s", "fine.txt#0", "", LONG_PROSE * 20, "lines"), frozenset(RULES), "en", drops)
    assert drops.characters["notes.txt"] == {"": 2 * len(text), "headings": 2 * 20 * 92}
    (warning,) = drops.warnings()
    assert warning.startswith("notes.txt: the rule headings dropped 68%") and warning.endswith("--without headings.")
    drops.characters["short.txt"] = Counter({"": 1999, "headings": 1999})
    assert drops.warnings() == [warning]


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
