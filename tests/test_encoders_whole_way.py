"""The whole way of other encoders than BERT: text, pretraining, a folder that stands alone, fine-tuning, prediction.

With `MULTICLS_ENCODERS=all` in the environment it takes five encoders instead of two.
"""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.encoders import WORDS, save_encoder

REPOSITORY = Path(__file__).parents[1]
LABELS = [("bal", "yes"), ("gol", "no")]
KINDS = ["modernbert", "xlm-roberta"]  # byte-level BPE, pieces of SentencePiece
if os.environ.get("MULTICLS_ENCODERS") == "all":
    KINDS += ["mpnet", "deberta-v2", "distilbert"]
PRETRAINING = (
    "--steps 6 --model.num_facets 2 --data.seq_length 40 --data.num_workers 0 --data.validation_fraction 0.2 "
    "--global_batch_size 4 --micro_batch_size 2 --train.negatives_group 2 --learning_rate 1e-3 --run.eval_examples 4"
)
FINE_TUNING = "--head multicls --epochs 2 --batch_size 8 --max_length 24 --save_model"
ALONE = """
import sys, torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer
from transformers import AutoModelForSequenceClassification

folder, texts = sys.argv[1], ["bal del fil", "gol", "nar pel ros tun sil kor"]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
inputs = tokenizer(texts, padding=True, return_tensors="pt")
padded = tokenizer(texts, padding="max_length", max_length=40, return_tensors="pt")
kinds = (AutoModelForMaskedLM, AutoModelForPreTraining, AutoModelForSequenceClassification, AutoModel)
with torch.no_grad():
    for kind in kinds:
        model, report = kind.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
        new = {name.split(".")[0] for name in report["missing_keys"]}
        assert not report["unexpected_keys"] and new <= {"classifier", "facet_bias"}, report
        out = model.eval()(**inputs)
    facets, alone = out.facet_embeddings, model(**tokenizer(texts[1], return_tensors="pt")).facet_embeddings
    torch.testing.assert_close(model(**padded).facet_embeddings, facets, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone[0], facets[1], rtol=1e-4, atol=1e-5)
    padded["attention_mask"][:] = 1  # the control
    assert (model(**padded).facet_embeddings - facets).abs().max() > 1e-4
assert facets.shape == (3, 2, 32) and "multicls" not in sys.modules
"""


def run(*words: object, cwd: Path = REPOSITORY, isolated: bool = False) -> str:
    """Runs Python with the words; returns what it printed."""
    flags = ["-I"] if isolated else []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *flags, *map(str, words)]
    ran = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, f"{' '.join(command)}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def write_texts(path: Path) -> None:
    """Writes 24 documents of 24 sentences each, as JSON lines."""
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(24):
            words = [rng.sample(WORDS, rng.randint(4, 9)) for _ in range(24)]
            text = " ".join(" ".join(sentence).capitalize() + "." for sentence in words)
            file.write(json.dumps({"text": text}) + "\n")


def write_rows(path: Path, count: int, seed: int) -> None:
    """Writes rows whose label is the first word's."""
    rng = random.Random(seed)
    rows = [
        (" ".join([first, *rng.sample(WORDS, 4)]), label) for first, label in LABELS * (count // 2)
    ]
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
    run("-c", ALONE, exported, cwd=tmp_path, isolated=True)

    write_rows(tmp_path / "train.csv", 120, seed=0)
    write_rows(tmp_path / "new.csv", 20, seed=1)
    rows = ["--train_file", tmp_path / "train.csv", "--output_dir", tmp_path / "results"]
    run("finetune/run.py", "--model", exported, *rows, *FINE_TUNING.split())
    (saved,) = (tmp_path / "results").glob("*/*/*/model")
    labelled = tmp_path / "labelled.csv"
    run("finetune/predict.py", saved, tmp_path / "new.csv", "--output", labelled)
    predicted = list(csv.DictReader(labelled.open()))
    assert len(predicted) == 20
