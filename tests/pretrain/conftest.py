"""A tiny corpus and a way to launch pretrain/run.py on it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
Launch = Callable[..., "subprocess.CompletedProcess[str]"]


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


def records(folder: Path, split: str = "train") -> list[dict[str, float]]:
    """The run's metrics of one split."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


def weights(folder: Path) -> dict[str, bytes]:
    """The exported weights, as bytes."""
    from safetensors.numpy import load_file

    return {name: array.tobytes() for name, array in load_file(folder / "hf" / "model.safetensors").items()}
