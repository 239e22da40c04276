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
from pretrain.engine import Engine
from pretrain.folder import RunFolder
from pretrain.settings import PretrainSettings
from pretrain.trainer import Trainer
from tests.pretrain.conftest import Fork, logs


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    if dist.is_initialized():  # by another file's test in this process, with one rank, too
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class DeepSpeed:
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


def engine_of(deepspeed: Any) -> Engine:
    """Returns an engine around a stub of DeepSpeed's."""
    engine = object.__new__(Engine)
    engine.deepspeed = deepspeed
    return engine


def save(run: RunFolder, step: int, **options: Any) -> None:
    """Saves a checkpoint as a run with these `options` does."""
    values: dict[str, Any] = {"model": {"checkpoint": "m"}, "data": {"corpus": "c"}}
    values |= {"train": {"steps": 90}, "run": options}
    trainer: Any = object.__new__(Trainer)
    trainer.setup = SimpleNamespace(facts={"ranks": 1, "identity": {"train.seed": 1}})
    trainer.settings = PretrainSettings.model_validate(values)
    trainer.folder, trainer.engine, trainer.observers = run, engine_of(DeepSpeed()), []
    trainer.save(step)


def resume_step(run: RunFolder) -> int:
    return run.resume_step({"train.seed": 1})


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder with checkpoints of steps 10, 20 and 30."""
    for step in (10, 20, 30):
        save(RunFolder(tmp_path), step, keep_checkpoints=3)
    return RunFolder(tmp_path)


def test_the_marker_is_synced_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def note(number: int) -> None:
        synced.append(Path(f"/proc/self/fd/{number}").readlink().name)
        assert synced[-1] != "model_states.pt" or not list(tmp_path.glob("checkpoints/*/COMPLETE"))

    monkeypatch.setattr(os, "fsync", note)
    save(RunFolder(tmp_path), 10)
    marker = next(number for number, name in enumerate(synced) if "COMPLETE" in name)
    assert "model_states.pt" in synced[:marker]


def test_adams_steps_of_other_ranks_move_to_the_device_of_their_parameters(tmp_path: Path) -> None:
    """DeepSpeed reads a universal checkpoint to the CPU; a device that has no numbers stands in for the GPU."""
    deepspeed: Any = DeepSpeed()
    deepspeed.load_checkpoint = lambda folder, tag: (tag, None)
    deepspeed.load_universal_checkpoint = lambda: True
    parameters, step = (
        [torch.nn.Parameter(torch.empty(2, device="meta")) for _ in "ab"],
        torch.ones(()),
    )
    states = {parameter: {"step": step} for parameter in parameters}  # one counter for both
    deepspeed.optimizer.optimizer = SimpleNamespace(state=states)
    engine_of(deepspeed).load(tmp_path, "universal")
    first, second = (moments["step"] for moments in states.values())
    assert first.device == second.device == torch.device("meta") and first is not second


def test_only_a_full_disk_is_the_users_mistake(tmp_path: Path) -> None:
    """An error of a shared disk may pass, so it does not end with code 2, which nobody starts again."""
    for number, error in ((errno.ENOSPC, UserError), (errno.EIO, OSError), (errno.EROFS, OSError)):
        with pytest.raises(error), RunFolder(tmp_path).disk_errors_reported():
            raise OSError(number, os.strerror(number))
    with pytest.raises(OSError, match="is a directory"):
        Shard(tmp_path)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


@pytest.mark.parametrize("name", ["model_states.pt", "meta.json"])
@pytest.mark.parametrize("harm", [truncate, Path.unlink])
def test_damage_is_named(run: RunFolder, name: str, harm: Callable[[Path], None]) -> None:
    harm(run.checkpoint(30) / name)
    with pytest.raises(UserError, match=f"step_00000030.*{name}"):
        resume_step(run)
    shutil.rmtree(run.checkpoint(30))
    assert resume_step(run) == 20


def test_a_checkpoint_of_another_version_is_refused(run: RunFolder) -> None:
    meta = run.checkpoint(30) / "meta.json"
    write_json(meta, read_json(meta) | {"format": None})
    with pytest.raises(UserError, match="step_00000030: another version"):
        resume_step(run)


def test_newest_and_milestones_are_kept(run: RunFolder) -> None:
    run.checkpoint(25).mkdir()  # a killed process's
    for step in (40, 50, 60, 70, 80):
        save(run, step, milestone_every=20)
    assert run.saved_steps == [20, 40, 60, 70, 80] and not run.checkpoint(25).exists()


class Malicious:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("touched"),)


def test_only_known_classes_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"loss_scaler": DynamicLossScaler(65536, 1000, 1, 1, False)}, "good.pt")
    engine_of(DeepSpeed()).load(tmp_path, "good.pt")
    torch.save({"loss_scaler": Malicious()}, "bad.pt")
    with pytest.raises(UserError, match=r"bad\.pt"):
        engine_of(DeepSpeed()).load(tmp_path, "bad.pt")
    assert not Path("touched").exists()
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    torch.load("bad.pt", weights_only=False)
    assert Path("touched").exists()  # control


def test_status(run: RunFolder) -> None:
    assert (run.status(), run.end) == ("unfinished, checkpoint at step 30", 0)
    assert "not begun" in RunFolder(run.checkpoints).status()
    with locked(run.path):
        assert f"process {os.getpid()}" in run.status() and run.end == 0
    shutil.rmtree(run.checkpoints)
    run.settings.touch()
    assert run.status() == "unfinished, no checkpoint yet"
    run.done.write_text('{"step": 40}')
    assert (run.status(), run.end) == ("finished at step 40", 40)


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


def test_half_deleted_ones_are_not_whole(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it deletes the first of steps 10 and 20."""

    def killed(path: Path, **_: Any) -> None:
        (path / "model_states.pt").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(run, 40)
    whole = {path.parent for path in run.checkpoints.glob("*/model_states.pt")}
    marked = {path.parent for path in run.checkpoints.glob("*/COMPLETE")}
    assert marked == whole and len(whole) == 3
