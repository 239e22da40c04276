"""Two ranks, under every ZeRO stage, give the numbers of one rank that takes as many micro-batches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.run import COMMAND, main, run
from finetune.store.results import Store
from multicls.files import read_json, write_json
from tests.finetune.heads.test_isobn import assert_ranks_are_one_batch
from tests.finetune.train.rank_cases import CASES, settings_of
from tests.processes import free_ports

pytestmark = pytest.mark.launcher


@pytest.fixture(scope="module")
def checkpoint(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny BERT, and beside it the same without dropout."""
    folder = tmp_path_factory.mktemp("models") / "bert"
    for copy in (folder, folder.with_name("bert_without_dropout")):
        shutil.copytree(tiny_bert, copy)
    config = read_json(copy / "config.json")
    write_json(copy / "config.json", config | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
    return folder


@pytest.fixture(scope="module")
def launched(checkpoint: Path, glue: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    torchrun = [
        str(Path(sys.executable).with_name("torchrun")),
        "--nproc_per_node",
        "2",
        f"--master_port={free_ports(1)[0]}",
    ]
    script = str(Path(__file__).with_name("rank_cases.py"))
    command = [*torchrun, script, str(checkpoint), str(glue), str(folder)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(done.stdout.count(f"{name} done on rank") == 2 for name in CASES)
    assert done.stdout.count("already finished") == len(CASES), "told once"
    assert done.stdout.count(" ended on rank") == done.stdout.count(" resumed on rank") == 2 * 3, done.stdout
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_same_numbers_as_one_rank(name: str, launched: Path, checkpoint: Path, glue: Path, tmp_path: Path) -> None:
    run(settings_of(name, str(checkpoint), str(glue), str(tmp_path), several=False))
    alone, together = Store(tmp_path).records(), Store(launched / name).records()
    assert len(alone) == len(together) == (2 if name == "cln" else 1)
    for one, two in zip(alone, together, strict=True):
        assert (one["ranks"], two["ranks"]) == (1, 2)
        assert [point[1] for point in two["history"]] == pytest.approx([point[1] for point in one["history"]], rel=2e-3)
        assert two["best_step"] == one["best_step"]
        expected, found = predictions(tmp_path, one), predictions(launched / name, two)
        assert sorted(expected) == sorted(found)
        for key in expected:
            np.testing.assert_allclose(found[key], expected[key], rtol=1e-2, atol=2e-2 * scale(expected[key]))


def predictions(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in Store(folder).predictions(record["run_id"]).items() if v.dtype.kind == "f"}


def scale(values: Any) -> float:
    return float(np.abs(values).max())


@pytest.mark.slow
def test_normalisation_takes_the_rows_of_both_ranks_for_one_batch(launched: Path) -> None:
    assert_ranks_are_one_batch(launched)


@pytest.mark.slow
def test_the_model_saved_under_zero_3_is_whole(launched: Path, glue: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    import finetune.heads.registration  # noqa: F401  # the auto classes know the model

    (record,) = Store(launched / "zero3").records()
    folder = launched / "zero3" / "models" / record["run_id"]
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    texts = [line.split("\t")[0] for line in (glue / "SST-2" / "dev.tsv").read_text(encoding="utf-8").splitlines()[1:]]
    with torch.no_grad():
        batch = AutoTokenizer.from_pretrained(folder)(texts, return_tensors="pt", padding=True)
        np.testing.assert_allclose(
            model(**batch).logits, Store(launched / "zero3").predictions(record["run_id"])["logits"], atol=1e-5
        )


def test_the_deepspeed_launcher_and_run_py_leave_each_other_s_arguments_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The launcher reads abbreviations of its own options behind the script's name, and appends --local_rank."""
    from deepspeed.launcher.runner import parse_args

    flags = [f"--{flag}" for flag in COMMAND.flags]
    ours = [word for flag in flags if flag not in ("--help", "--local_rank") for word in (flag, "1")]
    parsed = parse_args(["--num_gpus", "2", "finetune/run.py", *ours])
    assert parsed.num_gpus == 2 and parsed.user_args == ours
    assert main(["--model", "m", "--task", "rte", "--head", "cls", "--print_config", "--local_rank=1"]) == 0
    assert "local_rank" not in capsys.readouterr().out
