"""Runs the stages of data preparation as datatrove tasks: in processes of this machine, as SLURM arrays, or on Ray.

A task that is whole writes a file (in datatrove's `completions/`), so the next start runs only the other tasks. Task
logs are in the work folder, in `logs/STAGE/logs/`. The console shows the same line of progress for all executors.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from copy import deepcopy
from dataclasses import dataclass, field
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

from datatrove.executor.base import PipelineExecutor
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from multicls.console import Progress
from multicls.errors import UserError
from multicls.files import REPOSITORY, read_json, write_json

logger.remove()  # datatrove logs to stderr by default; tasks still log to their files
POLL_SECONDS = 2.0  # between looks at the tasks of SLURM and Ray
_ERROR = re.compile(r"[\w.]*(?:Error|Exception|Interrupt)\b")  # the last line of a traceback
PATIENCE = 10.0  # seconds after the end of SLURM's jobs for their files to appear on a shared disk


@dataclass(frozen=True)
class ExecutorOptions:
    """Options that say where the tasks run.

    Attributes:
        kind: "local", "slurm" or "ray".
        workers: Largest number of tasks at a time.
        partition: SLURM: partition of the jobs.
        time: SLURM: time limit of a job.
        tasks_per_job: SLURM: number of tasks that each job of an array runs, one after the other.
        sbatch: SLURM: further options of sbatch.
    """

    kind: str = "local"
    workers: int = 1
    partition: str = ""
    time: str = "04:00:00"
    tasks_per_job: int = 1
    sbatch: dict[str, str] = field(default_factory=dict)


class TasksFailed(UserError):
    """Tasks failed on another machine. The work folder must stay, because the reasons are in its logs."""


class Stage(NamedTuple):
    """Tasks that do not depend on each other.

    Attributes:
        name: Its name in logs and progress.
        pipeline: Steps of each task.
        sizes: Each task's share of the progress: bytes of input, or 1.
    """

    name: str
    pipeline: list[PipelineStep]
    sizes: Sequence[int]


class StageProgress:
    """Shows progress and remaining time of the stages: as a bar on a terminal, else as a line every few seconds."""

    def __init__(self, log: Callable[[str], object]) -> None:
        self._log = log
        self._shown: Progress | None = None

    def begin(self, stage: Stage, done: Sequence[int]) -> None:
        """Starts a stage; the tasks `done` of an earlier start are whole."""
        self.end()
        total = sum(stage.sizes)
        unit = "MB" if total > len(stage.sizes) else "tasks"  # sizes are bytes, or 1
        self._stage = stage
        self._shown = Progress(stage.name, total, done=self._size(done), unit=unit, say=self._log)

    def update(self, done: Sequence[int]) -> None:
        """Shows the progress after the tasks `done`."""
        assert self._shown is not None
        tasks = f"{len(done)} of {len(self._stage.sizes)} tasks" if self._shown.unit == "MB" else ""
        self._shown.update(self._size(done), tasks)

    def end(self) -> None:
        """Removes the bar."""
        if self._shown is not None:
            self._shown.close()

    def _size(self, done: Sequence[int]) -> int:
        return sum(self._stage.sizes[rank] for rank in done)


def run_stages(stages: list[Stage], work: Path, options: ExecutorOptions, log: Callable[[str], object]) -> None:
    """Runs the stages one after the other, without the tasks that are whole, and waits for them.

    Raises:
        UserError: A task failed, was killed or cannot be submitted. What is written stays; the next start goes on.
    """
    progress = StageProgress(log)
    try:
        if options.kind == "local":
            _run_locally(stages, work, options.workers, progress)
        elif options.kind == "slurm":
            _run_on_slurm(stages, work, options, progress, log)
        else:
            _run_on_ray(stages, work, options, progress)
    finally:
        progress.end()


def _whole(executor: PipelineExecutor) -> list[int]:
    """Returns the ranks of the tasks that are whole."""
    left = set(executor.get_incomplete_ranks())
    return [rank for rank in range(executor.world_size) if rank not in left]


def _check_all_whole(executor: PipelineExecutor, stage: Stage, work: Path) -> None:
    """Checks that every task of a stage is whole.

    Raises:
        TasksFailed: Some are not; the message has the error of the first one.
    """
    if not (left := executor.get_incomplete_ranks()):
        return
    logs = work / "logs" / stage.name
    log = logs / "logs" / f"task_{left[0]:05d}.log"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    errors = [line for line in lines if _ERROR.match(line)]
    told = f" Task {left[0]}: {errors[-1].removeprefix('multicls.errors.')}" if errors else ""
    raise TasksFailed(
        f"{len(left)} of {len(stage.sizes)} tasks of the stage {stage.name} failed: see {logs}. What is written is "
        f"safe: give the same command again.{told}"
    )


# This machine


class LocalExecutor(LocalPipelineExecutor):
    """Runs tasks in a pool of `concurrent.futures`, which notices a killed worker; datatrove's own waits for ever.

    Args:
        pool: The pool; None runs the tasks in this process.
    """

    def __init__(self, stage: Stage, work: Path, pool: ProcessPoolExecutor | None, progress: StageProgress) -> None:
        super().__init__(stage.pipeline, tasks=len(stage.sizes), logging_dir=str(work / "logs" / stage.name))
        self.stage, self.pool, self.progress = stage, pool, progress

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"pool": None, "progress": None}

    def run(self) -> None:
        """Runs the tasks that are not whole yet."""
        left, done = self.get_incomplete_ranks(), _whole(self)
        self.progress.begin(self.stage, done)
        if self.pool is None:
            for rank in left:
                _run_task(deepcopy(self), rank)
                done.append(rank)
                self.progress.update(done)
            return
        waiting = {self.pool.submit(_run_task, self, rank): rank for rank in left}
        while waiting:
            finished, _ = wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED)
            for task in finished:
                task.result()
                done.append(waiting.pop(task))
            self.progress.update(done)


def _run_locally(stages: list[Stage], work: Path, workers: int, progress: StageProgress) -> None:
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker) if workers > 1 else None
    try:
        for stage in stages:
            LocalExecutor(stage, work, pool, progress).run()
    except BrokenProcessPool:
        raise UserError(
            "a worker process of data preparation was killed, perhaps because memory ran out; what is written is safe: "
            "give the same command again, with fewer --workers if need be."
        ) from None
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)


def _run_task(executor: PipelineExecutor, rank: int) -> None:
    """Runs one task. datatrove logs to the task's file and to stderr; the latter is suppressed."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        executor._run_for_rank(rank, local_rank=1)
    logger.remove()


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, and ends the pool
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    """Ends this process when its parent is gone, killed perhaps; otherwise it would wait for work for ever."""
    connection.wait([sentinel])
    os._exit(1)


