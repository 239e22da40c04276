"""pretrain/run.py as users launch it: ranks, resume, export, and mistakes answered before anything is written."""

import math
import os
import re
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForPreTraining, AutoTokenizer

import multicls.modeling_multicls  # noqa: F401  (registers the model)
from multicls.files import read_json, write_json
from tests.pretrain.conftest import Fork, Launch, logs, losses, records
from tests.processes import free_ports

pytestmark = pytest.mark.launcher


@pytest.fixture(scope="module")
def finished(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank, which accumulates the two micro-batches of every step. The launcher's port is taken."""
    folder = tmp_path_factory.mktemp("pretrain") / "run"
    with socket.create_server(("127.0.0.1", 0)) as taken, patch.dict(os.environ, WORLD_SIZE="1"):
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
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
    hf = finished / "hf"
    model, found = AutoModelForPreTraining.from_pretrained(hf, output_loading_info=True)
    assert type(model).__name__ == "MultiClsForPreTraining" and not any(found.values())
    tokens = AutoTokenizer.from_pretrained(hf)("a").tokens()
    assert tokens[1:4] == ["[unused0]", "[unused1]", "[unused2]"]


def test_finished_run_is_left_alone(fork: Fork, finished: Path) -> None:
    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}

    before = times()
    assert fork(finished) == [[0]] and "already finished at step 8" in logs(finished)
    can_recall = (finished / "probe.json").exists()
    assert (f"first_look.py {finished}" in logs(finished)) == can_recall
    assert times() == before


# The names do not resolve: with --no_ssh only their order matters.
HOSTS = "# host  slots\nfirst.cluster.invalid slots=1\nsecond.cluster.invalid slots=1\n"
MASTER = "--node_rank={node} --master_addr=127.0.0.1 --master_port={port}"
TORCHRUN = f"torchrun --nnodes=2 --nproc_per_node=1 {MASTER}"
DEEPSPEED = f"deepspeed --hostfile=hosts --no_ssh {MASTER}"


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "workers"), [(TORCHRUN, "0"), (DEEPSPEED, "1")])
def test_two_nodes_give_the_same_curve(
    launcher: str, workers: str, launch: Launch, finished: Path, tmp_path: Path
) -> None:
    """Without SLURM, as docs/clusters.md starts them: a launcher on each node, here two on this machine."""
    run, (port,) = tmp_path / "run", free_ports(1)
    (tmp_path / "hosts").write_text(HOSTS)

    def start(node: int) -> Any:
        command = launcher.format(node=node, port=port).split()
        return launch(run, "--data.num_workers", workers, launcher=command)

    with ThreadPoolExecutor() as nodes:
        first, second = nodes.map(start, range(2))
    output = "\n".join([first.stdout, first.stderr, second.stdout, second.stderr])
    assert first.returncode == second.returncode == 0, output
    assert "x 2 ranks x 1 accumulation" in output
    for split in ("train", "validation"):
        for ours, theirs in zip(losses(run, split), losses(finished, split), strict=True):
            assert len(theirs) == 5 and ours == pytest.approx(theirs, rel=1e-5)


def test_another_seed_gives_another_curve(fork: Fork, finished: Path, tmp_path: Path) -> None:
    """The control of the comparisons above."""
    assert fork(tmp_path / "run", flags=("--seed", "2")) == [[0]], logs(tmp_path / "run")
    ours, theirs = (losses(folder, "train")[0] for folder in (tmp_path / "run", finished))
    assert ours["loss/mlm"] != pytest.approx(theirs["loss/mlm"], rel=1e-4)


def test_the_run_s_own_recipe_is_the_same_run(fork: Fork, tmp_path: Path) -> None:
    """It states the length in steps, however it was set."""
    folder = tmp_path / "run"
    flags = ("--epochs", "0.01", "--data.source_weights", "text=2")
    assert fork(folder, flags=flags) == [[0]], logs(folder)
    assert re.search(r"(\d+) documents held out, \1 examples", logs(folder)), "not twice"
    assert fork(folder, flags=("--recipe", str(folder / "settings.yaml"))) == [[0]], logs(folder)
    assert "already finished at step" in logs(folder)
    assert fork(folder, flags=("--steps", "99")) == [[2]] and "is now 99" in logs(folder)
    (folder / "hf").rename(tmp_path / "mine")
    shutil.rmtree(folder / "checkpoints")  # a finished run needs neither them nor the base
    assert fork(folder, flags=("--model", "gone")) == [[0]], logs(folder)
    assert f"next: python pretrain/export.py {folder} --output" in logs(folder)


