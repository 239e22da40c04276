"""Runs the stages of data preparation as datatrove tasks: in processes of this machine, as SLURM arrays, or on Ray.

A task that is whole writes a file (in datatrove's `completions/`), so the next start runs only the other tasks. Task
logs are in the work folder, in `logs/STAGE/logs/`. The console shows the same line of progress for all executors.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from copy import deepcopy
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import NamedTuple

from datatrove.executor.base import PipelineExecutor
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from data_prep.settings import ExecutorOptions
from multicls.console import Progress
from multicls.errors import UserError
from multicls.files import REPOSITORY, read_json, write_json
from multicls.words import counted

logger.remove()  # datatrove logs to stderr by default; tasks still log to their files
POLL_SECONDS = 2.0  # between looks at the tasks of SLURM and Ray
_ERROR = re.compile(r"[\w.]*(?:Error|Exception|Interrupt)\b")  # the last line of a traceback
PATIENCE = 10.0  # seconds after the end of SLURM's jobs for their files to appear on a shared disk


class Step(PipelineStep):
    """A step of a task; `work` is the work folder."""

    type = "data_prep"

    def __init__(self, work: str) -> None:
        super().__init__()
        self.work = work


class TasksFailed(UserError):
    """Tasks failed on another machine. The work folder must stay, because the reasons are in its logs."""


class Stage(NamedTuple):
    """Tasks that do not depend on each other."""

    name: str  # in logs and progress
    pipeline: list[PipelineStep]  # steps of each task
    sizes: Sequence[int]  # each task's share of the progress: bytes of input, or 1


Log = Callable[[str], object]  # receives the lines of progress
Reports = Generator[tuple[Stage, list[int]], None, None]  # the stage that runs, and its whole tasks


def run_stages(stages: list[Stage], work: Path, options: ExecutorOptions, log: Log) -> None:
    """Runs the stages one after the other, without the tasks that are whole, and waits for them.

    Raises:
        UserError: A task failed, was killed or cannot be submitted. What is written stays; the next start goes on.
    """
    run = {"local": _run_locally, "slurm": _run_on_slurm, "ray": _run_on_ray}[options.executor]
    shown: Progress | None = None
    try:
        with contextlib.closing(run(stages, work, options, log)) as reports:
            for stage, done in reports:
                size, total = sum(stage.sizes[rank] for rank in done), sum(stage.sizes)
                in_bytes = total > len(stage.sizes)
                if shown is None or shown.what != stage.name:
                    if shown is not None:
                        shown.close()
                    shown = Progress(stage.name, total, done=size, unit="MB" if in_bytes else "tasks", say=log)
                shown.update(size, f"{len(done)} of {counted(len(stage.sizes), 'task')}" if in_bytes else "")
    finally:
        if shown is not None:
            shown.close()


def _logs(work: Path, stage: Stage) -> str:
    return str(work / "logs" / stage.name)


def _whole(executor: PipelineExecutor) -> list[int]:
    """Returns the ranks of the tasks that are whole."""
    left = set(executor.get_incomplete_ranks())
    return [rank for rank in range(executor.world_size) if rank not in left]


def _failed(executor: PipelineExecutor, work: Path, stage: Stage) -> TasksFailed:
    """Returns the error that some tasks are not whole, with the reason of the first one."""
    left = executor.get_incomplete_ranks()
    logs = Path(_logs(work, stage))
    log = logs / "logs" / f"task_{left[0]:05d}.log"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    errors = [line for line in lines if _ERROR.match(line)]
    told = f" Task {left[0]}: {errors[-1].removeprefix('multicls.errors.')}" if errors else ""
    return TasksFailed(
        f"{len(left)} of {counted(len(stage.sizes), 'task')} of the stage {stage.name} failed: see {logs}. What is "
        f"written is safe: give the same command again.{told}"
    )


# This machine


def _run_locally(stages: list[Stage], work: Path, options: ExecutorOptions, log: Log) -> Reports:
    """Runs tasks in a pool of `concurrent.futures`, which notices a killed worker; datatrove's own waits for ever."""
    pool = None
    if options.workers > 1:
        pool = ProcessPoolExecutor(options.workers, get_context("spawn"), initializer=_start_worker)
    try:
        for stage in stages:
            executor = LocalPipelineExecutor(stage.pipeline, tasks=len(stage.sizes), logging_dir=_logs(work, stage))
            left, done = executor.get_incomplete_ranks(), _whole(executor)
            yield stage, done
            waiting = {pool.submit(_run_task, executor, rank): rank for rank in left} if pool else {}
            while waiting:
                finished, _ = wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED)
                for task in finished:
                    task.result()
                    done.append(waiting.pop(task))
                yield stage, done
            for rank in left if pool is None else ():
                _run_task(deepcopy(executor), rank)
                done.append(rank)
                yield stage, done
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

    def launch_merge_stats(self) -> None:
        """Does nothing."""


