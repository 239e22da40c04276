"""pretrain/run.py as users launch it: ranks, resume, export, and mistakes answered before anything is written."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForPreTraining, AutoTokenizer, GPT2Config

import multicls.modeling_multicls  # noqa: F401  (registers the model)
from tests.pretrain.conftest import Fork, Launch, losses, records, said
from tests.processes import free_ports

pytestmark = pytest.mark.launcher


@pytest.fixture(scope="module")
def finished(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank, which accumulates the two micro-batches of every step."""
    folder = tmp_path_factory.mktemp("pretrain") / "run"
    done = launch(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_run_folder_and_export(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    files = {"settings.yaml", "ds_config.json", "env.json", "metrics.jsonl", "DONE"}
    assert names == files | {"tb", "hf", "model", "checkpoints"}
    checkpoints = sorted(path.parent.name for path in (finished / "checkpoints").glob("*/COMPLETE"))
    assert checkpoints == ["step_00000004", "step_00000008"]
    train, validation = losses(finished, "train"), losses(finished, "validation")
    assert [line["step"] for line in records(finished, "train")] == list(range(1, 9))
    assert [line["step"] for line in records(finished, "validation")] == [0, 4, 8]
    assert all(len(line) == 5 and all(map(math.isfinite, line.values())) for line in train)
    assert validation[-1]["loss/total"] < validation[0]["loss/total"]
    model, found = AutoModelForPreTraining.from_pretrained(
        finished / "hf", output_loading_info=True
    )
    assert type(model).__name__ == "MultiClsForPreTraining" and not any(found.values())
    tokens = AutoTokenizer.from_pretrained(finished / "hf")("a").tokens()
    assert tokens[1:4] == ["[unused0]", "[unused1]", "[unused2]"]


def test_finished_run_is_left_alone(fork: Fork, finished: Path) -> None:
    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}

    before = times()
    assert fork(finished) == [[0]] and "already finished at step 8" in said(finished)
    assert times() == before


@pytest.mark.slow
def test_two_ranks_give_the_same_curve(launch: Launch, finished: Path, tmp_path: Path) -> None:
    """Each rank has two loader processes instead of one."""
    deepspeed = ("deepspeed", "--num_gpus", "2", f"--master_port={free_ports(1)[0]}")
    done = launch(tmp_path / "run", "--data.num_workers", "2", launcher=deepspeed)
    assert done.returncode == 0, done.stdout + done.stderr
    for split in ("train", "validation"):
        for one, two in zip(losses(finished, split), losses(tmp_path / "run", split), strict=True):
            assert two == pytest.approx(one, rel=1e-5)


def test_another_seed_gives_another_curve(fork: Fork, finished: Path, tmp_path: Path) -> None:
    """The control of the comparisons above."""
    assert fork(tmp_path / "run", flags=("--seed", "2")) == [[0]], said(tmp_path / "run")
    ours, theirs = (losses(folder, "train")[0] for folder in (tmp_path / "run", finished))
    assert ours["loss/mlm"] != pytest.approx(theirs["loss/mlm"], rel=1e-4)


def test_the_run_s_own_recipe_is_the_same_run(fork: Fork, tmp_path: Path) -> None:
    """It states the length in steps, however it was set."""
    folder = tmp_path / "run"
    assert fork(folder, flags=("--epochs", "0.01")) == [[0]], said(folder)
    assert fork(folder, flags=("--recipe", str(folder / "settings.yaml"))) == [[0]], said(folder)
    assert "already finished at step" in said(folder)
    assert fork(folder, flags=("--steps", "99")) == [[2]] and "is now 99" in said(folder)
    shutil.rmtree(
        folder / "checkpoints"
    )  # a finished run needs neither them nor the base checkpoint
    assert fork(folder, flags=("--model", "gone")) == [[0]], said(folder)


def test_resume_refuses_another_run(fork: Fork, finished: Path, tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}
    (tmp_path / "same.json").write_text(json.dumps(config))
    (tmp_path / "other.json").write_text(json.dumps(config | {"gradient_predivide_factor": 2.0}))
    assert fork(finished, flags=("--config", str(tmp_path / "same.json"))) == [[0]], said(finished)
    flags = ("--config", str(tmp_path / "other.json"), "--model.num_facets", "2")
    assert fork(finished, flags=flags) == [[2]]
    assert "model.num_facets was 3 and is now 2" in said(finished)
    assert "gradient_predivide_factor was None and is now 2.0" in said(finished)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--corpus", "nowhere"], "nowhere"),
        (["--config", "ds_configs/zero22.json"], "ds_configs/zero2"),
        (["--recipe", "pretrain/recipes/tinny.yaml"], "Did you mean 'tiny'?"),
    ],
)
def test_mistakes_are_answered_before_anything_is_written(
    launch: Launch, tmp_path: Path, flags: list[str], message: str
) -> None:
    done = launch(tmp_path / "run", *flags)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def write_gpt2(folder: Path, tiny_bert: Path) -> None:
    GPT2Config(n_layer=1).save_pretrained(folder)


def swap_two_words(folder: Path, tiny_bert: Path) -> None:
    shutil.copytree(tiny_bert, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [word for word in vocabulary if word.isalpha()][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("make", "flags", "message"),
    [
        (lambda folder, tiny_bert: None, (), "model: no such folder"),
        (write_gpt2, (), "model_type 'gpt2'"),  # before its weights are looked for
        (swap_two_words, (), "another tokenizer wrote its tokens"),
        (
            lambda folder, tiny: shutil.copytree(tiny, folder),
            ("--data.seq_length", "65"),
            "most 64",
        ),
    ],
)
def test_models_that_do_not_fit(
    fork: Fork,
    tiny_bert: Path,
    tmp_path: Path,
    make: Callable[[Path, Path], None],
    flags: tuple[str, ...],
    message: str,
) -> None:
    make(tmp_path / "model", tiny_bert)
    assert fork(tmp_path / "run", flags=("--model", str(tmp_path / "model"), *flags)) == [[2]]
    assert message in said(tmp_path / "run") and "Traceback" not in said(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stage": 0}}, "pretraining takes 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket": 1}}, "reduce_bucket"),
    ],
)
def test_bad_deepspeed_json(
    fork: Fork, tmp_path: Path, config: dict[str, object], message: str
) -> None:
    (tmp_path / "bad.json").write_text(json.dumps(config))
    assert fork(tmp_path / "run", flags=("--config", str(tmp_path / "bad.json"))) == [[2]]
    assert message in said(tmp_path / "run") and "Traceback" not in said(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_objective_leaves_the_weights_it_does_not_reach(
    fork: Fork, tmp_path: Path, tiny_bert: Path
) -> None:
    """And a model without facets is recommended a head that it has."""
    run = tmp_path / "run"
    flags = ("--recipe", "mlm_only", "--model.random_weights", "false", "--steps", "4")
    assert fork(run, flags=flags) == [[0]], said(run)
    assert "--head mean" in said(run) and "multicls " not in said(run)
    trained = AutoModelForPreTraining.from_pretrained(run / "hf").state_dict()
    start = AutoModelForPreTraining.from_pretrained(tiny_bert).state_dict()
    pooler, moved = "pooler.dense.weight", "encoder.layer.0.output.dense.weight"
    kept = trained[f"multicls.encoder.{pooler}"]
    assert torch.equal(kept, start[f"bert.{pooler}"])  # weight decay has not worn it away
    assert not torch.equal(trained[f"multicls.encoder.{moved}"], start[f"bert.{moved}"])
