"""Checkpoints on one rank without an engine: what is whole, what is refused, what is kept."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from multicls.errors import UserError
from multicls.files import FolderLock
from pretrain.checkpoints import Checkpoints, load_engine
from pretrain.run_folder import complete_steps, find_damage, status

IDENTITY = {"train.seed": 1}


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Engine:
    """Writes like DeepSpeed: through its checkpoint engine, one file a rank."""

    module = torch.nn.Linear(100, 10)
    optimizer: Any = None

    class Writer:
        pass

    def __init__(self) -> None:
        self.checkpoint_engine: Any = self.Writer()

    def save_checkpoint(self, folder: str, tag: str, **options: Any) -> None:
        path = str(Path(folder) / tag / "model_states.pt")
        self.checkpoint_engine.save(state_dict={"weights": list(range(1000))}, path=path)


def checkpoints(folder: Path, identity: dict[str, Any] | None = None, **options: Any) -> Checkpoints:
    return Checkpoints(folder, **{"keep": 2, "identity": identity or IDENTITY, "world_size": 1} | options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 10, 20 and 30."""
    for step in (10, 20, 30):
        assert checkpoints(tmp_path / "checkpoints", keep=3).save(Engine(), step, {"window": [0.1]})
    return tmp_path / "checkpoints"


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def test_newest_of_the_same_run_is_resumed(folder: Path, tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "nothing").newest() == 0
    assert checkpoints(folder).newest() == 30 and find_damage(folder / "step_00000030") == ""
    (folder / "step_00000030" / "COMPLETE").unlink()  # killed while it was saved
    assert checkpoints(folder).newest() == 20
    for other in (checkpoints(folder, {"train.seed": 2}).newest, checkpoints(folder, {"train.seed": 2}).check_identity):
        with pytest.raises(UserError, match=r"train\.seed was 1 and is now 2"):
            other()
    with pytest.raises(UserError, match=r"zero_optimization\.stage was 0 and is now 2"):
        checkpoints(folder, zero_stage=2).newest()
    checkpoints(folder, zero_stage=1).save(Engine(), 40)
    assert checkpoints(folder, zero_stage=2).newest() == 40


@pytest.mark.parametrize("name", ["model_states.pt", "model.safetensors", "meta.json", "COMPLETE"])
@pytest.mark.parametrize("harm", [flip_a_bit, truncate, Path.unlink])
def test_damage_is_found_and_named(folder: Path, name: str, harm: Callable[[Path], None]) -> None:
    if name == "COMPLETE" and harm is not flip_a_bit:
        pytest.skip("without its marker a checkpoint is not there; its last byte is a line end")
    harm(folder / "step_00000030" / name)
    found = checkpoints(folder)
    assert found.newest() == 20 and found.newest_step() == 20
    (note,) = found.new_notes()
    assert "step_00000030 is damaged" in note and (name in note or name == "COMPLETE")
    assert found.new_notes() == []


def test_nothing_whole_is_no_reason_to_start_again(folder: Path) -> None:
    for step in (10, 20, 30):
        truncate(folder / f"step_{step:08d}" / "model_states.pt")
    with pytest.raises(UserError, match="no whole checkpoint is left") as error:
        checkpoints(folder).newest()
    assert len(error.value.problems) == 4 and complete_steps(folder) == [10, 20, 30]


def test_newest_and_milestones_are_kept(folder: Path) -> None:
    kept = checkpoints(folder, milestone_every=20)
    (folder / "step_00000025").mkdir()  # a killed process's
    for step in (40, 50, 60, 70, 80):
        kept.save(Engine(), step)
    assert complete_steps(folder) == [20, 40, 60, 70, 80]
    assert not (folder / "step_00000025").exists()


def test_damaged_ones_do_not_take_the_place_of_whole_ones(folder: Path) -> None:
    truncate(folder / "step_00000030" / "model_states.pt")
    resumed = checkpoints(folder)
    assert resumed.newest() == 20
    resumed.save(Engine(), 25)
    assert complete_steps(folder) == [20, 25]


def test_full_disk_keeps_what_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = checkpoints(folder)

    def full(state: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("torch.save", full)
        assert not saving.save(Engine(), 40)
    assert "checkpoint of step 40 could not be written: [Errno 28] No space left" in saving.warning
    assert "newest one is of step 30" in saving.warning and saving.new_notes() == [saving.warning]
    assert complete_steps(folder) == [10, 20, 30] and not (folder / "step_00000040").exists()
    assert saving.save(Engine(), 50) and saving.warning == ""


def test_two_checkpoints_must_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", ("total", "used", "free"))
    free = 3 * 20 * 1_000_000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free, 0, free))
    checkpoints(folder).check_space(1_000_000)
    checkpoints(folder / "not" / "there", keep=2).check_space(1_000_000)
    with pytest.raises(
        UserError, match=r"3 checkpoints .* of about 0.04 GB \(2.0 M parameters x 20 bytes\) do not fit"
    ):
        checkpoints(folder).check_space(2_000_000)


def test_milestones_are_no_room_for_new_checkpoints(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", ("total", "used", "free"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 0))
    there = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    parameters = there // (3 * 20)  # so that the three checkpoints of two kept ones and a new one just fit
    checkpoints(folder).check_space(parameters)
    with pytest.raises(UserError, match="do not fit"):
        checkpoints(folder, milestone_every=20).check_space(parameters)


class Malicious:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("touched"),)


def test_deepspeed_unpickles_only_its_own_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")

    class Loading(Engine):
        optimizer = SimpleNamespace(param_groups=[])

        def load_checkpoint(self, folder: str, tag: str) -> tuple[str, None]:
            torch.load(Path(folder) / tag, weights_only=False)
            return tag, None

        def load_universal_checkpoint(self) -> bool:
            return False

    torch.save({"loss_scaler": DynamicLossScaler(65536, 1000, 1, 1, False)}, "good.pt")
    load_engine(Loading(), tmp_path, "good.pt")
    torch.save({"loss_scaler": Malicious()}, "bad.pt")
    with pytest.raises(UserError, match="bad.pt: holds other objects than DeepSpeed writes"):
        load_engine(Loading(), tmp_path, "bad.pt")
    assert not Path("touched").exists() and os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "0"
    torch.load("bad.pt", weights_only=False)
    assert Path("touched").exists()  # it would have worked


def test_status(folder: Path) -> None:
    assert status(folder.parent) == ("unfinished, checkpoint at step 30", False)
    assert status(folder) == (f"not begun: {folder} holds no run", False)
    lock = FolderLock(folder.parent)
    lock.acquire()
    assert status(folder.parent) == (f"running (this process ({os.getpid()})), checkpoint at step 30", False)
    lock.release()
    shutil.rmtree(folder)
    (folder.parent / "settings.yaml").touch()
    assert status(folder.parent) == ("unfinished, no checkpoint yet", False)
    (folder.parent / "DONE").write_text('{"step": 40}')
    assert status(folder.parent) == ("finished at step 40", True)
