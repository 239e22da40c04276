"""Pretraining itself on two nodes of a real SLURM: a run that is disturbed in every way ends like one left in peace."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.pretrain.conftest import records, weights
from tests.processes import until
from tests.slurm.conftest import Cluster, processes

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
STEPS = 120


def submit(cluster: Cluster, folder: Path, model: Path, corpus: Path) -> str:
    flags = ["--recipe", "pretrain/recipes/tiny.yaml", "--model", str(model), "--corpus", str(corpus)]
    flags += ["--steps", str(STEPS), "--set", "run.save_every=5", "--set", "run.eval_every=60"]
    flags += ["--config", "ds_configs/zero2.json", "--output_dir", str(folder / "run")]
    return cluster.submit("pretrain.sbatch", *flags, cwd=folder, options=("--nodes=2",))


def ranks(folder: Path, node: str = "") -> list[int]:
    """Process ids of the ranks that train in `folder`, all or those on one node."""
    return [number for number, command in processes(node).items() if f"--output_dir {folder / 'run'}" in command]


def wait_for_step(folder: Path, step: int) -> int:
    """Waits until the run's metrics have got to `step`; returns how far they are."""

    def now() -> int:
        lines = records(folder / "run") if (folder / "run" / "metrics.jsonl").exists() else []
        return int(lines[-1]["step"]) if lines else 0

    until(lambda: now() >= step, lambda: "\n".join(path.read_text()[-3000:] for path in folder.glob("*.log")))
    return now()


def test_disturbed_run(cluster: Cluster, tiny_bert: Path, tiny_corpus: Path, tmp_path: Path) -> None:
    peace, war = tmp_path / "peace", tmp_path / "war"
    for folder in (peace, war):
        folder.mkdir()
    job = submit(cluster, war, tiny_bert, tiny_corpus)
    undisturbed = submit(cluster, peace, tiny_bert, tiny_corpus)
    log = war / f"pretrain-{job}.log"

    def wait_for_requeue(restarts: int) -> None:
        until(lambda: cluster.job(job)["Restarts"] == str(restarts), log.read_text)
        until(lambda: not ranks(war), log.read_text)

    wait_for_step(war, 7)
    cluster.run("scancel", "--signal=USR1", job)  # what SLURM does before the time limit
    wait_for_requeue(1)
    stopped = json.loads((war / "run" / "STOPPED").read_text())
    assert stopped["reason"] == "SIGUSR1" and f"unfinished, checkpoint at step {stopped['step']}" in log.read_text()

    step = wait_for_step(war, stopped["step"] + 7)
    rank = min(ranks(war, "n2"))  # its loader processes are younger
    os.kill(rank, signal.SIGKILL)
    wait_for_requeue(2)
    assert "ended with exit code 137" in log.read_text()

    step = wait_for_step(war, step + 7)
    cluster.run("scancel", f"{job}.0")  # the step alone: the ranks of both nodes, and not the script
    wait_for_requeue(3)

    wait_for_step(war, step + 7)
    cluster.fail_node("n1")  # with the script; SLURM notices after a while
    wait_for_requeue(4)
    cluster.start_node("n1")

    for number, folder in ((job, war), (undisturbed, peace)):
        assert cluster.wait(number)["JobState"] == "COMPLETED", (folder / f"pretrain-{number}.log").read_text()
        assert json.loads((folder / "run" / "DONE").read_text())["step"] == STEPS
        assert [line["step"] for line in records(folder / "run")] == list(range(1, STEPS + 1))
    assert weights(war / "run") == weights(peace / "run")
