"""slurm/pretrain.sbatch in a real SLURM, with a stand-in for the training: ranks, logs, exit codes, requeueing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.slurm


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pretrain").mkdir()
    shutil.copy(Path(__file__).with_name("stand_in.py"), tmp_path / "pretrain" / "run.py")
    return tmp_path


def test_ranks_on_two_nodes(cluster: Cluster, folder: Path) -> None:
    awkward = ("--set", "a=[1, 2]", "$HOME", 'quote"s', "it's", "*")
    job = cluster.submit("pretrain.sbatch", *awkward, cwd=folder, options=("--nodes=2", "--ntasks-per-node=2"))
    assert cluster.wait(job)["JobState"] == "COMPLETED"
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert [(rank["RANK"], rank["LOCAL_RANK"], rank["SLURMD_NODENAME"]) for rank in ranks] == [
        ("0", "0", "n1"), ("1", "1", "n1"), ("2", "0", "n2"), ("3", "1", "n2"),
    ]  # fmt: skip
    for rank in ranks:
        assert rank["arguments"] == list(awkward)
        assert (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert (rank["MASTER_ADDR"], rank["MASTER_PORT"]) == (ranks[0]["MASTER_ADDR"], str(20000 + int(job)))
    for node in range(2):
        lines = (folder / f"pretrain-{job}-node{node}.log").read_text().splitlines()
        assert sorted(lines) == [f"start 0 rank {2 * node}", f"start 0 rank {2 * node + 1}"]
    again = cluster.submit("pretrain.sbatch", cwd=folder)
    assert cluster.wait(again)["JobState"] == "COMPLETED"
    assert "finished at step 100" in (folder / f"pretrain-{again}.log").read_text()
    assert not (folder / f"pretrain-{again}-node0.log").exists()  # nothing was started


@pytest.mark.parametrize(("flags", "launched"), [(["--wrong"], False), (["--codes", "2+"], True)])
def test_wrong_settings_are_not_tried_again(cluster: Cluster, folder: Path, flags: list[str], launched: bool) -> None:
    job = cluster.submit("pretrain.sbatch", *flags, cwd=folder, options=("--nodes=2",))
    ended = cluster.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0")
    assert (folder / f"pretrain-{job}-node1.log").exists() == launched


def test_restarts_as_long_as_the_run_gets_on(cluster: Cluster, folder: Path) -> None:
    job = cluster.submit("pretrain.sbatch", "--codes", "0+,1+,1+,1+,1", cwd=folder)
    ended = cluster.wait(job)
    log = (folder / f"pretrain-{job}.log").read_text()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "1:0", "4"), log
    assert log.count("requeueing") == 4 and "not requeued" in log
    assert "checkpoint at step 4" in log
