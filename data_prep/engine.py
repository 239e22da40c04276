"""Runs the stages of data preparation as datatrove tasks: in processes of this machine, as SLURM arrays, or on Ray.

A task leaves a file when it is whole (datatrove's `completions/`), so a next start does only what is left. Task logs
are in the work folder, `logs/STAGE/logs/`; the console shows one line of progress for all executors.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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

from multicls.errors import UserError
from multicls.files import REPOSITORY, read_json, write_json

logger.remove()  # datatrove logs to stderr by default; the logs of tasks stay
EXECUTORS = ("local", "slurm", "ray")
SECONDS_PER_LINE = 5.0
POLL_SECONDS = 2.0  # between looks at the tasks of SLURM and Ray
PATIENCE = 10.0  # seconds for the last files of a shared disk to appear after SLURM's jobs have ended


@dataclass(frozen=True)
class ExecutorOptions:
    """Where the tasks run.

    Attributes:
        kind: One of `EXECUTORS`.
        workers: Most tasks at a time.
        partition: SLURM: partition of the jobs.
        time: SLURM: time limit of a job.
        tasks_per_job: SLURM: tasks that a job of the array does one after the other.
        sbatch: SLURM: further options of sbatch.
    """

    kind: str = "local"
    workers: int = 1
    partition: str = ""
    time: str = "04:00:00"
    tasks_per_job: int = 1
    sbatch: dict[str, str] = field(default_factory=dict)


class Stage(NamedTuple):
    """Tasks that do not depend on each other.

    Attributes:
        name: Name in logs and progress.
        pipeline: Steps of each task.
        sizes: Bytes, or 1, for each task: its share of the progress.
    """

    name: str
    pipeline: list[PipelineStep]
    sizes: Sequence[int]


class Progress:
    """Prints how far the stages are and when they end: a bar on a terminal, else a line every few seconds."""

    def __init__(self, log: Callable[[str], object]) -> None:
        self._log = log
        self._bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[line]}")
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._bar.start()

    def begin(self, stage: Stage, done: Sequence[int]) -> None:
        """Starts a stage of which the tasks `done` are whole already."""
        self._stage = stage
        self._before = self._size(done)
        self._started = self._last = time.monotonic()
        if self._bar:
            self._task = self._bar.add_task(stage.name, total=sum(stage.sizes), completed=self._before, line="")

    def update(self, done: Sequence[int]) -> None:
        """Shows the tasks that are whole by now."""
        size, total = self._size(done), sum(self._stage.sizes)
        now = time.monotonic()
        line = f"{len(done)} of {len(self._stage.sizes)} tasks"
        if total > len(self._stage.sizes):  # sizes are bytes
            speed = (size - self._before) / max(now - self._started, 1e-9)
            line += f", {size / 1e6:,.1f} of {total / 1e6:,.1f} MB, {speed / 1e6:.2f} MB/s"
            if speed and size < total:
                line += f", ETA {duration((total - size) / speed)}"
        if self._bar:
            self._bar.update(self._task, completed=size, line=line)
        elif now - self._last >= SECONDS_PER_LINE:
            self._last = now
            self._log(f"{self._stage.name}: {line}")

    def end(self) -> None:
        """Removes the bar."""
        if self._bar:
            self._bar.stop()

    def _size(self, done: Sequence[int]) -> int:
        return sum(self._stage.sizes[rank] for rank in done)


def duration(seconds: float) -> str:
    """Returns seconds as `3h12`, `4m05s` or `12s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def run_stages(stages: list[Stage], work: Path, options: ExecutorOptions, log: Callable[[str], object]) -> None:
    """Runs the stages one after the other and waits for them; what an earlier start has done is left out.

    Raises:
        UserError: A task failed, was killed or cannot be submitted. What is written stays; the next start goes on.
    """
    progress = Progress(log)
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
    left = set(executor.get_incomplete_ranks(skip_completed=True))
    return [rank for rank in range(executor.world_size) if rank not in left]


# This machine


class LocalExecutor(LocalPipelineExecutor):
    """Runs tasks in a pool of `concurrent.futures`, which notices a killed worker; datatrove's own waits for ever.

    Args:
        pool: the pool; None runs the tasks in this process.
    """

    def __init__(self, stage: Stage, work: Path, pool: ProcessPoolExecutor | None, progress: Progress) -> None:
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


def _run_locally(stages: list[Stage], work: Path, workers: int, progress: Progress) -> None:
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
    """Runs one task. datatrove logs to stderr as well as to the task's log; only the latter is wanted."""
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
    """One array job for a stage. datatrove's extra job, which adds up statistics, is left out: it may stay pending."""

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
    stages: list[Stage], work: Path, options: ExecutorOptions, progress: Progress, log: Callable[[str], object]
) -> None:
    submitted = work / "slurm.json"
    jobs: dict[str, str] = read_json(submitted) if submitted.exists() else {}
    executors: list[SlurmExecutor] = []
    for stage in stages:
        executors.append(SlurmExecutor(stage, work, options, executors[-1] if executors else None))
    if not _alive(jobs.values()):
        with contextlib.redirect_stderr(open(os.devnull, "w")), _named_submit_errors():
            executors[-1].launch_job()
        jobs = {s.name: str(e.job_id) for s, e in zip(stages, executors, strict=True) if e.job_id not in (None, -1)}
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
                left = len(stage.sizes) - len(_whole(executor))
                _cancel(jobs.values())
                raise UserError(
                    f"{left} of {len(stage.sizes)} tasks of the stage {stage.name} failed: see "
                    f"{work / 'logs' / stage.name}. What is written is safe: give the same command again."
                )


@contextlib.contextmanager
def _named_submit_errors() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise UserError("--executor slurm: there is no sbatch here; run it on a login node of the cluster.") from None
    except subprocess.CalledProcessError as error:
        raise UserError(
            f"--executor slurm: sbatch refused the job (exit code {error.returncode}); see above."
        ) from None


def _alive(jobs: Any) -> bool:
    """Returns whether SLURM still has one of the jobs, other than one that waits for what will never come."""
    known = [job for job in jobs if job]
    if not known:
        return False
    command = ["squeue", "--noheader", "--jobs", ",".join(known), "--format", "%T %r"]
    states = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return any(state and "DependencyNeverSatisfied" not in state for state in states)


def _cancel(jobs: Any) -> None:
    subprocess.run(["scancel", *filter(None, jobs)], capture_output=True, check=False)


# Ray


def _run_on_ray(stages: list[Stage], work: Path, options: ExecutorOptions, progress: Progress) -> None:
    try:
        import ray
    except ImportError:
        raise UserError("--executor ray: needs the package ray: pip install ray.") from None
    from datatrove.executor.ray import RayPipelineExecutor

    ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=False, ignore_reinit_error=True)
    for stage in stages:
        executor = RayPipelineExecutor(
            stage.pipeline,
            tasks=len(stage.sizes),
            workers=options.workers,
            logging_dir=str(work / "logs" / stage.name),
        )
        progress.begin(stage, _whole(executor))
        runner = threading.Thread(target=executor.run, daemon=True)
        runner.start()
        while runner.is_alive():
            runner.join(POLL_SECONDS)
            progress.update(_whole(executor))
        if left := len(stage.sizes) - len(_whole(executor)):
            raise UserError(
                f"{left} of {len(stage.sizes)} tasks of the stage {stage.name} failed: see "
                f"{work / 'logs' / stage.name}. What is written is safe: give the same command again."
            )
