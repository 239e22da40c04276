"""slurm/data_prep.sbatch in a real SLURM of two nodes, with workers killed and undisturbed."""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from multicls.files import REPOSITORY
from tests.data_prep.conftest import large_input, same_files
from tests.processes import completed
from tests.slurm.conftest import Cluster, processes

pytestmark = [pytest.mark.slurm, pytest.mark.walk]
KILLS = int(os.environ.get("MULTICLS_KILLS", "3"))
OPTIONS = ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--time=00:10:00")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_input(tmp_path_factory.mktemp("text") / "in", files=12)


def submit(cluster: Cluster, folder: Path, words: list[str]) -> str:
    for name in ("data_prep", "multicls"):
        if not (folder / name).exists():
            (folder / name).symlink_to(REPOSITORY / name)
    return cluster.submit("data_prep.sbatch", *words, cwd=folder, options=OPTIONS)


def arguments(text: Path, tokenizer: Path, output: Path) -> list[str]:
    return ["--input", str(text), "--tokenizer", str(tokenizer), "--output", str(output)]


@pytest.fixture(scope="module")
def local(text: Path, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus as one process prepares it."""
    output = tmp_path_factory.mktemp("local") / "corpus"
    run = [sys.executable, REPOSITORY / "data_prep" / "run.py", "--workers", "1"]
    assert completed([*run, *arguments(text, tiny_tokenizer, output)]).returncode == 0
    return output


def workers() -> list[int]:
    """Processes of Dask on the nodes that do the work: nannies and their workers."""
    return [
        number
        for number, line in processes().items()
        if ("spawn_main" in line or "dask worker" in line) and "while true" not in line
    ]


def test_jobs_prepare_a_corpus(
    cluster: Cluster, text: Path, local: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    """Kills workers of one job after the other; a unit that loses three workers ends its job. The last has peace."""
    output, kills, rng = tmp_path / "out", 0, np.random.default_rng(0)
    while True:
        in_peace = kills == KILLS
        job = submit(cluster, tmp_path, arguments(text, tiny_tokenizer, output))
        while kills < KILLS and cluster.job(job)["JobState"] in ("PENDING", "RUNNING"):
            if list(output.glob("work/*/drops.json")) and (alive := workers()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(rng.choice(alive)), signal.SIGKILL)
                    kills += 1
            time.sleep(float(rng.uniform(0.1, 0.6)))
        state = cluster.wait(job)["JobState"]
        log = (tmp_path / f"data_prep-{job}.log").read_text()
        if state == "COMPLETED":
            same_files(local, output)
            assert "corpus:" in log
            shutil.rmtree(output)
        else:
            assert not in_peace and "killed three workers" in log, log
        if in_peace:
            return


def test_mistakes_end_the_job(cluster: Cluster, tiny_tokenizer: Path, tmp_path: Path) -> None:
    words = arguments(tmp_path / "nothing", tiny_tokenizer, tmp_path / "out")
    job = submit(cluster, tmp_path, words)
    assert cluster.wait(job)["ExitCode"] == "2:0"
    assert str(tmp_path / "nothing") in (tmp_path / f"data_prep-{job}.log").read_text()
