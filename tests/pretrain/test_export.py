"""Any checkpoint becomes a model: without a GPU, without a process group, and bit for bit what the run exports."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForPreTraining

from multicls.errors import UserError
from multicls.files import locked, read_json, write_json
from pretrain import export
from pretrain.run_folder import checkpoint_path
from tests.pretrain.conftest import Fork, said
from tests.pretrain.tools import checked_card
from tests.processes import completed

pytestmark = pytest.mark.launcher
MILESTONES = ("--steps", "4", "--run.milestone_every", "2")


@pytest.fixture(scope="module")
def stopped(fork: Fork, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a milestone at step 2 that was killed, resumed, and asked to stop after step 3 of 4."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    assert fork(folder, {"accident": "killed in a step", "step": 2}, flags=MILESTONES) == [[-9]]
    assert step_of(folder / "hf") == 2
    assert fork(folder, {"accident": "SIGTERM", "step": 2}, flags=MILESTONES) == [[0]], said(folder)
    return folder


def export_to(folder: Path, run: Path, *flags: str) -> Path:
    assert export.main([str(run), "--output", str(folder), *flags]) == 0
    return folder


def step_of(folder: Path) -> int:
    return int(read_json(folder / "export.json")["step"])


def assert_same_files(folder: Path, other: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in other.iterdir()}
    assert names >= {"config.json", "tokenizer.json", "README.md", "model.safetensors"}
    assert not [n for n in names if (folder / n).read_bytes() != (other / n).read_bytes()]


FROZEN = ("--objective.so", "0")  # weights that no loss trains
CASES = [(2, 2, "fp32", ())]
SLOW = [(3, 2, "fp32", FROZEN), (1, 1, "fp32", FROZEN), (1, 2, "bf16", ()), (3, 2, "bf16", ())]


@pytest.mark.parametrize(
    ("stage", "ranks", "precision", "flags"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_checkpoint_gives_what_the_run_exports(
    fork: Fork, tmp_path: Path, stage: int, ranks: int, precision: str, flags: tuple[str, ...]
) -> None:
    """An export holds the engine's fp32 weights, in each layout of ZeRO, with and without frozen weights."""
    config, run = read_json(f"ds_configs/zero{stage}.json"), tmp_path / "run"
    if stage == 3:  # some parameters below it, some above
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 100
    write_json(tmp_path / "ds.json", config)
    flags += ("--config", str(tmp_path / "ds.json"), "--train.precision", precision, "--steps", "2")
    launch = {"ranks": ranks, "accident": "note the engine's weights"}
    assert fork(run, launch, flags=flags) == [[0] * ranks], said(run)
    before = dist.is_initialized()  # by another file's test in this process
    assert_same_files(export_to(tmp_path / "model", run), run / "hf")
    assert dist.is_initialized() == before, "an export needs no process group"
    exported = load_file(tmp_path / "model" / "model.safetensors")
    engine = torch.load(tmp_path / "engine_weights.pt")
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}
    assert all(torch.equal(tensor, engine[name]) for name, tensor in exported.items())
    load = AutoModelForPreTraining.from_pretrained
    model, report = load(tmp_path / "model", output_loading_info=True)
    assert not any(report.values()) and model.dtype == torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.slow
def test_the_cards_snippets_run_where_the_folder_lies(stopped: Path, tmp_path: Path) -> None:
    _, text = checked_card((stopped / "hf" / "README.md").read_text(encoding="utf-8"))
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4 and str(stopped) not in text
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["HF_MODULES_CACHE"] = str(tmp_path)
    command = [sys.executable, "-c", "\n".join(blocks)]
    done = completed(command, cwd=stopped / "hf", env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "torch.Size([2, 3, 32])" in done.stdout and "tensor([[" in done.stdout


def test_a_stop_exports_and_a_step_can_be_chosen(stopped: Path, tmp_path: Path) -> None:
    assert step_of(stopped / "hf") == 3
    assert "3 of 4 planned optimizer steps" in (stopped / "hf" / "README.md").read_text()
    with locked(stopped):  # as a training process does
        assert_same_files(export_to(tmp_path / "model", stopped), stopped / "hf")
        with pytest.raises(UserError, match="the training writes this folder"):
            export.main([str(stopped), "--output", str(stopped / "hf")])
    export_to(tmp_path / "model", stopped, "--step", "2")  # replaces the other one
    assert step_of(tmp_path / "model") == 2
    card = (tmp_path / "model" / "README.md").read_text()
    assert "2 of 4 planned optimizer steps" in card and "after step 0" in card


def damage(run: Path) -> None:
    (file,) = checkpoint_path(run / "checkpoints", 3).glob("*optim_states.pt")
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "flags", "message"),
    [
        (damage, [], "step_00000003: damaged: .*optim_states.pt"),
        (lambda run: shutil.rmtree(run / "model"), [], "model: is missing"),
        (lambda run: shutil.rmtree(run / "checkpoints"), [], "no checkpoint"),
        (lambda run: None, ["--step", "0"], "steps 2, 3"),
        (lambda run: None, ["--output", "run"], "--output run"),
        (lambda run: (run / "settings.yaml").unlink(), [], "run: is not a run folder"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    stopped: Path, tmp_path: Path, harm: Callable[[Path], None], flags: list[str], message: str
) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    harm(tmp_path / "run")
    before = set(tmp_path.rglob("*"))
    with contextlib.chdir(tmp_path), pytest.raises(UserError, match=message):
        export.main(["run", "--output", "out", *flags])
    assert set(tmp_path.rglob("*")) == before
