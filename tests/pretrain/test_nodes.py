"""Several nodes without SLURM, as docs/clusters.md starts them: a launcher on each node, here two on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multicls.files import REPOSITORY
from tests.pretrain.conftest import Fork, losses, said
from tests.processes import free_ports

pytestmark = [pytest.mark.launcher, pytest.mark.slow]
STEPS = ("--steps", "2")
HOSTS = """
# host  slots = GPUs (on CPUs: ranks)
first.cluster.invalid slots=1
second.cluster.invalid slots=1
"""  # names that do not resolve: with --no_ssh only their order matters


def torchrun(node: int, port: int, folder: Path) -> list[str]:
    flags = ["--nnodes=2", f"--node_rank={node}", "--nproc_per_node=1"]
    return ["torchrun", *flags, "--master_addr=127.0.0.1", f"--master_port={port}"]


def hostfile(node: int, port: int, folder: Path) -> list[str]:
    (folder / "hosts").write_text(HOSTS)
    flags = ["--hostfile", str(folder / "hosts"), "--no_ssh", "--node_rank", str(node)]
    return ["deepspeed", *flags, "--master_addr", "127.0.0.1", "--master_port", str(port)]


@pytest.fixture(scope="module")
def alone(fork: Fork, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert fork(folder, flags=STEPS) == [[0]], said(folder)
    return folder


@pytest.mark.parametrize("launcher", [torchrun, hostfile])
def test_two_nodes(launcher: Any, alone: Path, tiny_run: list[str], tmp_path: Path) -> None:
    run, (port,) = tmp_path / "run", free_ports(1)
    without = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment["OMP_NUM_THREADS"] = "1"
    nodes, logs = [], [tmp_path / f"node{node}.log" for node in range(2)]
    for node in range(2):
        program, *options = launcher(node, port, tmp_path)
        command = [str(Path(sys.executable).with_name(program)), *options, "pretrain/run.py"]
        command += [*tiny_run, *STEPS, "--output_dir", str(run)]
        with logs[node].open("w") as log:
            nodes.append(
                subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)
            )
    try:
        codes = [node.wait() for node in nodes]
    finally:
        for process in nodes:
            process.kill()
    text = "\n".join(log.read_text() for log in logs)
    assert codes == [0, 0], text
    assert "x 2 ranks x 1 accumulation" in text
    for split in ("train", "validation"):
        for one, two in zip(losses(alone, split), losses(run, split), strict=True):
            assert len(one) == 5 and two == pytest.approx(one, rel=1e-5)
