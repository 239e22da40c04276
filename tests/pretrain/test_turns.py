"""Ranks take turns: forked ranks of two pretended nodes with a loader that records the order."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from multicls.errors import UserError
from pretrain import turns
from pretrain.turns import first_rank_first, once_per_node

NODES = ("a", "a", "b", "b", "b")  # of ranks 0 to 4


def run_ranks(folder: Path, work: Callable[[int, Path], Any], *, world_size: int = len(NODES)) -> list[Any]:
    """Returns what `work(rank, folder)` gives on each rank, a fork, or [kind of error, its text]."""
    address = f"file://{folder}/meeting"
    children = []
    for rank in range(world_size):
        child = os.fork()
        if not child:
            code = 1
            try:
                turns._node = lambda rank=rank: NODES[rank]  # type: ignore[misc]
                dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
                try:
                    result = work(rank, folder)
                except Exception as error:
                    result = [type(error).__name__, str(error)]
                (folder / f"rank{rank}.json").write_text(json.dumps(result))
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * world_size
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


def note(folder: Path, text: str) -> None:
    with open(folder / "order.txt", "a") as file:
        file.write(f"{text}\n")


def load(rank: int, folder: Path) -> bool:
    """A loader that takes longest on the ranks that come first."""
    with first_rank_first() as may_fetch:
        note(folder, f"{rank} begins")
        time.sleep(0.5 if rank in (0, 2) else 0)
        note(folder, f"{rank} ends")
    note(folder, f"{rank} leaves")
    return may_fetch


def test_order(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, load) == [True, False, True, False, False]
    lines = (tmp_path / "order.txt").read_text().splitlines()
    assert lines[:4] == ["0 begins", "0 ends", "2 begins", "2 ends"]
    rest = [f"{rank} {what}" for rank in (1, 3, 4) for what in ("begins", "ends")]
    assert sorted(lines[4:10]) == rest
    assert sorted(lines[10:]) == [f"{rank} leaves" for rank in range(5)]


@pytest.mark.parametrize("failing", [0, 2, 4])
def test_error_ends_all_ranks_with_its_message(tmp_path: Path, failing: int) -> None:
    def work(rank: int, folder: Path) -> None:
        with first_rank_first():
            note(folder, str(rank))
            if rank == failing:
                raise UserError("no such model", "and another thing")

    assert run_ranks(tmp_path, work) == [["UserError", "no such model\nand another thing"]] * 5
    called = set((tmp_path / "order.txt").read_text().split())
    assert {0: called == {"0"}, 2: called == {"0", "2"}, 4: called >= {"0", "2", "4"}}[failing]


def test_crash_names_its_rank(tmp_path: Path) -> None:
    def work(rank: int, folder: Path) -> None:
        with first_rank_first():
            if rank == 2:
                raise OSError("the disk is gone")

    first, *others = run_ranks(tmp_path, work, world_size=3)[::-1]
    assert first == ["OSError", "the disk is gone"]
    for kind, text in others:
        assert kind == "RuntimeError" and text.startswith("rank 2 on ") and text.endswith("OSError: the disk is gone")


def test_once_per_node_and_again(tmp_path: Path) -> None:
    def work(rank: int, folder: Path) -> list[str]:
        for time_ in range(2):
            once_per_node(lambda: note(folder, f"{time_} {rank}"))  # noqa: B023
        return (folder / "order.txt").read_text().splitlines()

    results = run_ranks(tmp_path, work)
    assert sorted(results[0]) == ["0 0", "0 2", "1 0", "1 2"]
    assert all(sorted(lines) == sorted(results[0]) for lines in results)  # the others have waited


def test_one_process_has_every_turn() -> None:
    with first_rank_first() as may_fetch:
        assert may_fetch
    done: list[int] = []
    once_per_node(lambda: done.append(1))
    assert done == [1]
    with pytest.raises(UserError, match="as it is"), first_rank_first():
        raise UserError("as it is")