# SLURM


class SlurmExecutor(SlurmPipelineExecutor):
    """Submits a stage as one array job, without datatrove's extra job for statistics, which may stay pending."""

    def __init__(self, stage: Stage, work: Path, options: ExecutorOptions, depends: SlurmExecutor | None) -> None:
        bin_folder = shlex.quote(str(Path(sys.executable).parent))
        super().__init__(
            stage.pipeline,
            tasks=len(stage.sizes),
            time=options.time,
            partition=options.partition,
            workers=options.workers,
            job_name=f"data_prep_{stage.name}",
            qos="",
            env_command=f"export PATH={bin_folder}:$PATH PYTHONPATH={shlex.quote(str(REPOSITORY))}",
            sbatch_args=dict(options.sbatch),
            depends=depends,
            logging_dir=str(work / "logs" / stage.name),
            tasks_per_job=options.tasks_per_job,
        )

    def launch_merge_stats(self) -> None:
        """Does nothing."""


def _run_on_slurm(
    stages: list[Stage], work: Path, options: ExecutorOptions, progress: StageProgress, log: Callable[[str], object]
) -> None:
    submitted = work / "slurm.json"
    jobs: dict[str, str] = read_json(submitted) if submitted.exists() else {}
    executors: list[SlurmExecutor] = []
    for stage in stages:
        executors.append(SlurmExecutor(stage, work, options, executors[-1] if executors else None))
    if not _alive(jobs.values()):
        _cancel(jobs.values())  # they wait for jobs that have failed
        jobs = _submit(stages, executors)
        write_json(submitted, jobs)
    log(f"SLURM jobs: {', '.join(f'{name} {job}' for name, job in jobs.items()) or 'none left'}")
    for stage, executor in zip(stages, executors, strict=True):
        progress.begin(stage, _whole(executor))
        ended = 0.0
        while len(done := _whole(executor)) < len(stage.sizes):
            progress.update(done)
            time.sleep(POLL_SECONDS)
            if _alive([jobs.get(stage.name, "")]):
                ended = 0.0
            elif not ended:
                ended = time.monotonic()
            elif time.monotonic() - ended > PATIENCE:
                try:
                    _check_all_whole(executor, stage, work)
                except TasksFailed:
                    _cancel(jobs.values())
                    raise


