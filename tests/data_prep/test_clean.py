"""Layout, headings and what else is left out."""

import re
import textwrap

import pytest

from data_prep.clean import clean, is_heading, lines_of
from data_prep.formats.base import RawDocument
from data_prep.ledger import HOLE, SAMPLES, Ledger, size
from data_prep.settings import RULES
from data_prep.wikitext import plain_text

HEADINGS = "CHAPTER I. |II|Chapter 12. A Walk|The End|Foo (1990)|Early life|BOOK 1."
SENTENCES = "He ran.|“Why?”|It was so:|Part of it was true.|I saw it.|`` where is he ? ''|"
SENTENCES += "`` oh ! '' )|he ran . ''|it was so : |" + "x" * 101


def test_headings() -> None:
    assert all(map(is_heading, HEADINGS.split("|")))
    assert not any(map(is_heading, SENTENCES.split("|")))
    extracted = ["Bilateral relations.", " Theory of the early universe and time."]
    assert all(is_heading(text, dotted=True) for text in extracted)
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


LAYOUTS = [("\n\n", ""), ("\n", "    "), ("\n\n", "  "), ("\n", "")]  # between paragraphs, indent


@pytest.mark.parametrize("width", [60, 72, 88, 105, 120, 140])
@pytest.mark.parametrize("overlong", [False, True])
def test_wrapped_text_has_the_sentences_of_the_unwrapped(width: int, overlong: bool) -> None:
    story = PROSE * 4
    for between, indent in LAYOUTS:
        lines = [textwrap.fill(text, width, initial_indent=indent) for text in story]
        if overlong:
            story[7] = "The line that nobody wrapped is longer than all of the others. " * 5
            lines[7] = indent + story[7]
        sentences = cleaned(between.join(lines))[0]
        assert " ".join(sentences) == " ".join(" ".join(story).split())


CHINESE = [
    "老人每天早上都到河边去看那条旧船，他说船上的木板是他父亲年轻的时候从北方带回来的。没有人知道这是不是真的。",
    "那一年冬天特别冷，河水结了冰，孩子们在冰上走来走去，谁也不害怕。春天来了以后，船不见了，老人也不再出门。",
    "后来有人在下游的村子里看见了那条船，它被漆成了蓝色，停在一座新的石桥旁边。老人听了这个消息，只是笑了笑。",
]
THAI = "ลุงไปที่แม่น้ำทุกเช้าเพื่อดูเรือเก่า เขาบอกว่าพ่อของเขานำไม้มาจากทางเหนือ ไม่มีใครรู้ว่าจริงหรือไม่"


@pytest.mark.parametrize("width", [20, 30, 38, 40])
@pytest.mark.parametrize("between", ["\n", "\n\n"])
def test_lines_of_scripts_without_blanks_are_joined(width: int, between: str) -> None:
    for texts, indent in ((CHINESE, ""), (CHINESE, "\u3000\u3000"), ([THAI] * 3, "")):
        story = [indent + text for text in texts * 3]
        wrapped = ["\n".join(t[i : i + width] for i in range(0, len(t), width)) for t in story]
        kept = "".join(cleaned(between.join(wrapped))[0])
        assert kept.replace(" ", "") == "".join(story).replace(indent or "-", "").replace(" ", "")
    lines = [text[:9] for text in CHINESE] * 5  # as in verse
    assert paragraphs("\n".join(lines), "plain") == lines


def test_a_page_without_full_stops_has_no_headings() -> None:
    kept, ledger = cleaned("\n\n".join(["เรือเก่า", THAI, THAI]))
    assert ledger.kept["s"] == ledger.text["s"] and kept[0] == "เรือเก่า"
    speech = ["so we went to the shop", "and there was nobody there", "which was odd I thought"] * 4
    kept, ledger = cleaned("\n".join(speech))
    assert kept == speech and ledger.by_reason() == {"lines_without_stops": 12}
    names = ["Anna Bell", "Otto Carr", "Ida Dunn"] * 4
    assert cleaned("\n".join(names))[0] == [], "a list of names is no speech"


