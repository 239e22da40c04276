"""Trains SetFit on the rows of a JSON file and writes the probabilities of others; runs where setfit is installed.

setfit needs transformers 4, so it has an environment of its own: `python -m venv SETFIT` and
`SETFIT/bin/pip install setfit "transformers<5"`. benchmarks/setfit_peer.py starts this script. It imports
nothing of ours.
"""

import json
import sys
from pathlib import Path

from datasets import Dataset
from setfit import SetFitModel, Trainer, TrainingArguments


def main(file: str) -> None:
    """Reads FILE (model, train, texts, classes, seed, max_length, max_steps) and writes FILE.out."""
    job = json.loads(Path(file).read_text(encoding="utf-8"))
    model = SetFitModel.from_pretrained(job["model"], local_files_only=True)
    model.model_body.max_seq_length = job["max_length"]
    arguments = TrainingArguments(
        output_dir=f"{file}.checkpoints",
        num_epochs=1,  # of pairs; setfit's own default, as are the batch, the rates and the sampling
        max_steps=job["max_steps"],
        seed=job["seed"],
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Dataset.from_list(job["train"]))
    trainer.train()
    probabilities = model.predict_proba(job["texts"], as_numpy=True)
    seen = [int(name) for name in model.model_head.classes_]
    rows = [dict(zip(seen, map(float, row), strict=True)) for row in probabilities]
    table = [[row.get(number, 0.0) for number in range(job["classes"])] for row in rows]
    Path(f"{file}.out").write_text(json.dumps(table), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