def test_others_are_refused(fork: Fork, finished: Path, tmp_path: Path, tiny_corpus: Path) -> None:
    config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}
    write_json(tmp_path / "same.json", config)
    write_json(tmp_path / "other.json", config | {"fp16": {"loss_scale_window": 9}})
    assert fork(finished, flags=("--config", str(tmp_path / "same.json"))) == [[0]], logs(finished)
    corpus = shutil.copytree(tiny_corpus, tmp_path / "corpus")
    write_json(corpus / "manifest.json", read_json(corpus / "manifest.json") | {"made": "again"})
    flags = ("--config", str(tmp_path / "other.json"), "--model.num_facets", "2")
    assert fork(finished, flags=(*flags, "--corpus", str(corpus))) == [[2]]
    assert "manifest of the corpus was" in logs(finished)
    assert "model.num_facets was 3 and is now 2" in logs(finished)
    assert "fp16.loss_scale_window was None and is now 9" in logs(finished)


@pytest.mark.parametrize("name", ["model", "hf"])
def test_folders_of_the_user_are_not_replaced(fork: Fork, tmp_path: Path, name: str) -> None:
    file = tmp_path / "run" / name / "weights.bin"
    file.parent.mkdir(parents=True)
    file.touch()
    assert fork(tmp_path / "run") == [[2]]
    assert f"run/{name}: was written by no run" in logs(tmp_path / "run") and file.exists()


@pytest.fixture
def wrong(tiny_bert: Path, tmp_path: Path) -> Path:
    """A folder with a model and a DeepSpeed file that do not fit."""
    shutil.copytree(tiny_bert, tmp_path / "swapped")
    tokenizer = read_json(tiny_bert / "tokenizer.json")
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [word for word in vocabulary if word.isalpha()][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    write_json(tmp_path / "swapped" / "tokenizer.json", tokenizer)
    write_json(tmp_path / "zero0.json", {"zero_optimization": {"stage": 0}})
    write_json(tmp_path / "typo.json", {"zero_optimization": {"stage": 2, "reduce_bucket": 1}})
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--corpus nowhere", "nowhere"),
        ("--config ds_configs/zero22.json", "ds_configs/zero2"),
        ("--config {}/zero0.json", "takes 1, 2 or 3"),
        ("--config {}/typo.json", "reduce_bucket"),
        ("--model {}/nowhere", "nowhere: no such folder"),
        ("--model {}/swapped", "another tokenizer"),
        ("--data.seq_length 65", "64 at most"),
    ],
)
def test_mistakes_are_answered_before_anything_is_written(
    fork: Fork, wrong: Path, tmp_path: Path, flags: str, message: str
) -> None:
    assert fork(tmp_path / "run", flags=tuple(flags.format(wrong).split())) == [[2]]
    assert message in logs(tmp_path / "run") and "Traceback" not in logs(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_trace_of_some_steps(fork: Fork, tmp_path: Path) -> None:
    """Chrome's trace format, which Perfetto and TensorBoard open; a place that cannot be written is one line."""
    run, flags = tmp_path / "run", ("--steps", "6", "--run.profile", "2")
    run.mkdir()
    (run / "profile").touch()
    assert fork(run, flags=flags) == [[2]] and "Traceback" not in logs(run)
    assert "error: run.profile: " in logs(run) and "profile: cannot be written: File" in logs(run)
    (run / "profile").unlink()
    assert fork(run, {"ranks": 2}, flags=flags) == [[0, 0]], logs(run)
    (trace,) = (run / "profile").glob("*.pt.trace.json")
    names = {event.get("name") for event in read_json(trace)["traceEvents"]}
    assert {f"ProfilerStep#{n}" for n in (1, 2)} == {n for n in names if "ProfilerStep" in str(n)}
    assert "aten::linear" in names


def test_weights_that_no_loss_reaches_stay(fork: Fork, tmp_path: Path, tiny_bert: Path) -> None:
    """And a model without facets is recommended a head that it has."""
    run = tmp_path / "run"
    flags = ("--recipe", "mlm_only", "--model.random_weights", "false", "--steps", "4")
    assert fork(run, flags=flags) == [[0]], logs(run)
    assert "finetune/compare.py" in logs(run) and "multicls " not in logs(run)
    names = {name for name in records(run, "train")[0] if name.startswith(("loss/", "acc/"))}
    assert names == {"loss/total", "loss/mlm", "acc/mlm"}
    trained = AutoModelForPreTraining.from_pretrained(run / "hf").state_dict()
    start = AutoModelForPreTraining.from_pretrained(tiny_bert).state_dict()
    pooler, moved = "pooler.dense.weight", "encoder.layer.0.output.dense.weight"
    kept = trained[f"multicls.encoder.{pooler}"]
    assert torch.equal(kept, start[f"bert.{pooler}"])  # weight decay has not worn it away
    assert not torch.equal(trained[f"multicls.encoder.{moved}"], start[f"bert.{moved}"])
