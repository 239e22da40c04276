"""The ledger balances: of all text that is put in, each character is kept or left out with its reason."""

import bz2
import gzip
import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import clean, prepare
from data_prep.build import build_unit
from data_prep.formats import FORMATS, tables
from data_prep.ledger import REASONS, Ledger, last_lines, reasons_table, size
from data_prep.prepare import SHARD_TOKENS, group_units
from data_prep.settings import RULES, BuildOptions
from data_prep.sources import list_inputs
from multicls.errors import UserError
from multicls.files import REPOSITORY
from tests.data_prep.conftest import listed, options, prepared, read_all, story

Texts = list[str]


def rows(texts: Texts) -> list[dict[str, Any]]:
    return [{"text": text, "id": i} for i, text in enumerate(texts)]


def json_lines(texts: Texts) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows(texts)).encode()


def parquet(texts: Texts) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows(texts)), sink)
    return bytes(sink.getvalue().to_pybytes())


def arrow(texts: Texts) -> bytes:
    table, sink = pa.Table.from_pylist(rows(texts)), io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def table(texts: Texts) -> bytes:
    cells = ('"' + text.replace('"', '""') + '"' for text in texts)
    return ("text,n\n" + "".join(f"{cell},1\n" for cell in cells)).encode()


def extract(texts: Texts) -> bytes:
    return "".join(f'<doc id="{i}" title="T">\n{t}\n</doc>\n' for i, t in enumerate(texts)).encode()


def dump(texts: Texts) -> bytes:
    page = "<page><title>T</title><ns>0</ns><id>{}</id><revision><text>{}</text></revision></page>"
    return f"<mediawiki>{''.join(page.format(i, escape(t)) for i, t in enumerate(texts))}".encode()


def captions(texts: Texts) -> bytes:
    cues = (f"00:00:0{i % 9}.000 --> 00:00:0{i % 9}.900\n{t}\n\n" for i, t in enumerate(texts))
    return f"WEBVTT\nKind: captions\n\n{''.join(cues)}".encode()


def page(texts: Texts) -> bytes:
    body = "".join(f"<p>{escape(text)}</p>" for text in texts)
    return f"<!DOCTYPE html><html><title>T</title><body>{body}</body></html>".encode()


def mail(texts: Texts) -> bytes:
    head = "From a@b.c Mon Jan  8 10:01:00 2024\nFrom: a@b.c\nSubject: T\nContent-Type: text/plain; charset=utf-8\n\n"
    return "".join(f"{head}{text}\n\n" for text in texts).encode()


def packed(content: bytes, name: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"inner/{name}", content)
    return file.getvalue()


def tape(content: bytes, name: str) -> bytes:
    file, entry = io.BytesIO(), tarfile.TarInfo(f"inner/{name}")
    entry.size = len(content)
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        archive.addfile(entry, io.BytesIO(content))
    return file.getvalue()


WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def word(texts: Texts) -> bytes:
    body = "".join(f"<w:p><w:r><w:t>{escape(text)}</w:t></w:r></w:p>" for text in texts)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        content = f'<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>'
        archive.writestr("word/document.xml", content)
    return file.getvalue()


def book(texts: Texts) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        path = '<container><rootfiles><rootfile full-path="O/p.opf"/></rootfiles></container>'
        archive.writestr("META-INF/container.xml", path)
        items = "".join(f'<item id="c{i}" href="c{i}.html"/>' for i in range(len(texts)))
        spine = "".join(f'<itemref idref="c{i}"/>' for i in range(len(texts)))
        package = f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{spine}</spine>'
        archive.writestr("O/p.opf", f"{package}</package>")
        for i, text in enumerate(texts):
            archive.writestr(f"O/c{i}.html", f"<html><body><p>{escape(text)}</p></body></html>")
    return file.getvalue()


def crawl(texts: Texts) -> bytes:
    data = b""
    for text in (text.encode() for text in texts):
        head = "WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\n"
        head += f"WARC-Record-ID: <urn:x:1>\r\nContent-Length: {len(text)}\r\n\r\n"
        data += head.encode() + text + b"\r\n\r\n"
    return data


def plain(texts: Texts) -> bytes:
    return "\n\n".join(texts).encode()


Make = Callable[[Texts], bytes]
# file: how it is made. It holds the texts and nothing else that is text.
MAKERS: dict[str, Make] = {
    "a.txt": plain,
    "a.md": plain,
    "a.txt.gz": lambda texts: gzip.compress(plain(texts)),
    "A.JSONL": json_lines,
    "a.jsonl.bz2": lambda texts: bz2.compress(json_lines(texts)),
    "a.json": lambda texts: json.dumps(rows(texts)).encode(),
    "a.csv": table,
    "a.parquet": parquet,
    "a.arrow": arrow,
    "wiki_00": extract,
    "a.xml": dump,
    "a.docx": word,
    "a.zip": lambda texts: packed(json_lines(texts), "a.jsonl"),
    "a.tgz": lambda texts: tape(json_lines(texts), "a.jsonl"),
    "a.vtt": captions,
    "a.srt": captions,
    "a.html": page,
    "a.mbox": mail,
    "a.eml": lambda texts: mail(texts[:1]).partition(b"\n")[2],
    "a.epub": book,
    "a.warc": crawl,
}

