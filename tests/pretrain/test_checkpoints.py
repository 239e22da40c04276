"""Checkpoints on one rank without an engine: what is whole, what is refused, what is kept; status and lock."""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from multicls.corpus import Shard
from multicls.errors import UserError
from multicls.files import lock_holder, locked, read_json, write_json
from pretrain.checkpoints import Checkpoints, load_engine
from pretrain.run_folder import disk_errors_reported, saved_steps, status
from pretrain.settings import RunSettings, TrainSettings
from tests.pretrain.conftest import Fork, logs


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    if dist.is_initialized():  # by another file's test in this process, with one rank, too
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Engine:
    """Saves and loads like DeepSpeed, saving through its checkpoint engine, one file a rank."""

    def __init__(self) -> None:
        self.checkpoint_engine, self.optimizer = SimpleNamespace(), SimpleNamespace(param_groups=[])

    def save_checkpoint(self, folder: str, tag: str, **options: Any) -> None:
        path = str(Path(folder) / tag / "model_states.pt")
        self.checkpoint_engine.save(state_dict={"weights": list(range(1000))}, path=path)

    def load_checkpoint(self, folder: str, tag: str) -> tuple[str, None]:
        torch.load(Path(folder) / tag, weights_only=False)
        return tag, None

    def load_universal_checkpoint(self) -> bool:
        return False


