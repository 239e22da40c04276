"""Listing, dividing and reading the input: every path and record is read or counted with its reason."""

import bz2
import gzip
import itertools
import json
import lzma
import os
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.clean import clean
from data_prep.formats import FORMATS, base, read_documents
from data_prep.formats.base import BadRecord, SourceFile
from data_prep.formats.recognise import HEAD_BYTES
from data_prep.prepare import group_units
from data_prep.settings import RULES
from multicls.errors import UserError
from tests.data_prep.conftest import listed, options, prepared, read_all, story
from tests.data_prep.test_ledger import crawl

PAGE = "<page><title>Cat</title><ns>0</ns><id>1</id><revision><text>A cat.</text></revision></page>"
LINE = json.dumps({"text": "The cat sat."}) + "\n"
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256))
HTML = "<!DOCTYPE html>\n<html><head><title>Cat</title></head><body>The cat sat.</body></html>"


def parquet(**columns: list[Any]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue().to_pybytes())


# name: (content, reason to skip it or format, reasons of dropped documents, number of documents read)
HOSTILE: dict[str, tuple[bytes | str, str, list[str], int]] = {
    "plain.txt": ("The cat sat.", "text", [], 1),
    "bom.txt": (b"\xef\xbb\xbfThe cat sat.", "text", [], 1),
    "mac.txt": ("The cat sat.\rIt ran.", "text", [], 1),
    "tag.txt": ("<nobody> said a word.\n", "text", [], 1),
    "long line.txt": ("cat " * 100_000, "text", [], 1),
    "late bytes.txt": (b"The cat sat.\n" * 6000 + b"\xff\n", "text", [], 1),
    "עברית.txt": ("הילד הלך.", "text", [], 1),
    "😀 name\n.txt": ("The cat sat.", "text", [], 1),
    "nul.txt": (b"The cat\0sat.", "binary", [], 0),
    "paper.pdf": (b"%PDF-1.4\n1 0 obj\nendobj\n", "pdf", ["records_file_damaged"], 0),
    "packed.zip": (b"PK\x03\x04\x14\0\0\0", "zip", ["records_file_damaged"], 0),
    "empty.txt": (b"", "empty", [], 0),
    "good.txt.gz": (gzip.compress(b"The cat sat."), "text", [], 1),
    "good.txt.bz2": (bz2.compress(b"The cat sat."), "text", [], 1),
    "good.txt.zst": (pa.Codec("zstd").compress(b"The cat sat.", asbytes=True), "text", [], 1),
    "no.txt.gz": (b"The cat sat.", "damaged", [], 0),
    "no.txt.zst": (b"The cat sat.", "damaged", [], 0),
    "torn.txt.gz": (gzip.compress(os.urandom(9000).hex(" ", 40).encode().replace(b" ", b".\n"))[:-9],
     "text", ["records_file_damaged"], 1),
    "torn.jsonl.gz": (gzip.compress(b"".join(b'{"text": "%d"}\n' % (i * i) for i in range(20_000)))[:-5000], "jsonl",
     ["records_file_damaged"], -1),
    "flipped.jsonl.gz": (gzip.compress(LINE.encode() * 9000)[:-8] + bytes(8), "jsonl", ["records_file_damaged"], 9000),
    "good.jsonl": (LINE * 3, "jsonl", [], 3),
    "null.jsonl": (LINE + '{"text": null}\n{"other": 1}\n{"text": 7}\n' + LINE, "jsonl",
     ["records_without_text"] * 2, 3),
    "torn.jsonl": (LINE + '{"text": "The c\n' + LINE + '{"te', "jsonl", ["records_not_json"] * 2, 2),
    "torn first.jsonl": ('The c"}\n' + LINE, "jsonl", ["records_not_json"], 1),
    "deep.jsonl": (LINE + "[" * 100_000 + "\n", "jsonl", ["records_not_json"], 1),
    "nothing in it.jsonl": (LINE + '{"id": "", "title": "", "text": ""}\n', "jsonl", [], 2),
    "surrogate.jsonl": (LINE + '{"text": "\\udc00"}\n', "jsonl", [], 2),
    "latin.jsonl": (LINE.encode() * 3000 + b'{"text": "\xe9"}\n', "jsonl", [], 3001),
    "latin only.jsonl": (b'{"text": "\xe9"}\n' * 9, "not_utf8", [], 0),
    "array.json": ('[{"text": "a"}, 7]', "json", ["records_without_text"], 1),
    "pretty.json": ('{\n "text": "a"\n}', "json", [], 1),
    "wiki_00": ('<doc id="1" url="" title="A">\nA\n\nThe cat.\n</doc>\n', "wikiextractor", [], 1),
    "wiki_01": ('<doc id="1" title="A">\nLost\n<doc id="2" title="B">\nThe cat.\n</doc>\nLost\n<doc id="3">\nLost.',
     "wikiextractor", ["records_doc_not_closed"] * 3, 1),
    "dump.xml": (f"<mediawiki>{PAGE}</mediawiki>", "mediawiki", [], 1),
    "torn.xml.gz": (gzip.compress(f"<mediawiki>{PAGE * 400}{os.urandom(9000).hex()}".encode())[:-4000], "mediawiki",
     ["records_file_damaged"], 400),
    "half.xml": (f"<?xml version='1.0'?><mediawiki>{PAGE.replace('A', '&#xD800;')}{PAGE}<page>", "mediawiki",
     ["records_not_xml", "records_file_damaged"], 1),
    "bomb.xml": ('<!DOCTYPE mediawiki [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]><mediawiki>' + PAGE.replace("A", "&b;"),
     "mediawiki", ["records_not_xml"], 0),
    "tei.xml": ("<?xml version='1.0'?>\n<!-- a -->\n<TEI><p>A</p></TEI>", "other_xml", [], 0),
    "readme.md": ('<h1 align="center">Cat</h1>\n\nThe cat sat.', "text", [], 1),
    "page.html": (HTML, "html", [], 1),
    "fragment.html": ("<div class='a'><p>The cat sat.</p></div>", "html", [], 1),
    "rows.csv": ('text,label\n"The ""cat"".\n\nIt ran.",1\na,1,2\n', "csv", ["records_not_a_row"], 1),
    "stray.tsv": ('text\tn\n"A cat.\t1\nA dog.\t2\n"A" man.\t3\n"End.\t6\n', "csv", [], 4),
    "stray.csv": ('text,n\nA cat.,1\n"A dog.,2\nA man.,3\n', "csv", ["records_not_a_row"], 1),
    "german.csv": ('"Name, Vorname";text\n"A, B";"A cat."\n', "csv", [], 1),
    "rows.jsonl": ('{"name": "a header"}\n' + LINE, "jsonl", ["records_without_text"], 1),
    "other.jsonl": ('{"body": "a"}\n', "missing_field", [], 0),
    "inner.jsonl": ('{"body": {"text": "a"}}\n', "missing_field", [], 0),
    "torn.json": (json.dumps([{"text": "a cat"}] * 9)[:-3], "json", ["records_file_damaged"], 8),
    "lines.json": ('{"text": "a cat",\n "id": 1}\n{"text": "a dog",\n "id": 2}\n', "json", [], 2),
    "many.json": (json.dumps([{"n": {"id": 1}, "text": "a cat"}] * 4000), "json", [], 4000),
    "rows.tsv.gz": (gzip.compress(b"text\tlabel\n"), "csv", [], 0),
    "null.parquet": (parquet(text=["a", None]), "parquet", ["records_without_text"], 1),
    "torn.parquet": (parquet(text=["a", "b"])[:-9], "parquet", ["records_file_damaged"], 0),
    "no.parquet": (b"PAR1", "parquet", ["records_file_damaged"], 0),
    ".hidden.txt": ("The cat sat.", "hidden", [], 0),
}  # fmt: skip


