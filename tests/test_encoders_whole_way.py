"""The whole way of two other encoders than BERT: own text, pretraining, fine-tuning, prediction."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.encoders import WORDS, save_encoder

REPOSITORY = Path(__file__).parents[1]
LABELS = [("bal", "yes"), ("gol", "no")]
KINDS = ["modernbert", "xlm-roberta"]  # byte-level BPE, pieces of SentencePiece
PRETRAINING = (
    "--steps 6 --model.num_facets 2 --data.seq_length 40 --data.num_workers 0 --data.validation_fraction 0.2 "
    "--global_batch_size 4 --micro_batch_size 2 --train.negatives_group 2 --learning_rate 1e-3 --run.eval_examples 4"
)
FINE_TUNING = "--head multicls --epochs 2 --batch_size 8 --max_length 24 --save_model"


def run(*words: object) -> None:
    """Runs Python with the words in the repository."""
    command = [sys.executable, *map(str, words)]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{' '.join(command)}\n{ran.stdout}\n{ran.stderr}"


def write_texts(path: Path) -> None:
    """Writes 24 documents of 24 sentences each, as JSON lines."""
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(24):
            words = [rng.sample(WORDS, rng.randint(4, 9)) for _ in range(24)]
            text = " ".join(" ".join(sentence).capitalize() + "." for sentence in words)
            file.write(json.dumps({"text": text}) + "\n")


def write_rows(path: Path, count: int) -> None:
    """Writes rows whose label is the first word's."""
    rng = random.Random(count)
    firsts = LABELS * (count // 2)
    rows = [(" ".join([first, *rng.sample(WORDS, 4)]), label) for first, label in firsts]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])


@pytest.mark.walk
@pytest.mark.parametrize("kind", KINDS)
def test_whole_way(kind: str, tmp_path: Path) -> None:
    start = save_encoder(kind, tmp_path / "start")
    write_texts(tmp_path / "texts.jsonl")
    corpus = ["--input", tmp_path / "texts.jsonl", "--output", tmp_path / "corpus"]
    run("data_prep/run.py", *corpus, "--tokenizer", start, "--workers", "1")
    model = ["--model", start, "--corpus", tmp_path / "corpus", "--output_dir", tmp_path / "run"]
    run("pretrain/run.py", "--config", "ds_configs/zero2.json", *model, *PRETRAINING.split())
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    losses = [record["loss/mlm"] for record in records if record["split"] == "validation"]
    assert losses[-1] < losses[0]
    exported = tmp_path / "run" / "hf"
    assert json.loads((exported / "config.json").read_text())["encoder"]["model_type"] == kind

    write_rows(tmp_path / "train.csv", 120)
    write_rows(tmp_path / "new.csv", 20)
    rows = ["--train_file", tmp_path / "train.csv", "--output_dir", tmp_path / "results"]
    run("finetune/run.py", "--model", exported, *rows, *FINE_TUNING.split())
    (saved,) = (tmp_path / "results").glob("*/*/*/model")
    labelled = tmp_path / "labelled.csv"
    run("finetune/predict.py", saved, tmp_path / "new.csv", "--output", labelled)
    assert len(list(csv.DictReader(labelled.open()))) == 20