def test_more_than_half_of_the_lines_make_a_text_without_stops() -> None:
    speech = ["so we went to the shop", "and there was nobody there", "which was odd I thought"]
    for stops, kept in ((2, 5), (3, 3)):
        lines = [*speech, *["It was so, as we all know."] * stops]
        assert len(cleaned("\n\n".join(lines))[0]) == kept


def test_a_quarter_of_the_line_breaks_decides_on_the_width() -> None:
    short = "cat " * 14 + "cats"  # the only line up to 160 columns
    long = "the cat sat. " * 14
    for number, expected in ((4, 1), (5, 6)):
        assert len(paragraphs("\n".join([short, *[long.strip()] * number]), "plain")) == expected


def test_a_sentence_has_at_most_ten_thousand_characters() -> None:
    for length, kept in ((10_000, 2), (10_001, 1)):
        assert len(cleaned(f"It is so. A{'a' * (length - 2)}.")[0]) == kept


def test_speech_in_one_line_is_cut_and_counted() -> None:
    speech = "and then we went to the shop and there " * 400
    kept, ledger = cleaned(speech)
    assert " ".join(kept) == speech.strip() and len(kept) > 20
    assert ledger.by_reason() == {"sentences_cut": 1}


def test_tables_in_plain_text_go_and_code_in_markdown_stays() -> None:
    rows = [f"| {i} | It is a row. |" for i in range(9)]
    kept, ledger = cleaned("\n".join(["It is so.", "", *rows]))
    assert kept == ["It is so."] and ledger.by_reason() == {"lines_of_tables": 9}
    text = "A Vec<T> and $x<y>z$ are at <https://a.b/c>, it is so."
    kept, ledger = cleaned(text, text_format="markdown")
    assert kept == ["A Vec<T> and $x<y>z$ are at https://a.b/c, it is so."]
    assert cleaned("![" * 20_000, text_format="markdown")[1].text["s"] == 40_000, (
        "no quadratic time"
    )


def test_verse_and_lists_stay_lines() -> None:
    verse = ["The heron stands beside the reeds,", "And watches while the water clears;"]
    verse += ["He has but few and simple needs,"]
    assert paragraphs("\n".join(verse * 5), "plain") == verse * 5
    listed = ["- bread and butter", "- a coil of rope, thin but strong enough", "- lamp oil"]
    prose = textwrap.fill(PROSE[2], 72)
    text = "\n\n".join([prose, "\n".join(listed), prose, "\n".join(verse)])
    assert paragraphs(text, "plain") == [PROSE[2], *listed, PROSE[2], *verse]
    item = "- " + PROSE[3]
    wrapped = textwrap.fill(item, 72, subsequent_indent="  ")
    assert paragraphs(f"{wrapped}\n{wrapped}\n\n{prose}", "plain") == [item, item, PROSE[2]]


def test_no_width_explains_verse_and_items_but_short_lines_go_on_in_small_letters() -> None:
    nouns = ("Songs", "Tales", "Names")
    verse = [f"{noun} of the wide and slow old river that runs to the sea" for noun in nouns] * 5
    items = ["oil" + " and rope" * number for number in range(1, 16)]
    for lines in (verse, items):
        assert paragraphs("\n".join(lines), "plain") == lines
    wrapped = textwrap.fill(PROSE[2], 72).replace("had been left", "had\nbeen left")
    assert paragraphs(wrapped, "plain") == [PROSE[2]]


def test_lines_that_are_not_wrapped_are_paragraphs() -> None:
    assert paragraphs(f"{'a ' * 90}\n{'b ' * 90}", "plain") == ["a " * 90, "b " * 90]
    assert paragraphs("One.\nTwo.\n\n", "paragraphs") == ["One.", "Two."]
    listed = 'He ran far away.\nThe dogs barked!\n"Who sat on a mat?"\nNobody did.'
    assert paragraphs(listed, "plain") == listed.split("\n")


def test_words_broken_at_the_hyphen_are_whole() -> None:
    text = "The road to the harbour was steep, and it led past a well-known inn where sailors sat "
    text += "through the long evenings--they came from everywhere. " + PROSE[2]
    for width in range(60, 100, 3):
        assert paragraphs("\n".join(textwrap.wrap(text, width)), "plain") == [text]


def paragraphs(text: str, text_format: str) -> list[str]:
    return [line.text for line in lines_of(text, text_format, [])]  # type: ignore[arg-type]


