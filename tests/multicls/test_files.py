"""Atomic files and folders, JSON lines, and the lock that keeps a folder to one process."""

import errno
import os
from pathlib import Path
from unittest import mock

import pytest

from multicls import files
from multicls.errors import UserError


def test_atomic_write_keeps_the_old_file_when_the_block_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), files.atomic_write(path) as file:
        file.write("half of the new")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_sync_comes_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync, path = [], os.fsync, tmp_path / "new folder" / "a.txt"

    def note(descriptor: int) -> None:
        sync(descriptor)
        synced.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", note)
    with files.atomic_write(path) as file:
        file.write("new")
    assert synced == [(path.stat().st_ino, 3, False)] and path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("content", [b'{"a": 1,}', b"", b"\xff\xfe"])
def test_bad_json_is_a_user_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.json: not valid JSON"):
        files.read_json(path)
    with pytest.raises(UserError, match="no such file"):
        files.read_json(tmp_path / "b.json")


def test_jsonl_survives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert files.read_jsonl(path) == []
    files.append_jsonl(path, {"n": 1})
    with path.open("ab") as file:
        file.write(b'{"n": 2, "lo')
    files.append_jsonl(path, {"n": 3})
    assert files.read_jsonl(path) == [{"n": 1}, {"n": 3}]


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, message in (("", "is a folder"), ("file/a", "file/a: cannot be written to: ")):
        with pytest.raises(UserError, match=message), files.atomic_write(tmp_path / path):
            pass
    with pytest.raises(UserError, match="cannot be"), files.atomic_folder(tmp_path / "file/a"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    for code in (errno.EIO, errno.ENOSPC):  # may pass; `disk_errors_reported` has the advice
        fault = mock.patch("tempfile.mkstemp", side_effect=OSError(code, "fault"))
        with pytest.raises(OSError, match="fault"), fault, files.atomic_write(tmp_path / "a"):
            pass


def test_atomic_folder_replaces_the_old_one_when_whole(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "a"
    for name in ("first", "second"):
        with files.atomic_folder(path) as fresh:
            (fresh / name).touch(0o600)
            assert not (path / name).exists()
        (file,) = path.iterdir()
        assert (file.name, file.stat().st_mode & 0o777) == (name, 0o644)
    with pytest.raises(RuntimeError), files.atomic_folder(path) as fresh:
        (fresh / "half of the new").touch()
        raise RuntimeError
    assert [file.name for file in path.iterdir()] == ["second"]
    assert list(path.parent.iterdir()) == [path]


def test_folder_survives_a_kill_between_the_two_renames(tmp_path: Path) -> None:
    for leftover in (".model.old", ".model.new"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / leftover).touch()
    with pytest.raises(ZeroDivisionError), files.atomic_folder(tmp_path / "model"):
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.rglob("*")] == ["model", ".model.old"]
    with files.atomic_folder(tmp_path / "model") as fresh:
        (fresh / "weights").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "weights"]


def test_a_free_folder_has_no_lock_file(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a").touch()
    with files.locked(tmp_path / "run"):
        assert (tmp_path / "run" / files.LOCK).exists()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["a"]
    with files.locked(tmp_path / "new" / "run"):
        pass
    assert not (tmp_path / "new" / "run").exists()


def test_one_process_takes_a_lock_once_under_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (tmp_path / "link").symlink_to(folder)
    with files.locked(folder):
        message = f"in use by process {os.getpid()}"
        with pytest.raises(UserError, match=message), files.locked(tmp_path / "link", patience=0):
            pass
        assert str(os.getpid()) in str(files.lock_holder(folder))
    assert files.lock_holder(folder) is None