def _submit(stages: list[Stage], executors: list[SlurmExecutor]) -> dict[str, str]:
    """Submits the stages that are not whole yet; returns their jobs by stage.

    Raises:
        UserError: There is no SLURM, or it refuses a job. Then no job is left.
    """

    def submitted() -> dict[str, str]:
        return {s.name: str(e.job_id) for s, e in zip(stages, executors, strict=True) if e.job_id not in (None, -1)}

    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            executors[-1].launch_job()
    except FileNotFoundError:
        raise UserError("--executor slurm: there is no sbatch here; run it on a login node of the cluster.") from None
    except subprocess.CalledProcessError as error:
        _cancel(submitted().values())
        raise UserError(
            f"--executor slurm: sbatch refused the job (exit code {error.returncode}); see above."
        ) from None
    return submitted()


def check_no_jobs(work: Path) -> None:
    """Checks that no SLURM job of an earlier start still writes the work folder.

    Raises:
        UserError: One does.
    """
    jobs = read_json(work / "slurm.json").values() if (work / "slurm.json").exists() else ()
    if _alive(jobs):
        raise UserError(
            f"{work.parent}: SLURM jobs of an earlier start are not finished. Wait for them with the command of that "
            f"start, or end them: scancel {' '.join(jobs)}"
        )


def _alive(jobs: Iterable[str]) -> bool:
    """Returns True if SLURM still has one of the jobs that may run, or does not answer."""
    known = [job for job in jobs if job]
    if not known or not shutil.which("squeue"):
        return False
    command = ["squeue", "--noheader", "--jobs", ",".join(known), "--format", "%T %r"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        return "Invalid job id" not in answer.stderr  # which it says of jobs that ended some time ago
    return any(state and "DependencyNeverSatisfied" not in state for state in answer.stdout.splitlines())


def _cancel(jobs: Iterable[str]) -> None:
    if known := [job for job in jobs if job]:
        subprocess.run(["scancel", *known], capture_output=True, check=False)


# Ray


def _run_on_ray(stages: list[Stage], work: Path, options: ExecutorOptions, progress: StageProgress) -> None:
    try:
        import ray
    except ImportError:
        raise UserError("--executor ray: needs the package ray: pip install ray.") from None
    from datatrove.executor.ray import RayPipelineExecutor

    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))  # the same on all nodes
    environment = {"env_vars": {"PYTHONPATH": path}}
    ray.init(os.environ.get("RAY_ADDRESS"), log_to_driver=False, ignore_reinit_error=True, runtime_env=environment)
    for stage in stages:
        executor = RayPipelineExecutor(
            stage.pipeline,
            tasks=len(stage.sizes),
            workers=options.workers,
            logging_dir=str(work / "logs" / stage.name),
        )
        progress.begin(stage, _whole(executor))
        runner = threading.Thread(target=_run_quietly, args=(executor,), daemon=True)
        runner.start()
        while runner.is_alive():
            runner.join(POLL_SECONDS)
            progress.update(_whole(executor))
        _check_all_whole(executor, stage, work)


def _run_quietly(executor: PipelineExecutor) -> None:
    with contextlib.suppress(Exception):  # the logs of the tasks have it
        executor.run()
