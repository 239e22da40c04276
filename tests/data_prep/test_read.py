"""Reading documents from pieces of files and data sets."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import read as read_module
from data_prep.read import SENTENCES, RawDocument, read_piece
from data_prep.settings import ReadOptions
from data_prep.sources import _can_extract_html, find_files
from data_prep.units import Piece, cut_units
from multicls.errors import UserError
from tests.data_prep.test_hub import SHA, Hub, hub  # noqa: F401

LINE = json.dumps({"text": "The cat sat."}) + "\n"


def read(path: Path | str, file_format: str = "auto", **options: Any) -> list[RawDocument]:
    files = find_files([str(path)], file_format).files
    return [d for unit in cut_units(files) for p in unit for d in read_piece(files[p.file], p, ReadOptions(**options))]


COMPRESSIONS = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
}


@pytest.mark.parametrize("suffix", COMPRESSIONS)
@pytest.mark.parametrize("kind", ["txt", "jsonl", "xml"])
def test_compressed_files_are_read_and_their_damage_is_told(suffix: str, kind: str, tmp_path: Path) -> None:
    sentences = [
        f"The cat sat on mat {i}, {i * i * 7919 % 99991}, {i * i * i % 99989}."
        for i in range(20_000 if suffix == ".bz2" else 4_000)
    ]
    page = "<page>\n<title>Cat</title><revision><text>{}</text></revision>\n</page>"
    template = {"txt": "{}", "jsonl": '{{"text": "{}"}}', "xml": page}[kind]
    parts = [template.format(sentence) for sentence in sentences]
    path = tmp_path / f"in.{kind}{suffix}"
    whole = ("<mediawiki>\n" * (kind == "xml") + "\n".join(parts)).encode()
    data = COMPRESSIONS[suffix](whole)
    path.write_bytes(data)
    assert "\n".join(d.text for d in read(path)) == "\n".join(sentences)
    path.write_bytes(COMPRESSIONS[suffix](whole[:-10]) + COMPRESSIONS[suffix](whole[-10:]))
    assert "\n".join(d.text for d in read(path)) == "\n".join(sentences)  # two streams, as parallel compressors write
    path.write_bytes(data[: len(data) * 9 // 10])
    if suffix and not (suffix == ".bz2" and kind == "txt"):
        *before, last = read(path)
        assert last.dropped == "records_file_damaged"
        assert bool(before) == (kind != "txt") and [d.text for d in before] == sentences[: len(before)]
        with pytest.raises(UserError, match=rf"in.{kind}{suffix}: damaged: .*--bad_records drop"):
            read(path, bad_records="stop")


def test_errors_of_the_disk_stop_the_run(tmp_path: Path) -> None:
    """The next try may read what this one could not: dropping it would give other bytes."""
    (tmp_path / "in.jsonl").write_text(LINE)
    (file,) = find_files([str(tmp_path)]).files
    (tmp_path / "in.jsonl").unlink()
    with pytest.raises(UserError, match=r"in.jsonl: cannot be read: .*No such file.*give the same command again"):
        list(read_piece(file, Piece(0, 0, file.size), ReadOptions()))


ROWS = [{"id": 5, "title": "T", "body": "The cat."}, {"id": None, "title": None, "body": "It ran."}]


def test_parquet_and_data_sets_on_disk(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(tmp_path / "two")
    expected = [("5", "T", "The cat."), ("1", "", "It ran.")]
    in_bytes = [expected[0], (str(len(json.dumps(ROWS[0])) + 1), "", "It ran.")]
    cases = {"rows.parquet": expected, "rows.jsonl": in_bytes, "one": expected, "two": [expected[0], *expected]}
    for name, documents in cases.items():
        found = read(tmp_path / name, text_field="body")
        assert [(d.id.split("#")[1], d.title, d.text) for d in found] == [
            (document[0] if name != "two" or i != 2 else "2", *document[1:]) for i, document in enumerate(documents)
        ]
        with pytest.raises(UserError, match=r"no field 'bodi'; set --text_field. Did you mean 'body'\?"):
            read(tmp_path / name, text_field="bodi")


def test_the_place_of_a_bad_record_is_told(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(LINE * 4 + '{"text": null}\n')
    with pytest.raises(UserError, match=r"in.jsonl:5: no text in 'text'; repair it"):
        read(tmp_path / "in.jsonl", bad_records="stop")
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress((LINE * 4 + "\n\n{torn").encode()))
    with pytest.raises(UserError, match=r"in.jsonl.gz:7: not JSON: "):
        read(tmp_path / "in.jsonl.gz", bad_records="stop")
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "in.parquet")
    with pytest.raises(UserError, match=r"in.parquet: row 1: no text in 'text'"):
        read(tmp_path / "in.parquet", bad_records="stop")
    (tmp_path / "wiki_00").write_text('<doc id="1" title="A">\nA\n</doc>\nLost.\n')
    with pytest.raises(UserError, match=r"wiki_00:4: text outside <doc id=...> ... </doc>"):
        read(tmp_path / "wiki_00", bad_records="stop")
    found = read(tmp_path / "in.jsonl")
    assert (found[4].dropped, found[4].title, found[4].id) == (
        "records_without_text",
        "{'text': None}",
        f"in.jsonl#{4 * len(LINE)}",
    )


def test_sentences_a_row_are_grouped(tmp_path: Path) -> None:
    rows = [f"sentence  number {i} ." for i in range(SENTENCES + 3)]
    groups = ["\n".join(" ".join(row.split()) for row in part) for part in (rows[:SENTENCES], rows[SENTENCES:])]
    pq.write_table(pa.table({"text": rows}), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("\n".join(rows))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows) + "\n{torn")
    for name in ("a.parquet", "a.txt", "a.jsonl"):
        found = [d for d in read(tmp_path / name, documents="sentences") if not d.dropped]
        assert [document.text for document in found] == groups and found[0].layout == "sentences"
    (tmp_path / "b.txt").write_bytes(b"one .\ntwo ." + b"\n" * 70_000 + b"three .\n\xff\nfour .\n")
    assert [(d.text, d.dropped) for d in read(tmp_path / "b.txt", documents="sentences")] == [
        ("one .\ntwo .", ""),
        ("", "documents_not_utf8"),  # the line alone
        ("three .\nfour .", ""),
    ]


def test_wikiextractor_json(tmp_path: Path) -> None:
    record = {"id": "7", "url": "x", "title": "Cat", "text": "Cat\n\nThe cat sat.\nHistory.\nIt ran far away."}
    (tmp_path / "wiki_00").write_text(json.dumps(record) + "\n")
    (document,) = read(tmp_path / "wiki_00")
    assert document.layout == "dotted_lines" and document.title == "Cat" and document.text.startswith("\nThe cat")


def test_wikiextractor_text(tmp_path: Path) -> None:
    (tmp_path / "wiki_00").write_text('<doc id="7" url="x" title="A &quot;cat&quot;">\nA "cat"\n\nIt sat.\n\n</doc>\n')
    assert read(tmp_path / "wiki_00") == [RawDocument("wiki_00", "wiki_00#7", 'A "cat"', "\nIt sat.\n", "dotted_lines")]


def test_mediawiki(tmp_path: Path) -> None:
    page = "<page><title>T{0}</title><ns>{0}</ns><id>{0}</id>{1}<revision><text>A &amp; {0}</text></revision></page>"
    pages = page.format(0, "") + page.format(1, "") + page.format(2, "").replace("<ns>2", "<ns>0")
    redirect = page.format(3, '<redirect title="T0" />').replace("<ns>3", "<ns>0")
    (tmp_path / "a.xml").write_text(
        f'<mediawiki xmlns="http://www.mediawiki.org/x"><siteinfo/>{pages}{redirect}</mediawiki>'
    )
    assert [(d.id, d.text, d.dropped) for d in read(tmp_path / "a.xml")] == [
        ("a.xml#0", "A & 0", ""),
        ("a.xml#1", "", "documents_not_articles"),
        ("a.xml#2", "A & 2", ""),
        ("a.xml#3", "", "documents_redirects"),
    ]
    assert len(read(tmp_path / "a.xml", bad_records="stop")) == 4  # what is no article is no bad record


@pytest.mark.skipif(not _can_extract_html(), reason="needs trafilatura")
def test_html(tmp_path: Path) -> None:
    paragraphs = "".join(f"<p>The cat sat on mat number {i}, and it stayed there all day.</p>" for i in range(9))
    (tmp_path / "a.html").write_text(
        "<!DOCTYPE html><html><head><title>Cats &amp; mats</title><script>var a = 1;</script></head><body>"
        f"<nav><a href='/'>Home</a></nav><main><article>{paragraphs}</article></main></body></html>"
    )
    (document,) = read(tmp_path / "a.html")
    assert document.title == "Cats & mats" and document.layout == "lines"
    assert document.text.split("\n")[0] == "The cat sat on mat number 0, and it stayed there all day."
    assert len(document.text.split("\n")) == 9


def test_long_texts_are_cut_at_blank_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_module, "LONGEST_DOCUMENT", 1000)
    blocks = [f"{i} " + "cat " * 100 for i in range(10)]
    (tmp_path / "in.txt").write_text("\n\n".join(blocks))
    found = read(tmp_path / "in.txt")
    assert len(found) == 4 and "\n\n".join(blocks).split() == " ".join(d.text for d in found).split()
    (tmp_path / "in.txt").write_text("\n".join(blocks))  # nowhere to cut well
    found = read(tmp_path / "in.txt")
    assert len(found) > 1 and " ".join(blocks).split() == " ".join(d.text for d in found).split()


def test_blank_lines_and_open_articles_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_module, "LONGEST_DOCUMENT", 1000)
    (tmp_path / "in.txt").write_text("\n" * 5000 + "The cat.\n" + "\n" * 5000 + "It ran.\n")
    found = read(tmp_path / "in.txt")
    assert [(d.id, d.text.strip()) for d in found] == [("in.txt#5000", "The cat."), ("in.txt#10009", "It ran.")]
    assert len(found[0].text) < 2000
    (tmp_path / "wiki_00").write_text('<doc id="1" title="A">\n' + "Lost.\n" * 1000)
    assert [d.dropped for d in read(tmp_path / "wiki_00")] == ["records_doc_not_closed"] * 3


def test_a_line_that_is_too_long_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "' + b"a" * 1000 + b'"}\n{"text": "It ran."}\n')
    monkeypatch.setattr(read_module, "LONGEST_RECORD", 100)
    found = read(tmp_path / "in.jsonl")
    assert [(d.id, d.dropped) for d in found] == [("in.jsonl#0", "documents_line_too_long"), ("in.jsonl#1013", "")]


def test_real_files_are_read_alike_in_any_pieces(multicls_data: Path) -> None:
    for name in ("wiki/AA/wiki_00", "books/pride.txt"):
        (file,) = find_files([str(multicls_data / "corpus" / name)]).files
        whole = list(read_piece(file, Piece(0, 0, file.size), ReadOptions()))
        cuts = range(0, file.size + 1, file.size // 7)
        pieces = [Piece(0, a, b if b != cuts[-1] else file.size) for a, b in zip(cuts, cuts[1:], strict=False)]
        parts = [d for piece in pieces for d in read_piece(file, piece, ReadOptions())]
        assert "".join(d.text for d in parts).split() == "".join(d.text for d in whole).split()
        assert parts == whole or name.startswith("books")


HUB_SCRIPT = """
import json, os, sys
from data_prep.read import read_piece
from data_prep.settings import ReadOptions
from data_prep.sources import _can_extract_html, find_files
from data_prep.units import cut_units, piece_hash
from multicls.errors import UserError
told = []
for name, *exclude in json.loads(sys.argv[1]):
    try:
        files, skipped = find_files([name], exclude=exclude)
        documents = [d for u in cut_units(files) for p in u for d in read_piece(files[p.file], p, ReadOptions())]
        told.append([[[f.source, f.name, f.format, f.size, f.version, f.rows] for f in files], documents, skipped])
    except UserError as error:
        told.append(error.problems)
