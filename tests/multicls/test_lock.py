"""The lock that keeps a folder to one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from multicls.errors import UserError
from multicls.files import LOCK, REPOSITORY, FolderInUse, lock_holder, locked

HOLDER = """
import sys, time
from multicls.files import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_names_the_holder_until_it_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        before = (folder / LOCK).read_bytes()
        try:
            message = rf"in use by process {holder.pid} on host \S+ since \d{{4}}-"
            with pytest.raises(FolderInUse, match=message), locked(folder, patience=0):
                pass
            assert f"process {holder.pid} on host" in str(lock_holder(folder))
            assert (folder / LOCK).read_bytes() == before
        finally:
            holder.kill()
        holder.wait()
        assert lock_holder(folder) is None
        with locked(folder, patience=0):
            assert str(os.getpid()) in (folder / LOCK).read_text()


def test_a_free_folder_has_no_lock_file(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a").touch()
    with locked(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK).exists()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["a"]
    with locked(tmp_path / "new" / "run"):
        pass
    assert not (tmp_path / "new" / "run").exists()


def test_one_process_takes_a_lock_once_under_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (tmp_path / "link").symlink_to(folder)
    with locked(folder):
        message = f"in use by process {os.getpid()}"
        with pytest.raises(UserError, match=message), locked(tmp_path / "link", patience=0):
            pass
        assert str(os.getpid()) in str(lock_holder(folder))
    assert lock_holder(folder) is None
