"""slurm/data_prep.sbatch in a real SLURM of two nodes, undisturbed and with workers killed."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from multicls.files import REPOSITORY
from tests.data_prep.conftest import same_files, story
from tests.slurm.conftest import Cluster, processes

pytestmark = [pytest.mark.slurm, pytest.mark.walk]
OPTIONS = ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--time=00:10:00")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of which three are a unit, with copies across units."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(12):
        rows = [json.dumps({"text": story(3000, 5 * i + number)}) for i in range(40)]
        data = "\n".join([*rows, json.dumps({"text": story(50)})]).encode()
        padding = "\n" + json.dumps({"other": os.urandom(9_000_000).hex()})
        (folder / f"{number:02d}.jsonl.gz").write_bytes(
            gzip.compress(data + padding.encode(), 1, mtime=0)
        )
    return folder


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
    run = [sys.executable, str(REPOSITORY / "data_prep" / "run.py"), "--workers", "1"]
    subprocess.run(
        [*run, *arguments(text, tiny_tokenizer, output)], check=True, capture_output=True
    )
    return output


def workers() -> list[int]:
    """Processes of Dask on the nodes that do the work: nannies and their workers."""
    return [
        number
        for number, line in processes().items()
        if ("spawn_main" in line or "dask worker" in line) and "while true" not in line
    ]


@pytest.mark.parametrize("kills", [0, int(os.environ.get("MULTICLS_KILLS", "3"))])
def test_jobs_prepare_a_corpus(
    kills: int, cluster: Cluster, text: Path, local: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    """Kills workers of one job after the other. A unit that loses three workers ends its job, as it should."""
    output, done, rng = tmp_path / "out", -1, np.random.default_rng(0)
    while done < kills:
        done = max(done, 0)
        job = submit(cluster, tmp_path, arguments(text, tiny_tokenizer, output))
        while done < kills and cluster.job(job)["JobState"] in ("PENDING", "RUNNING"):
            if list(output.glob("work/*/drops.json")) and (found := workers()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(rng.choice(found)), signal.SIGKILL)
                    done += 1
            time.sleep(float(rng.uniform(0.1, 0.6)))
        state = cluster.wait(job)["JobState"]
        log = (tmp_path / f"data_prep-{job}.log").read_text()
        if state == "COMPLETED":
            same_files(local, output)
            assert "corpus:" in log
            shutil.rmtree(output)
        else:
            assert kills and "killed three workers" in log, log
    if output.exists():
        job = submit(cluster, tmp_path, arguments(text, tiny_tokenizer, output))
        assert cluster.wait(job)["JobState"] == "COMPLETED"
        same_files(local, output)


def test_mistakes_end_the_job_with_their_code(
    cluster: Cluster, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    words = arguments(tmp_path / "nothing", tiny_tokenizer, tmp_path / "out")
    job = submit(cluster, tmp_path, words)
    assert cluster.wait(job)["ExitCode"] == "2:0"
    assert "no such file or folder" in (tmp_path / f"data_prep-{job}.log").read_text()
