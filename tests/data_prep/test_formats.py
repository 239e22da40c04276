"""Containers: each record, message or member is a document; what is not read has a reason of its own."""

import gzip
import io
import re
import sys
import tarfile
import textwrap
import zipfile
from email.message import EmailMessage
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from data_prep import formats
from data_prep.formats import FORMATS, web
from data_prep.formats.base import BadRecord, RawDocument
from data_prep.ledger import REASONS, size
from data_prep.settings import BuildOptions
from multicls.errors import UserError
from multicls.files import REPOSITORY
from multicls.settings import parse
from tests.data_prep.conftest import listed, read_all, story
from tests.data_prep.test_ledger import arrow


def reason_of(path: Path, **values: Any) -> str:
    with pytest.raises(UserError) as error:
        read_all(path, **values)
    return str(error.value)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n"
REFUSED = {  # file: (content, reason)
    "a.txt": (POINTER.encode(), "lfs_pointer"),
    "a.parquet": (POINTER.encode(), "lfs_pointer"),
    "a.csv": (POINTER.encode(), "lfs_pointer"),
    "a.7z": (b"7z\xbc\xaf\x27\x1c\0\0", "archive"),
    "a.txt.br": (b"\x1b\x03\x00\xf8", "archive"),
    "a.rtf": (rb"{\rtf1 It ran.}", "office"),
    "a.doc": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1\0\0", "office"),
    "a.odt": (b"PK\x03\x04\0\0", "office"),
    "a.jpg": (b"\xff\xd8\xff\xe0\0\0", "media"),
    "wide.txt": ("It ran.".encode("utf-16"), "utf16"),
    "wide without a mark.txt": ("It ran.".encode("utf-16-le"), "utf16"),
    "latin.txt": ("Der Bär saß. ".encode("latin-1"), "not_utf8"),
    "code.py": (b"x = 1", "not_prose"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_each_refused_kind_has_its_reason_and_remedy(name: str, tmp_path: Path) -> None:
    content, reason = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    message = reason_of(tmp_path / name)
    assert REASONS[reason].what in message and REASONS[reason].remedy in message
    assert REASONS[reason].remedy, "a way out"


def test_encodings(tmp_path: Path) -> None:
    text = "Der Bär saß in London – „gut“."
    for encoding in ("cp1252", "utf-16", "cp1252"):
        (tmp_path / "a.txt").write_bytes(text.encode(encoding))
        (document,) = read_all(tmp_path / "a.txt", encoding=encoding)
        assert document.text == text
    page = f"<html><head><meta charset='windows-1252'></head><body><p>{text} {story(9)}</p></body></html>"
    (tmp_path / "a.html").write_bytes(page.encode("cp1252"))
    (document,) = read_all(tmp_path / "a.html", without=["main_text"])
    assert document.text == f"{text} {story(9)}"
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "B\xe4r"}\n' * 9)
    assert {d.text for d in read_all(tmp_path / "a.jsonl", encoding="latin-1")} == {"Bär"}
    (tmp_path / "b.html").write_text(f"<html><meta charset=rot13><p>{story(9)}</p>")
    assert read_all(tmp_path / "b.html", without=["main_text"])[0].text == story(9)
    words = "--input x --tokenizer x --output x --encoding rot13"
    with pytest.raises(UserError, match="no encoding that Python knows: rot13"):
        parse(BuildOptions, words.split(), prog="run.py")


def test_a_stray_nul_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(story(99) + "\0" + story(9))
    assert len(read_all(tmp_path / "a.txt")) == 1


def test_compression_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    for name in ("a.TXT.GZ", "packed"):
        (tmp_path / name).write_bytes(gzip.compress(story(9).encode()))
        (document,) = read_all(tmp_path / name)
        assert document.text == story(9)


def record(kind: str, content: bytes, content_type: str) -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: http://a.b/{len(content)}\r\n"
    head += f"WARC-Record-ID: <urn:x:1>\r\nContent-Type: {content_type}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content + b"\r\n\r\n"


def test_web_archives_by_record(tmp_path: Path) -> None:
    page = "<html><title>T</title><body><![foo[x]]>" + "".join(
        f"<p>{story(6, i)}</p>" for i in range(4)
    )
    page += "<p>Der Bär saß.</p></body></html>"
    http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=latin-1\r\n\r\n"
    image = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n\x89PNG"
    crawl = record("warcinfo", b"software: x", "application/warc-fields")
    crawl += record("response", http + page.encode("latin-1"), "application/http; msgtype=response")
    crawl += record("response", image, "application/http; msgtype=response")
    (tmp_path / "a.warc.gz").write_bytes(gzip.compress(crawl))
    document, bad = read_all(tmp_path / "a.warc.gz", without=["main_text"])
    assert "Der Bär saß." in document.text and document.title == "T"
    assert document.id.startswith("a.warc.gz#http://a.b/")
    assert (bad.reason, bad.text) == ("pages_not_text", "image/png")
    wet = b"".join(record("conversion", story(9, i).encode(), "text/plain") for i in range(3))
    (tmp_path / "crawl").write_bytes(wet)
    assert [d.text for d in read_all(tmp_path / "crawl")] == [story(9, i) for i in range(3)]
    assert "leave out --format text" in reason_of(tmp_path / "crawl", format="text")


def test_members_of_archives(tmp_path: Path) -> None:
    members = {
        "deep/a.txt": story(9).encode(),
        "b.jsonl.gz": gzip.compress(b'{"text": "It ran."}\n'),
        "b.arrow": arrow(["He sat."]),
        "b.arrow.gz": gzip.compress(arrow(["She sat."])),
        "c.png": b"\x89PNG" + bytes(99),
        "d.py": b"x = 1",
        "e.zip": b"PK\x03\x04",
    }
    with (
        tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tape,
        zipfile.ZipFile(tmp_path / "a.zip", "w") as packed,
    ):
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tape.addfile(entry, io.BytesIO(content))
            packed.writestr(name, content)
    texts = [story(9), "It ran.", "He sat.", "She sat."]
    for name in ("a.tar.gz", "a.zip"):
        records = read_all(tmp_path / name)
        assert [r.text for r in records if isinstance(r, RawDocument)] == texts
        assert records[0].id == f"{name}/deep/a.txt#0"
        bad = {r.text.partition(":")[0]: r.characters for r in records if isinstance(r, BadRecord)}
        assert bad == {"c.png": 0, "d.py": 5, "e.zip": 4}, "bytes of what may be text"
    (tmp_path / "b.tar").write_bytes(gzip.decompress((tmp_path / "a.tar.gz").read_bytes())[:1500])
    assert [getattr(r, "reason", "") for r in read_all(tmp_path / "b.tar")][
        -1
    ] == "records_file_damaged"


def test_a_broken_member_or_record_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member of a zip may have damaged bytes; at a page of a Web archive the library may fail."""
    texts = [story(9, i) for i in range(3)]
    members = {"a.txt": texts[0], "b.pdf": "%PDF-1.4", "c.docx": "PK\x03\x04", "d.txt": texts[1]}
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        for name, text in {**members, "e.txt": "It ran.", "f.txt": texts[2]}.items():
            packed.writestr(name, text)
    data = (tmp_path / "a.zip").read_bytes().replace(b"It ran.", b"It rxn.", 1)
    (tmp_path / "a.zip").write_bytes(data)
    records = read_all(tmp_path / "a.zip")
    assert [r.text for r in records if isinstance(r, RawDocument)] == texts
    bad = [
        (r.reason, r.id.split("/")[-1], r.characters) for r in records if isinstance(r, BadRecord)
    ]
    names = {"b.pdf#0-damaged": 8, "c.docx#0-damaged": 4, "a.zip#e.txt": 7}
    assert bad == [("records_file_damaged", *pair) for pair in names.items()]
    http = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n"
    pages = [record("response", f"{http}<p>{t}</p>".encode(), "application/http") for t in texts]
    (tmp_path / "a.warc").write_bytes(b"".join(pages))
    visible = web.visible_text

    def fails(page: str) -> tuple[str, str]:
        return visible(page) if texts[1] not in page else ("", str(page.index("none")))

    monkeypatch.setattr(web, "visible_text", fails)
    one, failed, three = read_all(tmp_path / "a.warc", without=["main_text"])
    assert (one.text, three.text) == (texts[0], texts[2])
    assert (failed.reason, failed.characters) == ("documents_failed", size(f"<p>{texts[1]}</p>"))


MAIL = """From anna at example.org  Mon Jan  8 10:01:00 2024
From: anna at example.org (Anna)
Subject: [pumps] noise
Message-ID: <1@example.org>

The pump is loud.

>From the start it was.

From otto at example.org  Mon Jan  8 11:01:00 2024
From: otto at example.org (Otto)
Subject: Re: [pumps] noise

On Mon, Jan 8, 2024 at 10:01 AM Anna wrote:
> The pump is
> loud.

Oil it.
"""


@pytest.mark.parametrize("name", ["a.mbox", "2024-January.txt", "INBOX"])
def test_mail_by_message(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(MAIL)
    one, two = read_all(tmp_path / name)
    words = "The pump is loud. From the start it was."
    assert (one.title, " ".join(one.text.split())) == ("[pumps] noise", words)
    assert two.text.split() == ["Oil", "it."] and [entry.reason for entry in two.left] == [
        "lines_quoted"
    ]
    assert "> loud." in read_all(tmp_path / name, without=["markup"])[1].text


def test_a_message_with_parts(tmp_path: Path) -> None:
    message = """MIME-Version: 1.0
        Subject: =?utf-8?q?B=C3=A4r?=
        Content-Type: multipart/mixed; boundary=x

        --x
        Content-Type: text/html; charset=latin-1
        Content-Transfer-Encoding: quoted-printable

        <p>Der B=E4r</p><p>ran.</p>
        --x
        Content-Type: text/csv
        Content-Disposition: attachment; filename=a.csv

        n,m
        --x--
        """
    (tmp_path / "a.eml").write_text(textwrap.dedent(" " * 8 + message))
    (document,) = read_all(tmp_path / "a.eml")
    assert (document.title, document.text) == ("Bär", "Der Bär\nran.")
    (entry,) = document.left
    assert (entry.reason, entry.text, entry.characters) == ("attachments", "a.csv: text/csv", 3)


def test_all_that_a_reader_of_mail_sees_is_text(tmp_path: Path) -> None:
    """Texts between images, and a forwarded message; of two forms one that is not blank. The rest is counted."""
    inner = EmailMessage()
    inner.set_content("She ran.")
    inner.add_alternative("<p>She ran.</p>", subtype="html")
    message = EmailMessage()
    message.set_content("It ran.")
    message.add_attachment(b"\x89PNG", maintype="image", subtype="png", disposition="inline")
    message.add_attachment("We ran.", disposition="inline")
    message.add_attachment(inner, disposition="inline")
    blank = EmailMessage()
    blank.set_content(" ")
    blank.add_alternative("<p>You ran.</p>", subtype="html")
    message.add_attachment(blank, disposition="inline")
    message.add_attachment(inner, filename="kept.eml")
    (tmp_path / "a.eml").write_bytes(b"MIME-Version: 1.0\n" + message.as_bytes())
    (document,) = read_all(tmp_path / "a.eml")
    assert document.text.split() == ["It", "ran.", "We", "ran.", "She", "ran.", "You", "ran."]
    files = [
        ("without a name: image/png", 0),
        ("kept.eml: message/rfc822", size("She ran.") * 2 + 7),
    ]
    assert [entry[1:3] for entry in document.left] == files
    (tmp_path / "b.eml").write_text("MIME-Version: 1.0\nContent-Type: multipart/mixed\n\nIt ran.\n")
    (document,) = read_all(tmp_path / "b.eml")
    assert document.left[0][1:3] == ("without a name: multipart/mixed", size("It ran."))


def test_attachments_count_the_characters_of_text_and_nothing_of_images(tmp_path: Path) -> None:
    message = EmailMessage()
    message["Subject"] = "x"
    message.set_content("It ran.")
    message.add_attachment("n, ä\n1, 2\n" * 50, subtype="csv", filename="a.csv", charset="utf-8")
    message.add_attachment(b"\x89PNG" * 9, maintype="image", subtype="png")
    alone = EmailMessage()
    alone.set_content(b"abc", maintype="image", subtype="png")
    for name, content in (("a.eml", message), ("b.eml", alone)):
        (tmp_path / name).write_bytes(content.as_bytes())
    left = [
        [entry[1:3] for entry in read_all(tmp_path / name)[0].left] for name in ("a.eml", "b.eml")
    ]
    image = ("without a name: image/png", 0)
    assert left == [[("a.csv: text/csv", 300), image], [image]]


def test_rolling_captions_are_spoken_once(tmp_path: Path) -> None:
    """Each line comes at the bottom, and again above the next one."""
    words = ["the pump stops", "every night and", "nobody knows why"]
    shown = [f"{a}\n{b}<00:00:01.0><c> </c>" for a, b in zip(["", *words], words, strict=False)]
    cues = (
        f"00:00:0{i}.000 --> 00:00:0{i}.900 align:start\n{text}\n\n" for i, text in enumerate(shown)
    )
    (tmp_path / "a.vtt").write_text("WEBVTT\nKind: captions\n\nNOTE\nby hand\n\n" + "".join(cues))
    (document,) = read_all(tmp_path / "a.vtt")
    assert (document.text, document.layout) == ("\n".join(words), "lines")
    left = [entry.reason for entry in document.left if entry.reason != "characters_of_html"]
    assert left == ["lines_markup", "lines_repeated", "lines_repeated"]


@pytest.mark.parametrize(("cues", "layout"), [(20, "paragraphs"), (21, "lines")])
def test_captions_are_sentences_if_one_of_twenty_ends_with_a_stop(
    cues: int, layout: str, tmp_path: Path
) -> None:
    """A line that is said again later is no repeated caption."""
    words = ["It stops.", *["it runs", "it turns"] * 10][:cues]
    blocks = (f"{i}\n00:0{i} --> 00:0{i + 1}\n{text}\n" for i, text in enumerate(words))
    (tmp_path / "a.srt").write_text("\n".join(blocks))
    (document,) = read_all(tmp_path / "a.srt")
    separator = " " if layout == "paragraphs" else "\n"
    assert (document.layout, document.text, document.left) == (layout, separator.join(words), ())


def test_word_documents_have_their_notes_and_count_headers(tmp_path: Path) -> None:
    space = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    parts = {"document": "It ran.", "footnotes": "A note.", "header1": "Draft 1", "styles": ""}
    with zipfile.ZipFile(tmp_path / "a.docx", "w") as book:
        for name, text in parts.items():
            content = f"<w:p><w:r><w:t>{text}</w:t><w:tab/></w:r></w:p>"
            book.writestr(f"word/{name}.xml", f'<w:x xmlns:w="{space}">{content}</w:x>')
    (document,) = read_all(tmp_path / "a.docx")
    assert document.text.split() == ["It", "ran.", "A", "note."]
    assert document.left == (("parts_not_read", "Draft 1 ", len("Draft1"), 1),)


def test_text_boxes_of_word_documents_stand_once(tmp_path: Path) -> None:
    """A box has a second form for old programs. A file without the document is damaged."""
    space = "http://schemas.openxmlformats.org/"
    names = (
        f'xmlns:w="{space}wordprocessingml/2006/main" xmlns:m="{space}markup-compatibility/2006"'
    )
    box = "<w:p><w:r><w:t>A box.</w:t></w:r></w:p>"
    choice = f"<m:Choice>{box}</m:Choice><m:Fallback>{box}</m:Fallback>"
    text = f"<w:p><w:r><w:t>It ran</w:t>{choice}<w:t> far.</w:t></w:r></w:p><w:p><w:r><w:t>End.</w:t></w:r></w:p>"
    for name in ("document2", "other"):
        with zipfile.ZipFile(tmp_path / f"{name}.docx", "w") as book:
            book.writestr(f"word/{name}.xml", f"<w:x {names}>{text}</w:x>")
    document, bad = read_all(tmp_path)
    assert document.text.split("\n\n") == ["It ran far.", "A box.", "End."]
    assert (bad.reason, bad.text) == ("records_file_damaged", "it has no word/document.xml")


def pdf(lines: list[str]) -> bytes:
    """A PDF of a page."""
    shown = "".join(f"({line}) Tj 0 -14 Td " for line in lines)
    stream = f"BT /F1 12 Tf 50 700 Td {shown}ET"
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        "<</Type/Pages/Kids[3 0 R]/Count 1>>",
        "<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        f"<</Length {len(stream)}>>stream\n{stream}\nendstream",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    data, places = "%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    data += f"xref\n0 6\n0000000000 65535 f \n{table}trailer<</Size 6/Root 1 0 R>>\nstartxref\n{len(data)}\n%%EOF"
    return data.encode()


def test_pdf(tmp_path: Path) -> None:
    lines = textwrap.wrap(story(12), 60)
    (tmp_path / "a.pdf").write_bytes(pdf(lines))
    (document,) = read_all(tmp_path / "a.pdf")
    assert document.text.split() == story(12).split() and document.layout == "pages"


def test_a_mistyped_path_is_not_sought_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "novels").mkdir()
    (tmp_path / "books" / "poems.txt").write_text("It ran.")
    monkeypatch.chdir(tmp_path)
    hints = {
        "books/novel": "'novels'",
        "books/poem.txt": "'poems.txt'",
        "a/b/c": "",
        "x/y.jsonl": "",
        "s3://b/c": "URLs are not read",
    }
    for name, hint in hints.items():
        with pytest.raises(UserError, match=f"no such f.*{hint}"):
            listed(name)


def test_one_module_adds_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is that of the page on extending."""
    page = (REPOSITORY / "docs" / "extending.md").read_text()
    (code,) = re.findall(r'```python title="data_prep/formats/cookies.py"\n(.*?)```', page, re.S)
    (tmp_path / "cookies.py").write_text(code)
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    before = dict(FORMATS)
    import_module("data_prep.formats.cookies")
    (tmp_path / "a.fortune").write_text("A cat.\nIt ran.\n%\nA dog.\n")
    try:
        assert [d.text for d in read_all(tmp_path / "a.fortune")] == ["A cat.\nIt ran.", "A dog."]
    finally:
        del sys.modules["data_prep.formats.cookies"]
        del FORMATS["cookies"]
    assert before == FORMATS
