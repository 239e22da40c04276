"""Ranks that take turns: the first rank of all, the first rank of every other node, then the rest."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from multicls.distributed import rank_and_world
from multicls.errors import UserError

LOOK_EVERY = 0.1  # seconds
LAST_WORD = 10.0  # seconds for all ranks to read the outcome
_numbers = itertools.count()  # all ranks take turns in the same order, so a number means the same on all of them


@contextmanager
def first_rank_first() -> Iterator[bool]:
    """Runs the block on rank 0, then on the first rank of every other node, then on the other ranks.

    For a block that fills a cache: rank 0 fetches from the Hub, the first rank of a node fills the node's own cache if
    it has one, and the other ranks find the files. All ranks must enter the block, and leave it together. There is no
    time limit. Yields True on rank 0 and on the first rank of each node, which may have to fetch.

    Raises:
        UserError: one that any rank raised in the block, on all ranks; ranks whose turn is later skip the block.
        RuntimeError: the same for another exception; the rank itself raises its own.
    """
    turns = [0 if rank == 0 else 1 if first else 2 for rank, first in enumerate(_first_ranks())]
    with _in_turns(turns):
        yield turns[rank_and_world()[0]] < 2


def once_per_node(function: Callable[[], None]) -> None:
    """Calls `function` on the first rank of each node while the other ranks wait. Errors as in `first_rank_first`."""
    turns = [0 if first else 1 for first in _first_ranks()]
    with _in_turns(turns):
        if turns[rank_and_world()[0]] == 0:
            function()


def _first_ranks() -> list[bool]:
    """Returns, for each rank, whether it is the lowest rank of its node.

    LOCAL_RANK does not tell: launchers that show each process only its own GPU may call all of them 0.
    """
    nodes = [_node()]
    if rank_and_world()[1] > 1:
        nodes = [""] * rank_and_world()[1]
        dist.all_gather_object(nodes, _node())
    return [node not in nodes[:rank] for rank, node in enumerate(nodes)]


def _node() -> str:
    """Returns a name that differs between machines (boot id) and between containers of one machine (host name)."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text().strip() if boot.exists() else "")


@contextmanager
def _in_turns(turns: Sequence[int]) -> Iterator[None]:
    """Runs the block on each rank when all ranks of earlier turns have passed; rank r has turn `turns[r]`.

    Ranks wait by looking into the process group's store, not in a collective: a long download would exceed the time
    limit of a collective (10 minutes in DeepSpeed).
    """
    rank, world_size = rank_and_world()
    if world_size == 1:
        yield
        return
    board = _Board(rank, world_size)
    try:
        board.wait_for(number for number in range(world_size) if turns[number] < turns[rank])
        try:
            yield
        except BaseException as error:
            board.report(error)
            raise
        board.store.set(f"passed {rank}", "yes")
        board.wait_for(range(world_size))
    finally:
        board.leave()


class _Board:
    """Messages between the ranks through the store of the process group, which lives with rank 0 or the launcher."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        # The public ways to a store would need another port that is free on the first node.
        self.store: Any = dist.PrefixStore(f"turns {next(_numbers)}", dist.distributed_c10d._get_default_store())

    def wait_for(self, ranks: Iterable[int]) -> None:
        """Waits until these ranks have passed; raises the error of a rank that has failed."""
        keys = [f"passed {rank}" for rank in ranks]
        while not self.store.check(["error"]):
            if not keys or self.store.check(keys):
                return
            time.sleep(LOOK_EVERY)
        error = json.loads(self.store.get("error"))
        if error["problems"] is not None:
            raise UserError(*error["problems"], on_all_ranks=True)
        raise RuntimeError(error["text"])

    def report(self, error: BaseException) -> None:
        """Tells the others of an error."""
        problems = list(error.problems) if isinstance(error, UserError) else None
        text = f"rank {self.rank} on {socket.gethostname()}: {type(error).__name__}: {error}"
        self.store.set("error", json.dumps({"problems": problems, "text": text}))

    def leave(self) -> None:
        """Rank 0 waits until all ranks have read the outcome: the store may end with its process."""
        deadline = time.monotonic() + LAST_WORD
        keys = [f"read {rank}" for rank in range(self.world_size)]
        with suppress(RuntimeError):  # the store is gone: another process kept it, and has ended
            self.store.set(keys[self.rank], "yes")
            while self.rank == 0 and not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(LOOK_EVERY)
