"""Runs functions in this process, on a local Dask cluster, or on any Dask cluster that runs already."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from multicls.errors import UserError, first_line

if TYPE_CHECKING:
    from distributed import LocalCluster

MOST_WAITING = 256  # calls that the scheduler knows at a time
DEATHS = 3  # of workers, after which a call is given up
RETRIES = 2  # of a call that raises an error: a network file system may fail once
MEMORY = ("target", "spill", "pause", "terminate")  # limits of Dask, which we do not want
DASK = {f"distributed.worker.memory.{name}": False for name in MEMORY} | {
    "distributed.scheduler.allowed-failures": DEATHS - 1,
    # Ctrl-C is for the command, which then ends its workers.
    "distributed.worker.preload": ["import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"],
}
LOGGERS = ("distributed", "distributed.client", "tornado.application", "asyncio")


class SchedulerLost(Exception):
    """The Dask scheduler went away while it had work."""


@contextmanager
def open_pool(
    workers: int, scheduler: str | None, log: Callable[[str], Any]
) -> Iterator[Executor | None]:
    """Opens an executor of Dask: processes of this machine, or a cluster that runs already.

    Yields None if one worker, this process, does all. `scheduler` is the scheduler file or address
    of the cluster.

    Raises:
        UserError: The scheduler does not answer.
    """
    if workers == 1 and scheduler is None:
        yield None
        return
    import dask
    from distributed import Client

    for name in LOGGERS:  # the command reports what they would
        logging.getLogger(name).setLevel(logging.CRITICAL)
    dask.config.set(DASK)
    if scheduler is None:
        with _local_cluster(workers) as cluster, Client(cluster) as client:
            yield client.get_executor(retries=RETRIES, pure=False)
        return
    is_file = scheduler.endswith(".json") or os.path.exists(scheduler)
    try:
        if is_file and not os.path.exists(scheduler):  # the client would wait for it
            raise FileNotFoundError("no such file")
        client = Client(**{"scheduler_file" if is_file else "address": scheduler}, timeout=30)
    except (OSError, ValueError, TimeoutError) as error:
        raise UserError(
            f"--scheduler {scheduler}: no Dask scheduler answers ({first_line(error)}); start one "
            "with `dask scheduler --scheduler-file FILE`."
        ) from None
    with client:
        log(f"scheduler {client.scheduler.address}: {len(client.nthreads())} workers so far")
        yield client.get_executor(retries=RETRIES, pure=False)


def _local_cluster(workers: int) -> LocalCluster:
    """Starts a cluster on this machine, again if a worker is killed while it starts."""
    from distributed import LocalCluster

    options = {"dashboard_address": "127.0.0.1:0", "silence_logs": logging.CRITICAL}
    why = ""
    for _ in range(DEATHS):
        try:
            return LocalCluster(n_workers=workers, threads_per_worker=1, **options)
        except RuntimeError as error:
            why = first_line(error)
    raise UserError(f"--workers {workers}: no worker process could be started ({why})")


def run_all(
    function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], pool: Executor | None
) -> Iterator[tuple[int, Any]]:
    """Calls a function with each tuple of arguments; yields number and result of a call as it ends.

    Raises:
        Exception: What a call raised.
        UserError: A call killed `DEATHS` workers; the message names its first argument.
        SchedulerLost: The scheduler of Dask is gone.
    """
    if pool is None:
        yield from ((number, function(*values)) for number, values in enumerate(arguments))
        return
    from distributed import KilledWorker
    from distributed.comm import CommClosedError

    running: dict[Future[Any], int] = {}
    waiting = list(range(len(arguments)))[::-1]
    try:
        while waiting or running:
            while waiting and len(running) < MOST_WAITING:
                number = waiting.pop()
                running[pool.submit(function, *arguments[number])] = number
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number = running.pop(future)
                try:
                    yield number, future.result()
                except KilledWorker:
                    raise UserError(
                        f"{arguments[number][0]}: killed three workers, perhaps because memory ran "
                        "out. Start fewer --workers, cut the file into smaller ones, or leave it out "
                        "(--exclude)."
                    ) from None
    except (CancelledError, CommClosedError) as error:
        why = f"the Dask scheduler is gone ({first_line(error)}); the same command continues"
        raise SchedulerLost(why) from None
    finally:
        for future in running:
            future.cancel()
