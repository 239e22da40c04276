"""pretrain/run.py as users launch it: ranks, resume, export, and mistakes answered before anything is written."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForPreTraining, AutoTokenizer, GPT2Config

import finetune.report
import finetune.run
from multicls.files import read_jsonl
from tests.pretrain.conftest import Fork, Launch, records, said
from tests.processes import free_ports

LOSSES = [f"loss/{name}" for name in ("total", "mlm", "tfidf", "so", "mcqt")]
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
    files = {"settings.yaml", "ds_config.json", "command.txt", "env.json", "log.txt", "metrics.jsonl"}
    assert names >= files | {"tb", "hf"}
    checkpoints = sorted(path.parent.name for path in (finished / "checkpoints").glob("*/COMPLETE"))
    assert checkpoints == ["step_00000004", "step_00000008"]
    train, validation = records(finished), records(finished, "validation")
    assert [line["step"] for line in train] == list(range(1, 9))
    assert [line["step"] for line in validation] == [0, 4, 8]
    assert all(math.isfinite(line[name]) for line in train + validation for name in LOSSES)
    assert validation[-1]["loss/total"] < validation[0]["loss/total"]
    model, found = AutoModelForPreTraining.from_pretrained(finished / "hf", output_loading_info=True)
    assert type(model).__name__ == "MultiClsBertForPreTraining" and not any(found.values())
    assert "AutoModel.from_pretrained" in (finished / "hf" / "README.md").read_text()
    tokens = AutoTokenizer.from_pretrained(finished / "hf")("a").tokens()
    assert tokens[1:4] == ["[unused0]", "[unused1]", "[unused2]"]


def test_text_to_report(finished: Path, glue: Path, tmp_path: Path) -> None:
    """The model of data preparation and pretraining is fine-tuned on its facets, and its score is in the report."""
    flags = ["--model", str(finished / "hf"), "--head", "multicls", "--task", "sst2", "--data_dir", str(glue)]
    flags += ["--train_size", "16", "--max_length", "32", "--max_steps", "2", "--output_dir", str(tmp_path)]
    assert finetune.run.main(flags) == 0
    finetune.report.main([str(tmp_path)])
    (record,) = read_jsonl(tmp_path / "results.jsonl")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "sst2" in page and f"{100 * record['score']:.2f}" in page


def test_finished_run_is_left_alone(fork: Fork, finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    assert fork(finished) == [[0]] and "already finished at step 8" in said(finished)
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_two_ranks_give_the_same_curve(launch: Launch, finished: Path, tmp_path: Path) -> None:
    """Each rank has two loader processes instead of one."""
    deepspeed = ("deepspeed", "--num_gpus", "2", f"--master_port={free_ports(1)[0]}")
    done = launch(tmp_path / "run", "--set", "data.num_workers=2", launcher=deepspeed)
    assert done.returncode == 0, done.stdout + done.stderr
    for split in ("train", "validation"):
        for one, two in zip(records(finished, split), records(tmp_path / "run", split), strict=True):
            assert {name: two[name] for name in LOSSES} == pytest.approx({name: one[name] for name in LOSSES}, rel=1e-5)


def test_zero_3_gives_the_same_curve(fork: Fork, finished: Path, tmp_path: Path) -> None:
    """The export is the same as well; test_ds_configs.py has the other stages."""
    assert fork(tmp_path / "run", flags=("--config", "ds_configs/zero3.json")) == [[0]], said(tmp_path / "run")
    for ours, theirs in zip(records(tmp_path / "run"), records(finished), strict=True):
        assert {name: ours[name] for name in LOSSES} == pytest.approx({name: theirs[name] for name in LOSSES}, rel=1e-5)
    exported, expected = (AutoModelForPreTraining.from_pretrained(f / "hf") for f in (tmp_path / "run", finished))
    for name, tensor in exported.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=1e-3, atol=1e-5)


def test_another_seed_gives_another_curve(fork: Fork, finished: Path, tmp_path: Path) -> None:
    """The control of the comparisons above."""
    assert fork(tmp_path / "run", flags=("--seed", "2")) == [[0]], said(tmp_path / "run")
    assert records(tmp_path / "run")[0]["loss/mlm"] != pytest.approx(records(finished)[0]["loss/mlm"], rel=1e-4)


def test_resume_refuses_another_run(fork: Fork, launch: Launch, finished: Path) -> None:
    assert fork(finished, flags=("--learning_rate", "5e-4", "--set", "model.num_facets=2")) == [[2]]
    assert "train.learning_rate was 0.001 and is now 0.0005" in said(finished)
    assert "model.num_facets was 3 and is now 2" in said(finished)
    done = launch(finished, "--resume", "never")
    assert done.returncode == 2 and "holds a run already" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "train.lerning_rate=1"], "Did you mean 'train.learning_rate'?"),
        (["--corpus", "nowhere"], "nowhere"),
        (["--config", "ds_configs/zero22.json"], "ds_configs/zero2"),
        (["--recipe", "pretrain/recipes/tinny.yaml"], "Did you mean 'tiny'?"),
        (["--global_batch_size", "0"], "--global_batch_size 0: must be greater than 0"),
        (["--global_batch_size", "4"], "give 3, or another train.negatives_group"),
        (["--set", "train.triples=4"], "train.triples is now train.negatives_group"),
        (["--micro_batches", "2"], "Did you mean '--global_batch_size 2'?"),
        (["--micro_batch_size", "4"], "train.micro_batch_size = 4 is no multiple of"),
    ],
)
def test_mistakes_are_answered_before_anything_is_written(
    launch: Launch, tmp_path: Path, flags: list[str], message: str
) -> None:
    done = launch(tmp_path / "run", *flags)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "nowhere"), "model nowhere: cannot be loaded"),
        (("--set", "data.seq_length=65"), "tiny_bert0 has 64 positions"),
    ],
)
def test_models_that_do_not_fit(fork: Fork, tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    assert fork(tmp_path / "run", flags=flags) == [[2]]
    assert message in said(tmp_path / "run") and "Traceback" not in said(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_kinds_of_model_are_named_before_their_weights_are_looked_for(fork: Fork, tmp_path: Path) -> None:
    GPT2Config(n_layer=1).save_pretrained(tmp_path / "gpt2")
    assert fork(tmp_path / "run", flags=("--model", str(tmp_path / "gpt2"))) == [[2]]
    assert "its model_type is 'gpt2'. What works: BERT" in said(tmp_path / "run")


def test_bad_deepspeed_json(launch: Launch, tmp_path: Path) -> None:
    config = {"zero_optimisation": {"stage": 2}, "train_batch_size": 77}
    (tmp_path / "bad.json").write_text(json.dumps(config))
    done = launch(tmp_path / "run", "--config", "bad.json")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "zero_optimization" in done.stderr and "77" in done.stderr
    assert not (tmp_path / "run").exists()


def test_tokenizer_that_does_not_match_the_shards(fork: Fork, tiny_bert: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_bert, tmp_path / "other")
    tokenizer = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [word for word in vocabulary if word.isalpha()][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "other" / "vocab.txt").unlink(missing_ok=True)
    assert fork(tmp_path / "run", flags=("--model", str(tmp_path / "other"))) == [[2]]
    assert "another tokenizer" in said(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_objective_leaves_the_weights_it_does_not_reach(fork: Fork, tmp_path: Path, tiny_bert: Path) -> None:
    flags = ("--recipe", "pretrain/recipes/mlm_only.yaml", "--set", "model.random_weights=false")
    assert fork(tmp_path / "run", flags=flags) == [[0]], said(tmp_path / "run")
    trained = AutoModelForPreTraining.from_pretrained(tmp_path / "run" / "hf").state_dict()
    start = AutoModelForPreTraining.from_pretrained(tiny_bert).state_dict()
    for name in ("bert.pooler.dense.weight", "cls.seq_relationship.weight"):
        assert torch.equal(trained[name], start[name]), name  # weight decay has not worn them away
    moved = "bert.encoder.layer.0.output.dense.weight"
    assert not torch.equal(trained[moved], start[moved])
