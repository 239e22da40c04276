"""slurm/pretrain.sbatch in a real SLURM, with a stand-in for the training: ranks, logs, exit codes, requeueing."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import until
from tests.slurm.conftest import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
AWKWARD = ("--set", "a=[1, 2]", "$HOME", 'quote"s', "it's", "*")
JOBS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # name -> flags of the run, options of sbatch
    "time limit": (("--codes", "wait,0!"), ("--time=1", "--signal=USR1@20")),
    "crashes": (("--codes", "0+,1+,1"), ()),
    "cancelled": (("--codes", "wait"), ()),
    "held": (("--codes", "wait"), ()),
    "ranks": (AWKWARD, ("--nodes=2", "--gpus-per-node=2", "--cpus-per-task=5")),
    "own GPU": ((), ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-task=1")),
    "launcher's options": ((), ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-task=2")),
    "dry run": (("--dry_run", "--codes", "0"), ()),
    "settings": (("--wrong",), ()),
    "data": (("--codes", "2+"), ("--nodes=2", "--ntasks-per-node=3")),
}


class Submitted(NamedTuple):
    folder: Path
    number: str

    def log(self, node: str = "") -> str:
        return (self.folder / f"pretrain-{self.number}{node}.log").read_text()

    def started(self) -> bool:
        """True once rank 0 is ready for signals."""
        log = self.folder / f"pretrain-{self.number}-node0.log"
        return log.exists() and "rank 0\n" in log.read_text()

    def ports(self, rank: int = 0) -> list[int]:
        """MASTER_PORT of each start."""
        return [int(line) for line in (self.folder / f"ports{rank}.txt").read_text().split()]


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Submitted]:
    """All jobs at once: they mostly wait for SLURM."""
    submitted = {}
    for name, (flags, options) in JOBS.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        (folder / "pretrain").mkdir()
        shutil.copy(Path(__file__).with_name("stand_in.py"), folder / "pretrain" / "run.py")
        number = cluster.submit("pretrain.sbatch", *flags, cwd=folder, options=options)
        submitted[name] = Submitted(folder, number)
    return submitted


def test_cancelled_job_stays_so(cluster: Cluster, jobs: dict[str, Submitted]) -> None:
    job = jobs["cancelled"]
    until(job.started, job.log)
    cluster.run("scancel", job.number)
    ended = cluster.wait(job.number)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), job.log()


def test_save_and_stop_for_good(cluster: Cluster, jobs: dict[str, Submitted]) -> None:
    job = jobs["held"]
    until(job.started, job.log)
    cluster.run("scontrol", "update", f"JobId={job.number}", "Requeue=0")
    cluster.run("scancel", "--signal=USR1", job.number)
    ended = cluster.wait(job.number)
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "0"), job.log()
    assert "checkpoint at step 1" in job.log() and "submit the same command" in job.log()


@pytest.mark.parametrize("name", ["ranks", "own GPU", "launcher's options"])
def test_ranks_on_two_nodes(cluster: Cluster, jobs: dict[str, Submitted], name: str) -> None:
    job = jobs[name]
    assert cluster.wait(job.number)["JobState"] == "COMPLETED", job.log()
    ranks = [json.loads((job.folder / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert [(rank["RANK"], rank["LOCAL_RANK"], rank["SLURMD_NODENAME"]) for rank in ranks] == [
        ("0", "0", "n1"), ("1", "1", "n1"), ("2", "0", "n2"), ("3", "1", "n2"),
    ]  # fmt: skip
    visible = [rank["CUDA_VISIBLE_DEVICES"] for rank in ranks]
    assert visible == (["0", "1"] * 2 if name == "own GPU" else ["0,1"] * 4)  # LOCAL_RANK chooses among several
    for rank in ranks:
        assert rank["arguments"] == list(JOBS[name][0])
        assert (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert (rank["MASTER_ADDR"], rank["MASTER_PORT"]) == (ranks[0]["MASTER_ADDR"], ranks[0]["MASTER_PORT"])
    for node in range(2):
        lines = job.log(f"-node{node}").splitlines()
        assert sorted(lines) == [f"start 0 rank {2 * node}", f"start 0 rank {2 * node + 1}"]


def test_finished_run_is_left_alone(cluster: Cluster, jobs: dict[str, Submitted]) -> None:
    folder = jobs["ranks"].folder
    cluster.wait(jobs["ranks"].number)
    again = Submitted(folder, cluster.submit("pretrain.sbatch", cwd=folder))
    assert cluster.wait(again.number)["JobState"] == "COMPLETED"
    assert "finished at step 100" in again.log() and not again.started()


@pytest.mark.parametrize("name", ["settings", "data"])
def test_mistakes_are_not_tried_again(cluster: Cluster, jobs: dict[str, Submitted], name: str) -> None:
    job = jobs[name]
    ended = cluster.wait(job.number)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0"), job.log()
    assert job.started() == (name == "data")  # the ranks find out about data, the script about settings
    assert ("6 ranks on n[1-2]" in job.log()) == (name == "data")


def test_dry_run_ends(cluster: Cluster, jobs: dict[str, Submitted]) -> None:
    ended = cluster.wait(jobs["dry run"].number)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), jobs["dry run"].log()


def test_restarts_as_long_as_the_run_gets_on(cluster: Cluster, jobs: dict[str, Submitted]) -> None:
    job = jobs["crashes"]
    ended = cluster.wait(job.number)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "1:0", "5"), job.log()
    assert job.log().count("requeueing") == 5 and "not requeued" in job.log()
    assert "checkpoint at step 2" in job.log()
    assert len(set(job.ports())) == 6  # a new port at every start


def test_time_limit_saves_and_requeues(cluster: Cluster, jobs: dict[str, Submitted]) -> None:
    job = jobs["time limit"]
    ended = cluster.wait(job.number)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), job.log()
    assert "checkpoint at step 1" in job.log() and "finished at step 100" in job.log()


def test_taken_port_is_passed_over(cluster: Cluster, jobs: dict[str, Submitted]) -> None:
    folder = jobs["data"].folder
    cluster.wait(jobs["data"].number)
    (folder / "ports0.txt").unlink()
    job = Submitted(folder, cluster.submit("pretrain.sbatch", cwd=folder, options=("--hold",)))
    address, first = socket.gethostbyname(socket.gethostname()), 20000 + int(job.number) % 10000
    with socket.create_server((address, first)), socket.create_server((address, first + 1)):
        cluster.run("scontrol", "release", job.number)
        assert cluster.wait(job.number)["JobState"] == "COMPLETED", job.log()
    assert job.ports() == [first + 2]


def test_preempted_job_comes_back(cluster: Cluster, jobs: dict[str, Submitted]) -> None:
    for other in jobs.values():
        cluster.wait(other.number)
    folder = jobs["settings"].folder
    job = Submitted(folder, cluster.submit("pretrain.sbatch", "--codes", "wait,0!", cwd=folder, options=("--nodes=2",)))
    until(job.started, job.log)
    cluster.run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    ended = cluster.wait(job.number)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), job.log()
    assert "DUE TO PREEMPTION" in job.log() and "finished at step 100" in job.log()
