"""`data_prep/run.py --executor slurm` in a real SLURM: dependent array jobs, also with tasks killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from multicls.corpus import Corpus
from multicls.files import REPOSITORY
from tests.data_prep.conftest import same_files, story
from tests.processes import until
from tests.slurm.conftest import Cluster, processes

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def command(text: Path, tokenizer: Path, output: Path, *flags: str) -> list[str]:
    words = [sys.executable, str(REPOSITORY / "data_prep" / "run.py"), "--input", str(text), "--output", str(output)]
    return [*words, "--tokenizer", str(tokenizer), "--documents", "blank_line", *flags]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of several work units, with documents and lines that stand in more than one of them."""
    path = tmp_path_factory.mktemp("text") / "in.txt"
    documents = [story(900, i) for i in range(160)]
    path.write_text("\n\n".join([*documents, *documents[:9]]))
    return path


@pytest.fixture(scope="module")
def local(text: Path, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus as this process prepares it."""
    output = tmp_path_factory.mktemp("local") / "corpus"
    subprocess.run(command(text, tiny_tokenizer, output, "--workers", "1"), check=True, capture_output=True)
    return output


def test_the_bytes_are_those_of_the_local_executor(
    cluster: Cluster,
    text: Path,
    local: Path,
    tiny_tokenizer: Path,
    tmp_path: Path,
) -> None:
    flags = [
        "--executor",
        "slurm",
        "--partition",
        "all",
        "--time",
        "00:10:00",
        "--workers",
        "4",
        "--tasks_per_job",
        "2",
    ]
    words = command(text, tiny_tokenizer, tmp_path / "out", *flags)
    done = subprocess.run(words, env=cluster.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SLURM jobs: build " in done.stdout
    same_files(local, tmp_path / "out")
    assert cluster.run("squeue", "--noheader") == ""  # nothing stays pending


def test_killed_tasks_and_commands_lose_nothing(
    cluster: Cluster,
    text: Path,
    local: Path,
    tiny_tokenizer: Path,
    tmp_path: Path,
) -> None:
    """Kills tasks on the nodes and the waiting command, at moments drawn anew each time."""
    rng = random.Random(0)
    most = int(os.environ.get("MULTICLS_KILLS", "3"))  # more take minutes
    words = command(text, tiny_tokenizer, tmp_path / "out", "--executor", "slurm", "--partition", "all")
    kills = 0
    for _ in range(40):
        waiting = subprocess.Popen(words, env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if kills < most:
            until(lambda: tasks() or waiting.poll() is not None)  # noqa: B023
            for number in rng.sample(found, min(2, len(found))) if (found := tasks()) else []:
                os.kill(number, signal.SIGKILL)
                kills += 1
            if rng.random() < 0.5:
                waiting.kill()
        output, _ = waiting.communicate()
        if waiting.returncode == 0:
            break
        assert waiting.returncode in (2, -signal.SIGKILL), output.decode()
    assert kills >= most
    Corpus.open(tmp_path / "out").verify()
    same_files(local, tmp_path / "out")


def tasks() -> list[int]:
    """Processes of datatrove tasks on the nodes."""
    return [number for number, line in processes().items() if "launch_pickled_pipeline" in line and "srun" not in line]