def cleaned(text: str, *without: str, text_format: str = "plain") -> tuple[list[str], Ledger]:
    """Cleans a document; asserts that its ledger balances."""
    ledger = Ledger()
    raw = RawDocument("s", "d", "t", text, text_format)  # type: ignore[arg-type]
    kept, out = clean(raw, frozenset(RULES) - set(without), "auto")
    ledger.take("s", size(text))
    for entry in out:
        ledger.add(entry.reason, raw, entry.text, entry.characters, entry.cases)
    ledger.keep("s", sum(map(size, kept)))
    ledger.close("test")
    return kept, ledger


# rule: (text, what is kept with the rule, what without it, the count in the manifest)
SO, LONG = "It is so.", "A" + "a" * 10_000 + "."
RULE_CASES = {
    "unicode": ("Cafe\u0301\u200b is\u00a0\x00so.", ["Café is so."], ["Cafe\u0301\u200b is\u00a0\x00so."],
                {"characters_control": 2, "characters_composed": 1}),
    "headings": (f"Title\n\n{SO}", [SO], ["Title", SO], {"lines_heading": 1}),
    "end_matter": (f"{SO}\n\nSee also\n\nA list of things.", [SO], [SO, "A list of things."], {"lines_end_matter": 2}),
    "sentences_without_letter": (f"{SO} 1, 2, 3.", [SO], [SO, "1, 2, 3."], {"sentences_without_letter": 1}),
    "replacement_characters": (f"{SO} It is n\ufffdt.", [SO], [SO, "It is n\ufffdt."], {"sentences_not_utf8": 1}),
    "long_sentences": (f"{SO} {LONG}", [SO], [SO, LONG], {"sentences_too_long": 1}),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULE_CASES)
def test_every_rule_drops_counts_and_can_be_left_out(rule: str) -> None:
    text, with_rule, without_rule, counts = RULE_CASES[rule]
    kept, drops = cleaned(text)
    assert (kept, drops.by_reason()) == (with_rule, counts)
    kept, drops = cleaned(text, rule)
    assert kept == without_rule and not set(counts) & set(drops.by_reason())


LONG_PROSE = (
    "It was so for a very long time, as the older people of the town remembered well and liked to tell. "
    "Then the new bridge came, and with it the trade of both the valleys."
)


END_MATTER = {  # lines, of which those that begin with + stay
    "to prose": ["+It is so, as all of us know.", "References.", "Smith, a book on it.", "Works:",
                 "Lane (2001). A long way down the river. Press.", f"+{LONG_PROSE}"],
    "that is empty": ["+It is so, as all of us know.", "See also: .", "+A short line that stays in."],
    "without full stops": [f"+{LONG_PROSE}", "Further reading", "Lane, A long way down",
                           "Holt, P. (1999). The Two Valleys. Press.", "Weblinks", "A page about it, by Holt."],
}  # fmt: skip


@pytest.mark.parametrize("kind", END_MATTER)
def test_end_matter_lasts_to_prose(kind: str) -> None:
    lines = END_MATTER[kind]
    kept = cleaned("\n".join(line.lstrip("+") for line in lines), text_format="wikipedia")[0]
    assert kept == [s for line in lines if line[0] == "+" for s in split(line[1:])]


def test_end_matter_lasts_to_a_heading_of_the_same_or_a_higher_level() -> None:
    text = (
        "{kept}\n== References ==\n=== Notes ===\nA note on it.\n=== Books ===\n* Lane, ''The Valleys'', ISBN 0.\n"
        "== Legacy ==\nThe bridge stands.\n=== Sources ===\nHolt, p. 3.\n=== Today ===\nIt is open."
    )
    expected = [*split(LONG_PROSE), "The bridge stands.", "It is open."]
    kept, drops = cleaned(text.replace("{kept}", LONG_PROSE), text_format="wikitext")
    assert kept == expected and drops.by_reason()["lines_end_matter"] == 7
    markdown = "Text is here.\n\n## See also\n\nA page.\n\n### More\n\nAnother page.\n\n## Use\n\nIt is used."
    assert cleaned(markdown)[0] == ["Text is here.", "It is used."]