def _run_on_slurm(stages: list[Stage], work: Path, options: ExecutorOptions, log: Log) -> Reports:
    submitted = work / "slurm.json"
    jobs: dict[str, str] = read_json(submitted) if submitted.exists() else {}
    bin_folder = shlex.quote(str(Path(sys.executable).parent))
    executors: list[SlurmExecutor] = []
    for stage in stages:
        executors.append(
            SlurmExecutor(
                stage.pipeline,
                tasks=len(stage.sizes),
                time=options.time,
                partition=options.partition,
                workers=options.workers,
                job_name=f"data_prep_{stage.name}",
                qos="",
                env_command=f"export PATH={bin_folder}:$PATH PYTHONPATH={shlex.quote(str(REPOSITORY))}",
                sbatch_args=dict(option.lstrip("-").split("=", 1) for option in options.sbatch),
                depends=executors[-1] if executors else None,
                logging_dir=_logs(work, stage),
                tasks_per_job=options.tasks_per_job,
            )
        )
    if not _alive(jobs.values()):
        _cancel(jobs.values())  # they wait for jobs that have failed
        jobs = _submit(stages, executors)
        write_json(submitted, jobs)
    log(f"SLURM jobs: {', '.join(f'{name} {job}' for name, job in jobs.items()) or 'none left'}")
    for stage, executor in zip(stages, executors, strict=True):
        gone = math.inf  # when the job was first seen to have ended
        while len(done := _whole(executor)) < len(stage.sizes):
            yield stage, done
            time.sleep(POLL_SECONDS)
            gone = math.inf if _alive([jobs.get(stage.name, "")]) else min(gone, time.monotonic())
            if time.monotonic() - gone > PATIENCE and executor.get_incomplete_ranks():
                _cancel(jobs.values())
                raise _failed(executor, work, stage)


def _submit(stages: list[Stage], executors: list[SlurmExecutor]) -> dict[str, str]:
    """Submits the stages that are not whole yet and returns their jobs by stage; none is left if SLURM refuses one."""
    problem = ""
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            executors[-1].launch_job()
    except FileNotFoundError:
        problem = "there is no sbatch here; run it on a login node of the cluster."
    except subprocess.CalledProcessError as error:
        problem = f"sbatch refused the job (exit code {error.returncode}); see above."
    ids = {stage.name: executor.job_id for stage, executor in zip(stages, executors, strict=True)}
    jobs = {name: str(job) for name, job in ids.items() if job not in (None, -1)}
    if problem:
        _cancel(jobs.values())
        raise UserError(f"--executor slurm: {problem}")
    return jobs


def check_no_jobs(work: Path) -> None:
    """Raises a `UserError` if a SLURM job of an earlier start still writes the work folder."""
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


def _run_on_ray(stages: list[Stage], work: Path, options: ExecutorOptions, log: Log) -> Reports:
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
            logging_dir=_logs(work, stage),
        )
        runner = threading.Thread(target=_run_quietly, args=(executor,), daemon=True)
        runner.start()
        while runner.is_alive():
            yield stage, _whole(executor)
            runner.join(POLL_SECONDS)
        if executor.get_incomplete_ranks():
            raise _failed(executor, work, stage)


def _run_quietly(executor: PipelineExecutor) -> None:
    with contextlib.suppress(Exception):  # the logs of the tasks have it
        executor.run()