print(json.dumps(told), flush=True)
os._exit(0)  # datasets' threads sometimes abort the interpreter when it ends
"""


def ask_hub(address: str, home: Path, *questions: list[str]) -> Any:
    """Returns files, documents and skipped paths, or the problems, of each `[input, exclude ...]`; one new process."""
    environment = os.environ | {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
    environment |= {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", HUB_SCRIPT, json.dumps(questions)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout, done.stderr + "\n".join(Hub.asked)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_files_of_the_hub(hub: str, tmp_path: Path) -> None:  # noqa: F811
    wrong = {
        "owner/none": "--input owner/none:train: not to be had from the Hub (",
        "wikimedia/wikipedia:1999": "not to be had from the Hub (BuilderConfig '1999' not found",
        "wikimedia/wikipedia:20231101.en:nose": "no split 'nose'. Known: train.",
    }
    questions = [["wikipedia"], ["wikipedia", "*-00000-of-*"], *([name] for name in wrong)]
    (files, documents, skipped), excluded, *problems = ask_hub(hub, tmp_path / "home", *questions)
    names = [f"20231101.en/train-0000{i}-of-00002.parquet" for i in range(2)]
    assert [file[:3] + file[4:] for file in files] == [["wikipedia", name, "parquet", SHA, 1] for name in names]
    assert [document[2] for document in documents] == [f"Article {i}" for i in range(20)] and not skipped
    assert documents[11][1] == f"{names[1]}#11" and {document[4] for document in documents} == {"lines"}
    assert [len(found) for found in excluded] == [1, 10, 1]
    for (problem,), reason in zip(problems, wrong.values(), strict=True):
        assert reason in problem
    Hub.files[names[1]] = Hub.files[names[1]][:-9]  # the Hub answers, with a torn file
    ((_, documents, _),) = ask_hub(hub, tmp_path / "other", ["wikipedia"])
    assert [document[5] for document in documents] == [""] * 10 + ["records_file_damaged"]


@pytest.mark.slow
def test_other_files_of_the_hub(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    for name in [name for name in Hub.files if name.endswith(".parquet")]:
        rows = pq.read_table(pa.BufferReader(Hub.files.pop(name))).to_pylist()
        Hub.files[name.replace(".parquet", ".jsonl")] = "\n".join(map(json.dumps, rows)).encode()
    ((files, documents, _),) = ask_hub(hub, tmp_path / "home", ["wikipedia"])
    assert [file[2] for file in files] == ["dataset"] * 2
    assert [document[2] for document in documents] == [f"Article {i}" for i in range(20)]
    Hub.files = {name: data for name, data in Hub.files.items() if "00001" not in name}
    Hub.files["20231101.en/train-00001-of-00002.jsonl"] = b'{"text": 7'
    ((_, documents, _),) = ask_hub(hub, tmp_path / "other", ["wikipedia"])
    assert [document[5] for document in documents] == [""] * 10 + ["records_file_damaged"]
    send = Hub.send_file

    def send_file(self: Hub, name: str) -> None:
        self.send_error(403) if "00001" in name else send(self, name)

    monkeypatch.setattr(Hub, "send_file", send_file)
    ((problem,),) = ask_hub(hub, tmp_path / "third", ["wikipedia"])
    assert "wikimedia/wikipedia@" in problem and "train-00001-of-00002.jsonl: cannot be read" in problem
