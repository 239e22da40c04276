from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from multicls.errors import UserError
from multicls.files import (
    append_jsonl,
    atomic_folder,
    atomic_write,
    find_shipped,
    read_json,
    read_jsonl,
    sha256_of,
    write_json,
)


def test_atomic_write_keeps_the_old_file_when_the_block_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(path) as file:
        file.write("half of the new")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_atomic_write_shows_the_file_only_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "a.bin"
    with atomic_write(path, "wb") as file:
        file.write(b"\x00\xff")
        assert not path.exists()
    assert path.read_bytes() == b"\x00\xff"
    assert path.stat().st_mode & 0o777 == 0o644


def test_json_round_trip(tmp_path: Path) -> None:
    value = {"é": [1, None, 0.5]}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value


@pytest.mark.parametrize("content", [b'{"a": 1,}', b"", b"\xff\xfe"])
def test_bad_json_is_a_user_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.json: not valid JSON"):
        read_json(path)


def test_missing_json_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_json(tmp_path / "a.json")


def test_jsonl_survives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append_jsonl(path, {"n": 1})
    with path.open("ab") as file:
        file.write(b'{"n": 2, "lo')
    append_jsonl(path, {"n": 3})
    assert read_jsonl(path) == [{"n": 1}, {"n": 3}]


def test_jsonl_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    def write(writer: int) -> None:
        for _ in range(50):
            append_jsonl(path, {"writer": writer, "text": "x" * 3000})

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(record["writer"] for record in read_jsonl(path)) == [w for w in range(4) for _ in range(50)]


def test_missing_jsonl_has_no_records(tmp_path: Path) -> None:
    assert read_jsonl(tmp_path / "a.jsonl") == []


def test_sha256_of_a_file_longer_than_a_block(tmp_path: Path) -> None:
    content = b"0123456789" * 150_000
    (tmp_path / "a").write_bytes(content)
    assert sha256_of(tmp_path / "a") == hashlib.sha256(content).hexdigest()


def test_shipped_file_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_shipped("ds_configs/zero2.json").is_absolute()
    own = tmp_path / "ds_configs" / "zero2.json"
    own.parent.mkdir()
    own.write_text("{}")
    assert find_shipped("ds_configs/zero2.json") == own.resolve()  # the user's own comes first


def test_misspelt_shipped_file_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"Did you mean 'ds_configs/zero2\.json'"):
        find_shipped("ds_configs/zer2.json")


def test_atomic_folder_shows_the_folder_only_when_whole(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "a"
    with atomic_folder(path) as fresh:
        (fresh / "weights").write_text("1")
        assert fresh.is_dir() and not path.exists()
    assert (path / "weights").read_text() == "1"
    assert list(path.parent.iterdir()) == [path]


def test_atomic_folder_replaces_the_old_one_as_a_whole(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with atomic_folder(tmp_path / "a") as fresh:
            (fresh / name).touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["second"]


def test_atomic_folder_keeps_the_old_one_when_the_block_fails(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with atomic_folder(path) as fresh:
        (fresh / "old").touch()
    with pytest.raises(RuntimeError), atomic_folder(path) as fresh:
        (fresh / "half of the new").touch()
        raise RuntimeError
    assert [file.name for file in path.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [path]


def test_atomic_folder_clears_what_a_killed_process_left(tmp_path: Path) -> None:
    (tmp_path / ".a.new").mkdir()
    (tmp_path / ".a.new" / "left over").touch()
    with atomic_folder(tmp_path / "a"):
        pass
    assert list((tmp_path / "a").iterdir()) == []


def test_folder_survives_a_kill_between_the_two_renames(tmp_path: Path) -> None:
    (tmp_path / ".model.old").mkdir()
    (tmp_path / ".model.old" / "weights").write_text("whole")
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "model"):
        raise ZeroDivisionError
    assert (tmp_path / "model" / "weights").read_text() == "whole"
    with atomic_folder(tmp_path / "model") as fresh:
        (fresh / "weights").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "weights").read_text() == "new"