def split(text: str) -> list[str]:
    return [sentence if sentence.endswith(".") else sentence + "." for sentence in text.split(". ")]


ROWS = [
    "`` are n't you coming down to the boat ? ''",
    "`` marta ? ''",
    "he shook his head and looked away",
    "she had n't seen him for weeks . or was it four ?",
    "`` it 's only the wind , '' he said . ''",
    "chapter twelve",
]


def test_rows_that_are_sentences_are_kept_as_they_are() -> None:
    kept, drops = cleaned("\n".join([*ROWS, "* * *"]), text_format="sentences")
    assert kept == ROWS and drops.by_reason() == {"sentences_without_letter": 1}


def test_extracted_sentences_that_miss_something_are_dropped() -> None:
    lines = [
        "The value formula_3 is small. It grows, however, with time.",
        "The club has these members:",
        "Call codice_1 first of all of them.",
        "It was so for years: nobody cared about it.",
        "A poet wrote:",
        '"It was not so at all."',
    ]
    kept, drops = cleaned("\n".join(lines), text_format="wikipedia")
    assert kept == ["It grows, however, with time.", *lines[3:]]
    assert drops.by_reason() == {"sentences_with_holes": 3}
    assert cleaned(lines[1], "holes", text_format="wikipedia")[0] == [lines[1]]


def test_joiners_and_right_to_left_text_are_kept() -> None:
    persian = "می\u200cخواهم بروم. او رفت؟"
    assert cleaned(persian)[0] == ["می\u200cخواهم بروم.", "او رفت؟"]


def test_samples_and_counts_do_not_depend_on_the_order() -> None:
    raws = [RawDocument(f"s{i % 2}", str(i), "", "", "plain") for i in range(100)]
    whole, merged, part = Ledger(), Ledger(), Ledger()
    for raw in raws:
        whole.add("lines_heading", raw, "text", 4)
    for raw in reversed(raws):
        (merged if int(raw.id) % 3 else part).add("lines_heading", raw, "text", 4)
    merged.merge(part.to_json())
    assert merged.to_json() == whole.to_json() and whole.by_reason() == {"lines_heading": 100}
    ids = [int(document) for _, _, document, _ in whole.samples["lines_heading"]]
    assert len(set(ids)) == SAMPLES and max(ids) > 20  # not the first ones


def test_shares_remedies_and_warnings() -> None:
    drops = Ledger()
    raw = RawDocument("notes", "a#0", "", "", "plain")
    drops.documents.update(notes=10, wiki=900, whole=100)
    drops.text.update(notes=1000, wiki=8600, whole=400)  # the last one loses nothing
    for _ in range(3):
        drops.add("documents_too_short", raw, "short", 20)
    sizes = {"heading": 210, "markup": 199, "of_tables": 11, "quoted": 9}  # near the limits
    for name, characters in sizes.items():
        drops.add(f"lines_{name}", raw, "Title", characters)
    drops.add("lines_end_matter", raw._replace(source="wiki"), "Lane", 1700)
    assert drops.by_reason()["documents_too_short"] == 3
    drops.keep("notes", 511)
    drops.keep("wiki", 6900)
    drops.keep("whole", 400)
    drops.close("test")
    assert (drops.whole(), f"{drops.share():.1%}") == (1007, "78.1%")
    assert f"{drops.share(600, 200):.2%}" == "58.58%", "three of four bytes were read"
    shares = [(name, *re.findall(r"[\d.]+%|\w+(?=\. To)", text)) for name, text in drops.report()]
    assert shares == [
        ("left out", "0.0%", "17.0%", "lines_end_matter"),
        ("left out", "0.0%", "2.1%", "lines_heading"),
        ("left out", "0.0%", "2.0%", "lines_markup"),
        ("left out", "0.3%", "0.6%", "documents_too_short"),
        ("left out", "0.0%", "0.1%", "lines_of_tables"),
        # More than a fifth of a source: of its text or of its documents.
        ("warning", "0.0%", "21.0%", "lines_heading"),
        ("warning", "30.0%", "6.0%", "documents_too_short"),
    ]
    assert all("To keep them: --" in text for _, text in drops.report())
    alone = Ledger()
    alone.documents.update(notes=10)
    alone.text.update(notes=1000)
    alone.add("lines_heading", raw, "Title", 210)
    assert [name for name, _ in alone.report()] == ["warning"], "one line for one loss"