WORDS = "The cat sat.|It ran|far away|Title|# Head|See also|- item one|> quoted|1. It is.|<b>bold</b>|<p>|Vec<u>"
WORDS += "|&amp;|{{x}}|[[a\\b]]|\\a\\b\\|`code`|[link](http://a.b)|====|猫在垫子上。|ฉันไป|е́|\u200b|\ufdd0|\x00|\f|\xa0|ﬁn"
WORDS += "|well-\nknown|\n|\n\n|-->"
PIECES = [word.replace("\\", "|") for word in WORDS.split("|")]
texts_of_anything = st.lists(
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), max_size=9).map(" ".join),
    min_size=1,
    max_size=3,
).map(lambda texts: [re.sub("[\0\ud800-\udfff\r]", "", text) for text in ["It is.", *texts]])


def ledger_of(path: Path, tokenizer: Path, **values: Any) -> Ledger:
    """Builds a file's unit, which closes its ledger, and returns that."""
    chosen = options(path, **values)
    (unit,) = group_units(list_inputs(chosen)[0], {"n": len(list(path.parent.iterdir()))}, 1 << 20)
    work = path.parent / f"work-{path.name}"
    work.mkdir(exist_ok=True)
    assert build_unit(unit, chosen, work, tokenizer / "tokenizer.json", SHARD_TOKENS) == ""
    record = json.loads((work / unit.key / "drops.json").read_text())
    for folder in sorted(work.glob("*/*"), reverse=True):
        folder.unlink()
    (work / unit.key).rmdir()
    return Ledger(record)


