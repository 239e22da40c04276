"""Units of work: every record belongs to exactly one piece, wherever the cuts lie."""

from __future__ import annotations

import bz2
import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import read
from data_prep.read import RawDocument, read_piece
from data_prep.settings import ReadOptions
from data_prep.sources import SourceFile, find_files
from data_prep.units import LONGEST_DOCUMENT, SMALLEST_UNIT, Piece, cut_units, piece_hash


def pieces_of(length: int, chance: random.Random) -> list[Piece]:
    cuts = sorted({0, length, *(chance.randrange(length + 1) for _ in range(chance.randrange(8)))})
    return [Piece(0, *cut) for cut in zip(cuts, cuts[1:], strict=False)]


def words(chance: random.Random) -> str:
    letters = "abc é😀.{<>&"
    return "".join(chance.choice(letters) for _ in range(chance.randrange(30))).strip()


def json_lines(chance: random.Random, newline: str) -> str:
    rows = [json.dumps({"text": words(chance)}, ensure_ascii=False) for _ in range(chance.randrange(1, 12))]
    return newline.join(row for row in [*rows, "", "{torn", ""] if chance.random() < 0.9) or "{torn"


def articles(chance: random.Random, newline: str) -> str:
    parts = []
    for i in range(chance.randrange(1, 8)):
        lines = [f'<doc id="{i}" url="" title="T {i}">', *(words(chance) for _ in range(chance.randrange(4))), "</doc>"]
        parts += [line for line in lines if chance.random() < 0.95 or line.startswith("<doc")]
        parts += ["between"] if chance.random() < 0.1 else []
    return newline.join(parts) + newline * chance.randrange(2)


def dump(chance: random.Random, newline: str) -> str:
    pages = []
    for i in range(chance.randrange(1, 8)):
        text = words(chance).replace("&", "&amp;").replace("<", "&lt;")
        pages.append(
            f"  <page>{newline}<title>T {i}</title><ns>{i % 3}</ns><id>{i}</id><revision><text>{text}</text></revision>"
            f"{newline}</page>{newline if chance.random() < 0.8 else ''}"
        )
    return f"<mediawiki>{newline}" + "".join(pages) + "</mediawiki>"


@pytest.mark.parametrize("kind", ["jsonl", "wikiextractor", "mediawiki"])
def test_records_of_all_pieces_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    make = {"jsonl": json_lines, "wikiextractor": articles, "mediawiki": dump}[kind]
    for seed in range(300):
        chance = random.Random(seed)
        data = make(chance, chance.choice(["\n", "\r\n"])).encode()
        (tmp_path / "in").write_bytes(data)
        file = SourceFile("s", "in", kind, len(data), str(tmp_path / "in"), "")
        whole = list(read_piece(file, Piece(0, 0, len(data)), ReadOptions()))
        parts = [d for piece in pieces_of(len(data), chance) for d in read_piece(file, piece, ReadOptions())]
        assert parts == whole, seed
        assert len(whole) >= {"mediawiki": data.count(b"<page>"), "wikiextractor": data.count(b"<doc ")}.get(kind, 0)


@pytest.mark.parametrize("documents", ["file", "blank_line", "sentences"])
def test_every_line_of_a_text_is_in_exactly_one_piece(
    documents: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "_SEARCH", 40)  # lines without a blank one between them are cut, too
    options = ReadOptions(documents=documents)
    for seed in range(300):
        chance = random.Random(seed)
        lines = [f"{i} {words(chance)}" if chance.random() < 0.8 else " " for i in range(chance.randrange(40))]
        data = chance.choice(["\n", "\r\n"]).join(lines).encode() + b"x"
        (tmp_path / "in").write_bytes(data)
        file = SourceFile("s", "in", "text", len(data), str(tmp_path / "in"), "")
        found = [d for piece in pieces_of(len(data), chance) for d in read_piece(file, piece, options)]
        assert not any(d.dropped for d in found)
        assert " ".join(d.text for d in found).split() == data.decode().split(), seed
        assert len({d.id for d in found}) == len(found)
        if documents == "blank_line" and max(map(len, (b.text for b in found))) < 40:
            assert all(" \n" not in d.text.strip() for d in found)