def test_what_extractors_leave_is_mended() -> None:
    text = "Ghent () is a city<br>on a river , and old.</dl>\nThe ox [] is ( ; born 3 May) here. If x < y > z it is so."
    assert cleaned(text, text_format="wikipedia")[0] == [
        "Ghent is a city on a river, and old.",
        "The ox is (born 3 May) here.",
        "If x < y > z it is so.",
    ]
    assert "[]" in cleaned(text, "markup", text_format="wikipedia")[0][0]
    kept, drops = cleaned("It is \ufffc so.")
    assert kept == ["It is  so."] and drops.by_reason() == {"characters_control": 1}


MARKUP = {
    "It rose by {{xyzzy|1}} in May.": f"It rose by {HOLE} in May.",
    "It rose.{{sfn|Roe}} It fell{{citation needed|date=May}}.<ref>Roe</ref>": "It rose. It fell.",
    "It rose.{{xyzzy|1}} It fell.": "It rose. It fell.",
    "Ghent ({{IPA|/x/}} {{respell|x}}) is a city.": "Ghent is a city.",
    "{{Infobox x\n|name=Bread}}It rose.": "It rose.",
    r"If <math>\frac{x}{2}</math> is small, it is.": f"If {HOLE} is small, it is.",
    "Call <code>f(x)</code> first.": "Call f(x) first.",
    "Salt &amp; bread&nbsp;rolls.": "Salt & bread\xa0rolls.",
    "'''Bread''' is ''old''.": "Bread is old.",
    "See [[:fr:Pain|the French]] and [[bread]]s.": "See the French and breads.",
    "He wrote [[Bread: A Life]].": "He wrote Bread: A Life.",
    "[[File:Bread.jpg|thumb|200px|A [[loaf]].]]It rose. [[Datei:X.svg|mini]]": "It rose. ",
    "It rose.[[Category:Bread|Old]][[Kategorie:Brot]]": "It rose.",
    "It is [http://a.b old {{xyzzy}}bread].": f"It is old {HOLE}bread.",
    "It rose.<ref name=a>Roe, p. 3": "It rose.",
    "Bread.\n== ''History'' ==\nOld.": "Bread.\n== History ==\nOld.",
    "He ate.\n{|\n|a\n|}\n<pre>x\ny</pre>\n{{box|a}}\nIt rose.": "He ate.\nIt rose.",
    "Bread is\nold.\n* Rolls are new.\nThey are small.": "Bread is old.\nRolls are new.\nThey are small.",
    "Cakes\nare sweet.\n#: Second.": "Cakes are sweet.\nSecond.",
}


@pytest.mark.parametrize("markup", MARKUP)
def test_markup(markup: str) -> None:
    assert plain_text(markup).strip("\n") == MARKUP[markup].strip("\n")


