"""A run that was killed goes on with the same numbers, and only from a snapshot of its own."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune.data.encoding import Encoded
from finetune.data.examples import LabeledExample
from finetune.data.metrics import score_examples
from finetune.data.tasks import TASKS
from finetune.heads.building import build_head
from finetune.heads.checkpoint import find_checkpoint, load_tokenizer
from finetune.settings import FinetuneSettings, TrainSettings
from finetune.train.loop import FinetuneResult, TaskSplit, fine_tune
from finetune.train.snapshots import STATE, Snapshots

WORDS = (("ros", "tun"), ("nar", "pel"))


class Killed(Exception):
    """Stands for a kill."""


def split(folder: Path, task: str, kill_at: int = 0, really: bool = False) -> TaskSplit:
    """12 train and 8 dev rows; the evaluation number `kill_at` does not end."""
    tokenizer, done = load_tokenizer(find_checkpoint(str(folder)), 16), 0
    rows = [LabeledExample(str(n), (f"len {WORDS[n % 2][n // 2 % 2]}", "los")[: len(TASKS[task].fields)], n % 2)
            for n in range(20)]  # fmt: skip

    def score(outputs: Any) -> dict[str, float]:
        nonlocal done
        done += 1
        if done == kill_at and really:
            os.kill(os.getpid(), signal.SIGKILL)
        if done == kill_at:
            raise Killed
        return score_examples(TASKS[task], rows[12:], outputs)

    train, dev = (Encoded(TASKS[task], part, tokenizer, 16) for part in (rows[:12], rows[12:]))
    return TaskSplit(train, dev, score)


def train(
    folder: Path, snapshots: Path | None, kill_at: int = 0, seed: int = 1, head: str = "isobn", really: bool = False,
    steps: int = 20, ds_config: tuple[str, dict[str, Any]] | None = None,
) -> FinetuneResult:  # fmt: skip
    """Steps with dropout of IsoBN (which has statistics) or of two tasks (`cln`); every second one is evaluated."""
    tasks = ["sst2", "rte"] if head == "cln" else ["sst2"]
    settings = FinetuneSettings(model=str(folder), task=",".join(tasks), head=head)
    values = {"max_steps": steps, "batch_size": 5, "eval_every": 2, "precision": "fp32", "learning_rate": 5e-3}
    torch.manual_seed(seed)
    model = build_head(settings, find_checkpoint(str(folder)), [TASKS[task] for task in tasks])
    parts = [split(folder, task, kill_at if task == tasks[-1] else 0, really) for task in tasks]
    return fine_tune(
        model, parts, TrainSettings.model_validate(values | {"snapshot_minutes": 1e-9}), seed, torch.device("cpu"),
        keep_weights=True, snapshots=snapshots, ds_config=ds_config,
    )  # fmt: skip


def assert_same(found: FinetuneResult, expected: FinetuneResult) -> None:
    assert found.history == expected.history and found.scores == expected.scores
    assert (found.best_step, found.steps) == (expected.best_step, expected.steps)
    for one, two in zip(found.outputs, expected.outputs, strict=True):
        np.testing.assert_array_equal(one, two)
    assert found.weights and expected.weights and found.weights.keys() == expected.weights.keys()
    assert all(torch.equal(weight, expected.weights[name]) for name, weight in found.weights.items())


@pytest.mark.parametrize("head", ["isobn", "cln"])
def test_a_killed_run_goes_on_with_the_same_numbers(
    head: str, tiny_bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = train(tiny_bert, None, head=head)
    assert expected.best_step < 20, "the best weights are not the last ones"
    with caplog.at_level(logging.INFO, "finetune"):
        for kill_at, step in (
            (4, 6),
            (3, 10),
            (5, 18),
        ):  # of the second and third start: the third and fifth from there
            with pytest.raises(Killed):
                train(tiny_bert, tmp_path / "run", kill_at, head=head)
            state = torch.load(tmp_path / "run" / STATE, weights_only=True)
            assert state["result"]["steps"] == step
        caplog.clear()
        result = train(tiny_bert, tmp_path / "run", head=head)
    assert "going on from step 18" in caplog.text
    assert_same(result, expected)
    assert {field.name for field in fields(FinetuneResult)} == state["result"].keys(), "nothing of the result is lost"


@pytest.mark.slow
def test_a_process_that_is_killed(tiny_bert: Path, tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from tests.finetune.train.test_snapshots import train; "
    code += "train(Path(sys.argv[1]), Path(sys.argv[2]), 4, really=True)"
    command = [sys.executable, "-c", code, str(tiny_bert), str(tmp_path / "run")]
    killed = subprocess.run(
        command, cwd=Path(__file__).parents[3], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert killed.returncode == -signal.SIGKILL and (tmp_path / "run" / STATE).exists()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert_same(train(tiny_bert, tmp_path / "run"), train(tiny_bert, None))
    finally:
        torch.set_num_threads(threads)


def test_a_snapshot_of_another_run_or_a_torn_one_is_not_used(
    tiny_bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = train(tiny_bert, None, seed=2)
    with pytest.raises(Killed):
        train(tiny_bert, tmp_path, 4)
    assert_same(train(tiny_bert, tmp_path, seed=2), expected)
    assert "is of a run with other seed: the run starts again" in caplog.text
    (tmp_path / STATE).write_bytes((tmp_path / STATE).read_bytes()[:1000])
    assert_same(train(tiny_bert, tmp_path, seed=2), expected)
    assert "cannot be read, the run starts again" in caplog.text


def test_a_disk_that_is_full_does_not_end_the_run(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Snapshots, "_save", full)
    assert train(tiny_bert, tmp_path / "run").steps == 20
    assert "no snapshot at step 2: [Errno 28] No space left" in caplog.text


def test_snapshots_come_at_their_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of its own says 1 minute more at each look."""
    minutes = iter(range(1000))
    monkeypatch.setattr("finetune.train.snapshots.time.monotonic", lambda: 60.0 * next(minutes))
    saved: list[int] = []
    monkeypatch.setattr(Snapshots, "_save", lambda self, folder, stepper, result: saved.append(result["steps"]))
    keeper = Snapshots(tmp_path, 2.5, {})
    for step in range(1, 9):
        keeper.save_if_due(None, FinetuneResult(steps=step), 0.0)  # type: ignore[arg-type]
    assert saved == [3, 6]
