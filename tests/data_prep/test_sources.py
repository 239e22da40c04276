"""Listing the input: every path is listed or skipped with its reason, whatever lies in a folder."""

from __future__ import annotations

import builtins
import bz2
import gzip
import io
import json
import lzma
import os
import socket
from pathlib import Path
from typing import Any, get_args

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import sources
from data_prep.read import RawDocument, read_piece
from data_prep.settings import FileFormat, ReadOptions
from data_prep.sources import find_files
from data_prep.units import cut_units
from multicls.errors import UserError

PAGE = "<page><title>Cat</title><ns>0</ns><id>1</id><revision><text>A cat.</text></revision></page>"
LINE = json.dumps({"text": "The cat sat."}) + "\n"
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256))
HTML = "<!DOCTYPE html>\n<html><head><title>Cat</title></head><body><p>The cat sat.</p></body></html>"
NO_TRAFILATURA = "HTML; `pip install trafilatura` to extract its text, or --format text"
TABLE = (
    "write an object a line (pandas.read_csv(...).to_json('x.jsonl', orient='records', lines=True)), or --format text"
)


def parquet(**columns: list[Any]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue().to_pybytes())


# name: (content, reason to skip it or format, reasons of dropped documents, number of documents read)
HOSTILE: dict[str, tuple[bytes | str, str, list[str], int]] = {
    "plain.txt": ("The cat sat.", "text", [], 1),
    "no suffix": ("The cat sat.", "text", [], 1),
    "bom.txt": (b"\xef\xbb\xbfThe cat sat.", "text", [], 1),
    "mac.txt": ("The cat sat.\rIt ran.", "text", [], 1),
    "blank.txt": (" \n\n\t\n", "text", [], 1),
    "brace.txt": ("{ is a brace, and begins this text.\n", "text", [], 1),
    "bracket.txt": ("[Note: the cat sat.]\n", "text", [], 1),
    "tag.txt": ("<nobody> said a word.\n", "text", [], 1),
    "control.txt": ("The \x01cat\x1b sat.", "text", [], 1),
    "long line.txt": ("cat " * 100_000, "text", [], 1),
    "late bytes.txt": (b"The cat sat.\n" * 6000 + b"\xff\n", "text", ["documents_not_utf8"], 0),
    "late nul.txt": (b"The cat sat.\n" * 6000 + b"\0\n", "text", [], 1),
    "עברית.txt": ("הילד הלך.", "text", [], 1),
    "😀 name\n.txt": ("The cat sat.", "text", [], 1),
    "latin.txt": ("Der Bär saß.".encode("latin-1"), "not UTF-8 at byte 5; convert it (iconv -t utf-8)", [], 0),
    "wide.txt": ("The cat sat.".encode("utf-16"), "UTF-16; convert it (iconv -f utf-16 -t utf-8)", [], 0),
    "nul.txt": (b"The cat\0sat.", "binary", [], 0),
    "image.png": (PNG, "binary", [], 0),
    "paper.pdf": (b"%PDF-1.4\n1 0 obj\nendobj\n", "binary", [], 0),
    "packed.zip": (b"PK\x03\x04\x14\0\0\0", "binary", [], 0),
    "packed": (gzip.compress(b"The cat sat."), "binary", [], 0),
    "empty.txt": (b"", "empty", [], 0),
    "empty.txt.gz": (gzip.compress(b""), "empty", [], 0),
    "empty.jsonl": (b"", "empty", [], 0),
    "good.txt.gz": (gzip.compress(b"The cat sat."), "text", [], 1),
    "good.txt.xz": (lzma.compress(b"The cat sat."), "text", [], 1),
    "good.txt.bz2": (bz2.compress(b"The cat sat."), "text", [], 1),
    "good.txt.zst": (pa.Codec("zstd").compress(b"The cat sat.", asbytes=True), "text", [], 1),
    "no.txt.gz": (b"The cat sat.", "damaged: ", [], 0),
    "no.txt.bz2": (b"The cat sat.", "damaged: ", [], 0),
    "no.txt.xz": (b"The cat sat.", "damaged: ", [], 0),
    "no.txt.zst": (b"The cat sat.", "damaged: ", [], 0),
    "torn.txt.gz": (gzip.compress(b"The cat sat.")[:-9], "damaged: ", [], 0),
    "torn.jsonl.gz": (
        gzip.compress(b"".join(b'{"text": "%d"}\n' % (i * i) for i in range(20_000)))[:-5000],
        "jsonl",
        ["records_file_damaged"],
        -1,
    ),
    "flipped.jsonl.gz": (gzip.compress(LINE.encode() * 9000)[:-8] + bytes(8), "jsonl", ["records_file_damaged"], 9000),
    "good.jsonl": (LINE * 3, "jsonl", [], 3),
    "good lines": (LINE * 3, "jsonl", [], 3),
    "null.jsonl": (
        LINE + '{"text": null}\n{"other": 1}\n{"text": 7}\n' + LINE,
        "jsonl",
        ["records_without_text"] * 3,
        2,
    ),
    "torn.jsonl": (LINE + '{"text": "The c\n' + LINE + '{"te', "jsonl", ["records_not_json"] * 2, 2),
    "torn first.jsonl": ('The c"}\n' + LINE, "jsonl", ["records_not_json"], 1),
    "no objects.jsonl": (LINE + '7\n"text"\n[]\nnull\n', "jsonl", ["records_without_text"] * 4, 1),
    "deep.jsonl": (LINE + "[" * 100_000 + "\n", "jsonl", ["records_not_json"], 1),
    "nothing in it.jsonl": (LINE + '{"id": "", "title": "", "text": ""}\n', "jsonl", [], 2),
    "surrogate id.jsonl": (LINE + '{"id": "\\ud800", "text": "a"}\n', "jsonl", ["documents_half_a_surrogate_pair"], 1),
    "surrogate.jsonl": (LINE + '{"text": "\\udc00"}\n', "jsonl", ["documents_half_a_surrogate_pair"], 1),
    "latin.jsonl": (LINE.encode() * 3000 + b'{"text": "\xe9"}\n', "jsonl", ["documents_not_utf8"], 3000),
    "early.jsonl": (LINE.encode() + b'{"text": "\xe9"}\n' + LINE.encode() * 30, "jsonl", ["documents_not_utf8"], 31),
    "latin only.jsonl": (b'{"text": "\xe9"}\n' * 9, "not UTF-8 at byte 10; convert it (iconv -t utf-8)", [], 0),
    "array.json": ('[{"text": "a"}]', "one JSON array; write an object a line (jq -c '.[]')", [], 0),
    "pretty.json": ('{\n "text": "a"\n}', "JSON over several lines; write an object a line (jq -c '.')", [], 0),
    "wiki_00": ('<doc id="1" url="" title="A">\nA\n\nThe cat.\n</doc>\n', "wikiextractor", [], 1),
    "wiki_01": (
        '<doc id="1" title="A">\nLost.\n<doc id="2" title="B">\nThe cat.\n</doc>\nBetween.\n<doc id="3">\nLost.',
        "wikiextractor",
        ["records_doc_not_closed"] * 3,
        1,
    ),
    "dump.xml": (f"<mediawiki>{PAGE}</mediawiki>", "mediawiki", [], 1),
    "half.xml": (
        f"<?xml version='1.0'?><mediawiki>{PAGE.replace('A', '&#xD800;')}{PAGE}<page>",
        "mediawiki",
        ["records_not_xml", "records_file_damaged"],
        1,
    ),
    "bomb.xml": (
        '<!DOCTYPE mediawiki [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><mediawiki>' + PAGE.replace("A", "&b;"),
        "mediawiki",
        ["records_not_xml"],
        0,
    ),
    "tei.xml": (
        "<?xml version='1.0'?>\n<!-- a -->\n<TEI><p>A</p></TEI>",
        "XML that is not MediaWiki (root element TEI)",
        [],
        0,
    ),
    "feed": ("<rss><item>A</item></rss>", "XML that is not MediaWiki (root element rss)", [], 0),
    "readme.md": ('<h1 align="center">Cat</h1>\n\nThe cat sat.', "text", [], 1),
    "page.html": (HTML, "html", [], 1),
    "fragment.html": ("<div class='a'><p>The cat sat.</p></div>", "html", [], 1),
    "rows.csv": ("text,label\nThe cat.,1\n", f"a table (CSV); {TABLE}", [], 0),
    "rows.tsv.gz": (gzip.compress(b"text\tlabel\n"), f"a table (TSV); {TABLE}", [], 0),
    "good.parquet": (parquet(text=["a", "b"]), "parquet", [], 2),
    "null.parquet": (parquet(text=["a", None]), "parquet", ["records_without_text"], 1),
    "numbers.parquet": (parquet(text=[1, 2]), "parquet", ["records_without_text"] * 2, 0),
    "torn.parquet": (parquet(text=["a", "b"])[:-9], "parquet", ["records_file_damaged"], 0),
    "no.parquet": (b"PAR1", "parquet", ["records_file_damaged"], 0),
    ".hidden.txt": ("The cat sat.", "hidden", [], 0),
}