KAFKA = (
    "Als Gregor Samsa eines Morgens aus unruhigen Träumen erwachte, fand er sich in seinem Bett zu einem ungeheueren "
    "Ungeziefer verwandelt. Er lag auf seinem panzerartig harten Rücken und sah, wenn er den Kopf ein wenig hob, "
    "seinen gewölbten, braunen, von bogenförmigen Versteifungen geteilten Bauch, auf dessen Höhe sich die Bettdecke, "
    "zum gänzlichen Niedergleiten bereit, kaum noch erhalten konnte. Seine vielen, im Vergleich zu seinem sonstigen "
    "Umfang kläglich dünnen Beine flimmerten ihm hilflos vor den Augen."
)
LOG = [
    f"2024-05-02 12:00:{i:02},{i * 37 % 1000:03} info [main] com.example.foo - request {i % 10} took {i % 9} ms"
    for i in range(11)
]
TICKETS = [
    f"my printer number {i:02} shows error {i * 7 % 90 + 10} when i {verb} it again"
    for i, verb in enumerate(["press", "start", "touch"] * 7)
]
# text: the sentences that are kept, or their number
TEXTS = {
    "notes of minutes": (
        "It was late.\n\nNotes\n\nWe met at noon. All agreed.",
        ["It was late.", "We met at noon.", "All agreed."],
    ),
    "prose below a marked heading": (
        f"It is.\n\n## References\n\nLane, A Way.\n\n{LONG_PROSE}",
        ["It is.", *split(LONG_PROSE)],
    ),
    "emoji": ("Thanks for the quick help 😀", 1),
    "footnote": ("Berlin is the capital of Germany.[6]\n\nThe town has 300 people.¹", 2),
    "long lines without stops": ("\n".join(["we all went to the shop and then home"] * 5), 5),
    "log": ("\n".join(line + "." for line in LOG), [line + "." for line in LOG]),
    "few lines of a log": (
        "\n".join(
            f"2024-05-02 12:00:0{i},123 INFO of a part - Request {i} took 1 ms." for i in range(5)
        ),
        5,
    ),
    "German": (textwrap.fill(KAFKA, 72), 3),
    "German in four lines": (
        "Die Firma hat seit zehn Jahren viele Kunden in der Stadt und verkauft\n"
        "Brot. Am dritten Mai kam Herr Lang aus dem Norden in das Geschäft und\n"
        "kaufte zwei Brötchen. Danach ging er mit seiner Frau in den Park, der\n"
        "neben dem Rathaus liegt.",
        3,
    ),
    "ligatures": ("It was e\ufb03cient.", ["It was efficient."]),
    "broken words": (
        textwrap.fill(PROSE[2], 70)
        + "\nand all these bene-\nfits and a well-\nknown one, the benefits, were his. "
        + LONG_PROSE,
        [
            *split(PROSE[2])[:1],
            f"{split(PROSE[2])[1]} and all these benefits and a well-known one, the benefits, were his.",
            *split(LONG_PROSE),
        ],
    ),
    "lines of proportional type": (  # among rows of a table
        "\f".join(
            textwrap.fill(text, 64 + i % 5 * 3) + "\n" + "".join(f"\n{k} CARD" for k in range(5))
            for i, text in enumerate(PROSE * 2)
        ),
        [sentence for text in PROSE * 2 for sentence in re.split(r"(?<=[.;?]) (?=[A-Z])", text)],
    ),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_text_as_people_have_it(kind: str) -> None:
    text, expected = TEXTS[kind]
    kept = cleaned(text)[0]
    assert kept == expected if isinstance(expected, list) else len(kept) == expected, kept


def test_lines_of_equal_length_and_messages_stay_lines() -> None:
    assert paragraphs("\n".join(TICKETS), "plain") == TICKETS
    chat = ["MARY: By train", "JOHN: Ok", "MARY: See you then."]
    assert cleaned("\n".join(chat), text_format="lines")[0] == chat


def test_markdown_is_read_without_its_markup() -> None:
    text = """---
title: x
---
# Cats

* See [the **long** page](https://a.b/c_(d)) and
  `run()` it, but not
Elsewhere. ![](a.png)

Underlined
==========

| a | b |
|---|---|

Between tables it is.

| c | d |

```npm``` at the start is&nbsp;no block.

1. ```bash
   code
   ```

After the item it goes on.[^1]

- It is an item.
---
~~~ py
code
~~~~

Two lines
of prose.
---

[^1]: A footnote is prose, also of [^0-9] and `[^a-z]`.
[target]: http://a.b
"""
    kept, drops = cleaned(text, text_format="markdown")
    assert kept == [
        "See the long page and run() it, but not Elsewhere.",
        "Between tables it is.",
        "npm at the start is no block.",
        "After the item it goes on.",
        "It is an item.",
        "Two lines of prose.",
        "A footnote is prose, also of [^0-9] and [^a-z].",
    ]
    assert drops.by_reason()["lines_markup"] == 3 + 3 + 3 + 3 + 1
    assert drops.by_reason()["lines_heading"] == 2
    # `**long**`, the link's brackets and target, the image, back quotes, marks of footnotes, an entity.
    removed = "****[](https://a.b/c_(d))![](a.png)" + 10 * "`" + "[^1][^1]:&nbsp;"
    underlined = len("==========") - len("#")  # the mark that takes its place is one of layout
    assert drops.characters["s"]["characters_of_markup"] == len(removed) + underlined