@pytest.mark.parametrize("name", MAKERS)
@given(texts=texts_of_anything, without=st.sets(st.sampled_from(RULES)))
@settings(max_examples=25, deadline=None)
def test_taken_is_kept_and_left_out_in_every_format(
    name: str,
    texts: Texts,
    without: set[str],
    tiny_tokenizer: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The sizes of the texts that went in, known from outside, are what the ledger has taken."""
    if name in ("a.xml", "a.docx", "a.epub"):  # which no XML can hold
        texts = [re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]", "", text) for text in texts]
    if name in ("a.vtt", "a.srt"):
        texts = [text.replace("-->", "") for text in texts]
    if name == "wiki_00":
        texts = [text.replace("</doc>", "").replace("<doc", "") for text in texts]
    path = tmp_path_factory.getbasetemp() / "ledger" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(MAKERS[name](texts))
    ledger = ledger_of(path, tiny_tokenizer, without=sorted(without), min_sentences=1)
    taken = ledger.text.total()
    assert taken == ledger.kept.total() + ledger.totals()[1].total()
    given = sum(map(size, texts[:1] if name == "a.eml" else texts))
    assert taken == given, ledger.by_reason()


def test_every_format_is_tested(tmp_path: Path) -> None:
    """PDF has a test of its own."""
    for name, make in MAKERS.items():
        (tmp_path / name).write_bytes(make([story(9)]))
    assert {file.format for file in listed(tmp_path)[0]} == FORMATS.keys() - {"pdf"}


def test_a_step_that_loses_text_ends_the_run(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule without an entry in the ledger is an internal error that names source and unit."""
    (tmp_path / "in.txt").write_text(story(9) + "\n\nA Title")
    original = clean.split_paragraph
    monkeypatch.setattr(
        clean, "split_paragraph", lambda *a: [s for s in original(*a) if "cat" not in s]
    )
    with pytest.raises(RuntimeError, match=r"in\.txt: of [\d,]+ characters of in, .* not counted"):
        prepared(tiny_tokenizer, tmp_path / "out", tmp_path / "in.txt")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_skipped_bytes_count_as_given(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """Beside a text of N bytes, a file of 3 N that is not read leaves a quarter."""
    (tmp_path / "in").mkdir()
    text = story(40)
    (tmp_path / "in" / "a.txt").write_text(text)
    (tmp_path / "in" / "b.log").write_text("x" * (3 * len(text)))
    (tmp_path / "in" / ".hidden").write_text("x" * 9999)  # on purpose, so not given
    report = dict(last_lines(prepared(tiny_tokenizer, tmp_path / "out", tmp_path / "in")))
    assert report["kept"] == "1 of 1 document, 25.0% of the text"
    assert report["skipped"].startswith("2 files")


def test_a_file_that_changes_while_it_is_read_is_read_again(
    tiny_tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The corpus is that of the file as it is in the end; one that always changes ends the run."""
    path = tmp_path / "in.txt"
    original, changes = prepare.build_unit, list[int]()

    def changing(*values: Any) -> str:
        if len(changes) < limit:
            changes.append(1)
            path.write_text(story(20 + len(changes)))
        return original(*values)

    monkeypatch.setattr(prepare, "build_unit", changing)
    path.write_text(story(40))
    limit = 1
    corpus = prepared(tiny_tokenizer, tmp_path / "out", path)
    assert corpus.manifest["sentences"] == 21
    assert corpus.manifest["made_from"]["input"]["bytes"] == path.stat().st_size
    assert "changed while it was read; reading it again" in capsys.readouterr().out
    limit = 100
    with pytest.raises(UserError, match=r"in\.txt: keeps changing"):
        prepared(tiny_tokenizer, tmp_path / "other", path)
    assert not (tmp_path / "other" / "manifest.json").exists()


FIELDS = [  # a row's fields: text that is taken, and what is left out
    ({"text": ["A cat sat.", "It ran."]}, "A cat sat.\n\nIt ran.", {}),
    ({"text": ["A", "cat", "sat."]}, "A cat sat.", {}),
    ({"text": b"It ran."}, "It ran.", {}),
    ({"text": [{"role": "user", "content": "Why?"}, {"role": "bot", "content": "It ran."}]}, "Why?\n\nIt ran.", {}),
    ({"text": [{"from": "user", "value": "Why?"}]}, "Why?", {}),
    ({"text": 7}, "", {"fields_not_text": 1}),
    ({"text": {"a": "Lost.", "b": [{"c": "too"}]}}, "", {"fields_not_text": len("Lost.too")}),
]  # fmt: skip


@pytest.mark.parametrize(("row", "text", "out"), FIELDS)
def test_fields_that_are_no_string(
    row: dict[str, Any], text: str, out: dict[str, int], tmp_path: Path
) -> None:
    if row["text"] != 7:
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps(row, default=lambda data: data.decode()))
    for path in tmp_path.iterdir():
        (document,) = read_all(path)
        assert document.text == text
        assert {entry.reason: entry.characters for entry in document.left} == out


def test_paths_of_fields_and_what_lies_beside_them(tmp_path: Path) -> None:
    row = {"body": {"text": "It ran.", "parts": [{"t": "A cat."}, {"t": "A dog."}]}, "n": 1}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"body": None}))
    datasets.Dataset.from_list([row]).save_to_disk(tmp_path / "saved")
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    for field, text in (("body.text", "It ran."), ("body.parts.t", "A cat.\n\nA dog.")):
        for name in ("a.jsonl", "saved", "a.parquet"):
            assert read_all(tmp_path / name, text_field=[field])[0].text == text, name
    (tmp_path / "b.json").write_text('["A cat.", "It ran."]')  # rows that are texts themselves
    assert [d.text for d in read_all(tmp_path / "b.json")] == ["A cat.", "It ran."]
    (tmp_path / "c.csv").write_text("text,text\nA cat.,It ran.\n")
    for field, text in (("text", "A cat."), ("text.1", "It ran.")):
        assert read_all(tmp_path / "c.csv", text_field=[field])[0].text == text
    with pytest.raises(UserError, match=r"Did you mean 'body.text'"):
        listed(tmp_path / "a.jsonl", text_field=["body.txt"])


def test_the_error_of_a_total_loss_names_the_remedies_of_its_reasons(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_bytes(json_lines([{"a": 1}] * 9))  # type: ignore[list-item]
    with pytest.raises(UserError) as error:
        prepared(tiny_tokenizer, tmp_path / "out", tmp_path / "in.jsonl")
    assert "such as body.text" in str(error.value) and "--short_documents" not in str(error.value)


def test_html_is_removed_only_where_it_is_html_and_counted(tmp_path: Path) -> None:
    code = "A Vec<u> and an Option<s> of x<y>z are types."
    web = "<p>It <b>ran</b>.</p><script>x = 1</script><!-- no -->"
    assert tables.without_tags(code) == code and tables.without_tags(web).split() == ["It", "ran."]
    (tmp_path / "a.jsonl").write_bytes(json_lines([web]))
    for without, text in (([], "It ran."), (["html"], web)):
        (document,) = read_all(tmp_path / "a.jsonl", without=without)
        assert document.text.strip() == text
        assert size(document.text) + sum(entry.characters for entry in document.left) == size(web)


def test_a_ledger_that_does_not_balance_is_not_closed() -> None:
    ledger = Ledger()
    ledger.take("s", 9)
    ledger.keep("s", 4)
    with pytest.raises(RuntimeError, match="of 9 characters of s, 4 are kept .* 5 are not counted"):
        ledger.close("unit")


def test_the_page_has_the_table_of_reasons() -> None:
    page = (REPOSITORY / "docs" / "data.md").read_text()
    assert f"`ledger.REASONS` -->\n{reasons_table()}\n<!-- end of reasons -->" in page
    assert all(reason.what and reason.what[-1] != "." for reason in REASONS.values())
    flags = {flag for reason in REASONS.values() for flag in re.findall("--[a-z_]+", reason.remedy)}
    assert {flag[2:] for flag in flags} <= BuildOptions.model_fields.keys()
    rules = {rule for r in REASONS.values() for rule in re.findall(r"--without (\w+)", r.remedy)}
    assert rules == set(RULES) - {"replacement_characters"}, (
        "each rule is the remedy of its reasons"
    )