def read_all(*inputs: Path, **options: Any) -> list[RawDocument]:
    files = find_files(map(str, inputs)).files
    return [d for unit in cut_units(files) for p in unit for d in read_piece(files[p.file], p, ReadOptions(**options))]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name, (content, *_) in HOSTILE.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe.txt")).write_text("The cat sat.")
    (folder / ".git").mkdir()
    (folder / "below").mkdir()
    (folder / "below" / "plain.txt").write_text("The cat sat.")
    (folder / "below" / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "below" / "nowhere").symlink_to(folder / "missing")
    (folder / "below" / "linked.txt").symlink_to(folder / "plain.txt")
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(os.path.relpath(folder / "socket"))
    return folder


OTHERS = {
    "below/loop": "link to a folder",
    ".git": "hidden",
    "below/nowhere": "unreadable: No such file or directory",
    "pipe": "no file (a pipe, socket or device)",
    "socket": "no file (a pipe, socket or device)",
}


@pytest.mark.parametrize("extractor", [True, False])
def test_a_folder_of_hostile_files(extractor: bool, hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_can_extract_html", lambda: extractor)
    listing = find_files([str(hostile)])
    skipped = {os.path.relpath(path, hostile): reason for path, reason in listing.skipped}
    formats = {file.name: file.format for file in listing.files}
    assert len(skipped) == len(listing.skipped) and len(formats) == len(listing.files)
    expected = {name: what for name, (_, what, *_) in HOSTILE.items()} | OTHERS
    expected |= dict.fromkeys(("\\xff\\xfe.txt", "below/plain.txt", "below/linked.txt"), "text")
    if not extractor:
        expected |= {"page.html": NO_TRAFILATURA, "fragment.html": NO_TRAFILATURA}
    assert {name for name, what in expected.items() if what in get_args(FileFormat)} == formats.keys()
    assert formats.items() <= expected.items() and skipped.keys() == expected.keys() - formats.keys()
    assert all(reason.startswith(expected[name]) for name, reason in skipped.items()), skipped
    assert len(expected) >= 60
    files = [file for file in listing.files if file.format != "html"]
    for unit in cut_units(files):
        for piece in unit:
            file = files[piece.file]
            found = list(read_piece(file, piece, ReadOptions()))
            _, _, reasons, count = HOSTILE.get(file.name, (b"", "", [], 1))
            assert [d.dropped for d in found if d.dropped] == reasons, file
            assert len(found) - len(reasons) == count or (count < 0 and len(found) > 1000), file
            for document in found:
                json.dumps(document, ensure_ascii=False).encode()
                assert not document.dropped or (document.text == "" and len(document.title) <= 200)
            if reasons:
                with pytest.raises(UserError, match="bad_records drop"):
                    list(read_piece(file, piece, ReadOptions(bad_records="stop")))


def test_hostile_files_given_by_themselves(hostile: Path) -> None:
    for name, (_, what, *_) in HOSTILE.items():
        if what not in get_args(FileFormat) and what != "hidden":
            with pytest.raises(UserError) as error:
                find_files([str(hostile / name)])
            (problem,) = error.value.problems
            assert problem.startswith(f"--input {hostile / name}: {what}")
    with pytest.raises(UserError, match="pipe: no file"):
        find_files([str(hostile / "pipe")])
    (hostile / "only").mkdir()
    with pytest.raises(UserError, match="only: no file in this folder"):
        find_files([str(hostile / "only")])
    for name in ("a.png", "b.png", "c.txt"):
        (hostile / "only" / name).write_bytes(PNG if name != "c.txt" else b"")
    with pytest.raises(
        UserError, match=r"none of its 3 paths can be read: 2 x binary \(.*a.png\); 1 x empty \(.*c.txt\)"
    ):
        find_files([str(hostile / "only")])


def test_unreadable_files_and_folders_are_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/in.txt", "b/in.txt", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("The cat sat.")
    listed, opened = os.scandir, io.FileIO

    def scandir(path: Any) -> Any:
        if str(path).endswith("/a"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    def open_file(path: Any) -> Any:
        if str(path).endswith("c.txt"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(sources.io, "FileIO", open_file)
    files, skipped = find_files([str(tmp_path)])
    assert [file.name for file in files] == ["b/in.txt"]
    assert {(Path(path).name, reason) for path, reason in skipped} == {
        ("a", "unreadable: Permission denied"),
        ("c.txt", "unreadable: Permission denied"),
    }


def test_include_and_exclude(tmp_path: Path) -> None:
    for name in ("a.txt", "b.md", "drafts/c.txt", "drafts/old/d.txt", "e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("The cat sat.")
    files, skipped = find_files([str(tmp_path)], include=["*.txt"], exclude=["drafts/*", "e.*"])
    assert [file.name for file in files] == ["a.txt"]
    assert [reason for _, reason in skipped] == ["excluded"] * 4
    with pytest.raises(UserError, match="none of its 5 paths can be read: 5 x excluded"):
        find_files([str(tmp_path)], include=["*.pdf"])


def test_a_given_format_counts_more_than_the_look(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,label\n")
    (tmp_path / "page.html").write_text(HTML)
    (tmp_path / "image.png").write_bytes(PNG)
    files, skipped = find_files([str(tmp_path)], "text")
    assert [file.format for file in files] == ["text", "text"] and [reason for _, reason in skipped] == ["binary"]
    with pytest.raises(UserError, match="3 x no Parquet file"):
        find_files([str(tmp_path)], "parquet")
    with pytest.raises(UserError, match="3 x no data set"):
        find_files([str(tmp_path)], "dataset")


def test_each_tiny_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(2000):
        (tmp_path / f"{i:05d}.txt").write_text("The cat sat.")
    opened: list[str] = []
    real = io.FileIO

    def open_file(path: str) -> io.FileIO:
        opened.append(path)
        return real(path)

    monkeypatch.setattr(sources.io, "FileIO", open_file)
    monkeypatch.setattr(builtins, "open", lambda *_: pytest.fail("opened"))
    files = find_files([str(tmp_path)]).files
    assert len(opened) == len(files) == 2000
    assert [len(unit) for unit in cut_units(files)] == [256] * 7 + [208]


def test_versions_change_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("The cat sat.")
    (before,) = find_files([str(tmp_path / "in.txt")]).files
    os.utime(tmp_path / "in.txt", ns=(1, 1))
    (after,) = find_files([f"books={tmp_path / 'in.txt'}"]).files
    assert before.version != after.version == "1" and (before.source, after.source) == ("in", "books")
    assert before.name == after.name == "in.txt" and before.size == 12


def test_urls_are_read_like_files(hostile: Path) -> None:
    system = fsspec.filesystem("memory")
    try:
        names = [
            "good.jsonl",
            "torn.jsonl.gz",
            "good.txt.zst",
            "dump.xml",
            "good.parquet",
            "image.png",
            "empty.txt",
            ".hidden.txt",
        ]
        for name in names:
            system.pipe(f"/in/below/{name}", (hostile / name).read_bytes())
        listing = find_files(["web=memory://in"])
        assert {Path(path).name: reason for path, reason in listing.skipped} == {
            "image.png": "binary",
            "empty.txt": "empty",
            ".hidden.txt": "hidden",
        }
        local = {file.name: file for file in find_files([str(hostile)]).files}
        for number, file in enumerate(listing.files):
            assert file.source == "web" and file.name.startswith("below/") and file.version
            same = local[file.name.removeprefix("below/")]
            ((piece,),) = cut_units([file])
            found = [d[2:] for d in read_piece(file, piece, ReadOptions())]
            assert found == [d[2:] for d in read_piece(same, piece, ReadOptions())] and number < 5
        (single,) = find_files(["memory://in/below/good.jsonl"]).files
        assert single.name == "good.jsonl" and single.source == "good"
        with pytest.raises(UserError, match="memory://nothing: no such file or folder"):
            find_files(["memory://nothing"])
        with pytest.raises(UserError, match="--input nosuch://x: .*nosuch"):
            find_files(["nosuch://x"])
        system.rm("/in/below/good.jsonl")
        with pytest.raises(UserError, match="good.jsonl: cannot be read"):
            list(read_piece(single, piece, ReadOptions()))
    finally:
        system.store.clear()


HUB_NAMES = {
    "wikipedia": ("wikimedia/wikipedia", "20231101.en", "train"),
    "wikipedia:20240501.de": ("wikimedia/wikipedia", "20240501.de", "train"),
    "bookcorpus": ("bookcorpus/bookcorpus", "plain_text", "train"),
    "bookcorpusopen": ("lucadiliello/bookcorpusopen", None, "train"),
    "owner/data.set:en:test": ("owner/data.set", "en", "test"),
    "owner/data": ("owner/data", None, "train"),
}


@pytest.mark.parametrize("given", HUB_NAMES)
def test_names_of_the_hub(given: str) -> None:
    assert sources._parse_hub(given)[:3] == HUB_NAMES[given]


@pytest.mark.parametrize("given", ["wikipedja", "nowhere/file.txt", "./folder/name", "a/b/c", "name=nothing"])
def test_what_names_nothing(given: str) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        find_files([given])
    if given == "wikipedja":
        with pytest.raises(UserError, match="Did you mean 'wikipedia'"):
            find_files([given])


def test_the_cache_of_the_hub_is_read_by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is a stub here; the rows that it holds are real."""
    rows = datasets.Dataset.from_list([{"text": f"sentence {i} ."} for i in range(600)])
    rows.save_to_disk(tmp_path / "0123abcd")
    rows = datasets.load_from_disk(str(tmp_path / "0123abcd"))
    asked: list[Any] = []

    def load_dataset(*args: Any, **more: Any) -> Any:
        asked.append((args, more))
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (file,) = find_files(["bookcorpus"]).files
    assert (file.rows, file.version, file.source) == (600, "0123abcd", "bookcorpus")
    ((piece,),) = cut_units([file])
    halves = [piece._replace(stop=250), piece._replace(start=250)]
    found = [d for half in halves for d in read_piece(file, half, ReadOptions())]
    assert [d.text.count("\n") + 1 for d in found] == [250, 350] and {d.layout for d in found} == {"sentences"}
    assert asked[-1] == (
        ("bookcorpus/bookcorpus", "plain_text"),
        {"split": "train", "revision": "refs/convert/parquet"},
    )


def test_a_hub_out_of_reach_is_told() -> None:
    with pytest.raises(UserError, match=r"wikimedia/wikipedia:20231101.en:train: not to be had .*HF_HUB_OFFLINE=1"):
        find_files(["wikipedia"])
