"""The whole way of other encoders than BERT: text, pretraining, a folder that stands alone, fine-tuning, prediction.

With `MULTICLS_ENCODERS=all` in the environment it takes all families of tests/encoders.py instead of two, trains each
with ZeRO 1 and 3 on two ranks as well, resumes them on one, and fine-tunes every head.
"""

import csv
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from multicls.files import REPOSITORY, read_json, read_jsonl
from tests.encoders import FAMILIES, save_encoder
from tests.finetune.conftest import sentiment_rows, write_tsv
from tests.processes import completed

ALL = os.environ.get("MULTICLS_ENCODERS") == "all"
KINDS = list(FAMILIES) if ALL else ["modernbert", "xlm-roberta"]  # BPE, pieces of SentencePiece
HEADS = ["cls", "mean", "multicls", "isobn", "hire", "cln"]
TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
PRETRAINING = (
    "--steps 6 --model.num_facets 2 --data.seq_length 40 --data.num_workers 0 --data.validation_fraction 0.2 "
    "--global_batch_size 4 --micro_batch_size 2 --train.negatives_group 2 --learning_rate 3e-3 --run.eval_examples 20"
)
FINE_TUNING = "--systems tuned-multicls --epochs 2 --max_length 24 --repeats 1"
ALONE = """
import sys
from transformers import AutoModel, AutoTokenizer
inputs = AutoTokenizer.from_pretrained(sys.argv[1])(["bal", "gol fil"], padding=True, return_tensors="pt")
model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
assert model(**inputs).facet_embeddings.shape == (2, 2, 32) and "multicls" not in sys.modules
"""


def run(*words: object) -> None:
    """Runs Python with the words, from the repository."""
    ran = completed([sys.executable, *words], cwd=REPOSITORY)
    assert ran.returncode == 0, f"{words}\n{ran.stdout}\n{ran.stderr}"


@pytest.mark.walk
@pytest.mark.parametrize("kind", KINDS)
def test_whole_way(kind: str, tiny_corpus: Path, tmp_path: Path) -> None:
    start = save_encoder(kind, tmp_path / "start")
    corpus = ["--input", tiny_corpus.parent / "text", "--output", tmp_path / "corpus"]
    run("data_prep/run.py", *corpus, "--tokenizer", start, "--workers", "1")
    model = ["--model", start, "--corpus", tmp_path / "corpus", "--output_dir", tmp_path / "run"]
    run("pretrain/run.py", "--config", "ds_configs/zero2.json", *model, *PRETRAINING.split())
    for stage in (1, 3) if ALL else ():
        folder = tmp_path / f"zero{stage}"
        words = ["pretrain/run.py", "--config", f"ds_configs/zero{stage}.json", *model[:-1], folder]
        words += [*PRETRAINING.split(), "--run.save_every", "3"]
        run(*TWO_RANKS, *words)
        end = [record for record in read_jsonl(folder / "metrics.jsonl") if record["step"] == 6]
        shutil.rmtree(folder / "checkpoints" / "step_00000006")  # as if killed before it was saved
        (folder / "DONE").unlink()
        run(*words)
        again = [record for record in read_jsonl(folder / "metrics.jsonl") if record["step"] == 6]
        assert again[-1]["loss/total"] == pytest.approx(end[-1]["loss/total"], rel=1e-4)
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    losses = [record["loss/mlm"] for record in records if record["split"] == "validation"]
    assert losses[-1] < losses[0]
    exported = tmp_path / "run" / "hf"
    assert read_json(exported / "config.json")["encoder"]["model_type"] == kind
    run("-I", "-c", ALONE, exported)

    write_tsv(tmp_path / "train.tsv", "text\tlabel", sentiment_rows(120, seed=0))
    write_tsv(tmp_path / "new.tsv", "text\tlabel", sentiment_rows(20, seed=1))
    rows = ["--train_file", tmp_path / "train.tsv", "--output_dir", tmp_path / "compared"]
    run("finetune/compare.py", "--model", f"m={exported}", *rows, *FINE_TUNING.split())
    labelled = tmp_path / "labelled.csv"
    run(
        "finetune/predict.py",
        tmp_path / "compared/model",
        tmp_path / "new.tsv",
        "--output",
        labelled,
    )
    assert len(list(csv.DictReader(labelled.open()))) == 20
    if ALL:
        for split, number in (("train", 40), ("dev", 20)):
            write_tsv(tmp_path / f"SST-2/{split}.tsv", "sentence\tlabel", sentiment_rows(number, 2))
        rows = ["--tasks", "sst2", "--data_dir", tmp_path, "--output_dir", tmp_path / "heads"]
        systems = json.dumps({head: {"head": head} for head in HEADS})
        models = ["--model", f"m={exported}", "--systems", systems]
        run("finetune/grid.py", *models, *rows, "--epochs", "1", "--max_length", "24")
        finished = len(list((tmp_path / "heads").glob("*/*/*/record.json")))
        assert finished == len(HEADS) - (kind == "eurobert")  # its RMSNorm has no bias for cln
