"""The executors: what fails is told, what is whole is not done again, and progress in lines."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datatrove.pipeline.base import PipelineStep

from data_prep import engine
from data_prep.engine import Stage, run_stages
from data_prep.settings import ExecutorOptions
from multicls.console import Progress
from multicls.errors import UserError


class Mark(PipelineStep):
    """Notes in a file that a task ran; the task `bad` fails."""

    type, name = "test", "mark"

    def __init__(self, folder: str, bad: int = -1) -> None:
        super().__init__()
        self.folder, self.bad = folder, bad

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[None]:
        if rank == self.bad:
            raise UserError(f"task {rank} of {world_size} is bad.")
        with open(Path(self.folder) / str(rank), "a") as file:
            file.write("x")
        yield from ()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failed_task_is_told_and_the_others_are_not_done_again(workers: int, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    options = ExecutorOptions(workers=workers)
    with pytest.raises(UserError, match="task 3 of 4 is bad"):
        run_stages([Stage("one", [Mark(str(marks), bad=3)], [1] * 4)], tmp_path / "work", options, print)
    lines: list[str] = []
    run_stages([Stage("one", [Mark(str(marks))], [1] * 4)], tmp_path / "work", options, lines.append)
    assert {path.name: path.read_text() for path in marks.iterdir()} == dict.fromkeys("0123", "x")
    assert "task 3 of 4 is bad" not in (tmp_path / "work" / "logs" / "one" / "logs" / "task_00003.log").read_text()


def test_stages_run_one_after_the_other(tmp_path: Path) -> None:
    order: list[str] = []

    class Noting(Progress):
        def __init__(self, what: str, total: float, **more: Any) -> None:
            order.append(f"{what} {more['done']}")
            super().__init__(what, total, **more)

    stages = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        stages.append(Stage(name, [Mark(str(tmp_path / name))], [1] * 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "Progress", Noting)
        for _ in range(2):
            run_stages(stages, tmp_path / "work", ExecutorOptions(workers=1), print)
    assert order == ["one 0", "two 0", "one 3", "two 3"]


def test_progress_in_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("multicls.console.time.monotonic", lambda: clock[0])
    build, shards = Stage("build", [], [1_000_000] * 10), Stage("shards", [], [1] * 4)

    def reports(*_: Any) -> engine.Reports:
        for clock[0], stage, done in (
            (0.0, build, 2),
            (10.0, build, 4),
            (11.0, build, 5),
            (20.0, build, 10),
            (20.0, shards, 0),
            (40.0, shards, 1),
        ):
            yield stage, list(range(done))

    monkeypatch.setattr(engine, "_run_locally", reports)
    lines: list[str] = []
    run_stages([build, shards], Path(), ExecutorOptions(workers=1), lines.append)
    assert lines == [
        "build: 4 of 10 tasks, 4.0 of 10.0 MB, 0.2 MB/s, eta 30s",
        "build: 10 of 10 tasks, 10.0 of 10.0 MB, 0.4 MB/s",
        "shards: 1 of 4 tasks, eta 1m00s",
    ]


def test_slurm_and_ray_that_are_not_there_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "marks").mkdir()
    stages = [Stage("one", [Mark(str(tmp_path / "marks"))], [1])]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no sbatch here"):
        run_stages(stages, tmp_path / "work", ExecutorOptions(executor="slurm", partition="cpu"), print)
    if importlib.util.find_spec("ray") is None:
        with pytest.raises(UserError, match="pip install ray"):
            run_stages(stages, tmp_path / "work", ExecutorOptions(executor="ray"), print)


@pytest.mark.slow
def test_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    )
    (tmp_path / "marks").mkdir()
    stages = [Stage("one", [Mark(str(tmp_path / "marks"))], [1] * 4)]
    run_stages(stages, tmp_path / "work", ExecutorOptions(executor="ray", workers=2), print)
    assert sorted(path.name for path in (tmp_path / "marks").iterdir()) == ["0", "1", "2", "3"]
