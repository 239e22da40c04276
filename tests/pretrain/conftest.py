"""Ways to launch pretrain/run.py on the tiny corpus, and what a run leaves."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from data_prep.examples import ExampleStream, SpecialIds
from multicls.corpus import Corpus
from multicls.files import REPOSITORY, read_jsonl
from tests.processes import completed, program

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
Fork = Callable[..., list[list[int | None]]]


@pytest.fixture(scope="session")
def tiny_run(tiny_bert: Path, tiny_corpus: Path) -> list[str]:
    """The flags of a tiny run."""
    return ["--recipe", "tiny", "--model", str(tiny_bert), "--corpus", str(tiny_corpus)]


@pytest.fixture(scope="session")
def stream(tiny_corpus: Path) -> ExampleStream:
    """Training examples of the tiny corpus, for a model with three facets."""
    special = SpecialIds(cls=12, sep=13, pad=0, mask=14, facets=(1, 2, 3))
    return ExampleStream(Corpus(tiny_corpus), special, seq_length=32, seed=1)


@pytest.fixture(scope="session")
def launch(tiny_run: list[str]) -> Launch:
    """Runs pretrain/run.py with the tiny recipe: `launch(run_folder, *flags, launcher=["python"])`."""

    def run(folder: Path, *more: str, launcher: Sequence[str] = ("python",)) -> Any:
        words = [program(launcher[0]), *launcher[1:], REPOSITORY / "pretrain/run.py"]
        words += ["--output_dir", folder, *tiny_run, *more]
        return completed(words, cwd=folder.parent, env=os.environ | {"OMP_NUM_THREADS": "1"})

    return run


@pytest.fixture(scope="session")
def fork(tiny_run: list[str]) -> Iterator[Fork]:
    """Runs pretrain/run.py in forks of one process: `fork(run_folder, {}, {"ranks": 2, "accident": "SIGTERM"})`.

    Returns the exit codes of the ranks of each launch, None for a hang; see accidents.py.
    """
    command = [sys.executable, str(Path(__file__).with_name("accidents.py"))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as server:
        stdin, stdout = server.stdin, server.stdout
        assert stdin is not None and stdout is not None

        def run(folder: Path, *launches: dict[str, Any], flags: tuple[str, ...] = ()) -> Any:
            arguments = [*tiny_run, "--output_dir", str(folder), *flags]
            plans = [launch | {"arguments": arguments} for launch in launches or ({},)]
            request = {"folder": str(folder.parent), "launches": plans}
            print(json.dumps(request), file=stdin, flush=True)
            return json.loads(stdout.readline())

        yield run
        server.kill()


def logs(folder: Path, launch: int = 0) -> str:
    """Returns what the ranks of a `fork` launch printed, errors included."""
    return (folder.parent / f"launch_{launch}.txt").read_text()


def records(folder: Path, split: str) -> list[dict[str, Any]]:
    """Returns the run's records of one split."""
    return [line for line in read_jsonl(folder / "metrics.jsonl") if line["split"] == split]


def losses(folder: Path, split: str) -> list[dict[str, float]]:
    """Returns the losses in the run's records of one split."""
    return [{k: v for k, v in r.items() if k.startswith("loss/")} for r in records(folder, split)]


def weights(folder: Path) -> dict[str, bytes]:
    """Returns the exported weights, as bytes."""
    from safetensors.numpy import load_file

    exported = load_file(folder / "hf" / "model.safetensors")
    return {name: array.tobytes() for name, array in exported.items()}
