"""Pretraining itself on two nodes of a real SLURM: a run that is disturbed in every way ends like one left in peace."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.pretrain.conftest import records, weights
from tests.slurm.conftest import Cluster, until

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 150


def submit(cluster: Cluster, folder: Path, model: Path, corpus: Path) -> str:
    flags = ["--recipe", "pretrain/recipes/tiny.yaml", "--model", str(model), "--corpus", str(corpus)]
    flags += ["--steps", str(STEPS), "--set", "run.save_every=10", "--set", "run.eval_every=75"]
    flags += ["--config", "ds_configs/zero2.json", "--output_dir", str(folder / "run")]
    return cluster.submit("pretrain.sbatch", *flags, cwd=folder, options=("--nodes=2",))


def ranks(folder: Path) -> dict[str, int]:
    """Process ids of the ranks that train in `folder`, by the name of their node."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:  # it has ended
            continue
        if str(folder / "run").encode() in command and b"\0RANK=" in environment:
            found[environment.split(b"\0SLURMD_NODENAME=")[1].split(b"\0")[0].decode()] = int(process.name)
    return found


def step_of(folder: Path) -> int:
    """The last step in the run's metrics."""
    return int(records(folder / "run")[-1]["step"]) if (folder / "run" / "metrics.jsonl").exists() else 0


def test_disturbed_run(cluster: Cluster, tiny_bert: Path, tiny_corpus: Path, tmp_path: Path) -> None:
    peace, war = tmp_path / "peace", tmp_path / "war"
    for folder in (peace, war):
        folder.mkdir()
    job = submit(cluster, peace, tiny_bert, tiny_corpus)
    assert cluster.wait(job)["JobState"] == "COMPLETED", (peace / f"pretrain-{job}.log").read_text()
    assert json.loads((peace / "run" / "DONE").read_text())["step"] == STEPS