def checkpoints(folder: Path, keep: int = 2, **options: Any) -> Checkpoints:
    run = RunSettings(keep_checkpoints=keep, **options)
    return Checkpoints(folder, {"train.seed": 1}, TrainSettings(steps=90), run)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 10, 20 and 30."""
    for step in (10, 20, 30):
        checkpoints(tmp_path / "checkpoints", keep=3).save(Engine(), step)
    return tmp_path / "checkpoints"


def test_the_marker_is_synced_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def note(number: int) -> None:
        synced.append(Path(f"/proc/self/fd/{number}").readlink().name)
        assert synced[-1] != "model_states.pt" or not list(tmp_path.glob("*/COMPLETE"))

    monkeypatch.setattr(os, "fsync", note)
    checkpoints(tmp_path).save(Engine(), 10)
    marker = next(number for number, name in enumerate(synced) if "COMPLETE" in name)
    assert "model_states.pt" in synced[:marker]


def test_adams_steps_of_other_ranks_move_to_the_device_of_their_parameters(tmp_path: Path) -> None:
    """DeepSpeed reads a universal checkpoint to the CPU; a device that has no numbers stands in for the GPU."""
    engine: Any = Engine()
    engine.load_checkpoint = lambda folder, tag: (tag, None)
    engine.load_universal_checkpoint = lambda: True
    parameters, step = (
        [torch.nn.Parameter(torch.empty(2, device="meta")) for _ in "ab"],
        torch.ones(()),
    )
    states = {parameter: {"step": step} for parameter in parameters}  # one counter for both
    engine.optimizer.optimizer = SimpleNamespace(state=states)
    load_engine(engine, tmp_path, "universal")
    first, second = (moments["step"] for moments in states.values())
    assert first.device == second.device == torch.device("meta") and first is not second


def test_only_a_full_disk_is_the_users_mistake(tmp_path: Path) -> None:
    """An error of a shared disk may pass, so it does not end with code 2, which nobody starts again."""
    for number, error in ((errno.ENOSPC, UserError), (errno.EIO, OSError), (errno.EROFS, OSError)):
        with pytest.raises(error), disk_errors_reported(tmp_path):
            raise OSError(number, os.strerror(number))
    with pytest.raises(OSError, match="is a directory"):
        Shard(tmp_path)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


@pytest.mark.parametrize("name", ["model_states.pt", "meta.json"])
@pytest.mark.parametrize("harm", [truncate, Path.unlink])
def test_damage_is_named(folder: Path, name: str, harm: Callable[[Path], None]) -> None:
    harm(folder / "step_00000030" / name)
    with pytest.raises(UserError, match=f"step_00000030.*{name}"):
        checkpoints(folder).resume_step()
    shutil.rmtree(folder / "step_00000030")
    assert checkpoints(folder).resume_step() == 20


def test_a_checkpoint_of_another_version_is_refused(folder: Path) -> None:
    meta = folder / "step_00000030" / "meta.json"
    write_json(meta, read_json(meta) | {"format": None})
    with pytest.raises(UserError, match="step_00000030: another version"):
        checkpoints(folder).resume_step()


def test_newest_and_milestones_are_kept(folder: Path) -> None:
    (folder / "step_00000025").mkdir()  # a killed process's
    for step in (40, 50, 60, 70, 80):
        checkpoints(folder, milestone_every=20).save(Engine(), step)
    assert saved_steps(folder) == [20, 40, 60, 70, 80] and not (folder / "step_00000025").exists()


def of_length(folder: Path, **length: Any) -> Checkpoints:
    train = TrainSettings(schedule="wsd", warmup_ratio=0, **length)
    names = ("steps", "warmup_ratio", "decay_ratio")
    numbers = {f"train.{name}": getattr(train, name) for name in names}
    return Checkpoints(folder, numbers, train, RunSettings(keep_checkpoints=1))


def test_the_last_checkpoint_before_a_decay_is_kept_for_longer_runs(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (3, 5, 8, 9, 10):
        of_length(folder, steps=10).save(Engine(), step)
    assert saved_steps(folder) == [8, 10] and of_length(folder, steps=10).resume_step() == 10
    longer = of_length(folder, steps=20)
    assert longer.resume_step() == 8
    assert of_length(folder, steps=10, decay_ratio=0.1).resume_step() == 8
    write_json(tmp_path / "best.json", {"step": 9})
    assert "of steps 10, are removed" in longer.discard_after(8)
    assert saved_steps(folder) == [8] and not (tmp_path / "best.json").exists()
    assert not longer.discard_after(8)
    with pytest.raises(
        UserError,
        match="run of 10 steps had 0 of warm-up and a decay from step 8; this one of 8 has 0 and 6",
    ):
        of_length(folder, steps=8).resume_step()


class Malicious:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("touched"),)


def test_only_known_classes_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"loss_scaler": DynamicLossScaler(65536, 1000, 1, 1, False)}, "good.pt")
    load_engine(Engine(), tmp_path, "good.pt")
    torch.save({"loss_scaler": Malicious()}, "bad.pt")
    with pytest.raises(UserError, match=r"bad\.pt"):
        load_engine(Engine(), tmp_path, "bad.pt")
    assert not Path("touched").exists()
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    torch.load("bad.pt", weights_only=False)
    assert Path("touched").exists()  # control


def test_status(folder: Path) -> None:
    run = folder.parent
    assert status(run) == ("unfinished, checkpoint at step 30", False)
    assert "not begun" in status(folder)[0]
    with locked(run):
        text, finished = status(run)
        assert f"process {os.getpid()}" in text and not finished
    shutil.rmtree(folder)
    (run / "settings.yaml").touch()
    assert status(run) == ("unfinished, no checkpoint yet", False)
    (run / "DONE").write_text('{"step": 40}')
    assert status(run) == ("finished at step 40", True)


@pytest.mark.launcher
def test_second_launches_are_refused_and_kills_leave_no_lock(fork: Fork, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with locked(run):
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        assert fork(run, {"ranks": 2}) == [[2, 2]]
        holder = rf"in use by process {os.getpid()} on host \S+ since \d{{4}}-"
        assert re.search(holder, logs(run))
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    launches = [{"accident": "killed in a step", "step": 5}, {}]
    assert fork(run, *launches, flags=("--data.num_workers", "2")) == [[-9], [0]], logs(run, 1)
    assert "resuming from step 4" in logs(run, 1)
    assert lock_holder(run) is None and not (run / ".lock").exists()


def test_half_deleted_ones_are_not_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it deletes the first of steps 10 and 20."""

    def killed(path: Path, **_: Any) -> None:
        (path / "model_states.pt").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints(folder).save(Engine(), 40)
    whole = {path.parent for path in folder.glob("*/model_states.pt")}
    assert {path.parent for path in folder.glob("*/COMPLETE")} == whole and len(whole) == 3
