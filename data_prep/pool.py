"""Runs functions in this process, on a local Dask cluster, or on any Dask cluster that runs already."""

import hashlib
import logging
import multiprocessing
import os
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from contextlib import contextmanager
from itertools import islice
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from multicls.errors import UserError, first_line, print_stderr
from multicls.files import REPOSITORY

DEATHS = 3  # of workers, after which a call has failed
RETRIES = 2  # of a call that raises an error: a network file system may fail once
SUBMITTED = 256  # calls that the scheduler holds at a time, or two for each worker if that is more
# Modules that the workers need: Dask forks them from one process that has imported these.
PRELOADED = ["__main__", "data_prep.build", "data_prep.merge", "distributed"]
DASK = {
    "distributed.worker.multiprocessing-method": "forkserver",
    "distributed.scheduler.allowed-failures": DEATHS - 1,
    "distributed.admin.low-level-log-length": 10,  # of messages, which hold the calls
    "distributed.admin.tick.interval": "1s",  # not 50 times a second
    "distributed.worker.profile.enabled": False,  # nor samples of what a worker does
}
LOCAL = {
    "threads_per_worker": 1,
    "memory_limit": 0,
    "dashboard_address": "127.0.0.1:0",
    "silence_logs": logging.CRITICAL,
}
CODE = ("data_prep", "multicls")  # packages that workers of a cluster get from the command
LOGGERS = ("distributed", "distributed.client", "tornado.application", "asyncio")


Pool = Executor | None  # None: this process does all


def count_cores() -> int:
    """Returns the number of cores of this process; of a container, its quota."""
    from dask.system import CPU_COUNT

    return int(CPU_COUNT)


@contextmanager
def open_pool(workers: int, scheduler: str | None) -> Iterator[Pool]:
    """Opens an executor of Dask: processes of this machine, or a cluster that runs already (its file or address).

    Raises a UserError if the scheduler does not answer or no worker process could be started.
    """
    if workers == 1 and scheduler is None:
        yield None
        return
    if scheduler is None:  # started now, it imports beside this process
        multiprocessing.set_forkserver_preload(PRELOADED)
        # Ctrl-C is for the command, which then ends its workers: they inherit that it is blocked.
        resource_tracker.ensure_running()  # which would unblock it
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    import dask
    from distributed import Client

    for name in LOGGERS:  # the command reports what they would
        logging.getLogger(name).setLevel(logging.CRITICAL)
    dask.config.set(DASK)
    what, options = f"--workers {workers}", {"n_workers": workers, **LOCAL}
    if scheduler is not None:
        is_file = scheduler.endswith(".json") or os.path.exists(scheduler)
        what = f"--scheduler {scheduler}"
        options = {"scheduler_file" if is_file else "address": scheduler, "timeout": 30}
        if is_file and not os.path.exists(scheduler):  # the client would wait for it
            raise UserError(f"{what}: no such file; start `dask scheduler --scheduler-file FILE`.")
    try:
        client = Client(**options)
    except (OSError, RuntimeError, ValueError) as error:  # also where a worker dies at once
        raise UserError(f"{what}: Dask does not answer: {first_line(error)}.") from None
    with client:
        if scheduler is not None:
            _upload_code(client)
        yield client.get_executor(retries=RETRIES, pure=False)


def _upload_code(client: Any) -> None:
    """Brings the modules to the scheduler and to all workers, also to those that start later.

    They need the packages only: no copy of the repository, and never one of another version.
    """
    import cloudpickle

    this = sys.modules[__name__]
    files = sorted(path for name in CODE for path in (REPOSITORY / name).rglob("*.py"))
    texts = {path.relative_to(REPOSITORY).as_posix(): path.read_text("utf-8") for path in files}
    digest = hashlib.sha256(repr(texts).encode()).hexdigest()[:12]
    with TemporaryDirectory() as folder:
        path = Path(folder, f"multicls-code-{digest}.zip")
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in texts.items():
                archive.writestr(name, text)
        cloudpickle.register_pickle_by_value(this)  # they cannot import this module yet
        try:
            client.run_on_scheduler(_forget_other_code, path.name)
            client.run(_forget_other_code, path.name)
        finally:
            cloudpickle.unregister_pickle_by_value(this)
        client.upload_file(str(path))


def _forget_other_code(name: str) -> None:
    """Removes the modules of other versions from a process, unless it has last been given the archive `name`."""
    import sys

    archives = [path for path in sys.path if "multicls-code-" in path]
    if archives and archives[0].endswith(name):
        return
    sys.path[:] = [path for path in sys.path if path not in archives]
    for module in list(sys.modules):
        if module.partition(".")[0] in ("data_prep", "multicls"):
            del sys.modules[module]


def run_all(
    function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], pool: Pool
) -> Iterator[tuple[int, Any]]:
    """Calls a function with each tuple of arguments; yields number and result of a call as it ends.

    Raises:
        Exception: What a call raised.
        UserError: A call killed `DEATHS` workers; the message names its first argument.
        SystemExit: With 1, after a line on stderr: the scheduler of Dask is gone.
    """
    if pool is None:
        yield from ((number, function(*values)) for number, values in enumerate(arguments))
        return
    from distributed import KilledWorker, get_client
    from distributed.comm import CommClosedError

    running, waiting = dict[Future[Any], int](), enumerate(arguments)
    try:
        workers = sum(get_client().nthreads().values())
        for number, values in islice(waiting, max(SUBMITTED, 2 * workers)):
            running[pool.submit(function, *values)] = number
        while running:
            future = wait(running, return_when=FIRST_COMPLETED).done.pop()
            number = running.pop(future)
            try:
                yield number, future.result()
            except KilledWorker:
                raise UserError(
                    f"{arguments[number][0]}: killed three workers, perhaps because memory ran out. Start fewer "
                    "--workers, cut the file into smaller ones, or leave it out (--exclude)."
                ) from None
            for following, values in islice(waiting, 1):
                running[pool.submit(function, *values)] = following
    except (CancelledError, CommClosedError) as error:
        print_stderr(f"error: the scheduler is gone ({first_line(error)}); start the command again")
        raise SystemExit(1) from None
    finally:
        for future in running:
            future.cancel()
