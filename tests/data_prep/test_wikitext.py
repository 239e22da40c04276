"""MediaWiki markup as text."""

from __future__ import annotations

import pytest

from data_prep.wikitext import HOLE, plain_text

LINES = {
    "quantities": ("It lies {{convert|12|km|mi|0}} away.", "It lies 12 kilometres away."),
    "a range": ("It is {{convert|5|to|7|ft|m}} deep.", "It is 5 to 7 feet deep."),
    "two units": ("He was {{convert|6|ft|2|in|m}} tall.", "He was 6 feet 2 inches tall."),
    "short units": ("It weighs {{cvt|3|kg}}{{convert|2|kg|lb|abbr=on}}.", "It weighs 3 kilograms2 kg."),
    "language": ("The word {{lang|fr|''pain''}} means bread.", "The word pain means bread."),
    "transliteration": ("The word {{transl|ru|ISO|khleb}} does, too.", "The word khleb does, too."),
    "Japanese": ("A {{nihongo|bread roll|麺麭|pan}} is sold.", "A bread roll (麺麭, pan) is sold."),
    "pronunciation": ("Ghent ({{IPAc-en|g|ɛ|n|t}}; {{lang-nl|Gent}}, old) is a city.", "Ghent (Gent, old) is a city."),
    "only pronunciation": ("Ghent ({{IPA|/x/}} {{respell|x}}) is a city.", "Ghent is a city."),
    "about": ("It was built {{circa|1450}} by monks.", "It was built c. 1450 by monks."),
    "marks": ("Pages 3{{ndash}}5{{nbsp}}or so{{'}}s.", "Pages 3–5 or so's."),
    "fractions": ("Add {{frac|2|1|3}} cups and {{frac|1|2}} an egg.", "Add 2 1/3 cups and 1/2 an egg."),
    "dates": ("It began on {{start date|1931|5|4}}.", "It began on May 4, 1931."),
    "as of": ("{{As of|2011}}, it is open.", "As of 2011, it is open."),
    "abbreviations": ("The {{abbr|BBL|Big Bread League}} plays.", "The BBL plays."),
    "references": ("It rose.{{sfn|Roe|1999}} It fell{{citation needed|date=May}}.<ref>Roe</ref>", "It rose. It fell."),
    "unknown after a sentence": ("It rose.{{xyzzy|1}} It fell.", "It rose. It fell."),
    "unknown in a sentence": ("It rose by {{xyzzy|1}} in May.", f"It rose by {HOLE} in May."),
    "unknown in brackets": ("It rose (by {{xyzzy|1}}) in May (the 3rd, {{xyzzy}}).", "It rose in May (the 3rd)."),
    "a box": ("{{Infobox x\n|name=Bread}}It rose.", "It rose."),
    "plain formula": ("If <math>x = 2</math>, it is so.", "If x = 2, it is so."),
    "formula": (r"If <math>\frac{x}{2}</math> is small, it is so.", f"If {HOLE} is small, it is so."),
    "code": ("Call <code>f(x)</code> first.", "Call f(x) first."),
    "labelled link": ("See [[:fr:Pain|the French]] and [[fr:Pain|bread]].", "See the French and bread."),
    "languages": ("Bread is old.[[fr:Pain]][[zh-yue:Pain]]", "Bread is old."),
    "titles with colons": (
        "He wrote [[Bread: A Life]] and [[Mission:Bread]].",
        "He wrote Bread: A Life and Mission:Bread.",
    ),
    "dictionary": ("The word [[wikt:bread]] is old.", "The word bread is old."),
    "files": ("[[File:Bread.jpg|thumb|200px|A [[loaf]].]]It rose. [[Datei:X.svg|mini]]", "It rose. "),
    "categories": ("It rose.[[Category:Bread|Old]][[Kategorie:Brot]]", "It rose."),
}


@pytest.mark.parametrize("name", LINES)
def test_lines(name: str) -> None:
    markup, text = LINES[name]
    assert plain_text(markup).strip("\n") == text.strip("\n")


def test_headings_keep_their_level() -> None:
    text = plain_text("Bread.\n== ''History'' ==\nOld.\n===Of rolls===\nNew.")
    assert [line for line in text.split("\n") if line] == [
        "Bread.",
        "== History ==",
        "Old.",
        "=== Of rolls ===",
        "New.",
    ]


def test_quotations_are_paragraphs_and_tables_vanish() -> None:
    text = plain_text(
        "He wrote:{{quote|text=Bread is old.|sign=Roe}}\n{|\n|a\n|}\n<pre>x\ny</pre>\n{{box|a}}\nIt rose."
    )
    assert [line for line in text.split("\n") if line] == ["He wrote:", "Bread is old.", "It rose."]


def test_lines_of_a_paragraph_are_joined_and_items_are_not() -> None:
    text = plain_text(
        "Bread is\nold.\n* Rolls are new.\nThey are small.\n\nCakes\nare sweet.\n# First.\n#: Second.\n== X ==\nEnd."
    )
    expected = [
        "Bread is old.",
        "Rolls are new.",
        "They are small.",
        "Cakes are sweet.",
        "First.",
        "Second.",
        "== X ==",
        "End.",
    ]
    assert text.split("\n") == expected


def test_torn_markup_leaves_no_trace() -> None:
    assert plain_text("It rose.<ref name=a>Roe, p. 3").strip() == "It rose."
    assert plain_text("{| class=x").strip() == ""