def dropped(records: list[Any]) -> list[str]:
    """The reasons of the bad records."""
    return [record.reason for record in records if isinstance(record, BadRecord)]


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name, (content, *_) in HOSTILE.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe.txt")).write_text("The cat sat.")
    scan = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("/locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    for name in (".git", "below", "locked"):
        (folder / name).mkdir()
    (folder / "below" / "plain.txt").write_text("The cat sat.")
    (folder / "below" / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "below" / "nowhere").symlink_to(folder / "missing")
    (folder / "below" / "linked.txt").symlink_to(folder / "plain.txt")
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(os.path.relpath(folder / "socket"))
    return folder


NO_FILES = {
    "below/loop": "link",
    ".git": "hidden",
    "below/nowhere": "unreadable",
    "locked": "unreadable",
    "pipe": "no_file",
    "socket": "no_file",
}


@pytest.mark.parametrize("extractor", [True, False])
def test_hostile_files(extractor: bool, hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("trafilatura") if extractor else None
    monkeypatch.setitem(sys.modules, "trafilatura", module)
    files, all_skipped = listed(hostile)
    skipped = {os.path.relpath(entry.path, hostile): entry.reason for entry in all_skipped}
    formats = {file.name: file.format for file in files}
    assert len(skipped) == len(all_skipped) and len(formats) == len(files)
    expected = {name: what for name, (_, what, *_) in HOSTILE.items()} | NO_FILES
    expected |= dict.fromkeys(("\\xff\\xfe.txt", "below/plain.txt", "below/linked.txt"), "text")
    if not extractor:
        expected |= dict.fromkeys(("page.html", "fragment.html"), "not_installed")
    assert {name for name, what in expected.items() if what in FORMATS} == formats.keys()
    assert formats.items() <= expected.items()
    assert all(reason == expected[name] for name, reason in skipped.items()), skipped
    for file in files:
        if file.format == "html":
            continue
        documents = list(read_documents(file, options(hostile)))
        _, _, reasons, number = HOSTILE.get(file.name, (b"", "", [], 1))
        assert dropped(documents) == reasons, file
        kept = len(documents) - len(reasons)
        assert kept == number or (number < 0 and kept > 1000), file
        json.dumps(documents, ensure_ascii=False).encode()


def test_inputs_of_which_nothing_can_be_read(hostile: Path) -> None:
    (hostile / "only").mkdir()
    with pytest.raises(UserError, match="only: .*no file in this folder"):
        listed(hostile / "only")
    for name, content in {"a.png": PNG, "b.png": PNG, "c.txt": b""}.items():
        (hostile / "only" / name).write_bytes(content)
    with pytest.raises(UserError) as error:  # all at once
        listed(hostile / "only", hostile / "nowhere", "wikipedai", "a/b.txt")
    problems = error.value.problems
    assert "2 x an image" in problems[0] and "1 x it has no bytes" in problems[0]
    assert len(problems) == 4 and "Did you mean 'wikipedia'" in problems[2]


def test_include_exclude_and_format(tmp_path: Path) -> None:
    for name in ("a.txt", "b.md", "drafts/c.txt", "drafts/old/d.txt", "e.txt", "rows.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("The cat sat.")
    files, skipped = listed(tmp_path, include=["*.txt"], exclude=["drafts/*", "e.*"])
    assert [file.name for file in files] == ["a.txt"]
    assert [entry.reason for entry in skipped] == ["excluded"] * 5
    assert {file.format for file in listed(tmp_path, format="text")[0]} == {"text"}
    assert len(listed(tmp_path, format="text")[0]) == 6


def test_names_of_sources(tmp_path: Path) -> None:
    for name in ("en.wiki/a.txt", "en.books/a.txt", "Dr. No.txt", "b.jsonl.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        data = gzip.compress(LINE.encode()) if name.endswith("gz") else b"The cat."
        (tmp_path / name).write_bytes(data)
    names = ("en.wiki", "en.books", "Dr. No.txt", "b.jsonl.gz")
    documents = read_all(*(tmp_path / name for name in names), f"x={tmp_path / 'en.wiki'}")
    assert [d.source for d in documents] == ["en.wiki", "en.books", "Dr. No", "b", "x"]
    assert documents[2].title == "Dr. No"


# Units.


@given(
    lines=st.lists(st.integers(0, 60), min_size=1, max_size=40),
    share=st.integers(5, 300),
    last=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_shares_of_a_file_have_its_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[int], share: int, last: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "shares.jsonl"
    texts = [json.dumps({"text": "é" * size}, ensure_ascii=False) for size in lines]
    path.write_text("\n".join(texts) + "\n" * last)
    expected = read_all(path)
    assert read_all(path, large=share) == expected and len(expected) == len(lines)


def test_units_depend_on_nothing_else(tmp_path: Path) -> None:
    sizes: Any = {"small": 20_000, "large": 30_000}
    for number in range(12):
        (tmp_path / f"{number:02d}.txt").write_text("The cat sat. " * 100)
    (tmp_path / "large.jsonl").write_text(LINE * 4000)
    noise = json.dumps({"text": os.urandom(40_000).hex()}).encode()
    (tmp_path / "compressed.jsonl.gz").write_bytes(gzip.compress(noise))  # cannot be cut
    files, _ = listed(tmp_path)

    def keys(files: list[SourceFile], identity: int = 1) -> list[str]:
        return [unit.key for unit in group_units(files, {"a": identity}, **sizes)]

    made = group_units(files, {"a": 1}, **sizes)
    small = [unit for unit in made if unit.files[-1].size < 2000]
    assert sum(len(unit.files) for unit in small) == 12 and max(len(u.files) for u in small) <= 4
    starts = [file.start for unit in made[len(small) + 1 :] for file in unit.files]
    assert starts == list(range(0, files[-1].size, 30_000))
    before = keys(files)
    assert len(set(before)) == len(before) and not set(keys(files, 2)) & set(before)
    assert keys([*files, files[0]])[:-1] == before[:-1]
    os.utime(tmp_path / "05.txt", ns=(1, 1))
    after = keys(listed(tmp_path)[0])
    changed = [number for number in range(len(before)) if before[number] != after[number]]
    assert [[file.name for file in made[n].files].count("05.txt") for n in changed] == [1]


def test_a_small_file_that_comes_changes_few_units() -> None:
    notes = [SourceFile(f"/n/{i}", "n", f"{i}.txt", "text", 900, "1") for i in range(3000)]
    books = [SourceFile(f"/b/{i}", "b", f"b{i}", "text", 50_000, "1") for i in range(90)]
    new = SourceFile("/n/a", "n", "a.txt", "text", 900, "1")
    before, after = (
        group_units(files, {}, 200_000) for files in (notes + books, [new, *notes, *books])
    )
    assert len({unit.key for unit in after} - {unit.key for unit in before}) <= 3 < len(before) / 10


def test_files_of_one_name_size_and_date_are_both_read(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    for month, start in (("jan", 0), ("feb", 1)):
        (tmp_path / month).mkdir()
        path = tmp_path / month / "data.txt"
        path.write_text(story(40, start).ljust(3000))
        os.utime(path, ns=(1, 1))
    same = [f"s={tmp_path / month}" for month in ("jan", "feb")]
    corpus = prepared(tiny_tokenizer, tmp_path / "out", *same)
    assert corpus.num_documents == 2 and corpus.manifest["dropped"] == {}


# Containers and text formats.

PARAGRAPHS = "The cat sat on one mat and then it ran.\n\nBilateral relations.\n\n"
ARTICLE = PARAGRAPHS + "All those dogs who had come to eat dinner here ran far away."
URL = "https://en.wikipedia.org/wiki?curid=7"
RECORD = 1 << 20  # bytes of the longest record in a test
HOLE = 5 * RECORD // 2


def test_one_text_has_one_format_in_every_container(tmp_path: Path) -> None:
    row = {"id": "7", "url": URL, "title": "C & t", "text": f"C & t\n\n{ARTICLE}"}
    extract = f'<doc id="7" url="{URL}" title="C &amp; t">\nC & t\n\n{ARTICLE}\n</doc>\n'
    (tmp_path / "wiki_00").write_text(extract)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    pq.write_table(pa.table({name: [value] for name, value in row.items()}), tmp_path / "x.parquet")
    datasets.Dataset.from_list([row]).save_to_disk(tmp_path / "saved")
    bare = tmp_path / "bare.jsonl"
    bare.write_text(json.dumps({"text": row["text"], "title": "C & t"}) + "\n")
    names = ("wiki_00", "rows.jsonl", "x.parquet", "saved")
    articles = [document for name in names for document in read_all(tmp_path / name)]
    articles += read_all(bare, format="wikipedia")
    assert {article.layout for article in articles} == {"wikipedia"} and len(articles) == 5
    assert {article.text.strip() for article in articles} == {ARTICLE}
    blog = row | {"url": "https://blog.example.org/wiki/cat"}  # these four fields alone say nothing
    bare.write_text(json.dumps(blog) + "\n")
    assert read_all(bare)[0].layout == "plain"


def row_with(remainder: int, count: int = 1) -> list[str]:
    """Rows whose hash has a remainder modulo 1024."""
    rows = (f"{number} the cat sat ." for number in itertools.count())
    found = (r for r in rows if xxhash.xxh3_64_intdigest(r.encode()) % 1024 == remainder)
    return list(itertools.islice(found, count))


def test_rows_that_are_sentences_begin_documents_by_their_text(tmp_path: Path) -> None:
    """A row whose hash is 0 modulo 512 begins a document, if the last one has 256 rows; 1,024 rows are one, too."""
    (plain, other), (begins,) = row_with(256, 2), row_with(512)
    for sizes, expected in (
        ((255, 255, 9), [511, 10]),  # after 255 rows none begins
        ((256, 255, 1025), [256, 256, 1024, 2]),
    ):
        blocks = [[other, *[plain] * (size - 1)] for size in sizes]
        rows = blocks[0] + [row for block in blocks[1:] for row in (begins, *block)]
        (tmp_path / "rows.txt").write_text("\n".join(rows))
        texts = [d.text for d in read_all(tmp_path / "rows.txt", documents="sentences")]
        assert "\n".join(texts).split("\n") == rows, "nothing is cut out of the stream"
        assert [len(text.split("\n")) for text in texts] == expected
    (tmp_path / "short.txt").write_text("one .\ntwo .\n\nthree .")
    short = read_all(tmp_path / "short.txt", documents="sentences")
    assert [d.text for d in short] == ["one .\ntwo .", "three ."]


def test_a_document_is_named_by_the_byte_at_which_it_begins(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("\nBär one.\ntwo\n\n \nthree\r\nfour\n\nfive")
    documents = read_all(tmp_path / "in.txt", documents="blank_line")
    assert [d.id for d in documents] == [f"in.txt#{offset}" for offset in (1, 18, 31)]
    assert [d.text for d in documents] == ["Bär one.\ntwo", "three\nfour", "five"]


def test_mediawiki_pages(tmp_path: Path) -> None:
    other = PAGE.replace("<ns>0", "<ns>1") + PAGE.replace("<ns>", "<redirect/><ns>")
    pages = [PAGE.replace("A cat.", "A cat. " * n) for n in (1, 90_000, 3)]
    text = f"<mediawiki>{other}{pages[0]} \n{pages[1]}{pages[2]}</mediawiki>"
    (tmp_path / "dump.xml.bz2").write_bytes(bz2.compress(text.encode()))
    documents = read_all(tmp_path / "dump.xml.bz2")
    assert dropped(documents[:2]) == ["pages_not_articles", "pages_redirects"] == dropped(documents)
    assert [len(d.text.split("A cat.")) - 1 for d in documents[2:]] == [1, 90_000, 3]


@pytest.mark.parametrize("name", ["dump.xml", "dump-multistream.xml.bz2", "rows.parquet"])
def test_shares_of_dumps_and_of_parquet_have_all_documents(name: str, tmp_path: Path) -> None:
    """Shares have each document once, also if a cut lies inside a page, its tags, a stream or a group of rows."""
    pages = [PAGE.replace(">1<", f">{n}<").replace("A cat.", f"{n} cats." * n) for n in range(40)]
    groups = ["".join(pages[n : n + 4]) for n in range(0, 40, 4)]
    parts = ["<mediawiki>", *groups, "</mediawiki>"]
    if name.endswith("parquet"):
        table = pa.table({"text": [f"{n} cats." * n for n in range(40)]})
        pq.write_table(table, tmp_path / name, row_group_size=4)
    elif name.endswith("bz2"):
        (tmp_path / name).write_bytes(b"".join(bz2.compress(part.encode()) for part in parts))
    else:
        (tmp_path / name).write_text("".join(parts))
    whole = read_all(tmp_path / name)
    assert len({document.id for document in whole}) == len(whole) == 40
    for large in range(97, 130):
        assert read_all(tmp_path / name, large=large) == whole


def test_a_damaged_share_has_lost_its_own_text_only(tmp_path: Path) -> None:
    (tmp_path / "dump.xml").write_text(f"<mediawiki>{PAGE * 40}<page>")
    documents = read_all(tmp_path / "dump.xml", large=500)
    assert len(documents) == 41 and documents[-1].reason == "records_file_damaged"
    assert 0 < documents[-1].characters < 500


def compressor(name: str) -> Any:
    """A function that compresses bytes as one stream."""
    codec = {"zst": "zstd"}.get(name, name)
    return lambda data: bytes(pa.Codec(codec).compress(data, asbytes=True))


PACKERS: dict[str, Any] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
PACKERS |= {name: compressor(name) for name in ("zst", "lz4")}


@pytest.mark.parametrize("packed", PACKERS)
def test_nothing_after_damage_is_passed_over_in_silence(packed: str, tmp_path: Path) -> None:
    """Text after a damaged stream is read or reported: the second of three has no beginning, or the last no end."""
    streams = [PACKERS[packed](f"{story(400, n)}\n".encode()) for n in range(3)]
    path, text = tmp_path / f"a.txt.{packed}", "\n".join(story(400, n) for n in range(3))
    zeros = b"" if packed in ("zst", "lz4") else bytes(64)
    path.write_bytes(zeros.join([*streams, b""]))
    (document,) = read_all(path)
    assert document.text == text
    first, second, last = streams
    for content in (first + b"torn" + second[4:] + last, b"".join(streams)[:-9]):
        path.write_bytes(content)
        *documents, lost = read_all(path)
        assert lost.reason == "records_file_damaged"
        assert all(text.startswith(document.text) for document in documents)


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz", "a-multistream.xml.bz2"])
def test_of_an_archive_that_is_cut_off_all_that_is_whole_is_read(name: str, tmp_path: Path) -> None:
    """And the end is reported, also in the last share of a dump."""
    parts = [crawl([story(9, n)]) for n in range(3)]
    if "xml" in name:
        parts = [f"<mediawiki>{PAGE}".encode(), PAGE.encode(), PAGE.encode()]
    if packed := name.split(".")[2:]:
        parts = list(map(PACKERS[packed[0]], parts))
    (tmp_path / name).write_bytes(b"".join(parts)[:-40])
    records = read_all(tmp_path / name, large=len(parts[0]))
    assert len(records) >= 3 and dropped(records[:2]) == []
    assert dropped(records) == ["records_file_damaged"]
    assert records[1].text == ("A cat." if "xml" in name else story(9, 1))


def test_the_newest_revision_of_a_page_is_read(tmp_path: Path) -> None:
    dates = ("2020-01-02T00:00:00Z", "2024-05-06T00:00:00Z", "2022-03-04T00:00:00Z")
    revisions = (
        f"<revision><timestamp>{d}</timestamp><text>Of {d[:4]}.</text></revision>" for d in dates
    )
    page = f"<page><title>Cat</title><ns>0</ns><id>1</id>{''.join(revisions)}</page>"
    (tmp_path / "dump.xml").write_text(f"<mediawiki>{page}</mediawiki>")
    (document,) = read_all(tmp_path / "dump.xml")
    older = [(entry.reason, entry.characters) for entry in document.left]
    assert document.text == "Of 2024." and older == [("pages_older_revisions", len("Of2020."))] * 2


def test_several_text_fields_are_joined(tmp_path: Path) -> None:
    rows = [
        {"subject": "A <b>cat</b>", "body": "It &amp; I ran.<br>So", "n": 1},
        {"body": "It sat."},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join([*map(json.dumps, rows), '{"n": 2}']))
    documents = read_all(tmp_path / "rows.jsonl", text_field=["subject", "body"])
    texts = ["A cat\n\nIt & I ran.\n\nSo", "It sat."]
    assert [d.text for d in documents[:2]] == texts
    assert dropped(documents) == ["records_without_text"]
    (body, *_) = read_all(tmp_path / "rows.jsonl", text_field=["body"])
    assert body.text == "It & I ran.\n\nSo" and [documents[0].titles, body.titles] == [1, 0]
    sentences, _ = clean(documents[0], frozenset(RULES), "en")
    assert sentences == ["A cat", "It & I ran."], "of two headings, the one that is a field stays"
    row = {"title": "See also", "text": "See also\n\nIt ran.", "url": URL}
    (tmp_path / "wiki.jsonl").write_text(json.dumps(row))
    texts = [
        read_all(tmp_path / "wiki.jsonl", text_field=f)[0].text
        for f in (["title", "text"], ["text"])
    ]
    assert texts == ["See also\n\nSee also\n\nIt ran.", "\nIt ran."]


def test_a_field_of_several_that_is_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("title,body\nA cat,It ran.\n")
    with pytest.raises(UserError, match=r"\('bdy'\. Did you mean 'body'\?\); --text_field"):
        listed(tmp_path / "rows.csv", text_field=["title", "bdy"])


@pytest.mark.parametrize("rows", [1, 3])
def test_listing_reads_no_further_than_the_row_that_has_all_fields(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"title": "A cat"}\n' * (rows - 1) + LINE * 99)
    read, loads = list[str](), json.loads

    def counted(text: str) -> Any:
        read.append(text)
        return loads(text)

    monkeypatch.setattr(json, "loads", counted)
    listed(tmp_path / "rows.jsonl")
    assert len(read) == rows


def test_html_in_fields_and_what_only_looks_like_it(tmp_path: Path) -> None:
    text = "<dl><dt>A <kbd class='x'>cat</kbd></dt></dl><style>p {a: b}</style>"
    text += "<!-- no -->If x <b and c> d, <a href=y>it</a> ran <input> &copy=1 " + "<a k=v " * 9000
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": text}))
    (document,) = read_all(tmp_path / "rows.jsonl")
    begin, _, rest = " ".join(document.text.split()).partition(" <a")
    assert begin == "A cat If x <b and c> d, it ran <input> &copy=1" and rest, "no quadratic time"


def test_subtitles_are_sentences_or_cues(tmp_path: Path) -> None:
    """Words that look like the number of a cue are spoken; styles are not."""
    cues = [f"{i}\n00:0{i} --> 00:0{i + 1}\n{{\\an8}}And in\n1984\n" for i in range(1, 9)]
    for end, kept in (("", ["And in", "And in"]), (" &amp; me.", ["And in 1984 & me."] * 2)):
        (tmp_path / "film.srt").write_text("\n".join(cues).replace("1984", f"1984{end}"))
        (document,) = read_all(tmp_path / "film.srt")
        sentences, out = clean(document, frozenset(RULES), "en")
        assert sentences[:2] == kept
        assert [entry.reason for entry in out] == ["sentences_without_letter"] * (0 if end else 8)


@pytest.fixture
def small_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the longest record and document 64 times smaller."""
    monkeypatch.setattr(base, "LONGEST_RECORD", RECORD)
    monkeypatch.setattr(base, "LONGEST_DOCUMENT", 1 << 16)


def with_hole(path: Path, begin: str, end: str) -> Path:
    """Writes a text file of more than `RECORD` bytes, most of them zeros that take no room on the disk."""
    with path.open("w") as file:
        file.write(f"{begin}{'a' * HEAD_BYTES}")
        file.seek(HOLE)
        file.write(end)
    return path


def test_long_records_are_bounded(small_records: None, tmp_path: Path) -> None:
    paragraphs = ["The cat sat. " * 1250] * 10
    (tmp_path / "in.txt").write_text("\n\n".join(paragraphs))
    texts = [document.text for document in read_all(tmp_path / "in.txt")]
    assert len(texts) == 2 and "\n".join(texts).replace("\n", "") == "".join(paragraphs)
    (tmp_path / "wiki_00").write_text('<doc id="1" title="A">\n' + f"{'Lost ' * 1000}\n" * 62)
    lost = read_all(tmp_path / "wiki_00")
    assert sum(record.characters for record in lost) == 62 * 4000
    assert dropped(lost) == ["records_doc_not_closed"] * 3
    texts = [document.text for document in read_all(with_hole(tmp_path / "a.txt", "", "end"))]
    assert [len(text) for text in texts] == [RECORD, RECORD, RECORD // 2 + 3]
    dump = with_hole(tmp_path / "a.xml", f"<mediawiki>{PAGE}<page>", "</page>")
    assert dropped(read_all(dump)[1:]) == ["records_file_damaged"]
    rows = with_hole(tmp_path / "a.jsonl", '{"text": "', '"}\n{"text": "It ran."}\n')
    documents = read_all(rows, large=RECORD)  # the first share ends inside the long line
    places = [(r.id.split("#")[1], getattr(r, "reason", "")) for r in documents]
    cut = [(str(place), "records_not_json") for place in (0, RECORD, 2 * RECORD)]
    assert places == [*cut, (str(HOLE + 3), "")]


BODY = "".join(f"<p>{story(6, number)}</p>" for number in range(4))
NAVIGATION = "<nav><a href='/'>Start</a></nav>"
XHTML = "<?xml version='1.0' encoding='utf-8'?>\n<!DOCTYPE html PUBLIC '-//W3C//DTD XHTML 1.0 Strict//EN'>\n"
XHTML += f"<html><title>A &amp; b</title><body>{NAVIGATION}<article>{BODY}</article></body>"


def test_html(small_records: None, tmp_path: Path) -> None:
    pytest.importorskip("trafilatura", exc_type=ImportError)
    path, expected = tmp_path / "page.html", " ".join(story(6, n) for n in range(4)).split()
    for page, title in ((XHTML, "A & b"), (f"<div>{BODY}</div>", "page")):
        path.write_text(page)
        (document,) = read_all(path)
        assert (document.title, document.text.split()) == (title, expected)
    (document,) = read_all(with_hole(path, f"<html><body>{BODY}</body>", "end"))
    assert dropped([document]) == ["records_file_damaged"]


# Data sets.


def test_data_sets_on_disk(tmp_path: Path) -> None:
    rows = [{"body": story(3, n), "id": 39 - n} for n in range(40)]
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(tmp_path / "saved")
    splits = datasets.DatasetDict(b=data.select(range(20, 40)), a=data.select(range(20)))
    splits.save_to_disk(tmp_path / "splits")
    for name in ("saved", "splits"):
        files, _ = listed(tmp_path / name, text_field=["body"])
        assert len(group_units(files, {}, 1, 300)) > 3 and files[0].source == name
        documents = read_all(tmp_path / name, text_field=["body"], large=300)
        assert [d.text for d in documents] == [row["body"] for row in rows]
        assert [d.id.split("#")[1] for d in documents] == [f"{39 - n}" for n in range(40)]
    with pytest.raises(UserError, match=r"\('text'\. Known: body, id\); --text_field"):
        listed(tmp_path / "saved")


def test_data_sets_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a data set are read; a stand-in gives the Hub's answer."""
    rows = [{"text": story(3, n), "title": f"T{n}"} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    load, requests = datasets.load_dataset, []

    def load_dataset(name: str, config: str, split: str, revision: str) -> Any:
        requests.append((name, config, split, revision))
        if name == "owner/none":
            raise FileNotFoundError("no such data set\nlong advice")
        path, cache = str(tmp_path / "rows.jsonl"), str(tmp_path / "cache")
        return load("json", data_files=path, split="train", cache_dir=cache)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    files, _ = listed("wikipedia:20231101.de")
    expected = ("wikipedia", "wikimedia/wikipedia", "wikipedia")
    assert {(file.source, file.hub, file.layout) for file in files} == {expected}
    assert requests == [("wikimedia/wikipedia", "20231101.de", "train", None)]
    assert [document.title for document in read_all("wikipedia")] == [f"T{n}" for n in range(10)]
    assert all(file.layout == "sentences" for file in listed("bookcorpus")[0])
    with pytest.raises(UserError, match=r"owner/none: .*be loaded \(no such data set\)"):
        listed("owner/none")
