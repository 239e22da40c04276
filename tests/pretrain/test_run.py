"""pretrain/run.py as users launch it: ranks, resume, export, and mistakes answered before anything is written."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForPreTraining, AutoTokenizer

from tests.pretrain.conftest import Launch, records, weights

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


def test_finished_run_is_left_alone(launch: Launch, finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    again = launch(finished)
    assert again.returncode == 0 and "already finished at step 8" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()} == before


def test_two_ranks_give_the_same_curve(launch: Launch, finished: Path, tmp_path: Path) -> None:
    done = launch(tmp_path / "run", launcher=("deepspeed", "--num_gpus", "2", "--master_port", "29617"))
    assert done.returncode == 0, done.stdout + done.stderr
    for split in ("train", "validation"):
        for one, two in zip(records(finished, split), records(tmp_path / "run", split), strict=True):
            assert {name: two[name] for name in LOSSES} == pytest.approx({name: one[name] for name in LOSSES}, rel=1e-5)


def test_zero_3_gives_the_same_curve(launch: Launch, finished: Path, tmp_path: Path) -> None:
    """And the same export. The other stages: test_ds_configs.py."""
    done = launch(tmp_path / "run", "--config", "ds_configs/zero3.json")
    assert done.returncode == 0, done.stdout + done.stderr
    for ours, theirs in zip(records(tmp_path / "run"), records(finished), strict=True):
        assert {name: ours[name] for name in LOSSES} == pytest.approx({name: theirs[name] for name in LOSSES}, rel=1e-5)
    exported, expected = (AutoModelForPreTraining.from_pretrained(f / "hf") for f in (tmp_path / "run", finished))
    for name, tensor in exported.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=1e-3, atol=1e-5)


def test_another_seed_gives_another_curve(launch: Launch, finished: Path, tmp_path: Path) -> None:
    """The control of the comparisons above."""
    done = launch(tmp_path / "run", "--seed", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert records(tmp_path / "run")[0]["loss/mlm"] != pytest.approx(records(finished)[0]["loss/mlm"], rel=1e-4)


def test_resumes_to_the_same_bits(launch: Launch, finished: Path, tmp_path: Path) -> None:
    """As if killed after step 6: the checkpoint of step 4, metrics up to step 6, a torn checkpoint of step 8."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "DONE").unlink()
    shutil.rmtree(folder / "hf")
    (folder / "checkpoints" / "step_00000008" / "COMPLETE").unlink()
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(line for line in metrics if json.loads(line)["step"] <= 6) + "\n")
    done = launch(folder, launcher=("torchrun", "--master_port", "29618"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming from step 4" in done.stdout
    assert weights(folder) == weights(finished)
    for split in ("train", "validation"):
        once, resumed = records(finished, split), records(folder, split)
        assert [{name: r[name] for name in ("step", *LOSSES)} for r in resumed] == [
            {name: r[name] for name in ("step", *LOSSES)} for r in once
        ]


def test_resume_refuses_another_run(launch: Launch, finished: Path) -> None:
    done = launch(finished, "--learning_rate", "5e-4", "--set", "model.num_facets=2")
    assert done.returncode == 2
    assert "train.learning_rate was 0.001 and is now 0.0005" in done.stderr
    assert "model.num_facets was 3 and is now 2" in done.stderr
    done = launch(finished, "--resume", "never")
    assert done.returncode == 2 and "holds a run already" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "train.lerning_rate=1"], "Did you mean 'train.learning_rate'?"),
        (["--corpus", "nowhere"], "nowhere"),
        (["--model", "nowhere"], "model nowhere: cannot be loaded"),
        (["--config", "ds_configs/zero22.json"], "ds_configs/zero2"),
        (["--recipe", "pretrain/recipes/tinny.yaml"], "pretrain/recipes/tiny.yaml"),
        (["--micro_batches", "0"], "train.micro_batches = 0"),
        (["--set", "data.seq_length=65"], "tiny_bert0 has 64 positions"),
    ],
)
def test_mistakes_are_answered_before_anything_is_written(
    launch: Launch, tmp_path: Path, flags: list[str], message: str
) -> None:
    done = launch(tmp_path / "run", *flags)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_bad_deepspeed_json(launch: Launch, tmp_path: Path) -> None:
    config = {"zero_optimisation": {"stage": 2}, "train_batch_size": 77}
    (tmp_path / "bad.json").write_text(json.dumps(config))
    done = launch(tmp_path / "run", "--config", "bad.json")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "zero_optimization" in done.stderr and "77" in done.stderr
    assert not (tmp_path / "run").exists()


def test_tokenizer_that_does_not_match_the_shards(launch: Launch, tiny_bert: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_bert, tmp_path / "other")
    tokenizer = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [word for word in vocabulary if word.isalpha()][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "other" / "vocab.txt").unlink(missing_ok=True)
    done = launch(tmp_path / "run", "--model", str(tmp_path / "other"))
    assert done.returncode == 2 and "another tokenizer" in done.stderr
    assert not (tmp_path / "run").exists()


def test_number_of_workers_changes_nothing(launch: Launch, finished: Path, tmp_path: Path) -> None:
    done = launch(tmp_path / "run", "--set", "data.num_workers=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights(tmp_path / "run") == weights(finished)


def test_no_objective_leaves_the_weights_it_does_not_reach(launch: Launch, tmp_path: Path, tiny_bert: Path) -> None:
    done = launch(tmp_path / "run", "--recipe", "pretrain/recipes/mlm_only.yaml", "--set", "model.random_weights=false")
    assert done.returncode == 0, done.stdout + done.stderr
    trained = AutoModelForPreTraining.from_pretrained(tmp_path / "run" / "hf").state_dict()
    start = AutoModelForPreTraining.from_pretrained(tiny_bert).state_dict()
    for name in ("bert.pooler.dense.weight", "cls.seq_relationship.weight"):
        assert torch.equal(trained[name], start[name]), name  # weight decay has not worn them away
    moved = "bert.encoder.layer.0.output.dense.weight"
    assert not torch.equal(trained[moved], start[moved])
