"""One run folder, one run: a second launch is refused and changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from multicls.files import LOCK_PATIENCE, FolderLock, lock_holder, locked
from pretrain.run_folder import REQUEUED_PATIENCE, lock_patience
from tests.pretrain.conftest import Fork, said


def content(folder: Path) -> dict[Path, tuple[int, int]]:
    """Closing the lock's file would lose the lock of this process, so no file is opened."""
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_second_launch_is_refused(fork: Fork, tmp_path: Path) -> None:
    run, flags = tmp_path / "run", ("--steps", "2")
    with locked(run):
        (run / "metrics.jsonl").write_text("")
        before = content(run)
        assert lock_holder(run) is not None
        assert fork(run, {"ranks": 2}, {}, flags=flags) == [[2, 2], [2]]
        for launch in range(2):
            assert f"in use by process {os.getpid()} on host" in said(run, launch)
            assert "Traceback" not in said(run, launch)
        assert content(run) == before
    assert lock_holder(run) is None
    assert fork(run, flags=flags) == [[0]], said(run)
    assert lock_holder(run) is None and not (run / ".lock").exists()


def test_killed_run_leaves_the_folder_free(fork: Fork, tmp_path: Path) -> None:
    """Forked loader workers live on for a moment; they do not keep the lock."""
    run, flags = tmp_path / "run", ("--set", "data.num_workers=2")
    assert fork(run, {"accident": "killed in a step", "step": 5}, {}, flags=flags) == [[-9], [0]], said(run, 1)
    assert "resuming from step 4" in said(run, 1)


def test_requeued_job_waits_for_the_locks_of_a_lost_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    assert lock_patience() == LOCK_PATIENCE
    for count, patience in (("0", LOCK_PATIENCE), ("1", REQUEUED_PATIENCE)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        assert lock_patience() == patience


def test_two_dry_runs_at_once(fork: Fork, tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / ".run.dry_run")
    lock.acquire()
    (tmp_path / ".run.dry_run" / "a").touch()
    assert fork(tmp_path / "run", flags=("--dry_run",)) == [[2]]
    assert "in use by process" in said(tmp_path / "run") and (tmp_path / ".run.dry_run" / "a").exists()
    (tmp_path / ".run.dry_run" / "a").unlink()
    lock.release()
    assert not (tmp_path / ".run.dry_run").exists()
