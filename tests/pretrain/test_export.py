"""Any checkpoint becomes a model: without a GPU, without a process group, and bit for bit what the run exports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForPreTraining

from multicls.errors import UserError
from multicls.files import lock_holder, locked, read_json, sha256_of, write_json
from pretrain import export
from pretrain.engine import full_weights
from pretrain.run_folder import checkpoint_path, complete_steps, status
from tests.hub_rules import checked_card, snippets
from tests.pretrain.conftest import Fork, said

pytestmark = pytest.mark.launcher
MILESTONES = ("--steps", "4", "--set", "run.milestone_every=2")


@pytest.fixture(scope="module")
def finished(fork: Fork, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert fork(folder, flags=MILESTONES) == [[0]], said(folder)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may harm."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def weights_of(run_folder: Path, step: int) -> Path:
    return checkpoint_path(run_folder / "checkpoints", step) / "model.safetensors"


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


def replace_weights(run_folder: Path, step: int, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Changes the vocabulary's rows in a checkpoint, which stays whole."""
    file = weights_of(run_folder, step)
    weights = load_file(file)
    save_file(weights | {name: change(weights[name]) for name in export.VOCABULARY_ROWS}, file)
    meta = read_json(file.with_name("meta.json"))
    meta["files"][file.name] = {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
    write_json(file.with_name("meta.json"), meta)
    file.with_name("COMPLETE").write_text(sha256_of(file.with_name("meta.json")) + "\n")


def exported(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = read_json(folder / "export.json")
    return facts


def assert_same_files(folder: Path, other: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in other.iterdir()} >= {"config.json", "tokenizer.json", "README.md"}
    assert not [name for name in names if (folder / name).read_bytes() != (other / name).read_bytes()]


def expected_weights(run_folder: Path, stage: int) -> dict[str, torch.Tensor]:
    """The weights in DeepSpeed's files: the module's, replaced by the fp32 weights that DeepSpeed's reader finds."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folder, weights = checkpoint_path(run_folder / "checkpoints", 2), {}
    if stage < 3:
        weights = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    if stage > 0:  # the reader knows no stage 0, and in stage 1 no frozen parameters
        weights = dict(weights) | get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name)
    return dict(weights)


CASES = [(0, 1, "fp32"), (2, 2, "fp32"), (3, 2, "fp32")]
SLOW = [(1, 2, "fp32"), (3, 1, "fp32"), (0, 2, "bf16"), (2, 2, "bf16"), (3, 2, "bf16")]


@pytest.mark.parametrize(
    ("stage", "ranks", "precision"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_checkpoint_gives_what_the_run_exports(
    fork: Fork, tmp_path: Path, stage: int, ranks: int, precision: str
) -> None:
    config = read_json(f"ds_configs/zero{stage}.json")
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 100  # some parameters below it, some above
    write_json(tmp_path / "ds.json", config)
    flags = ("--config", str(tmp_path / "ds.json"), "--steps", "2", "--set", f"train.precision={precision}")
    assert fork(tmp_path / "run", {"ranks": ranks}, flags=flags) == [[0] * ranks], said(tmp_path / "run")
    assert not dist.is_initialized()
    assert export.main([str(tmp_path / "run"), "--output", str(tmp_path / "model")]) == 0
    assert_same_files(tmp_path / "model", tmp_path / "run" / "hf")

    found, expected = load_file(tmp_path / "model" / "model.safetensors"), expected_weights(tmp_path / "run", stage)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32} and found.keys() <= expected.keys()
    expected = {name: expected[name][: len(tensor)] for name, tensor in found.items()}  # without the padded vocabulary
    if stage == 0 and precision == "bf16":  # DeepSpeed has no reader for this one
        assert all(torch.equal(tensor.bfloat16(), expected[name]) for name, tensor in found.items())
        name = "bert.encoder.layer.0.output.dense.weight"
        assert not torch.equal(found[name], expected[name].float())  # the master weights, not their bf16 copies
    else:
        assert all(torch.equal(tensor, expected[name].float()) for name, tensor in found.items())
    model, report = AutoModelForPreTraining.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values()) and model.dtype == torch.float32
    tied = model.cls.predictions.decoder.weight
    assert tied is model.bert.embeddings.word_embeddings.weight


def test_master_weights_of_fp16_in_stage_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's safe_get_full_fp32_param does not know them."""
    from deepspeed.runtime.fp16 import unfused_optimizer

    monkeypatch.setattr(unfused_optimizer, "dist", dist)  # DeepSpeed's own would compile collectives
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(3, 2).half()
        model.bias.requires_grad_(False)
        optimizer = unfused_optimizer.FP16_UnfusedOptimizer(torch.optim.AdamW([model.weight]))
        (master,) = optimizer.fp32_groups[0]
        with torch.no_grad():
            master += 1e-5  # too little for fp16
        weights = full_weights(SimpleNamespace(module=model, optimizer=optimizer))
    finally:
        dist.destroy_process_group()
    assert torch.equal(weights["weight"], master) and not torch.equal(weights["weight"], model.weight.float())
    assert torch.equal(weights["bias"], model.bias.float())


@pytest.mark.slow
def test_the_cards_snippets_run_where_the_folder_lies(finished: Path, tmp_path: Path) -> None:
    _, text = checked_card((finished / "hf" / "README.md").read_text(encoding="utf-8"))
    blocks = snippets(text)
    assert len(blocks) == 4 and str(finished) not in text
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=finished / "hf", env=environment | {"HF_MODULES_CACHE": str(tmp_path)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "torch.Size([2, 3, 32])" in done.stdout and "tensor([[" in done.stdout


def test_damaged_checkpoints_are_named_and_passed_over(run: Path, tmp_path: Path, capsys: Any) -> None:
    flip_a_bit(weights_of(run, 4))
    assert export.main([str(run), "--output", str(tmp_path / "model")]) == 0
    out, err = capsys.readouterr()
    assert f"(step 2 of {run})" in out.splitlines()[-2]
    assert "WARNING: checkpoint" in err and "step_00000004 is damaged" in err and "model.safetensors has changed" in err
    assert exported(tmp_path / "model")["step"] == 2
    card = (tmp_path / "model" / "README.md").read_text()
    assert "2 of 4 planned optimizer steps of 6 examples" in card and "after step 0" in card
    with pytest.raises(UserError, match="step_00000004 is damaged .* Give another --step"):
        export.main([str(run), "--step", "4", "--output", str(tmp_path / "other")])
    weights_of(run, 2).unlink()
    with pytest.raises(UserError, match="no whole checkpoint is left"):
        export.main([str(run), "--output", str(tmp_path / "other")])
    assert not (tmp_path / "other").exists() and exported(tmp_path / "model")["step"] == 2


def test_a_step_can_be_asked_for(run: Path, tmp_path: Path) -> None:
    assert export.main([str(run), "--step", "2", "--output", str(tmp_path / "model")]) == 0
    assert exported(tmp_path / "model")["step"] == 2
    assert exported(tmp_path / "model")["validation"].keys() == exported(run / "hf")["validation"].keys()
    with pytest.raises(UserError, match="--step 3: .* has checkpoints of steps 2, 4"):
        export.main([str(run), "--step", "3", "--output", str(tmp_path / "model")])


def test_checkpoints_may_rotate_away_meanwhile(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training process saves step 6 and deletes step 4 while that is being read."""
    folder, find_damage = run / "checkpoints", export.find_damage

    def rotate(path: Path, names: list[str]) -> str:
        damage = find_damage(path, names)
        if path.name == "step_00000004":
            path.rename(folder / "step_00000006")
        return damage

    monkeypatch.setattr(export, "find_damage", rotate)
    assert export.main([str(run), "--output", str(tmp_path / "model")]) == 0
    assert exported(tmp_path / "model")["step"] == 6
    (folder / "step_00000006").rename(folder / "step_00000004")
    with pytest.raises(UserError, match="--step 4: .* has checkpoints of steps 2, 6"):
        export.main([str(run), "--step", "4", "--output", str(tmp_path / "model")])


def test_only_exports_are_replaced_and_only_by_whole_ones(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    for other in (tmp_path / "notes", tmp_path / "notes" / "mine.txt", run, run / "model"):
        with pytest.raises(UserError, match="is not an export of this program"):
            export.main([str(run), "--output", str(other)])
    model = tmp_path / "model"
    model.mkdir()  # empty
    assert export.main([str(run), "--step", "2", "--output", str(model)]) == 0
    (tmp_path / "model").rename(tmp_path / ".model.old")  # as a process leaves it that is killed between two renames
    before = set(tmp_path.iterdir()) - {tmp_path / ".model.old"} | {model}
    with monkeypatch.context() as patch, pytest.raises(UserError, match="step 4 could not be written: No space left"):
        patch.setattr("safetensors.torch.save_file", Mock(side_effect=OSError("No space left")))
        export.main([str(run), "--output", str(model)])
    assert exported(model)["step"] == 2 and set(tmp_path.iterdir()) == before
    assert export.main([str(run), "--output", str(model)]) == 0
    assert exported(model)["step"] == 4 and set(tmp_path.iterdir()) == before


def test_folders_without_a_model_are_refused(run: Path, tmp_path: Path) -> None:
    output = ("--output", str(tmp_path / "model"))
    with pytest.raises(UserError, match=r"rum: is not a run folder .* Did you mean '.*/run'\?"):
        export.main([str(tmp_path / "rum"), *output])
    (run / "model").rename(run / "other")
    with pytest.raises(UserError, match="model: is missing"):
        export.main([str(run), *output])
    (run / "other").rename(run / "model")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match="has no checkpoint yet"):
        export.main([str(run), *output])


def test_rows_that_pad_the_vocabulary_are_left_out(run: Path, tmp_path: Path) -> None:
    replace_weights(run, 4, lambda rows: torch.cat([rows, torch.ones_like(rows[:5])]))
    assert export.main([str(run), "--output", str(tmp_path / "model")]) == 0
    assert_same_files(tmp_path / "model", run / "hf")
    replace_weights(run, 4, lambda rows: rows[:200])
    with pytest.raises(UserError, match="word_embeddings.weight: has .* rows, but config.json says vocab_size"):
        export.main([str(run), "--output", str(tmp_path / "model")])


@pytest.fixture(scope="module")
def stopped(fork: Fork, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed, went on, and was asked to stop after step 3 of 4."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    assert fork(folder, {"accident": "killed in a step", "step": 2}, flags=MILESTONES) == [[-9]]
    assert exported(folder / "hf")["step"] == 2  # the milestone
    assert fork(folder, {"accident": "SIGTERM", "step": 2}, flags=MILESTONES) == [[0]]
    return folder


def test_stopping_refreshes_the_export(stopped: Path, tmp_path: Path) -> None:
    assert exported(stopped / "hf")["step"] == 3
    assert "3 of 4 planned optimizer steps of 6 examples" in (stopped / "hf" / "README.md").read_text()
    assert export.main([str(stopped), "--output", str(tmp_path / "model")]) == 0
    assert_same_files(tmp_path / "model", stopped / "hf")


def test_full_disk_at_a_milestone_keeps_the_run_alive(fork: Fork, tmp_path: Path) -> None:
    assert fork(tmp_path / "run", {"accident": "full disk", "step": 2}, flags=MILESTONES) == [[0]]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "WARNING: " in log and "the export of step 2 could not be written" in log
    assert exported(tmp_path / "run" / "hf")["step"] == 4 and complete_steps(tmp_path / "run" / "checkpoints") == [4]


def test_a_run_in_training_is_exported_but_not_finished(stopped: Path, tmp_path: Path) -> None:
    with locked(stopped):  # as a training process does
        assert lock_holder(stopped) is not None
        with pytest.raises(UserError, match="is being trained"):
            export.main([str(stopped), "--finish"])
        assert export.main([str(stopped), "--output", str(tmp_path / "model")]) == 0


def test_a_run_is_finished_early(fork: Fork, stopped: Path, tmp_path: Path, tiny_bert: Path, capsys: Any) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    folder = tmp_path / "run"
    flip_a_bit(folder / "hf" / "model.safetensors")
    assert lock_holder(folder) is None
    assert export.main([str(folder), "--finish"]) == 0
    assert "is finished at step 3" in capsys.readouterr().out.splitlines()[-2]
    assert_same_files(folder / "hf", stopped / "hf")
    assert status(folder) == ("finished at step 3", True) and not (folder / "STOPPED").exists()
    assert json.loads((folder / "DONE").read_text())["step"] == 3
    assert export.main([str(folder), "--finish"]) == 0 and "already finished at step 3" in capsys.readouterr().out
    shutil.copytree(tiny_bert, tmp_path / "moved")  # the same model at another place is the same run
    flags = (*MILESTONES, "--model", str(tmp_path / "moved"), "--set", "train.precision=fp32")
    assert fork(folder, flags=flags) == [[0]] and "already finished at step 3" in said(folder)
    config = read_json(tmp_path / "moved" / "config.json") | {"hidden_dropout_prob": 0.2}
    write_json(tmp_path / "moved" / "config.json", config)
    assert fork(folder, flags=flags) == [[2]] and "fingerprint of model.checkpoint was" in said(folder)


def test_a_fresh_start_in_an_old_folder_describes_the_new_model(fork: Fork, tmp_path: Path) -> None:
    """The first attempt is killed before it saves; the second one has another number of facets."""
    folder = tmp_path / "run"
    assert fork(folder, {"accident": "killed in a step", "step": 1}, flags=("--set", "model.num_facets=2")) == [[-9]]
    assert read_json(folder / "model" / "config.json")["num_facets"] == 2
    assert fork(folder, flags=("--steps", "2")) == [[0]], said(folder)
    model, report = AutoModelForPreTraining.from_pretrained(folder / "hf", output_loading_info=True)
    assert model.config.num_facets == 3 and not any(report.values())
