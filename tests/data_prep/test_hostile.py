"""Hostile input, full disks, dying processes: a named error or a counted drop, and nothing half-made."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_prep import prepare as prepare_module
from data_prep import read, run, units
from data_prep.prepare import prepare
from data_prep.settings import ExecutorOptions, PrepareSettings, ReadOptions
from data_prep.sources import SourceFile
from multicls.corpus import Corpus
from multicls.errors import UserError
from multicls.files import locked
from tests.data_prep.conftest import story
from tests.processes import children, sessions, until

RUN = Path(run.__file__)


def prepared(tokenizer: Path, output: Path, *inputs: Path, workers: int = 1, **settings: Any) -> Corpus:
    given = PrepareSettings(input=tuple(map(str, inputs)), tokenizer=str(tokenizer), **settings)
    return Corpus.open(prepare(given, output, ExecutorOptions(workers=workers), log=lambda _: None))


def command(tokenizer: Path, output: Path, *inputs: Path, workers: int = 2) -> list[str]:
    words = [sys.executable, str(RUN), "--input", *map(str, inputs), "--output", str(output)]
    return [*words, "--tokenizer", str(tokenizer), "--workers", str(workers)]


def test_damaged_spots_cost_a_document_not_the_run(tiny_tokenizer: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"id": i, "text": story(8, i)}).encode() for i in range(8)]
    damaged = [*lines[:5], lines[5].replace(b"sat", b"s\xe9t"), *lines[6:]]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines * 50 + damaged * 150) + b"\n")
    (tmp_path / "b.txt").write_bytes(story(3000).encode() + b"\n\n\xff\xfe " + story(9, 1).encode())
    corpus = prepared(
        tiny_tokenizer,
        tmp_path / "out",
        tmp_path / "a.jsonl",
        tmp_path / "b.txt",
        without=("duplicate_documents", "repeated_lines"),
    )
    assert corpus.num_documents == 1450 and corpus.manifest["dropped"]["documents_not_utf8"] == 151
    samples = json.loads((tmp_path / "out" / "dropped.json").read_text())["documents_not_utf8"]
    starts, size = [], 0
    for line in lines * 50 + damaged * 150:
        starts.append(size)
        size += len(line) + 1
    names = {f"a.jsonl#{starts[405 + 8 * i]}" for i in range(150)}
    assert len(samples) == 8 and {sample["document"] for sample in samples if sample["source"] == "a"} <= names


def test_nul_bytes_in_the_middle_are_removed_and_counted(tiny_tokenizer: Path, tmp_path: Path) -> None:
    text = story(5000)
    assert len(text) > 1 << 17
    (tmp_path / "in.txt").write_text(text[: 1 << 17] + "\0" + text[1 << 17 :])
    corpus = prepared(tiny_tokenizer, tmp_path / "out", tmp_path / "in.txt")
    assert corpus.manifest["dropped"]["characters_control"] == 1


@pytest.mark.slow
def test_an_endless_line_is_left_out_in_bounded_memory(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """1 GB without a line's end: as a sparse-looking gzip, so that the test is quick."""
    with gzip.open(tmp_path / "long.txt.gz", "wb", compresslevel=1) as file:
        for _ in range(64):
            file.write(b"the cat sat " * (1 << 20) + b"    " * (1 << 20))
        file.write(b"\n\n" + story(9).encode())
    (tmp_path / "short.txt").write_text(story(9))
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)); "
    limited += "sys.argv = sys.argv[1:]; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    words = command(tiny_tokenizer, tmp_path / "out", tmp_path / "long.txt.gz", tmp_path / "short.txt", workers=1)
    done = subprocess.run([words[0], "-c", limited, *words[1:]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    manifest = Corpus.open(tmp_path / "out").manifest
    assert manifest["documents"] == 1 and manifest["dropped"]["documents_line_too_long"] == 1


def test_odd_paths_and_right_to_left_text(tiny_tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my notes 📚"
    folder.mkdir()
    (folder / "ein Tag 😀.txt").write_text(story(9))
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "nowhere").symlink_to(tmp_path / "missing")
    (folder / "empty.txt").touch()
    (folder / "עברית.txt").write_text(" ".join(f"הילד הלך אל הבית מספר {i}." for i in range(9)))
    done = subprocess.run(command(tiny_tokenizer, tmp_path / "a corpus ✓", folder), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    corpus = Corpus.open(tmp_path / "a corpus ✓")
    corpus.verify()
    assert [corpus.row(i).id for i in range(2)] == ["ein Tag 😀.txt#0", "עברית.txt#0"]
    assert len(corpus.row(1).offsets) - 1 == 9 and corpus.row(0).source == "my notes 📚"


def test_a_damaged_file_is_dropped_and_told_or_stops_the_run(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "SMALLEST_UNIT", 20_000)
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i:02d}.txt.gz").write_bytes(gzip.compress(story(900 + i, i).encode(), mtime=0))
    whole = prepared(tiny_tokenizer, tmp_path / "whole", folder)
    good = (folder / "17.txt.gz").read_bytes()
    (folder / "17.txt.gz").write_bytes(good[:-20] + bytes(20))
    monkeypatch.setattr("data_prep.sources._HEAD", 64)  # so that the look at its head does not find the damage
    without = prepared(tiny_tokenizer, tmp_path / "without", folder)
    assert without.manifest["documents"] == whole.manifest["documents"] - 1
    assert without.manifest["dropped"]["records_file_damaged"] == 1
    with pytest.raises(UserError, match=r"17.txt.gz"):
        prepared(tiny_tokenizer, tmp_path / "out", folder, bad_records="stop")
    with pytest.raises(UserError, match="not a finished corpus|no such corpus folder"):
        Corpus.open(tmp_path / "out")
    (folder / "17.txt.gz").write_bytes(good)
    prepared(tiny_tokenizer, tmp_path / "out", folder, bad_records="stop").verify()
    for name in ("document_frequency.npy", "shard-00000.arrow"):
        assert (whole.path / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_input_that_changed_after_a_corpus_was_finished_is_told(tiny_tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text(story(30))
    prepared(tiny_tokenizer, tmp_path / "out", path)
    os.utime(path, ns=(1, 1))
    prepared(tiny_tokenizer, tmp_path / "out", path)  # the same content with another date
    path.write_text(story(30).replace("cat", "dog"))  # the same size
    with pytest.raises(UserError, match=r"in.txt: has changed since"):
        prepared(tiny_tokenizer, tmp_path / "out", path)


def test_two_runs_do_not_write_one_folder(tiny_tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(story(9))
    with locked(tmp_path / "out"), pytest.raises(UserError, match="in use by this process"):
        prepared(tiny_tokenizer, tmp_path / "out", tmp_path / "in.txt")
    prepared(tiny_tokenizer, tmp_path / "out", tmp_path / "in.txt").verify()


def test_more_than_the_disk_holds_is_refused(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.txt").write_text(story(5000))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=50_000))
    with pytest.raises(UserError, match=r"the corpus needs about .* free there"):
        prepared(tiny_tokenizer, tmp_path / "out", tmp_path / "in.txt")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs rights that this user has not")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_loses_nothing(
    tiny_tokenizer: Path, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "SMALLEST_UNIT", 50_000)
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i:02d}.txt").write_text(story(1000 + i, i))
    whole = prepared(tiny_tokenizer, tmp_path / "whole", folder).path
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(7_000_000))
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "MARGIN", 0)  # other programs filled it after the plan was made
        with pytest.raises(UserError, match="the disk is full"):
            prepared(tiny_tokenizer, small_disk / "out", folder)
    with pytest.raises(UserError, match="not a finished corpus"):
        Corpus.open(small_disk / "out")
    assert list((small_disk / "out").glob("work/parts/*"))
    ballast.unlink()
    prepared(tiny_tokenizer, small_disk / "out", folder).verify()
    for path in whole.iterdir():
        if path.name not in ("log.jsonl", "inputs.json"):
            assert path.read_bytes() == (small_disk / "out" / path.name).read_bytes()


def at_work(tokenizer: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Returns a run of two workers that has written its first part."""
    (folder / "in.txt").write_text("\n\n".join(story(2000, i) for i in range(200)))
    words = command(tokenizer, folder / "out", folder / "in.txt")
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until(lambda: list((folder / "out").glob("work/parts/*")) or process.poll() is not None)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_the_run(how: signal.Signals, tiny_tokenizer: Path, tmp_path: Path) -> None:
    process = at_work(tiny_tokenizer, tmp_path)
    workers = children(process.pid)
    process.send_signal(how)
    _, errors = process.communicate()
    assert process.returncode == {signal.SIGINT: 130}.get(how, -how)
    assert b"Traceback" not in errors
    assert len(workers) >= 2
    until(lambda: not sessions().keys() & set(workers))


@pytest.mark.slow
def test_a_killed_worker_is_named(tiny_tokenizer: Path, tmp_path: Path) -> None:
    process = at_work(tiny_tokenizer, tmp_path)
    os.kill(max(children(process.pid)), signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == 2 and b"was killed, perhaps because memory ran out" in errors


def test_readers_stop_at_the_limit_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "LONGEST_RECORD", 100)
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "' + b"a" * 1000 + b'"}\n{"text": "It ran."}\n')
    path = tmp_path / "in.jsonl"
    file = SourceFile("s", "in.jsonl", "jsonl", path.stat().st_size, str(path), "")
    documents = read.read_piece(file, units.Piece(0, 0, file.size), ReadOptions())
    assert [document.dropped for document in documents] == ["documents_line_too_long", ""]
