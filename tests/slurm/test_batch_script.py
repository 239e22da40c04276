"""slurm/pretrain.sbatch in a real SLURM, with a stand-in for the training: ranks, logs, exit codes, requeueing."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import until
from tests.slurm.conftest import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.walk]
AWKWARD = ("--a", "[1, 2]", "$HOME", 'quote"s', "it's", "*")
JOBS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # flags of the run, options of sbatch
    "time limit": (("--codes", "wait,0!"), ("--time=1", "--signal=USR1@35")),
    "crashes": (("--codes", "0+,1+,1"), ()),
    "cancelled": (("--codes", "wait"), ()),
    "held": (("--codes", "wait"), ()),
    "ranks": (AWKWARD, ("--nodes=2", "--gpus-per-node=2", "--cpus-per-task=5")),
    "own GPU": ((), ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-task=1")),
    "settings": (("--wrong",), ()),
    "data": (("--codes", "alone"), ("--nodes=2", "--ntasks-per-node=3")),
}


class Submitted(NamedTuple):
    cluster: Cluster
    folder: Path
    number: str

    def log(self, node: str = "") -> str:
        return (self.folder / f"pretrain-{self.number}{node}.log").read_text()

    def logs(self) -> str:
        """Returns what the script and all ranks wrote."""
        files = sorted(self.folder.glob(f"pretrain-{self.number}*.log"))
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in files)

    def started(self) -> bool:
        """Returns True once rank 0 is ready for signals."""
        log = self.folder / f"pretrain-{self.number}-node0.log"
        return log.exists() and "rank 0\n" in log.read_text()

    def ended(self) -> tuple[str, ...]:
        """Waits for the job's end; returns its state, exit code and number of restarts."""
        job = self.cluster.wait(self.number)
        return job["JobState"], job["ExitCode"], job["Restarts"]


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Submitted]:
    """All jobs at once: they mostly wait for SLURM."""
    submitted = {}
    for name, (flags, options) in JOBS.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        (folder / "pretrain").mkdir()
        shutil.copy(Path(__file__).with_name("stand_in.py"), folder / "pretrain" / "run.py")
        number = cluster.submit("pretrain.sbatch", *flags, cwd=folder, options=options)
        submitted[name] = Submitted(cluster, folder, number)
    return submitted


def test_cancelled_job_stays_so(cluster: Cluster, jobs: dict[str, Submitted]) -> None:
    job = jobs["cancelled"]
    until(job.started, job.logs)
    cluster.run("scancel", job.number)
    state, _, restarts = job.ended()
    assert (state, restarts) == ("CANCELLED", "0"), job.logs()


def test_save_and_stop_for_good(cluster: Cluster, jobs: dict[str, Submitted]) -> None:
    job = jobs["held"]
    until(job.started, job.logs)
    cluster.run("scontrol", "update", f"JobId={job.number}", "Requeue=0")
    cluster.run("scancel", "--signal=USR1", job.number)
    assert job.ended() == ("FAILED", "1:0", "0"), job.logs()
    assert "checkpoint at step 1" in job.log() and "submit the same command" in job.log()


@pytest.mark.parametrize("name", ["ranks", "own GPU"])
def test_ranks_on_two_nodes(jobs: dict[str, Submitted], name: str) -> None:
    job = jobs[name]
    assert job.ended() == ("COMPLETED", "0:0", "0"), job.logs()
    ranks = [json.loads((job.folder / f"rank{rank}.json").read_text()) for rank in range(4)]
    places = [(rank["RANK"], rank["LOCAL_RANK"], rank["SLURMD_NODENAME"]) for rank in ranks]
    assert places == [("0", "0", "n1"), ("1", "1", "n1"), ("2", "0", "n2"), ("3", "1", "n2")]
    visible = [rank["CUDA_VISIBLE_DEVICES"] for rank in ranks]  # LOCAL_RANK chooses among several
    assert visible == (["0", "1"] * 2 if name == "own GPU" else ["0,1"] * 4)
    for rank in ranks:
        assert rank["arguments"] == list(JOBS[name][0])
        assert (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert all(rank[name] == ranks[0][name] for name in ("MASTER_ADDR", "MASTER_PORT"))
    for node in range(2):
        lines = job.log(f"-node{node}").splitlines()
        assert sorted(lines) == [f"start 0 rank {2 * node}", f"start 0 rank {2 * node + 1}"]


def test_finished_run_is_left_alone(cluster: Cluster, jobs: dict[str, Submitted]) -> None:
    jobs["ranks"].ended()
    folder = jobs["ranks"].folder
    again = Submitted(cluster, folder, cluster.submit("pretrain.sbatch", cwd=folder))
    assert again.ended() == ("COMPLETED", "0:0", "0")
    assert "finished at step 100" in again.log() and not again.started()


@pytest.mark.parametrize("name", ["settings", "data"])
def test_mistakes_are_not_tried_again(jobs: dict[str, Submitted], name: str) -> None:
    """The script finds out about settings, one of the ranks about data."""
    job = jobs[name]
    assert job.ended() == ("FAILED", "2:0", "0"), job.logs()
    assert job.started() == ("6 ranks on n[1-2]" in job.log()) == (name != "settings")


def test_restarts_as_long_as_the_run_gets_on(jobs: dict[str, Submitted]) -> None:
    job = jobs["crashes"]
    assert job.ended() == ("FAILED", "1:0", "3"), job.logs()
    assert job.log().count("requeueing") == 3 and "not requeued" in job.log()
    assert "checkpoint at step 2" in job.log()
    ports = (job.folder / "ports0.txt").read_text().split()
    assert len(set(ports)) == 4  # a new port at every start


def test_time_limit_saves_and_requeues(jobs: dict[str, Submitted]) -> None:
    job = jobs["time limit"]
    assert job.ended() == ("COMPLETED", "0:0", "1"), job.logs()
    assert "checkpoint at step 1" in job.log() and "finished at step 100" in job.log()
