"""Pretraining itself on two nodes of a real SLURM: a disturbed run ends like one left in peace."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from multicls.files import read_json
from tests.pretrain.conftest import records, weights
from tests.processes import until
from tests.slurm.conftest import Cluster, processes

pytestmark = [pytest.mark.slurm, pytest.mark.walk]
STEPS = 90


def ranks(folder: Path, node: str = "") -> list[int]:
    """Returns the process ids of the ranks that train in `folder`, all or those on one node."""
    here = f"--output_dir {folder / 'run'}"
    return [number for number, command in processes(node).items() if here in command]


def wait_for_step(folder: Path, step: int) -> int:
    """Waits until the run's metrics have got to `step`; returns how far they are."""

    def now() -> int:
        return max((line["step"] for line in records(folder / "run", "train")), default=0)

    def logs() -> str:
        return "\n".join(path.read_text()[-3000:] for path in folder.glob("*.log"))

    until(lambda: now() >= step, logs)
    return now()


def test_disturbed_run(cluster: Cluster, tiny_run: list[str], tmp_path: Path) -> None:
    peace, war = tmp_path / "peace", tmp_path / "war"
    flags = [*tiny_run, "--data.num_workers", "1", "--steps", str(STEPS)]
    flags += ["--run.save_every", "5", "--run.eval_every", "45"]
    jobs = {}
    for folder in (war, peace):
        folder.mkdir()
        arguments = [*flags, "--output_dir", str(folder / "run")]
        two: Any = {"cwd": folder, "options": ("--nodes=2",)}
        jobs[folder] = cluster.submit("pretrain.sbatch", *arguments, **two)
    job = jobs[war]
    log = war / f"pretrain-{job}.log"

    def wait_for_requeue(restarts: int) -> None:
        until(lambda: cluster.job(job)["Restarts"] == str(restarts), log.read_text)
        until(lambda: not ranks(war), log.read_text)

    wait_for_step(war, 7)
    cluster.run("scancel", "--signal=USR1", job)  # what SLURM does before the time limit
    wait_for_requeue(1)
    stopped = read_json(war / "run" / "STOPPED")
    assert stopped["reason"] == "SIGUSR1"
    assert f"unfinished, checkpoint at step {stopped['step']}" in log.read_text()

    step = wait_for_step(war, stopped["step"] + 7)
    os.kill(min(ranks(war, "n2")), signal.SIGKILL)  # its loader processes are younger
    wait_for_requeue(2)

    wait_for_step(war, step + 7)
    cluster.fail_node("n1")  # with the script; SLURM notices after a while
    wait_for_requeue(3)
    cluster.start_node("n1")

    for folder, number in jobs.items():
        state = cluster.wait(number)["JobState"]
        assert state == "COMPLETED", (folder / f"pretrain-{number}.log").read_text()
        assert read_json(folder / "run" / "DONE")["step"] == STEPS
        steps = [line["step"] for line in records(folder / "run", "train")]
        assert steps == list(range(1, STEPS + 1))
    assert weights(war / "run") == weights(peace / "run")