@pytest.mark.parametrize("streams", ["one page", "several pages", "anywhere"])
def test_multistream_dumps_are_cut_at_their_streams(streams: str, tmp_path: Path) -> None:
    for seed in range(60):
        chance = random.Random(seed)
        text = dump(chance, "\n").encode()
        starts = [i for i in range(len(text)) if text.startswith(b"  <page>", i)]
        if streams == "several pages":
            starts = starts[::2]
        if streams == "anywhere":  # as parallel compressors write
            starts = sorted({chance.randrange(len(text)) for _ in range(9)} | {text.index(b"<page>") + 3})
        cuts = sorted({0, *starts, len(text)})
        compressed = [bz2.compress(text[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
        data = b"".join(compressed)
        (tmp_path / "in.xml.bz2").write_bytes(data)
        file = SourceFile("s", "in.xml.bz2", "mediawiki", len(data), str(tmp_path / "in.xml.bz2"), "")
        found = [d for piece in pieces_of(len(data), chance) for d in read_piece(file, piece, ReadOptions())]
        assert [d.title for d in found] == [f"T {i}" for i in range(text.count(b"<page>"))], seed
    at_streams = [
        Piece(0, len(b"".join(compressed[:i])), len(b"".join(compressed[: i + 1]))) for i in range(len(cuts) - 1)
    ]
    assert [d for piece in at_streams for d in read_piece(file, piece, ReadOptions())] == found


def test_row_groups_and_rows_are_numbered_through(tmp_path: Path) -> None:
    rows = [{"text": f"row {i}"} for i in range(100)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7)
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for name, count in (("a.parquet", 15), ("saved", 100)):
        (file,) = find_files([str(tmp_path / name)]).files
        assert file.rows == count
        for seed in range(5):
            pieces = pieces_of(count, random.Random(seed))
            found = [d for piece in pieces for d in read_piece(file, piece, ReadOptions())]
            assert [(d.id, d.text) for d in found] == [(f"{file.name}#{i}", f"row {i}") for i in range(100)]


def test_memory_is_bounded_by_the_longest_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "LONGEST_RECORD", 2000)
    monkeypatch.setattr(read, "_CHUNK", 100)
    pages = [f"<page><id>{i}</id><revision><text>{'a' * 10 ** (i + 1)}</text></revision></page>" for i in (0, 4, 1)]
    (tmp_path / "in.xml").write_text("<mediawiki>" + "\n".join(pages) + "</mediawiki>")
    (file,) = find_files([str(tmp_path / "in.xml")]).files
    found = list(read_piece(file, Piece(0, 0, file.size), ReadOptions()))
    assert [d.dropped for d in found] == ["", "documents_page_too_long", ""] and len(found[2].text) == 100


def file_of(size: int, kind: str = "jsonl", path: str = "a", rows: int = 0) -> SourceFile:
    return SourceFile("s", path, kind, size, path, "", rows)


def test_units_cover_every_file_once_and_are_of_like_size() -> None:
    mb = 1 << 20
    files = [file_of(100)] * 500 + [file_of(700 * mb), file_of(90 * mb, "parquet", rows=40), file_of(3 * mb, "text")]
    files += [file_of(30 * mb, path="b.jsonl.gz"), file_of(9 * mb, "mediawiki", "c.xml.bz2"), file_of(0, "dataset")]
    units = cut_units(files)
    assert units == cut_units(list(files)) and 50 <= len(units) < 100
    for number, file in enumerate(files):
        own = [piece for unit in units for piece in unit if piece.file == number]
        assert own[0].start == 0 and own[-1].stop == (file.rows or file.size)
        assert all(a.stop == b.start for a, b in zip(own, own[1:], strict=False))
        assert (len(own) == 1) == (file.size < 9 * mb or file.path == "b.jsonl.gz")
    assert len(units[0]) == 500
    assert cut_units([]) == [] and cut_units([file_of(10)]) == [[Piece(0, 0, 10)]]
    assert len(cut_units([file_of(10 * SMALLEST_UNIT)])) == 10
    assert len(cut_units([file_of(LONGEST_DOCUMENT - 5000, "text")])) == 1
    assert max(sum(p.stop - p.start for p in unit) for unit in cut_units([file_of(1 << 40)])) == 32 * mb


def test_a_hash_sees_a_change_of_the_same_size(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a cat " * 1000)
    table = pa.table({"text": ["a cat", "a dog", "a cow"]})
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=1)
    text, rows = find_files([str(tmp_path)]).files
    before = [piece_hash(text, Piece(0, 0, text.size)), *(piece_hash(rows, Piece(1, i, i + 1)) for i in range(3))]
    assert len(set(before)) == 4 and all(len(one) == 32 for one in before)
    (tmp_path / "a.txt").write_text("a dog " * 1000)
    pq.write_table(pa.table({"text": ["a cat", "a pig", "a cow"]}), tmp_path / "b.parquet", row_group_size=1)
    after = [piece_hash(text, Piece(0, 0, text.size)), *(piece_hash(rows, Piece(1, i, i + 1)) for i in range(3))]
    assert before[0] != after[0] and before[1:] != after[1:]
    assert (
        piece_hash(file_of(1, "dataset"), Piece(0, 0, 1))
        == ""
        == piece_hash(file_of(1, path="s3://a/b"), Piece(0, 0, 1))
    )


def test_a_compressed_file_is_one_piece(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"row {i} {i * 7919 % 10007}"}) for i in range(20_000)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode(), 1))
    (file,) = find_files([str(tmp_path)]).files
    assert cut_units([file]) == [[Piece(0, 0, file.size)]]
    found: list[RawDocument] = list(read_piece(file, Piece(0, 0, file.size), ReadOptions()))
    assert len(found) == 20_000
