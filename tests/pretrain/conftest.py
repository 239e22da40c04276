"""A tiny corpus and a way to launch pretrain/run.py on it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.finetune.conftest import glue  # noqa: F401  (a fixture)

REPOSITORY = Path(__file__).parents[2]
Launch = Callable[..., "subprocess.CompletedProcess[str]"]
Fork = Callable[..., list[list[int | None]]]


@pytest.fixture(scope="session")
def tiny_corpus(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of invented documents whose words follow their topic, so that there is something to learn."""
    folder = tmp_path_factory.mktemp("corpus")
    vocabulary = json.loads((tiny_bert / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(word for word in vocabulary if word.isalpha() and word.isascii())
    generator = random.Random(0)
    for number in range(40):
        topic = generator.sample(words, 12)
        sentences = [" ".join(generator.choices(topic, k=generator.randint(4, 9))) for _ in range(30)]
        text = " ".join(f"{sentence.capitalize()}." for sentence in sentences)
        (folder / "text").mkdir(exist_ok=True)
        (folder / "text" / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    from data_prep.run import main

    main(["--input", str(folder / "text"), "--output", str(folder / "shards"), "--tokenizer", str(tiny_bert)])
    return folder / "shards"


@pytest.fixture(scope="session")
def launch(tiny_bert: Path, tiny_corpus: Path) -> Launch:
    """Runs pretrain/run.py with the tiny recipe: `launch(run_folder, *flags, launcher=["python"])`."""

    def run(folder: Path, *flags: str, launcher: tuple[str, ...] = ("python",), data: bool = True) -> object:
        command = [str(Path(sys.executable).with_name(launcher[0])), *launcher[1:], str(REPOSITORY / "pretrain/run.py")]
        command += ["--config", "ds_configs/zero2.json", "--output_dir", str(folder)]
        if data:
            command += ["--recipe", "pretrain/recipes/tiny.yaml"]
            command += ["--model", str(tiny_bert), "--corpus", str(tiny_corpus)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [*command, *flags], cwd=folder.parent, env=environment, capture_output=True, text=True, check=False
        )

    return run  # type: ignore[return-value]


@pytest.fixture(scope="session")
def fork(tiny_bert: Path, tiny_corpus: Path) -> Iterator[Fork]:
    """Runs pretrain/run.py in forks of one process: `fork(run_folder, {}, {"ranks": 2, "accident": "SIGTERM"})`.

    Returns the exit codes of the ranks of each launch, None for a hang; see accidents.py.
    """
    command = [sys.executable, str(Path(__file__).with_name("accidents.py"))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        stdin, stdout = server.stdin, server.stdout
        assert stdin is not None and stdout is not None

        def run(folder: Path, *launches: dict[str, Any], flags: tuple[str, ...] = ()) -> list[list[int | None]]:
            arguments = ["--recipe", "pretrain/recipes/tiny.yaml", "--model", str(tiny_bert)]
            arguments += ["--corpus", str(tiny_corpus), "--output_dir", str(folder), *flags]
            plans = [launch | {"arguments": arguments} for launch in launches or ({},)]
            print(json.dumps({"folder": str(folder.parent), "launches": plans}), file=stdin, flush=True)
            codes: list[list[int | None]] = json.loads(stdout.readline())
            return codes

        yield run
        server.kill()


def said(folder: Path, launch: int = 0) -> str:
    """Returns what the ranks of a `fork` launch printed, errors included."""
    return (folder.parent / f"launch_{launch}.txt").read_text()


def records(folder: Path, split: str = "train") -> list[dict[str, float]]:
    """The run's metrics of one split."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


def weights(folder: Path) -> dict[str, bytes]:
    """The exported weights, as bytes."""
    from safetensors.numpy import load_file

    return {name: array.tobytes() for name, array in load_file(folder / "hf" / "model.safetensors").items()}
