"""A copy of the corpus on a node's own disk, and reading it once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from multicls import console
from multicls.corpus import Corpus
from multicls.errors import UserError
from pretrain import staging
from pretrain.staging import copy_corpus, copy_path, read_shards, stage
from tests.pretrain.conftest import Fork, records, said


@pytest.fixture
def corpus(tiny_corpus: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_corpus, tmp_path / "wiki"))


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_corpus_is_copied_once(corpus: Path, tmp_path: Path) -> None:
    local, lines = tmp_path / "local" / "disk", list[str]()
    copy = stage(corpus, str(local), warm_up=False, say=lines.append)
    Corpus.open(copy).verify()
    assert copy.name.startswith("wiki-") and [path.name for path in local.iterdir()] == [copy.name]
    assert "corpus: copying to" in lines[-1] and lines[-1].endswith("MB/s")
    before = times(copy)
    assert stage(corpus, str(local), warm_up=False, say=lines.append) == copy
    assert times(copy) == before and lines[-1] == f"corpus: found the copy {copy}"


def test_killed_or_cleaned_copy_is_made_again(corpus: Path, tmp_path: Path) -> None:
    copy = copy_path(corpus, tmp_path)
    leftover = tmp_path / f".{copy.name}" / "copy"
    leftover.mkdir(parents=True)
    (leftover / "shard-00000.arrow").write_bytes(b"half")
    copy_corpus(corpus, copy)
    (copy / "shard-00000.arrow").unlink()  # by a cleaner of temporary files
    copy_corpus(corpus, copy)
    Corpus.open(copy).verify()
    assert not leftover.parent.exists()


def test_another_corpus_has_another_copy(corpus: Path, tmp_path: Path) -> None:
    before = copy_path(corpus, tmp_path)
    (corpus / "manifest.json").write_text((corpus / "manifest.json").read_text() + " ")
    assert copy_path(corpus, tmp_path) != before


def test_copy_is_complete_or_absent(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = copy_path(corpus, tmp_path / "local")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(staging.os, "fsync", full)
        with pytest.raises(UserError, match=r"data\.local_copy = .*local: .* failed: No space left on device"):
            copy_corpus(corpus, copy)
    assert not copy.exists() and not any((tmp_path / "local").glob("**/*"))


def test_no_room(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: Usage(free=50_000))
    with pytest.raises(
        UserError, match=r"data\.local_copy = .*local: the corpus takes 0\.00 GB and the disk of \S+ has"
    ):
        stage(corpus, str(tmp_path / "local"), warm_up=False)
    assert not any((tmp_path / "local").glob("**/*"))


def test_processes_at_once_copy_once(corpus: Path, tmp_path: Path) -> None:
    """Two containers of one machine share a disk; here each is a process, since a lock belongs to a process."""
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(3) as pool:
        lines = pool.map(_copy_and_tell, [(corpus, copy_path(corpus, tmp_path))] * 3, chunksize=1)
    assert sum("copying" in line for line in lines) == 1 and sum("found" in line for line in lines) == 2


def _copy_and_tell(paths: tuple[Path, Path]) -> str:
    lines: list[str] = []
    copy_corpus(*paths, say=lines.append)
    return lines[-1]


def test_warm_up_reads_all_shards(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(staging, "BLOCK", 1000)
    monkeypatch.setattr(console, "LINE_EVERY", 0)
    assert stage(corpus, None, warm_up=True, say=lines.append) == corpus
    size = sum(path.stat().st_size for path in corpus.glob("*.arrow"))
    counts = [float(line.split(": ")[2].split()[0]) for line in lines]
    assert len(lines) > size / 1000 and counts == sorted(counts)
    assert lines[-1].startswith(f"corpus: reading {corpus}: {size / 1e6:.1f} of {size / 1e6:.1f} MB, ")


def test_warm_up_says_when_the_memory_is_too_small(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(staging.os, "sysconf", lambda name: 100)
    read_shards(corpus, lines.append)
    assert "0.0 GB of memory: data.warm_up helps little" in lines[0]


@pytest.mark.slow
def test_run_with_staging_gives_the_same_losses(fork: Fork, tmp_path: Path) -> None:
    """Two ranks of one node: one of them copies and reads. Neither setting is part of the run's identity."""
    plain, staged, local, steps = tmp_path / "plain", tmp_path / "staged", tmp_path / "local", ("--steps", "2")
    ranks: dict[str, Any] = {"ranks": 2}
    flags = (*steps, "--set", f"data.local_copy={local}", "--set", "data.warm_up=true")
    assert fork(staged, ranks, flags=flags) == [[0, 0]], said(staged)
    text = said(staged)
    assert text.count("corpus: copying to") == 1 and text.count("corpus: reading") == 1
    assert len(list(local.iterdir())) == 1
    assert fork(staged, flags=steps) == [[0]] and "already finished" in said(staged)
    assert fork(plain, flags=steps) == [[0]], said(plain)
    for one, two in zip(records(plain), records(staged), strict=True):
        assert two["loss/total"] == pytest.approx(one["loss/total"], rel=1e-5)
