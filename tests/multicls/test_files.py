from __future__ import annotations

import os
from pathlib import Path

import pytest

from multicls.errors import UserError
from multicls.files import append_jsonl, atomic_folder, atomic_write, read_json, read_jsonl


def test_atomic_write_keeps_the_old_file_when_the_block_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(path) as file:
        file.write("half of the new")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_reach_the_disk_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync, path = [], os.fsync, tmp_path / "new folder" / "a.txt"

    def note(descriptor: int) -> None:
        sync(descriptor)
        synced.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", note)
    with atomic_write(path) as file:
        file.write("new")
    assert synced == [(path.stat().st_ino, 3, False)]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("content", [b'{"a": 1,}', b"", b"\xff\xfe"])
def test_bad_json_is_a_user_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.json: not valid JSON"):
        read_json(path)
    with pytest.raises(UserError, match="no such file"):
        read_json(tmp_path / "b.json")


def test_jsonl_survives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert read_jsonl(path) == []
    append_jsonl(path, {"n": 1})
    with path.open("ab") as file:
        file.write(b'{"n": 2, "lo')
    append_jsonl(path, {"n": 3})
    assert read_jsonl(path) == [{"n": 1}, {"n": 3}]


def test_atomic_folder_replaces_the_old_one_when_whole(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "a"
    for name in ("first", "second"):
        with atomic_folder(path) as fresh:
            (fresh / name).touch()
            assert not (path / name).exists()
        assert [file.name for file in path.iterdir()] == [name]
    with pytest.raises(RuntimeError), atomic_folder(path) as fresh:
        (fresh / "half of the new").touch()
        raise RuntimeError
    assert [file.name for file in path.iterdir()] == ["second"]
    assert list(path.parent.iterdir()) == [path]


def test_folder_survives_a_kill_between_the_two_renames(tmp_path: Path) -> None:
    for leftover in (".model.old", ".model.new"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / leftover).touch()
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "model"):
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.rglob("*")] == ["model", ".model.old"]
    with atomic_folder(tmp_path / "model") as fresh:
        (fresh / "weights").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "weights"]
