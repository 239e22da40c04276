"""From files and data sets to documents."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import readers, sources
from data_prep.readers import RUN, RawDocument, Reading, ReadOptions
from data_prep.sources import find_files
from multicls.errors import UserError


def read(path: Path | str, file_format: str = "auto", skip: int = 0, **options: Any) -> list[RawDocument]:
    files = find_files([str(path)], file_format)
    return [document for file in files for document in Reading(file, ReadOptions(**options), skip)]


COMPRESSIONS = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
}


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_compressed_files_are_read_directly_and_told_when_torn(suffix: str, tmp_path: Path) -> None:
    text = "\n".join(f"The cat sat on mat {i}, {i * 7919 % 9973}." for i in range(20_000))
    path = tmp_path / f"in.txt{suffix}"
    data = COMPRESSIONS[suffix](text.encode())
    path.write_bytes(data)
    (file,) = find_files([str(path)])
    reading = Reading(file, ReadOptions())
    assert [document.text for document in reading] == [text]
    assert reading.position == len(data) == file.size
    if suffix:
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(UserError, match=r"in.txt.*cannot be read"):
            read(path)
        path.write_bytes(COMPRESSIONS[suffix](text.encode()) + COMPRESSIONS[suffix](b"\nThe end."))
        assert read(path)[0].text == text + "\nThe end."  # one stream behind another, as parallel compressors write


ROWS = [{"id": 5, "title": "T", "body": "The cat."}, {"id": 6, "title": None, "body": "It ran."}]


def test_parquet_and_data_sets_on_disk(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(tmp_path / "two")
    expected = [("5", "T", "The cat."), ("6", "", "It ran.")]
    for name, documents in (("rows.parquet", expected), ("one", expected), ("two", [expected[0], *expected])):
        found = read(tmp_path / name, text_field="body")
        assert [(d.id.split("#")[1], d.title, d.text) for d in found] == documents
        assert read(tmp_path / name, text_field="body", skip=1) == found[1:]
        with pytest.raises(UserError, match="no column 'text'; set --text_field"):
            read(tmp_path / name)
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:-9])
    with pytest.raises(UserError, match="torn.parquet: not a whole Parquet file"):
        read(tmp_path / "torn.parquet")


def test_a_sentence_a_row_is_rebuilt_into_runs(tmp_path: Path) -> None:
    rows = [f"sentence  number {i} ." for i in range(RUN + 3)]
    runs = ["\n".join(" ".join(row.split()) for row in part) for part in (rows[:RUN], rows[RUN:])]
    pq.write_table(pa.table({"text": rows}), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("\n".join(rows))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    for name in ("a.parquet", "a.txt", "a.jsonl"):
        found = read(tmp_path / name, documents="sentences")
        assert [document.text for document in found] == runs and found[0].layout == "lines"
    (tmp_path / "b.txt").write_text("one .\ntwo .\n\n\nthree .\n")
    assert [document.text for document in read(tmp_path / "b.txt", documents="sentences")] == [
        "one .\ntwo .",
        "three .",
    ]


def test_wikiextractor_json(tmp_path: Path) -> None:
    record = {"id": "7", "url": "x", "title": "Cat", "text": "Cat\n\nThe cat sat.\nHistory.\nIt ran far away."}
    (tmp_path / "wiki_00").write_text(json.dumps(record) + "\n")
    (document,) = read(tmp_path / "wiki_00")
    assert document.layout == "dotted_lines" and document.title == "Cat" and document.text.startswith("\nThe cat")


def test_half_a_surrogate_pair_is_a_counted_drop(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "The \\ud800 cat."}\n{"text": "It ran."}\n')
    assert [d.dropped for d in read(tmp_path / "in.jsonl")] == ["documents_half_a_surrogate_pair", ""]


def test_long_texts_are_cut_at_blank_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LONGEST_DOCUMENT", 1000)
    blocks = [f"{i} " + "cat " * 100 for i in range(10)]
    (tmp_path / "in.txt").write_text("\n\n".join(blocks))
    found = read(tmp_path / "in.txt")
    assert len(found) == 4 and "\n\n".join(blocks).split() == " ".join(d.text for d in found).split()
    (tmp_path / "in.txt").write_text("\n".join(blocks))  # nowhere to cut well
    found = read(tmp_path / "in.txt")
    assert len(found) > 1 and " ".join(blocks).split() == " ".join(d.text for d in found).split()


HUB_NAMES = {
    "wikipedia": ("wikimedia/wikipedia", "20231101.en", "train", "wikipedia"),
    "wikipedia:20240501.de": ("wikimedia/wikipedia", "20240501.de", "train", "wikipedia"),
    "bookcorpus": ("bookcorpus/bookcorpus", "plain_text", "train", "bookcorpus"),
    "books=bookcorpusopen": ("lucadiliello/bookcorpusopen", None, "train", "books"),
    "news=owner/data.set:en:test": ("owner/data.set", "en", "test", "news"),
    "owner/data": ("owner/data", None, "train", "data"),
}


@pytest.mark.parametrize("given", HUB_NAMES)
def test_names_of_the_hub(given: str) -> None:
    (file,) = find_files([given])
    assert file.hub is not None
    assert (file.hub.dataset, file.hub.config, file.hub.split, file.source) == HUB_NAMES[given]


@pytest.mark.parametrize("given", ["wikipedja", "nowhere/file.txt", "./folder/name", "a/b/c", "name=nothing"])
def test_what_names_nothing(given: str) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        find_files([given])
    if given == "wikipedja":
        with pytest.raises(UserError, match="Did you mean 'wikipedia'"):
            find_files([given])


def test_hub_rows_stream_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is a stub here; what is asked of it, and what becomes of its rows, is real."""
    asked: list[Any] = []

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        asked.append((args, kwargs))
        rows = [{"text": f"sentence {i} ."} for i in range(RUN + 1)]
        data = datasets.Dataset.from_list(rows)
        return data.to_iterable_dataset(num_shards=3) if kwargs["streaming"] else data

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for offline in (False, True):
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
        found = read("bookcorpus")
        assert [document.text.count("\n") + 1 for document in found] == [RUN, 1]
        assert read("bookcorpus", skip=1) == found[1:]
        args, kwargs = asked[-1]
        assert args == ("bookcorpus/bookcorpus", "plain_text")
        assert kwargs == {"split": "train", "revision": "refs/convert/parquet", "streaming": not offline}


def test_a_hub_out_of_reach_is_told() -> None:
    with pytest.raises(
        UserError, match=r"--input wikimedia/wikipedia:20231101.en:train: not to be had .*HF_HUB_OFFLINE=1"
    ):
        read("wikipedia")


def test_one_json_array_is_no_json_lines(tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text('[{"text": "The cat."}]')
    with pytest.raises(UserError, match="one JSON array"):
        find_files([str(tmp_path)])


def test_formats_are_told_from_the_head(tmp_path: Path) -> None:
    for name, text in {
        "a": '<doc id="1" url="" title="x">\n</doc>\n',
        "b": '{"text": ""}\n',
        "c": "<mediawiki></mediawiki>",
        "d": "A text.",
    }.items():
        (tmp_path / name).write_text(text)
    assert [file.format for file in find_files([str(tmp_path)])] == ["wikiextractor", "jsonl", "mediawiki", "text"]
    assert set(sources.FORMATS) == {"text", "wikiextractor", "jsonl", "mediawiki", "parquet", "dataset"}
