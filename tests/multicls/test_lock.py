"""The lock that keeps a folder to one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from multicls import files
from multicls.errors import UserError
from multicls.files import LOCK, REPOSITORY, FolderLock, lock_holder, locked

HOLDER = """
import os, sys, time
from multicls.files import FolderLock
FolderLock(sys.argv[1]).acquire()
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(600)
"""


def test_second_process_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    """The holder has a forked child, as a rank has loader workers, which outlives it."""
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            before = (folder / LOCK).read_bytes()
            with pytest.raises(UserError, match=rf"in use by process {holder.pid} on host \S+ since \d{{4}}-"):
                FolderLock(folder).acquire(patience=0)
            assert f"process {holder.pid} on host" in str(lock_holder(folder))
            assert (folder / LOCK).read_bytes() == before
            holder.kill()
            holder.wait()
            os.kill(child, 0)  # it lives
            assert lock_holder(folder) is None
            with locked(folder, patience=0):
                assert str(os.getpid()) in (folder / LOCK).read_text()
        finally:
            os.kill(child, signal.SIGKILL)


def test_waiting_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(files, "LOCK_PATIENCE", 0.1)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        told = []

        def end_holder_once_told(seconds: float) -> None:
            told.append(capfd.readouterr().out)
            if any(told):
                holder.kill()
                holder.wait()

        monkeypatch.setattr(files.time, "sleep", end_holder_once_told)
        with locked(tmp_path, patience=600):
            os.kill(child, signal.SIGKILL)
    assert "".join(told).count(f"{tmp_path}: waiting for process {holder.pid} on host") == 1


def test_free_folder_has_no_lock_file(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a").touch()
    with locked(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK).exists()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["a"]
    with locked(tmp_path / "new" / "run"):
        assert lock_holder(tmp_path / "new" / "run") is not None
    assert not (tmp_path / "new" / "run").exists() and lock_holder(tmp_path / "new" / "run") is None


def test_one_process_takes_a_lock_once(tmp_path: Path) -> None:
    """Looking at the lock does not lose it, which closing a descriptor of the file would."""
    folder = tmp_path / "run"
    (tmp_path / "link").symlink_to(folder)
    with locked(folder):
        assert lock_holder(tmp_path / "link") == f"this process ({os.getpid()})"
        with pytest.raises(UserError, match="in use by this process"):
            FolderLock(tmp_path / "link").acquire(patience=0)
        assert _taken_elsewhere(folder)
    assert not _taken_elsewhere(folder)


def _taken_elsewhere(folder: Path) -> bool:
    """Returns whether `lock_holder` finds a holder in another process."""
    script = "import sys; from multicls.files import lock_holder; print(lock_holder(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    return done.stdout != "None\n"


def test_forked_process_does_not_give_the_folder_free(tmp_path: Path) -> None:
    with locked(tmp_path) as lock:
        child = os.fork()
        if not child:
            lock.release()
            os._exit(0)
        os.waitpid(child, 0)
        assert (tmp_path / LOCK).exists() and _taken_elsewhere(tmp_path)


def test_clear_folder_leaves_the_lock(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "c").touch()
    (tmp_path / "d").symlink_to(tmp_path / "a")
    with locked(tmp_path) as lock:
        lock.clear_folder()
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(UserError, match="a: cannot be written to: "):
        FolderLock(tmp_path / "a").acquire()
    assert lock_holder(tmp_path / "a") is None
